"""Keras' `predict_function` under a synchronous strategy."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.data.batch_rows import check_equal_rows
from tfdist.keras_compat.flat_calls import FlatFunction
from tfdist.keras_compat.table_lookups import tables_updated
from tfdist.parallel.placement import Placement
from tfdist.parallel.sharding import layouts
from tfdist.runtime.launch_protocol import Phase
from tfdist.train.health.heartbeat import Heartbeat
from tfdist.train.health.watchdog import Watchdog
from tfdist.train.synchronous.compiled_step import can_compile
from tfdist.train.synchronous.feed import Batch, batch_of, replica_rows, without_optionals
from tfdist.train.synchronous.gathered_rows import all_gather_rows
from tfdist.train.synchronous.replica_step import local_replica


class Predictor:
    """A `predict_function` that returns rows in input order, on every worker."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        placement: Placement,
        host: str,
        model: keras.Model,
        watchdog: Watchdog,
        heartbeat: Heartbeat,
    ):
        self._strategy = strategy
        self._placement = placement
        self._host = host
        self.model = model
        self._watchdog = watchdog
        self._heartbeat = heartbeat
        self._graph = FlatFunction(
            tf.function(self._predict, autograph=False, reduce_retracing=True)
        )
        self._compiles: bool | None = None  # whether XLA compiles the step; None until known

    def __call__(self, batches: list) -> Any:
        """Return the predictions for some batches."""
        batches = [b if isinstance(b, Batch) else batch_of(b, self._placement) for b in batches]
        if self._placement.replicas > 1:
            for b in batches:  # the outputs of replicas are those of rows
                x, _, _ = keras.utils.unpack_x_y_sample_weight(b.data)
                check_equal_rows(x, self._placement.replicas)
        if not self.model.built:
            self._build(batches[0])
            layouts.check(self.model)
        if self._compiles is None:
            self._compiles = self._decide_on_xla(batches[0])
        function = self._predict if self.model.run_eagerly else self._graph
        with self._watchdog.bound():
            outputs = function(batches)
        self._heartbeat.beat_within_fit(Phase.RUNNING)
        return outputs

    def _decide_on_xla(self, batch: Batch) -> bool:
        if not self._strategy.tfdist_engine.asks_for_xla(self.model):
            return False
        step = self.model.predict_step
        rows = replica_rows(batch, 0, self._placement, self._host)
        return can_compile(step, "predict_step", rows, self._strategy, self._placement)

    def _build(self, batch: Batch) -> None:
        """Make the model's variables in the scope; replicas cannot make them in a step."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(without_optionals(batch.data))
        kinds = tf.Tensor | tf.SparseTensor
        if not all(isinstance(t, kinds) and t.shape.rank for t in tf.nest.flatten(x)):
            return  # a step makes them, if it can: Keras has no symbols of ragged tensors

        def symbol(t):
            sparse = isinstance(t, tf.SparseTensor)
            return keras.KerasTensor([None, *t.shape[1:]], t.dtype, sparse=sparse)

        with self._strategy.scope():
            self.model(tf.nest.map_structure(symbol, x))

    def _predict(self, batches: list[Batch]):
        outputs = [
            self._strategy.experimental_local_results(self._strategy.run(self._replica, (b,)))
            for b in batches
        ]
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *(o[0] for o in outputs))

    def _replica(self, batch: Batch):
        placement = self._placement
        step = self.model.predict_step
        if self._compiles:
            step = tf.function(step, jit_compile=True, autograph=False)
        with tables_updated(self._strategy.tfdist_engine.updates_rows(self.model)):
            outputs = step(replica_rows(batch, local_replica(placement), placement, self._host))
        if placement.replicas == 1:
            return outputs
        per = -(-batch.rows // placement.replicas)

        def gather(x):
            if isinstance(x, tf.RaggedTensor | tf.SparseTensor):
                raise ValueError(
                    f"predict: expected dense outputs under {placement.replicas} replicas, "
                    f"received {type(x).__name__}. Return `output.to_tensor()` (ragged) or "
                    "`tf.sparse.to_dense(output)` (sparse) from the model."
                )
            if x.dtype == tf.string:
                raise ValueError(
                    f"predict: expected outputs that are numbers under {placement.replicas} "
                    "replicas, received strings, which replicas cannot exchange. Return numbers "
                    "from the model, and look the strings up afterwards."
                )
            if x.dtype.is_complex:
                return tf.complex(gather(tf.math.real(x)), gather(tf.math.imag(x)))
            # The replicas with fewer rows come last, so the padding ends up behind the rows.
            missing = per - tf.shape(x, out_type=tf.int64)[0]
            padding = tf.concat([[[0, missing]], tf.zeros([tf.rank(x) - 1, 2], tf.int64)], 0)
            shape = x.shape
            rows = all_gather_rows(tf.pad(x, padding))[: batch.rows]
            return tf.ensure_shape(rows, [None, *shape[1:]])

        return tf.nest.map_structure(gather, outputs)
