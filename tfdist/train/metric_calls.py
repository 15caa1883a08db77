"""Metric calls: observes the metrics of a step, and checks whether their states add up.

A metric's state over several replicas is the sum of their states if each update adds to the state,
whatever the state was, and adds for all rows what it would add for parts of them. That is true of
Keras' own metrics. A user's metric may keep a maximum, a running mean or a mean of each batch
instead.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_compat import is_keras_metric
from tfdist.parallel.replica_weight import weighted_step

log = logging.getLogger("tfdist")
_thread = threading.local()

_PROBE_ROWS = 3
_PART = 2  # of these rows, in the first of two parts
_STARTS = (0.0, 5.0, -3.0)  # states before an update


@contextlib.contextmanager
def observed(
    model: keras.Model,
    on_update: Callable[[keras.Metric, Callable, tuple, dict], Any],
    on_result: Callable[[keras.Metric, Any], None] = lambda metric, result: None,
) -> Iterator[None]:
    """Observe the metrics of a model in this context, which is a step of it in this thread.

    Args:
        model: The model.
        on_update: Function called in place of the `update_state` of a metric that is not Keras'
            own, with the metric, this method, and its arguments.
        on_result: Function called with each metric and what its `result()` has returned.
    """
    for metric in model.metrics:
        _wrap(metric)
        for inner in getattr(metric, "metrics", ()):  # metrics of compile()
            _wrap(inner)
    before = getattr(_thread, "observer", None)
    _thread.observer = on_update, on_result
    try:
        yield
    finally:
        _thread.observer = before


def _wrap(metric: keras.Metric) -> None:
    if hasattr(metric.result, "tfdist_observed"):
        return
    own_update = metric.update_state
    own_result = metric.result
    is_own = is_keras_metric(metric)

    @functools.wraps(own_update)
    def update_state(*args, **kwargs):
        observer = getattr(_thread, "observer", None)
        if observer is None or is_own:
            return own_update(*args, **kwargs)
        _thread.observer = None  # what the metric does itself is part of this update
        try:
            return observer[0](metric, own_update, args, kwargs)
        finally:
            _thread.observer = observer

    @functools.wraps(own_result)
    def result(*args, **kwargs):
        value = own_result(*args, **kwargs)
        observer = getattr(_thread, "observer", None)
        if observer is not None:
            observer[1](metric, value)
        return value

    result.tfdist_observed = True  # type: ignore[attr-defined]
    metric.update_state = update_state
    metric.result = result


def adds_up(metric: keras.Metric, args: tuple, kwargs: dict, by_rows: bool) -> bool:
    """Return whether a metric's states may be summed; found by updates with made-up arguments.

    A metric whose variables declare an aggregation other than "sum" is taken at its word. So is one
    that does not accept the made-up arguments, with a warning.

    Args:
        metric: The metric, built.
        args: Positional arguments of an update, tensors of which only shapes and dtypes count.
        kwargs: Keyword arguments of an update.
        by_rows: Whether the states belong to parts of the rows of a batch, and not to batches.
    """
    if not metric.variables or any(v.aggregation != "sum" for v in metric.variables):
        return True
    with tf.init_scope():
        random = np.random.default_rng(0)
        leaves = keras.tree.flatten((args, kwargs))
        made_up = [_made_up(x, random) for x in leaves]
        by_rows = by_rows and any(np.ndim(x) for x in made_up if x is not None)
        by_rows = by_rows and not any(
            tf.is_tensor(leaf) and not np.ndim(x) for leaf, x in zip(leaves, made_up, strict=True)
        )

        def added(start: float, rows: slice, weight: float = 1.0) -> list[np.ndarray]:
            state = [tf.cast(tf.fill(v.shape, start), v.dtype) for v in metric.variables]
            values = [x[rows] if np.ndim(x) else x for x in made_up]
            values = [
                tf.constant(x, leaf.dtype) if tf.is_tensor(leaf) else x
                for x, leaf in zip(values, leaves, strict=True)
            ]
            args_, kwargs_ = keras.tree.pack_sequence_as((args, kwargs), values)
            with weighted_step(weight):
                new = metric.stateless_update_state(state, *args_, **kwargs_)
            return [_array(n) - _array(s) for n, s in zip(new, state, strict=True)]

        try:
            whole, *others = [added(start, slice(None)) for start in _STARTS]
            if by_rows:
                weight = _PART / _PROBE_ROWS
                parts = (
                    added(0.0, slice(_PART), weight),
                    added(0.0, slice(_PART, None), 1.0 - weight),
                )
                others.append([a + b for a, b in zip(*parts, strict=True)])
        except Exception as error:  # the metric's own code may raise anything
            log.warning(
                "metric %s: taken as a sum over rows, because a trial update failed: %s: %s",
                metric.name,
                type(error).__name__,
                error,
            )
            return True
    return all(
        np.allclose(a, b, rtol=1e-3, atol=1e-4)
        for other in others
        for a, b in zip(whole, other, strict=True)
    )


def _made_up(leaf: Any, random: np.random.Generator) -> Any:
    """Return an array of a tensor's shape and dtype, with `_PROBE_ROWS` rows; else the leaf."""
    if not tf.is_tensor(leaf):
        return leaf
    shape = [2 if n is None else n for n in leaf.shape]
    if shape:
        shape[0] = _PROBE_ROWS
    if leaf.dtype.is_floating:
        return random.uniform(0.1, 0.9, shape)
    return random.integers(0, 2, shape)


def _array(value: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(value), np.float64)
