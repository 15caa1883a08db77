"""Optimizer update of a pipeline-parallel step: gradient sums, regularizers and state.

Each part is computed on the device that holds the variable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.keras_compat.parallel import updating_in_place
from tfdist.parallel.pipeline_parallel.stage_passes import StageInGroup

DeviceOf = Callable[[keras.Variable], str]  # returns the device that holds a variable
Groups = Sequence[Sequence[StageInGroup]]


def sum_gradients(groups: Groups, device_of: DeviceOf) -> dict[int, tf.Tensor]:
    """Sum gradients over groups, and over the stages that share a weight.

    Args:
        groups: Stages of each group, after all backward passes.
        device_of: Function that returns the device of a variable.

    Returns:
        Gradients by the id of the variable.
    """
    sums: dict[int, tf.Tensor] = {}
    for v, g in (pair for group in groups for stage in group for pair in stage.results):
        if g is not None:
            with tf.device(device_of(v)):
                sums[id(v)] = sums[id(v)] + g if id(v) in sums else tf.identity(g)
    return sums


def penalties(
    variables: Sequence[keras.Variable],
    device_of: DeviceOf,
    gradients: dict[int, tf.Tensor] | None = None,
    scale: tf.Tensor | float = 1.0,
) -> list[tf.Tensor]:
    """Compute the regularization losses of weights.

    Args:
        variables: Weights, with or without a regularizer.
        device_of: Function that returns the device of a variable.
        gradients: Gradients by the id of the variable, to which the gradients of the losses are
            added. None: no gradients are computed.
        scale: Factor of the gradients, such as the loss scale.

    Returns:
        Float32 scalars, one for each weight with a regularizer, without `scale`.
    """
    losses = []
    for v in variables:
        if v.regularizer is None:
            continue
        with tf.device(device_of(v)):
            value = tf.identity(v.value)
            with tf.GradientTape() as tape:
                tape.watch(value)
                penalty = tf.cast(v.regularizer(value), tf.float32)
            losses.append(penalty)
            if gradients is not None:
                slope = tape.gradient(penalty, value) * tf.cast(scale, value.dtype)
                gradients[id(v)] = gradients[id(v)] + slope if id(v) in gradients else slope
    return losses


def apply(
    optimizer: keras.optimizers.Optimizer,
    gradients: dict[int, tf.Tensor],
    variables: Sequence[keras.Variable],
) -> None:
    """Update variables with an optimizer.

    Args:
        optimizer: Any Keras optimizer.
        gradients: Gradients by the id of the variable.
        variables: All variables that the optimizer was built for.
    """
    with updating_in_place(optimizer):
        optimizer.apply([gradients.get(id(v)) for v in variables], variables)


def keep_state(groups: Groups, device_of: DeviceOf) -> None:
    """Assign the state that the passes have changed, such as moving statistics and seeds.

    Floating-point state gets the mean over the groups; other state gets the first group's value.

    Args:
        groups: Stages of each group, after all passes.
        device_of: Function that returns the device of a variable.
    """
    new_values: dict[int, tuple[keras.Variable, list[tf.Tensor]]] = {}
    for v, value in (pair for group in groups for stage in group for pair in stage.changes):
        new_values.setdefault(id(v), (v, []))[1].append(value)
    for v, values in new_values.values():
        with tf.device(device_of(v)):
            v.assign(
                tf.add_n(values) / len(values)
                if len(values) > 1 and values[0].dtype.is_floating
                else values[0]
            )
