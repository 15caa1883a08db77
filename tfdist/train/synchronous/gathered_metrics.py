"""Gathered metrics: each replica updates a user's metric by the rows of all replicas.

All replicas then make the same updates, and the first one's state counts. That is right for any
metric, whatever it computes, and costs an all-gather of its inputs in each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import copies
from tfdist.parallel.replica_weight import step_weight, weighted, weighted_step
from tfdist.train.metric_calls import needs_all_rows
from tfdist.train.synchronous.compiled_step import check_collective
from tfdist.train.synchronous.gathered_rows import all_gather_rows, all_gather_with_mask


class MetricUpdates:
    """Updates of the user's metrics in one step of a replica, which share what they gather."""

    def __init__(self) -> None:
        # By a tensor and the graph that uses it; the tensor is kept, so that no other gets its id.
        self._gathered: dict[tuple[int, int], tuple[Any, Any]] = {}

    def update(self, metric: keras.Metric, keras_method: Callable, args: tuple, kwargs: dict):
        """Update a metric: by all rows, unless it declares how states are combined.

        Args:
            metric: Metric that is not Keras' own.
            keras_method: The metric's own `update_state`.
            args: Positional arguments of the update.
            kwargs: Keyword arguments of the update.
        """
        if step_weight() is None or not needs_all_rows(metric):
            return keras_method(*args, **kwargs)
        check_collective(f"the all_gather for the metric {metric.name!r}")
        if not all(is_gathered(v) for v in metric.variables):
            for v in metric.variables:
                v.tfdist_gathered = True
            _start_whole(metric)
        args, kwargs = keras.tree.map_structure(
            lambda x: self._of_all_rows(metric, x), (args, kwargs)
        )
        with weighted_step(1.0):
            return keras_method(*args, **kwargs)

    def _of_all_rows(self, metric: keras.Metric, x: Any) -> Any:
        if not tf.is_tensor(x):
            return x
        graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
        key = id(x), id(graph)
        if key not in self._gathered:
            self._gathered[key] = x, _of_all_rows(metric, x)
        return self._gathered[key][1]


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


def _of_all_rows(metric: keras.Metric, x: Any) -> Any:
    """Return the rows of all replicas in the order of the global batch.

    A scalar is taken as a mean of the rows if it is floating, else as a count of them.
    """
    if isinstance(x, tf.RaggedTensor):
        values = _of_all_rows(metric, x.values)
        return tf.RaggedTensor.from_row_lengths(values, all_gather_rows(x.row_lengths()))
    if not isinstance(x, tf.Tensor):
        raise ValueError(
            f"metric {metric.name}: expected dense or ragged tensors, whose rows the replicas "
            f"gather, received a {type(x).__name__}. Pass a dense tensor to the metric, or, if "
            "the states of parts of the rows add up, set tfdist_sums_rows = True in its class."
        )
    if x.shape.rank == 0:
        weight = step_weight()
        assert weight is not None
        part = weighted([x], weight)[0] if x.dtype.is_floating else x
        return tf.distribute.get_replica_context().all_reduce("SUM", part)
    return all_gather_with_mask(x)
