"""Convolutions and pooling of batches without rows, which oneDNN's kernels get wrong.

On CPUs, the result of a convolution of no rows has the shape of its input, so that the next layer
fails, and gradients of convolutions and pooling end the process. A replica gets no rows where a
batch has fewer rows than there are replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_nn_ops as _gen_nn_ops

# The operations that all others are made of: those of tf.nn, of Keras' layers, and gradients.
OPERATIONS = (
    "conv2d",
    "conv3d",
    "depthwise_conv2d_native",
    "max_pool",
    "max_pool3d",
    "avg_pool",
    "avg_pool3d",
)


def hook_operations(applies: Callable[[], bool]) -> None:
    """Make these operations right for batches without rows.

    Args:
        applies: Function that returns whether a replica of the current strategy may have no rows,
            and runs on a CPU.
    """
    for name in OPERATIONS:
        _hook(name, applies)


def _hook(name: str, applies: Callable[[], bool]) -> None:
    original = getattr(_gen_nn_ops, name)

    @functools.wraps(original)
    def operation(*args: Any, **kwargs: Any) -> Any:
        x = tf.convert_to_tensor(args[0]) if args and applies() else None
        if x is None or x.shape.rank is None or x.shape[0]:
            return original(*args, **kwargs)
        y = original(_with_a_row(x), *args[1:], **kwargs)
        return _first_rows(y, tf.shape(x)[0])

    setattr(_gen_nn_ops, name, operation)


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
