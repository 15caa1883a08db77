"""Training state: model, optimizer, data and strategy, and steps as functions of a batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import engine_of, global_generator
from tfdist.loops.learner import Learner
from tfdist.parallel.placement import Placement
from tfdist.parallel.replica_weight import gradient_factor, weighted
from tfdist.train.synchronous.engine import Engine
from tfdist.train.synchronous.feed import Batch, Feed, any_rows
from tfdist.train.synchronous.gathered_losses import mark_own_rows
from tfdist.train.synchronous.replica_state import ReplicaState
from tfdist.train.synchronous.replica_step import run_replica

RETURNS = "a scalar or a nest of scalars, each a mean over the function's rows, or None"


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """Model, optimizer, data and strategy of a training; see `tfdist.loops.prepare_training`.

    Attributes:
        strategy: Strategy that runs the training.
        model: Model, or dict or list of models, with a copy of the variables on each replica.
        optimizer: Optimizer of the model's trainable variables.
        data: Data set of global batches.
        compiled: Whether steps run as graphs.
        learner: Keras model that wraps `model` for `fit` and `evaluate`.
    """

    strategy: tf.distribute.Strategy
    model: Any
    optimizer: keras.optimizers.Optimizer
    data: tf.data.Dataset
    compiled: bool
    learner: Learner = dataclasses.field(repr=False)

    @property
    def variables(self) -> list[keras.Variable]:
        """Return the trainable variables, in the order of the gradients."""
        return self.learner.trainable_variables

    @property
    def replicas(self) -> int:
        """Return the number of copies of the model in all processes."""
        return self._placement.replicas

    @property
    def is_chief(self) -> bool:
        """Return whether this process prints and writes files."""
        return self._placement.is_chief

    # --- Custom training loops --------------------------------------------------------------------
    @property
    def batches(self) -> Iterable[Batch]:
        """Return this process' rows of each global batch; one iteration is one pass."""
        return self._feed

    def step(self, body: Callable[[Any], Any]) -> Callable[[Batch], Any]:
        """Turn a function of one replica's rows into a step on all replicas.

        The step is traced into one graph for batches of any number of rows. It runs eagerly if the
        state is not `compiled`. If you set variables yourself between two steps, create the step
        again.

        Args:
            body: Function of one replica's rows. It returns a scalar, or a nest of scalars, each a
                mean over these rows; or None.

        Returns:
            A function of a batch of `batches`, which all processes must call. It returns these
            values as means over the rows of the global batch, all-reduced in each step.

        Example:
            >>> import keras, numpy as np, tfdist
            >>> from tfdist import loops
            >>> x, y = np.ones([8, 2], "float32"), np.zeros([8, 1], "float32")
            >>> state = loops.prepare_training(
            ...     lambda: keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]),
            ...     (x, y), "cpu", "sgd", global_batch=4)
            >>> def loss(model, x, y):
            ...     return keras.ops.mean((model(x) - y) ** 2)
            >>> @state.step
            ... def step(batch):
            ...     gradients, logs = loops.train_step(loss, state, batch)
            ...     loops.update(state, gradients)
            ...     return logs
            >>> losses = [float(step(batch)["loss"]) for batch in state.batches]
            >>> len(losses), losses[1] < losses[0]
            (2, True)
        """
        steps = _Steps(self, body)
        return functools.wraps(body)(lambda batch: steps(batch))

    def sync_replicas(self) -> None:
        """Synchronize the replicas' state: moving statistics, and weights after local steps.

        Call it in all processes after steps of your own loop, before the state is read or written.
        `train` and `evaluate` call it themselves.
        """
        self._replica_state.sync_replicas()

    def gather(self) -> None:
        """Synchronize the replicas if they have taken local steps since the last time.

        Otherwise this needs no communication with other processes. See `ReplicaState.gather`.
        """
        self._replica_state.gather()

    # --- Internals of tfdist.loops ----------------------------------------------------------------
    @property
    def _engine(self) -> Engine:
        return engine_of(self.strategy)

    @property
    def _placement(self) -> Placement:
        return self._engine.placement

    @functools.cached_property
    def _feed(self) -> Feed:
        return Feed(self.data, self._placement, self._engine.host)

    @functools.cached_property
    def _replica_state(self) -> ReplicaState:
        return ReplicaState(self.strategy, self._placement, self.learner)


class _Steps:
    """Callable that runs a step on all replicas; see `State.step`."""

    def __init__(self, state: State, body: Callable[[Any], Any]):
        self._state = state
        self._body = body
        self._engine = state._engine
        self._function: Any = None
        self._nest: Any = None  # structure of the body's result

    def __call__(self, batch: Batch) -> Any:
        if not isinstance(batch, Batch):
            raise ValueError(
                f"step: expected a batch from state.batches, received {type(batch).__name__}. "
                "Iterate over state.batches."
            )
        if self._function is None:
            global_generator.share(self._state.strategy, self._state.learner)
            self._engine.prepare(self._state.learner)
        with self._engine.watchdog.bound():
            self._engine.aggregation.begin(self._state.optimizer, restart=self._function is None)
        if self._function is None:
            function = tf.function(self._on_all_replicas, autograph=False)
            self._function = (
                function.get_concrete_function(any_rows(batch))
                if self._state.compiled
                else self._on_all_replicas
            )
        with self._engine.watchdog.bound():
            means = self._function(batch)
        return (
            None if self._nest is None else tf.nest.pack_sequence_as(self._nest, tf.unstack(means))
        )

    def _on_all_replicas(self, batch: Batch):
        return self._state.strategy.experimental_local_results(
            self._state.strategy.run(self._on_replica, args=(batch,))
        )[0]

    def _on_replica(self, batch: Batch):
        engine = self._engine
        state = self._state
        return run_replica(
            self._mean, state.learner, batch, engine.placement, engine.host, state._feed.even
        )

    def _mean(self, rows):
        """Return the means over the global batch of the body's results for one replica's rows."""
        if not self._engine.trains_locally(self._state.learner):
            mark_own_rows(rows)
        results = self._body(rows)
        values = (
            [] if results is None else [tf.convert_to_tensor(x) for x in tf.nest.flatten(results)]
        )
        if any(x.shape.rank != 0 for x in values):
            raise ValueError(
                f"step: expected the function to return {RETURNS}; received the shapes "
                f"{[tuple(x.shape) for x in values]}."
            )
        self._nest = None if results is None else tf.nest.map_structure(lambda _: 0, results)
        if not values:
            return tf.zeros([0])
        stacked = tf.stack([tf.cast(x, tf.float32) for x in values])
        if self._state.replicas == 1:
            return stacked
        parts = weighted([stacked], gradient_factor("mean", self._state.replicas))
        return tf.distribute.get_replica_context().all_reduce("SUM", parts[0])
