"""Test that TFDS' data sets are prepared once, and that each example can be read by its number.

The order is TFDS' own.
"""

import fcntl
import random
import shutil
import socket

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets

from tfdist.data import files_io
from tfdist.data.sources import digits, tfds
from tfdist.data.sources.digits import TfdistDigits


def rows(source):
    return [(x.tobytes(), int(y)) for x, y in source.dataset().as_numpy_iterator()]


class Sharded(tensorflow_datasets.core.GeneratorBasedBuilder):
    """Build 660 numbers in 20 shards, so that TFDS' order is not that of the files."""

    VERSION = tensorflow_datasets.core.Version("1.0.0")

    def _info(self):
        features = tensorflow_datasets.features
        return tensorflow_datasets.core.DatasetInfo(
            builder=self,
            features=features.FeaturesDict(
                {
                    "number": np.int64,
                    "kind": features.ClassLabel(names=["even", "odd"]),
                    "text": features.Text(),
                }
            ),
            supervised_keys=({"a": "number", "b": "text"}, "kind"),
        )

    def _split_generators(self, dl_manager):
        return {
            "train": self._generate_examples(range(660)),
            "test": self._generate_examples(range(660, 690)),
        }

    def _generate_examples(self, numbers):
        for number in numbers:
            yield number, {"number": number, "kind": number % 2, "text": f"number {number}"}


@pytest.fixture(scope="module")
def sharded_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sharded")
    config = tensorflow_datasets.download.DownloadConfig(num_shards=20)
    Sharded(data_dir=directory).download_and_prepare(download_config=config)
    return directory


def test_digits_are_complete_and_split_for_good(digits_dir):
    train, test = (tfds.load("tfdist_digits", split, digits_dir) for split in ("train", "test"))
    assert (train.cardinality, test.cardinality, train.classes) == (1500, 297, 10)
    assert train.class_names == tuple("0123456789")
    images, labels = next(iter(test.dataset().batch(297)))
    assert images.shape == (297, 8, 8, 1)
    assert images.dtype == tf.uint8
    assert (images.numpy().min(), images.numpy().max()) == (0, 255)
    assert np.bincount(labels).min() >= 24
    from sklearn.datasets import load_digits

    original = load_digits()
    assert labels[0] == original.target[6]
    np.testing.assert_array_equal(np.round(images[0, ..., 0] / 255 * 16), original.images[6])
    shipped, shipped_labels = digits._read()
    np.testing.assert_array_equal(np.round(shipped[..., 0] / 255 * 16), original.images)
    np.testing.assert_array_equal(shipped_labels, original.target)


def test_digits_need_no_network(tmp_path, monkeypatch):
    connect = socket.socket.connect
    look_up = socket.getaddrinfo
    here = "127.0.0.1"  # where threads of other tests may look after servers of theirs

    def connects(self, address):
        assert address[0] == here, f"a connection was tried: {address}"
        return connect(self, address)

    def looks_up(host, *rest, **options):
        assert host == here, f"a name was looked up: {host}"
        return look_up(host, *rest, **options)

    monkeypatch.setattr(socket.socket, "connect", connects)
    monkeypatch.setattr(socket, "getaddrinfo", looks_up)
    assert tfds.load("tfdist_digits", "test", tmp_path).cardinality == 297


def test_preparing_draws_no_random_numbers(tmp_path):
    random.seed(1)
    before = random.getstate()
    tfds.load("tfdist_digits", "train", data_dir=tmp_path)
    assert random.getstate() == before


def test_two_processes_prepare_at_the_same_time(tmp_path, run_python_twice):
    code = (
        "import sys; from tfdist import data; s = data.load('tfdist_digits', 'train', sys.argv[1]);"
        "print(s.cardinality, sum(1 for _ in s.dataset()))"
    )
    for out, err in run_python_twice(code, str(tmp_path)):
        assert out.split() == ["1500", "1500"], err


def test_the_wait_for_another_process_ends_and_names_it(tmp_path):
    path = tmp_path / ".prepare.lock"
    with files_io.locked(path, 1.0, "preparing x in y"), open(path) as other:
        with pytest.raises(
            TimeoutError, match=r"Waited 0.1 s for process \d+ on .*, which is preparing x in y"
        ):
            with files_io.locked(path, 0.1, "preparing x in y"):
                pass
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_error_for_an_unknown_name_suggests_the_nearest(digits_dir):
    with pytest.raises(ValueError, match="Did you mean mnist"):
        tfds.load("mnizt", "train")
    with pytest.raises(ValueError, match="expected one of train, test"):
        tfds.load("tfdist_digits", "validation", digits_dir)
    with pytest.raises(ValueError, match=r"split='train\[:0\]': holds no examples"):
        tfds.load("tfdist_digits", "train[:0]", digits_dir)


def test_preparing_in_the_cloud_is_refused():
    class Builder:
        name = "mine"
        data_dir = "gs://bucket/mine/1.0.0"

    with pytest.raises(ValueError, match="tfds build mine"):
        tfds._prepare(Builder(), 1.0)


# --- Order and numbers ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "split", ["train", "train[:10%]", "train[40%:60%]", "test[290:]+train[:3]"]
)
def test_slices_of_one_shard(digits_dir, split):
    source = tfds.load("tfdist_digits", split, digits_dir)
    expected = tensorflow_datasets.load(
        "tfdist_digits", split=split, data_dir=digits_dir, as_supervised=True
    )
    assert rows(source) == [(x.tobytes(), int(y)) for x, y in expected.as_numpy_iterator()]
    assert source.read is not None


@pytest.mark.parametrize("split", ["train", "train[13:570]", "test+train[95%:]"])
def test_the_order_is_that_of_tfds(sharded_dir, split):
    source = tfds.load("sharded", split, sharded_dir)
    expected = list(
        tensorflow_datasets.load(
            "sharded", split=split, data_dir=sharded_dir, as_supervised=True
        ).as_numpy_iterator()
    )
    assert (source.cardinality, source.classes, source.class_names) == (
        len(expected),
        2,
        ("even", "odd"),
    )
    assert list(source.dataset().as_numpy_iterator()) == expected
    places = tf.data.Dataset.range(source.cardinality).map(source.describe)
    assert len(set(places.as_numpy_iterator())) == source.cardinality


def test_interleaving_is_that_of_tf_data():
    random = np.random.default_rng(1)
    for cycle, block in [(2, 3), (16, 16), (3, 1), (4, 16)]:
        lengths = random.choice([0, 1, 2, 15, 16, 17, 32], 23)
        begins = tf.constant(np.cumsum([0, *lengths]), tf.int64)
        files = tf.data.Dataset.range(len(lengths))
        expected = files.interleave(
            lambda file, begins=begins: tf.data.Dataset.range(begins[file], begins[file + 1]),
            cycle_length=cycle,
            block_length=block,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
        assert tfds.interleaved(lengths.tolist(), cycle, block).tolist() == list(
            expected.as_numpy_iterator()
        )


def test_examples_name_their_file(digits_dir):
    source = tfds.load("tfdist_digits", "train[10:20]", digits_dir)
    where = source.describe(tf.constant(0, tf.int64)).numpy().decode()
    assert where.startswith(
        f"{digits_dir}/tfdist_digits/1.0.0/tfdist_digits-train.tfrecord-00000-of-00001, byte "
    )
    assert int(where.split()[-1]) > 0


def test_other_formats_are_read_in_order_or_refused(tmp_path):
    TfdistDigits(data_dir=tmp_path / "parquet", file_format="parquet").download_and_prepare()
    source = tfds.load("tfdist_digits", "test[:20]", tmp_path / "parquet")
    assert (source.read, source.cardinality, len(rows(source))) == (None, 20, 20)
    TfdistDigits(data_dir=tmp_path / "other", file_format="array_record").download_and_prepare()
    with pytest.raises(
        ValueError, match=r'cannot read array_record files .*file_format="tfrecord"'
    ):
        tfds.load("tfdist_digits", "test", tmp_path / "other")


def test_a_shard_with_records_missing_is_refused(digits_dir, tmp_path):
    shutil.copytree(digits_dir, tmp_path / "copy")
    path = tmp_path / "copy/tfdist_digits/1.0.0/tfdist_digits-test.tfrecord-00000-of-00001"
    kept = list(tf.data.TFRecordDataset(str(path)).take(3).as_numpy_iterator())
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in kept:
            writer.write(record)
    with pytest.raises(ValueError, match="expected 297 records, as tfdist_digits says; received 3"):
        tfds.load("tfdist_digits", "test", tmp_path / "copy")
