"""Saving of sharded models in the format of unsharded models."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat.parallel import Sharded, replaced_shards, saved_with


def sharded_variables(model: keras.Model) -> list[Sharded]:
    """Return the sharded weights and optimizer state, in the same order in all processes.

    Args:
        model: Any model.
    """
    optimizer = getattr(model, "optimizer", None)
    variables = (*model.weights, *(optimizer.variables if optimizer is not None else ()))
    return list({id(v): v for v in variables if isinstance(v, Sharded)}.values())


def exporting_whole(keras_export: Callable) -> Callable:
    """Wrap `Model.export`: of a model with sharded weights, it exports a plain copy.

    An exported function cannot gather weights from other replicas. The copy comes from a temporary
    file, is in the memory of the host, and has no optimizer.

    Args:
        keras_export: Keras' method, called with (model, filepath, ...) in a context `as_plain`.
    """

    @functools.wraps(keras_export)
    def export(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(v, Sharded) for v in model.weights):
            return keras_export(model, *args, **kwargs)
        drawn = random.getstate()  # of which Keras takes seeds; the other workers draw none here
        try:
            with tempfile.TemporaryDirectory(prefix="tfdist-export-") as directory:
                path = os.path.join(directory, "model.keras")
                keras.saving.save_model(model, path)
                with tf.device("CPU:0"):
                    whole = keras.saving.load_model(path, compile=False, safe_mode=False)
        finally:
            random.setstate(drawn)
        return keras_export(whole, *args, **kwargs)

    return export


@contextlib.contextmanager
def as_plain(model: keras.Model, workers: int, writes: bool) -> Iterator[None]:
    """Make a model and its optimizer look unsharded in this context.

    All processes must call this. With several workers, the worker that writes holds all whole
    values in host memory meanwhile, including the optimizer's.

    Args:
        model: Any model.
        workers: Number of workers. A single worker reads the parts of its replicas only when it
            writes them.
        writes: Flag that says that this worker writes the file.
    """
    values = {}
    for v in sharded_variables(model) if workers > 1 else ():
        whole = v.tfdist_store.whole(v)
        if writes:
            with tf.device("CPU:0"):
                values[id(v)] = tf.identity(whole)
    with replaced_shards(values), _without_zero(model):
        yield


def _without_zero(model: keras.Model) -> contextlib.AbstractContextManager[Any]:
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
