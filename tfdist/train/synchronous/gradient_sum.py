"""Sum of the replicas' gradients by an all-reduce, and updates by the sums."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import local_update
from tfdist.keras_compat.parallel import known_variables
from tfdist.optimizers import check_sparse
from tfdist.parallel.collectives.group import is_native, native_transport
from tfdist.parallel.replica_weight import Weight, weighted, weighted_step
from tfdist.parallel.sharding.fsdp import FSDP
from tfdist.parallel.sharding.zero import Zero
from tfdist.train.timing import graph_timestamps


class NotInLoop(Exception):
    """Exception for a step that cannot be the body of a graph loop and must run by itself.

    In a loop, a collective takes tensors of one shape only.
    """


_loop = types.SimpleNamespace(traced=False)  # seen by the threads in which replicas are traced


@contextlib.contextmanager
def in_loop() -> Iterator[None]:
    """Mark what is traced in this context as the body of a loop."""
    _loop.traced = True
    try:
        yield
    finally:
        _loop.traced = False


def leave_loop() -> None:
    """Raise NotInLoop if the body of a loop is traced: the number of rows differs by step."""
    if _loop.traced:
        raise NotInLoop


def sum_over_replicas(
    context: tf.distribute.ReplicaContext, grads: list, factor: Weight = 1.0
) -> list:
    """Return the sum of each gradient over the replicas; None stays None.

    Gradients of one dtype travel together, because TensorFlow packs them into one buffer. Native
    collectives sum dense gradients where they are used.

    Args:
        context: Context of this replica.
        grads: Gradients of this replica.
        factor: Factor of these, as for `weighted`.
    """
    if context.num_replicas_in_sync == 1:
        return weighted(grads, factor)
    if any(isinstance(g, tf.IndexedSlices) and g.indices.shape[0] is None for g in grads):
        leave_loop()
    summed = list(grads)
    for dtype in dict.fromkeys(g.dtype for g in grads if g is not None):
        positions = [i for i, g in enumerate(grads) if g is not None and g.dtype == dtype]
        addends = [grads[i] for i in positions]
        transport = native_transport(context.strategy)
        if transport is not None and is_native(addends):
            totals = transport.all_reduce(addends, "gradients", factor=factor)
        else:
            with weighted_step(1.0):  # the sums themselves have no gradients
                totals = context.all_reduce("SUM", weighted(addends, factor))
        for i, total in zip(positions, totals, strict=True):
            summed[i] = total
    return summed


def dense(grads: list, optimizer: Any, variables: list | None) -> list:
    """Return gradients as dense tensors of their variables' shapes; None stays None.

    The sum of a sparse and a dense gradient, as tied weights have, loses its static shape.

    Args:
        grads: One gradient or None per variable.
        optimizer: The outermost optimizer.
        variables: The variables, or None where the optimizer is built.
    """
    check_sparse(optimizer, grads, "the synchronization policy")
    variables = variables if variables is not None else known_variables(optimizer)
    return [
        None if g is None else tf.reshape(tf.convert_to_tensor(g), v.shape)
        for g, v in zip(grads, variables, strict=True)
    ]


def apply_centrally(
    optimizer: keras.optimizers.Optimizer,
    keras_apply: Callable,
    grads: list,
    variables: list | None,
) -> Any:
    """Update variables that the replicas share (central storage), once for all replicas.

    All replicas call this function, in replica context.

    Args:
        optimizer: The outermost optimizer.
        keras_apply: Keras' own `apply`.
        grads: Summed gradients.
        variables: The variables, or None where the optimizer is built.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "strategy central_storage: a LossScaleOptimizer (policy mixed_float16) is not "
            "supported, as Keras applies it in a replica only. Use the policy mixed_bfloat16, or "
            "the strategy mirrored."
        )
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync > 1:
        return context.merge_call(_apply_once, args=(optimizer, keras_apply, grads, variables))
    with local_update(optimizer, 0), graph_timestamps.update(0):
        return keras_apply(optimizer, grads, variables)


def apply_to_parts(
    holder: Zero | FSDP,
    optimizer: keras.optimizers.Optimizer,
    keras_apply: Callable,
    grads: list,
    variables: list | None,
    local: int,
) -> Any:
    """Update the state that each replica holds a part of; called in replica context.

    Args:
        holder: Sharded optimizer, which reduces the gradients itself, or the holder of sharded
            weights, which has reduced them in the backward pass.
        optimizer: The outermost optimizer.
        keras_apply: Keras' own `apply`.
        grads: Gradients of this replica, or its parts of the sums.
        variables: The variables, or None where the optimizer is built.
        local: Index of this replica among those of this process.
    """
    graph_timestamps.before_sum(local, grads, holder.group.size > 1)
    holder.reduced = lambda parts: graph_timestamps.after_sum(local, parts)
    try:
        with graph_timestamps.update(local):
            return holder.update(optimizer, keras_apply, grads, variables)
    finally:
        holder.reduced = None


def _apply_once(strategy, optimizer, keras_apply, grads, variables):
    """Update the shared variables once, in cross-replica context.

    The sums are equal on all replicas, so those of the first replica are used.
    """
    first = [None if g is None else strategy.experimental_local_results(g)[0] for g in grads]
    with local_update(optimizer, None), graph_timestamps.update(0):
        keras_apply(optimizer, first, variables)
