"""Strategy scopes: finds models made outside, leaves one, keeps it in `clear_session`.

A model belongs to the strategy in whose scope it is made. A model made outside of all scopes trains
in this process alone, and TensorFlow says nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import ops as _ops

log = logging.getLogger("tfdist")


@dataclasses.dataclass(eq=False)
class _Watched:
    """Strategy of this process over several replicas or processes.

    Attributes:
        strategy: Reference to the strategy, which may be gone.
        name: Description of the strategy.
        processes: Number of processes that run the same program, this one included.
        entered: Whether its scope was ever entered.
    """

    strategy: weakref.ref
    name: str
    processes: int
    entered: bool = False


_watched: list[_Watched] = []
_warned: list[str] = []  # the models of which a warning has told; one is enough


def watch(strategy: tf.distribute.Strategy, processes: int = 1) -> None:
    """Watch whether models train outside of a strategy's scope.

    Args:
        strategy: Strategy over several replicas, or of a cluster.
        processes: Number of processes that run the same program, so that each would train a model
            outside of the scope from beginning to end. Default 1.
    """
    _forget_what_is_gone()
    _watched.append(_Watched(weakref.ref(strategy), type(strategy).__name__, processes))


def unwatch(strategy: tf.distribute.Strategy) -> None:
    """Let models train outside of a strategy's scope."""
    _watched[:] = [each for each in _watched if each.strategy() is not strategy]


def _forget_what_is_gone() -> None:
    """Forget the strategies that no longer matter.

    In one process, a strategy whose scope was entered no longer matters once it is gone. (That of
    several workers is entered when it is made, by TensorFlow's own `run`.)
    """
    _watched[:] = [
        each
        for each in _watched
        if each.processes > 1 or not each.entered or each.strategy() is not None
    ]


def enter(strategy: tf.distribute.Strategy) -> None:
    """Note that the scope of a strategy is entered."""
    for watched in _watched:
        if watched.strategy() is strategy:
            watched.entered = True


def check_training(model: keras.Model) -> None:
    """Check that a model without an engine is not left out of a strategy by mistake.

    It may train if this process has made no strategy over several replicas or processes, if it was
    made in the scope of another strategy, or if it distributes itself (`tfdist_distributed`). There
    is only a warning if the strategy is gone, and its scope was never entered.

    Raises:
        ValueError: If the model was made outside of the scope of this process's strategy.
    """
    _forget_what_is_gone()
    if (
        not _watched
        or tf.distribute.has_strategy()
        or model.distribute_strategy is not tf.distribute.get_strategy()
        or getattr(model, "tfdist_distributed", False)
    ):
        return
    remedy = (
        "Make or load the model, and call compile(), inside `with strategy.scope():`, or after "
        "tfdist.init(...) in this thread. If it is "
        'meant to train in this process alone, use `with tf.distribute.OneDeviceStrategy("/cpu:0")'
        '.scope():`, or "/gpu:0".'
    )
    processes = max(watched.processes for watched in _watched)
    if processes > 1:
        raise ValueError(
            f"expected a model made in the scope of this process's strategy, received the model "
            f"{model.name!r}, made outside of it: each of {processes} processes would train it "
            f"alone, on all examples. {remedy}"
        )
    if any(each.strategy() is not None for each in _watched):
        gc.collect()  # a strategy refers to itself
    for watched in _watched:
        if watched.strategy() is not None:
            never = "" if watched.entered else " whose scope was never entered"
            raise ValueError(
                f"expected a model made in the scope of this process's strategy, a "
                f"{watched.name}{never}, received the model {model.name!r}, made outside of it: "
                f"it would train on one device. {remedy}"
            )
    _watched[:] = [each for each in _watched if not each.entered]
    if _watched and not _warned:
        _warned.append(model.name)
        log.warning(
            "the model %r was made outside of the scope of this process's %s, and trains on one "
            "device. %s",
            model.name,
            _watched[-1].name,
            remedy,
        )


def check_weights(variables: object) -> None:
    """Check that several replicas of this process do not update the same variable.

    Called in replica context, with the list of variables of an update; anything else is not
    checked.

    Raises:
        ValueError: If a variable was made outside of the current strategy's scope.
    """
    strategy = tf.distribute.get_strategy()
    if not isinstance(variables, list | tuple) or strategy.num_replicas_in_sync == 1:
        return
    if (local_replicas := len(strategy.extended.worker_devices)) == 1:
        return
    for variable in variables:
        value = getattr(variable, "_value", None)  # `value` would read a sharded variable whole
        if isinstance(value, tf.Variable) and not strategy.extended.variable_created_in_scope(
            value
        ):
            raise ValueError(
                f"expected weights made in the scope of the {type(strategy).__name__}, received "
                f"{variable.path!r}, made outside of it: each of the "
                f"{local_replicas} replicas would update it. Make and build "
                "the model, with all of its layers, inside `with strategy.scope():`; the first "
                "call of a model builds it, too."
            )


def keep_in_clear_session() -> None:
    """Make `keras.utils.clear_session` stay in the scope of a strategy of tfdist.

    It replaces TensorFlow's default graph, where the entered scopes are kept: models made
    afterwards would not be distributed, and the end of the scope would be an IndexError. In eager
    mode that graph holds nothing else. Everything that Keras itself keeps is cleared as usual.
    `tf.compat.v1.reset_default_graph` itself cannot be replaced: TensorFlow loads that module again
    when TensorBoard is first used.
    """
    graphs = type(_ops._default_graph_stack)  # each thread has a stack of its own
    own_reset = graphs.reset

    @functools.wraps(own_reset)
    def reset(self) -> None:
        if not hasattr(tf.distribute.get_strategy(), "tfdist_engine"):
            own_reset(self)

    graphs.reset = reset


@contextlib.contextmanager
def leave_scope() -> Iterator[None]:
    """Leave the scope of the current strategy, if there is one, within the context.

    In the scope of several workers, each variable that is made, and each metric that is read, is a
    collective of all of them. Keras does both when it saves a model (it makes an optimizer to see
    its attributes: `saving_lib.get_attr_skipset`), and only the chief saves. TensorFlow has no
    public way out of a scope.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    modes = graph._distribution_strategy_stack
    creators = graph._variable_creator_stack
    graph._distribution_strategy_stack = []
    graph._variable_creator_stack = []
    try:
        with tf.device(None):
            yield
    finally:
        graph._distribution_strategy_stack = modes
        graph._variable_creator_stack = creators
