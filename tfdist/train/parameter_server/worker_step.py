"""Worker steps that XLA compiles, between their reads and writes on parameter servers.

XLA compiles for one device, and takes no variables of other processes. So a step reads all
variables of its model first. XLA compiles the step on their values, up to `optimizer.apply`:
forward pass, loss, backward pass and metrics. State that the step has assigned and the updates go
to the parameter servers after that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import replaced_values, watch_variable
from tfdist.train.parameter_server.metric_deltas import Cell, stand_in_variables
from tfdist.train.synchronous.compiled_step import Trace, check_step, compiled_part, passes

CHECKED_ROWS = 8  # of a batch whose number of rows is unknown, while XLA is only asked


class GivenValue(Cell):
    """Stand-in for a variable of which a step has the value.

    As of a variable, gradients are those of the value, and reach nothing that was assigned.

    Args:
        initial: The value.
        trainable: Whether gradient tapes watch it.
    """

    def __init__(self, initial: tf.Tensor, trainable: bool):
        super().__init__(initial)
        self.trainable = trainable
        self.handle = initial  # what a tape watches of a variable
        self.is_assigned = False

    def value(self) -> tf.Tensor:
        """See `tf.Variable.value`."""
        if self.trainable:
            watch_variable(self)
        return super().value()

    read_value = value

    def assign(self, value, **_) -> tf.Tensor:
        """See `tf.Variable.assign`."""
        self.is_assigned = True
        return super().assign(tf.stop_gradient(value))

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        # `self.value()` tells TensorFlow to watch, which looks for attributes here.
        return getattr(super().value(), name)


class WorkerStep:
    """Step of a model on a worker, compiled by XLA if `compile` got `jit_compile`.

    Args:
        step: Function of a batch that returns tensors.
        name: Name of the step for the log.
        model: The model, whose step it is.
        host: Device of this process.
        apply: Function that applies gradients: `Coordinator.apply`; None if the step has none.
    """

    def __init__(
        self,
        step: Callable,
        name: str,
        model: keras.Model,
        host: str,
        apply: Callable | None = None,
    ):
        self._step = step
        self._name = name
        self._model = model
        self._host = host
        self._apply = apply
        self._is_compiled = False  # by XLA, for the type of batches that was prepared last
        self._assigned: list[keras.Variable] = []  # by the step that was traced last

    def prepare(self, specs: Any) -> None:
        """Find out whether XLA can compile the step; log the reason if it cannot.

        The step is traced and translated for XLA in this process; nothing runs.

        Args:
            specs: Types of the batches of the next trace, whose number of rows may be unknown.
        """
        self._is_compiled = bool(self._model.jit_compile) and self._can_compile(specs)

    def __call__(self, batch: Any) -> Any:
        """Trace the step on a batch of the type that was prepared, and return its results."""
        if not self._is_compiled:
            return self._step(batch)
        variables = self._variables()
        trace = Trace()
        compiled = compiled_part(self._on_values(variables, trace), trace)
        values = [tf.convert_to_tensor(v.value) for v in variables]
        (results, states), gradients = compiled((batch, values))
        for variable, state in zip(self._assigned, states, strict=True):
            variable.assign(state)
        trace.apply(gradients, self._apply)
        return results

    def _can_compile(self, specs: Any) -> bool:
        strategy = self._model.distribute_strategy
        variables = self._variables()

        def check(trace: Trace) -> None:
            if strategy.num_replicas_in_sync > 1:
                trace.refuse("a worker has several devices")
            if not self._model.built:
                trace.refuse("the model is not built; fit builds it, and so does build")
            step = self._on_values(variables, trace)

            def checked(data: tuple) -> tuple:
                results = step(data)
                self._check_resources(trace)
                return results

            with tf.distribute.ReplicaContext(strategy, 0), tf.device(self._host):
                batch = tf.nest.map_structure(lambda spec: _zeros(spec, trace), specs)
                values = [tf.zeros(v.shape, v.dtype) for v in variables]
                check_step(checked, trace, (batch, values))

        return passes(check, self._name)

    def _variables(self) -> list[keras.Variable]:
        both = [*self._model.variables, *stand_in_variables(self._model)]
        return list({id(v): v for v in both}.values())

    def _on_values(self, variables: list[keras.Variable], trace: Trace) -> Callable:
        """Return the step as a function of a batch and of the values of variables."""

        def step(data: tuple) -> tuple:
            batch, values = data
            cells = [GivenValue(x, _is_watched(v)) for x, v in zip(values, variables, strict=True)]
            trace.inputs = {id(v): x.name for x, v in zip(values, variables, strict=True)}
            with replaced_values(variables, cells):
                results = self._step(batch)
            assigned = [(v, c) for v, c in zip(variables, cells, strict=True) if c.is_assigned]
            for v, cell in assigned:
                # The updates follow all assignments, and may be of this variable.
                if cell.trainable:
                    trace.refuse(f"it assigns the trainable weight {v.path!r} itself")
            self._assigned = [v for v, _ in assigned]
            return results, [cell.value() for _, cell in assigned]

        return step

    def _check_resources(self, trace: Trace) -> None:
        """Raise an error if the step uses a variable or table of another process."""
        optimizer = self._model.optimizer
        paths = {id(v.value.handle): v.path for v in (optimizer.variables if optimizer else ())}
        for x, _ in trace.graph.captures:
            if x.dtype == tf.resource:
                what = f"{paths[id(x)]!r}" if id(x) in paths else "a resource"
                trace.refuse(f"it uses {what} of another process")


def _is_watched(variable: keras.Variable) -> bool:
    """Return whether tapes watch a variable, as they do if its layer is frozen later."""
    return getattr(variable.value, "trainable", variable.trainable)


def _zeros(spec: tf.TypeSpec | None, trace: Trace) -> tf.Tensor | None:
    if spec is None or isinstance(spec, tf.OptionalSpec):  # Keras' absent sample weights
        return None
    if not isinstance(spec, tf.TensorSpec):
        trace.refuse(f"its batches have a {spec.value_type.__name__}")
    return tf.zeros([CHECKED_ROWS if n is None else n for n in spec.shape], spec.dtype)
