"""A cluster with parameter servers becomes a strategy in its chief; the cluster is taken as checked."""

from __future__ import annotations

import logging
import time

import tensorflow as tf

from tfdist import keras_compat
from tfdist.addresses import answers
from tfdist.cluster import ClusterSpec, Task
from tfdist.preflight import PeersAbsent
from tfdist.strategies.server import addresses
from tfdist.train.coordinator import Coordinator
from tfdist.train.pool import Pool

log = logging.getLogger("tfdist")

READING = ("auto", "workers", "coordinator")
_CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """`tf.distribute.ParameterServerStrategy` that trains through tfdist's engine."""

    tfdist_engine: Coordinator

    def experimental_distribute_dataset(self, dataset, options=None):
        """As in TensorFlow; but Keras' `fit`, `evaluate` and `predict` get tfdist's own stream of batches."""
        if self.tfdist_engine.feeding:
            return self.tfdist_engine.feed(dataset)
        return super().experimental_distribute_dataset(dataset, options)


def coordinate(cluster: ClusterSpec, reading: str, timeout: float, start_timeout: float) -> ParameterServerStrategy:
    """The strategy of a cluster's chief, once all its workers and parameter servers answer.

    Args:
        cluster: The cluster with this task, its chief.
        reading: One of `READING`.
        timeout: Seconds to wait for a worker when none is left, and for one piece of work.
        start_timeout: Seconds to wait for the other tasks to appear.

    Raises:
        PeersAbsent: Names the tasks that did not.
        ValueError: A worker serves several GPUs.
    """
    workers = [t for t in cluster.tasks if t.type == "worker"]
    servers = [t for t in cluster.tasks if t.type == "ps"]
    _wait_for([*servers, *workers], start_timeout)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(addresses(cluster)), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = ParameterServerStrategy(resolver)
    keras_compat.install()
    keras_compat.trace_anywhere(strategy)
    keras_compat.keep_metrics_here(strategy, _CHIEF)
    if strategy.num_replicas_in_sync > 1:
        raise ValueError(
            f"parameter_server: each worker serves {strategy.num_replicas_in_sync} GPUs, expected one. Start a worker for each GPU, without "
            'devices or with one, such as devices="gpu:0".'
        )
    keras_compat.update_in_place(strategy)
    Coordinator(strategy, Pool(strategy, workers, servers, timeout), _CHIEF, reading)
    return strategy


def _wait_for(tasks: list[Task], seconds: float) -> None:
    """Waits until all tasks serve; TensorFlow itself would wait without a bound, and name nobody."""
    end, told = time.monotonic() + seconds, time.monotonic()
    while missing := [t for t in tasks if not answers(t.address, 1.0)]:
        names = ", ".join(f"{t} at {t.address}" for t in missing)
        if time.monotonic() > end:
            raise PeersAbsent(
                f"{names} did not answer within {seconds:g} s. Start {'it' if len(missing) == 1 else 'them'} with the same cluster, or look "
                "at the log for what went wrong there."
            )
        if time.monotonic() - told > 10:
            told = time.monotonic()
            log.warning("chief waits for %s", names)
        time.sleep(0.2)
