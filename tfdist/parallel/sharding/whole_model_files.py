"""Saving of sharded models in the format of unsharded models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import leave_scope, replaced_values
from tfdist.keras_compat.parallel import Sharded, replaced_shards, saved_with


def sharded_variables(model: keras.Model) -> list[Sharded]:
    """Return the sharded weights and optimizer state, in the same order in all processes.

    Args:
        model: Any model.
    """
    optimizer = getattr(model, "optimizer", None)
    variables = (*model.weights, *(optimizer.variables if optimizer is not None else ()))
    return list({id(v): v for v in variables if isinstance(v, Sharded)}.values())


@contextlib.contextmanager
def as_plain(
    model: keras.Model, workers: int, writes: bool, exports: bool = False
) -> Iterator[None]:
    """Make a model and its optimizer look unsharded in this context.

    All processes must call this. With several workers, the worker that writes holds all whole
    values in host memory meanwhile, including the optimizer's. An exported function needs variables
    of weights, and no optimizer.

    Args:
        model: Any model.
        workers: Number of workers. A single worker reads the parts of its replicas only when it
            writes them.
        writes: Flag that says that this worker writes the file.
        exports: Whether `export` writes it.
    """
    if exports:
        variables = [v for v in model.weights if isinstance(v, Sharded)]
    else:
        variables = sharded_variables(model) if workers > 1 else []
    values = {}
    for v in variables:
        whole = v.tfdist_store.whole(v)
        if writes:
            with leave_scope(), tf.device("CPU:0"):
                values[id(v)] = (
                    tf.Variable(whole, trainable=v.trainable, name=v.name)
                    if exports
                    else tf.identity(whole)
                )
    exported = [v for v in variables if exports and writes]
    with (
        replaced_shards(values),
        replaced_values(exported, [values[id(v)] for v in exported]),
        without_zero(model),
    ):
        yield


def without_zero(model: keras.Model) -> contextlib.AbstractContextManager[Any]:
    """Replace a model's `Zero` by the optimizer that it shards in this context."""
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
