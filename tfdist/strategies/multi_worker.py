"""Synchronous data-parallel strategy over several workers, with the replicas' all-reduce."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import random
import sys
import time
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_compat
from tfdist.cluster.addresses import answers
from tfdist.cluster.handshake import ConfigurationError, PeersAbsent
from tfdist.cluster.json_channel import check_token
from tfdist.cluster.spec import ClusterSpec
from tfdist.parallel.collectives.group import is_native
from tfdist.parallel.collectives.native import library
from tfdist.parallel.collectives.native.transport import START_S, Transport, open_transport
from tfdist.parallel.placement import Placement
from tfdist.runtime import launch_protocol
from tfdist.runtime.termination import ends_by_exception
from tfdist.strategies.base import KerasFeedMixin, attach_engine, by_rows
from tfdist.sync import BUCKET_BYTES, Policy
from tfdist.train.health.peer_health import watch_peers
from tfdist.train.synchronous.feed import replica_slices
from tfdist.train.synchronous.replica_state import all_gather

COMMUNICATION = {
    "auto": tf.distribute.experimental.CommunicationImplementation.AUTO,
    "ring": tf.distribute.experimental.CommunicationImplementation.RING,
    "nccl": tf.distribute.experimental.CommunicationImplementation.NCCL,
    # For what native collectives do not send, such as sparse gradients.
    "native": tf.distribute.experimental.CommunicationImplementation.AUTO,
}

LEADER_S = 5.0
TRIAL_S = 10.0  # for the connections of native collectives that the user did not ask for
EXIT_S = 3.0  # a worker that is done stays so long, while others may still receive from it
WATCHDOG_FIRST = 1.5  # native collectives wait so much longer, because the watchdog says more

log = logging.getLogger("tfdist")


class MultiWorkerMirroredStrategy(KerasFeedMixin, tf.distribute.MultiWorkerMirroredStrategy):
    """Version of `tf.distribute.MultiWorkerMirroredStrategy` that trains by tfdist's engine.

    In custom training loops, `experimental_distribute_dataset` gives every worker its rows of each
    global batch, the same rows that `fit` gives it.

    Attributes:
        own_batches: Whether each worker has batches of its own, which together are a global batch.
    """

    own_batches = False

    def experimental_distribute_dataset(self, dataset, options=None):
        """See `tf.distribute.Strategy`; gives every worker its rows of each global batch."""
        engine = self.tfdist_engine
        shares = by_rows(dataset) and not engine.feeding
        if options is None and (self.own_batches or shares):
            placement = engine.placement
            if self.own_batches:
                placement = Placement(local_replicas=placement.local_replicas)
            return self.distribute_datasets_from_function(
                lambda context: replica_slices(dataset, placement)
            )
        return keras_compat.hide_length(super().experimental_distribute_dataset(dataset, options))

    def distribute_datasets_from_function(self, dataset_fn, options=None):
        """See `tf.distribute.Strategy`; the result's length is unknown.

        The length may differ between workers: training ends when the last worker's data ends.
        """
        return keras_compat.hide_length(
            super().distribute_datasets_from_function(dataset_fn, options)
        )


def multi_worker_mirrored(
    cluster: ClusterSpec | None,
    devices: Sequence[str],
    communication: str,
    timeout: float,
    sync: Policy | None = None,
) -> MultiWorkerMirroredStrategy:
    """Return a strategy with a copy of the model on each device of every training task.

    Args:
        cluster: Cluster with this task; None for a cluster of this process alone.
        devices: Devices of this process.
        communication: One of `COMMUNICATION`. With "auto", collectives are native if all workers
            can use native ones with the compiled library.
        timeout: Seconds that a step waits for the other workers.
        sync: Synchronization policy of the replicas.
    """
    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=sync.bucket_bytes if sync else BUCKET_BYTES,
        implementation=COMMUNICATION[communication],
    )
    if cluster is None:
        strategy = MultiWorkerMirroredStrategy(communication_options=options)
        return attach_engine(
            strategy,
            Placement(local_replicas=strategy.num_replicas_in_sync),
            sync=sync,
            communication=communication,
        )
    cluster.export()
    _await_leader(cluster)
    if len(cluster.training_tasks) > 1:
        atexit.register(_stay_for_peers)
    strategy = MultiWorkerMirroredStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver(), options
    )
    tasks = tuple(str(t) for t in cluster.training_tasks)
    placement = Placement(
        len(tasks), cluster.rank, strategy.num_replicas_in_sync // len(tasks), tasks
    )
    attach_engine(strategy, placement, timeout=timeout, sync=sync, communication=communication)
    keras_compat.broadcast_initial_values(
        strategy,
        strategy.tfdist_engine.watchdog.explained,
        functools.partial(_broadcast, strategy, placement),
    )
    _share_seed(strategy, placement)
    if len(tasks) > 1 and communication in ("auto", "native"):
        connect = functools.partial(_connect, strategy, cluster, placement, timeout)
        if communication == "native":
            transport: Transport | None = connect(START_S)
        else:
            transport = _try_native(strategy, placement, devices, connect)
        if transport is not None:
            log.info("workers exchange tensors by native collectives over %s", transport.kind)
            strategy.tfdist_engine.use_transport(transport)
            watch_peers(transport, tasks[placement.rank])
    return strategy


def check_native(devices: Sequence[str]) -> None:
    """Raise ValueError unless this process can use native collectives.

    Args:
        devices: Devices of this process.

    Raises:
        ValueError: If there are other devices than a CPU, or the job has no secret.
    """
    if sys.platform != "linux":
        raise ValueError(
            f"communication: native needs Linux, received {sys.platform}; use ring or auto."
        )
    if len(devices) != 1 or not devices[0].startswith("/cpu"):
        raise ValueError(
            "communication: native sums on one CPU device a worker, received "
            f"{', '.join(devices)}; use auto, or devices='cpu'."
        )
    try:
        check_token(launch_protocol.task_secret())
    except ValueError as error:
        raise ValueError(
            "communication: native needs a secret that only the tasks of this job know. "
            "`tfdist launch` gives them one; tasks that are started in another way need the same "
            f"value of the variable {launch_protocol.TASK_SECRET} (here, {error}). Or use ring."
        ) from error


def _connect(
    strategy: MultiWorkerMirroredStrategy,
    cluster: ClusterSpec,
    placement: Placement,
    timeout: float,
    start_timeout: float,
) -> Transport:
    """Connect this worker with the others, for native collectives."""
    tasks = cluster.training_tasks
    return open_transport(
        placement.rank,
        [task.address for task in tasks],
        [str(task) for task in tasks],
        launch_protocol.task_secret(),
        functools.partial(all_gather, strategy, placement),
        WATCHDOG_FIRST * timeout,
        start_timeout,
    )


def _try_native(
    strategy: MultiWorkerMirroredStrategy,
    placement: Placement,
    devices: Sequence[str],
    connect: Callable[[float], Transport],
) -> Transport | None:
    """Return native collectives if all workers can use them, and can connect; else None."""

    def all_workers(this_one: bool) -> bool:
        return bool(all_gather(strategy, placement, np.array([float(this_one)])).all())

    try:
        check_native(devices)
        can = library.load() is not None
    except ValueError:
        can = False
    if not all_workers(can):
        return None
    transport = None
    reason = ""
    try:
        transport = connect(TRIAL_S)
    except (ConfigurationError, PeersAbsent, OSError) as error:
        reason = f": {error}"
    if all_workers(transport is not None):
        return transport
    if transport is not None:
        transport.close()
    log.warning(
        "communication: auto uses TensorFlow's collectives, which are slower, because the workers "
        "could not connect by tfdist's own%s. Set communication=ring to skip the attempt.",
        reason,
    )
    return None


def _broadcast(
    strategy: MultiWorkerMirroredStrategy, placement: Placement, value: tf.Tensor
) -> tf.Tensor | None:
    """Return the chief's value by native collectives; None if they cannot send it."""
    transport = strategy.tfdist_engine.transport
    if transport is None or not is_native([value]):
        return None
    addend = value if placement.is_chief else tf.zeros_like(value)
    name = f"initial value, {value.dtype.name} {value.shape}"
    return transport.all_reduce([addend], name)[0]


def _await_leader(cluster: ClusterSpec) -> None:
    """Wait up to `LEADER_S` for the TensorFlow server of the first worker.

    A worker that connects too early retries only a second later.
    """
    end = time.monotonic() + LEADER_S
    while (
        cluster.rank
        and time.monotonic() < end
        and not answers(cluster.training_tasks[0].address, timeout=0.5)
    ):
        time.sleep(0.01)


def _stay_for_peers() -> None:
    """Wait up to `EXIT_S` until all workers exit.

    The last collective is done here as soon as this worker has what it needs. Another worker still
    receives from this one, and would fail if this process had ended. After an error nobody waits.
    """
    if not ends_by_exception():
        with contextlib.suppress(tf.errors.OpError):
            keras_compat.wait_at_barrier("tfdist exit", EXIT_S)


def _share_seed(strategy, placement: Placement) -> None:
    """Set the chief's random seed on all workers, unless the user has set one.

    With equal seeds, unseeded shuffles give all workers the same batches.
    """
    if keras_compat.global_seed() is None:
        own = random.SystemRandom().randrange(2**31)
        keras.utils.set_random_seed(int(all_gather(strategy, placement, np.array([own]))[0, 0]))
