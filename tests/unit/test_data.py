"""Digits are prepared offline and once; pipelines yield every example, ordered by seed and epoch alone."""

import builtins
import fcntl
import socket
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tfdist import data
from tfdist.data import sources


def order(dataset):
    return [int(i) for batch in dataset for i in batch]


def numbers(count=20):
    return tf.data.Dataset.range(count)


def test_digits_are_complete_and_split_for_good(digits_dir):
    train, test = (data.load("tfdist_digits", split, digits_dir) for split in ("train", "test"))
    assert (train.cardinality, test.cardinality, train.classes) == (1500, 297, 10)
    images, labels = next(iter(test.dataset().batch(297)))
    assert images.shape == (297, 8, 8, 1)
    assert images.dtype == tf.uint8
    assert (images.numpy().min(), images.numpy().max()) == (0, 255)
    assert np.bincount(labels).min() >= 24
    from sklearn.datasets import load_digits

    original = load_digits()
    assert labels[0] == original.target[6]
    np.testing.assert_array_equal(np.round(images[0, ..., 0] / 255 * 16), original.images[6])


def test_digits_need_no_network(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"a connection was tried: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert data.load("tfdist_digits", "test", tmp_path).cardinality == 297


def test_two_processes_prepare_at_the_same_time(tmp_path):
    code = (
        "import sys; from tfdist import data; s = data.load('tfdist_digits', 'train', sys.argv[1]);"
        "print(s.cardinality, sum(1 for _ in s.dataset()))"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert out.split() == ["1500", "1500"], err


def test_the_wait_for_another_process_ends_and_names_it(tmp_path):
    path = tmp_path / ".prepare.lock"
    with sources._lock(path, 1.0, "preparing x in y"), open(path) as other:
        with pytest.raises(
            TimeoutError, match=r"Waited 0.1 s for process \d+ on .*, which is preparing x in y"
        ):
            with sources._lock(path, 0.1, "preparing x in y"):
                pass
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_preparing_without_scikit_learn_names_the_extra(tmp_path, monkeypatch):
    original = builtins.__import__

    def without_sklearn(name, *args, **kwargs):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_sklearn)
    with pytest.raises(ValueError, match=r"pip install tfdist\[digits\]"):
        data.load("tfdist_digits", "test", tmp_path)


def test_unknown_names_come_with_the_nearest(digits_dir):
    with pytest.raises(ValueError, match="Did you mean mnist"):
        data.load("mnizt", "train")
    with pytest.raises(ValueError, match="expected one of train, test"):
        data.load("tfdist_digits", "validation", digits_dir)
    assert data.load("tfdist_digits", "train[:10%]", digits_dir).cardinality == 150


def test_preparing_in_the_cloud_is_refused():
    class Builder:
        name, data_dir = "mine", "gs://bucket/mine/1.0.0"

    with pytest.raises(ValueError, match="tfds build mine"):
        sources._prepare(Builder(), 1.0)


def test_each_epoch_has_its_order_whatever_the_global_seed():
    pipeline = data.pipeline(numbers(), 6, seed=3)
    epochs = [order(pipeline) for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    for seed in (1, 2):
        tf.random.set_seed(seed)
        again = data.pipeline(numbers(), 6, seed=3)
        assert [order(again) for _ in range(3)] == epochs
    assert order(data.pipeline(numbers(), 6, seed=4)) != epochs[0]


def test_the_next_epoch_can_be_set():
    pipeline = data.pipeline(numbers(), 6, cache=True)
    epochs = [order(pipeline) for _ in range(3)]
    pipeline.epochs.next = 1
    assert [order(pipeline), order(pipeline)] == epochs[1:]


@pytest.mark.parametrize("shuffle", [False, 1])
def test_without_shuffle_the_order_is_the_source_s(shuffle):
    assert order(data.pipeline(numbers(), 6, shuffle=shuffle)) == list(range(20))


def test_a_small_buffer_moves_examples_but_little():
    places = order(data.pipeline(numbers(100), 10, shuffle=5))
    assert sorted(places) == list(range(100))
    assert places != sorted(places)
    assert all(example < place + 5 for place, example in enumerate(places))


def test_batches_are_global_and_counted():
    assert [len(b) for b in data.pipeline(numbers(), 6)] == [6, 6, 6, 2]
    assert int(data.pipeline(numbers(), 6).cardinality()) == 4
    assert [len(b) for b in data.pipeline(numbers(), 6, drop_remainder=True)] == [6, 6, 6]
    unknown = numbers().filter(lambda i: i % 2 == 0)
    assert [len(b) for b in data.pipeline(unknown, 6)] == [6, 4]


def test_arrays_and_transform():
    x = {"a": np.arange(5.0), "b": np.zeros([5, 2])}
    pipeline = data.pipeline((x, np.arange(5)), 5, shuffle=False, transform=lambda x, y: (x["a"] * 2, y))
    features, labels = next(iter(pipeline))
    np.testing.assert_array_equal(features, 2 * labels.numpy())


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ((np.zeros(5), np.zeros(4)), {}, "equal length, received 5, 4 rows"),
        (3, {}, "received int"),
        ([], {}, "received list"),
        (np.zeros(0), {}, "0 examples, which make no batch"),
        (
            np.zeros(5),
            {"drop_remainder": True},
            "arrays has 5 examples, which make no batch of global_batch=8",
        ),
        (np.zeros(5), {"global_batch": 0}, "global_batch: expected a number of examples"),
        (np.zeros(5), {"global_batch": True}, "global_batch: expected a number of examples"),
        (np.zeros(5), {"shuffle": 0}, "shuffle: expected a number of examples"),
    ],
)
def test_bad_input_is_refused(source, options, message):
    with pytest.raises(ValueError, match=message):
        data.pipeline(source, **{"global_batch": 8, **options})


def test_data_without_end_is_refused():
    with pytest.raises(ValueError, match="never ends"):
        data.pipeline(tf.data.Dataset.range(3).repeat(), 8)
