"""Define data pipelines for test_audit.py, of files in the directory that AUDITED names."""

import dataclasses
import os
import pathlib
import time

import numpy as np
import tensorflow as tf

from tfdist.data import pipeline
from tfdist.data.sources.image_files import image_folder
from tfdist.data.sources.records import records
from tfdist.data.sources.source import Source

DIRECTORY = pathlib.Path(os.environ.get("AUDITED", ""))  # the test itself only writes
BROKEN = 13  # of the images


def write_images(directory, classes=3, each=9):
    """Write small JPEG files, one of which is truncated."""
    for label in range(classes):
        (directory / f"class-{label}").mkdir(parents=True)
        for number in range(each):
            pixels = np.random.default_rng(each * label + number).integers(
                0, 255, (12 + number, 10, 3), np.uint8
            )
            stored = tf.io.encode_jpeg(pixels).numpy()
            is_broken = each * label + number == BROKEN
            (directory / f"class-{label}" / f"{number}.jpg").write_bytes(
                stored[:100] if is_broken else stored
            )


def write_records(directory, lengths):
    """Write record files of these lengths; each record holds its number, as text."""
    directory.mkdir()
    number = 0
    for file, length in enumerate(lengths):
        with tf.io.TFRecordWriter(str(directory / f"{file}.tfrecord")) as writer:
            for _ in range(length):
                writer.write(str(number).encode())
                number += 1


def images(ignore_errors=1):
    def small(image, label, seed):
        image = tf.image.resize(tf.cast(image, tf.float32), [8, 8])
        return tf.image.stateless_random_flip_left_right(image, seed), label

    return pipeline(
        image_folder(DIRECTORY / "images"), 6, transform=small, ignore_errors=ignore_errors
    )


def all_images():
    return images(ignore_errors=0)


def random_records():
    return pipeline(records(DIRECTORY / "records", access="random"), 12, seed=3, tail="drop")


def stream():
    return pipeline(
        records(DIRECTORY / "records", access="stream"),
        12,
        shuffle=40,
        tail="pad",
        transform=lambda x: (x, 0),
    )


def slow_stream():
    """Return a data pipeline that yields about 20 examples a second on each worker."""

    def slow(record):
        def wait(x):
            time.sleep(0.05)
            return x

        return tf.ensure_shape(tf.numpy_function(wait, [record], tf.string), [])

    return pipeline(
        records(DIRECTORY / "records", access="stream"), 12, transform=slow, shuffle=30, threads=1
    )


@dataclasses.dataclass
class Defective:
    """Run a data pipeline whose second worker takes a row of the first worker's.

    This happens in one step of its second epoch.
    """

    whole: tf.data.Dataset

    def __getattr__(self, name):
        return getattr(self.whole, name)

    def replica_rows(self, first, count, replicas, **options):
        shares = self.whole.replica_rows(first, count, replicas, **options)
        if first == 0:
            return shares
        epochs = self.whole.epochs
        stolen = self.whole.order.batch(1, 2)[:1]

        def wrong(step, share):
            epoch = tf.numpy_function(lambda: np.int64(epochs.next - 1), [], tf.int64)
            numbers = tf.concat([share.numbers[:1], stolen, share.numbers[2:]], 0)
            return share._replace(
                numbers=tf.where((epoch == 1) & (step == 2), numbers, share.numbers)
            )

        return shares.enumerate().map(wrong)


def defective():
    source = Source.of((np.arange(40, dtype=np.float32), np.arange(40) % 4))
    source = dataclasses.replace(
        source,
        describe=lambda number: tf.strings.join(
            ["row ", tf.strings.as_string(number), " of an array"]
        ),
    )
    return Defective(pipeline(source, 8))
