"""Input feed: this worker's rows of each global batch.

A data pipeline of `tfdist.data` reads only these rows. With any other data set, every worker
iterates over the same global batches and keeps its own rows. That is exact for whatever tf.data,
NumPy, PyDataset or a generator gives, without TensorFlow's guesses about sharding (tensorflow
#56513, #45157), as long as the workers see the same batches. A checksum of each batch travels
along, and the loop compares it between the workers. No batch is read before training asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.data.autotune import untuned
from tfdist.data.batch_rows import check_equal_rows, count_rows, cut, even_part, plain
from tfdist.data.order import rows_of_replicas
from tfdist.keras_compat.python_arrays import copy_rows, runs_python
from tfdist.parallel.placement import Placement
from tfdist.train.data_position import DataPosition

log = logging.getLogger("tfdist")


class Batch(NamedTuple):
    """Data of one step on one worker.

    Attributes:
        data: Input of the model's step, `[worker_rows, ...]`.
        rows: Number of rows in the global batch, int64 scalar. None where `data` is already the
            replica's own: with one replica, or from a data set that TensorFlow or the user
            distributed. With several local replicas `data` is then a list with one entry per
            replica.
        checksum: Fingerprint of the global batch, float64 scalar; None where none is needed.
    """

    data: Any
    rows: Any = None
    checksum: Any = None


class Feed:
    """Iterable that Keras' epoch iterator reads under a strategy of tfdist.

    Args:
        dataset: Data set of global batches.
        placement: Position of this process, which selects its rows.
        host: Name of this process' CPU device, where batches are made. None: TensorFlow's choice.
        steps: Steps that are trained, counted from the start of epoch 0; None if unknown. An
            endless data set is not read beyond the last one. That could begin another pass, on some
            workers and not on others, and the next `fit` would then start at different passes.
        position: Position in the data set. None: that of passes over the data.
        epoch: Function that returns Keras' current epoch.
        ends_early: Whether a pass may end before the data do. Then no batch is read ahead if
            threads of Keras make the batches, because Keras stops them between two passes.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        placement: Placement,
        host: str | None,
        steps: range | None = None,
        position: DataPosition | None = None,
        epoch: Callable[[], int] = lambda: 0,
        ends_early: bool = False,
    ):
        self.position = position or DataPosition(dataset)
        self.epoch = epoch
        self.placement = placement
        self.host = host
        self.element_spec = dataset.element_spec
        self.even = _always_even(dataset.element_spec, placement.replicas)
        self.reads_ahead = not (ends_early and is_made_by_keras_threads(dataset))
        self._source = dataset
        self._steps = steps
        self._endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
        self._first: tf.data.Dataset | None = None
        self._continues = False  # whether one iterator yields this pass and all that follow
        self._last: FeedIterator | None = None
        with tf.device(self.host):
            self.dataset = self._of(
                dataset, 0, len(steps) if steps is not None and self._endless else None
            )

    def begin_at(self, epoch: int, step: int, position: Sequence[int] = ()) -> None:
        """Start the next pass in the middle of the data.

        Args:
            epoch: Epoch of Keras in which `fit` continues, from 0.
            step: Number of steps of that epoch that are done.
            position: Position that `position.at` returned for that step.
        """
        if step and not self.ordered:
            log.warning(
                "fit resumes after step %d of epoch %d with data that tfdist.data.pipeline did "
                "not make. The data must give the same batches in each pass. If they are "
                "reshuffled in each pass, as arrays are unless you pass shuffle=False, some "
                "examples of this epoch are trained twice and others are skipped.",
                step,
                epoch + 1,
            )
        done = self.position.go_to(epoch, step, position)
        if not done:
            return
        self._continues = self.position.continuous
        self._last = None
        most = None
        if self._steps is not None and (self._endless or self._continues):
            most = self._steps.stop - self.position.batches_before(epoch, step)
        with tf.device(self.host):
            self._first = self.position.rest(
                self._source, done, lambda dataset, skipped: self._of(dataset, skipped, most)
            )
            if self._first is not None and most is not None:
                self._first = self._first.take(most)

    def symbolic_batch(self) -> Any:
        """Return the batch from whose shapes Keras builds a model; see `symbolic`.

        So no batch is lost, and an uneven batch cannot disturb building.
        """
        return symbolic(self.element_spec)

    @property
    def ordered(self) -> bool:
        """Return whether data pipelines of `tfdist.data` determine the order of the examples."""
        return self.position.ordered

    def next_pass(self) -> tf.data.Dataset:
        """Return the data set for a new pass."""
        first = self._first
        self._first = None
        return first or self.dataset

    def _of(self, dataset: tf.data.Dataset, skipped: int, most: int | None) -> tf.data.Dataset:
        """Return this worker's rows of the batches after the skipped ones.

        Args:
            dataset: Data set of global batches.
            skipped: Number of batches to skip.
            most: Number of batches to read at most. This limit comes before any `map`, because
                tf.data runs ahead in those too.
        """
        placement = self.placement
        if placement.replicas > 1 and (local_rows := _local_rows(dataset, placement, skipped)):
            compared = placement.workers > 1
            dataset = limited(local_rows, most).map(
                plain(lambda s: Batch(s.data, s.rows, s.fingerprint if compared else None))
            )
        else:
            dataset = limited(after(dataset, skipped), most)
            element = _element_of(dataset)
            if placement.replicas > 1:
                copies = runs_python(dataset)
                dataset = dataset.map(
                    plain(lambda *x: _worker_batch(element(x), placement, self.even, copies))
                )
            else:
                dataset = dataset.map(plain(lambda *x: Batch(element(x))))
        return untuned(dataset.prefetch(2) if self.reads_ahead else dataset)

    def __iter__(self) -> FeedIterator:
        if not self._continues:
            return FeedIterator(self)
        self._last = self._last or FeedIterator(self)
        return self._last


class FeedIterator:
    """Iterator over one pass of a `Feed`.

    TensorFlow's iterator is made at once, which reads no data, but draws a seed from a data set
    that reshuffles. Keras makes one at the end of each epoch of known length, too, that it does not
    read. So all passes have the same orders as without tfdist. A data pipeline of `tfdist.data`
    counts its iterators as passes, so its iterator is made when the pass begins.
    """

    def __init__(self, feed: Feed):
        self.feed = feed
        self._pass = feed.next_pass()
        self._begun = False
        self._iterator = None if feed.ordered else self._new_iterator()

    @property
    def iterator(self):
        """Return the tf.data iterator of this pass, from which a graph may draw batches."""
        if not self._begun:
            self._begun = True
            self.feed.position.begin_pass(self.feed.epoch())
            self._iterator = self._iterator or self._new_iterator()
        return self._iterator

    def _new_iterator(self):
        with tf.device(self.feed.host):
            return iter(self._pass)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.iterator)


def after(dataset: tf.data.Dataset, skipped: int) -> tf.data.Dataset:
    """Return a data set without its first batches; a data pipeline does not read them."""
    if not skipped:
        return dataset
    if hasattr(dataset, "of_epoch"):
        return dataset.of_epoch(None, skipped)
    return dataset.skip(skipped)


def limited(dataset: tf.data.Dataset, most: int | None) -> tf.data.Dataset:
    """Return a data set of at most so many elements; None sets no limit."""
    return dataset if most is None else dataset.take(max(0, most))


def with_copied_rows(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return a data set that copies the rows of its batches."""
    element = _element_of(dataset)
    return dataset.map(plain(lambda *x: copy_rows(element(x))))


def replica_slices(dataset: tf.data.Dataset, placement: Placement) -> tf.data.Dataset:
    """Split this worker's rows of each global batch into one element per replica.

    Training loops outside of Keras use this.
    """
    replicas = tf.data.Dataset.range(
        placement.first_replica, placement.first_replica + placement.local_replicas
    )

    def of_replica(replica, data, rows, begin):
        first, last = rows_of_replicas(rows, replica, 1, placement.replicas, tf.minimum)
        return cut(data, first - begin, last - begin)

    element = _element_of(dataset)
    several = placement.replicas > 1
    even = several and _always_even(dataset.element_spec, placement.replicas)
    copies = several and runs_python(dataset)

    def of_batch(*args):
        data = copy_rows(element(args)) if copies else element(args)
        if even:
            return replicas.map(lambda r: even_part(data, r, placement.replicas))
        if several:
            check_equal_rows(data, placement.replicas)
        return replicas.map(lambda r: of_replica(r, data, count_rows(data), 0))

    def of_local_rows(part):
        begin, _ = rows_of_replicas(
            part.rows, placement.first_replica, 1, placement.replicas, tf.minimum
        )
        return replicas.map(lambda r: of_replica(r, part.data, part.rows, begin))

    local_rows = _local_rows(dataset, placement)
    if local_rows is None:
        return dataset.flat_map(plain(of_batch))
    return local_rows.flat_map(plain(of_local_rows))


def batch_of(data: Any, placement: Placement) -> Batch:
    """Return this worker's rows of one global batch of arrays, for `train_on_batch`."""
    data = tensors(data)
    return _worker_batch(data, placement) if placement.replicas > 1 else Batch(data)


def tensors(data: Any) -> Any:
    """Convert the arrays of a batch to tensors."""
    return tf.nest.map_structure(
        lambda x: x if x is None or tf.is_tensor(x) else tf.convert_to_tensor(x), data
    )


def replica_rows(batch: Batch, local_replica, placement: Placement, host: str, even: bool = False):
    """Return one replica's rows of its worker's batch.

    Args:
        batch: Batch of this worker.
        local_replica: Index of the replica among those of this worker.
        placement: Numbers of workers and replicas.
        host: CPU device where the rows are cut, so that a device receives only its own rows.
        even: Whether all replicas are known to have the same number of rows.

    Returns:
        The rows, `[replica_rows, ...]`.
    """
    data = without_optionals(batch.data)
    if placement.local_replicas == 1:
        return data
    if batch.rows is None:
        return data[local_replica]
    with tf.device(host):
        if even:
            return even_part(data, local_replica, placement.local_replicas)
        rows = batch.rows
        begin, _ = rows_of_replicas(
            rows, placement.first_replica, 1, placement.replicas, tf.minimum
        )
        first, last = rows_of_replicas(
            rows, placement.first_replica + local_replica, 1, placement.replicas, tf.minimum
        )
        return cut(data, first - begin, last - begin)


def without_optionals(data: Any) -> Any:
    """Replace tf.data's Optionals in a batch by None, as Keras' steps expect."""
    return tf.nest.map_structure(
        lambda x: None if isinstance(x, tf.experimental.Optional) else x, data
    )


def rows_of_batches(data: Any, batch_size: int | None) -> int | None:
    """Return the number of rows of the batches of `fit`; None if its data do not tell.

    Args:
        data: Argument `x` of `fit`.
        batch_size: Argument `batch_size` of `fit`. None: Keras' 32, for arrays.
    """
    if isinstance(data, tf.data.Dataset):
        if hasattr(data, "batches"):  # a `tfdist.data.pipeline`
            return data.batches.global_batch
        shapes = [getattr(x, "shape", None) for x in tf.nest.flatten(data.element_spec)]
        return next((shape[0] for shape in shapes if shape is not None and shape.rank), None)
    if all(isinstance(x, np.ndarray | tf.Tensor) for x in tf.nest.flatten(data)):
        return batch_size or 32
    return None


def any_rows(data: Any) -> Any:
    """Return the specs of a batch with any number of rows.

    One trace then serves all batches. If one worker retraced for a batch of another size while
    others did not, it would number its collectives differently.
    """

    def spec(x):
        if x is None or isinstance(x, tf.experimental.Optional):
            return x
        if isinstance(x, tf.Tensor):
            return tf.TensorSpec([None, *x.shape[1:]] if x.shape.rank else [], x.dtype)
        return tf.type_spec_from_value(x)

    return tf.nest.map_structure(spec, data)


def is_made_by_keras_threads(dataset: tf.data.Dataset) -> bool:
    """Return whether Keras made the dataset of a PyDataset with workers, by its options."""
    options = dataset.options()
    return options.autotune.enabled is False and options.threading.private_threadpool_size == 1


def _local_rows(
    dataset: tf.data.Dataset, placement: Placement, skipped: int = 0
) -> tf.data.Dataset | None:
    """Return this worker's rows of a `tfdist.data` data pipeline; None for other data sets.

    Such a data pipeline reads only these rows.
    """
    replica_rows = getattr(dataset, "replica_rows", None)
    return replica_rows and replica_rows(
        placement.first_replica, placement.local_replicas, placement.replicas, first_step=skipped
    )


def _element_of(dataset: tf.data.Dataset) -> Callable[[tuple], Any]:
    """Return the function from the arguments of a function in `Dataset.map` to the element.

    `Dataset.map` unpacks a tuple, also one of a single part, and passes anything else as it is,
    also a NamedTuple.
    """
    whole = type(dataset.element_spec) is tuple
    return lambda args: args if whole else args[0]


def _worker_batch(
    data: Any, placement: Placement, even: bool = False, copies: bool = False
) -> Batch:
    rows = count_rows(data)
    if not even:
        check_equal_rows(data, placement.replicas)
    if placement.workers == 1:
        return Batch(copy_rows(data) if copies else data, rows)
    if even:
        part = even_part(data, placement.rank, placement.workers)
    else:
        begin, end = rows_of_replicas(
            rows, placement.first_replica, placement.local_replicas, placement.replicas, tf.minimum
        )
        part = cut(data, begin, end)
    return Batch(copy_rows(part) if copies else part, rows, _checksum(data, rows))


def _checksum(data: Any, rows) -> tf.Tensor:
    """Return a fingerprint of a global batch from its first row and its number of rows.

    Different batches almost always differ in it. It uses few operations, because every worker
    computes it at every step.
    """
    total = tf.cast(rows, tf.float64)
    for position, x in enumerate(tf.nest.flatten(data), start=1):
        if x is None or isinstance(x, tf.experimental.Optional | tf.SparseTensor | tf.RaggedTensor):
            continue
        first = tf.strings.to_hash_bucket_fast(x[:1], 65537) if x.dtype == tf.string else x[:1]
        total += position * tf.reduce_sum(tf.cast(first, tf.float64))
    return tf.where(tf.math.is_finite(total), total, tf.cast(rows, tf.float64))


def _always_even(spec: Any, replicas: int) -> bool:
    """Return whether every batch is known to give each replica the same number of rows.

    The tensors of a batch are dense then, and the rows of each divide among the replicas.
    """
    if replicas == 1:
        return True
    specs = tf.nest.flatten(spec)
    shapes = [s.shape for s in specs if isinstance(s, tf.TensorSpec)]
    return (
        bool(shapes)
        and all(s.rank and s[0] is not None and s[0] and s[0] % replicas == 0 for s in shapes)
        and not any(isinstance(s, tf.RaggedTensorSpec | tf.SparseTensorSpec) for s in specs)
    )


def symbolic(element_spec: Any) -> Any:
    """Return the element spec from which Keras builds a model, with None for Optionals."""
    return tf.nest.map_structure(
        lambda spec: None if isinstance(spec, tf.OptionalSpec) else spec, element_spec
    )
