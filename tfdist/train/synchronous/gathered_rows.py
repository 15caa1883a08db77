"""All-gather of rows, for losses and metrics that are not means over rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import copies
from tfdist.keras_compat.parallel import mask_of, set_mask
from tfdist.parallel.replica_weight import step_weight, weighted, weighted_step
from tfdist.train.metric_calls import adds_up

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
    return tf.cast(context.all_gather(tf.cast(x, comm_dtype), axis=0), x.dtype)


def update_metric(metric: keras.Metric, keras_method: Callable, args: tuple, kwargs: dict) -> None:
    """Update a metric in a step by this replica's rows, or by all rows.

    All rows are used if the states of replicas cannot be summed. Then all replicas make the same
    update, and the first one's state counts.

    Args:
        metric: Metric that is not Keras' own.
        keras_method: The metric's own `update_state`.
        args: Positional arguments of the update.
        kwargs: Keyword arguments of the update.
    """
    if step_weight() is not None and metric.variables:
        if not hasattr(metric.variables[0], "tfdist_gathered"):
            gathered = not adds_up(metric, args, kwargs, by_rows=True)
            for v in metric.variables:
                v.tfdist_gathered = gathered
            if gathered:
                _start_whole(metric)
        if metric.variables[0].tfdist_gathered:
            args, kwargs = keras.tree.map_structure(_of_all_rows, (args, kwargs))
            with weighted_step(1.0):
                keras_method(*args, **kwargs)
            return
    keras_method(*args, **kwargs)


def is_gathered(variable: keras.Variable) -> bool:
    """Return whether a metric's variable has the same value on all replicas."""
    return getattr(variable, "tfdist_gathered", False)


def _start_whole(metric: keras.Metric) -> None:
    """Make each replica start with the metric's whole state.

    TensorFlow gives each replica an equal part of what is assigned to a sum.
    """
    own_reset = metric.reset_state

    def assign_start(only_parts: bool) -> None:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        with keras.StatelessScope() as scope:
            own_reset()
        for v in metric.variables:
            start = scope.get_current_value(v)
            for copy in copies(v) if start is not None else ():
                start = tf.cast(start, copy.dtype)
                if not only_parts or tf.reduce_all(copy == start / replicas):
                    copy.assign(start)

    def reset_state() -> None:
        own_reset()
        assign_start(only_parts=False)

    with tf.init_scope():
        assign_start(only_parts=True)  # unless the state is that of a snapshot
    metric.reset_state = reset_state


def _of_all_rows(x: Any) -> Any:
    """Return the rows of all replicas in the order of the global batch.

    A scalar is taken as a mean of the rows if it is floating, else as a count of them.
    """
    if not tf.is_tensor(x):
        return x
    context = tf.distribute.get_replica_context()
    if x.shape.rank == 0:
        weight = step_weight()
        assert weight is not None
        part = weighted([x], weight)[0] if x.dtype.is_floating else x
        return context.all_reduce("SUM", part)
    rows = all_gather_rows(x)
    mask = mask_of(x)
    if mask is not None:
        set_mask(rows, all_gather_rows(mask))
    return rows
