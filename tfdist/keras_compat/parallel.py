"""What sharded optimizers and models need of Keras' private names."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import (  # masks have no public accessors in every version
    get_keras_mask,
    set_keras_mask,
)
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from tensorflow.python.framework.ops import gradient_registry

_CONTEXT = ("current_call_ctx", "autocast_scope")
_state = threading.local()


@contextlib.contextmanager
def clipping(optimizer: keras.optimizers.Optimizer, clip: Callable[[list], list]) -> Iterator[None]:
    """Inside, an optimizer clips gradients by this function: Keras' own would take the norm of a replica's shards alone."""
    optimizer._clip_gradients = clip
    try:
        yield
    finally:
        del optimizer._clip_gradients


def clip_elementwise(optimizer: keras.optimizers.Optimizer, grads: list) -> list:
    """What an optimizer's own clipping makes of gradients."""
    return type(optimizer)._clip_gradients(optimizer, grads)


def exclude_alike(
    given: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    optimizer: keras.optimizers.Optimizer,
    others: Sequence[keras.Variable],
) -> None:
    """Excludes those of others from weight decay by an optimizer that stand for variables which the user has excluded of what is given."""
    excluded = {
        optimizer._var_key(other)
        for v, other in zip(variables, others, strict=True)
        if not given._use_weight_decay(v)
    }
    optimizer._exclude_from_weight_decay = (
        getattr(optimizer, "_exclude_from_weight_decay", set()) | excluded
    )


def moving_averages(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The averages that an optimizer with `use_ema` keeps of its variables, in their order."""
    return list(optimizer._model_variables_moving_average)


def graph_calls(model: keras.Model) -> list[tuple[Any, list, list]] | None:
    """The calls that a Functional model is made of, in an order in which they can run; None for another model.

    Returns:
        Of each call the layer or operation, and its input and output tensors (`keras.KerasTensor`). Calls of input layers are left out.
    """
    depths = getattr(model, "_nodes_by_depth", None)
    if depths is None:
        return None
    nodes = [
        node
        for depth in sorted(depths, reverse=True)
        for node in depths[depth]
        if not node.is_input
    ]
    return [(node.operation, list(node.input_tensors), list(node.output_tensors)) for node in nodes]


def layer_weights(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The variables that a layer, and those in it, made as weights, also where they are frozen (`non_trainable_variables` has frozen ones and state)."""
    return [v for each in layer._flatten_layers() for v in each._trainable_variables]


def move(variable: keras.Variable, device: str) -> None:
    """Gives a variable that exists another place."""
    before = variable._value
    if tf.DeviceSpec.from_string(before.device) == tf.DeviceSpec.from_string(device):
        return
    with tf.init_scope(), tf.device(device):
        variable._value = tf.Variable(
            before.read_value(),
            trainable=variable.trainable,
            dtype=before.dtype,
            name=variable.name,
            aggregation=before.aggregation,
        )


def with_mask(x: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Lets a tensor carry a mask, and returns the tensor."""
    if mask is not None:
        set_mask(x, mask)
    return x


class _Places:
    """Stands in for a strategy, and for its `extended`: what concerns a variable happens on the variable's device."""

    def __init__(self):
        self.extended = self

    def update(self, variable, function, args=(), kwargs=None, group=True):
        with tf.device(variable.device):
            return function(variable, *args, **(kwargs or {}))

    def colocate_vars_with(self, variable):
        return tf.device(variable.device)


class _Beside:
    """Names the device of an operation that has none: where the largest of what it takes lies, or the variable that it uses."""

    def __init__(self):
        self._outer: dict[
            tf.Graph, dict[str, tf.Tensor]
        ] = {}  # what placeholders of a function stand for

    def __call__(self, operation: tf.Operation) -> str:
        return operation.device or (
            self._place(max(operation.inputs, key=_size)) if operation.inputs else ""
        )

    def _place(self, x: tf.Tensor) -> str:
        if isinstance(x, tf.__internal__.EagerTensor) or x.device:
            return x.device
        if (
            x.op.type == "ReadVariableOp"
        ):  # goes where its variable is, whatever device is asked for
            return self._place(x.op.inputs[0])
        if x.op.type != "Placeholder":
            return ""
        known = self._outer.setdefault(x.graph, {})
        if x.name not in known:
            known.update((inner.name, outer) for outer, inner in getattr(x.graph, "captures", ()))
        return self._place(known[x.name]) if x.name in known else ""


def _size(x: tf.Tensor) -> float:
    if x.dtype == tf.resource:
        return math.inf
    return sys.maxsize if x.shape.num_elements() is None else x.shape.num_elements()


@contextlib.contextmanager
def updating_in_place(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Inside, an optimizer takes gradients as summed, and its slots, and all it computes, are where variables lie; to be entered in the function that is traced.

    The default strategy sums the gradients of one replica by one operation over all of them, which waits for the last one and takes them
    to the default device; and there it computes what concerns no variable alone, such as whether gradients are finite.
    """
    chain = []
    while optimizer is not None:
        chain.append((optimizer, optimizer._distribution_strategy))
        optimizer = getattr(optimizer, "inner_optimizer", None)
    for each, _ in chain:
        each._distribution_strategy = _Places()
        each._all_reduce_sum_gradients = lambda grads_and_vars: grads_and_vars
        each._backend_reset_gradient_accumulators = functools.partial(_reset_accumulators, each)
    try:
        # `tf.device` takes no function; run eagerly, each operation is where TensorFlow finds its inputs.
        with (
            contextlib.nullcontext()
            if tf.executing_eagerly()
            else tf.compat.v1.get_default_graph().device(_Beside())
        ):
            yield
    finally:
        for each, strategy in chain:
            each._distribution_strategy = strategy
            del each._all_reduce_sum_gradients, each._backend_reset_gradient_accumulators


def _reset_accumulators(optimizer: keras.optimizers.Optimizer) -> None:
    """As Keras does it, but that zeros take no inputs by which they would find their place."""
    for v in optimizer._accumulated_gradients:
        if v is not None:
            with tf.device(v.value.device):
                v.assign(tf.zeros(v.shape, v.dtype))


# --- Variables that are shared out over the replicas ------------------------------------------------------------------
class Sharded(keras.Variable):
    """A variable of which each replica holds a row: whole to those who read and write it, a row to optimizers.

    Attributes:
        tfdist_shape: Shape of the whole.
        tfdist_store: Reads and writes the whole, by its methods `whole(variable)` and `put(variable, value)`; `update` takes gradients.
    """

    tfdist_shape: tuple[int, ...]
    tfdist_store: Any

    @property
    def shape(self):
        return self._value.shape if in_shards() else tf.TensorShape(self.tfdist_shape)

    @property
    def value(self):
        if in_shards():
            return self._value
        given = _given(self)
        if given is None and in_symbolic_scope():
            given = tf.zeros(self.tfdist_shape, self._dtype)
        return self._maybe_autocast(self.tfdist_store.whole(self) if given is None else given)

    @property
    def handle(self):
        return self._value.handle

    def _direct_assign(self, value):
        if in_shards():
            self._value.assign(tf.cast(value, self._value.dtype))
        else:
            self.tfdist_store.put(self, tf.cast(value, self._value.dtype))


def make_sharded(variable: keras.Variable, rows: Any, shape: Sequence[int], store: Any) -> None:
    """Turns a variable into one of which each replica holds a row.

    Args:
        variable: It.
        rows: A `tf.Variable` with a copy on each replica, `[length]`: its row. None: the variable holds its rows already.
        shape: Of the whole.
        store: See `Sharded`.
    """
    if rows is not None:
        variable._value, variable._initializer = rows, None
    variable.__class__ = Sharded
    variable.tfdist_shape, variable.tfdist_store = tuple(int(n) for n in shape), store
    variable._shape, variable._ndim = variable.tfdist_shape, len(variable.tfdist_shape)


def in_shards() -> bool:
    """Whether this thread is inside `as_shards`."""
    return getattr(_state, "shards", False)


@contextlib.contextmanager
def as_shards() -> Iterator[None]:
    """Inside, sharded variables look as long as a replica's row, and are read and written as it."""
    before, _state.shards = in_shards(), True
    try:
        yield
    finally:
        _state.shards = before


@contextlib.contextmanager
def giving(values: dict[int, Any]) -> Iterator[None]:
    """Inside, sharded variables have these values, by the id of the variable."""
    before = getattr(_state, "given", {})
    _state.given = {**before, **values}
    try:
        yield
    finally:
        _state.given = before


def gives(variables: Sequence[keras.Variable]) -> bool:
    """Whether all of these have a value from `giving` or a `keras.StatelessScope`, or only shapes count here."""
    return in_symbolic_scope() or all(_given(v) is not None for v in variables)


def _given(variable: keras.Variable) -> Any:
    scope = get_stateless_scope()
    value = None if scope is None else scope.get_current_value(variable)
    return getattr(_state, "given", {}).get(id(variable)) if value is None else value


def own_copy(variable: keras.Variable) -> tf.Tensor:
    """What a variable holds on the replica in whose context this is, in its own dtype."""
    return tf.convert_to_tensor(variable._value)


def replace_constraint(variable: keras.Variable, constraint: Callable | None) -> None:
    """Gives a variable another constraint."""
    variable._constraint = constraint


def known_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """What an optimizer was built for."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return list(getattr(optimizer, "_trainable_variables", None) or [])


def hook_optimizers() -> None:
    """Lets optimizers treat a sharded variable's row as a variable, and mark the slots that they make for it."""
    cls = keras.optimizers.Optimizer
    stock_slot, stock_key, stock_finalize = (
        cls.add_variable_from_reference,
        cls._var_key,
        cls.finalize_variable_values,
    )

    @functools.wraps(stock_slot)
    def add_variable_from_reference(self, reference_variable, *args, **kwargs):
        if not isinstance(reference_variable, Sharded):
            return stock_slot(self, reference_variable, *args, **kwargs)
        with as_shards():
            slot = stock_slot(self, reference_variable, *args, **kwargs)
        make_sharded(
            slot, None, reference_variable.tfdist_shape, reference_variable.tfdist_store.slots
        )
        return slot

    @functools.wraps(stock_key)
    def key(self, variable):
        with as_shards():
            return stock_key(self, variable)

    @functools.wraps(stock_finalize)
    def finalize_variable_values(self, var_list):
        with as_shards():
            return stock_finalize(self, var_list)

    cls.add_variable_from_reference, cls._var_key, cls.finalize_variable_values = (
        add_variable_from_reference,
        key,
        finalize_variable_values,
    )


# --- Layers that are computed twice -----------------------------------------------------------------------------------
def context() -> tuple:
    """What the layers that are being called tell those within them: whether they train, and the dtype to compute in."""
    return tuple(global_state.get_global_attribute(name) for name in _CONTEXT)


@contextlib.contextmanager
def in_context(values: tuple) -> Iterator[None]:
    """Inside, layers are called as where `context` gave these values."""
    before = context()
    for name, value in zip(_CONTEXT, values, strict=True):
        global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        for name, value in zip(_CONTEXT, before, strict=True):
            global_state.set_global_attribute(name, value)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Inside, variables have their own dtype, whatever the layer that is being called computes in."""
    with in_context((context()[0], None)):
        yield


def mask_of(x: Any) -> Any:
    """The mask that a tensor carries from layer to layer."""
    return get_keras_mask(x)


def set_mask(x: Any, mask: Any) -> None:
    """Lets a tensor carry a mask."""
    set_keras_mask(x, mask)


# --- Graphs that can be freed -----------------------------------------------------------------------------------------
def kept_by(graph: tf.Graph) -> dict[Any, Any]:
    """What lives as long as a graph, though it refers to it."""
    if not hasattr(graph, "tfdist_kept"):
        graph.tfdist_kept = {}
    return graph.tfdist_kept


def freed_with_graph(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Lets the gradient of a `tf.custom_gradient`, whose results these are, live as long as their graph; returns them.

    TensorFlow has it in a list for ever, and with it the graph, whose tensors it refers to (tensorflow #97697).
    """
    if not tf.executing_eagerly():
        name = tf.compat.as_str(tensors[0].op.get_attr("_gradient_op_type"))
        entry, kept = gradient_registry._registry[name], kept_by(tensors[0].graph)
        kept[name] = entry["type"]
        weak = weakref.ref(entry["type"])
        entry["type"] = lambda op, *grads: weak()(op, *grads)  # type: ignore[misc]  # it is there as long as the graph
        weakref.finalize(
            tensors[0].graph, gradient_registry._registry.pop, name, None
        ).atexit = False
    return tensors


# --- Deferred variables -----------------------------------------------------------------------------------------------
@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Inside, variables are made without values, and nobody gives them any afterwards but `initialize`."""
    known = list(global_state.get_global_attribute("uninitialized_variables") or [])
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        global_state.set_global_attribute("uninitialized_variables", known)


def has_value(variable: keras.Variable) -> bool:
    """Whether a variable was made outside of `without_values`, or has got a value since."""
    return variable._value is not None


def initialize(variable: keras.Variable) -> None:
    """Gives a variable its first value."""
    variable._deferred_initialize()


def first_value(variable: keras.Variable) -> tf.Tensor:
    """The value that `initialize` would give."""
    return tf.convert_to_tensor(variable._initializer(variable._shape, dtype=variable._dtype))


# --- Files ------------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def saved_with(model: keras.Model, optimizer: Any) -> Iterator[None]:
    """Inside, a model is saved as one that was compiled with this optimizer."""
    config, before = getattr(getattr(model, "_compile_config", None), "config", {}), model.optimizer
    stated = config.get("optimizer")
    model.optimizer, config["optimizer"] = optimizer, optimizer
    try:
        yield
    finally:
        model.optimizer, config["optimizer"] = before, stated
