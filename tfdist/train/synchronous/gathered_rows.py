"""All-gather of rows, for losses and metrics that are not means over rows."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat.parallel import mask_of, set_mask

# Types that TensorFlow does not gather between workers, and types that hold their values.
_GATHERED_AS = {
    tf.bool: tf.int32,
    tf.bfloat16: tf.float32,
    **dict.fromkeys((tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32),
    **dict.fromkeys((tf.uint32, tf.uint64), tf.int64),
}


def all_gather_rows(x: Any) -> Any:
    """Return the rows of all replicas, in the order of the global batch, with their gradients.

    A loss or a layer in which rows depend on each other (a contrastive loss, a statistic of the
    batch) gives other numbers on a replica's rows than on all rows. Let each replica compute it
    from all rows instead:

        loss = contrastive(tfdist.all_gather_rows(embeddings), tfdist.all_gather_rows(labels))

    Args:
        x: This replica's rows, `[replica_rows, ...]`.

    Returns:
        All rows, `[rows, ...]`; `x` itself with one replica, and while Keras builds a model.

    Raises:
        ValueError: If `x` has no axes (raised by TensorFlow).

    Example:
        >>> all_gather_rows(tf.constant([[1.0], [2.0]])).numpy()
        array([[1.],
               [2.]], dtype=float32)
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1 or isinstance(x, keras.KerasTensor):
        return x
    x = tf.convert_to_tensor(x)
    comm_dtype = _GATHERED_AS.get(x.dtype, x.dtype)
    # TensorFlow gathers to the device of a tensor, and an argument of a function has none.
    own = tf.identity(tf.cast(x, comm_dtype))
    rows = tf.cast(context.all_gather(own, axis=0), x.dtype)
    # In a graph, TensorFlow knows no shape of what it gathers on several devices.
    return tf.ensure_shape(rows, tf.TensorShape([None]).concatenate(x.shape[1:]))


def all_gather_with_mask(x: tf.Tensor) -> tf.Tensor:
    """Return what `all_gather_rows` does, with the mask of all rows if Keras gave `x` one."""
    rows = all_gather_rows(x)
    mask = mask_of(x)
    if mask is not None:
        set_mask(rows, all_gather_rows(mask))
    return rows
