"""A source, an order and transforms become one share of each global batch; who takes which share is not decided here."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.data.batch_rows import count_rows, cut, fill, plain
from tfdist.data.errors import Errors, guarded
from tfdist.data.order import Order, StreamOrder, example_seeds, rows_of_replicas
from tfdist.data.reading import Example, Window, by_file, by_number, positions, walked, window_begin
from tfdist.data.service import distribute
from tfdist.data.sources.base import Source, call, takes


class ReplicaRows(NamedTuple):
    """Some replicas' rows of one global batch.

    Fields:
        data: As the model takes it, `[rows of the share, ...]`.
        rows: Rows of the global batch, int64 scalar.
        fingerprint: Follows from epoch, step and order, float64 scalar: equal on all workers, or something is wrong.
        numbers: Numbers of the examples, int64 `[rows of the share]`; -1 for padding.
    """

    data: Any
    rows: Any
    fingerprint: Any
    numbers: Any


@dataclasses.dataclass(frozen=True)
class Batches:
    """What a pipeline does, but for where its passes begin; the arguments of `tfdist.data.pipeline`, checked.

    Attributes:
        source: The examples.
        order: Their order; None where the source can only be walked through and does not know how many it has.
        global_batch: Rows of a batch, of all replicas together.
        seed: Of order and transforms.
        tail: "partial", "pad" or "drop".
        buffer: Examples to shuffle a walk among; None: not.
        transform: For single examples.
        batch_transform: For batches, row by row.
        labels: Whether to keep y.
        errors: What becomes of examples that cannot be read.
        options: Of tf.data.
        prefetch: Batches made ahead.
        processors: Threads that can work at once.
        addresses: Of the data workers that make them; none: this process does.
    """

    source: Source
    order: Order | None
    global_batch: int
    seed: int
    tail: str
    buffer: int | None
    transform: Callable[..., Any] | None
    batch_transform: Callable[..., Any] | None
    labels: bool
    errors: Errors
    options: tf.data.Options
    prefetch: int
    processors: int
    addresses: tuple[str, ...] = ()

    def replica_rows(self, window: Window, position: tf.data.Dataset) -> tf.data.Dataset:
        """The window's rows of the batches of one pass.

        Args:
            window: Which replicas' rows.
            position: One pair of epoch and first step, int64 scalars; asked for once in a pass.

        Returns:
            A data set of Shares, equally many whatever the window.
        """
        if self.addresses:

            def make(epoch, first, stride):
                return self._made(window, tf.data.Dataset.from_tensors((epoch, first)), stride)

            steps = None if self.order is None else self.order.steps
            result = distribute(make, position, self.addresses, steps=steps, name=self.source.name)
        else:
            result = self._made(window, position, 1)
        return result.prefetch(self.prefetch).with_options(self.options)

    def _made(self, window: Window, position: tf.data.Dataset, stride: int) -> tf.data.Dataset:
        """Every `stride`-th of the Shares of one pass."""
        if self.order is None:
            return self._of_walk(window, position).shard(stride, 0)
        if isinstance(self.order, StreamOrder):
            return self._of_examples(window, position, stride)
        if self.source.gather is not None and self.transform is None:
            return self._of_memory(window, self._steps(position, stride))
        return self._of_examples(window, position, stride)

    def examples(
        self, window: Window, position: tf.data.Dataset, stride: int = 1
    ) -> tf.data.Dataset:
        """What is read for the window, before it is decoded: a data set of Examples `[width]`; of a walk, single ones of all windows."""
        if self.order is None:
            assert stride == 1, "all examples are walked through"
            return walked(
                self.source,
                self.buffer,
                self._key,
                position.map(plain(lambda epoch, step: (epoch, step * self.global_batch))),
            )
        if isinstance(self.order, StreamOrder):
            return by_file(self.source, self.order, window, position).shard(stride, 0)
        return by_number(self.order, window, self._steps(position, stride))

    def seeds(self, epoch: tf.Tensor, numbers: tf.Tensor) -> Any:
        """For `transform`, int32 `[..., 2]`, of examples `[...]`; nothing where it takes none."""
        if self.transform is None or not takes(self.transform, "seed"):
            return ()
        return example_seeds(self.seed, epoch, numbers)

    def load(self, example: Example, seed: Any) -> Any:
        """One example as it is stored becomes one as it goes into a batch.

        Args:
            example: One of `examples`.
            seed: Its row of `seeds`.
        """
        return self._transformed(
            _checked(self.source, self._read(example, seed), example.number), seed
        )

    # --- The three ways -----------------------------------------------------------------------------------------------
    def _of_memory(self, window: Window, steps: tf.data.Dataset) -> tf.data.Dataset:
        order, gather = self.order, self.source.gather
        assert order is not None
        assert gather is not None
        width = window.width(self.global_batch)

        @plain
        def one(epoch, step):
            numbers = order.numbers(epoch, positions(order, window, step))
            numbers = tf.ensure_shape(numbers, [width])
            return self._rows(window, gather(numbers), numbers, None, epoch, step)

        return steps.map(one, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def _of_examples(
        self, window: Window, position: tf.data.Dataset, stride: int
    ) -> tf.data.Dataset:
        width = window.width(self.global_batch)

        @plain
        def one(example, data, good):
            return self._rows(window, data, example.number, good, example.epoch[0], example.step[0])

        # Of steps with few rows, enough together for all processors. The next ones are begun in any case.
        steps = -(-2 * self.processors // width)
        return self.examples(window, position, stride).interleave(
            plain(lambda examples: self._loaded(examples).map(one)),
            cycle_length=steps,
            block_length=1,
            num_parallel_calls=steps,
            deterministic=True,
        )

    def _loaded(self, examples: Example) -> tf.data.Dataset:
        """The examples of one step, `[width]`, with their data and for which of them it could be had: a data set of one element."""
        width = examples.number.shape[0]
        rows = tf.data.Dataset.from_tensor_slices(
            (examples, self.seeds(examples.epoch[0], examples.number))
        )

        @plain
        def quick(example, seed):
            return Example((), *example[1:]), self.load(example, seed), True

        @plain
        def careful(example, seed):
            guardian = functools.partial(guarded, source=self.source, errors=self.errors)
            if self.errors.allowed:
                return Example((), *example[1:]), *guardian(
                    "read, decoded or transformed", self.load, example, seed
                )
            data, _ = guardian("read or decoded", self._read, example, seed)
            example = Example(_checked(self.source, data, example.number), *example[1:])
            data, good = guardian(
                "transformed",
                lambda example, seed: self._transformed(example.data, seed),
                example,
                seed,
            )
            return Example((), *example[1:]), data, good

        def batch(load):
            return rows.map(load, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).batch(
                width, drop_remainder=True
            )

        # To look after each example by itself takes a sixth of the time. So that is done once one has failed.
        return batch(quick).ignore_errors().concatenate(batch(careful)).take(1)

    def _of_walk(self, window: Window, position: tf.data.Dataset) -> tf.data.Dataset:
        examples = self.examples(window, position)

        @plain
        def load(example):
            return Example(
                self.load(example, self.seeds(example.epoch, example.number)), *example[1:]
            )

        loaded = examples.map(load, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        batches = loaded.batch(self.global_batch, drop_remainder=self.tail == "drop")

        @plain
        def one(example):
            numbers, epoch = example.number, example.epoch[0]
            found = count_rows(numbers)
            data = self._by_rows(example.data, epoch, numbers)
            rows = found
            if self.tail == "pad":
                rows = tf.constant(self.global_batch, tf.int64)
                data, numbers = (
                    fill(data, self.global_batch),
                    fill(numbers + 1, self.global_batch) - 1,
                )
                data = self._weighted(
                    data, tf.range(self.global_batch, dtype=tf.int64) < found, found
                )
            fingerprint = tf.cast(epoch * 31 + numbers[0], tf.float64)
            begin, end = rows_of_replicas(
                rows, window.first, window.count, window.replicas, tf.minimum
            )
            if window.replicas > 1:
                data, numbers = cut(data, begin, end), numbers[begin:end]
            return ReplicaRows(
                data if self.labels else _without_label(data), rows, fingerprint, numbers
            )

        return batches.map(one, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    # --- What they share ------------------------------------------------------------------------------------------------
    def _key(self, epoch: tf.Tensor) -> tf.Tensor:
        both = tf.stack([tf.constant(self.seed, tf.int64), epoch])
        return tf.random.stateless_uniform([], both, None, None, tf.int64, alg="philox")

    def _steps(self, position: tf.data.Dataset, stride: int) -> tf.data.Dataset:
        assert self.order is not None
        count = self.order.steps
        return position.flat_map(
            plain(
                lambda epoch, first: tf.data.Dataset.range(first, count, stride).map(
                    lambda step: (epoch, step)
                )
            )
        )

    def _read(self, example: Example, _: Any) -> Any:
        source = self.source
        if source.walk is not None:
            return example.data
        if source.scan is None:
            return source.single(example.number)
        return example.data if source.decode is None else source.decode(example.data)

    def _transformed(self, data: Any, seed: Any) -> Any:
        if self.transform is None:
            return data
        return (
            call(self.transform, data)
            if isinstance(seed, tuple)
            else call(self.transform, data, seed=seed)
        )

    def _rows(
        self, window: Window, data: Any, numbers: tf.Tensor, good: Any, epoch, step
    ) -> ReplicaRows:
        """`width` examples become the window's rows of their batch."""
        order = self.order
        assert order is not None
        data = self._by_rows(data, epoch, numbers)
        rows = tf.cast(order.rows(step, tf.minimum), tf.int64)
        begin = window_begin(order, window, step)
        width = window.width(self.global_batch)
        uneven = order.steps > order.full
        real = (
            begin + tf.range(width, dtype=tf.int64) < rows if uneven else tf.ones([width], tf.bool)
        )
        if good is not None and self.errors.allowed:
            real &= good
        weighted = self.tail == "pad" or bool(self.errors.allowed)
        if weighted:
            data = self._weighted(data, real, rows if self.tail == "pad" else None)
            numbers = tf.where(real, numbers, -1)
        if uneven and self.tail == "partial":
            end = (
                rows_of_replicas(rows, window.first, window.count, window.replicas, tf.minimum)[1]
                - begin
            )
            data, numbers = cut(data, tf.constant(0, tf.int64), end), numbers[:end]
        # All that the numbers of the batch follow from.
        fingerprint = tf.cast(epoch * 7919 + step, tf.float64) + zlib.crc32(repr(order).encode())
        total = tf.constant(self.global_batch, tf.int64) if self.tail == "pad" else rows
        return ReplicaRows(
            data if self.labels else _without_label(data), total, fingerprint, numbers
        )

    def _by_rows(self, data: Any, epoch, numbers: tf.Tensor) -> Any:
        if self.batch_transform is None:
            return data
        if takes(self.batch_transform, "seeds"):
            return call(self.batch_transform, data, seeds=example_seeds(self.seed, epoch, numbers))
        return call(self.batch_transform, data)

    def _weighted(self, data: Any, real: tf.Tensor, rows: Any) -> Any:
        """Gives a batch sample weights, 0 where a row is not real; the mean over all rows is then that over `rows`."""
        scale = 1.0 if rows is None else self.global_batch / tf.cast(rows, tf.float32)
        weight = tf.cast(real, tf.float32) * scale
        if not self.labels:
            return data
        if not isinstance(data, tuple) or len(data) not in (2, 3):
            raise ValueError(
                f'{self.source.name}: tail="pad" and ignore_errors give rows a sample weight, which takes examples (x, y) or '
                f"(x, y, weight); received {data!r}. Return such from transform=."
            )
        if len(data) == 3:
            own = tf.cast(data[2], tf.float32)
            weight = own * tf.reshape(weight, [-1] + [1] * (own.shape.rank - 1))
        return (data[0], data[1], weight)


def _without_label(data: Any) -> Any:
    return data[0] if isinstance(data, tuple) else data


def _checked(source: Source, data: Any, number: tf.Tensor) -> Any:
    """The example, once its label is known to be one of the classes."""
    if (
        source.classes is None
        or source.labels is not None
        or not (isinstance(data, tuple) and len(data) > 1)
    ):
        return data
    label = data[1]
    if not isinstance(label, tf.Tensor) or not label.dtype.is_integer or label.shape.rank != 0:
        return data
    where = source.describe(number) if source.describe is not None else tf.strings.as_string(number)
    message = f"{source.name}: expected a label from 0 to {source.classes - 1}; received, with the place of its example:"
    right = (label >= 0) & (tf.cast(label, tf.int64) < source.classes)
    with tf.control_dependencies([tf.debugging.Assert(right, [message, label, where])]):
        return (data[0], tf.identity(label), *data[2:])
