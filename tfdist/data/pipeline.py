"""Input pipelines: a Source as a `tf.data.Dataset` of deterministic global batches.

Seed, epoch and step alone decide the order of the examples.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.batch_rows import plain
from tfdist.data.batches import Batches
from tfdist.data.cache import cached
from tfdist.data.errors import Errors
from tfdist.data.order import TAILS, Order, StreamOrder
from tfdist.data.reading import Window
from tfdist.data.service import addresses_of
from tfdist.data.sources.convert import as_source
from tfdist.data.sources.source import Source

# Size in examples of the shuffle buffer for sources that are read from beginning to end.
SHUFFLE_BUFFER = 16_384
# Maximal number of parts of a stream that are read at once.
STREAMS = 16
SMALLEST_BLOCK = 1024


class Epochs:
    """Counter of the epochs of a dataset: each pass is the next epoch, 0, 1, 2, ...

    Set `next` to resume at a given epoch.

    Example:
        >>> epochs = Epochs()
        >>> epochs.next = 7
        >>> int(epochs.take()), epochs.next
        (7, 8)
    """

    def __init__(self) -> None:
        self.next = 0

    def take(self) -> np.int64:
        """Return the epoch that begins now, and advance the counter."""
        epoch = self.next
        self.next += 1
        return np.int64(epoch)


def pipeline(
    source: Any,
    global_batch: int,
    *,
    seed: int = 0,
    shuffle: bool | int = True,
    tail: str = "partial",
    transform: Callable[..., Any] | None = None,
    batch_transform: Callable[..., Any] | None = None,
    labels: bool = True,
    cache: bool | str = False,
    ignore_errors: int = 0,
    prefetch: int = tf.data.AUTOTUNE,
    device: str | None = None,
    threads: int | None = None,
    ram_budget: int | None = None,
    service: bool | Sequence[str] | None = None,
) -> tf.data.Dataset:
    """Extract examples, transform them, and load them as shuffled global batches.

    Each pass over the result is one epoch and holds every example exactly once. `seed`, the number
    of the epoch and the step alone determine which examples make the batch of a step, whatever the
    number of workers and TensorFlow's global seed. A strategy of tfdist reads only its own rows of
    each batch, so that no worker reads the rows of another.

    Args:
        source: Data that `tfdist.data.as_source` accepts: a Source, a TFDS name (its split
            "train"), a `tf.data.Dataset` of single examples, or arrays such as `(x, y)`.
        global_batch: Number of examples per batch, summed over all replicas; divisible by the
            number of replicas.
        seed: Seed of the order and of `transform`; default: 0.
        shuffle: Shuffling. False: the source's order. True (default): among all examples; if the
            source can only be read from beginning to end, among 16,384 at a time. A number: size of
            that buffer.
        tail: Treatment of the last examples if they do not fill a batch. "partial" (default): a
            shorter batch. "pad": a full batch of static shape, with sample weights that are 0 for
            the rows added, and scaled so that the mean loss over all rows is the mean loss over the
            real rows. "drop": no batch.
        transform: Function called with one example, `(x, y)` as two arguments; returns the example
            to train on. If it has a parameter `seed`, it receives an int32 `[2]` that follows from
            `seed`, the epoch and the example's number, for `tf.random.stateless_uniform` and
            similar functions.
        batch_transform: Function called with a batch, or a worker's rows of one; it must treat each
            row by itself. If it has a parameter `seeds`, it receives an int32 `[rows, 2]`.
        labels: Whether to keep y. False: x alone, for `predict`.
        cache: Cache of the source's examples, before `transform`. True: in memory. A directory: as
            TFRecord files there, written once. Default: no cache.
        ignore_errors: Number of examples that may be left out in each process because they cannot
            be read or transformed; such rows have weight 0. One more ends the run. `errors` of the
            result lists them. Default: 0.
        prefetch: Number of batches prefetched; default: tuned by tf.data.
        device: Device to prefetch batches to in your own training loops, such as "/gpu:0". A
            strategy of tfdist needs none.
        threads: Number of threads that read and transform; default: TensorFlow's.
        ram_budget: Bytes that tf.data may hold in buffers; default: half of the machine's memory.
        service: Data workers that read and transform. True: the ones of `tfdist launch
            --data-workers N`. A list of addresses: the ones at these addresses. Default: none.

    Returns:
        A `tf.data.Dataset` of batches `[global_batch, ...]` with these attributes:

        - `epochs`, an `Epochs`: the epoch of the next pass; you can set it.
        - `of_epoch(epoch, first_step=0)`: a dataset of one epoch alone, from a step on, without
          Python code.
        - `replica_rows(first, count, replicas)`: a dataset of `ReplicaRows`, the rows of some
          replicas.
        - `order`: an `Order`; None if only a pass over the source can tell how many examples there
          are.
        - `errors`: the examples left out.

    Raises:
        ValueError: If an argument is invalid, or if the source does not fill a single batch.

    Example:
        >>> batches = pipeline((np.arange(10), np.arange(10)), global_batch=4)
        >>> [x.shape[0] for x, y in batches]
        [4, 4, 2]
    """
    source = as_source(source)
    _check_count("global_batch", global_batch)
    if (
        isinstance(seed, bool)
        or not isinstance(seed, int | np.integer)
        or not -(2**63) <= seed < 2**63
    ):
        raise ValueError(f"seed: expected an integer of 64 bits, received {seed!r}.")
    if tail not in TAILS:
        raise ValueError(f"tail: expected one of {', '.join(TAILS)}; received {tail!r}.")
    if isinstance(ignore_errors, bool) or not isinstance(ignore_errors, int) or ignore_errors < 0:
        raise ValueError(
            "ignore_errors: expected the number of examples that may be skipped, 0 or more; "
            f"received {ignore_errors!r}."
        )
    if source.walk is not None and ignore_errors:
        raise ValueError(
            f"ignore_errors: {source.name} is a tf.data.Dataset or generator of yours, which "
            "tfdist cannot continue after an error. Call tf.data.Dataset.ignore_errors on it."
        )
    addresses = addresses_of(service)
    if addresses and ignore_errors:
        raise ValueError(
            f"ignore_errors: expected 0 with service=..., received {ignore_errors}. Data workers "
            "cannot count their errors together. Pass only one of the two."
        )
    if not labels and tail == "pad":
        raise ValueError(
            'labels=False: expected tail="partial", received "pad". With padding, predict would '
            "return outputs for rows that are no examples."
        )
    buffer = _buffer(shuffle)
    if source.cardinality is not None:
        _count(source.name, source.cardinality, global_batch, tail == "drop")
    if cache:
        source = cached(source, cache)
    _check_shapes(source, transform)
    order = _order(source, global_batch, seed, buffer, tail)
    errors = Errors(source.name, ignore_errors)
    batches = Batches(
        source,
        order,
        global_batch,
        seed,
        tail,
        buffer,
        transform,
        batch_transform,
        labels,
        errors,
        _options(threads, ram_budget),
        prefetch,
        threads or os.cpu_count() or 1,
        addresses,
    )
    count = (
        None
        if source.cardinality is None
        else _count(source.name, source.cardinality, global_batch, tail == "drop")
    )

    def rows_of(window: Window, epoch: int | None, first_step: int) -> tf.data.Dataset:
        if epoch is not None or first_step:
            return batches.replica_rows(window, _position(epochs, epoch, first_step))
        if window not in of_windows:  # kept, so that each is traced only once
            of_windows[window] = batches.replica_rows(window, _position(epochs, None, 0))
        return of_windows[window]

    def replica_rows(
        first: int, count: int, replicas: int, epoch: int | None = None, first_step: int = 0
    ) -> tf.data.Dataset:
        _check_replicas(source, global_batch, replicas)
        window = Window() if count == replicas else Window(first, count, replicas)
        return rows_of(window, epoch, first_step)

    def whole_batches(epoch: int | None, first_step: int = 0) -> tf.data.Dataset:
        result = rows_of(Window(), epoch, first_step).map(plain(lambda rows: rows.data))
        if count is not None:
            result = result.apply(tf.data.experimental.assert_cardinality(count - first_step))
        result = result.with_options(batches.options)
        return (
            result
            if device is None
            else result.apply(tf.data.experimental.prefetch_to_device(device))
        )

    epochs = Epochs()
    of_windows: dict[Window, tf.data.Dataset] = {}
    result = whole_batches(None)
    result.epochs = epochs
    result.of_epoch = whole_batches
    result.replica_rows = replica_rows
    result.order = order
    result.errors = errors
    result.batches = batches
    return result


def _position(epochs: Epochs, epoch: int | None, first_step: int) -> tf.data.Dataset:
    """Return the epoch and step where a pass begins, read at the beginning of the pass."""
    if epoch is not None:
        return tf.data.Dataset.from_tensors(
            (tf.constant(epoch, tf.int64), tf.constant(first_step, tf.int64))
        )

    # A Python counter can be read and set, and does not become a variable of a strategy.
    @plain
    def begin(_):
        next_epoch = tf.ensure_shape(tf.numpy_function(epochs.take, [], tf.int64), [])
        return next_epoch, tf.constant(first_step, tf.int64)

    return tf.data.Dataset.from_tensors(0).map(begin)


def _order(
    source: Source, global_batch: int, seed: int, buffer: int | None, tail: str
) -> Order | None:
    if source.walk is not None or source.cardinality is None:
        return None
    if source.scan is None:
        return Order(source.cardinality, global_batch, seed, buffer is not None, tail)
    assert source.lengths is not None
    if buffer is None:
        return StreamOrder.of(
            source.lengths,
            global_batch,
            seed=seed,
            shuffle=False,
            tail=tail,
            block=min(256, source.cardinality),
        )
    # Permuting a block of few examples takes as long as permuting one of a thousand.
    streams = max(
        n
        for n in range(1, STREAMS + 1)
        if global_batch % n == 0 and (n == 1 or buffer // n >= SMALLEST_BLOCK)
    )
    return StreamOrder.of(
        source.lengths,
        global_batch,
        seed=seed,
        tail=tail,
        streams=streams,
        block=max(1, buffer // streams),
    )


def _options(threads: int | None, ram_budget: int | None) -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = True
    # The strategies of TensorFlow must shard by data as well: sharding by file would assign other
    # rows to the workers.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    if threads is not None:
        _check_count("threads", threads)
        options.threading.private_threadpool_size = threads
        options.autotune.cpu_budget = threads
    if ram_budget is not None:
        _check_count("ram_budget", ram_budget)
        options.autotune.ram_budget = ram_budget
    return options


def _buffer(shuffle: bool | int) -> int | None:
    if shuffle is False:
        return None
    if shuffle is True:
        return SHUFFLE_BUFFER
    _check_count("shuffle", shuffle)
    return shuffle


def _count(name: str, examples: int, global_batch: int, drop: bool) -> int:
    """Return the number of batches of an epoch."""
    count = examples // global_batch if drop else -(-examples // global_batch)
    if count == 0:
        remedy = (
            'Pass a smaller global_batch, or another tail than "drop".'
            if examples
            else "Check the location of the data."
        )
        raise ValueError(
            f"{name} has {examples} examples, too few for one batch of "
            f"global_batch={global_batch}. {remedy}"
        )
    return count


def _check_replicas(source: Source, global_batch: int, replicas: int) -> None:
    if global_batch % replicas:
        below = global_batch // replicas * replicas
        above = math.ceil(global_batch / replicas) * replicas
        nearest = f"{below} and {above}" if below else f"{above}"
        raise ValueError(
            f"global_batch={global_batch}: expected a multiple of the {replicas} replicas, so that "
            f"each gets equally many rows; the nearest {'are' if below else 'is'} {nearest}."
        )
    if source.cardinality is not None and source.cardinality < replicas:
        raise ValueError(
            f"{source.name} has {source.cardinality} examples, fewer than the {replicas} replicas. "
            "Use fewer workers or devices."
        )


def _check_shapes(source: Source, transform: Any) -> None:
    if transform is not None or source.walk is not None or source.gather is not None:
        return
    for spec in tf.nest.flatten(source.element_spec):
        if isinstance(spec, tf.TensorSpec) and not spec.shape.is_fully_defined():
            raise ValueError(
                f"{source.name}: its examples have no common shape ({spec.shape}), so they cannot "
                "be batched. Resize them with transform=, such as "
                "tfdist.data.transforms.images(224)."
            )


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name}: expected a number, 1 or more; received {value!r}.")
