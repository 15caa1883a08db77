"""Batches of some replicas: read, decode and transform their rows of each global batch.

The caller chooses the replicas; see `tfdist.data.reading.Window`.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.data.batch_rows import count_rows, cut, fill, plain
from tfdist.data.errors import Errors, guarded
from tfdist.data.order import (
    Order,
    StreamOrder,
    example_seeds,
    random_bits,
    rows_of_replicas,
)
from tfdist.data.reading import (
    Example,
    Window,
    by_file,
    by_number,
    by_walk,
    positions,
    window_begin,
)
from tfdist.data.service import distribute
from tfdist.data.sources.source import Source, call, takes
from tfdist.keras_compat.python_arrays import calls_python, copy_rows


class ReplicaRows(NamedTuple):
    """Rows of one global batch that belong to some replicas.

    Attributes:
        data: Batch for the model, `[replica_rows, ...]`.
        rows: Number of rows of the global batch, int64 scalar.
        fingerprint: Checksum of epoch, step and order, float64 scalar. It is equal on all workers;
            otherwise the workers read different batches.
        numbers: Numbers of the examples, int64 `[replica_rows]`; -1 for padding.
    """

    data: Any
    rows: Any
    fingerprint: Any
    numbers: Any


@dataclasses.dataclass(frozen=True)
class Batches:
    """Configuration of a data pipeline: the checked arguments of `tfdist.data.pipeline`.

    Only the epoch and step where a pass begins are given separately.

    Attributes:
        source: The examples.
        order: Order of the examples; None if the source has only `walk` and does not know its
            number of examples.
        global_batch: Rows of a batch, summed over all replicas.
        seed: Seed of order and transforms.
        tail: Treatment of the last examples: "partial", "pad" or "drop".
        buffer: Size in examples of the shuffle buffer of a source with `walk`; None: no shuffle.
        transform: Function of single examples.
        batch_transform: Function of batches that treats each row by itself.
        labels: Whether to keep y.
        errors: Record of examples that cannot be read, with the number allowed.
        options: Options of `tf.data`.
        prefetch: Number of batches prefetched.
        processors: Number of threads that can run at once.
        addresses: Addresses of the data workers that make the batches; empty: this process makes
            them.
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
        """Return the window's rows of the batches of one pass.

        Args:
            window: The replicas whose rows are read.
            position: One pair of epoch and first step, int64 scalars; read once in each pass.

        Returns:
            A dataset of ReplicaRows; the number of elements is the same for every window.
        """
        if self.addresses:

            def make(epoch, first, stride):
                begin = tf.data.Dataset.from_tensors((epoch, first))
                return self._make(window, begin, stride).with_options(self._fusion())

            steps = None if self.order is None else self.order.steps
            result = distribute(make, position, self.addresses, steps=steps, name=self.source.name)
        else:
            result = self._make(window, position, 1)
        result = result.prefetch(self.prefetch).with_options(self.options)
        return result.with_options(self._fusion())

    def _fusion(self) -> tf.data.Options:
        """Return options that keep TensorFlow from fusing what it cannot."""
        options = tf.data.Options()
        # TensorFlow fails to fuse `map` and `batch` where the former uses a resource.
        if self._traced_read.uses_resources or self._traced_transform.uses_resources:
            options.experimental_optimization.map_and_batch_fusion = False
        return options

    def _make(self, window: Window, position: tf.data.Dataset, stride: int) -> tf.data.Dataset:
        """Return every `stride`-th of the ReplicaRows of one pass."""
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
        """Return the examples that are read for the window, before they are decoded.

        Args:
            window: The replicas whose rows are read.
            position: One pair of epoch and first step, int64 scalars; read once in each pass.
            stride: Distance between the steps read; default: 1.

        Returns:
            A dataset of Examples `[width]`. If the source has `walk`, a dataset of single Examples
            of all windows.
        """
        if self.order is None:
            assert stride == 1, "all examples are walked through"
            return by_walk(
                self.source,
                self.buffer,
                self._key,
                position.map(plain(lambda epoch, step: (epoch, step * self.global_batch))),
            )
        if isinstance(self.order, StreamOrder):
            return by_file(self.source, self.order, window, position).shard(stride, 0)
        return by_number(self.order, window, self._steps(position, stride))

    def seeds(self, epoch: tf.Tensor, numbers: tf.Tensor) -> Any:
        """Return the seeds for `transform`, int32 `[..., 2]`; () if it takes no seed.

        Args:
            epoch: Epoch, int64 scalar.
            numbers: Numbers of examples, int64 `[...]`.
        """
        if self.transform is None or not takes(self.transform, "seed"):
            return ()
        return example_seeds(self.seed, epoch, numbers)

    def load(self, example: Example, seed: Any) -> Any:
        """Decode, check and transform one example.

        Args:
            example: An element of `examples`.
            seed: The example's row of `seeds`.

        Returns:
            The example as it goes into a batch.
        """
        walked = self.source.walk is not None
        data = example.data if walked else self._traced_read(example, seed)
        data = _check_label(self.source, data, example.number)
        return data if self.transform is None else self._traced_transform(data, seed)

    @functools.cached_property
    def _traced_read(self) -> _Traced:
        return _Traced(self._read)

    @functools.cached_property
    def _traced_transform(self) -> _Traced:
        return _Traced(self._apply_transform)

    # --- Three ways of reading ------------------------------------------------------------------
    def _of_memory(self, window: Window, steps: tf.data.Dataset) -> tf.data.Dataset:
        order = self.order
        gather = self.source.gather
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

        # Enough steps at once to keep all processors busy if a step has few rows. The following
        # steps are started in any case.
        steps = -(-2 * self.processors // width)
        return self.examples(window, position, stride).interleave(
            plain(lambda examples: self._loaded(examples).map(one)),
            cycle_length=steps,
            block_length=1,
            num_parallel_calls=steps,
            deterministic=True,
        )

    def _loaded(self, examples: Example) -> tf.data.Dataset:
        """Load the examples of one step, `[width]`.

        Returns:
            A dataset of one element: the examples, their data, and which of them could be loaded.
        """
        width = examples.number.shape[0]
        rows = tf.data.Dataset.from_tensor_slices(
            (examples, self.seeds(examples.epoch[0], examples.number))
        )

        @plain
        def quick(example, seed):
            return Example((), *example[1:]), self.load(example, seed), True

        @plain
        def careful(example, seed):
            guard = functools.partial(guarded, source=self.source, errors=self.errors)
            if self.errors.allowed:
                return Example((), *example[1:]), *guard(
                    "read, decoded or transformed", self.load, example, seed
                )
            data, good = guard("read or decoded", self._traced_read, example, seed)
            data = _check_label(self.source, data, example.number)
            if self.transform is not None:
                data, good = guard(
                    "transformed",
                    lambda example, seed: self._traced_transform(example.data, seed),
                    Example(data, *example[1:]),
                    seed,
                )
            return Example((), *example[1:]), data, good

        def batch(load):
            return rows.map(load, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).batch(
                width, drop_remainder=True
            )

        # Guarding each example by itself costs a sixth of the time, so it is done only for steps
        # where an example failed.
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
            numbers = example.number
            epoch = example.epoch[0]
            real_rows = count_rows(numbers)
            data = self._apply_batch_transform(example.data, epoch, numbers)
            rows = real_rows
            if self.tail == "pad":
                rows = tf.constant(self.global_batch, tf.int64)
                data = fill(data, self.global_batch)
                numbers = fill(numbers + 1, self.global_batch) - 1
                data = self._add_weights(
                    data, tf.range(self.global_batch, dtype=tf.int64) < real_rows, real_rows
                )
            fingerprint = tf.cast(epoch * 31 + numbers[0], tf.float64)
            begin, end = rows_of_replicas(
                rows, window.first, window.count, window.replicas, tf.minimum
            )
            if window.replicas > 1:
                data = cut(data, begin, end)
                numbers = numbers[begin:end]
            return ReplicaRows(
                data if self.labels else _without_label(data), rows, fingerprint, numbers
            )

        return batches.map(one, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    # --- Shared helpers -------------------------------------------------------------------------
    def _key(self, epoch: tf.Tensor) -> tf.Tensor:
        return random_bits([], tf.stack([tf.constant(self.seed, tf.int64), epoch]), tf.int64)

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

    def _read(self, example: Example, seed: Any) -> Any:
        source = self.source
        if source.scan is None:
            return source.single(example.number)
        return example.data if source.decode is None else source.decode(example.data)

    def _apply_transform(self, data: Any, seed: Any) -> Any:
        assert self.transform is not None
        return (
            call(self.transform, data)
            if isinstance(seed, tuple)
            else call(self.transform, data, seed=seed)
        )

    def _rows(
        self, window: Window, data: Any, numbers: tf.Tensor, good: Any, epoch, step
    ) -> ReplicaRows:
        """Convert `width` examples to the window's rows of their batch."""
        order = self.order
        assert order is not None
        data = self._apply_batch_transform(data, epoch, numbers)
        width = window.width(self.global_batch)
        uneven = order.steps > order.full
        begin = window_begin(order, window, step)
        rows = tf.constant(self.global_batch, tf.int64)
        if uneven:
            rows = order.rows(step, tf.minimum)
        if self.tail == "pad" or self.errors.allowed:
            is_real = tf.ones([width], tf.bool)
            if uneven:
                is_real = begin + tf.range(width, dtype=tf.int64) < rows
            if good is not None and self.errors.allowed:
                is_real &= good
            data = self._add_weights(data, is_real, rows if self.tail == "pad" else None)
            numbers = tf.where(is_real, numbers, -1)
        if uneven and self.tail == "partial":
            end = (
                rows_of_replicas(rows, window.first, window.count, window.replicas, tf.minimum)[1]
                - begin
            )
            data = cut(data, tf.constant(0, tf.int64), end)
            numbers = numbers[:end]
        # Covers everything that determines the batch's example numbers.
        fingerprint = tf.cast(epoch * 7919 + step, tf.float64) + zlib.crc32(repr(order).encode())
        total = tf.constant(self.global_batch, tf.int64) if self.tail == "pad" else rows
        return ReplicaRows(
            data if self.labels else _without_label(data), total, fingerprint, numbers
        )

    def _apply_batch_transform(self, data: Any, epoch, numbers: tf.Tensor) -> Any:
        if self.batch_transform is None:
            return data
        if takes(self.batch_transform, "seeds"):
            data = call(self.batch_transform, data, seeds=example_seeds(self.seed, epoch, numbers))
        else:
            data = call(self.batch_transform, data)
        python = calls_python(tf.compat.v1.get_default_graph())
        return copy_rows(data) if python else data

    def _add_weights(self, data: Any, real: tf.Tensor, rows: Any) -> Any:
        """Add sample weights to a batch: 0 for rows that are not real examples.

        If `rows` is given, the weights are scaled so that the mean over all rows is the mean over
        `rows` rows.
        """
        scale = 1.0 if rows is None else self.global_batch / tf.cast(rows, tf.float32)
        weight = tf.cast(real, tf.float32) * scale
        if not self.labels:
            return data
        if not isinstance(data, tuple) or len(data) not in (2, 3):
            raise ValueError(
                f'{self.source.name}: tail="pad" and ignore_errors add sample weights. Expected '
                f"examples (x, y) or (x, y, weight); received {data!r}. Return a tuple like that "
                "from transform=."
            )
        if len(data) == 3:
            own = tf.cast(data[2], tf.float32)
            weight = own * tf.reshape(weight, [-1] + [1] * (own.shape.rank - 1))
        return (data[0], data[1], weight)


class _Traced:
    """Function that is traced once, for all windows and for both ways of loading.

    Attributes:
        uses_resources: Whether it uses a lookup table, a variable or another resource.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = tf.function(function, autograph=False)
        self.uses_resources = False

    def __call__(self, *args: Any) -> Any:
        captured = self._function.get_concrete_function(*args).captured_inputs
        self.uses_resources |= any(x.dtype == tf.resource for x in captured)
        return self._function(*args)


def _without_label(data: Any) -> Any:
    return data[0] if isinstance(data, tuple) else data


def _check_label(source: Source, data: Any, number: tf.Tensor) -> Any:
    """Return the example after a check that its label is one of the classes."""
    if (
        source.classes is None
        or source.labels is not None
        or not (isinstance(data, tuple) and len(data) > 1)
    ):
        return data
    label = data[1]
    if not isinstance(label, tf.Tensor) or not label.dtype.is_integer or label.shape.rank != 0:
        return data
    location = (
        source.describe(number) if source.describe is not None else tf.strings.as_string(number)
    )
    message = (
        f"{source.name}: expected a label from 0 to {source.classes - 1}; received this label, at "
        "this place:"
    )
    valid = (label >= 0) & (tf.cast(label, tf.int64) < source.classes)
    with tf.control_dependencies([tf.debugging.Assert(valid, [message, label, location])]):
        return (data[0], tf.identity(label), *data[2:])
