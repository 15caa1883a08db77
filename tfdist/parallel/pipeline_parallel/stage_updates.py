"""What passes have found becomes an update of the variables, each computed where the variable lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.keras_compat.parallel import updating_in_place
from tfdist.parallel.pipeline_parallel.stage_passes import StageInGroup

Home = Callable[[keras.Variable], str]  # the device on which a variable lies
Groups = Sequence[Sequence[StageInGroup]]


def summed(groups: Groups, home: Home) -> dict[int, tf.Tensor]:
    """Gradients by the variable's id: sums over groups, and over the stages that share a weight."""
    sums: dict[int, tf.Tensor] = {}
    for v, g in (pair for group in groups for stage in group for pair in stage.results):
        if g is not None:
            with tf.device(home(v)):
                sums[id(v)] = sums[id(v)] + g if id(v) in sums else tf.identity(g)
    return sums


def penalties(
    variables: Sequence[keras.Variable],
    home: Home,
    gradients: dict[int, tf.Tensor] | None = None,
    scale: tf.Tensor | float = 1.0,
) -> list[tf.Tensor]:
    """Losses of weights by their regularizers.

    Args:
        variables: The weights.
        home: Where each lies.
        gradients: Get those of the losses, if given.
        scale: By which these are multiplied.
    """
    found = []
    for v in variables:
        if v.regularizer is None:
            continue
        with tf.device(home(v)):
            value = tf.identity(v.value)
            with tf.GradientTape() as tape:
                tape.watch(value)
                penalty = tf.cast(v.regularizer(value), tf.float32)
            found.append(penalty)
            if gradients is not None:
                slope = tape.gradient(penalty, value) * tf.cast(scale, value.dtype)
                gradients[id(v)] = gradients[id(v)] + slope if id(v) in gradients else slope
    return found


def apply(
    optimizer: keras.optimizers.Optimizer,
    gradients: dict[int, tf.Tensor],
    variables: Sequence[keras.Variable],
) -> None:
    """Lets an optimizer update variables.

    Args:
        optimizer: Any of Keras'.
        gradients: By the variable's id.
        variables: All that it was made for.
    """
    with updating_in_place(optimizer):
        optimizer.apply([gradients.get(id(v)) for v in variables], variables)


def keep_state(groups: Groups, home: Home) -> None:
    """Assigns what else passes have changed: the groups' mean of statistics, the first group's of all else."""
    after: dict[int, tuple[keras.Variable, list[tf.Tensor]]] = {}
    for v, value in (pair for group in groups for stage in group for pair in stage.changes):
        after.setdefault(id(v), (v, []))[1].append(value)
    for v, values in after.values():
        with tf.device(home(v)):
            v.assign(
                tf.add_n(values) / len(values)
                if len(values) > 1 and values[0].dtype.is_floating
                else values[0]
            )
