"""Common base of tfdist's synchronous strategies, which train by tfdist's engine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist import keras_compat
from tfdist.data.autotune import untuned
from tfdist.keras_compat import scopes
from tfdist.keras_compat.python_arrays import runs_python
from tfdist.parallel.placement import Placement
from tfdist.sync import Policy
from tfdist.train.synchronous.engine import Engine
from tfdist.train.synchronous.feed import with_copied_rows

# Scopes that are entered now.
_entered: list[KeptScope] = []


class KeptScope(contextlib.AbstractContextManager):
    """Scope of a strategy that stays entered until its `__exit__`, also if nobody keeps it.

    TensorFlow's own scope, in `strategy.scope().__enter__()`, is left by half when its object is
    collected: the strategy stays the current one, but it no longer makes the variables.

    Args:
        scope: TensorFlow's own scope.
    """

    def __init__(self, scope: contextlib.AbstractContextManager):
        self._scope = scope

    def __enter__(self) -> Any:
        strategy = self._scope.__enter__()
        scopes.enter(strategy)
        _entered.append(self)
        return strategy

    def __exit__(self, *error: Any) -> None:
        if self in _entered:
            _entered.remove(self)
        self._scope.__exit__(*error)


class ThreadScope(threading.local):
    """Scope that a thread stays in until it changes it, without a `with` block.

    Args:
        owner: Name of the function that enters it, for errors.
    """

    def __init__(self, owner: str):
        self._owner = owner
        self._strategy: tf.distribute.Strategy | None = None
        self._scope: Any = None

    def current(self) -> tf.distribute.Strategy | None:
        """Return the strategy whose scope this thread has entered here and not left."""
        # TensorFlow's `reset_default_graph` ends all scopes.
        return self._strategy if self._strategy is tf.distribute.get_strategy() else None

    def change(self, strategy: tf.distribute.Strategy | None) -> None:
        """Leave the scope that this thread is in, and enter that of a strategy, unless it is None.

        Raises:
            ValueError: If this thread is in a scope that it has entered in another way.
        """
        if (former := self.current()) is not None:
            if former is strategy:
                return
            self._scope.__exit__(None, None, None)
        self._strategy = self._scope = None
        if tf.distribute.has_strategy():
            raise ValueError(
                f"{self._owner}: expected to be outside of all scopes of strategies, received a "
                f"call in that of a {type(tf.distribute.get_strategy()).__name__}. End the `with` "
                "block, or leave out one of the two."
            )
        if strategy is not None:
            scope = strategy.scope()
            scope.__enter__()
            self._strategy, self._scope = strategy, scope

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Leave the scope within the context; see `change` for errors."""
        former = self.current()
        self.change(None)
        try:
            yield
        finally:
            self.change(former)


class KerasFeedMixin(tf.distribute.Strategy if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixin for synchronous `tf.distribute` strategies: gives Keras the engine's batches.

    Put it before the TensorFlow strategy in the list of base classes.
    """

    tfdist_engine: Engine

    def experimental_distribute_dataset(self, dataset, options=None):
        """See `tf.distribute.Strategy`; Keras' methods get tfdist's own input batches.

        These methods are `fit`, `evaluate` and `predict`. If the auto-shard policy of the data set
        is OFF or FILE, TensorFlow distributes it, as you have chosen.
        """
        if self.tfdist_engine.feeding and by_rows(dataset):
            return self.tfdist_engine.feed(dataset)
        return super().experimental_distribute_dataset(
            untuned(with_copied_rows(dataset) if runs_python(dataset) else dataset), options
        )

    def distribute_datasets_from_function(self, dataset_fn, options=None):
        """See `tf.distribute.Strategy`; the data sets have no autotuner, as in Keras' methods."""
        return super().distribute_datasets_from_function(
            lambda context: untuned(dataset_fn(context)), options
        )

    def run(self, fn, args=(), kwargs=None, options=None):
        """See `tf.distribute.Strategy`; XLA compiles a function of CPUs for each replica.

        TensorFlow would compile one function of all replicas, whose variables XLA does not find.
        """
        if (
            isinstance(fn, tf.types.experimental.PolymorphicFunction)
            and keras_compat.is_compiled_by_xla(fn)
            and keras_compat.device_type(self) == "CPU"
        ):
            return super().run(lambda *args, **kwargs: fn(*args, **kwargs), args, kwargs, options)
        return super().run(fn, args, kwargs, options)

    def scope(self) -> Any:
        """See `tf.distribute.Strategy`; the scope is entered until its end, see `KeptScope`."""
        return KeptScope(super().scope())


def by_rows(dataset: tf.data.Dataset) -> bool:
    """Return whether a data set's batches may be split by rows, which is its options' default."""
    policies = tf.data.experimental.AutoShardPolicy
    return dataset.options().experimental_distribute.auto_shard_policy in (
        policies.AUTO,
        policies.DATA,
    )


def check_timeouts(timeout: float, start_timeout: float) -> None:
    """Raise ValueError unless both timeouts are positive numbers of seconds."""
    for name, seconds in (("timeout", timeout), ("start_timeout", start_timeout)):
        if not seconds > 0:
            raise ValueError(
                f"{name}: expected seconds above 0, received {seconds!r}; pass float('inf') to "
                "wait forever."
            )


def attach_engine(
    strategy: tf.distribute.Strategy,
    placement: Placement,
    central: bool = False,
    timeout: float = 600.0,
    sync: Policy | None = None,
    communication: str = "auto",
) -> tf.distribute.Strategy:
    """Install the Keras hooks, attach an engine to the strategy, and return the strategy."""
    keras_compat.install()
    keras_compat.allow_local_updates(strategy)
    if central:
        keras_compat.keep_state_per_replica(strategy)
    device = tf.DeviceSpec.from_string(strategy.extended.worker_devices[0])
    Engine(
        strategy,
        placement,
        device.replace(device_type="CPU", device_index=0).to_string(),
        central,
        timeout,
        sync,
        communication,
    )
    if placement.replicas > 1:
        scopes.watch(strategy, placement.workers)
    return strategy
