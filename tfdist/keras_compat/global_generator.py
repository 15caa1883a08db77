"""Keras' global generator of random numbers, shared by the replicas of a process.

`keras.random` without a seed draws from a generator that Keras makes for each thread, in no model's
variables (keras' `draw_seed`). TensorFlow runs each replica in a thread of its own, in which the
generator would be made anew, in the graph of a step. Here, replicas draw from the generator of the
thread that started them. Each shifts what it draws, so that no two draw the same numbers, and all
leave the generator in the same state.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state as _global_state
from keras.src.random import seed_generator as _seed_generator

# Distance between the seeds of adjacent replicas: any odd constant beyond the usual small seeds.
SEED_STRIDE = 104_729

# Methods of a model that a step calls, and that are not called before it.
_STEPS = ("train_step", "test_step", "predict_step", "compute_loss")

_GLOBAL = "global_seed_generator"  # name of the generator in Keras' state of a thread
_NAME = "tfdist_generator"  # attribute of a strategy: the generator that its replicas share


class _OfReplica:
    """Generator as one replica sees it."""

    def __init__(self, generator: keras.random.SeedGenerator, replica: Any):
        self._generator = generator
        self._replica = replica

    def next(self, ordered: bool = True) -> tf.Tensor:
        """See `keras.random.SeedGenerator.next`."""
        seed = self._generator.next(ordered)
        shift = tf.cast(tf.stack([self._replica, 0]), seed.dtype) * SEED_STRIDE
        return seed + shift


def install(has_engine: Callable[[tf.distribute.Strategy], bool]) -> None:
    """Let replicas of strategies share the generator.

    Args:
        has_engine: Function that returns whether a strategy is tfdist's.
    """
    original = _seed_generator.global_seed_generator

    def global_seed_generator():
        strategy = tf.distribute.get_strategy()
        if not has_engine(strategy):
            return original()
        if tf.distribute.in_cross_replica_context():
            generator = original()
            setattr(strategy, _NAME, generator)
            return generator
        generator = getattr(strategy, _NAME, None)
        if generator is None:
            raise ValueError(
                "keras.random: expected a seed in what is called first in a step, as Keras' global "
                "generator cannot be made there. Make a keras.random.SeedGenerator in the scope of "
                "the strategy, and pass it as seed=. Or call keras.random.normal([1]) before."
            )
        return _OfReplica(generator, tf.distribute.get_replica_context().replica_id_in_sync_group)

    _seed_generator.global_seed_generator = global_seed_generator


def share(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Make the replicas of a strategy share this thread's generator, if there is one.

    It is made if the model has a step of its own, which may draw from it, and made again if Keras
    has dropped it. A generator that was made
    outside of the strategy's scope is replaced by one in it, with the same state. All processes of
    the strategy must call this.
    """
    generator = current()
    if generator is None:
        # Keras drops it in `set_random_seed` and `clear_session`.
        had = getattr(strategy, _NAME, None) is not None
        if had or any(
            getattr(type(model), name) is not getattr(keras.Model, name) for name in _STEPS
        ):
            before = random.getstate()  # the step may not draw
            with strategy.scope():
                _seed_generator.global_seed_generator()
            random.setstate(before)
        return
    if not strategy.extended.variable_created_in_scope(generator.state.value):
        state = generator.state.numpy()
        with strategy.scope():
            generator = keras.random.SeedGenerator(0, name=generator.name)
        generator.state.assign(state)
        _global_state.set_global_attribute(_GLOBAL, generator)
    setattr(strategy, _NAME, generator)


def current() -> keras.random.SeedGenerator | None:
    """Return this thread's generator, if Keras has made one."""
    return _global_state.get_global_attribute(_GLOBAL)


def state_of(strategy: tf.distribute.Strategy) -> list[keras.Variable]:
    """Return the state of the generator that a strategy, or this thread, draws from, if any."""
    generator = getattr(strategy, _NAME, None) or current()
    return [] if generator is None else [generator.state]


def restore(state: Any) -> None:
    """Give this thread's generator a state, int `[2]`; make the generator if there is none."""
    _seed_generator.global_seed_generator().state.assign(state)
