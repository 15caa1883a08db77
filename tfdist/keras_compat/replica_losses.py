"""Losses of layers: each of several replicas in a process has its own.

A layer keeps what `add_loss` and activity regularizers add until its model is called again. The
replicas of a process share the layers. They run in threads that take turns where replicas meet in a
collective, and the next replica would replace the losses that this one has not read yet. Keras has
no public name for the list of losses, and clears it in a private method.
"""

from __future__ import annotations

import threading
from typing import Any

import keras
import tensorflow as tf

_NAME = "_losses"


class _Thread(threading.local):
    """Losses of this thread by the id of their layer; the layer is kept, and so is its id."""

    def __init__(self) -> None:
        self.losses: dict[int, tuple[Any, list]] = {}


_thread = _Thread()


class _Losses:
    """Attribute of layers, whose value is a replica's own in replica context."""

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self
        if _is_one_of_several():
            return _thread.losses.setdefault(id(layer), (layer, []))[1]
        try:
            return vars(layer)[_NAME]
        except KeyError:
            raise AttributeError(f"{type(layer).__name__} has no attribute {_NAME}") from None

    def __set__(self, layer: Any, value: list) -> None:
        if not _is_one_of_several():
            vars(layer)[_NAME] = value
            return
        _thread.losses[id(layer)] = layer, value
        vars(layer).setdefault(_NAME, [])  # of a layer that a replica makes


def install() -> None:
    """Give each replica its own losses, under strategies of tfdist."""
    setattr(keras.layers.Layer, _NAME, _Losses())


def _is_one_of_several() -> bool:
    """Return whether this thread runs one of several replicas of this process.

    TensorFlow starts such a thread for each replica of each `strategy.run`.
    """
    strategy = tf.distribute.get_strategy()
    return (
        hasattr(strategy, "tfdist_engine")
        and not tf.distribute.in_cross_replica_context()
        and len(strategy.extended.worker_devices) > 1
    )
