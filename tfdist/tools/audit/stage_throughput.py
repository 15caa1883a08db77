"""Throughput of a data pipeline up to each of its stages.

Each stage is measured in a data pipeline that ends right after it. The differences show the cost of
each stage.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.data.batches import Batches
from tfdist.data.order import StreamOrder
from tfdist.data.reading import Window

_ENDLESS = 1 << 40  # epochs
_SAMPLE = 256  # examples whose stored bytes are counted


class Stage(NamedTuple):
    """Throughput of a data pipeline that ends after this stage.

    Attributes:
        name: Name of the stage.
        rate: Examples per second of all stages up to this one.
    """

    name: str
    rate: float


def measure(batches: Batches, window: Sequence[int], seconds: float) -> Iterator[Stage]:
    """Run the stages one after the other, each with all stages before it.

    Args:
        batches: Definition of the data pipeline.
        window: First replica, number of replicas, and number of all replicas, which select the rows
            to read.
        seconds: Duration of each measurement. Each stage first runs half as long unmeasured,
            because tf.data tunes itself.

    Yields:
        Each stage as soon as it is measured.
    """
    replica_window = Window(*window)
    width = replica_window.width(batches.global_batch)
    # Without an order, the source reads all rows of a batch to get the rows of this window.
    read = batches.global_batch if batches.order is None else width
    in_memory = batches.source.gather is not None and batches.transform is None
    if in_memory:  # data in memory is gathered by the batch, not as single examples
        yield Stage(
            "order",
            _rate(
                batches.examples(replica_window, _epochs()).with_options(batches.options),
                lambda _: width,
                seconds,
            ),
        )
    for name, dataset in () if in_memory else _of_examples(batches, replica_window):
        # tf.data counts the examples by window: no Python or function call for each example.
        windows = dataset.window(read, drop_remainder=True).map(lambda *_: tf.constant(0))
        yield Stage(name, _rate(windows.with_options(batches.options), lambda _: width, seconds))
    rows = batches.replica_rows(replica_window, _epochs())
    yield Stage("batch", _rate(rows, lambda rows: int(tf.size(rows.numbers)), seconds))


def stored_bytes(batches: Batches) -> float | None:
    """Return the mean size in bytes of a stored example, or None if it is unknown.

    The mean is taken over a sample of the examples.
    """
    source = batches.source
    if source.gather is not None:  # the data is in memory
        return None
    if source.raw is not None and source.cardinality:
        count = min(_SAMPLE, source.cardinality)
        numbers = tf.range(count, dtype=tf.int64) * (source.cardinality // count)
        stored = _read(batches, tf.data.Dataset.from_tensor_slices(numbers), source.raw)
    elif source.scan is not None:
        stored = (
            batches.examples(Window(), _epochs())
            .unbatch()
            .take(_SAMPLE)
            .map(lambda example: example.data)
        )
    else:
        return None
    sizes = [int(size) for size in stored.map(tf.strings.length)]
    return sum(sizes) / len(sizes) if sizes else None


def _of_examples(batches: Batches, window: Window) -> Iterator[tuple[str, tf.data.Dataset]]:
    """Yield the name and dataset of each stage that handles single examples."""
    source = batches.source
    single_examples = batches.examples(window, _epochs())
    if source.walk is None:
        single_examples = single_examples.unbatch()
    if source.walk is not None or isinstance(batches.order, StreamOrder):
        yield "read", single_examples
    else:
        yield "order", single_examples
        if source.raw is not None:
            raw = source.raw
            yield "read", _read(batches, single_examples, lambda example: raw(example.number))
    if source.walk is None:
        name = "decode" if source.raw is not None or source.scan is not None else "read and decode"
        yield name, _loaded(dataclasses.replace(batches, transform=None), single_examples)
    if batches.transform is not None:
        yield "transform", _loaded(batches, single_examples)


def _loaded(batches: Batches, single_examples: tf.data.Dataset) -> tf.data.Dataset:
    return _read(
        batches,
        single_examples,
        lambda example: batches.load(example, batches.seeds(example.epoch, example.number)),
    )


def _read(
    batches: Batches, dataset: tf.data.Dataset, function: Callable[..., Any]
) -> tf.data.Dataset:
    """Map a function over a dataset, and skip errors where the data pipeline skips them."""
    read = _mapped(dataset, function)
    return read.ignore_errors() if batches.errors.allowed else read


def _mapped(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """Map a function over a dataset with the options that the data pipeline uses."""
    return dataset.map(function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _epochs() -> tf.data.Dataset:
    """Return a dataset of endless epochs, each read from its beginning.

    A small source then lasts as long as its measurement.
    """
    return tf.data.Dataset.range(_ENDLESS).map(lambda epoch: (epoch, tf.constant(0, tf.int64)))


def _rate(dataset: tf.data.Dataset, count: Callable[[Any], int], seconds: float) -> float:
    """Measure the examples per second of a dataset."""
    iterator = iter(dataset)
    end = time.monotonic() + seconds / 2
    next(iterator)
    while time.monotonic() < end:
        next(iterator)
    begin = time.monotonic()
    examples = 0
    while (passed := time.monotonic() - begin) < seconds or not examples:
        examples += count(next(iterator))
    return examples / passed
