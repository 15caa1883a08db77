"""Private Keras names that sharded optimizers and models need."""

from __future__ import annotations

import abc
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
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from tensorflow.python.checkpoint import tensor_callable as _tensor_callable
from tensorflow.python.framework.ops import gradient_registry

from tfdist.keras_compat.fused_updates import fused

_CONTEXT = ("current_call_ctx", "autocast_scope")
_state = threading.local()


@contextlib.contextmanager
def clipping(optimizer: keras.optimizers.Optimizer, clip: Callable[[list], list]) -> Iterator[None]:
    """Make an optimizer clip gradients by this function within the context.

    Keras' own clipping would compute the norm of one replica's shards only.
    """
    optimizer._clip_gradients = clip
    try:
        yield
    finally:
        del optimizer._clip_gradients


def clip_elementwise(optimizer: keras.optimizers.Optimizer, grads: list) -> list:
    """Return gradients clipped by an optimizer's own clipping."""
    return type(optimizer)._clip_gradients(optimizer, grads)


def copy_weight_decay_exclusions(
    source: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    optimizer: keras.optimizers.Optimizer,
    counterparts: Sequence[keras.Variable],
) -> None:
    """Copy an optimizer's weight decay exclusions to the counterparts of its variables.

    Args:
        source: Optimizer that the user passed, with the user's exclusions.
        variables: Variables of `source`, `[n]`.
        optimizer: Optimizer whose exclusions are set.
        counterparts: Variables of `optimizer`, `[n]`, one for each of `variables`.
    """
    excluded = {
        optimizer._var_key(counterpart)
        for v, counterpart in zip(variables, counterparts, strict=True)
        if _is_excluded_from_weight_decay(source, v)
    }
    optimizer._exclude_from_weight_decay = (
        getattr(optimizer, "_exclude_from_weight_decay", set()) | excluded
    )


def _is_excluded_from_weight_decay(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> bool:
    if hasattr(optimizer, "_is_excluded_from_weight_decay"):  # since Keras 3.16
        return optimizer._is_excluded_from_weight_decay(variable)
    return not optimizer._use_weight_decay(variable)


def moving_averages(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return an optimizer's moving averages of its variables (`use_ema`), in their order."""
    return list(optimizer._model_variables_moving_average)


def graph_calls(model: keras.Model) -> list[tuple[Any, list, list]] | None:
    """Return the calls of a Functional model in execution order; None for other models.

    Returns:
        For each call the layer or operation, and its input and output tensors
        (`keras.KerasTensor`). Calls of input layers are left out.
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


@contextlib.contextmanager
def kept_graph(tensors: Sequence[Any]) -> Iterator[None]:
    """Keep a Functional model's graph while models of its parts are made.

    A part whose inputs are inputs of the model and others is built by copying calls. Keras then
    takes the model's inputs for results of the copies: "could not find node key" when the model is
    saved.

    Args:
        tensors: The model's `keras.KerasTensor`.
    """
    histories = [tensor._keras_history for tensor in tensors]
    try:
        yield
    finally:
        for tensor, history in zip(tensors, histories, strict=True):
            tensor._keras_history = history


def layer_weights(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Return the variables that a layer and its sublayers made as weights, frozen or not.

    `non_trainable_variables` has frozen weights together with state.
    """
    return [v for each in sublayers(layer) for v in each._trainable_variables]


def sublayers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Return a layer and the layers inside it."""
    return list(layer._flatten_layers())


def move(variable: keras.Variable, device: str) -> None:
    """Move a variable that exists to another device."""
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
    """Attach a mask to a tensor, and return the tensor."""
    if mask is not None:
        set_mask(x, mask)
    return x


class _OwnDeviceStrategy:
    """Substitute for a strategy and its `extended`, which works on each variable's own device."""

    def __init__(self):
        self.extended = self

    def update(self, variable, function, args=(), kwargs=None, group=True):
        with tf.device(variable.device):
            return function(variable, *args, **(kwargs or {}))

    def colocate_vars_with(self, variable):
        return tf.device(variable.device)


class _LargestInputDevice:
    """Device function that places an operation on the device of its largest input.

    It applies to operations without a device. The largest input may be the variable that the
    operation uses.
    """

    def __init__(self):
        # Captured tensors of a function, by the name of their placeholder.
        self._outer: dict[tf.Graph, dict[str, tf.Tensor]] = {}

    def __call__(self, operation: tf.Operation) -> str:
        return operation.device or (
            self._device_of(max(operation.inputs, key=_size)) if operation.inputs else ""
        )

    def _device_of(self, x: tf.Tensor) -> str:
        if isinstance(x, tf.__internal__.EagerTensor) or x.device:
            return x.device
        # A read runs on its variable's device, whatever device is requested.
        if x.op.type == "ReadVariableOp":
            return self._device_of(x.op.inputs[0])
        if x.op.type != "Placeholder":
            return ""
        captures = self._outer.setdefault(x.graph, {})
        if x.name not in captures:
            captures.update(
                (inner.name, outer) for outer, inner in getattr(x.graph, "captures", ())
            )
        return self._device_of(captures[x.name]) if x.name in captures else ""


def _size(x: tf.Tensor) -> float:
    if x.dtype == tf.resource:
        return math.inf
    return sys.maxsize if x.shape.num_elements() is None else x.shape.num_elements()


@contextlib.contextmanager
def updating_in_place(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Make an optimizer take summed gradients, and compute on the variables' devices.

    This applies within the context, to the optimizer's slots too. Enter it in the function that is
    traced.

    The default strategy sums the gradients of its one replica by one operation over all of them,
    which waits for the last gradient and moves all of them to the default device. It also computes
    there what belongs to no single variable, such as whether gradients are finite.
    """
    chain = []
    while optimizer is not None:
        chain.append((optimizer, optimizer._distribution_strategy))
        optimizer = getattr(optimizer, "inner_optimizer", None)
    for each, _ in chain:
        each._distribution_strategy = _OwnDeviceStrategy()
        each._all_reduce_sum_gradients = lambda grads_and_vars: grads_and_vars
        each._backend_reset_gradient_accumulators = functools.partial(_reset_accumulators, each)
    try:
        # `tf.device` takes no function. In eager mode TensorFlow runs each operation on the device
        # of its inputs.
        with (
            contextlib.nullcontext()
            if tf.executing_eagerly()
            else tf.compat.v1.get_default_graph().device(_LargestInputDevice()),
            fused(),
        ):
            yield
    finally:
        for each, strategy in chain:
            each._distribution_strategy = strategy
            del each._all_reduce_sum_gradients, each._backend_reset_gradient_accumulators


def _reset_accumulators(optimizer: keras.optimizers.Optimizer) -> None:
    """Reset the accumulators on their own devices.

    This does what Keras does. But zeros have no inputs from which `_LargestInputDevice` could tell
    a device.
    """
    for v in optimizer._accumulated_gradients:
        if v is not None:
            with tf.device(v.value.device):
                v.assign(tf.zeros(v.shape, v.dtype))


# --- Sharded variables ----------------------------------------------------------------------------
_VALUE = "VARIABLE_VALUE"  # TensorFlow's key of a variable's value in a checkpoint


class Sharded(keras.Variable):
    """Variable of which each replica holds one row.

    Readers and writers see the whole variable; optimizers see the row.

    Attributes:
        tfdist_shape: Shape of the whole variable.
        tfdist_store: Object that reads and writes the whole variable, by its methods
            `whole(variable)` and `assign_whole(variable, value)`, and rows of it by
            `look_up(variable, ids)` where `looks_up(variable)` is true; its method `update` takes
            gradients.
    """

    tfdist_shape: tuple[int, ...]
    tfdist_store: Any

    @property
    def shape(self):
        """See `keras.Variable`; the row's shape inside `as_shards`, else the whole shape."""
        return self._value.shape if in_shards() else tf.TensorShape(self.tfdist_shape)

    @property
    def value(self):
        """See `keras.Variable`; the row inside `as_shards`, else the whole variable."""
        if in_shards():
            return self._value
        override = _value_in_context(self)
        if override is None and in_symbolic_scope():
            override = tf.zeros(self.tfdist_shape, self._dtype)
        if isinstance(override, KernelPart):
            override = override.whole()
        return self._maybe_autocast(self.tfdist_store.whole(self) if override is None else override)

    @property
    def handle(self):
        """See `keras.Variable`; the handle of the row."""
        return self._value.handle

    @property
    def _shared_name(self):
        """Return the name of the row, which `tf.train.Checkpoint` notes."""
        return self._value._shared_name

    def _serialize_to_tensors(self):
        """Return the whole value for `tf.train.Checkpoint`, which reads it when it writes it."""

        def whole():
            with tf.device("CPU:0"):
                return tf.identity(self.value)

        row = self._value
        return {_VALUE: _tensor_callable.Callable(whole, row.dtype, row.device)}

    def _restore_from_tensors(self, restored_tensors):
        """Take the whole value of a `tf.train.Checkpoint`."""
        self.assign(restored_tensors[_VALUE])

    def _direct_assign(self, value):
        if in_shards():
            self._value.assign(tf.cast(value, self._value.dtype))
            return
        value = tf.cast(value, self._value.dtype)
        self.tfdist_store.assign_whole(self, value)
        given = getattr(_state, "given", {})
        if (before := given.get(id(self))) is not None:
            whole = before.whole() if isinstance(before, KernelPart) else before
            # A gradient with respect to the variable is that of its new value from now on.
            new = tf.stop_gradient(tf.cast(value, whole.dtype))
            given[id(self)] = new + (whole - tf.stop_gradient(whole))


class Kernel(abc.ABC):
    """Kernel whose products its layer leaves to this object."""

    @abc.abstractmethod
    def product(self, x: tf.Tensor, axes: int) -> tf.Tensor | None:
        """Return the product of inputs and the kernel; None if the layer is to compute it.

        Args:
            x: Inputs `[..., *contracted]`, in the dtype in which the layer reads the kernel.
            axes: Number of contracted axes, the first of the kernel.

        Returns:
            Tensor `[..., *others]`, with the other axes of the kernel.
        """


class KernelPart(Kernel):
    """Sharded kernel in its parts or gathered, which `replaced_shards` may have for its value."""

    @abc.abstractmethod
    def whole(self) -> tf.Tensor:
        """Return the whole kernel."""


def make_sharded(variable: keras.Variable, rows: Any, shape: Sequence[int], store: Any) -> None:
    """Turn a variable into one of which each replica holds one row.

    Args:
        variable: Variable to turn into a `Sharded`.
        rows: Rows as a `tf.Variable` with a copy on each replica, each of shape `[length]`. None:
            the variable holds its rows already.
        shape: Shape of the whole variable.
        store: Store of the whole variable, see `Sharded`.
    """
    if rows is not None:
        variable._value = rows
        variable._initializer = None
    variable.__class__ = Sharded
    variable.tfdist_shape = tuple(int(n) for n in shape)
    variable.tfdist_store = store
    variable._shape = variable.tfdist_shape
    variable._ndim = len(variable.tfdist_shape)


def in_shards() -> bool:
    """Return whether this thread is inside `as_shards`."""
    return getattr(_state, "shards", False)


@contextlib.contextmanager
def as_shards() -> Iterator[None]:
    """Make sharded variables have the shape and value of a replica's row within the context."""
    before = in_shards()
    _state.shards = True
    try:
        yield
    finally:
        _state.shards = before


def broadcasts() -> bool:
    """Return whether new variables get the chief's values: outside of `without_broadcast`."""
    return getattr(_state, "broadcasts", True)


@contextlib.contextmanager
def without_broadcast() -> Iterator[None]:
    """Give new variables the initial values of this process within the context.

    A strategy of several workers broadcasts those of the chief: for the parts of a large model,
    gigabytes that are alike, or are overwritten at once.
    """
    before = broadcasts()
    _state.broadcasts = False
    try:
        yield
    finally:
        _state.broadcasts = before


@contextlib.contextmanager
def replaced_shards(values: dict[int, Any]) -> Iterator[None]:
    """Make sharded variables have these values within the context.

    Args:
        values: Whole values, or a `KernelPart`, by the id of the variable.
    """
    before = getattr(_state, "given", {})
    _state.given = {**before, **values}
    try:
        yield
    finally:
        _state.given = before


def have_values(variables: Sequence[keras.Variable]) -> bool:
    """Return whether all of these variables have a value without their store.

    The value comes from `replaced_shards` or a `keras.StatelessScope`. In a symbolic scope only
    shapes count, and the answer is True.
    """
    return in_symbolic_scope() or all(_value_in_context(v) is not None for v in variables)


@contextlib.contextmanager
def multiplied_by(kernels: dict[int, Kernel]) -> Iterator[None]:
    """Leave the products with variables that are not sharded to these objects in the context.

    Args:
        kernels: Kernels by the id of the variable.
    """
    before = getattr(_state, "kernels", {})
    _state.kernels = {**before, **kernels}
    try:
        yield
    finally:
        _state.kernels = before


def kernel_of(variable: Any) -> Kernel | None:
    """Return the object that computes the products with a variable, if there is one."""
    if in_shards():
        return None
    if not isinstance(variable, Sharded):
        kernel = getattr(_state, "kernels", {}).get(id(variable))
        # In a stateless scope, a variable may have another value.
        return kernel if kernel is not None and _value_in_context(variable) is None else None
    value = _value_in_context(variable)
    return value if isinstance(value, Kernel) else None


def _value_in_context(variable: keras.Variable) -> Any:
    scope = get_stateless_scope()
    value = None if scope is None else scope.get_current_value(variable)
    return getattr(_state, "given", {}).get(id(variable)) if value is None else value


def own_copy(variable: keras.Variable) -> tf.Tensor:
    """Return the value of a variable on the current replica, in the variable's own dtype."""
    return tf.convert_to_tensor(variable._value)


def replace_constraint(variable: keras.Variable, constraint: Callable | None) -> None:
    """Set the constraint of a variable."""
    variable._constraint = constraint


def innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return the optimizer inside of those that wrap it, such as a LossScaleOptimizer."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def applies_as_keras(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether gradients reach the sum over replicas as a tape returns them.

    An optimizer of a user's own may compute with those of its replica in `apply` before.
    """
    while optimizer is not None:
        package = type(optimizer).__module__.partition(".")[0]
        if package == "tfdist":  # sums them before an optimizer inside it
            return True
        if package != "keras" or {"apply", "apply_gradients"} & set(vars(optimizer)):
            return False
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return True


def known_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the variables that an optimizer was built for."""
    return list(getattr(innermost(optimizer), "_trainable_variables", None) or [])


def hook_optimizers() -> None:
    """Hook Keras' optimizers so that they treat a sharded variable's row as a variable.

    The slots that they make for it become sharded variables too.
    """
    cls = keras.optimizers.Optimizer
    original_slot = cls.add_variable_from_reference
    original_key = cls._var_key
    original_finalize = cls.finalize_variable_values

    @functools.wraps(original_slot)
    def add_variable_from_reference(self, reference_variable, *args, **kwargs):
        if not isinstance(reference_variable, Sharded):
            return original_slot(self, reference_variable, *args, **kwargs)
        with as_shards(), without_broadcast():
            slot = original_slot(self, reference_variable, *args, **kwargs)
        make_sharded(
            slot, None, reference_variable.tfdist_shape, reference_variable.tfdist_store.slots
        )
        return slot

    @functools.wraps(original_key)
    def key(self, variable):
        with as_shards():
            return original_key(self, variable)

    @functools.wraps(original_finalize)
    def finalize_variable_values(self, var_list):
        with as_shards():
            return original_finalize(self, var_list)

    cls.add_variable_from_reference = add_variable_from_reference
    cls._var_key = key
    cls.finalize_variable_values = finalize_variable_values


def hook_swapped_averages() -> None:
    """Make the callback SwapEMAWeights exchange the rows of sharded variables and averages."""
    _hook_swap("_swap_variables", "swap_averages")
    _hook_swap("_finalize_ema_values", "reset_averages")


def _hook_swap(name: str, own: str) -> None:
    """Hook a method of SwapEMAWeights.

    Args:
        name: Name of the method.
        own: Name of the method that an optimizer has for this if the variables are whole, and only
            its averages are sharded.
    """
    original = getattr(keras.callbacks.SwapEMAWeights, name)

    @functools.wraps(original)
    def method(self):
        optimizer = self.model.optimizer
        while optimizer is not None and not hasattr(optimizer, own):
            optimizer = getattr(optimizer, "inner_optimizer", None)
        if optimizer is not None and optimizer.built and innermost(optimizer).use_ema:
            return getattr(optimizer, own)()
        with as_shards():
            return original(self)

    setattr(keras.callbacks.SwapEMAWeights, name, method)


# --- Layers that are recomputed -------------------------------------------------------------------
def context() -> tuple:
    """Return the call context of the current layers: training mode and compute dtype."""
    return tuple(global_state.get_global_attribute(name) for name in _CONTEXT)


@contextlib.contextmanager
def in_context(values: tuple) -> Iterator[None]:
    """Call layers with the call context that `context` returned elsewhere."""
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
    """Read variables in their own dtype within the context, without autocasting."""
    with in_context((context()[0], None)):
        yield


def mask_of(x: Any) -> Any:
    """Return the mask that a tensor carries from layer to layer."""
    return get_keras_mask(x)


def set_mask(x: Any, mask: Any) -> None:
    """Attach a mask to a tensor."""
    set_keras_mask(x, mask)


# --- Graphs that can be freed ---------------------------------------------------------------------
def objects_of(graph: tf.Graph) -> dict[Any, Any]:
    """Return a dict whose values live as long as a graph, even if they refer to the graph."""
    if not hasattr(graph, "tfdist_objects"):
        graph.tfdist_objects = {}
    return graph.tfdist_objects


def freed_with_graph(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Make the gradient function of a `tf.custom_gradient` live only as long as the graph.

    TensorFlow keeps the function in a registry for ever, and with it the graph, to whose tensors
    the function refers (tensorflow #97697). `hook_gradients` does this in strategies of tfdist.

    Args:
        tensors: Results of the `tf.custom_gradient`.

    Returns:
        The same tensors.
    """
    if not tf.executing_eagerly():
        name = tf.compat.as_str(tensors[0].op.get_attr("_gradient_op_type"))
        _free_with_graph(name, tensors[0].graph)
    return tensors


def _free_with_graph(name: str, graph: tf.Graph) -> None:
    """Make a gradient function in TensorFlow's registry live only as long as a graph."""
    objects = objects_of(graph)
    if name in objects:
        return
    entry = gradient_registry._registry[name]
    objects[name] = entry["type"]
    weak = weakref.ref(entry["type"])
    # The weak reference is alive as long as the graph.
    entry["type"] = lambda op, *grads: weak()(op, *grads)  # type: ignore[misc]
    weakref.finalize(graph, gradient_registry._registry.pop, name, None).atexit = False


def hook_gradients(in_strategy: Callable[[], bool]) -> None:
    """Free the gradient functions of each `tf.custom_gradient` with the graph that it is in.

    `tf.distribute.ReplicaContext.all_reduce` is one. It refers to its strategy, so that each
    strategy and the graphs of its steps would live as long as the process.

    Args:
        in_strategy: Function that tells whether the current strategy is one of tfdist.
    """
    register = tf.RegisterGradient.__call__

    @functools.wraps(register)
    def __call__(self, function):
        register(self, function)
        graph: Any = tf.compat.v1.get_default_graph()
        if (
            self._op_type.startswith("CustomGradient-")
            and graph.building_function
            and in_strategy()
        ):
            _free_with_graph(self._op_type, graph)
        return function

    tf.RegisterGradient.__call__ = __call__


# --- Deferred variables ---------------------------------------------------------------------------
class _Deferring(keras.StatelessScope):
    """Scope in which variables are made without values, and keep those that they are given."""

    def __init__(self):
        super().__init__(initialize_variables=False)
        self._given: dict[int, tuple[keras.Variable, tf.Tensor]] = {}

    def add_update(self, update):
        """See `keras.StatelessScope`."""
        variable, value = update
        with tf.device("CPU:0"):  # a whole model may not fit the memory of a GPU
            value = tf.identity(value)
        super().add_update((variable, value))
        self._given[id(variable)] = (variable, value)

    def hand_over(self) -> None:
        """Make what variables were given in this scope their values, or their first values."""
        for variable, value in self._given.values():
            if has_value(variable):
                variable.assign(value)
            else:
                variable._initializer = functools.partial(_given_value, value)


def _given_value(value: tf.Tensor, shape: Sequence[int], dtype: str) -> tf.Tensor:
    """Return a value as an initializer does."""
    return tf.cast(value, dtype)


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Create variables without values within the context; only `initialize` gives them values.

    What is assigned to them within the context becomes their first value. Variables that are made
    from a value, such as the step count of an optimizer, have it at once.
    """
    uninitialized = list(global_state.get_global_attribute("uninitialized_variables") or [])
    scope = _Deferring()
    create = keras.Variable.__init__

    def __init__(self, initializer, *args, **kwargs):
        draws = callable(initializer) or isinstance(initializer, str)
        if draws or get_stateless_scope() is not scope:
            create(self, initializer, *args, **kwargs)
            return
        global_state.set_global_attribute("stateless_scope", scope.original_scope)
        try:
            create(self, initializer, *args, **kwargs)
        finally:
            global_state.set_global_attribute("stateless_scope", scope)

    keras.Variable.__init__ = __init__
    try:
        with scope:
            yield
    finally:
        keras.Variable.__init__ = create
        global_state.set_global_attribute("uninitialized_variables", uninitialized)
    scope.hand_over()


def has_value(variable: keras.Variable) -> bool:
    """Return whether a variable has a value.

    It has none if it was created inside `without_values` and not initialized since.
    """
    return variable._value is not None


def initialize(variable: keras.Variable) -> None:
    """Give a variable its first value."""
    variable._deferred_initialize()


def initializer_of(variable: keras.Variable) -> Any:
    """Return the initializer of a variable that has no value yet; None if it has one."""
    return variable._initializer


def first_value(variable: keras.Variable) -> tf.Tensor:
    """Return the value that `initialize` would set."""
    return tf.convert_to_tensor(variable._initializer(variable._shape, dtype=variable._dtype))


# --- Files ----------------------------------------------------------------------------------------
@contextlib.contextmanager
def saved_with(model: keras.Model, optimizer: Any) -> Iterator[None]:
    """Save a model as if it were compiled with this optimizer, within the context."""
    config = getattr(getattr(model, "_compile_config", None), "config", {})
    before = model.optimizer
    original = config.get("optimizer")
    model.optimizer = optimizer
    config["optimizer"] = optimizer
    try:
        yield
    finally:
        model.optimizer = before
        config["optimizer"] = original
