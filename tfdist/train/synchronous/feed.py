"""A data set of global batches becomes this worker's rows of each batch; no batch is read before training asks for it.

A pipeline of `tfdist.data` reads just these rows. Of any other data set, every worker walks the same global batches and keeps its own rows. That is exact for whatever tf.data, NumPy, PyDataset or
generator gives, without TensorFlow's guesses about sharding (tensorflow #56513, #45157), as long as the workers do see the same
batches: a checksum of each batch travels along, which the loop compares between the workers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.data.autotune import untuned
from tfdist.data.batch_rows import count_rows, cut, plain
from tfdist.data.order import rows_of_replicas
from tfdist.parallel.placement import Placement


class Batch(NamedTuple):
    """One step's data on one worker.

    Fields:
        data: What the model's step takes; rows `[worker_rows, ...]`.
        rows: Rows in the global batch, int64 scalar; None where `data` is already the replica's own: with one replica, or
            from a data set that TensorFlow or the user distributed; with several local replicas it is then a list of each one's.
        checksum: Fingerprint of the global batch, float64 scalar; None where none is needed.
    """

    data: Any
    rows: Any = None
    checksum: Any = None


class Feed:
    """What Keras' epoch iterator walks over under a strategy of tfdist.

    Args:
        dataset: Global batches.
        placement: Which rows are ours.
        host: Name of this process' CPU device, where batches are made.
        symbolic_first: Whether Keras' first `next()` is the one that builds the model from shapes alone. It gets the
            element spec, so that no batch is lost, and no uneven batch gets in the way of building.
        steps: The steps that are trained on an endless data set, counted from the run's first; None: nobody knows. To read on behind
            the last one could begin another pass, on some workers and not on others, and the next `fit` would find its passes moved.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        placement: Placement,
        host: str,
        symbolic_first: bool,
        steps: range | None = None,
    ):
        self.placement = placement
        self.host = host
        self.element_spec = dataset.element_spec
        self.symbolic_first = symbolic_first
        self.even = _always_even(dataset.element_spec, placement.replicas)
        self._source = dataset
        self._steps = steps if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY else None
        self._first: tf.data.Dataset | None = None
        with tf.device(host):
            self.dataset = self._of(dataset, 0)

    def begin_at(self, epoch: int, step: int, steps_per_epoch: int | None = None) -> None:
        """Lets the next pass begin in the middle of the data.

        Args:
            epoch: Which epoch it is.
            step: Batches of it that are left out.
            steps_per_epoch: Batches of an epoch, where that is not a pass over the data.
        """
        skipped = step + epoch * steps_per_epoch if steps_per_epoch else step
        epochs, length = getattr(self._source, "epochs", None), int(self._source.cardinality())
        if epochs is not None and length > 0 and (steps_per_epoch or skipped >= length):
            # An epoch whose steps are all done reads nothing: the next pass is the one after it.
            passes, skipped = divmod(skipped, length)
            epoch = passes if steps_per_epoch else epoch + passes
        elif length > 0 and skipped == length and not steps_per_epoch:
            skipped = 0
        if epochs is not None:
            epochs.next = epoch
        if skipped:
            with tf.device(self.host):
                self._first = self._of(self._source, skipped)

    @property
    def ordered(self) -> bool:
        """Whether the order of the examples of an epoch follows from its number."""
        return hasattr(self._source, "of_epoch")

    def next_pass(self) -> tf.data.Dataset:
        """What a new pass reads."""
        first, self._first = self._first, None
        return first or self.dataset

    def _of(self, dataset: tf.data.Dataset, skipped: int) -> tf.data.Dataset:
        """This worker's rows of the batches after those skipped."""
        placement = self.placement
        if placement.replicas > 1 and (shares := _shares(dataset, placement, skipped)):
            compared = placement.workers > 1
            dataset = self._bounded(shares, skipped).map(
                plain(lambda s: Batch(s.data, s.rows, s.fingerprint if compared else None))
            )
        else:
            if skipped:
                dataset = (
                    dataset.of_epoch(None, skipped)
                    if hasattr(dataset, "of_epoch")
                    else dataset.skip(skipped)
                )
            dataset = self._bounded(dataset, skipped)
            if placement.replicas > 1:
                dataset = dataset.map(plain(lambda *x: _worker_batch(_element(x), placement)))
            else:
                dataset = dataset.map(plain(lambda *x: Batch(_element(x))))
        return untuned(dataset.prefetch(2))

    def _bounded(self, dataset: tf.data.Dataset, skipped: int) -> tf.data.Dataset:
        """Before any `map`: tf.data runs those ahead too."""
        if self._steps is None:
            return dataset
        return dataset.take(max(0, self._steps.stop - (skipped or self._steps.start)))

    def __iter__(self) -> FeedIterator:
        return FeedIterator(self)


class FeedIterator:
    """One pass over a Feed. `iterator` is the tf.data iterator that a graph may draw from."""

    def __init__(self, feed: Feed):
        self.feed = feed
        self._pass = feed.next_pass()
        self._iterator = None

    @property
    def iterator(self):
        if self._iterator is None:
            with tf.device(self.feed.host):
                self._iterator = iter(self._pass)
        return self._iterator

    def __iter__(self):
        return self

    def __next__(self):
        if self.feed.symbolic_first and self._iterator is None:
            return symbolic(self.feed.element_spec)
        return next(self.iterator)


def replica_slices(dataset: tf.data.Dataset, placement: Placement) -> tf.data.Dataset:
    """This worker's rows of each global batch, one element a replica, for loops outside of Keras."""

    replicas = tf.data.Dataset.range(
        placement.first_replica, placement.first_replica + placement.local_replicas
    )

    def of_replica(replica, data, rows, begin):
        first, last = rows_of_replicas(rows, replica, 1, placement.replicas, tf.minimum)
        return cut(data, first - begin, last - begin)

    def of_batch(*args):
        data = _element(args)
        return replicas.map(lambda r: of_replica(r, data, count_rows(data), 0))

    def of_share(part):
        begin, _ = rows_of_replicas(
            part.rows, placement.first_replica, 1, placement.replicas, tf.minimum
        )
        return replicas.map(lambda r: of_replica(r, part.data, part.rows, begin))

    shares = _shares(dataset, placement)
    return dataset.flat_map(plain(of_batch)) if shares is None else shares.flat_map(plain(of_share))


def batch_of(data: Any, placement: Placement) -> Batch:
    """This worker's rows of one global batch given as arrays, for `train_on_batch`."""
    data = tensors(data)
    return _worker_batch(data, placement) if placement.replicas > 1 else Batch(data)


def tensors(data: Any) -> Any:
    """A batch of arrays as tensors."""
    return tf.nest.map_structure(
        lambda x: x if x is None or tf.is_tensor(x) else tf.convert_to_tensor(x), data
    )


def replica_rows(batch: Batch, local_replica, placement: Placement, host: str):
    """One replica's rows of its worker's batch.

    Args:
        batch: This worker's batch.
        local_replica: Index of the replica among this worker's.
        placement: Numbers of workers and replicas.
        host: CPU device, where the rows are cut, so that a device gets no row but its own.

    Returns:
        The rows, `[replica_rows, ...]`.
    """
    data = without_optionals(batch.data)
    if placement.local_replicas == 1:
        return data
    if batch.rows is None:
        return data[local_replica]
    with tf.device(host):
        rows = batch.rows
        begin, _ = rows_of_replicas(
            rows, placement.first_replica, 1, placement.replicas, tf.minimum
        )
        first, last = rows_of_replicas(
            rows, placement.first_replica + local_replica, 1, placement.replicas, tf.minimum
        )
        return cut(data, first - begin, last - begin)


def without_optionals(data: Any) -> Any:
    """A batch as Keras' steps take it, where tf.data has an Optional for a None."""
    return tf.nest.map_structure(
        lambda x: None if isinstance(x, tf.experimental.Optional) else x, data
    )


def any_rows(data: Any) -> Any:
    """The specs of a batch with any number of rows: one trace serves all batches.

    A worker that traced anew for a batch of another size, while others do not, would number its collectives otherwise than they.
    """

    def spec(x):
        if x is None or isinstance(x, tf.experimental.Optional):
            return x
        if isinstance(x, tf.Tensor):
            return tf.TensorSpec([None, *x.shape[1:]] if x.shape.rank else [], x.dtype)
        return tf.type_spec_from_value(x)

    return tf.nest.map_structure(spec, data)


def _shares(
    dataset: tf.data.Dataset, placement: Placement, skipped: int = 0
) -> tf.data.Dataset | None:
    """This worker's share of a pipeline of `tfdist.data`, which then reads nobody else's; None for other data sets."""
    share_of = getattr(dataset, "replica_rows", None)
    return share_of and share_of(
        placement.first_replica, placement.local_replicas, placement.replicas, first_step=skipped
    )


def _element(args: tuple) -> Any:
    # Dataset.map spreads a tuple over the arguments, and passes anything else as the only one.
    return args if len(args) > 1 else args[0]


def _worker_batch(data: Any, placement: Placement) -> Batch:
    rows = count_rows(data)
    if placement.workers == 1:
        return Batch(data, rows)
    begin, end = rows_of_replicas(
        rows, placement.first_replica, placement.local_replicas, placement.replicas, tf.minimum
    )
    return Batch(cut(data, begin, end), rows, _checksum(data, rows))


def _checksum(data: Any, rows) -> tf.Tensor:
    """A number that differs, in all likelihood, when two workers' global batches do: from first row and row count.

    As few operations as will do: it costs every worker time at every step.
    """
    total = tf.cast(rows, tf.float64)
    for place, x in enumerate(tf.nest.flatten(data), start=1):
        if x is None or isinstance(x, tf.experimental.Optional | tf.SparseTensor | tf.RaggedTensor):
            continue
        first = tf.strings.to_hash_bucket_fast(x[:1], 65537) if x.dtype == tf.string else x[:1]
        total += place * tf.reduce_sum(tf.cast(first, tf.float64))
    return tf.where(tf.math.is_finite(total), total, tf.cast(rows, tf.float64))


def _always_even(spec: Any, replicas: int) -> bool:
    """Whether every batch is known to give each replica equally many rows."""
    if replicas == 1:
        return True
    shapes = [s.shape for s in tf.nest.flatten(spec) if isinstance(s, tf.TensorSpec)]
    return bool(shapes) and all(
        s.rank and s[0] is not None and s[0] and s[0] % replicas == 0 for s in shapes
    )


def symbolic(element_spec: Any) -> Any:
    """What Keras builds a model from instead of a batch."""
    return tf.nest.map_structure(
        lambda spec: None if isinstance(spec, tf.OptionalSpec) else spec, element_spec
    )
