"""Gathered rows: the rows of all replicas, for losses and metrics that are not means over rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.parallel.replica_weight import step_weight, weighted
from tfdist.train.synchronous.gradient_sum import leave_loop

# Types that TensorFlow does not gather between workers, and types that hold their values.
_GATHERED_AS = {
    tf.bool: tf.int32,
    tf.bfloat16: tf.float32,
    **dict.fromkeys((tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32),
    **dict.fromkeys((tf.uint32, tf.uint64), tf.int64),
}


def all_gather_rows(x: Any) -> Any:
    """Return the rows of all replicas, in the order of the global batch, with their gradients.

    A loss or a layer in which rows depend on each other (a contrastive loss, a Dice loss, a
    statistic of the batch) gives other numbers on a replica's rows than on all rows. Let each
    replica compute it from all rows instead:

        loss = contrastive(tfdist.all_gather_rows(embeddings), tfdist.all_gather_rows(labels))

    Args:
        x: This replica's rows, `[replica_rows, ...]`.

    Returns:
        All rows, `[rows, ...]`; `x` itself with one replica, and while Keras builds a model.

    Raises:
        ValueError: From TensorFlow, if `x` has no axes.

    Example:
        >>> all_gather_rows(tf.constant([[1.0], [2.0]])).numpy()
        array([[1.],
               [2.]], dtype=float32)
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1 or isinstance(x, keras.KerasTensor):
        return x
    x = tf.convert_to_tensor(x)
    if x.shape[0] is None:
        leave_loop()
    weight = step_weight()
    if weight is None:
        return _gathered(x)
    # The gradient of a row is the sum over the replicas' losses, which count by their weights. What
    # flows on to the row's own replica gets that replica's weight later.
    own = _with_gradient(x, lambda dy: tf.math.divide_no_nan(dy, tf.cast(weight, dy.dtype)))
    return _with_gradient(_gathered(own), lambda dy: weighted([dy], weight)[0])


def _gathered(x: tf.Tensor) -> tf.Tensor:
    """Return the rows of all replicas; TensorFlow's collective does not take all dtypes."""
    wire = _GATHERED_AS.get(x.dtype, x.dtype)
    rows = tf.distribute.get_replica_context().all_gather(tf.cast(x, wire), axis=0)
    return tf.cast(rows, x.dtype)


def _with_gradient(x: tf.Tensor, function: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Return a tensor whose gradient passes through a function."""
    return tf.custom_gradient(lambda x: (tf.identity(x), function))(x)
