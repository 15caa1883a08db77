"""A model and a loss function become a Keras model that trains by them, so that the engine's rooms serve both alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdist.data.batch_rows import count_rows
from tfdist.keras_compat import engine_of
from tfdist.loops.losses import value_of
from tfdist.loops.steps import train_step, update
from tfdist.train.synchronous.feed import symbolic, without_optionals

if TYPE_CHECKING:
    from tfdist.loops.state import State


@dataclasses.dataclass
class _Task:
    """What is learnt; in an object of its own, as Keras would track metrics in a dict as weights.

    Attributes:
        state: The training.
        loss: The user's function.
        means: Of the loss and each metric over the rows, by name.
    """

    state: State
    loss: Callable
    means: dict[str, keras.metrics.Mean]


class Learner(keras.Model):
    """Made in the scope of the strategy.

    Args:
        inner: The user's model, or a dict or list of models; built.
        optimizer: Updates their trainable variables.
        eager: Whether steps run as Python.
    """

    def __init__(self, inner: Any, optimizer: keras.optimizers.Optimizer, eager: bool):
        super().__init__(name="learner")
        self.inner = inner
        self.built = True
        self._task: _Task | None = None
        self._schedule: Any = None
        self.compile(optimizer=optimizer, loss=None, run_eagerly=eager, jit_compile=False)

    def learn(self, state: State, loss: Callable, data: tf.data.Dataset, training: bool) -> None:
        """Sets what is trained by next; graphs stay where that is as before.

        Args:
            state: The training.
            loss: The user's function.
            data: Batches that it gets first.
            training: Whether it trains on them.
        """
        if self._task is not None and self._task.loss is loss:
            return
        names = ["loss", *_metric_names(state, loss, data, training)]
        with state.strategy.scope():
            self._task = _Task(state, loss, {name: keras.metrics.Mean(name=name) for name in names})
        self.train_function = self.test_function = None

    def follow(self, given: Any, schedule: keras.optimizers.schedules.LearningRateSchedule) -> None:
        """Sets the learning rates from now on.

        Args:
            given: What names the schedule.
            schedule: It.
        """
        if given is not self._schedule:
            self._schedule, self.optimizer.learning_rate, self.train_function = (
                given,
                schedule,
                None,
            )

    @property
    def task(self) -> _Task:
        assert self._task is not None
        return self._task

    @property
    def metrics(self) -> list:
        return list(self._task.means.values()) if self._task is not None else []

    def train_step(self, batch):
        gradients, logs = train_step(self.task.loss, self.task.state, batch)
        update(self.task.state, gradients)
        return self._count(logs, batch)

    def test_step(self, batch):
        value, metrics = value_of(self.task.loss, self.task.state.model, batch, training=False)
        return self._count({"loss": value, **metrics}, batch)

    def _count(self, logs: dict[str, tf.Tensor], batch: Any) -> dict[str, Any]:
        means = self.task.means
        if set(logs) != set(means):
            raise ValueError(
                f"loss: expected the same metrics in each call, in training and validation: {', '.join(means)}; received {', '.join(logs)}."
            )
        rows = tf.cast(count_rows(batch), tf.float32)
        for name, value in logs.items():
            means[name].update_state(tf.cast(value, tf.float32), sample_weight=rows)
        return {name: mean.result() for name, mean in means.items()}

    def save(self, *args, **kwargs):
        return self._one("save").save(*args, **kwargs)

    def save_weights(self, *args, **kwargs):
        return self._one("save_weights").save_weights(*args, **kwargs)

    def _one(self, method: str) -> Any:
        if not hasattr(self.inner, method):
            raise ValueError(
                f"{method}: expected one model, received {type(self.inner).__name__}. Call {method} of each, or use tfdist.BackupAndRestore."
            )
        if self._task is not None:
            self._task.state.gather()
        return self.inner


def _metric_names(state: State, loss: Callable, data: tf.data.Dataset, training: bool) -> list[str]:
    """The names of a loss' metrics, from a call that changes no Keras variable: of shapes alone, or on the first batch where steps run as Python."""
    found: list[str] = []

    def on_replica(batch):
        with keras.StatelessScope():
            found[:] = value_of(loss, state.model, batch, training)[1]

    def on_all(batch):
        state.strategy.run(on_replica, args=(batch,))

    if state.compiled:
        tf.function(on_all, autograph=False).get_concrete_function(
            tf.nest.map_structure(_any_rows, symbolic(data.element_spec))
        )
    else:
        first = (
            data.of_epoch(0) if hasattr(data, "of_epoch") else data
        )  # of a pipeline, which then goes on as if it had not been read
        with engine_of(
            state.strategy
        ).watchdog.bound():  # the loss may exchange tensors with other workers
            on_all(without_optionals(next(iter(first.take(1)))))
    return found


def _any_rows(spec: Any) -> Any:
    """The spec of some rows: a replica's."""
    return (
        tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank
        else spec
    )
