"""A loss function, a `State` and epochs become a history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.loops.losses import check_loss
from tfdist.loops.prepare import check_batches
from tfdist.loops.state import State


def train(
    loss: Callable,
    state: State,
    *,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    schedule: Callable[[Any], Any] | None = None,
    validation: tf.data.Dataset | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    verbose: int | str = 0,
) -> dict[str, list[float]]:
    """Trains by a loss of one's own, with `train_step` and `update` in each step.

    It is Keras' `fit` that counts epochs and calls callbacks, and tfdist's engine that runs steps. Metrics are summed over the replicas when somebody looks, not in each step.

    Args:
        loss: A function `loss(model, x, y)`, called with the parts of a batch, or `loss(model, batch)`. It returns the mean over the rows that it is given, a scalar; or
            that and a dict of metrics, each a scalar mean over these rows too. Over replicas and batches all are averaged by rows. With an argument
            `training` it is told whether it trains or validates; it passes that to the model. Its metrics have the same names in both. What layers add to
            `model.losses` is its own to add. It is traced once while it stays the loss; another object of the same code is another function.
        state: What `prepare_training` returned; it is trained on.
        epochs: Passes over the data.
        steps_per_epoch: So many steps are an epoch, instead of a pass.
        schedule: The learning rate of each update: a `keras.optimizers.schedules.LearningRateSchedule`, or a function of the number of updates before, which
            gets a tensor. Of the optimizer, from this call on. None: as it is.
        validation: Global batches, on which the loss is evaluated at the end of each epoch; other ones than those trained on, if it knows by `training`.
        callbacks: Keras' and tfdist's, such as `tfdist.BackupAndRestore`, with which a training goes on where it was interrupted. Their `model` trains as a whole: its
            `save` is that of `state.model`.
        verbose: As for `fit`; only the chief prints.

    Returns:
        "loss", each metric, and both again with "val_" before: a number an epoch.

    Raises:
        ValueError: For a bad argument.

    Example:
        >>> import numpy as np
        >>> from tfdist.loops import prepare_training
        >>> x = np.linspace(-1, 1, 32, dtype="float32")[:, None]
        >>> def build():
        ...     return keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
        >>> def loss(model, x, y):
        ...     return keras.ops.mean((model(x) - y) ** 2)
        >>> state = prepare_training(build, (x, 3 * x), "cpu", "sgd", global_batch=8)
        >>> history = train(loss, state, epochs=3, schedule=lambda step: 0.5 / (1.0 + step))
        >>> len(history["loss"]), history["loss"][-1] < history["loss"][0]
        (3, True)
    """
    check_loss(loss)
    _check_state(state)
    for name, value in (("epochs", epochs), ("steps_per_epoch", steps_per_epoch)):
        if (
            isinstance(value, bool)
            or (value is not None and not isinstance(value, int))
            or (value is None and name == "epochs")
            or (value is not None and value < 1)
        ):
            raise ValueError(f"{name}: expected a number, 1 or more; received {value!r}.")
    if validation is not None:
        validation = check_batches(validation, "validation")
    state.learner.learn(state, loss, state.data, training=True)
    if schedule is not None:
        state.learner.follow(schedule, _schedule(schedule))
    history = state.learner.fit(
        state.data,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        validation_data=validation,
        callbacks=list(callbacks),
        verbose=verbose,
    )
    return history.history


def evaluate(loss: Callable, state: State, data: tf.data.Dataset) -> dict[str, float]:
    """The mean of a loss and its metrics over data, exact over replicas.

    Args:
        loss: As for `train`; one with an argument `training` gets False.
        state: The training.
        data: Global batches.

    Returns:
        "loss" and each metric.

    Raises:
        ValueError: For a bad argument.
    """
    check_loss(loss)
    _check_state(state)
    data = check_batches(data, "data")
    state.learner.learn(state, loss, data, training=False)
    return {
        name: float(value)
        for name, value in state.learner.evaluate(data, verbose=0, return_dict=True).items()
    }


def _check_state(state: Any) -> None:
    if not isinstance(state, State):
        raise ValueError(
            f"state: expected what tfdist.loops.prepare_training returns, received {type(state).__name__}."
        )


class _Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """A function of the number of updates."""

    def __init__(self, function: Callable[[Any], Any]):
        self.function = function

    def __call__(self, step):
        try:
            rate = tf.cast(self.function(tf.cast(step, tf.float32)), tf.float32)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "schedule: expected a learning rate, computed by operations of TensorFlow or Keras, as it is part of the graph of a step: keras.ops.where instead of if, "
                f"keras.ops.cos instead of math.cos. The function failed: {error}"
            ) from error
        if rate.shape.rank != 0:
            raise ValueError(f"schedule: expected a scalar, received the shape {rate.shape}.")
        return rate


def _schedule(given: Any) -> keras.optimizers.schedules.LearningRateSchedule:
    if isinstance(given, keras.optimizers.schedules.LearningRateSchedule):
        return given
    if not callable(given):
        raise ValueError(
            f"schedule: expected a function of the step, or a keras.optimizers.schedules.LearningRateSchedule; received {given!r}."
        )
    return _Schedule(given)
