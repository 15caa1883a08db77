"""A training, whose steps are functions of batches; what one replica does in a step is written elsewhere."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import engine_of
from tfdist.loops.learner import Learner
from tfdist.parallel.placement import Placement
from tfdist.train.synchronous.engine import Engine
from tfdist.train.synchronous.feed import Batch, Feed, any_rows
from tfdist.train.synchronous.replica_state import ReplicaState
from tfdist.train.synchronous.replica_step import own_weight, run_replica

RETURNS = "a scalar, or a nest of scalars, each a mean over the rows that it was given; or None"


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """What a training consists of; see `tfdist.loops.prepare_training`.

    Attributes:
        strategy: Where it runs.
        model: The model, or the models, as given, with a copy of the variables on each replica.
        optimizer: Updates them.
        data: Global batches.
        compiled: Whether steps run as graphs.
    """

    strategy: tf.distribute.Strategy
    model: Any
    optimizer: keras.optimizers.Optimizer
    data: tf.data.Dataset
    compiled: bool
    learner: Learner = dataclasses.field(repr=False)

    @property
    def variables(self) -> list[keras.Variable]:
        """What is trained, in the order of gradients."""
        return self.learner.trainable_variables

    @property
    def replicas(self) -> int:
        """Copies of the model, in all processes."""
        return self._placement.replicas

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self._placement.is_chief

    # --- A loop of one's own --------------------------------------------------------------------------------------------
    @property
    def batches(self) -> Iterable[Batch]:
        """This process' rows of each global batch; each walk over it is one pass over the data."""
        return self._feed

    def step(self, body: Callable[[Any], Any]) -> Callable[[Batch], Any]:
        """Makes a function of one replica's rows one of a batch of `batches`: it runs on each replica.

        It becomes a graph, one for batches of any number of rows, or stays Python where the state is not `compiled`. After setting variables between two steps
        yourself, make it anew.

        Args:
            body: What a replica does with its rows. It returns a scalar, or a nest of scalars, each a mean over these rows; or None.

        Returns:
            Called with a batch, by all processes; returns these as means over the rows of the global batch, summed over the replicas in each step.

        Example:
            >>> import keras, numpy as np, tfdist
            >>> from tfdist import loops
            >>> x, y = np.ones([8, 2], "float32"), np.zeros([8, 1], "float32")
            >>> state = loops.prepare_training(lambda: keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]), (x, y), "cpu", "sgd", global_batch=4)
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
        """Gives all replicas one state before somebody looks at it: moving statistics, and weights where each replica trains by itself for some steps.

        Called by all processes, after steps of one's own; `train` and `evaluate` do it by themselves.
        """
        self._replica_state.sync_replicas()

    def gather(self) -> None:
        """As `meet`, where each replica has trained by itself since; else it asks nothing of other processes."""
        self._replica_state.gather()

    # --- What this directory asks ----------------------------------------------------------------------------------------
    @property
    def _engine(self) -> Engine:
        return engine_of(self.strategy)

    @property
    def _placement(self) -> Placement:
        return self._engine.placement

    @functools.cached_property
    def _feed(self) -> Feed:
        return Feed(self.data, self._placement, self._engine.host, symbolic_first=False)

    @functools.cached_property
    def _replica_state(self) -> ReplicaState:
        return ReplicaState(self.strategy, self._placement, self.learner)


class _Steps:
    """See `State.step`."""

    def __init__(self, state: State, body: Callable[[Any], Any]):
        self._state, self._body, self._engine = state, body, state._engine
        self._function: Any = None
        self._nest: Any = None  # what the body returns, with numbers for tensors

    def __call__(self, batch: Batch) -> Any:
        if not isinstance(batch, Batch):
            raise ValueError(
                f"step: expected a batch of state.batches, received {type(batch).__name__}. Iterate over state.batches."
            )
        if self._function is None:
            self._engine.prepare(self._state.learner)
        with self._engine.watchdog.bound():
            self._engine.aggregation.begin(self._state.optimizer, anew=self._function is None)
        if self._function is None:
            function = tf.function(self._on_all, autograph=False)
            self._function = (
                function.get_concrete_function(any_rows(batch))
                if self._state.compiled
                else self._on_all
            )
        with self._engine.watchdog.bound():
            means = self._function(batch)
        return (
            None if self._nest is None else tf.nest.pack_sequence_as(self._nest, tf.unstack(means))
        )

    def _on_all(self, batch: Batch):
        return self._state.strategy.experimental_local_results(
            self._state.strategy.run(self._on_replica, args=(batch,))
        )[0]

    def _on_replica(self, batch: Batch):
        engine, state = self._engine, self._state
        return run_replica(
            self._mean, state.learner, batch, engine.placement, engine.host, state._feed.even
        )

    def _mean(self, rows):
        """The means over the global batch of what the body gives for one replica's rows."""
        results = self._body(rows)
        values = (
            [] if results is None else [tf.convert_to_tensor(x) for x in tf.nest.flatten(results)]
        )
        if any(x.shape.rank != 0 for x in values):
            raise ValueError(
                f"step: expected that the function returns {RETURNS}; received the shapes {[tuple(x.shape) for x in values]}."
            )
        self._nest = None if results is None else tf.nest.map_structure(lambda _: 0, results)
        if not values:
            return tf.zeros([0])
        # A replica without rows has no mean.
        part = tf.math.multiply_no_nan(
            tf.stack([tf.cast(x, tf.float32) for x in values]),
            tf.cast(own_weight(self._state.replicas), tf.float32),
        )
        return (
            part
            if self._state.replicas == 1
            else tf.distribute.get_replica_context().all_reduce("SUM", part)
        )
