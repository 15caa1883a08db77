"""Shuffling: the deterministic order of examples, a function of seed, epoch and step.

All functions are pure: they depend on no state, worker or device. A *position* is the place of an
example in an epoch's order: step * global_batch + row. An order maps each position to an example
number independently of the others, so it takes no memory and can start anywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

__all__ = ["Order"]

TAILS = ("partial", "pad", "drop")

# With fewer rounds, the results for neighbouring numbers are measurably correlated: TensorFlow's
# default is 4, and 8 are too few for 10^6 examples.
_ROUNDS = 12

_PHILOX = tf.random.Algorithm.PHILOX.value


def rows_of_replicas(rows, first: int, count: int, replicas: int, minimum=min):
    """Return the rows of a global batch that `count` replicas from `first` on read.

    Args:
        rows: Number of rows in the global batch; a number or, with `minimum=tf.minimum`, a scalar
            tensor.
        first: Index of the first replica.
        count: Number of consecutive replicas.
        replicas: Total number of replicas.
        minimum: Function that returns the smaller of two values; default: `min`.

    Returns:
        First row and end of the rows; the end is excluded.

    Example:
        >>> [rows_of_replicas(10, r, 1, 4) for r in range(4)]
        [(0, 3), (3, 6), (6, 9), (9, 10)]
        >>> [rows_of_replicas(2, r, 1, 3) for r in range(3)]
        [(0, 1), (1, 2), (2, 2)]
    """
    per = -(-rows // replicas)
    return minimum(rows, first * per), minimum(rows, (first + count) * per)


def permute(numbers: Any, count: Any, key: Any, limit: int | None = None) -> tf.Tensor:
    """Map numbers through a pseudo-random permutation of [0, count).

    The permutation is never materialized. It is a block cipher over a power of 4, at least 2^16,
    applied again until the result is below `count` (`tf.raw_ops.RandomIndexShuffle`). It takes
    constant memory and about 0.1 us for each number. For counts below 2^16 the time for each number
    is larger by the factor 2^16 / count, so that a whole small permutation takes some milliseconds,
    whatever its size.

    Args:
        numbers: Numbers to permute, int64 `[k]`, each in [0, count).
        count: Size of the permutation; one for all, or int64 `[k]`.
        key: Key that selects the permutation: int32 `[3]` for all, or `[k, 3]`.
        limit: Upper bound of `count`; default: none. One of at most 2^16 makes the graph smaller.

    Returns:
        int64 `[k]`.

    Example:
        >>> sorted(permute(range(10), 10, [1, 2, 3]).numpy().tolist()) == list(range(10))
        True
    """
    numbers = tf.convert_to_tensor(numbers, tf.int64)
    key = tf.cast(key, tf.int32)
    largest = count - 1 if isinstance(count, int) else tf.cast(count, tf.int64) - 1
    larger = _larger_range(largest, limit)
    ranges = largest if larger is None else tf.cast(larger, tf.int64)
    if not numbers.shape.num_elements():
        # The op takes no numbers at all only if it gets no keys and no ranges either.
        key = tf.broadcast_to(key, [tf.size(numbers), 3])
        ranges = tf.broadcast_to(tf.cast(ranges, tf.int64), tf.shape(numbers))
    values = _cipher(numbers, key, ranges)
    if larger is None:
        return values

    def walk(values: tf.Tensor) -> list[tf.Tensor]:
        too_large = values > largest
        # The op computes nothing where max_index is 0.
        permuted = _cipher(tf.where(too_large, values, 0), key, tf.where(too_large, ranges, 0))
        return [tf.where(too_large, permuted, values)]

    return tf.while_loop(lambda values: tf.reduce_any(values > largest), walk, [values])[0]


def _larger_range(largest: Any, limit: int | None) -> Any:
    """Return the largest number of the cipher's range if that must be larger than `largest`.

    The op has two faults, which a larger range avoids; results beyond `largest` are permuted again.
    First, the op returns a number twice if max_index is 2^16 or another power of 4. Second, for
    2^26 to 2^28 the results of neighbours differ by only 2^14 different amounts, because the
    cipher's rotations by 1 and 8 are half of 14 bits apart.

    Args:
        largest: Largest number of the permutation; a number, or int64 `[k]`.
        limit: Upper bound of the permutation's size; None: unknown.

    Returns:
        None if no larger range is needed.
    """
    if limit is not None and limit <= 2**16:
        return None
    odd = largest | 1
    if isinstance(largest, int):
        ranges = odd if largest < 2**26 else max(odd, 2**28 + 1)
        return None if largest < 2**16 or ranges == largest else ranges
    ranges = tf.where(largest < 2**26, odd, tf.maximum(odd, 2**28 + 1))
    return tf.where(largest < 2**16, largest, ranges)


def _cipher(numbers: tf.Tensor, key: tf.Tensor, largest: Any) -> tf.Tensor:
    return tf.raw_ops.RandomIndexShuffle(index=numbers, seed=key, max_index=largest, rounds=_ROUNDS)


def key_of(seed: Any, epoch: Any, words: int = 3) -> tf.Tensor:
    """Return the key of an epoch's permutation.

    Args:
        seed: Seed of the order, int64 scalar.
        epoch: Epoch, int64 scalar.
        words: Number of words of the key that are returned; default: all.

    Returns:
        int32 `[words]`.
    """
    return random_bits([words], tf.stack([seed, tf.cast(epoch, tf.int64)]), tf.int32)


def random_bits(shape: Sequence[int], seed: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return integers of their whole range, those of `tf.random.stateless_uniform`.

    That function, with Philox, adds 42 more operations to a graph. Each costs time when the graph
    is traced, and again when a pass begins.

    Args:
        shape: Shape of the result.
        seed: Seed, an integer `[2]`.
        dtype: Type of the result, an integer type.

    Example:
        >>> bits = random_bits([4], tf.constant([1, 2]), tf.int64)
        >>> same = tf.random.stateless_uniform([4], [1, 2], None, None, tf.int64, alg="philox")
        >>> bool(tf.reduce_all(bits == same))
        True
    """
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=shape, key=key, counter=counter, alg=_PHILOX, dtype=dtype
    )


def example_seeds(seed: Any, epoch: Any, numbers: Any) -> tf.Tensor:
    """Return a seed for each example, for `tf.random.stateless_*` and `tf.image.stateless_*`.

    An example has another seed in each epoch.

    Args:
        seed: Seed of the data pipeline, int64 scalar.
        epoch: Epoch, int64 scalar.
        numbers: Numbers of examples, int64 `[...]`.

    Returns:
        int32 `[..., 2]`.

    Example:
        >>> example_seeds(0, 3, [5, 6]).shape
        TensorShape([2, 2])
    """
    words = tf.bitcast(tf.convert_to_tensor(numbers, tf.int64), tf.int32)
    return words ^ key_of(seed, epoch, 2)


@dataclasses.dataclass(frozen=True)
class Order:
    """Order of examples that are read by number: another permutation in each epoch.

    Attributes:
        examples: Number of examples, 1 or more.
        global_batch: Rows of a batch, summed over all replicas.
        seed: Seed of the permutations.
        shuffle: Whether to shuffle; False: the source's own order.
        tail: Treatment of the last examples if they do not fill a batch: "partial", a shorter
            batch; "pad", a full batch whose rows beyond the examples repeat the first ones and have
            no weight; "drop", no batch.

    Example:
        >>> order = Order(examples=10, global_batch=4, seed=1)
        >>> order.steps, order.rows(0), order.rows(2)
        (3, 4, 2)
        >>> sorted(n for step in range(3) for n in order.batch(0, step).numpy().tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    examples: int
    global_batch: int
    seed: int = 0
    shuffle: bool = True
    tail: str = "partial"

    @property
    def full(self) -> int:
        """Return the number of full batches of an epoch."""
        return self.examples // self.global_batch

    @property
    def steps(self) -> int:
        """Return the number of batches of an epoch, which is the same on every worker."""
        return self.full if self.tail == "drop" else -(-self.examples // self.global_batch)

    def rows(self, step: Any, minimum: Callable[[Any, Any], Any] = min) -> Any:
        """Return the number of examples in a step's batch, without padding.

        Args:
            step: Step in the epoch; a number or, with `minimum=tf.minimum`, a tensor.
            minimum: Function that returns the smaller of two values; default: `min`.
        """
        return minimum(self.examples - step * self.global_batch, self.global_batch)

    def batch(self, epoch: Any, step: Any) -> tf.Tensor:
        """Return the numbers of the examples of one global batch.

        Args:
            epoch: Epoch: 0, 1, ...
            step: Step in the epoch, 0 to `steps` - 1.

        Returns:
            int64 `[rows(step)]`, in the order of the batch's rows.
        """
        step = tf.cast(step, tf.int64)
        first = step * self.global_batch
        return self.numbers(epoch, tf.range(first, first + self.rows(step, tf.minimum)))

    def numbers(self, epoch: Any, positions: Any) -> tf.Tensor:
        """Return the numbers of the examples at some positions.

        Args:
            epoch: Epoch: 0, 1, ...
            positions: Positions in the epoch's order, int64 `[k]`, each in [0, examples).

        Returns:
            int64 `[k]`.
        """
        positions = tf.convert_to_tensor(positions, tf.int64)
        if not self.shuffle:
            return positions
        return permute(positions, self.examples, key_of(self.seed, epoch))


class FileSequence(NamedTuple):
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


@dataclasses.dataclass(frozen=True)
class StreamOrder(Order):
    """Order of examples that are read file after file, `streams` parts of an epoch at once.

    Each epoch has another order of the files. The examples of all full batches are divided into
    `streams` equal, consecutive parts. Each batch takes equally many examples of every part, one
    part after the other, so that a worker reads only the few parts of its own rows. Within a part,
    each `block` of consecutive examples is permuted. The examples that do not fill a batch are the
    last examples of the last files.

    Attributes:
        lengths: Number of examples of each file; `examples` is their sum.
        streams: Number of parts read at once; it divides `global_batch`.
        block: Number of examples of each part that are held in memory and permuted at a time.

    Example:
        >>> order = StreamOrder.of([5, 4, 3], global_batch=4, streams=2, block=3)
        >>> order.examples, order.steps, order.part
        (12, 3, 6)
        >>> numbers = [n for step in range(3) for n in order.batch(0, step).numpy().tolist()]
        >>> sorted(numbers) == list(range(12))
        True
    """

    lengths: tuple[int, ...] = ()
    streams: int = 1
    block: int = 1

    @classmethod
    def of(cls, lengths: Sequence[int], global_batch: int, **options: Any) -> StreamOrder:
        """Return the order of files of the given lengths.

        Args:
            lengths: Number of examples of each file.
            global_batch: Rows of a batch, summed over all replicas.
            **options: Other attributes of the order.
        """
        return cls(sum(lengths), global_batch, lengths=tuple(map(int, lengths)), **options)

    @property
    def per_stream(self) -> int:
        """Return the number of rows that each part contributes to a full batch."""
        return self.global_batch // self.streams

    @property
    def part(self) -> int:
        """Return the number of examples of each part."""
        return self.full * self.per_stream

    @property
    def tail_begin(self) -> int:
        """Return the position of the first example after the full batches."""
        return self.full * self.global_batch

    def files(self, epoch: Any) -> tf.Tensor:
        """Return the numbers of the files in the order of an epoch, int64 `[files]`."""
        files = tf.range(len(self.lengths), dtype=tf.int64)
        if not self.shuffle:
            return files
        # All files are needed at once, so a plain shuffle is cheaper than `permute`.
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=key_of(self.seed, epoch, 2))
        return tf.raw_ops.StatelessShuffle(value=files, key=key, counter=counter, alg=_PHILOX)

    def sequence(self, epoch: Any) -> FileSequence:
        """Return the files of an epoch in the order in which they are read."""
        files = self.files(epoch)
        lengths = np.array(self.lengths, np.int64)
        lengths_in_order = tf.gather(lengths, files)
        ends = tf.cumsum(lengths_in_order)
        first_numbers = tf.gather(np.cumsum(lengths) - lengths, files)
        return FileSequence(files, ends - lengths_in_order, ends, first_numbers)

    def numbers(self, epoch: Any, positions: Any) -> tf.Tensor:
        """See `Order.numbers`."""
        positions = tf.convert_to_tensor(positions, tf.int64)
        return self.numbers_of(epoch, self.sequence_positions(epoch, positions))

    def sequence_positions(self, epoch: Any, positions: tf.Tensor) -> tf.Tensor:
        """Return the places in the epoch's file sequence of the examples at some positions.

        Args:
            epoch: Epoch: 0, 1, ...
            positions: Positions in the epoch's order, int64 `[k]`.

        Returns:
            int64 `[k]`.
        """
        row = positions % self.global_batch
        step = positions // self.global_batch
        full = positions < self.tail_begin
        # The tail counts as one more part after all others.
        stream = tf.where(full, row // self.per_stream, self.streams)
        within = tf.where(full, step * self.per_stream + row % self.per_stream, row)
        length = tf.where(full, tf.constant(self.part, tf.int64), self.examples - self.tail_begin)
        return stream * self.part + self.shuffle_within(epoch, stream, within, length)

    def shuffle_within(self, epoch: Any, stream: Any, within: tf.Tensor, length: Any) -> tf.Tensor:
        """Return places in a part of `length` examples, with each block permuted by itself.

        Args:
            epoch: Epoch: 0, 1, ...
            stream: Number of the part, `streams` for the tail; one for all, or int64 `[k]`.
            within: Places in the part's own order, int64 `[k]`.
            length: Number of examples of the part; one for all, or int64 `[k]`.

        Returns:
            int64 `[k]`.
        """
        if not self.shuffle:
            return within
        block = within // self.block
        first = block * self.block
        size = tf.minimum(tf.cast(length, tf.int64) - first, self.block)
        return first + self.shuffle_block(epoch, stream, block, within - first, size)

    def shuffle_block(self, epoch: Any, stream: Any, block: Any, places: Any, size: Any) -> Any:
        """Return places in a block of a part, permuted.

        Args:
            epoch: Epoch: 0, 1, ...
            stream: Number of the part, an int64 scalar or `[k]`; `streams` for the tail.
            block: Number of the block in its part, of the same shape.
            places: Places in the block's own order, int64 `[k]`.
            size: Number of examples in the block; one for all, or int64 `[k]`.

        Returns:
            int64 `[k]`.
        """
        # Each block has its own key. If a block is small, only few bits of a key's words matter.
        name = permute(stream * 2**32 + block, 2**60, key_of(self.seed, epoch))
        keys = tf.cast(tf.stack([name, name // 2**16, name // 2**32], -1) % 2**16, tf.int32)
        return permute(places, size, keys, limit=self.block)

    def numbers_of(self, epoch: Any, sequence_positions: tf.Tensor) -> tf.Tensor:
        """Return the numbers of the examples at some places of the epoch's file sequence.

        Args:
            epoch: Epoch: 0, 1, ...
            sequence_positions: Places in the file sequence, int64 `[k]`.

        Returns:
            int64 `[k]`.
        """
        sequence = self.sequence(epoch)
        which = tf.searchsorted(sequence.ends, sequence_positions, side="right", out_type=tf.int64)
        offsets = sequence.numbers - sequence.starts
        return sequence_positions + tf.gather(offsets, which)
