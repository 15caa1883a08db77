"""Metric deltas: a traced step returns what it adds to metrics, seeds and step counts.

Workers that add to one variable at the same time lose each other's updates. A step on a worker
therefore starts its metrics at zero and returns what it added. The coordinator is the only writer,
and adds these deltas up.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_compat import (
    accumulating,
    global_generator,
    local_update,
    metric_variables,
    replaced_values,
    step_counter,
)
from tfdist.train.synchronous.replica_step import seed_states

# State of the trace in `collected`; it is global because TensorFlow traces in another thread.
_trace = types.SimpleNamespace(graph=None, updates=None, optimizer=None)

# Draws that a step may make from one seed generator before they overlap with the next step's.
_DRAWS_PER_STEP = 1024


class Cell:
    """Stand-in for a `tf.Variable` while a step is traced.

    Args:
        initial: Initial value, any tensor.
    """

    def __init__(self, initial: tf.Tensor):
        self._value = initial
        self.shape = initial.shape
        self.dtype = initial.dtype

    def value(self) -> tf.Tensor:
        """See `tf.Variable.value`."""
        return self._value

    read_value = value

    def assign(self, value, **_) -> tf.Tensor:
        """See `tf.Variable.assign`."""
        self._value = tf.cast(tf.convert_to_tensor(value), self.dtype)
        return self._value

    def assign_add(self, value, **_) -> tf.Tensor:
        """See `tf.Variable.assign_add`."""
        return self.assign(self.value() + tf.cast(value, self.dtype))

    def assign_sub(self, value, **_) -> tf.Tensor:
        """See `tf.Variable.assign_sub`."""
        return self.assign(self.value() - tf.cast(value, self.dtype))

    def __tf_tensor__(self, dtype=None, name=None) -> tf.Tensor:
        return self.value() if dtype is None else tf.cast(self.value(), dtype)

    def __getitem__(self, key):
        return self.value()[key]

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.value(), name)


def _operator(name: str):
    return lambda self, *args: getattr(self.value(), name)(*args)


for _name in (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "floordiv",
    "mod",
    "neg",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
):
    setattr(Cell, f"__{_name}__", _operator(f"__{_name}__"))


class Snapshot(Cell):
    """Stand-in for a parameter-server variable that has one value throughout a step.

    Writes of other workers do not change the value that the step reads.

    Args:
        variable: Variable, which receives the assignments.
    """

    def __init__(self, variable: tf.Variable):
        super().__init__(variable.read_value())
        self._variable = variable

    def assign(self, value, **_) -> tf.Tensor:
        """See `tf.Variable.assign`."""
        return self._variable.assign(tf.cast(value, self.dtype))


class Accumulator(Cell):
    """Stand-in for a parameter-server variable that writes assignments as increments.

    The increment is the difference between the assigned value and the value that was read.

    Args:
        variable: Variable.
    """

    def __init__(self, variable: tf.Variable):
        self._variable = variable
        # Keyed by graph, because each branch of a tf.cond has a graph of its own.
        self._reads: dict[tf.Graph, tf.Tensor] = {}
        self.shape = variable.shape
        self.dtype = variable.dtype

    def value(self) -> tf.Tensor:
        """See `tf.Variable.value`."""
        graph = tf.compat.v1.get_default_graph()
        if graph not in self._reads:
            self._reads[graph] = self._variable.read_value()
        return self._reads[graph]

    read_value = value

    def assign(self, value, **_) -> tf.Tensor:
        """Add the difference from the value that was read."""
        return self._variable.assign_add(tf.cast(value, self.dtype) - self.value())

    def add(self, gradient) -> None:
        """Add a gradient to the variable without reading it."""
        if isinstance(gradient, tf.IndexedSlices):
            self._variable.scatter_add(gradient)
        else:
            self._variable.assign_add(tf.cast(gradient, self.dtype))


@contextlib.contextmanager
def collected(model: keras.Model, seeds: tf.Tensor, index: tf.Tensor) -> Iterator[list[tf.Tensor]]:
    """Trace one step of a model, and collect its additions to metrics and step count.

    Args:
        model: Model.
        seeds: States of the model's seed generators at the beginning of the epoch, int64
            `[generators, 2]`.
        index: Number of the step in its epoch, int64 scalar. Each step draws its own random
            numbers, and the same ones when it runs again.

    Yields:
        A list that is filled when the block ends: one tensor for each of `metric_variables(model)`,
        then the number of updates by `model.optimizer`, int64 scalar.
    """
    metrics = metric_variables(model)
    generators = _generators(model)
    cells = [Cell(tf.zeros(v.shape, v.dtype)) for v in metrics]
    shift = tf.stack([tf.zeros_like(index), (index + 1) * _DRAWS_PER_STEP])
    states = [Cell(tf.cast(seeds[i] + shift, v.dtype)) for i, v in enumerate(generators)]
    added: list[tf.Tensor] = []
    _trace.graph = tf.compat.v1.get_default_graph()
    _trace.updates = tf.zeros((), tf.int64)
    _trace.optimizer = model.optimizer
    scale = _loss_scale(model.optimizer)
    # Otherwise a gradient could be scaled by one number, and unscaled by another.
    snapshots = [Snapshot(v.value) for v in scale]
    with replaced_values(stand_in_variables(model), [*cells, *states, *snapshots]):
        yield added
    added.extend([*(c.value() for c in cells), _trace.updates])


def stand_in_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of which `collected` replaces the values."""
    return [*metric_variables(model), *_generators(model), *_loss_scale(model.optimizer)]


def _loss_scale(optimizer: keras.optimizers.Optimizer | None) -> list[keras.Variable]:
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or not optimizer.built:
        return []
    return [optimizer.step_counter, optimizer.dynamic_scale]


def _generators(model: keras.Model) -> list[keras.Variable]:
    """Return the states of the generators that a model may draw from."""
    return [*seed_states(model), *global_generator.state_of(model.distribute_strategy)]


def seeds(model: keras.Model) -> tf.Tensor:
    """Return the states of the model's seed generators, int64 `[generators, 2]`."""
    return tf.constant(
        np.reshape([np.asarray(v.numpy(), np.int64) for v in _generators(model)], [-1, 2]), tf.int64
    )


def next_seeds(model: keras.Model, steps: int) -> None:
    """Advance the model's seed generators past the numbers that `steps` steps drew."""
    for v in _generators(model):
        v.assign(v + tf.cast([0, (steps + 1) * _DRAWS_PER_STEP], v.dtype))


@contextlib.contextmanager
def ticket(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Give an optimizer a step count that no other update gets, and count exactly one.

    Keras reads the count, and writes it back increased by one at the end of the update. Workers
    that update at the same time would count two updates as one. With gradient accumulation, they
    would also apply or skip an update twice, or lose gradients.
    """
    counter = step_counter(optimizer)
    number = tf.raw_ops.ResourceCountUpTo(
        resource=counter.value.handle, limit=counter.value.dtype.max, T=counter.value.dtype
    )
    with (
        replaced_values([counter], [Cell(number)]),
        accumulating(optimizer, Accumulator),
        local_update(optimizer, 0),
    ):
        yield


def count_updates(optimizer: keras.optimizers.Optimizer, updates) -> None:
    """Count an optimizer call for `collected`, if it is the model's optimizer.

    Args:
        optimizer: Optimizer that is called.
        updates: Whether the call updates the variables; bool or boolean tensor.
    """
    if _trace.graph is tf.compat.v1.get_default_graph() and optimizer is _trace.optimizer:
        _trace.updates += tf.cast(updates, tf.int64)
