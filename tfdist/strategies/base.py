"""A tf.distribute strategy becomes one whose models train through tfdist's engine; which strategy to make is not decided here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from tfdist import keras_compat
from tfdist.parallel.placement import Placement
from tfdist.sync import Policy
from tfdist.train.synchronous.engine import Engine


class Fed(tf.distribute.Strategy if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixin before a synchronous `tf.distribute` strategy: gives Keras the engine's view of a data set."""

    tfdist_engine: Engine

    def experimental_distribute_dataset(self, dataset, options=None):
        """As in TensorFlow; but Keras' `fit`, `evaluate` and `predict` get tfdist's own feed.

        A data set whose auto-shard policy is OFF or FILE is distributed by TensorFlow, as its user has chosen.
        """
        if self.tfdist_engine.feeding and by_rows(dataset):
            return self.tfdist_engine.feed(dataset)
        return super().experimental_distribute_dataset(dataset, options)

    def reduce(self, reduce_op, value, axis=None):
        """As in TensorFlow; where Keras averages a whole batch just to learn its shapes, any replica's will do (keras #20585)."""
        if keras_compat.building():
            return tf.nest.map_structure(lambda v: self.experimental_local_results(v)[0], value)
        return super().reduce(reduce_op, value, axis)


def by_rows(dataset: tf.data.Dataset) -> bool:
    """Whether a data set's batches may be cut by rows: unless its options say otherwise."""
    policies = tf.data.experimental.AutoShardPolicy
    return dataset.options().experimental_distribute.auto_shard_policy in (
        policies.AUTO,
        policies.DATA,
    )


def adopt(
    strategy: tf.distribute.Strategy, placement: Placement, central: bool = False, timeout: float = 600.0, sync: Policy | None = None, communication: str = "auto"
) -> tf.distribute.Strategy:  # fmt: skip
    """Hooks Keras and gives the strategy its engine; returns the strategy."""
    keras_compat.install()
    keras_compat.allow_local_updates(strategy)
    if central:
        keras_compat.keep_state_per_replica(strategy)
    device = tf.DeviceSpec.from_string(strategy.extended.worker_devices[0])
    Engine(
        strategy,
        placement,
        device.replace(device_type="CPU", device_index=0).to_string(),
        central,
        timeout,
        sync,
        communication,
    )
    return strategy
