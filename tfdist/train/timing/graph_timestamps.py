"""Clock readings in the graph of a step, each tied to what must be there before; they add no collective and change no value.

While `measuring` is on, the functions below note when a replica's gradients are there, when their sums are, and which operations
update the variables. Off, they do nothing, and the graph is what it would be without them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.keras_compat import unordered
from tfdist.parallel.placement import Placement

PER_REPLICA = 3  # readings: gradients there, sums there, step done

_scope = types.SimpleNamespace(timestamps=None)  # seen by the threads in which replicas are traced
_WHOLE = frozenset(
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
    gradients: list = dataclasses.field(
        default_factory=list
    )  # one reading for each update of the step; a step of a GAN has two
    sums: list = dataclasses.field(default_factory=list)
    updated: list = dataclasses.field(default_factory=list)
    updates: list = dataclasses.field(default_factory=list)  # operations
    done: Any = None


class GraphTimestamps:
    """The readings of one step on this process' replicas.

    Args:
        placement: How many those are.
        host: CPU device name.
        remote: Whether replicas compute on devices whose work the clock must be made to wait for.
    """

    def __init__(self, placement: Placement, host: str, remote: bool):
        self._host, self._remote = host, remote
        self._graph = _graph()
        self._replicas = [_Replica() for _ in range(placement.local_replicas)]
        self.bytes = 0  # of gradients that a replica gives into the sum, as far as shapes say

    @property
    def here(self) -> bool:
        """Whether what is traced belongs to the step itself: not to a function within it, which keeps its tensors."""
        return _graph() is self._graph

    def before_sum(self, local: int, gradients: list, summed: bool) -> None:
        replica, parts = self._replicas[local], _tensors(gradients)
        if not parts:
            return
        if replica.gradients:
            replica.updated.append(self._read(replica.updates))
        replica.gradients.append(self._read(parts))
        replica.sums.append(replica.gradients[-1])
        if summed and local == 0:
            self.bytes += sum((x.shape.num_elements() or 0) * x.dtype.size for x in parts)

    def after_sum(self, local: int, sums: list) -> None:
        if parts := _tensors(sums):
            self._replicas[local].sums[-1] = self._read(parts)

    @contextlib.contextmanager
    def update(self, local: int) -> Iterator[None]:
        known = 0 if tf.executing_eagerly() else len(self._graph.get_operations())
        yield
        if not tf.executing_eagerly():
            made = self._graph.get_operations()[known:]
            self._replicas[local].updates += [
                op for op in made if not op.outputs or op.type in _WHOLE
            ]

    def end(self, local: int, logs: Any) -> None:
        """The step of a replica is done: what it returns is there, and its updates are made."""
        self._replicas[local].done = self._read(
            [*_tensors(tf.nest.flatten(logs)), *self._replicas[local].updates]
        )

    def row(self, first: Any) -> tf.Tensor:
        """All readings of the step, float64 `[1 + PER_REPLICA * local replicas]`.

        Args:
            first: A reading that comes first in the row.
        """
        readings = [first]
        for replica in self._replicas:
            readings += [*_as_one_update(replica), replica.done]
        with tf.device(self._host):
            return tf.stack(readings)

    def _read(self, after: list) -> tf.Tensor:
        if not self._remote or not (tensors := [x for x in after if isinstance(x, tf.Tensor)]):
            return clock(after)
        # A kernel that is launched counts as done; a copy to the host waits for the device.
        with tf.control_dependencies(after):
            element = tf.reshape(tensors[-1], [-1])[:1]
        with tf.device(self._host):
            return clock([tf.identity(element)])


@contextlib.contextmanager
def measuring(timestamps: GraphTimestamps | None) -> Iterator[None]:
    """Inside, a step is traced, or runs eagerly, with these timestamps."""
    outer, _scope.timestamps = _scope.timestamps, timestamps
    try:
        yield
    finally:
        _scope.timestamps = outer


def before_sum(local: int, gradients: list, summed: bool) -> None:
    """A replica's gradients, as they are given into the sum, if there is one."""
    if (timestamps := _timestamps()) is not None:
        timestamps.before_sum(local, gradients, summed)


def after_sum(local: int, sums: list) -> None:
    """The sums that a replica gets."""
    if (timestamps := _timestamps()) is not None:
        timestamps.after_sum(local, sums)


def update(local: int) -> contextlib.AbstractContextManager:
    """Inside, a replica's variables are updated."""
    timestamps = _timestamps()
    return contextlib.nullcontext() if timestamps is None else timestamps.update(local)


def end(local: int, logs: Any) -> None:
    """What the step of a replica returns."""
    if (timestamps := _timestamps()) is not None:
        timestamps.end(local, logs)


def clock(after: list) -> tf.Tensor:
    """The time, in seconds since 1970, when these tensors and operations are done; nothing waits for it."""
    with tf.control_dependencies(after):
        now = tf.timestamp()
    if not tf.executing_eagerly():
        unordered(now.op)
    return now


def _timestamps() -> GraphTimestamps | None:
    timestamps = _scope.timestamps
    return timestamps if timestamps is not None and timestamps.here else None


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _tensors(values: list) -> list[tf.Tensor]:
    parts = [x.values if isinstance(x, tf.IndexedSlices) else x for x in values]
    return [x for x in parts if isinstance(x, tf.Tensor)]


def _as_one_update(replica: _Replica) -> tuple:
    """When the gradients and the sums would have been there, had all updates of the step come at its end."""
    if (
        not replica.gradients
    ):  # updates within a function of the step's own, or none: all is forward and backward
        return replica.done, replica.done
    gradients, sums = replica.gradients[-1], replica.sums[-1]
    earlier = zip(replica.gradients, replica.sums, replica.updated, strict=False)
    for begun, summed, updated in earlier:
        gradients = gradients - (updated - begun)
        sums = sums - (updated - summed)
    return gradients, sums
