"""A Source becomes a `tf.data.Dataset` of global batches; nothing but seed and epoch decides their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.sources import Source

# `shuffle=True` holds at most this many examples in memory at a time.
SHUFFLE_BUFFER = 100_000


class Epochs:
    """Says which epoch the next pass over a pipeline is: 0, 1, 2, ... unless `next` is set, to resume.

    Example:
        >>> epochs = Epochs()
        >>> epochs.next = 7
        >>> int(epochs.take()), epochs.next
        (7, 8)
    """

    def __init__(self) -> None:
        self.next = 0

    def take(self) -> np.int64:
        """The epoch that begins now."""
        epoch = self.next
        self.next += 1
        return np.int64(epoch)


def pipeline(
    source: Any,
    global_batch: int,
    *,
    seed: int = 0,
    shuffle: bool | int = True,
    transform: Callable[..., Any] | None = None,
    cache: bool = False,
    drop_remainder: bool = False,
    prefetch: int = tf.data.AUTOTUNE,
) -> tf.data.Dataset:
    """Extracts examples, transforms them, and loads them as shuffled global batches.

    Each pass over the result is one epoch. Its order depends on `seed` and the number of the epoch, on
    nothing else: every worker and every run sees the same batches, whatever TensorFlow's global seed. A
    strategy of tfdist gives each replica its rows of every batch.

    Args:
        source: What `Source.of` takes: a TFDS name (its split "train"), a Source from `load`, a
            `tf.data.Dataset` of single examples, or arrays such as `(x, y)`.
        global_batch: Examples per batch, of all replicas together; the last batch of an epoch may have fewer.
        seed: Seed of the order; default 0.
        shuffle: False: the source's order. True: through a buffer of all examples, of 100,000 at most. A
            number: the size of that buffer, in examples.
        transform: Called with one example, `(x, y)` as two arguments; returns the example to train on.
        cache: Whether to keep the source's examples in memory from the first pass on.
        drop_remainder: Whether to leave out a last batch that is not full.
        prefetch: Batches made ahead; default: tf.data finds out.

    Returns:
        A `tf.data.Dataset` of batches `[global_batch, ...]`. Its attribute `epochs` (an `Epochs`) says, and
        lets one set, which epoch the next pass is; `of_epoch(number)` is a data set of one epoch alone, without
        Python code, so that other processes can read it.

    Raises:
        ValueError: For a bad argument, and for a source without a single batch.

    Example:
        >>> batches = pipeline((np.arange(10), np.arange(10)), global_batch=4)
        >>> [x.shape[0] for x, y in batches]
        [4, 4, 2]
    """
    source = Source.of(source)
    _check_count("global_batch", global_batch)
    buffer = None if shuffle is False else _buffer(shuffle, source.cardinality)
    count = None if source.cardinality is None else _count(source.name, source.cardinality, global_batch, drop_remainder)
    options = tf.data.Options()
    options.deterministic = True
    # Stock strategies must cut up batches too: sharding by file would deal out other rows.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA

    def build(epoch: Callable[[], Any]) -> tf.data.Dataset:
        examples = source.dataset()
        if cache:
            examples = examples.cache()
        if buffer is not None:
            examples = _shuffle(examples, buffer, seed, epoch)
        if transform is not None:
            examples = examples.map(transform, num_parallel_calls=tf.data.AUTOTUNE)
        batches = examples.batch(global_batch, drop_remainder=drop_remainder)
        if count is not None:
            batches = batches.apply(tf.data.experimental.assert_cardinality(count))
        return batches.prefetch(prefetch).with_options(options)

    epochs = Epochs()
    # A counter in Python can be read and set, and is no variable of a strategy.
    batches = build(lambda: tf.ensure_shape(tf.numpy_function(epochs.take, [], tf.int64), []))
    batches.epochs = epochs
    batches.of_epoch = lambda number: build(lambda: tf.constant(number, tf.int64))
    return batches


def _shuffle(examples: tf.data.Dataset, buffer: int, seed: int, epoch: Callable[[], Any]) -> tf.data.Dataset:
    """Examples in another order at each pass, the same for the same seed and epoch."""

    def one_epoch(number: tf.Tensor) -> tf.data.Dataset:
        # tf.data mixes TensorFlow's global seed in. Here that is the seed of this function's own graph.
        tf.compat.v1.set_random_seed(1)
        both = tf.stack([tf.constant(seed, tf.int64), number])
        mixed = tf.random.stateless_uniform([], both, None, None, tf.int64, alg="philox")
        return examples.shuffle(buffer, seed=mixed, reshuffle_each_iteration=False)

    return tf.data.Dataset.from_tensors(0).map(lambda _: epoch()).flat_map(one_epoch)


def _buffer(shuffle: bool | int, cardinality: int | None) -> int:
    if shuffle is True:
        return max(1, min(SHUFFLE_BUFFER, SHUFFLE_BUFFER if cardinality is None else cardinality))
    _check_count("shuffle", shuffle)
    return shuffle


def _count(name: str, examples: int, global_batch: int, drop_remainder: bool) -> int:
    """Batches of an epoch."""
    count = examples // global_batch if drop_remainder else -(-examples // global_batch)
    if count == 0:
        remedy = (
            "Take a smaller global_batch, or drop_remainder=False."
            if examples
            else "Look at where it is read from."
        )
        raise ValueError(
            f"{name} has {examples} examples, which make no batch of global_batch={global_batch}. {remedy}"
        )
    return count


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name}: expected a number of examples, 1 or more; received {value!r}.")
