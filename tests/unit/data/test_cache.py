"""Test which examples a cache keeps, and its error for one that it cannot read."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.cache import cached
from tfdist.data.pipeline import pipeline
from tfdist.data.sources.image_files import image_folder
from tfdist.data.sources.records import records
from tfdist.data.sources.source import of_arrays


@pytest.fixture
def folder(tmp_path):
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        for i in range(3):
            pixels = tf.fill([4 + i, 6, 3], tf.cast(10 * i, tf.uint8))
            (tmp_path / name / f"{i}.png").write_bytes(tf.io.encode_png(pixels).numpy())
    return tmp_path


@pytest.fixture
def labelled(tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        for label in (0, 1, 7, 2):
            feature = {"y": tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))}
            writer.write(
                tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
            )
    return tmp_path / "a.tfrecord"


def resized(image, label):
    return tf.image.resize(image, [2, 2]), label


def test_images_are_kept_as_they_are_stored(folder):
    source = image_folder(folder)
    plain, kept = (
        list(pipeline(source, 2, transform=resized, cache=cache)) for cache in (False, True)
    )
    for (x, y), (image, label) in zip(plain, kept, strict=True):
        np.testing.assert_array_equal(x, image)
        np.testing.assert_array_equal(y, label)
    again = cached(source, True)
    for file in folder.glob("*/*.png"):
        file.unlink()
    assert [image.shape[0] for image, _ in again.dataset()] == [4, 5, 6, 4, 5, 6]


@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_that_cannot_be_read_is_named(folder, mapped):
    source = image_folder(folder)
    if mapped:
        source = source.map(resized)
        (folder / "dogs" / "1.png").write_bytes(b"no image")
    else:
        (folder / "dogs" / "1.png").unlink()
    with pytest.raises(
        ValueError, match=r"images in .*: example 4 \(file .*/dogs/1.png\) cannot be read"
    ):
        cached(source, True)


def test_a_damaged_record_is_named(labelled):
    content = bytearray(labelled.read_bytes())
    content[-6] ^= 1
    labelled.write_bytes(content)
    for access in ("random", "stream"):
        source = records(str(labelled), {"y": "int64"}, access=access)
        with pytest.raises(
            ValueError, match=r"example 3 \(.*a.tfrecord, byte \d+\) cannot be read"
        ):
            cached(source, True)


def test_labels_are_checked(labelled):
    source = records(str(labelled), {"y": "int64"}).map(lambda y: (y, y))
    with pytest.raises(
        ValueError, match=r"expected labels from 0 to 2.* received 7 in .*a.tfrecord, byte \d+"
    ):
        cached(dataclasses.replace(source, classes=3), True)


def test_empty_source_is_refused(tmp_path):
    (tmp_path / "empty.tfrecord").touch()
    with pytest.raises(ValueError, match="has 0 examples"):
        pipeline(records(str(tmp_path / "*.tfrecord"), {"y": "int64"}), 2, cache=True)


def test_sources_in_memory_are_not_cached_again():
    source = of_arrays(np.arange(3))
    assert cached(source, True) is source


def test_no_flipped_bit_of_a_cache_changes_the_data(labelled, tmp_path):
    """Its files are those of a written data set, whose tests flip more bits."""
    source = records(str(labelled), {"y": "int64"})
    directory = tmp_path / "cache"

    def read():
        return [int(y) for y in cached(source, str(directory)).dataset()]

    assert read() == [0, 1, 7, 2]
    files = sorted(path for path in directory.iterdir() if path.suffix != ".lock")
    assert {path.suffix for path in files} == {".json", ".tfrecord", ".tfdist-index"}
    refused = []
    for path in files:
        whole = path.read_bytes()
        for bit in range(3, 8 * len(whole), 2 * len(whole) + 1):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            try:
                assert read() == [0, 1, 7, 2], (path, bit)
            except (ValueError, tf.errors.DataLossError):
                refused.append(path.suffix)
        path.write_bytes(whole)
    assert refused == [".tfrecord"] * 4 + [".json"] * 4
    assert read() == [0, 1, 7, 2]
