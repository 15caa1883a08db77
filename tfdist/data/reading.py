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
from tfdist.data.order import FileSequence, Order, StreamOrder, rows_of_replicas
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
    begin = window_begin(order, window, step)
    rows = tf.range(begin, begin + window.width(order.global_batch), dtype=tf.int64)
    if order.steps > order.full:
        rows = tf.minimum(rows, order.rows(step, tf.minimum) - 1)
    return step * order.global_batch + rows


def window_begin(order: Order, window: Window, step: Any) -> Any:
    """Return the row of a step's batch where the window begins.

    Padded batches are divided among the replicas like full ones.

    Args:
        order: The order.
        window: The rows to read.
        step: Step in the epoch, int64 scalar.

    Returns:
        A number if it is the same in all steps, else an int64 scalar.
    """
    if order.tail == "pad" or order.steps == order.full or not window.first:
        return window.begin(order.global_batch)
    rows = order.rows(step, tf.minimum)
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
        sequence = order.sequence(epoch)
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
        size = order.examples - order.tail_begin
        rest = _segment(source, order.sequence(epoch), order.tail_begin, order.examples)
        places = positions(order, window, last) - order.tail_begin
        indices = order.shuffle_within(epoch, order.streams, places, size)
        tail_rows = rest.batch(size)
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


def _stream(
    source: Source, order: StreamOrder, sequence: FileSequence, epoch, stream, step
) -> tf.data.Dataset:
    """Return the stored examples of one part from a step on, with their numbers."""
    done = step * order.per_stream
    start = stream * order.part
    if not order.shuffle:
        return _segment(source, sequence, start + done, start + order.part)
    block = done // order.block
    in_earlier_blocks = block * order.block
    read = _segment(source, sequence, start + in_earlier_blocks, start + order.part)

    def permuted(index, columns):
        size = tf.size(columns[1], tf.int64)
        offsets = order.shuffle_block(epoch, stream, block + index, tf.range(size), size)
        return tuple(tf.gather(x, offsets) for x in columns)

    blocks = read.batch(order.block).enumerate()
    return blocks.map(permuted).unbatch().skip(done - in_earlier_blocks)


def _segment(source: Source, sequence: FileSequence, begin, end) -> tf.data.Dataset:
    """Return the stored examples of a range of the epoch's file sequence, with their numbers.

    Args:
        source: A source with `scan`.
        sequence: Files of the epoch.
        begin: Position of the first example; a number or an int64 scalar.
        end: Position after the last example, likewise.
    """
    first = tf.reduce_sum(tf.cast(sequence.ends <= begin, tf.int64))
    after = tf.reduce_sum(tf.cast(sequence.starts < end, tf.int64))
    scan = source.scan
    assert scan is not None

    @plain
    def of_file(i):
        file, file_begin, file_end, number = (tf.gather(x, i) for x in sequence)
        skipped = tf.maximum(begin - file_begin, 0)
        count = tf.minimum(file_end, end) - file_begin - skipped
        number += skipped
        return tf.data.Dataset.zip(
            (scan(file, skipped, count), tf.data.Dataset.range(number, number + count))
        )

    indices = tf.data.Dataset.range(first, after)
    if source.fetch is not None:
        # While one file is read, the next one is fetched.
        fetch = source.fetch

        @plain
        def ahead(i):
            with tf.control_dependencies([fetch(tf.gather(sequence.files, i))]):
                return tf.identity(i)

        indices = indices.map(ahead).prefetch(1)
    return indices.flat_map(of_file)
