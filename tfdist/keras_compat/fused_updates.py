"""Fused optimizer updates by TensorFlow's training kernels, one for each variable.

Keras computes an update by many operations, each of which reads and writes the whole variable.
TensorFlow's training kernels do the same in one pass. They need no compilation, and a step has
fewer operations to trace.

A kernel also holds the locks of a variable and its slots. Workers that train by themselves on
parameter servers would otherwise find a momentum without its velocity, and move a weight by
thousands of steps.

A fused update equals that of Keras up to the rounding of float32. The weight decay of an optimizer
that has a kernel is a kernel too, which makes a second pass: none of TensorFlow's kernels decays a
weight and updates it. Everything else is left to Keras: clipping, moving averages, accumulation,
loss scaling, variables of other dtypes, sparse gradients of SGD without momentum, optimizers
without a kernel, and classes that define `update_step` themselves. Updates of rows without a kernel
are here, too: those of `tfdist.optimizers.LazyAdam`, and those of Adagrad where XLA may
compile them, or where its kernel would not equal Keras.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_state = threading.local()


@contextlib.contextmanager
def fused() -> Iterator[None]:
    """Fuse the updates of Keras' optimizers in this thread, within the context.

    The context is that of one step's updates: the variables share the scalars of their optimizer.
    """
    before = getattr(_state, "scalars", None)
    _state.scalars = {}
    try:
        yield
    finally:
        _state.scalars = before


def hook_updates() -> None:
    """Hook `update_step` of the optimizers that have a kernel, and weight decay."""
    for cls, update in _UPDATES.items():
        _hook(cls, update)
    _hook_weight_decay()


def _hook(cls: Any, update: Callable[..., bool]) -> None:
    keras_method = cls.update_step

    @functools.wraps(keras_method)
    def update_step(self, gradient, variable, learning_rate):
        fuses = (
            getattr(_state, "scalars", None) is not None
            and hasattr(type(self).update_step, "tfdist_fused")
            and _fits(gradient, variable)
        )
        if not fuses or not update(self, gradient, variable, learning_rate):
            keras_method(self, gradient, variable, learning_rate)

    cls.update_step = fusible(update_step)


def fusible(update_step: Callable) -> Callable:
    """Mark an `update_step` that may leave updates to a fused one of Keras.

    Args:
        update_step: Method of a subclass of an optimizer of Keras.
    """
    update_step.tfdist_fused = True  # type: ignore[attr-defined]
    return update_step


def has_kernel(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether one kernel surely updates a dense variable, without copies of it."""
    known = keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.SGD
    return type(optimizer) in known and not getattr(optimizer, "amsgrad", False)


def _hook_weight_decay() -> None:
    """Hook the weight decay of the optimizers that have a kernel."""
    keras_method = keras.optimizers.Optimizer._apply_weight_decay

    @functools.wraps(keras_method)
    def apply_weight_decay(self, variables):
        fuses = (
            getattr(_state, "scalars", None) is not None
            and self.weight_decay is not None
            and hasattr(type(self).update_step, "tfdist_fused")
        )
        values = [v.value if isinstance(v, keras.Variable) else v for v in variables]
        if not fuses or any(v.dtype != tf.float32 for v in values):
            keras_method(self, variables)
            return

        factor = keras.ops.cast(self.learning_rate, "float32") * self.weight_decay

        def decay_all(strategy, values):
            for value in values:
                decay = functools.partial(_decay, self, factor=factor)
                strategy.extended.update(value, decay, group=False)

        tf.__internal__.distribute.interim.maybe_merge_call(
            decay_all, self._distribution_strategy, values
        )

    keras.optimizers.Optimizer._apply_weight_decay = apply_weight_decay


def _decay(optimizer: Any, variable: tf.Variable, factor: tf.Tensor) -> None:
    """Subtract so much of a variable from itself, unless its optimizer excludes it."""
    if optimizer._use_weight_decay(variable):
        (factor,) = _scalars(optimizer, variable, factor, lambda factor: (factor,))
        tf.raw_ops.ResourceApplyGradientDescent(
            var=variable.handle, alpha=factor, delta=variable.read_value(), use_locking=True
        )


def _fits(gradient: Any, variable: Any) -> bool:
    """Return whether a kernel takes this gradient and this variable.

    The kernels compute in the dtype of the variable, where Keras rounds each intermediate result of
    a narrower dtype. They do not broadcast.
    """
    if not isinstance(variable, tf.Variable) or variable.dtype != tf.float32:
        return False
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.dtype.is_floating and variable.shape.is_fully_defined()
    return (
        isinstance(gradient, tf.Tensor)
        and gradient.dtype.is_floating
        and gradient.shape.is_fully_defined()
        and gradient.shape == variable.shape
    )


def _dense(gradient: Any, variable: Any) -> tf.Tensor:
    """Return a gradient as a dense float32 tensor, on the device of its variable.

    Keras, too, computes on the whole variable if the gradient is sparse and there are slots.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.cast(gradient, tf.float32)
    with tf.device(variable.device):
        rows = tf.math.unsorted_segment_sum(
            tf.cast(gradient.values, tf.float32), gradient.indices, variable.shape[0]
        )
        return tf.ensure_shape(rows, variable.shape)


def _slots(optimizer: Any, variable: Any, *lists: Sequence[Any]) -> list[Any] | None:
    """Return the handles of a variable's slots; None if no kernel can update them."""
    index = optimizer._get_variable_index(variable)
    slots = [each[index]._value for each in lists]
    if any(
        not isinstance(s, tf.Variable)
        or s.dtype != variable.dtype
        or s.shape != variable.shape
        or s.device != variable.device
        for s in slots
    ):
        return None
    return [s.handle for s in slots]


def _scalars(
    optimizer: Any, variable: Any, learning_rate: Any, make: Callable[[tf.Tensor], tuple]
) -> tuple[Any, ...]:
    """Return the scalars of an update, which the variables of a device share.

    Args:
        optimizer: Optimizer.
        variable: Variable that is updated.
        learning_rate: Learning rate as Keras passes it to `update_step`.
        make: Function that returns the scalars, given the learning rate as a tensor.
    """
    graph = tf.compat.v1.get_default_graph()  # that of a branch, with gradient accumulation
    key = id(optimizer), id(learning_rate), id(graph), variable.device
    if key not in _state.scalars:
        # The objects are kept, so that another one cannot get the id of one of them.
        _state.scalars[key] = (
            (optimizer, learning_rate, graph),
            make(keras.ops.cast(learning_rate, variable.dtype)),
        )
    return _state.scalars[key][1]


def _number(value: Any) -> tf.Tensor:
    return tf.cast(value, tf.float32)


def _adam(optimizer: Any, gradient: Any, variable: Any, learning_rate: Any) -> bool:
    """Update a variable as Adam and AdamW do; return False if no kernel can."""
    if optimizer.amsgrad:  # XLA, which may compile the step, does not know that kernel
        return False
    slots = _slots(optimizer, variable, optimizer._momentums, optimizer._velocities)
    if slots is None:
        return False

    def make(rate):
        step = optimizer.iterations + 1
        beta_1 = _number(optimizer.beta_1)
        beta_2 = _number(optimizer.beta_2)
        powers = (tf.pow(beta, _number(step)) for beta in (beta_1, beta_2))
        rate *= _correction(optimizer.beta_1, optimizer.beta_2, step)
        return rate, beta_1, beta_2, *powers, _number(optimizer.epsilon)

    rate, beta_1, beta_2, power_1, power_2, epsilon = _scalars(
        optimizer, variable, learning_rate, make
    )
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=slots[0],
        v=slots[1],
        beta1_power=power_1,
        beta2_power=power_2,
        lr=rate,
        beta1=beta_1,
        beta2=beta_2,
        epsilon=epsilon,
        grad=_dense(gradient, variable),
        use_locking=True,
    )
    return True


def variable_of(optimizer: keras.optimizers.Optimizer, variable: tf.Variable) -> keras.Variable:
    """Return the Keras variable that an optimizer updates as this variable of TensorFlow."""
    return optimizer._trainable_variables[optimizer._get_variable_index(variable)]


def update_rows(
    optimizer: keras.optimizers.Adam,
    gradient: tf.IndexedSlices,
    variable: tf.Variable,
    learning_rate: Any,
) -> None:
    """Update the rows of a sparse gradient, and their slots, as Adam does.

    Other threads may update the same rows on a parameter server. Each reads the momentum before the
    velocity and writes it after the velocity, so that none finds a new momentum with an old
    velocity, which would move a weight too far.

    Args:
        optimizer: Built optimizer.
        gradient: Gradient with one row for each of some indices.
        variable: Variable that is updated.
        learning_rate: Learning rate as Keras passes it to `update_step`.
    """
    index = optimizer._get_variable_index(variable)
    dtype, rows = variable.dtype, gradient.indices
    step = keras.ops.cast(optimizer.iterations + 1, dtype)
    power_1 = keras.ops.power(keras.ops.cast(optimizer.beta_1, dtype), step)
    power_2 = keras.ops.power(keras.ops.cast(optimizer.beta_2, dtype), step)
    rate = keras.ops.cast(learning_rate, dtype) * keras.ops.sqrt(1 - power_2) / (1 - power_1)

    def read(slot: tf.Variable) -> tf.Tensor:
        return tf.raw_ops.ResourceGather(resource=slot.handle, indices=rows, dtype=dtype)

    def write(slot: tf.Variable, values: tf.Tensor) -> tf.Operation | None:
        return tf.raw_ops.ResourceScatterUpdate(resource=slot.handle, indices=rows, updates=values)

    with tf.device(variable.device):
        values = tf.cast(gradient.values, dtype)
        momentum, velocity = (
            slots[index]._value for slots in (optimizer._momentums, optimizer._velocities)
        )
        old = read(momentum)
        with tf.control_dependencies([old]):
            v = read(velocity)
        v += (tf.square(values) - v) * (1 - optimizer.beta_2)
        m = old + (values - old) * (1 - optimizer.beta_1)
        written = write(velocity, v)
        if optimizer.amsgrad:
            largest = optimizer._velocity_hats[index]._value
            v = tf.maximum(read(largest), v)
            write(largest, v)
        with tf.control_dependencies([written]):
            write(momentum, m)
        tf.raw_ops.ResourceScatterSub(
            resource=variable.handle,
            indices=rows,
            updates=m * rate / (tf.sqrt(v) + optimizer.epsilon),
        )


def _correction(beta_1: Any, beta_2: Any, step: Any) -> tf.Tensor | float:
    """Return a factor of the learning rate by which Adam's kernel updates as Keras does.

    The kernel computes `1 - beta` from the float32 number nearest to beta, where Keras takes the
    float32 number nearest to `1 - beta`: with a `beta_2` of 0.999, they differ by 1.3e-5 of their
    value. After t steps of like gradients, the averages are `1 - (1 - x)^t` of the gradients, where
    x is one of these numbers.

    Args:
        beta_1: Decay rate of the momentum.
        beta_2: Decay rate of the velocity.
        step: Number of the step, from 1.
    """
    if not all(isinstance(beta, float) and 0 < beta < 1 for beta in (beta_1, beta_2)):
        return 1.0
    decays = [
        decay
        for beta in (beta_1, beta_2)
        for decay in (np.float64(np.float32(beta)), 1 - np.float64(np.float32(1 - beta)))
    ]
    averages = tf.math.expm1(tf.cast(step, tf.float64) * np.log(decays))
    kernel_1, keras_1, kernel_2, keras_2 = tf.unstack(averages)
    return tf.cast(tf.sqrt(kernel_2 / keras_2) * keras_1 / kernel_1, tf.float32)


def _adagrad(optimizer: Any, gradient: Any, variable: Any, learning_rate: Any) -> bool:
    """Update a variable, or rows of it, as Adagrad does; return False if no kernel can.

    Keras divides by `sqrt(accumulator + epsilon)`, the kernel by `sqrt(accumulator) + epsilon`. The
    epsilon passed makes both equal where the accumulator is at its initial value, from which it
    only grows. Beyond it, they differ by at most `epsilon / (8 * initial value)` of their value.
    """
    slots = _slots(optimizer, variable, optimizer._accumulators)
    if slots is None:
        return False
    (rate,) = _scalars(optimizer, variable, learning_rate, lambda rate: (rate,))
    first, epsilon = optimizer.initial_accumulator_value, optimizer.epsilon
    exact = all(isinstance(x, float) for x in (first, epsilon)) and 0 <= epsilon <= 2e-6 * first
    if (
        isinstance(gradient, tf.IndexedSlices)
        and not on_servers()
        # XLA compiles updates of one replica only, and does not have the kernel for rows.
        and (not exact or tf.distribute.get_strategy().num_replicas_in_sync == 1)
    ):
        _adagrad_rows(gradient, variable, slots[0], rate, epsilon)
        return True
    if not exact:
        return False
    arguments = {
        "var": variable.handle,
        "accum": slots[0],
        "lr": rate,
        "epsilon": math.sqrt(first + epsilon) - math.sqrt(first),
        "use_locking": True,
    }
    if isinstance(gradient, tf.IndexedSlices):  # without duplicates: `merge_duplicates`
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            **arguments, grad=tf.cast(gradient.values, tf.float32), indices=gradient.indices
        )
    else:
        tf.raw_ops.ResourceApplyAdagradV2(**arguments, grad=tf.cast(gradient, tf.float32))
    return True


def on_servers() -> bool:
    """Return whether other threads may update the same variables, as on parameter servers."""
    return isinstance(tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy)


def _adagrad_rows(
    gradient: tf.IndexedSlices, variable: tf.Variable, sums: Any, rate: Any, epsilon: float
) -> None:
    """Update the rows of a gradient without duplicates as Adagrad does, without its kernel.

    Operations that replace rows take a third of the time of those that add to them.

    Args:
        gradient: Gradient with one row for each of some indices.
        variable: Variable that is updated.
        sums: Handle of the sums of squared gradients.
        rate: Learning rate.
        epsilon: Number that is added to the sums.
    """
    rows = gradient.indices
    with tf.device(variable.device):
        values = tf.cast(gradient.values, tf.float32)
        summed = tf.raw_ops.ResourceGather(resource=sums, indices=rows, dtype=tf.float32)
        summed += tf.square(values)
        tf.raw_ops.ResourceScatterUpdate(resource=sums, indices=rows, updates=summed)
        old = tf.raw_ops.ResourceGather(resource=variable.handle, indices=rows, dtype=tf.float32)
        tf.raw_ops.ResourceScatterUpdate(
            resource=variable.handle,
            indices=rows,
            updates=old - values * rate / tf.sqrt(summed + epsilon),
        )


def _sgd(optimizer: Any, gradient: Any, variable: Any, learning_rate: Any) -> bool:
    """Update a variable as SGD does, with momentum or without; return False if no kernel can."""
    if optimizer.momentum == 0:
        if isinstance(gradient, tf.IndexedSlices):  # Keras updates only its rows
            return False
        (rate,) = _scalars(optimizer, variable, learning_rate, lambda rate: (rate,))
        tf.raw_ops.ResourceApplyGradientDescent(
            var=variable.handle, alpha=rate, delta=_dense(gradient, variable), use_locking=True
        )
        return True
    slots = _slots(optimizer, variable, optimizer.momentums)
    if slots is None:
        return False
    rate, momentum = _scalars(
        optimizer, variable, learning_rate, lambda rate: (rate, _number(optimizer.momentum))
    )
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.handle,
        accum=slots[0],
        lr=rate,
        grad=_dense(gradient, variable),
        momentum=momentum,
        use_nesterov=bool(optimizer.nesterov),
        use_locking=True,
    )
    return True


def _rmsprop(optimizer: Any, gradient: Any, variable: Any, learning_rate: Any) -> bool:
    """Update a variable as RMSprop with momentum does; return False if no kernel can.

    The kernel needs a slot for the momentum. For centered gradients it rounds in another order,
    which matters where the variance is near 0.
    """
    if optimizer.momentum == 0 or optimizer.centered:
        return False
    slots = _slots(optimizer, variable, optimizer._velocities, optimizer._momentums)
    if slots is None:
        return False

    def make(rate):
        return rate, *map(_number, (optimizer.rho, optimizer.momentum, optimizer.epsilon))

    rate, rho, momentum, epsilon = _scalars(optimizer, variable, learning_rate, make)
    tf.raw_ops.ResourceApplyRMSProp(
        var=variable.handle,
        ms=slots[0],
        mom=slots[1],
        lr=rate,
        rho=rho,
        momentum=momentum,
        epsilon=epsilon,
        grad=_dense(gradient, variable),
        use_locking=True,
    )
    return True


# AdamW inherits the `update_step` of Adam.
_UPDATES: dict[type, Callable[..., bool]] = {
    keras.optimizers.Adam: _adam,
    keras.optimizers.Adagrad: _adagrad,
    keras.optimizers.SGD: _sgd,
    keras.optimizers.RMSprop: _rmsprop,
}
