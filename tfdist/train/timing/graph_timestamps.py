"""Timestamps in the graph of a step, each taken when given tensors are available.

They add no collective and change no value. While `measuring` is on, the functions below record when
a replica's gradients are available, when their sums are, and which operations update the variables.
Otherwise they do nothing, and the graph is the same as without them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.keras_compat import ops_are_deterministic, unordered
from tfdist.parallel.placement import Placement

PER_REPLICA = 3  # readings: gradients available, sums available, step done

_scope = types.SimpleNamespace(timestamps=None)  # seen by the threads in which replicas are traced
_FUNCTION_OPS = frozenset(
    {
        "If",
        "StatelessIf",
        "While",
        "StatelessWhile",
        "Case",
        "PartitionedCall",
        "StatefulPartitionedCall",
    }
)


@dataclasses.dataclass
class _Replica:
    # One reading for each update of the step; a step of a GAN has two updates.
    gradients: list = dataclasses.field(default_factory=list)
    sums: list = dataclasses.field(default_factory=list)
    updated: list = dataclasses.field(default_factory=list)
    updates: list = dataclasses.field(default_factory=list)  # operations
    done: Any = None


class GraphTimestamps:
    """Clock readings of one step on this process' replicas.

    Args:
        placement: Number of local replicas.
        host: CPU device name.
        remote: Whether replicas compute on devices whose work the clock must be made to wait for.
    """

    def __init__(self, placement: Placement, host: str, remote: bool):
        self._host = host
        self._remote = remote
        self._graph = _graph()
        self._replicas = [_Replica() for _ in range(placement.local_replicas)]
        self.bytes = 0  # of gradients that a replica contributes to the sum, by static shapes

    @property
    def in_step_graph(self) -> bool:
        """Return whether the traced code belongs to the step itself.

        The tensors of a function within the step are not available outside of it.
        """
        return _graph() is self._graph

    def before_sum(self, local: int, gradients: list, summed: bool) -> None:
        """Record the time when a replica's gradients are available."""
        replica = self._replicas[local]
        parts = _tensors(gradients)
        if not parts:
            return
        if replica.gradients:
            replica.updated.append(self._read(replica.updates))
        replica.gradients.append(self._read(parts))
        replica.sums.append(replica.gradients[-1])
        if summed and local == 0:
            self.bytes += sum((x.shape.num_elements() or 0) * x.dtype.size for x in parts)

    def after_sum(self, local: int, sums: list) -> None:
        """Record the time when the sums of the gradients are available."""
        # Without gradients of its own, a replica has sent none.
        if (parts := _tensors(sums)) and self._replicas[local].sums:
            self._replicas[local].sums[-1] = self._read(parts)

    @contextlib.contextmanager
    def update(self, local: int) -> Iterator[None]:
        """Record the operations of this context as updates of a replica's variables."""
        first_new = 0 if tf.executing_eagerly() else len(self._graph.get_operations())
        yield
        if not tf.executing_eagerly():
            new_ops = self._graph.get_operations()[first_new:]
            self._replicas[local].updates += [
                op for op in new_ops if not op.outputs or op.type in _FUNCTION_OPS
            ]

    def end(self, local: int, logs: Any) -> None:
        """Record the time when a replica's step is done: its results and its updates."""
        self._replicas[local].done = self._read(
            [*_tensors(tf.nest.flatten(logs)), *self._replicas[local].updates]
        )

    def row(self, first: Any) -> tf.Tensor:
        """Return all readings of the step, float64 `[1 + PER_REPLICA * local replicas]`.

        Args:
            first: Reading that comes first in the row.
        """
        readings = [first]
        for replica in self._replicas:
            readings += [*_as_one_update(replica), replica.done]
        with tf.device(self._host):
            return tf.stack(readings)

    def _read(self, dependencies: list) -> tf.Tensor:
        if not self._remote or not (
            tensors := [x for x in dependencies if isinstance(x, tf.Tensor)]
        ):
            return clock(dependencies)
        # A kernel counts as done when it is launched, but a copy to the host waits for the device.
        with tf.control_dependencies(dependencies):
            element = tf.reshape(tensors[-1], [-1])[:1]
        with tf.device(self._host):
            return clock([tf.identity(element)])


@contextlib.contextmanager
def measuring(timestamps: GraphTimestamps | None) -> Iterator[None]:
    """Use these timestamps while a step is traced, or runs eagerly, in this context."""
    outer = _scope.timestamps
    _scope.timestamps = timestamps
    try:
        yield
    finally:
        _scope.timestamps = outer


def before_sum(local: int, gradients: list, summed: bool) -> None:
    """Record a replica's gradients before they are summed.

    Args:
        local: Index of the replica among those of this process.
        gradients: Gradients of the replica.
        summed: Whether there is a sum over replicas.
    """
    if (timestamps := _timestamps()) is not None:
        timestamps.before_sum(local, gradients, summed)


def after_sum(local: int, sums: list) -> None:
    """Record the sums that a replica receives."""
    if (timestamps := _timestamps()) is not None:
        timestamps.after_sum(local, sums)


def update(local: int) -> contextlib.AbstractContextManager:
    """Return a context that records the updates of a replica's variables."""
    timestamps = _timestamps()
    return contextlib.nullcontext() if timestamps is None else timestamps.update(local)


def end(local: int, logs: Any) -> None:
    """Record the results of a replica's step."""
    if (timestamps := _timestamps()) is not None:
        timestamps.end(local, logs)


def clock(dependencies: list) -> tf.Tensor:
    """Return the time, in seconds since 1970, when these tensors and operations are done.

    Nothing waits for this reading. It is 0 if TensorFlow's operations are deterministic, because no
    kernel may read the clock then.
    """
    if ops_are_deterministic():
        return tf.zeros([], tf.float64)
    with tf.control_dependencies(dependencies):
        now = tf.timestamp()
    if not tf.executing_eagerly():
        unordered(now.op)
    return now


def _timestamps() -> GraphTimestamps | None:
    timestamps = _scope.timestamps
    return timestamps if timestamps is not None and timestamps.in_step_graph else None


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _tensors(values: list) -> list[tf.Tensor]:
    parts = [x.values if isinstance(x, tf.IndexedSlices) else x for x in values]
    return [x for x in parts if isinstance(x, tf.Tensor)]


def _as_one_update(replica: _Replica) -> tuple:
    """Return when gradients and sums would be available if all updates came at the step's end."""
    # Without readings, the step has no updates or makes them in a function of its own. All of its
    # time then counts as forward and backward pass.
    if not replica.gradients:
        return replica.done, replica.done
    gradients = replica.gradients[-1]
    sums = replica.sums[-1]
    earlier = zip(replica.gradients, replica.sums, replica.updated, strict=False)
    for available, summed, updated in earlier:
        gradients = gradients - (updated - available)
        sums = sums - (updated - summed)
    return gradients, sums
