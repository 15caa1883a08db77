"""Logs of a step: results of the model's metrics, and values that exist in that step only.

A step computes both on one replica. Results of metrics are computed again over all replicas when
they are read; every other value is then the mean over the replicas, weighted by their rows. A value
counts as a metric's result if it is the very tensor that the metric's `result()` returned in the
step, under any name and at any depth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import engine_of
from tfdist.parallel.replica_weight import step_weight, weighted
from tfdist.train.metric_calls import Results, observed
from tfdist.train.synchronous.gathered_losses import mark_own_rows
from tfdist.train.synchronous.gathered_metrics import MetricUpdates


class StepLogs:
    """A model's step that returns tensors, and the layout of the logs that it stands for.

    Args:
        model: The model.
        step: `model.train_step` or `model.test_step`.
    """

    def __init__(self, model: keras.Model, step: Callable):
        self._model = model
        self._step = step
        self._structure: Any = None
        # For each value of the logs: the index of a metric and the position in its result, or None.
        self._sources: list[tuple[int, int] | None] = []

    @property
    def known(self) -> bool:
        """Return whether the step has run or was traced."""
        return self._structure is not None

    @property
    def metrics(self) -> tuple[int, ...]:
        """Return the indices, in `metrics_of(model)`, of metrics whose results are in the logs."""
        return tuple(sorted({source[0] for source in self._sources if source is not None}))

    @property
    def has_others(self) -> bool:
        """Return whether the logs have values that are not results of metrics."""
        return None in self._sources

    def __call__(self, data: Any) -> tuple[list, list]:
        """Run the step on a replica's rows.

        Returns:
            This replica's parts of the values that are not results of metrics, and all values.

        Raises:
            TypeError: If the step does not return a dict of numbers.
        """
        results = Results(self._model)
        engine = engine_of(tf.distribute.get_strategy())
        trains = self._step == self._model.train_step
        if not (trains and engine.trains_locally(self._model)):
            mark_own_rows(data)
        with observed(self._model, MetricUpdates().update, results.record):
            logs = self._step(data)
        if not isinstance(logs, dict):
            raise TypeError(
                f"{self._step.__qualname__} returned {type(logs).__name__}; expected a dict of "
                "names and numbers."
            )
        values = keras.tree.flatten(logs)
        self._structure = keras.tree.map_structure(lambda x: None, logs)
        self._sources = [results.source_of(x) for x in values]
        others = [
            self._part_of_mean(x)
            for x, source in zip(values, self._sources, strict=True)
            if source is None
        ]
        return others, [tf.convert_to_tensor(x) for x in values if tf.is_tensor(x)]

    def fill(self, results: Mapping[int, Any], others: Sequence[Any]) -> dict[str, Any]:
        """Return the logs over all replicas.

        Args:
            results: Result of each metric of `metrics`, by its index.
            others: Means of the values that are not results of metrics.
        """
        remaining = iter(others)
        values = [
            next(remaining) if source is None else keras.tree.flatten(results[source[0]])[source[1]]
            for source in self._sources
        ]
        return keras.tree.pack_sequence_as(self._structure, values)

    def _part_of_mean(self, value: Any) -> tf.Tensor:
        """Return the replica's addend of the mean over the replicas; one replica's value itself."""
        x = tf.convert_to_tensor(value)
        weight = step_weight()
        if weight is None:
            return x
        if not (x.dtype.is_floating or x.dtype.is_integer or x.dtype.is_bool):
            raise TypeError(
                f"{self._step.__qualname__} returned a value of dtype {x.dtype.name}, which has no "
                "mean over the replicas; expected a dict of names and numbers."
            )
        x = tf.cast(x, tf.float64)
        if not x.shape.is_fully_defined():  # one value for each row
            x = tf.reduce_mean(x)
        return weighted([x], weight)[0]
