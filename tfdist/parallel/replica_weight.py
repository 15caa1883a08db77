"""Weight of a replica in a step: its rows divided by the rows of the global batch.

In the steps of `fit` and `evaluate` a loss on a replica is the mean over the replica's own rows,
whoever computes it: Keras, a layer or the user. The gradients of such a mean get the replica's
weight before they are summed, so that the sum is the gradient of the mean over the global batch.
Loops of `strategy.run` keep TensorFlow's convention instead: their losses are scaled already.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

_thread = threading.local()

Weight: TypeAlias = "float | tf.Tensor"

_SPARSE = (tf.IndexedSlices, tf.SparseTensor, tf.RaggedTensor)  # collectives have no gradients


@contextlib.contextmanager
def weighted_step(weight: Weight, combine: Any = "mean") -> Iterator[None]:
    """Set the weight of the replica whose step is computed or traced in this context.

    Args:
        weight: Rows of this replica over those of the global batch: a number if it is the same at
            every step and on all replicas, or a scalar float64 tensor, which is 0 without rows.
        combine: `combine` of the `tfdist.sync.Gradients` policy of the step.
    """
    before = getattr(_thread, "step", (None, "mean"))
    _thread.step = weight, combine
    try:
        yield
    finally:
        _thread.step = before


def step_weight() -> Weight | None:
    """Return the weight of this replica in the running step; None outside of such a step."""
    return getattr(_thread, "step", (None, "mean"))[0]


def across_replicas(collective: Callable[[Any], Any], value: Any) -> Any:
    """Return what a differentiable collective returns, with gradients as a step needs them.

    The gradients of a replica's loss get the replica's weight where they are aggregated, at the end
    of the backward pass. A gradient that reaches another replica through a collective would get the
    weight of that replica instead. So gradients are multiplied by the weight of the replica that
    they come from before they cross, and divided by that of the replica that they reach.

    Args:
        collective: Function of the value whose gradient adds up, over the replicas, the gradients
            of what it returns. TensorFlow's `all_reduce` and `all_gather` are such functions.
        value: Nest of tensors of this replica.

    Returns:
        Nest of tensors.
    """
    weight, combine = getattr(_thread, "step", (None, "mean"))
    if weight is None or isinstance(weight, float):  # the weights of all replicas are equal
        return collective(value)
    if combine in ("sum", "replicas"):
        weight = tf.cast(weight > 0, tf.float64)

    def leave(dy):
        return weighted([tf.convert_to_tensor(dy)], weight)[0]

    def arrive(dy):
        return tf.math.divide_no_nan(dy, tf.cast(weight, dy.dtype))

    value = tf.nest.map_structure(lambda x: _with_gradient(x, arrive), value)
    return tf.nest.map_structure(lambda y: _with_gradient(y, leave), collective(value))


def _with_gradient(x: Any, function: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Return a tensor whose gradient passes through a function; what has no gradient stays."""
    if isinstance(x, _SPARSE) or not (tf.is_tensor(x) and x.dtype.is_floating):
        return x
    return tf.custom_gradient(lambda x: (tf.identity(x), function))(tf.convert_to_tensor(x))


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
    if isinstance(factor, float):
        return x * tf.constant(factor, x.dtype)
    return tf.math.multiply_no_nan(x, tf.cast(factor, x.dtype))
