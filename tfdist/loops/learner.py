"""Keras model that lets `fit` train a user's model with a custom loss function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdist.data.batch_rows import count_rows
from tfdist.keras_compat import engine_of, global_generator
from tfdist.loops.losses import value_of
from tfdist.loops.steps import train_step, update
from tfdist.train.synchronous.feed import symbolic, without_optionals

if TYPE_CHECKING:
    from tfdist.loops.training_state import State


@dataclasses.dataclass
class _Task:
    """Training, loss function and metrics of a `Learner`.

    They live in an object of their own because Keras would track metrics in a dict as weights.

    Attributes:
        state: State of the training.
        loss: Loss function of the user.
        means: Means of the loss and of each metric over the rows, by name.
    """

    state: State
    loss: Callable
    means: dict[str, keras.metrics.Mean]


class Learner(keras.Model):
    """Keras model that wraps the user's model and trains it by a loss function.

    It must be created in the strategy's scope.

    Args:
        inner: Built model of the user, or a dict or list of built models.
        optimizer: Optimizer of their trainable variables.
        eager: Whether steps run eagerly, as Python.
    """

    def __init__(self, inner: Any, optimizer: keras.optimizers.Optimizer, eager: bool):
        super().__init__(name="learner")
        self.inner = inner
        self.built = True
        self._task: _Task | None = None
        self._schedule: Any = None
        self.compile(optimizer=optimizer, loss=None, run_eagerly=eager, jit_compile=False)

    def set_loss(self, state: State, loss: Callable, data: tf.data.Dataset, training: bool) -> None:
        """Set the loss to train with next; keep the traced graphs if it is the same object.

        Args:
            state: State of the training.
            loss: Loss function of the user.
            data: Data set whose batches the loss gets first.
            training: Whether the model trains on them.
        """
        if self._task is not None and self._task.loss is loss:
            return
        global_generator.share(state.strategy, self)
        names = ["loss", *_metric_names(state, loss, data, training)]
        with state.strategy.scope():
            self._task = _Task(state, loss, {name: keras.metrics.Mean(name=name) for name in names})
        self.train_function = None
        self.test_function = None

    def set_schedule(
        self, function: Any, schedule: keras.optimizers.schedules.LearningRateSchedule
    ) -> None:
        """Set the learning rate schedule from now on.

        Args:
            function: Object that the user passed, which identifies the schedule.
            schedule: Schedule made of it.
        """
        if function is not self._schedule:
            self._schedule = function
            self.optimizer.learning_rate = schedule
            self.train_function = None

    @property
    def task(self) -> _Task:
        """Return the current task; `set_loss` must have set it."""
        assert self._task is not None
        return self._task

    @property
    def metrics(self) -> list:
        """See `keras.Model`."""
        return list(self._task.means.values()) if self._task is not None else []

    def train_step(self, batch):
        """See `keras.Model`."""
        gradients, logs = train_step(self.task.loss, self.task.state, batch)
        update(self.task.state, gradients)
        return self._count(logs, batch)

    def test_step(self, batch):
        """See `keras.Model`."""
        value, metrics = value_of(self.task.loss, self.task.state.model, batch, training=False)
        return self._count({"loss": value, **metrics}, batch)

    def _count(self, logs: dict[str, tf.Tensor], batch: Any) -> dict[str, Any]:
        means = self.task.means
        if set(logs) != set(means):
            raise ValueError(
                "loss: expected the same metrics in each call, in training and validation: "
                f"{', '.join(means)}; received {', '.join(logs)}."
            )
        rows = tf.cast(count_rows(batch), tf.float32)
        for name, value in logs.items():
            means[name].update_state(tf.cast(value, tf.float32), sample_weight=rows)
        return {name: mean.result() for name, mean in means.items()}

    def save(self, *args, **kwargs):
        """See `keras.Model`; saves the user's model."""
        return self._single_model("save").save(*args, **kwargs)

    def save_weights(self, *args, **kwargs):
        """See `keras.Model`; saves the weights of the user's model."""
        return self._single_model("save_weights").save_weights(*args, **kwargs)

    def _single_model(self, method: str) -> Any:
        if not hasattr(self.inner, method):
            raise ValueError(
                f"{method}: expected one model, received {type(self.inner).__name__}. Call "
                f"{method} on each model, or use tfdist.BackupAndRestore."
            )
        if self._task is not None:
            self._task.state.gather()
        return self.inner


def _metric_names(state: State, loss: Callable, data: tf.data.Dataset, training: bool) -> list[str]:
    """Return the names of a loss function's metrics, by a call that changes no variable.

    The call uses shapes alone, or the first batch where steps run eagerly.
    """
    names: list[str] = []

    def on_replica(batch):
        with keras.StatelessScope():
            names[:] = value_of(loss, state.model, batch, training)[1]

    def on_all(batch):
        state.strategy.run(on_replica, args=(batch,))

    if state.compiled:
        tf.function(on_all, autograph=False).get_concrete_function(
            tf.nest.map_structure(_any_rows, symbolic(data.element_spec))
        )
    else:
        # `of_epoch` reads without advancing a data pipeline that keeps its position.
        first = data.of_epoch(0) if hasattr(data, "of_epoch") else data
        # The loss may wait for collectives with other workers.
        with engine_of(state.strategy).watchdog.bound():
            on_all(without_optionals(next(iter(first.take(1)))))
    return names


def _any_rows(spec: Any) -> Any:
    """Return the spec for any number of rows, as a replica may get."""
    return (
        tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank
        else spec
    )
