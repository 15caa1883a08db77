"""The replicas' gradients become one sum, which every replica applies to its own copy of the variables.

No loss is computed here. Keras clips, accumulates and checks each replica's gradients before they are summed; here the sum
comes first, in one collective, so that clipping, accumulation, averaging of weights and the overflow check of loss scaling
see what a single replica would see.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import local_update
from tfdist.train import marks
from tfdist.train.placement import Placement
from tfdist.train.step import local_replica


class NotInLoop(Exception):
    """A step cannot be the body of a loop, where a collective takes one shape only; it runs by itself."""


_loop = types.SimpleNamespace(traced=False)  # seen by the threads in which replicas are traced


@contextlib.contextmanager
def in_loop() -> Iterator[None]:
    """Inside, what is traced becomes the body of a loop."""
    _loop.traced = True
    try:
        yield
    finally:
        _loop.traced = False


def apply(
    optimizer: keras.optimizers.Optimizer,
    keras_apply: Callable,
    grads: list,
    variables: list | None,
    placement: Placement,
    central: bool,
    watch: Callable[[list, list | None], None] | None = None,
) -> Any:
    """Sums the gradients over the replicas, then lets Keras apply them; called in replica context.

    Args:
        optimizer: The outermost optimizer.
        keras_apply: Keras' own `apply`.
        grads: One gradient or None a variable.
        variables: The variables, or None where the optimizer is built.
        placement: Numbers of workers and replicas.
        central: Whether variables are shared by the replicas (central storage) instead of copied to each.
        watch: Called with the sums and the variables.
    """
    context = tf.distribute.get_replica_context()
    local, several = local_replica(placement), placement.replicas > 1
    marks.before_sum(local, list(grads), several)
    summed = sum_over_replicas(context, list(grads))
    if several:
        marks.after_sum(local, summed)
    grads = [merge_duplicates(g) for g in summed]
    if watch is not None:
        watch(grads, variables)
    if central:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                "strategy central_storage: a LossScaleOptimizer (policy mixed_float16) is not supported, as Keras applies it in "
                "a replica only. Use the policy mixed_bfloat16, or the strategy mirrored."
            )
        if context.num_replicas_in_sync > 1:
            return context.merge_call(_apply_once, args=(optimizer, keras_apply, grads, variables))
    with local_update(optimizer, local), marks.update(local):
        return keras_apply(optimizer, grads, variables)


def sum_over_replicas(context: tf.distribute.ReplicaContext, grads: list) -> list:
    """The sum of each gradient over the replicas; None stays None.

    Gradients of one dtype travel together, as TensorFlow packs them into one buffer.
    """
    if context.num_replicas_in_sync == 1:
        return grads
    if _loop.traced and any(isinstance(g, tf.IndexedSlices) and g.indices.shape[0] is None for g in grads):
        raise NotInLoop  # other rows in each step
    summed = list(grads)
    for dtype in dict.fromkeys(g.dtype for g in grads if g is not None):
        places = [i for i, g in enumerate(grads) if g is not None and g.dtype == dtype]
        for i, total in zip(places, context.all_reduce("SUM", [grads[i] for i in places]), strict=True):
            summed[i] = total
    return summed


def merge_duplicates(grad):
    """Sums the rows of a sparse gradient that belong to one index.

    Keras' Adam, RMSprop and Adagrad square each row by itself: without this the result is a sum of squares in place of the
    square of the sum, and depends on how rows are spread over replicas.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return grad
    indices, position = tf.unique(grad.indices)
    values = tf.math.unsorted_segment_sum(grad.values, position, tf.size(indices))
    return tf.IndexedSlices(values, indices, grad.dense_shape)


def _apply_once(strategy, optimizer, keras_apply, grads, variables):
    """In cross-replica context: one update of the shared variables, with the first replica's view of the (equal) sums."""
    first = [None if g is None else strategy.experimental_local_results(g)[0] for g in grads]
    with local_update(optimizer, None), marks.update(0):
        keras_apply(optimizer, first, variables)
