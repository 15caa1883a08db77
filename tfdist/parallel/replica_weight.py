"""Weight of a replica's means and gradients in a step: its rows over those of the global batch.

In the steps of `fit` and `evaluate` a loss on a replica is the mean over the replica's own rows,
whoever computes it: Keras, a layer or the user. The gradients of such a mean get the replica's
weight before they are summed, so that the sum is the gradient of the mean over the global batch.
Loops of `strategy.run` keep TensorFlow's convention instead: their losses are scaled already.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

_thread = threading.local()

Weight: TypeAlias = "float | tf.Tensor"


@contextlib.contextmanager
def weighted_step(weight: Weight) -> Iterator[None]:
    """Mark what is computed or traced in this context as the step of a replica with this weight.

    Args:
        weight: Rows of this replica over those of the global batch: a number if it is the same at
            every step, or a scalar float64 tensor, which is 0 without rows.
    """
    before = step_weight()
    _thread.weight = weight
    try:
        yield
    finally:
        _thread.weight = before


def step_weight() -> Weight | None:
    """Return the weight of this replica in the running step; None outside of such a step."""
    return getattr(_thread, "weight", None)


def has_all_rows() -> bool:
    """Return whether this replica computes with the rows of all replicas, as gathered metrics."""
    weight = step_weight()
    return isinstance(weight, float) and weight == 1.0


def gradient_factor(combine: Any, replicas: int) -> Weight:
    """Return the factor of a replica's gradients, which their sum over the replicas needs.

    Args:
        combine: `combine` of a `tfdist.sync.Gradients` policy.
        replicas: Number of replicas.

    Returns:
        A number that is the same on all replicas, or a scalar float64 tensor.
    """
    weight = step_weight()
    if combine not in ("sum", "replicas"):
        return 1.0 if weight is None else weight
    if weight is None:  # TensorFlow's convention: each gradient is divided by the replicas already
        own_mean: Weight = float(replicas)
    elif isinstance(weight, float):
        own_mean = 1.0
    else:
        own_mean = tf.cast(weight > 0, tf.float64)
    return own_mean if combine == "sum" else own_mean / replicas


def weighted(values: Sequence[Any], factor: Weight) -> list:
    """Return gradients or other tensors times a factor; None stays None.

    Args:
        values: Tensors, `tf.IndexedSlices` or None.
        factor: The factor. If it is a tensor and 0, the result is 0 for any value, also for NaN:
            the mean over no rows is NaN.
    """
    if isinstance(factor, float) and factor == 1.0:
        return list(values)
    return [None if x is None else _weighted(x, factor) for x in values]


def _weighted(x: Any, factor: Weight) -> Any:
    if isinstance(x, tf.IndexedSlices):
        return tf.IndexedSlices(_weighted(x.values, factor), x.indices, x.dense_shape)
    factor_of_dtype = tf.cast(factor, x.dtype)
    if isinstance(factor, float):
        return x * factor_of_dtype
    return tf.math.multiply_no_nan(x, factor_of_dtype)
