"""Seed, epoch, step and global batch become the numbers of the examples that a batch holds; nothing is read here.

All of it is pure: no state, no worker, no device. A *position* says where an epoch's order an example stands: step *
global_batch + row. An order maps positions to example numbers, each by itself, so that it takes no memory and starts anywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

TAILS = ("partial", "pad", "drop")

# With fewer, neighbours' numbers depend on each other, measurably: TensorFlow's default is 4, and 8 are too few for 10^6.
_ROUNDS = 12


def rows_of_replicas(rows, first: int, count: int, replicas: int, minimum=min):
    """The rows that `count` replicas from `first` on take of a global batch.

    Args:
        rows: Rows in the global batch; a number or, with `minimum=tf.minimum`, a scalar tensor.
        first: First replica.
        count: Number of neighbouring replicas.
        replicas: Replicas altogether.
        minimum: The function that takes the lesser of two.

    Returns:
        Begin and end of the rows, the end excluded.

    Example:
        >>> [rows_of_replicas(10, r, 1, 4) for r in range(4)]
        [(0, 3), (3, 6), (6, 9), (9, 10)]
        >>> [rows_of_replicas(2, r, 1, 3) for r in range(3)]
        [(0, 1), (1, 2), (2, 2)]
    """
    per = -(-rows // replicas)
    return minimum(rows, first * per), minimum(rows, (first + count) * per)


def permute(numbers: Any, count: Any, key: Any) -> tf.Tensor:
    """The places of numbers in a pseudo-random permutation of [0, count), which is never written out.

    A block cipher over a power of 4, at least 2^16, walked until it lands below `count`
    (`tf.raw_ops.RandomIndexShuffle`): constant memory; some 0.1 us for each number, and for counts below 2^16 as many times
    more as they are smaller, so that a whole small permutation takes some milliseconds, whatever its size.

    Args:
        numbers: int64 `[k]`, each in [0, count).
        count: Size of the permutation; one for all, or int64 `[k]`.
        key: int32 `[3]` for all, or `[k, 3]`: which permutation.

    Returns:
        int64 `[k]`.

    Example:
        >>> sorted(permute(range(10), 10, [1, 2, 3]).numpy().tolist()) == list(range(10))
        True
    """
    numbers = tf.convert_to_tensor(numbers, tf.int64)
    key = tf.cast(key, tf.int32)
    keys = tf.broadcast_to(key, [tf.size(numbers), 3]) if key.shape.rank == 1 else key
    largest = tf.broadcast_to(tf.cast(count, tf.int64) - 1, tf.shape(numbers))
    # Two faults of the op are gone around by permuting a larger range, and walking on from what lies beyond `count`. It gives
    # a number twice if max_index is 2^16 or another power of 4. And of 2^26 to 2^28, it gives neighbours that differ by only
    # 2^14 different amounts, as its cipher's rotations by 1 and 8 are half of 14 bits apart.
    odd = largest | 1
    wide = tf.where(largest < 2**26, odd, tf.maximum(odd, 2**28 + 1))
    wide = tf.where(largest < 2**16, largest, wide)

    def walk(places: tf.Tensor) -> list[tf.Tensor]:
        beyond = places > largest
        # Where max_index is 0, nothing is computed.
        further = _cipher(tf.where(beyond, places, 0), keys, tf.where(beyond, wide, 0))
        return [tf.where(beyond, further, places)]

    places = _cipher(numbers, keys, wide)
    return tf.while_loop(lambda places: tf.reduce_any(places > largest), walk, [places])[0]


def _cipher(numbers: tf.Tensor, keys: tf.Tensor, largest: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.RandomIndexShuffle(
        index=numbers, seed=keys, max_index=largest, rounds=_ROUNDS
    )


def key_of(seed: Any, epoch: Any) -> tf.Tensor:
    """The key of an epoch's permutation.

    Args:
        seed: int64 scalar.
        epoch: int64 scalar.

    Returns:
        int32 `[3]`.
    """
    both = tf.stack([tf.cast(seed, tf.int64), tf.cast(epoch, tf.int64)])
    return tf.random.stateless_uniform([3], both, None, None, tf.int32, alg="philox")


def example_seeds(seed: Any, epoch: Any, numbers: Any) -> tf.Tensor:
    """A seed for each example in each epoch, for `tf.random.stateless_*` and `tf.image.stateless_*`.

    Args:
        seed: int64 scalar.
        epoch: int64 scalar.
        numbers: int64 `[...]`, numbers of examples.

    Returns:
        int32 `[..., 2]`.

    Example:
        >>> example_seeds(0, 3, [5, 6]).shape
        TensorShape([2, 2])
    """
    words = tf.bitcast(tf.convert_to_tensor(numbers, tf.int64), tf.int32)
    return words ^ key_of(seed, epoch)[:2]


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of examples that can be read one by one: a permutation of all of them, another one in each epoch.

    Attributes:
        examples: How many there are, 1 or more.
        global_batch: Rows of a batch, of all replicas together.
        seed: Which orders.
        shuffle: False: the source's own order.
        tail: What becomes of the last examples, which make no full batch: "partial", a shorter batch; "pad", a full
            one, whose rows beyond the examples repeat the first ones and have no weight; "drop", none.

    Example:
        >>> order = Order(examples=10, global_batch=4, seed=1)
        >>> order.steps, order.rows(0), order.rows(2)
        (3, 4, 2)
        >>> sorted(order.batch(0, 0).numpy().tolist() + order.batch(0, 1).numpy().tolist() + order.batch(0, 2).numpy().tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    examples: int
    global_batch: int
    seed: int = 0
    shuffle: bool = True
    tail: str = "partial"

    @property
    def full(self) -> int:
        """Full batches of an epoch."""
        return self.examples // self.global_batch

    @property
    def steps(self) -> int:
        """Batches of an epoch, on every worker alike."""
        return self.full if self.tail == "drop" else -(-self.examples // self.global_batch)

    def rows(self, step: Any, minimum=min) -> Any:
        """Examples in a step's batch, without padding; `minimum=tf.minimum` for a tensor."""
        return minimum(self.examples - step * self.global_batch, self.global_batch)

    def batch(self, epoch: Any, step: Any) -> tf.Tensor:
        """The numbers of the examples of one global batch.

        Args:
            epoch: 0, 1, ...
            step: 0 to `steps` - 1.

        Returns:
            int64 `[rows(step)]`, in the order of its rows.
        """
        step = tf.cast(step, tf.int64)
        first = step * self.global_batch
        return self.numbers(epoch, tf.range(first, first + self.rows(step, tf.minimum)))

    def numbers(self, epoch: Any, positions: Any) -> tf.Tensor:
        """The numbers of the examples at these positions.

        Args:
            epoch: 0, 1, ...
            positions: int64 `[k]`, each in [0, examples).

        Returns:
            int64 `[k]`.
        """
        positions = tf.convert_to_tensor(positions, tf.int64)
        if not self.shuffle:
            return positions
        return permute(positions, self.examples, key_of(self.seed, epoch))


@dataclasses.dataclass(frozen=True)
class StreamOrder(Order):
    """The order of examples that are read file after file, in `streams` neighbouring parts of an epoch at once.

    In each epoch the files come in another order. All full batches together are cut into `streams` equal parts, and each
    batch takes equally many examples of every part, one part after the other, so that a worker reads the few parts of
    its own rows. Within a part, each `block` neighbouring examples are permuted. The examples that make no full batch are the last
    of the last files.

    Attributes:
        lengths: Examples of each file; `examples` is their sum.
        streams: Parts that are read at once; divides `global_batch`.
        block: Examples that are held and permuted at a time, in each part.

    Example:
        >>> order = StreamOrder.of([5, 4, 3], global_batch=4, streams=2, block=3)
        >>> order.examples, order.steps, order.part
        (12, 3, 6)
        >>> sorted(n for s in range(3) for n in order.batch(0, s).numpy().tolist()) == list(range(12))
        True
    """

    lengths: tuple[int, ...] = ()
    streams: int = 1
    block: int = 1

    @classmethod
    def of(cls, lengths: Sequence[int], global_batch: int, **options: Any) -> StreamOrder:
        """An order of files of these lengths."""
        return cls(sum(lengths), global_batch, lengths=tuple(map(int, lengths)), **options)

    @property
    def per_stream(self) -> int:
        """Rows that each part gives to a full batch."""
        return self.global_batch // self.streams

    @property
    def part(self) -> int:
        """Examples of each part."""
        return self.full * self.per_stream

    @property
    def tail_begin(self) -> int:
        """Place of the first example of the last batch, if that is not full."""
        return self.full * self.global_batch

    def files(self, epoch: Any) -> tf.Tensor:
        """Numbers of the files in the order of an epoch, int64 `[files]`."""
        files = tf.range(len(self.lengths), dtype=tf.int64)
        if not self.shuffle:
            return files
        # All are wanted at once: no walk.
        key = key_of(self.seed, epoch)[:2]
        return tf.random.experimental.stateless_shuffle(files, key, alg="philox")

    def ends(self, epoch: Any) -> tf.Tensor:
        """Where in an epoch's sequence of examples each file of `files` ends, int64 `[files]`."""
        return tf.cumsum(tf.gather(tf.constant(self.lengths, tf.int64), self.files(epoch)))

    def numbers(self, epoch: Any, positions: Any) -> tf.Tensor:
        positions = tf.convert_to_tensor(positions, tf.int64)
        return self.numbers_of(epoch, self.places(epoch, positions))

    def places(self, epoch: Any, positions: tf.Tensor) -> tf.Tensor:
        """Where in the epoch's sequence the examples at these positions are read, int64 `[k]`."""
        row, step = positions % self.global_batch, positions // self.global_batch
        full = positions < self.tail_begin
        # The tail follows all parts, as if it were one more.
        stream = tf.where(full, row // self.per_stream, self.streams)
        within = tf.where(full, step * self.per_stream + row % self.per_stream, row)
        length = tf.where(full, tf.constant(self.part, tf.int64), self.examples - self.tail_begin)
        return stream * self.part + self.shuffled(epoch, stream, within, length)

    def shuffled(self, epoch: Any, stream: tf.Tensor, within: tf.Tensor, length: Any) -> tf.Tensor:
        """Places in a part of `length` examples, each block permuted by itself.

        Args:
            epoch: 0, 1, ...
            stream: Number of the part, int64 `[k]`; `streams` for the tail.
            within: Places in the part's own order, int64 `[k]`.
            length: Examples of the part; one for all, or int64 `[k]`.

        Returns:
            int64 `[k]`.
        """
        if not self.shuffle:
            return within
        block = within // self.block
        first = block * self.block
        # A key for each block: of a key's words, few bits count where the block is small.
        name = permute(stream * 2**32 + block, 2**60, key_of(self.seed, epoch))
        keys = tf.cast(tf.stack([name, name // 2**16, name // 2**32], -1) % 2**16, tf.int32)
        size = tf.minimum(tf.cast(length, tf.int64) - first, self.block)
        return first + permute(within - first, size, keys)

    def numbers_of(self, epoch: Any, places: tf.Tensor) -> tf.Tensor:
        """The numbers of the examples at these places of the epoch's sequence, int64 `[k]`."""
        files, ends = self.files(epoch), self.ends(epoch)
        which = tf.searchsorted(ends, places, side="right", out_type=tf.int64)
        file = tf.gather(files, which)
        lengths = tf.constant(self.lengths, tf.int64)
        base = tf.gather(tf.cumsum(lengths, exclusive=True), file)
        return base + places - (tf.gather(ends, which) - tf.gather(lengths, file))
