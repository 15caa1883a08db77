"""Metric calls: shows a step its metrics' updates and results, and says which add up.

A metric's state over several replicas is the sum of their states if each update adds to the state,
whatever the state was, and adds for all rows what it would add for parts of them. That is true of
Keras' own metrics. A user's metric may keep a maximum, a running mean or a mean of each batch
instead, and may do so only for some values of the data: no trial with made-up data can tell.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_compat import is_keras_metric, metrics_of, wrapped_function

_thread = threading.local()

# Attribute of a user's metric, class of metrics, or metric function, by which it declares that the
# states of parts of the rows add up to the state of all rows.
SUMS_ROWS = "tfdist_sums_rows"

_TRIAL_ROWS = 3
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
    for metric in metrics_of(model):
        _wrap(metric)
        for inner in getattr(metric, "metrics", ()):  # metrics of compile()
            _wrap(inner)
    before = getattr(_thread, "observer", None)
    _thread.observer = on_update, on_result
    try:
        yield
    finally:
        _thread.observer = before


class Results:
    """Results of a model's metrics in a step, by the tensors that stand for them.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model):
        self._metrics = {id(metric): i for i, metric in enumerate(metrics_of(model))}
        # By the id of a tensor; the tensor is kept, so that no other one gets its id.
        self._sources: dict[int, tuple[tuple[int, int], Any]] = {}

    def record(self, metric: keras.Metric, result: Any) -> None:
        """Record what a metric's `result()` has returned; an `on_result` of `observed`."""
        if id(metric) in self._metrics:
            for position, x in enumerate(keras.tree.flatten(result)):
                if tf.is_tensor(x):
                    self._sources[id(x)] = (self._metrics[id(metric)], position), x

    def source_of(self, value: Any) -> tuple[int, int] | None:
        """Return the index of a metric in `metrics_of(model)`, and the position in its result.

        Returns None if the value is not the very tensor that a metric's `result()` returned.
        """
        return self._sources[id(value)][0] if id(value) in self._sources else None


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


def needs_all_rows(metric: keras.Metric) -> bool:
    """Return whether each replica must update a user's metric by the rows of all replicas.

    It must, unless the metric declares how the replicas' states are combined: by a variable whose
    `aggregation` is "mean" or "only_first_replica", or by the attribute `tfdist_sums_rows`, which
    counts if all of its state can be summed.
    """
    aggregations = {v.aggregation for v in metric.variables}
    if aggregations & {"mean", "only_first_replica"}:
        return False
    sums = aggregations <= {"sum"} and not plain_variables(metric)
    return not (sums and _declares_sums(metric))


def plain_variables(metric: keras.Metric) -> list[tf.Variable]:
    """Return the `tf.Variable`s of a metric, of which Keras knows nothing."""
    values = [
        x
        for value in vars(metric).values()
        for x in (value if isinstance(value, list | tuple) else [value])
    ]
    return [x for x in values if isinstance(x, tf.Variable)]


def check_adds(metric: keras.Metric, args: tuple, kwargs: dict) -> None:
    """Raise ValueError unless each update of a metric adds to its state, whatever that was.

    A metric that does not declare so is updated in a trial, from several states.

    Args:
        metric: The metric, built.
        args: Positional arguments of an update, tensors of which only shapes and dtypes count.
        kwargs: Keyword arguments of an update.
    """
    expected = (
        f"metric {metric.name}: parameter servers can only add up the workers' states, expected "
        "a metric whose state is a sum of what each update adds"
    )
    remedy = (
        "Keep sums in variables of add_variable() (for a mean: a total and a count), or use a "
        "synchronous strategy."
    )
    others = [v.path for v in metric.variables if v.aggregation != "sum"]
    others += [v.name for v in plain_variables(metric)]
    if others:
        raise ValueError(f"{expected}, received the state {others[0]!r}, which is none. {remedy}")
    if _declares_sums(metric):
        return
    try:
        whole, *rest = _trials(metric, args, kwargs)
    except Exception as error:  # the metric's own code may raise anything
        raise ValueError(
            f"{expected}, and a trial update failed: {type(error).__name__}: {error} {remedy} If "
            f"it is such a sum, say so: set {SUMS_ROWS} = True in its class."
        ) from error
    for other in rest:
        if not all(
            np.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(whole, other, strict=True)
        ):
            raise ValueError(f"{expected}, received another one. {remedy}")


def _declares_sums(metric: keras.Metric) -> bool:
    function = wrapped_function(metric)
    return bool(getattr(metric, SUMS_ROWS, False) or getattr(function, SUMS_ROWS, False))


def _trials(metric: keras.Metric, args: tuple, kwargs: dict) -> list[list[np.ndarray]]:
    """Return what one update with made-up arguments adds to the state, for each of `_STARTS`."""
    with tf.init_scope():
        random = np.random.default_rng(0)
        made_up = keras.tree.map_structure(lambda x: _made_up(x, random), (args, kwargs))

        def added(start: float) -> list[np.ndarray]:
            state = [tf.cast(tf.fill(v.shape, start), v.dtype) for v in metric.variables]
            new = metric.stateless_update_state(state, *made_up[0], **made_up[1])
            return [_array(n) - _array(s) for n, s in zip(new, state, strict=True)]

        return [added(start) for start in _STARTS]


def _made_up(leaf: Any, random: np.random.Generator) -> Any:
    """Return a tensor of a tensor's shape and dtype, with `_TRIAL_ROWS` rows; else the leaf."""
    if not tf.is_tensor(leaf):
        return leaf
    shape = [2 if n is None else n for n in leaf.shape]
    if shape:
        shape[0] = _TRIAL_ROWS
    if leaf.dtype.is_floating:
        return tf.constant(random.uniform(0.1, 0.9, shape), leaf.dtype)
    return tf.constant(random.integers(0, 2, shape), leaf.dtype)


def _array(value: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(value), np.float64)
