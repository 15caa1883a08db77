"""Gathered losses: each replica computes Keras' losses over the whole batch from all rows.

Keras' Dice, Tversky and Circle losses are not means over rows. Computed from a replica's own rows,
they would train to other numbers than one replica does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import mixes_rows
from tfdist.parallel.replica_weight import step_weight, weighted_step
from tfdist.train.synchronous.compiled_step import check_collective
from tfdist.train.synchronous.gathered_rows import all_gather_with_mask


def mark_own_rows(data: Any) -> None:
    """Mark the tensors of a replica's data, so that losses of them are computed from all rows.

    Args:
        data: Nest of the tensors that a step gets.
    """
    for x in keras.tree.flatten(data):
        if isinstance(x, tf.Tensor):
            x.tfdist_own_rows = True


def call_loss(
    keras_method: Callable, loss: keras.Loss, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """Call a loss: with all rows if they depend on each other, else the replica's.

    Targets that are not a step's own data may have been gathered already, by the step itself. They
    stay as they are.
    """
    values = y_true, y_pred, sample_weight
    if (
        step_weight() is None
        or not getattr(y_true, "tfdist_own_rows", False)
        or not mixes_rows(loss, len(y_true.shape))
        or not all(x is None or isinstance(x, tf.Tensor) for x in values)
    ):
        return keras_method(loss, *values)
    check_collective(f"the all_gather for the loss {loss.name!r}")
    y_true, y_pred, sample_weight = (
        x if x is None or x.shape.rank == 0 else all_gather_with_mask(x) for x in values
    )
    with weighted_step(1.0):
        return keras_method(loss, y_true, y_pred, sample_weight)
