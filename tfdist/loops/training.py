"""Training and evaluation of a `State` with a custom loss function, over epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.loops.losses import check_loss
from tfdist.loops.prepare import check_batches
from tfdist.loops.training_state import State


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
    """Train with a custom loss, with `train_step` and `update` in each step.

    Keras' `fit` counts epochs and calls callbacks, and tfdist's engine runs the steps. Metrics are
    not all-reduced in each step, but only when they are read.

    Args:
        loss: Function `loss(model, x, y)`, called with the parts of a batch, or `loss(model,
            batch)`. It returns the mean over the rows that it is given, a scalar; or that scalar
            and a dict of metrics, each a scalar mean over these rows too. All are averaged over
            replicas and batches, weighted by rows. If it has an argument `training`, it gets True
            in training and False in validation, and passes that on to the model. Its metrics must
            have the same names in both. It must add `model.losses` itself if it wants what layers
            add there. It is traced once as long as you pass the same object; another object with
            the same code counts as another function.
        state: State that `prepare_training` returned, which is trained further.
        epochs: Passes over the data, default 1.
        steps_per_epoch: Steps per epoch; default: one pass over the data.
        schedule: Learning rate of each update, from this call on: a
            `keras.optimizers.schedules.LearningRateSchedule`, or a function of the number of
            previous updates, a tensor. None: the optimizer's learning rate stays as it is.
        validation: Data set of global batches on which the loss is evaluated at the end of each
            epoch. They may differ from training batches if the loss checks `training`.
        callbacks: Callbacks of Keras and tfdist, such as `tfdist.BackupAndRestore`, which resumes
            an interrupted training. Their `model` wraps the whole training, and its `save` is
            `state.model.save`.
        verbose: Verbosity as for `fit`, default 0; only the chief prints.

    Returns:
        A dict of lists with one number per epoch: "loss", each metric, and the same names with the
        prefix "val_".

    Raises:
        ValueError: If an argument is wrong.

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
    state.learner.set_loss(state, loss, state.data, training=True)
    if schedule is not None:
        state.learner.set_schedule(schedule, _schedule(schedule))
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
    """Return the mean of a loss and its metrics over data, exact over all replicas.

    Args:
        loss: Loss function as for `train`; an argument `training` gets False.
        state: State of the training.
        data: Data set of global batches.

    Returns:
        A dict of "loss" and each metric.

    Raises:
        ValueError: If an argument is wrong.
    """
    check_loss(loss)
    _check_state(state)
    data = check_batches(data, "data")
    state.learner.set_loss(state, loss, data, training=False)
    return {
        name: float(value)
        for name, value in state.learner.evaluate(data, verbose=0, return_dict=True).items()
    }


def _check_state(state: Any) -> None:
    if not isinstance(state, State):
        raise ValueError(
            "state: expected a State from tfdist.loops.prepare_training, received "
            f"{type(state).__name__}."
        )


class _Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """Learning rate schedule from a function of the number of updates."""

    def __init__(self, function: Callable[[Any], Any]):
        self.function = function

    def __call__(self, step):
        try:
            rate = tf.cast(self.function(tf.cast(step, tf.float32)), tf.float32)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "schedule: expected a learning rate computed by TensorFlow or Keras operations, "
                "because it is part of the graph of a step: use keras.ops.where instead of if, and "
                f"keras.ops.cos instead of math.cos. The function failed: {error}"
            ) from error
        if rate.shape.rank != 0:
            raise ValueError(f"schedule: expected a scalar, received the shape {rate.shape}.")
        return rate


def _schedule(schedule: Any) -> keras.optimizers.schedules.LearningRateSchedule:
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return schedule
    if not callable(schedule):
        raise ValueError(
            "schedule: expected a function of the step, or a "
            f"keras.optimizers.schedules.LearningRateSchedule; received {schedule!r}."
        )
    return _Schedule(schedule)
