"""Readers of the rows of some replicas in each global batch, not yet decoded.

The capabilities of the source decide between three ways of reading: single examples by number,
files from beginning to end, or all elements of a `tf.data.Dataset`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.data.batch_rows import plain
from tfdist.data.order import Order, StreamOrder, rows_of_replicas
from tfdist.data.sources.source import Source


@dataclasses.dataclass(frozen=True)
class Window:
    """The rows of each global batch that belong to a range of replicas.

    Attributes:
        first: Index of the first replica.
        count: Number of consecutive replicas.
        replicas: Total number of replicas. It divides the global batch, unless the batch is read as
            a whole.
    """

    first: int = 0
    count: int = 1
    replicas: int = 1

    def width(self, global_batch: int) -> int:
        """Return the number of rows of a full batch in the window.

        Args:
            global_batch: Rows of the global batch.
        """
        return global_batch // self.replicas * self.count

    def begin(self, global_batch: int) -> int:
        """Return the row of a full batch where the window begins.

        Args:
            global_batch: Rows of the global batch.
        """
        return global_batch // self.replicas * self.first


class Example(NamedTuple):
    """An example before it is decoded, or all examples of a step, `[width]`.

    Attributes:
        data: The data as stored, or as a dataset yields them; () if the example is read by number.
        number: Number of the example, int64.
        epoch: Epoch, int64.
        step: Step in the epoch, int64.
    """

    data: Any
    number: Any
    epoch: Any
    step: Any


def positions(order: Order, window: Window, step: Any) -> tf.Tensor:
    """Return the positions of the window's rows of one batch in the epoch's order.

    Args:
        order: The order.
        window: The rows to read.
        step: Step in the epoch, int64 scalar.

    Returns:
        int64 `[width]`. In a batch that is not full, rows beyond its end repeat its last example.
    """
    row = window_begin(order, window, step) + tf.range(
        window.width(order.global_batch), dtype=tf.int64
    )
    return step * order.global_batch + tf.minimum(row, order.rows(step, tf.minimum) - 1)


def window_begin(order: Order, window: Window, step: Any) -> tf.Tensor:
    """Return the row of a step's batch where the window begins, int64 scalar.

    Padded batches are divided among the replicas like full ones.

    Args:
        order: The order.
        window: The rows to read.
        step: Step in the epoch, int64 scalar.
    """
    rows = tf.cast(
        order.global_batch if order.tail == "pad" else order.rows(step, tf.minimum), tf.int64
    )
    return rows_of_replicas(rows, window.first, window.count, window.replicas, tf.minimum)[0]


def by_number(order: Order, window: Window, steps: tf.data.Dataset) -> tf.data.Dataset:
    """Return the numbers of the window's examples, step by step.

    Args:
        order: The order.
        window: The rows to read.
        steps: Pairs of epoch and step, int64 scalars.

    Returns:
        A dataset of Examples `[width]` without data.
    """
    width = window.width(order.global_batch)

    @plain
    def numbers(epoch, step):
        order_numbers = tf.ensure_shape(
            order.numbers(epoch, positions(order, window, step)), [width]
        )
        return Example((), order_numbers, tf.fill([width], epoch), tf.fill([width], step))

    return steps.map(numbers, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def by_file(
    source: Source, order: StreamOrder, window: Window, position: tf.data.Dataset
) -> tf.data.Dataset:
    """Read the window's examples from files, each from its beginning to its end.

    Args:
        source: A source with `scan`.
        order: Order of the source.
        window: The rows to read.
        position: One pair of epoch and first step, int64 scalars.

    Returns:
        A dataset of Examples `[width]` with stored data.
    """
    per = order.per_stream
    begin = window.begin(order.global_batch)
    width = window.width(order.global_batch)
    first = begin // per
    streams = math.ceil((begin + width) / per) - first

    @plain
    def full(epoch, step):
        sequence = _sequence(order, epoch)
        parts = tf.data.Dataset.range(first, first + streams)
        rows = parts.interleave(
            lambda stream: _stream(source, order, sequence, epoch, stream, step),
            cycle_length=streams,
            block_length=per,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        ).enumerate()
        own = streams * per
        if own > width:  # other workers read parts at the window's ends too
            skipped = begin - first * per
            rows = rows.filter(lambda i, _: (i % own >= skipped) & (i % own < skipped + width))
        return rows.map(lambda i, row: Example(row[0], row[1], epoch, step + i // own))

    @plain
    def tail(epoch, step):
        last = tf.constant(order.full, tf.int64)
        rest = _segment(
            source,
            _sequence(order, epoch),
            tf.constant(order.tail_begin, tf.int64),
            tf.constant(order.examples, tf.int64),
        )
        indices = order.sequence_positions(epoch, positions(order, window, last)) - order.tail_begin
        tail_rows = rest.batch(order.examples - order.tail_begin)
        rows = tail_rows.flat_map(
            lambda *columns: tf.data.Dataset.from_tensor_slices(
                tuple(tf.gather(x, indices) for x in columns)
            )
        )
        selected = rows.take(tf.where(step <= last, tf.constant(-1, tf.int64), 0))
        return selected.map(lambda stored, number: Example(stored, number, epoch, last))

    # Read the position only once: each read begins an epoch.
    if order.steps == order.full:
        examples = position.flat_map(full)
    elif not order.full:
        examples = position.flat_map(tail)
    else:
        examples = position.flat_map(
            plain(lambda epoch, step: full(epoch, step).concatenate(tail(epoch, step)))
        )
    return examples.batch(width, drop_remainder=True)


def by_walk(
    source: Source, buffer: int | None, key: Callable[[Any], tf.Tensor], position: tf.data.Dataset
) -> tf.data.Dataset:
    """Read all examples of a source with `walk`, in an epoch's order.

    Args:
        source: A source with `walk`.
        buffer: Number of examples in the shuffle buffer; None: the source's order.
        key: Function from the epoch to the seed of its shuffle, int64 scalar.
        position: One pair of epoch and first example, int64 scalars. Earlier examples are read and
            discarded.

    Returns:
        A dataset of Examples whose steps are 0.
    """
    assert source.walk is not None
    examples = source.walk().enumerate()

    @plain
    def one_epoch(epoch, first):
        # tf.data mixes TensorFlow's global seed in. Inside this function, that is the seed of the
        # function's own graph.
        tf.compat.v1.set_random_seed(1)
        shuffled = examples
        if buffer is not None:
            shuffled = examples.shuffle(buffer, seed=key(epoch), reshuffle_each_iteration=False)
        return shuffled.skip(first).map(
            lambda number, data: Example(data, number, epoch, tf.constant(0, tf.int64))
        )

    return position.flat_map(one_epoch)


class _Sequence(NamedTuple):
    """The files of an epoch in the order in which they are read.

    Attributes:
        files: Numbers of the files, int64 `[files]`.
        starts: Position where each file begins, int64 `[files]`.
        ends: Position where each file ends, int64 `[files]`.
        numbers: Number of the first example of each file, int64 `[files]`.
    """

    files: tf.Tensor
    starts: tf.Tensor
    ends: tf.Tensor
    numbers: tf.Tensor


def _sequence(order: StreamOrder, epoch) -> _Sequence:
    files = order.files(epoch)
    ends = order.ends(epoch)
    lengths = tf.constant(order.lengths, tf.int64)
    return _Sequence(
        files,
        ends - tf.gather(lengths, files),
        ends,
        tf.gather(tf.cumsum(lengths, exclusive=True), files),
    )


def _stream(
    source: Source, order: StreamOrder, sequence: _Sequence, epoch, stream, step
) -> tf.data.Dataset:
    """Return the stored examples of one part from a step on, with their numbers."""
    done = step * order.per_stream
    block = done // order.block
    start = stream * order.part
    read = _segment(source, sequence, start + block * order.block, start + order.part)

    def permuted(index, columns):
        first = (block + index) * order.block
        within = first + tf.range(tf.size(columns[1], tf.int64))
        offsets = (
            order.shuffle_within(epoch, tf.fill(tf.shape(within), stream), within, order.part)
            - first
        )
        return tuple(tf.gather(x, offsets) for x in columns)

    return (
        read.batch(order.block).enumerate().map(permuted).unbatch().skip(done - block * order.block)
    )


def _segment(source: Source, sequence: _Sequence, begin, end) -> tf.data.Dataset:
    """Return the stored examples of a range of the epoch's file sequence, with their numbers.

    Args:
        source: A source with `scan`.
        sequence: Files of the epoch.
        begin: Position of the first example.
        end: Position after the last example.
    """
    first = tf.searchsorted(sequence.ends, [begin], side="right", out_type=tf.int64)[0]
    after = tf.searchsorted(sequence.starts, [end], side="left", out_type=tf.int64)[0]
    scan = source.scan
    assert scan is not None

    @plain
    def of_file(i):
        skipped = tf.maximum(begin - sequence.starts[i], 0)
        count = tf.minimum(sequence.ends[i], end) - sequence.starts[i] - skipped
        number = sequence.numbers[i] + skipped
        return tf.data.Dataset.zip(
            (
                scan(sequence.files[i], skipped, count),
                tf.data.Dataset.range(number, number + count),
            )
        )

    indices = tf.data.Dataset.range(first, after)
    if source.fetch is not None:
        # While one file is read, the next one is fetched.
        fetch = source.fetch

        @plain
        def ahead(i):
            with tf.control_dependencies([fetch(sequence.files[i])]):
                return tf.identity(i)

        indices = indices.map(ahead).prefetch(1)
    return indices.flat_map(of_file)
