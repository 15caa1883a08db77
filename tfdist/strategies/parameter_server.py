"""Parameter-server strategy in the chief, which coordinates the workers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist import keras_compat
from tfdist.cluster.spec import ClusterSpec
from tfdist.keras_compat import scopes
from tfdist.keras_compat import servers as server_compat
from tfdist.strategies.base import KeptScope
from tfdist.strategies.server import addresses, wait_for
from tfdist.train.parameter_server.coordinator import Coordinator
from tfdist.train.parameter_server.worker_pool import Pool

READING = ("auto", "workers", "coordinator")
_CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """Version of `tf.distribute.ParameterServerStrategy` that trains by tfdist's engine."""

    tfdist_engine: Coordinator

    def scope(self) -> Any:
        """See `tf.distribute.Strategy`; the scope is entered until its end, see `KeptScope`."""
        return KeptScope(super().scope())

    def experimental_distribute_dataset(self, dataset, options=None):
        """See `tf.distribute.Strategy`; Keras' methods get tfdist's own batch stream.

        These methods are `fit`, `evaluate` and `predict`. They take the result, too, and read
        the data set itself.
        """
        if self.tfdist_engine.feeding:
            return self.tfdist_engine.feed(dataset)
        distributed = super().experimental_distribute_dataset(dataset, options)
        distributed.tfdist_dataset = dataset
        return distributed


def coordinate(
    cluster: ClusterSpec, reading: str, timeout: float, start_timeout: float
) -> ParameterServerStrategy:
    """Make the strategy of a cluster's chief, after all workers and parameter servers answer.

    Args:
        cluster: Cluster with this task, its chief.
        reading: One of `READING`.
        timeout: Seconds to wait for a worker when none is left, and for one unit of work.
        start_timeout: Seconds to wait for the other tasks to appear.

    Raises:
        PeersAbsent: If tasks did not appear; the message names them.
        ValueError: If a worker serves several GPUs.
    """
    workers = [t for t in cluster.tasks if t.type == "worker"]
    servers = [t for t in cluster.tasks if t.type == "ps"]
    wait_for([*servers, *workers], start_timeout)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(addresses(cluster)), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = ParameterServerStrategy(resolver)
    keras_compat.install()
    server_compat.trace_anywhere(strategy)
    server_compat.keep_metrics_on(strategy, _CHIEF)
    if strategy.num_replicas_in_sync > 1:
        raise ValueError(
            "parameter_server: expected one GPU per worker, received "
            f"{strategy.num_replicas_in_sync}. Start a worker for each GPU, without devices= or "
            'with one, such as devices="gpu:0".'
        )
    server_compat.update_in_place(strategy)
    Coordinator(strategy, Pool(strategy, workers, servers, timeout), _CHIEF, reading)
    scopes.watch(strategy)
    return strategy
