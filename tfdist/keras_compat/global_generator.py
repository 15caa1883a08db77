"""Keras' global generator of random numbers, shared by the replicas of a process.

`keras.random` without a seed draws from a generator that Keras makes for each thread, in no model's
variables (keras' `draw_seed`). TensorFlow runs each replica in a thread of its own, in which the
generator would be made anew, in the graph of a step. Here, replicas draw from the generator of the
thread that started them. Each shifts what it draws, so that no two draw the same numbers, and all
leave the generator in the same state.
"""

from __future__ import annotations

import random
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state as _global_state
from keras.src.random import seed_generator as _seed_generator

from tfdist.keras_compat.scopes import leave_scope

# Distance between the seeds of adjacent replicas: any odd constant beyond the usual small seeds.
SEED_STRIDE = 104_729

# Methods of a model that a step calls, and that are not called before it.
_STEPS = ("train_step", "test_step", "predict_step", "compute_loss")

_GLOBAL = "global_seed_generator"  # name of the generator in Keras' state of a thread
_SOURCE = "tfdist_source"  # attribute of a copy: the generator that it is a copy of
_NAME = "tfdist_generator"  # attribute of a strategy: the generator that its replicas share


class _ReplicaGenerator:
    """Generator whose numbers are shifted for one replica."""

    def __init__(self, generator: keras.random.SeedGenerator, replica: Any):
        self._generator = generator
        self._replica = replica

    def next(self, ordered: bool = True) -> tf.Tensor:
        """See `keras.random.SeedGenerator.next`."""
        seed = self._generator.next(ordered)
        shift = tf.cast(tf.stack([self._replica, 0]), seed.dtype) * SEED_STRIDE
        return seed + shift


def install() -> None:
    """Let replicas of tfdist's strategies share the generator."""
    original = _seed_generator.global_seed_generator

    def global_seed_generator():
        strategy = tf.distribute.get_strategy()
        if not hasattr(strategy, "tfdist_engine"):
            return original()
        if tf.distribute.in_cross_replica_context():
            is_new = _of_thread() is None
            generator = original()
            if is_new:  # in the scope
                setattr(strategy, _NAME, generator)
            elif getattr(strategy, _NAME, None) is None and tf.executing_eagerly():
                _adopt(strategy, generator)
            shared = getattr(strategy, _NAME, None)
            return shared if getattr(shared, _SOURCE, None) is generator else generator
        generator = getattr(strategy, _NAME, None)
        if generator is None:
            raise ValueError(
                "keras.random: expected a seed in what is called first in a step, as Keras' global "
                "generator cannot be made there. Make a keras.random.SeedGenerator in the scope of "
                "the strategy, and pass it as seed=. Or call keras.random.normal([1]) before."
            )
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return _ReplicaGenerator(generator, replica)

    _seed_generator.global_seed_generator = global_seed_generator


def share(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Make the replicas of a strategy share this thread's generator, if there is one.

    It is made if the model has a step of its own, which may draw from it, and made again if Keras
    has dropped it. Of a generator that was made outside of the strategy's scope, the replicas share
    a copy, which goes with the strategy. All processes of the strategy must call this.
    """
    generator = _of_thread()
    shared = getattr(strategy, _NAME, None)
    # Keras drops it in `set_random_seed` and `clear_session`.
    if generator is None and (
        shared is not None
        or any(getattr(type(model), name) is not getattr(keras.Model, name) for name in _STEPS)
    ):
        before = random.getstate()  # the step may not draw
        with leave_scope():
            generator = _seed_generator.global_seed_generator()
        random.setstate(before)
    if generator is not None:
        _adopt(strategy, generator)


def _adopt(strategy: tf.distribute.Strategy, generator: keras.random.SeedGenerator) -> None:
    """Let the replicas of a strategy share a generator, or a copy in the strategy's scope."""
    shared = getattr(strategy, _NAME, None)
    if strategy.extended.variable_created_in_scope(generator.state.value):
        setattr(strategy, _NAME, generator)
    elif getattr(shared, _SOURCE, None) is not generator:
        with leave_scope():  # it may belong to another strategy
            state = generator.state.numpy()
        with strategy.scope():
            copy = keras.random.SeedGenerator(0, name=generator.name)
        copy.state.assign(state)
        setattr(copy, _SOURCE, generator)
        setattr(strategy, _NAME, copy)


def current() -> keras.random.SeedGenerator | None:
    """Return the generator that the current strategy shares, or else this thread's, if any."""
    return getattr(tf.distribute.get_strategy(), _NAME, None) or _of_thread()


def _of_thread() -> keras.random.SeedGenerator | None:
    return _global_state.get_global_attribute(_GLOBAL)


def state_of(strategy: tf.distribute.Strategy) -> list[keras.Variable]:
    """Return the state of the generator that a strategy, or this thread, draws from, if any."""
    generator = getattr(strategy, _NAME, None) or _of_thread()
    return [] if generator is None else [generator.state]


def restore(state: Any) -> None:
    """Give the current generator a state, int `[2]`; make the generator if there is none."""
    generator = current() or _seed_generator.global_seed_generator()
    generator.state.assign(state)
