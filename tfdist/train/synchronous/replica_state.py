"""Metric reduction over replicas, and synchronization of moving statistics, between steps.

All workers call these functions at the same step; none runs in the middle of a step. Metrics stay
on their replica while steps run, and are summed in one collective when they are read. Moving
statistics are averaged then too. They are linear in what each step adds, so averaging them late
equals averaging them every step.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_compat import (
    each_metric,
    local_component,
    metric_variables,
    metrics_of,
    resets_variables,
)
from tfdist.keras_compat.flat_calls import flat_call
from tfdist.parallel.collectives.group import native_transport
from tfdist.parallel.placement import Placement
from tfdist.train.synchronous.assigned_weights import check_equal, weights_among
from tfdist.train.synchronous.gathered_metrics import is_gathered
from tfdist.train.synchronous.replica_step import local_replica, moving_state

# Maximum number of values of which a snapshot has the part of each replica. The variables of larger
# metrics are mostly counts, such as confusion matrices, whose sums are exact.
MAX_PARTS = 1 << 16

# Number of times that metrics are reset, or those of a single worker read, without tracing a
# function. The trace costs as much as 15 to 20 of these, and a short `fit` has two to six.
UNTRACED = 8

_VALUES = "values"  # functions of `ReplicaState.values`
SHORTEST_ROW = 8  # numbers that `all_gather` sends at least


class ReplicaState:
    """Collectives of one model outside of its steps.

    Args:
        strategy: Synchronous strategy.
        placement: Numbers of workers and replicas.
        model: The model.

    Attributes:
        reads_metrics: Whether `metrics` calls the model's `get_metrics_result`.
    """

    reads_metrics = False

    def __init__(self, strategy: tf.distribute.Strategy, placement: Placement, model: keras.Model):
        self._strategy = strategy
        self._placement = placement
        # A weak reference, because an Engine keeps this object as long as the model lives.
        self._model = weakref.proxy(model)
        self._functions: dict[str, tuple[list[keras.Variable], Callable]] = {}
        self._sum_parts: Callable | None = None
        self._untraced = 0  # times that `metrics` has traced no function
        self._resets = 0  # times that `reset_metrics` was called
        self._bound = strategy.tfdist_engine.watchdog.bound

    def metrics(
        self, note: np.ndarray, indices: Sequence[int] = ()
    ) -> tuple[dict[str, Any], dict[int, Any], np.ndarray]:
        """Return the metric results over all replicas.

        Args:
            note: Float64 numbers of this worker, `[n]`, that travel along.
            indices: Indices of metrics in `metrics_of(model)`.

        Returns:
            The result of `model.get_metrics_result()`, the result of each metric in `indices`
            by its index, and the notes of all workers, `[workers, n]`.
        """
        variables = metric_variables(self._model)
        # Whether a metric is gathered is known after its first update only.
        kind = f"metrics {len(note)} {indices} {[is_gathered(v) for v in variables]}"
        if self._placement.workers == 1:
            if self._untraced < UNTRACED:
                self._untraced += 1
                return *_as_numpy(self.results(indices)), note[None]
            function = self._traced(kind, variables, lambda: self.results(indices))
            return *_as_numpy(function()), note[None]
        note_tensor = tf.constant(note, tf.float64)
        function = self._traced(
            kind, variables, lambda note: self._metrics(note, indices), note_tensor
        )
        with self._bound():
            results, own_results, notes = function(note_tensor)
        return *_as_numpy((results, own_results)), notes.numpy()

    def results(self, indices: Sequence[int]) -> tuple[dict[str, Any], dict[int, Any]]:
        """Return the metric results over the replicas of the only worker, as tensors.

        Args:
            indices: Indices of metrics in `metrics_of(model)`.

        Returns:
            The result of `model.get_metrics_result()`, and the result of each metric in `indices`
            by its index.
        """
        return self._results(self._totals_in_process(), indices)

    def reset_metrics(self, keras_method: Callable) -> None:
        """Run `keras.Model.reset_metrics`, after some calls as a traced function.

        That takes a third of the time. It assigns variables alone, so a metric with a `reset_state`
        of the user's is always reset by Keras.

        Args:
            keras_method: Keras' own method.
        """
        self._resets += 1
        metrics = self._model.metrics
        if self._resets <= UNTRACED or not all(map(resets_variables, each_metric(metrics))):
            keras_method(self._model)
            return
        variables = [v for metric in metrics for v in metric.variables]
        self._traced("reset", variables, lambda: keras_method(self._model))()

    def values(self, variables: Sequence[keras.Variable | tf.Variable]) -> list[tf.Tensor]:
        """Return the values of variables that all replicas share, or of copies, on the host.

        One call for all variables takes a third of the time of one call per variable. On the host
        nothing is copied: TensorFlow's next update of a variable writes to other memory as long as
        the tensor lives. The memory of other devices may not suffice for that.
        """
        if not variables:
            return []
        read = self._traced(
            f"{_VALUES} {len(variables)}",
            variables,
            lambda: [
                tf.identity(v.value if isinstance(v, keras.Variable) else v) for v in variables
            ],
        )
        return [value if "CPU" in value.device else value.cpu() for value in read()]

    def forget(self) -> None:
        """Release the variables that `values` has read."""
        for kind in [kind for kind in self._functions if kind.startswith(_VALUES)]:
            del self._functions[kind]

    def totals(self, variables: Sequence[keras.Variable]) -> list[np.ndarray]:
        """Return the totals over all replicas of variables of which each has a part, float64.

        The variables of metrics are an example.
        """
        if not variables:
            return []
        # Whether a metric is gathered is known after its first update only.
        gathered = [is_gathered(v) for v in variables]
        function = self._traced(
            f"totals {variables[0].path} {gathered}", variables, lambda: self._totals(variables)[0]
        )
        with self._bound():
            return [value.numpy() for value in function()]

    def parts(
        self, variables: Sequence[keras.Variable]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the totals of such variables, and the parts of the replicas.

        A run that resumes with the parts adds to each exactly what this run adds to it. From the
        total, it would get sums that are rounded in another way.

        Returns:
            The totals as `totals` returns them, and for each variable the value on each replica,
            float64 `[replicas, ...]`; empty if there are too many values, or if all are in the
            total.
        """
        if self._placement.replicas == 1 or not variables:
            totals = self.totals(variables)
            return totals, [np.zeros(0)] * len(totals)
        gathered = [is_gathered(v) for v in variables]
        has_parts = [
            not whole and np.prod(v.shape) * self._placement.replicas <= MAX_PARTS
            for v, whole in zip(variables, gathered, strict=True)
        ]
        function = self._traced(
            f"parts {gathered}", variables, lambda: self._parts(variables, has_parts)
        )
        with self._bound():
            flat = function().numpy()
        totals, parts = [], []
        for v, has in zip(variables, has_parts, strict=True):
            shape = [self._placement.replicas, *v.shape] if has else list(v.shape)
            values, flat = np.split(flat, [int(np.prod(shape))])
            values = values.reshape(shape)
            parts.append(values if has else np.zeros(0))
            totals.append(_total_of(v, values) if has else values)
        return totals, parts

    def _parts(self, variables: Sequence[keras.Variable], has_parts: Sequence[bool]) -> tf.Tensor:
        """Return the parts of variables, or their totals, flat."""

        def gather():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            replicas = self._placement.replicas
            local = local_replica(self._placement)
            flat = []
            for v, has in zip(variables, has_parts, strict=True):
                copy = local_component(v, local)
                flat.append(
                    _table(tf.reshape(tf.cast(copy, tf.float64), [-1]), replica, replicas)
                    if has
                    else _share_of(v, copy, replica, replicas)
                )
            return _all_sum(tf.concat(flat, 0), replicas, "parts of metrics")

        return self._strategy.experimental_local_results(self._strategy.run(gather))[0]

    def set_totals(
        self,
        variables: Sequence[keras.Variable],
        totals: list[np.ndarray],
        parts: Sequence[np.ndarray] = (),
    ) -> None:
        """Set such variables on all replicas, so that `totals` returns these values.

        Args:
            variables: The variables.
            totals: The totals.
            parts: Values as `parts` returns them, for the same number of replicas; others are
                ignored.
        """
        with self._strategy.scope() if variables else contextlib.nullcontext():
            for i, (variable, total) in enumerate(zip(variables, totals, strict=True)):
                shape = (self._placement.replicas, *np.shape(total))
                own = parts[i] if i < len(parts) and np.shape(parts[i]) == shape else None
                for local in range(self._placement.local_replicas):
                    replica = self._placement.first_replica + local
                    first = replica == 0 or variable.aggregation != "sum"
                    value = total if first else np.zeros_like(total)
                    copy = local_component(variable, local)
                    copy.assign(tf.cast(value if own is None else own[replica], copy.dtype))

    def fingerprint(self) -> float:
        """Return a number that almost always differs between workers whose weights differ.

        With one worker it is 0.
        """
        # Sharded variables are left out, because each worker has another part of them.
        weights = [v for v in self._model.trainable_variables if not hasattr(v, "tfdist_shape")]

        def total():
            sums = [
                tf.reduce_sum(tf.cast(local_component(v, 0), tf.float64)) * (1 + i % 7)
                for i, v in enumerate(weights)
            ]
            return tf.add_n(sums)

        return (
            float(self._traced("fingerprint", weights, total)())
            if weights and self._placement.workers > 1
            else 0.0
        )

    def check_equal(self, assigned: dict[int, tf.Variable]) -> None:
        """Raise ValueError if a weight that steps assign to differs between the replicas.

        Args:
            assigned: Variables by their id, the same ones on all workers; others than the model's
                weights may differ.
        """
        variables = weights_among(assigned, self._model)
        if not variables or self._placement.replicas == 1:
            return
        function = self._traced("check_equal", variables, lambda: self._copies(variables))
        with self._bound():
            numbers = function().numpy().reshape(self._placement.replicas, 2, -1)
        check_equal(variables, numbers[:, 0], numbers[:, 1], self._placement)

    def _copies(self, variables: Sequence[keras.Variable]) -> tf.Tensor:
        """Return a number for each replica's copy of each variable, and its bound, flat."""

        def gather():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            local = local_replica(self._placement)
            sums, bounds = [], []
            for v in variables:
                copy = tf.reshape(tf.cast(local_component(v, local), tf.float64), [-1])
                # The gradients of some weights, such as biases before a softmax, add up to zero.
                copy *= tf.cast(1 + tf.range(tf.size(copy)) % 7, tf.float64)
                sums.append(tf.reduce_sum(copy))
                bounds.append(tf.reduce_sum(tf.abs(copy)))
            replicas = self._placement.replicas
            copies = _table(tf.stack(sums + bounds), replica, replicas)
            return _all_sum(copies, replicas, "copies of weights")

        return self._strategy.experimental_local_results(self._strategy.run(gather))[0]

    def sums(self, parts: Sequence[Any]) -> list[np.ndarray]:
        """Return the sums over the replicas of float64 values that a step returned on each.

        With one replica, these are the values themselves, of any dtype.
        """
        if self._placement.replicas == 1:
            return [x.numpy() for x in parts]
        if self._sum_parts is None:
            self._sum_parts = tf.function(
                lambda parts: self._strategy.run(self._sums, args=(parts,)), autograph=False
            )
        with self._bound():
            sums = self._sum_parts(list(parts))
        return [self._strategy.experimental_local_results(x)[0].numpy() for x in sums]

    def _sums(self, parts):
        flat = tf.concat([tf.reshape(x, [-1]) for x in parts], 0)
        sizes = [x.shape.num_elements() for x in parts]
        sums = tf.split(_all_sum(flat, self._placement.replicas, "sums of a step"), sizes)
        return [tf.reshape(total, x.shape) for total, x in zip(sums, parts, strict=True)]

    def sync_replicas(self) -> None:
        """Synchronize the state of all replicas, also under local SGD."""
        self._sync_replicas()
        self.sync_statistics()

    def gather(self) -> None:
        """Synchronize as `sync_replicas` does, but only if local SGD steps have run since.

        Otherwise this method does not communicate with other workers.
        """
        if self._sync_replicas():
            self.sync_statistics()

    def _sync_replicas(self) -> bool:
        with self._bound():
            return self._strategy.tfdist_engine.aggregation.sync_replicas(
                getattr(self._model, "optimizer", None)
            )

    def sync_statistics(self) -> None:
        """Set every replica's moving statistics to their mean over the replicas."""
        variables = moving_state(self._model) if self._placement.replicas > 1 else []
        if variables:
            function = self._traced("sync_statistics", variables, self._sync_statistics)
            with self._bound():
                function()

    def _traced(
        self, kind: str, variables: Sequence[keras.Variable], body: Callable, *arguments: tf.Tensor
    ) -> Callable:
        """Return a traced function of some variables; retrace it for other variables.

        A call of it takes half to four fifths of the time of a `tf.function` call.
        """
        known, function = self._functions.get(kind, ([], None))
        if (
            function is None
            or len(known) != len(variables)
            or any(a is not b for a, b in zip(known, variables, strict=True))
        ):
            traced = tf.function(body, autograph=False).get_concrete_function(*arguments)
            function = functools.partial(flat_call, traced)
            # The variables are kept alive, so that a new one cannot get the address of an old one.
            self._functions[kind] = (list(variables), function)
        return function

    def _totals(self, variables: Sequence[keras.Variable], note: tf.Tensor | None = None):
        """Return the variables' totals over all replicas, and the notes of all workers, flat."""

        def gather():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            local = local_replica(self._placement)
            parts = [
                _share_of(v, local_component(v, local), replica, self._placement.replicas)
                for v in variables
            ]
            if note is not None:
                parts.append(_row(note, replica, self._placement))
            return _all_sum(tf.concat(parts, 0), self._placement.replicas, "totals")

        total = self._strategy.experimental_local_results(self._strategy.run(gather))[0]
        *parts, notes = tf.split(total, [*(int(np.prod(v.shape)) for v in variables), -1])
        return [tf.reshape(p, v.shape) for p, v in zip(parts, variables, strict=True)], notes

    def _totals_in_process(self) -> list[tf.Tensor]:
        """Return the totals of the metrics' variables over the replicas of the only worker."""
        replicas = self._placement.replicas
        totals = []
        with self._strategy.scope():  # otherwise a copy would be the sum of all copies
            for v in metric_variables(self._model):
                parts = [_share_of(v, local_component(v, i), i, replicas) for i in range(replicas)]
                totals.append(tf.reshape(tf.add_n(parts), v.shape))
        return totals

    def _metrics(self, note, indices):
        totals, notes = self._totals(metric_variables(self._model), note)
        return *self._results(totals, indices), tf.reshape(notes, [self._placement.workers, -1])

    def _results(self, totals: Sequence[tf.Tensor], indices: Sequence[int]) -> tuple[Any, Any]:
        """Return the metrics' results for these totals of their variables; see `metrics`."""
        variables = metric_variables(self._model)
        values = [tf.cast(total, v.dtype) for total, v in zip(totals, variables, strict=True)]
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            metrics = metrics_of(self._model)
            self.reads_metrics = True
            try:
                results = self._model.get_metrics_result()
            finally:
                self.reads_metrics = False
            own_results = {i: metrics[i].result() for i in indices}
            # A result may be a variable, which has these values only here.
            return tf.nest.map_structure(tf.convert_to_tensor, (results, own_results))

    def _sync_statistics(self):
        def average():
            local = local_replica(self._placement)
            copies = [local_component(v, local) for v in moving_state(self._model)]
            flat = tf.concat([tf.reshape(tf.cast(v, tf.float64), [-1]) for v in copies], 0)
            replicas = self._placement.replicas
            mean = _all_sum(flat, replicas, "moving statistics") / replicas
            for v, part in zip(
                copies, tf.split(mean, [int(np.prod(v.shape)) for v in copies]), strict=True
            ):
                v.assign(tf.cast(tf.reshape(part, v.shape), v.dtype))

        self._strategy.run(average)


def compare(notes: np.ndarray, placement: Placement) -> None:
    """Raise ValueError where workers differ in a way that breaks synchronous training.

    Args:
        notes: One row per worker: steps, checksum of batches, fingerprint of weights, pace, whether
            the worker was asked to stop.
        placement: Names of the workers.
    """
    remedies = (
        (
            "steps in this epoch",
            "Give every worker data of the same length, or set steps_per_epoch.",
        ),
        (
            "global batches",
            "Every worker must build the same data in the same order; tfdist then takes each "
            "worker's rows. Pass a seed to shuffle() and to generators, draw no random numbers in "
            "map(num_parallel_calls=...), do not shard() by worker, "
            "build a new data set that ends in repeat() for each fit, or use "
            "tfdist.data.pipeline.",
        ),
        (
            "weights after the first step",
            "Every worker must start from the same state. Build the model in strategy.scope(), and "
            "restore backups from a directory that all workers can read.",
        ),
    )
    for column, (name, remedy) in enumerate(remedies):
        for rank in range(1, placement.workers):
            own = notes[rank, column]
            chief = notes[0, column]
            if own != chief and not (np.isnan(own) and np.isnan(chief)):
                raise ValueError(
                    f"{placement.task(rank)} differs from {placement.task(0)} in {name}: "
                    f"{own:.12g} against {chief:.12g}. {remedy}"
                )


def check_same_on_workers(
    rows: np.ndarray, names: Sequence[str], placement: Placement
) -> tuple[bool, ...]:
    """Raise ValueError where workers differ in values that must be equal.

    Args:
        rows: One row per worker: the values that must be equal, then requests, each 0 or 1.
        names: Names of the values that must be equal.
        placement: Names of the workers.

    Returns:
        For each request, whether some worker made it.
    """
    for column, name in enumerate(names):
        for rank in range(1, len(rows)):
            if rows[rank, column] != rows[0, column]:
                raise ValueError(
                    f"{placement.task(rank)} differs from {placement.task(0)} in {name}: "
                    f"{rows[rank, column]:g} against {rows[0, column]:g}. Run the same script "
                    "with the same arguments in every task."
                )
    return tuple(bool(max(column)) for column in rows.T[len(names) :])


def all_gather(
    strategy: tf.distribute.Strategy, placement: Placement, row: np.ndarray
) -> np.ndarray:
    """Return the float64 numbers of all workers, `[workers, n]`, from each worker's `[n]`.

    Raises:
        RuntimeError: If a worker gathers another number of numbers: the workers are out of step.
    """
    # A length of its own would cost a trace.
    length = max(SHORTEST_ROW, 1 << len(row).bit_length())
    padded = tf.constant([len(row), *row, *np.zeros(length - len(row) - 1)], tf.float64)
    with strategy.tfdist_engine.watchdog.bound():
        rows = _gather_function(length, native_transport(strategy) is not None)(
            strategy, placement, padded
        )
    gathered = strategy.experimental_local_results(rows)[0].numpy()
    gathered = gathered.reshape(placement.workers, length)
    for rank, count in enumerate(gathered[:, 0]):
        if count != len(row):
            raise RuntimeError(
                f"{placement.task(rank)} is out of step: it exchanged {count:g} numbers, and "
                f"{placement.task(placement.rank)} {len(row)}. Run the same script with the same "
                "arguments in every task."
            )
    return gathered[:, 1 : 1 + len(row)]


@functools.cache
def _gather_function(length: int, native: bool):
    """Return the function that gathers rows of this length, by one kind of collectives.

    There is one function per length, because TensorFlow warns of a function that is traced for many
    shapes.
    """

    @functools.partial(tf.function, autograph=False)
    def gather_rows(strategy, placement, row):
        def gather(row):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return _all_sum(_row(row, replica, placement), placement.replicas, "rows")

        return strategy.run(gather, args=(row,))

    return gather_rows


def _row(row, replica, placement: Placement):
    """Return this worker's numbers in a row of their own among zeros, flattened.

    Only the worker's first replica contributes them.
    """
    one_hot = tf.one_hot(placement.rank, placement.workers, dtype=tf.float64)
    is_first = tf.cast(tf.equal(replica, placement.first_replica), tf.float64)
    return tf.reshape(one_hot[:, None] * row[None, :] * is_first, [-1])


def _table(row, replica, replicas: int):
    """Return a replica's numbers in a row of their own among zeros, flattened."""
    own = tf.one_hot(replica, replicas, on_value=True, off_value=False)[:, None]
    # A product with zeros would spread NaN.
    return tf.reshape(tf.where(own, row[None, :], tf.zeros_like(row)[None, :]), [-1])


def _total_of(variable: keras.Variable, parts: np.ndarray) -> np.ndarray:
    """Return the total of a variable over the replicas from its parts `[replicas, ...]`."""
    if variable.aggregation == "sum":
        return parts.sum(0)
    return parts.mean(0) if variable.aggregation == "mean" else parts[0]


def _as_numpy(tensors: Any) -> Any:
    return tf.nest.map_structure(lambda x: x.numpy(), tensors)


def _all_sum(x, replicas: int, name: str):
    """Return the sum over the replicas, by native collectives where there are any.

    TensorFlow's take a millisecond or more for a few numbers.

    Args:
        x: Numbers of this replica.
        replicas: Number of replicas.
        name: Name of this sum, in which workers that are out of step differ.
    """
    if replicas == 1:
        return x
    context = tf.distribute.get_replica_context()
    transport = native_transport(context.strategy)
    if transport is None:
        return context.all_reduce("SUM", x)
    return transport.all_reduce([x], name)[0]


def _share_of(variable: keras.Variable, component, replica, replicas: int):
    """Return this replica's addend for the variable's total over all replicas."""
    value = tf.reshape(tf.cast(component, tf.float64), [-1])
    if is_gathered(variable):
        return tf.where(tf.equal(replica, 0), value, tf.zeros_like(value))
    if variable.aggregation == "sum" or replicas == 1:
        return value
    if variable.aggregation == "mean":
        return value / replicas
    return tf.where(tf.equal(replica, 0), value, tf.zeros_like(value))
