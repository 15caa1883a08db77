"""Operations on batches without rows, which some kernels and Keras' eager mode get wrong.

A replica gets no rows where a batch has fewer rows than there are replicas. On CPUs, the result of
a convolution of no rows then has the shape of its input, so that the next layer fails, gradients of
convolutions and pooling end the process (oneDNN), and other pooling raises an error. On GPUs, the
gradient of a depthwise convolution's kernel is whatever was in memory, that of a 3D convolution
raises an error (cuDNN), and so does some pooling. With `run_eagerly=True`, Keras refuses a maximum
or minimum of each row if there are no rows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_nn_ops as _gen_nn_ops

from tfdist.keras_compat.backend_modules import numpy as _keras_numpy

# The operations that all others are made of: those of tf.nn, of Keras' layers, and gradients. The
# number is that of their results that have the rows of the batch; further results do not.
OPERATIONS = {
    "conv2d": 1,
    "conv3d": 1,
    "depthwise_conv2d_native": 1,
    "max_pool": 1,
    "max_pool3d": 1,
    "max_pool_with_argmax": 2,
    "avg_pool": 1,
    "avg_pool3d": 1,
    "fractional_max_pool": 1,
}

# Those that fail on GPUs too. The others are left alone there: what is put around an operation may
# keep TensorFlow from changing the layout of its data.
ON_GPUS = frozenset(
    {"conv3d", "depthwise_conv2d_native", "fractional_max_pool", "max_pool_with_argmax"}
)

# Functions of keras.ops, and those of TensorFlow that they call, for numbers and for bool.
EXTREMES = {
    "max": (tf.reduce_max, tf.reduce_any),
    "min": (tf.reduce_min, tf.reduce_all),
}


def hook_operations(device: Callable[[], str | None], in_replica: Callable[[], bool]) -> None:
    """Make these operations right for batches without rows.

    Args:
        device: Function that returns the kind of device of the current strategy's replicas, "CPU"
            or "GPU"; None if no replica may be without rows.
        in_replica: Function that returns whether a replica of the current strategy may have no
            rows.
    """
    for name, results in OPERATIONS.items():
        _hook(name, results, device)
    _hook_transposed_conv3d(device)
    for name, reductions in EXTREMES.items():
        _hook_extreme(name, *reductions, in_replica)


def _hook(name: str, results: int, device: Callable[[], str | None]) -> None:
    original = getattr(_gen_nn_ops, name)
    kinds = ("CPU", "GPU") if name in ON_GPUS else ("CPU",)
    first = next(iter(inspect.signature(original).parameters))

    @functools.wraps(original)
    def operation(*args: Any, **kwargs: Any) -> Any:
        if device() not in kinds:
            return original(*args, **kwargs)
        x = tf.convert_to_tensor(args[0] if args else kwargs.pop(first))
        if x.shape.rank is None or x.shape[0]:
            return original(x, *args[1:], **kwargs)
        y = original(_with_a_row(x), *args[1:], **kwargs)
        rows = tf.shape(x)[0]
        if not isinstance(y, tuple):
            return _first_rows(y, rows)
        return type(y)(*(_first_rows(part, rows) for part in y[:results]), *y[results:])

    setattr(_gen_nn_ops, name, operation)


def _hook_transposed_conv3d(device: Callable[[], str | None]) -> None:
    """Hook the transposed 3D convolution, whose first argument is the shape of its result.

    TensorFlow also calls it for the gradient of a 3D convolution, which has got its row already.
    """
    original = _gen_nn_ops.conv3d_backprop_input_v2

    @functools.wraps(original)
    def operation(input_sizes: Any, filter: Any, out_backprop: Any, *args: Any, **kwargs: Any):
        if device() is None or _is_shape_of_gradient(input_sizes):
            return original(input_sizes, filter, out_backprop, *args, **kwargs)
        x = tf.convert_to_tensor(out_backprop)
        if x.shape.rank is None or x.shape[0]:
            return original(input_sizes, filter, x, *args, **kwargs)
        sizes = tf.convert_to_tensor(input_sizes)
        sizes = tf.concat([tf.maximum(sizes[:1], 1), sizes[1:]], 0)
        y = original(sizes, filter, _with_a_row(x), *args, **kwargs)
        return _first_rows(y, tf.shape(x)[0])

    _gen_nn_ops.conv3d_backprop_input_v2 = operation


def _is_shape_of_gradient(sizes: Any) -> bool:
    """Return whether sizes come from TensorFlow's gradient of a 3D convolution, in a graph."""
    return tf.is_symbolic_tensor(sizes) and sizes.op.type == "ShapeN"


def _hook_extreme(
    name: str, of_numbers: Callable, of_bools: Callable, in_replica: Callable[[], bool]
) -> None:
    """Let Keras' eager maximum and minimum accept no rows, as its compiled ones do."""
    original = getattr(_keras_numpy, name)

    @functools.wraps(original)
    def extreme(x: Any, axis: Any = None, keepdims: bool = False, initial: Any = None) -> Any:
        if initial is None and tf.executing_eagerly() and in_replica():
            x = _keras_numpy.convert_to_tensor(x)
            if x.shape.rank and x.shape[0] == 0:
                reduce = of_bools if x.dtype == tf.bool else of_numbers
                return reduce(x, axis=axis, keepdims=keepdims)
        return original(x, axis=axis, keepdims=keepdims, initial=initial)

    setattr(_keras_numpy, name, extreme)


def _with_a_row(x: tf.Tensor) -> tf.Tensor:
    """Add a row of zeros if there are no rows. Otherwise nothing is copied."""
    missing = tf.maximum(1 - tf.shape(x)[0], 0)
    paddings = tf.pad(missing[None, None], [[0, x.shape.rank - 1], [1, 0]])
    # Without an operation in between, oneDNN merges the padding with the convolution, and loses it.
    return tf.ensure_shape(tf.pad(x, paddings), [None, *x.shape[1:]])


def _first_rows(y: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Return the first rows. If these are all, nothing is copied, nor in the gradient."""
    rank = y.shape.rank
    first = tf.slice(y, [0] * rank, tf.concat([rows[None], [-1] * (rank - 1)], 0))
    first.set_shape([None, *y.shape[1:]])
    return first
