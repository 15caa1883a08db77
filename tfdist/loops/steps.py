"""One replica's rows become gradients, and gradients an update of its variables; called in replicas, in `State.step` or by `train`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.loops.losses import check_loss, value_of
from tfdist.train.synchronous.replica_step import own_weight

if TYPE_CHECKING:
    from tfdist.loops.state import State


def train_step(loss: Callable, state: State, batch: Any) -> tuple[list, dict[str, tf.Tensor]]:
    """The gradients of a loss for one replica's rows: forward, then backward.

    Args:
        loss: A function `loss(model, x, y)` or `loss(model, batch)`; see `tfdist.loops.train`.
        state: The training.
        batch: This replica's rows.

    Returns:
        One gradient or None a variable of `state.variables`, each this replica's part of the gradient of the mean over the global batch, so that their sum over the
        replicas is that; and the loss and the metrics over this replica's rows.

    Raises:
        ValueError: The loss is none, or this is not called in a replica.
    """
    check_loss(loss)
    _check_place(state, "train_step")
    variables = state.variables
    with tf.GradientTape() as tape:
        value, metrics = value_of(loss, state.model, batch, training=True)
        part = value * tf.cast(own_weight(state.replicas), value.dtype)
        scaled = state.optimizer.scale_loss(part)
    gradients = tape.gradient(scaled, variables)
    if all(g is None for g in gradients):
        raise ValueError(
            f"loss: what it returns depends on none of the {len(variables)} trainable variables of the model. Compute it from what the model gives."
        )
    return gradients, {"loss": value, **metrics}


def update(state: State, gradients: Sequence[Any]) -> None:
    """Makes one of the replicas' gradients, as the strategy's `sync` says, and gives it to the optimizer.

    Args:
        state: The training.
        gradients: As `train_step` returned them, or what was made of them, in the same order.

    Raises:
        ValueError: There are more or fewer of them than variables, or this is not called in a replica.
    """
    _check_place(state, "update")
    variables = state.variables
    if not isinstance(gradients, Sequence) or len(gradients) != len(variables):
        found = len(gradients) if isinstance(gradients, Sequence) else type(gradients).__name__
        raise ValueError(
            f"update: expected {len(variables)} gradients, one a variable of state.variables, or None; received {found}."
        )
    state.optimizer.apply(list(gradients), variables)


def _check_place(state: State, name: str) -> None:
    if (
        tf.distribute.get_strategy() is not state.strategy
        or tf.distribute.in_cross_replica_context()
    ):
        raise ValueError(
            f"{name}: expected to be called in a replica. Call it in a function that state.step(...) made one of all replicas; or use tfdist.loops.train."
        )
