"""Distributed prediction on the workers of a parameter-server cluster.

Outputs keep the order of the inputs.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.train.parameter_server.dispatch import function_of
from tfdist.train.parameter_server.worker_pool import Pool
from tfdist.train.parameter_server.worker_step import WorkerStep
from tfdist.train.synchronous.feed import any_rows, tensors, without_optionals


class RemotePredictor:
    """Callable that replaces `predict_function` and computes batches asynchronously.

    Results are computed while Keras asks for the next ones.

    Args:
        pool: Pool of workers.
        strategy: Parameter-server strategy.
        model: Model.
        host: Device of the coordinator.
    """

    def __init__(self, pool: Pool, strategy, model: keras.Model, host: str):
        self._pool = pool
        self._strategy = strategy
        self._host = host
        self._worker_step = WorkerStep(model.predict_step, "predict_step", model, host)
        self._graphs: dict = {}
        self._items: list[_Prediction] = []

    def __call__(self, batches: list) -> Any:
        """Dispatch the prediction of some batches, and return their outputs."""
        batches = [tensors(batch) for batch in batches]
        # Traced here, so that errors of the user's model raise here.
        item = _Prediction([(self._graph(batch), batch) for batch in batches])
        self._items = [p for p in self._items if p.outputs is None] + [item]
        self._pool.submit(self, item)
        window = 4 * len(self._pool.workers)
        self._pool.wait(lambda: sum(p.outputs is None for p in self._items) < window)
        outputs = item.work[0][0].structured_outputs
        if not all(
            isinstance(spec, tf.TensorSpec | tf.Tensor) for spec in tf.nest.flatten(outputs)
        ):
            self._pool.wait(lambda: item.outputs is not None)
            return item.outputs
        flat = [
            _PendingTensor(self._pool, item, index)
            for index in range(len(tf.nest.flatten(outputs)))
        ]
        return tf.nest.pack_sequence_as(outputs, flat)

    def take(self, items: collections.deque, worker: int) -> list[_Prediction]:
        """Remove the next item from the queue, and return it."""
        return [items.popleft()]

    def execute(self, worker: int, items: list[_Prediction], call: Callable) -> Any:
        """Run a prediction on a worker, and copy its outputs to the coordinator."""
        outputs = []
        for graph, batch in items[0].work:
            remote = call(graph, batch)
            with tf.device(self._host):
                outputs.append(tf.nest.map_structure(tf.identity, remote, expand_composites=True))
        with tf.device(self._host):
            return (
                tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
                if len(outputs) > 1
                else outputs[0]
            )

    def forget(self, worker: int) -> None:
        """Do nothing: workers keep no state for predictions."""

    def done(self, items: list[_Prediction], result: Any) -> None:
        """Store the outputs in the item."""
        items[0].outputs = result

    def _graph(self, batch):
        specs = any_rows(batch)
        kind = repr(specs)
        if kind not in self._graphs:
            self._worker_step.prepare(without_optionals(specs))
            self._graphs[kind] = function_of(self._predict).get_concrete_function(specs)
        return self._graphs[kind]

    def _predict(self, data):
        return self._strategy.run(self._worker_step, args=(without_optionals(data),))


@dataclasses.dataclass(eq=False)
class _Prediction:
    work: list  # pairs of a graph and a batch
    outputs: Any = None


class _PendingTensor:
    """Tensor that a worker is still computing. Access to its value waits for the result."""

    def __init__(self, pool: Pool, item: _Prediction, index: int):
        self._pool = pool
        self._piece = item
        self._index = index

    def numpy(self) -> np.ndarray:
        return self.__tf_tensor__().numpy()

    def __tf_tensor__(self, dtype=None, name=None) -> tf.Tensor:
        self._pool.wait(lambda: self._piece.outputs is not None)
        return tf.nest.flatten(self._piece.outputs)[self._index]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def __getitem__(self, key):
        return self.__tf_tensor__()[key]

    @property
    def shape(self) -> tf.TensorShape:
        return self.__tf_tensor__().shape

    @property
    def dtype(self) -> tf.DType:
        return self.__tf_tensor__().dtype
