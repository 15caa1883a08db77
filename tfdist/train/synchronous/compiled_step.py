"""Steps compiled by XLA on several replicas, with the optimizers' updates after them.

XLA cannot compile the collectives between replicas, which belong to `optimizer.apply` (keras
#18716). Here XLA compiles the step without that call: forward pass, loss, backward pass and
metrics. The call then takes the gradients that the compiled function returns, so that sums,
clipping, accumulation and updates are the same as without XLA.

Whether XLA can compile a step is found before the first one runs. A step that fails on a device
would abort the collectives of all workers.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import copies
from tfdist.keras_compat.parallel import known_variables
from tfdist.parallel.placement import Placement
from tfdist.parallel.replica_weight import weighted_step

log = logging.getLogger("tfdist")

# Number of shapes of batches from which a log line says that XLA compiles the step for each. Full
# and partial batches have at most four.
MANY_SHAPES = 9

_thread = threading.local()


class _NotCompiled(Exception):
    """Exception for a step that XLA cannot compile."""


@dataclasses.dataclass
class _Update:
    """A call of `optimizer.apply` in a step, which comes after the compiled part.

    Attributes:
        position: Number of operations of the step that come before the call.
    """

    optimizer: keras.optimizers.Optimizer
    keras_apply: Callable
    gradients: list
    variables: list | None
    position: int


@dataclasses.dataclass
class Trace:
    """The running trace of the part of a step that XLA compiles.

    Attributes:
        graph: Graph of that part.
        updates: Updates of the step so far.
        inputs: Names of the part's inputs that are values of variables, by the variables' ids.
        reason: Why XLA cannot compile the step; None if nothing was found. Keras, or a step's own
            code, may catch or replace the exception that is raised then.
    """

    graph: Any = None
    updates: list[_Update] = dataclasses.field(default_factory=list)
    inputs: dict[int, str] = dataclasses.field(default_factory=dict)
    reason: str | None = None

    def refuse(self, reason: str) -> None:
        """Raise _NotCompiled, and keep the first reason."""
        self.reason = self.reason or reason
        raise _NotCompiled(reason)

    def apply(self, gradients: list, apply: Callable | None) -> None:
        """Apply the gradients of each update, in their order; there may be none."""
        for update, grads in zip(self.updates, gradients, strict=True):
            assert apply is not None
            apply(update.optimizer, update.keras_apply, grads, update.variables)


def compiled(
    step: Callable, apply: Callable[[keras.optimizers.Optimizer, Callable, list, Any], Any]
) -> Callable:
    """Return a step of which XLA compiles all but the optimizers' updates.

    Args:
        step: Function of a replica's rows that returns tensors.
        apply: Function that applies gradients: `Engine.apply`.
    """

    def run(data: Any) -> Any:
        trace = Trace()
        results, gradients = compiled_part(step, trace)(data)
        trace.apply(gradients, apply)
        return results

    return run


def postpone(
    optimizer: keras.optimizers.Optimizer, keras_apply: Callable, gradients: list, variables: Any
) -> bool:
    """Leave an update for later if XLA compiles the step; return whether it does.

    Raises:
        _NotCompiled: If the update is not in the step itself.
    """
    trace = _running()
    if trace is None:
        return False
    if tf.compat.v1.get_default_graph() is not trace.graph:
        trace.refuse("it calls optimizer.apply in a branch, a loop or a function")
    position = len(trace.graph.get_operations())
    trace.updates.append(_Update(optimizer, keras_apply, gradients, variables, position))
    return True


def check_collective(name: str) -> None:
    """Raise _NotCompiled if this thread traces a step for XLA.

    XLA cannot compile collectives. Elsewhere, nothing happens.

    Args:
        name: Name of the collective for the log.
    """
    trace = _running()
    if trace is not None:
        scope = tf.get_current_name_scope()
        trace.refuse(f"it has a collective, {name}" + (f" in {scope!r}" if scope else ""))


def _running() -> Trace | None:
    return getattr(_thread, "trace", None)


def can_compile(
    step: Callable,
    name: str,
    data: Any,
    strategy: tf.distribute.Strategy,
    placement: Placement,
) -> bool:
    """Return whether XLA can compile a replica's step; log the reason if it cannot.

    The step is traced and translated for XLA, for the first replica of this process; nothing runs.

    Args:
        step: Function of a replica's rows that returns tensors.
        name: Name of the step for the log.
        data: Rows of a replica.
        strategy: The strategy.
        placement: Numbers of workers and replicas.
    """

    def check(trace: Trace) -> None:
        with (
            tf.distribute.ReplicaContext(strategy, placement.first_replica),
            tf.device(strategy.extended.worker_devices[0]),
            contextlib.ExitStack() as stack,
        ):
            if placement.replicas == 1:  # XLA compiles the updates too
                function = tf.function(step, jit_compile=True, autograph=False)
                function.experimental_get_compiler_ir(data)(stage="hlo")
                return
            stack.enter_context(weighted_step(1.0 / placement.replicas))
            check_step(step, trace, data)

    return passes(check, name)


def passes(check: Callable[[Trace], None], name: str) -> bool:
    """Return whether XLA can compile a step; log the reason if it cannot.

    Args:
        check: Function that fails, or gives the trace a reason, if XLA cannot compile the step.
        name: Name of the step for the log.
    """
    trace = Trace()
    # Replicas are traced in threads too, and what Keras keeps for a thread ends with it.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(check, trace).result()
        except Exception as error:  # a fault of the step is raised again when it runs without XLA
            trace.reason = trace.reason or _reason(error)
    if trace.reason is not None:
        log.warning(
            "jit_compile: XLA cannot compile %s, which runs without it: %s", name, trace.reason
        )
    return trace.reason is None


def check_step(step: Callable, trace: Trace, data: Any) -> None:
    """Raise an error unless XLA can compile a step up to its updates.

    Args:
        step: Function of `data` that returns tensors.
        trace: Object that describes the step's trace.
        data: Nest of tensors.
    """
    function = compiled_part(step, trace)
    function.get_concrete_function(data)
    _check_collectives(trace)
    for update in trace.updates:
        _check_order(trace, update)
    function.experimental_get_compiler_ir(data)(stage="hlo")


def compiled_part(step: Callable, trace: Trace) -> Any:
    """Return a function, compiled by XLA, that returns a step's results and gradients.

    Args:
        step: The step.
        trace: Object that describes the function's last trace.
    """

    def part(data: Any) -> tuple:
        trace.graph = tf.compat.v1.get_default_graph()
        trace.updates.clear()
        _thread.trace = trace
        try:
            results = step(data)
        finally:
            del _thread.trace
        return results, [update.gradients for update in trace.updates]

    return tf.function(part, jit_compile=True, autograph=False)


def _check_collectives(trace: Trace) -> None:
    """Raise _NotCompiled if a graph has collectives, which XLA takes for those of one replica."""
    definition = trace.graph.as_graph_def()
    functions = definition.library.function
    for node in (*definition.node, *(node for f in functions for node in f.node_def)):
        if node.op.startswith(("Collective", "Nccl")):
            trace.refuse(f"it has a collective, {node.op} in {node.name!r}")


def _check_order(trace: Trace, update: _Update) -> None:
    """Raise _NotCompiled if operations after an update need what it updates."""
    variables = update.variables
    if variables is None:
        variables = known_variables(update.optimizer)
    state = [*variables, *update.optimizer.variables]
    paths = {id(copy.handle): v.path for v in state for copy in copies(v)}
    captured = {
        inside.name: paths[id(outside)]
        for outside, inside in trace.graph.captures
        if id(outside) in paths
    }
    captured |= {trace.inputs[id(v)]: v.path for v in state if id(v) in trace.inputs}
    for operation in trace.graph.get_operations()[update.position :]:
        for x in operation.inputs:
            if x.name in captured:
                trace.refuse(f"it uses {captured[x.name]!r} after the optimizer.apply that sets it")


def _reason(error: Exception) -> str:
    """Return the reason of an error in one line."""
    text = str(error)
    missing = re.search(r"No registered '(\w+)' OpKernel.*?\{\{node ([^}]+)\}\}", text, re.DOTALL)
    if missing:
        operation, node = missing.groups()
        if operation == "_Arg":
            dtype = re.search(r"T=DT_(\w+)", text)
            what = f"of dtype {dtype[1].lower()}" if dtype else "of this type"
            return f"XLA takes no inputs {what} ({node!r})"
        return f"XLA has no kernel for {operation} ({node!r})"
    first = re.sub(r"^Failed getting HLO text: '", "", text).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"


class BatchShapes:
    """Record of the shapes of batches, for each of which XLA compiles the step.

    Args:
        host: CPU device name.
    """

    def __init__(self, host: str):
        with tf.init_scope(), tf.device(host):
            self._table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 0)
        self._host = host
        self._reported = False

    def note(self, data: Any) -> None:
        """Record the shapes of a batch while a step runs; nothing if they are always the same."""
        shapes = [x for x in tf.nest.flatten(data) if isinstance(x, tf.Tensor)]
        if all(x.shape.is_fully_defined() for x in shapes):
            return
        with tf.device(self._host):
            texts = [tf.strings.format("{}", tf.shape(x)) for x in shapes]
            self._table.insert(tf.strings.join(texts, " "), tf.zeros([], tf.int64))

    def report(self) -> None:
        """Say once, in a log line, that batches have many shapes."""
        if self._reported or (count := int(self._table.size())) < MANY_SHAPES:
            return
        self._reported = True
        examples = sorted(key.decode() for key in self._table.export()[0].numpy())[:3]
        log.warning(
            "jit_compile: batches have had %d shapes so far (%s, ...), and XLA compiles the "
            "step for each. Pad batches to a few shapes, or pass jit_compile=False.",
            count,
            ", ".join(examples),
        )
