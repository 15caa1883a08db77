"""A model in parts is written as one that was never sharded; how a file looks is Keras' matter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat.parallel import Sharded, giving, saved_with


def sharded_variables(model: keras.Model) -> list[Sharded]:
    """Weights and optimizer state of which each replica holds a part, in an order that all processes have.

    Args:
        model: Any.
    """
    optimizer = getattr(model, "optimizer", None)
    known = (*model.weights, *(optimizer.variables if optimizer is not None else ()))
    return list({id(v): v for v in known if isinstance(v, Sharded)}.values())


def check_export(model: keras.Model) -> None:
    """Makes sure that a model's weights are whole.

    Args:
        model: Any.

    Raises:
        ValueError: They are sharded.
    """
    if any(isinstance(v, Sharded) for v in model.trainable_weights):
        raise ValueError(
            "export: the model's weights are sharded. Save it by model.save(), and export what keras.models.load_model() makes of the file."
        )


@contextlib.contextmanager
def as_plain(model: keras.Model, workers: int, writes: bool) -> Iterator[None]:
    """Inside, a model looks as if neither it nor its optimizer were sharded. All processes call this.

    One of several that writes has all whole values in its memory meanwhile, those of the optimizer too.

    Args:
        model: Any.
        workers: Number of processes; one reads its replicas' parts when it writes them.
        writes: Whether this one writes.
    """
    values = {}
    for v in sharded_variables(model) if workers > 1 else ():
        whole = v.tfdist_store.whole(v)
        if writes:
            with tf.device("CPU:0"):
                values[id(v)] = tf.identity(whole)
    with giving(values), _without_zero(model):
        yield


def _without_zero(model: keras.Model) -> contextlib.AbstractContextManager[Any]:
    """Inside, a model has the optimizer that its `Zero` shards."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and hasattr(optimizer, "tfdist_kind"):
        return saved_with(model, optimizer.inner_optimizer)
    if hasattr(getattr(optimizer, "inner_optimizer", None), "tfdist_kind"):
        return _inner_replaced(optimizer)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _inner_replaced(outer: Any) -> Iterator[None]:
    zero = outer.inner_optimizer
    outer.inner_optimizer = zero.inner_optimizer
    try:
        yield
    finally:
        outer.inner_optimizer = zero
