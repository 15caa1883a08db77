"""Gradient computation and optimizer update of one replica, for custom training loops.

Call both functions in replica context: in a function that `State.step` takes. `train` calls them
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.loops.losses import check_loss, value_of

if TYPE_CHECKING:
    from tfdist.loops.training_state import State


def train_step(loss: Callable, state: State, batch: Any) -> tuple[list, dict[str, tf.Tensor]]:
    """Compute the gradients of a loss for one replica's rows: forward, then backward pass.

    Args:
        loss: Function `loss(model, x, y)` or `loss(model, batch)`; see `tfdist.loops.train`.
        state: State of the training.
        batch: Rows of this replica, `[replica_rows, ...]`.

    Returns:
        A list with a gradient, or None, for each variable of `state.variables`, and the loss and
        the metrics over this replica's rows. The gradients are those of the mean over these rows;
        `update` weighs them by the replica's part of the global batch.

    Raises:
        ValueError: If the loss is wrong, or this is not called in replica context.
    """
    check_loss(loss)
    _check_in_replica(state, "train_step")
    variables = state.variables
    with tf.GradientTape() as tape:
        value, metrics = value_of(loss, state.model, batch, training=True)
        scaled = state.optimizer.scale_loss(value)
    gradients = tape.gradient(scaled, variables)
    if all(g is None for g in gradients):
        raise ValueError(
            f"loss: expected a loss that depends on the model's {len(variables)} trainable "
            "variables; it depends on none of them. Compute it from the model's outputs."
        )
    return gradients, {"loss": value, **metrics}


def update(state: State, gradients: Sequence[Any]) -> None:
    """Combine the replicas' gradients by the strategy's `sync`, and apply the optimizer.

    Args:
        state: State of the training.
        gradients: Gradients that `train_step` returned, or values computed from them, in the same
            order.

    Raises:
        ValueError: If their number differs from the number of variables, or this is not called in
            replica context.
    """
    _check_in_replica(state, "update")
    variables = state.variables
    if not isinstance(gradients, Sequence) or len(gradients) != len(variables):
        received = len(gradients) if isinstance(gradients, Sequence) else type(gradients).__name__
        raise ValueError(
            f"update: expected {len(variables)} gradients, one or None for each of "
            f"state.variables; received {received}."
        )
    state.optimizer.apply(list(gradients), variables)


def _check_in_replica(state: State, name: str) -> None:
    if (
        tf.distribute.get_strategy() is not state.strategy
        or tf.distribute.in_cross_replica_context()
    ):
        raise ValueError(
            f"{name}: expected a call in replica context. Call it in a function that you passed "
            "to state.step(...), or use tfdist.loops.train."
        )
