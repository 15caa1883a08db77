"""Factory of `tf.distribute` strategies for Keras 3, from a name, cluster and devices."""

from __future__ import annotations

import atexit
import difflib
import glob
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from tfdist import flags
from tfdist import sync as sync_policies
from tfdist.cluster import preflight, resolvers
from tfdist.cluster.spec import ClusterSpec
from tfdist.keras_compat import engine_of, runtime_initialized
from tfdist.keras_compat.servers import connected
from tfdist.strategies import devices as device_names
from tfdist.strategies import single_process
from tfdist.strategies.base import check_timeouts
from tfdist.strategies.multi_worker import COMMUNICATION, check_native, multi_worker_mirrored
from tfdist.strategies.parameter_server import READING, coordinate
from tfdist.strategies.server import check_host, farewell, serve
from tfdist.sync import Policy
from tfdist.train.evaluator import Evaluator

if TYPE_CHECKING:
    import tensorflow as tf

log = logging.getLogger("tfdist")

NAMES = (
    "auto",
    "one_device",
    "mirrored",
    "central_storage",
    "multi_worker_mirrored",
    "parameter_server",
    "tpu",
)
# Strategies whose replicas train synchronously, each with a copy of the variables.
SYNCHRONOUS = ("one_device", "mirrored", "multi_worker_mirrored")


def make_strategy(
    name: str | None = None,
    cluster: ClusterSpec | str | os.PathLike | None = None,
    devices: device_names.Devices = None,
    *,
    task: str | None = None,
    communication: str | None = None,
    timeout: float = 600.0,
    start_timeout: float = 120.0,
    cross_device: str = "auto",
    threads: int | None = None,
    reading: str = "auto",
    variable_partitioner: object = None,
    sync: Policy | str | Callable[[list], list] | None = None,
    tpu: str = "local",
) -> tf.distribute.Strategy:
    """Make the strategy for this process; call it before any tensor, data set or model.

    In scripts that `tfdist.app.run` started, arguments that are not given come from the command
    line. A cluster that is not given comes from the environment (see
    `tfdist.cluster.resolvers.resolve`).

    Args:
        name: One of `NAMES`. The default `auto` means `parameter_server` in a cluster with
            parameter servers, `multi_worker_mirrored` in a cluster with several training tasks,
            else `mirrored` with several devices, else `one_device`. Under `parameter_server` this
            call returns in the chief only; in a worker or ps task it runs the server, and ends the
            process when the job ends.
        cluster: Cluster with this task, or the path of a YAML or JSON file that describes it.
        devices: Devices of this process, see `tfdist.strategies.devices.configure`; a number,
            names, `"cpu"` or `"gpu"`.
        task: Name of this task, such as `worker:1`, if `cluster` does not contain it.
        communication: Collective implementation with which workers exchange gradients: `auto`
            (default), `ring`, `nccl` or `native`. With `native`, workers on CPUs exchange tensors
            by tfdist's own collectives, and must share a secret: those of one `tfdist launch` do,
            others find it in the variable `TFDIST_TASK_SECRET`. `auto` is native where workers can
            be.
        timeout: Seconds without a step after which a worker that waits for the others fails,
            default 600. Under `parameter_server`, the seconds that the chief waits for a step, and
            for a worker when none is left.
        start_timeout: Seconds that a worker waits for the others to appear, default 120.
        cross_device: Algorithm with which `mirrored` sums over its devices: `auto` (default),
            `nccl`, `hierarchical_copy` or `one_device`.
        threads: Number of threads of an operation, and of operations at once; None leaves
            TensorFlow's choice. One operation more than there are devices may always run at once,
            unless the only device is a CPU.
        reading: Reader of a `tf.data.Dataset` that is given to `fit` or `evaluate` under
            `parameter_server`: `workers`, `coordinator`, or `auto` (default). With `auto` the
            workers read, if the data set is more than Python code or arrays of the chief.
        variable_partitioner: Must be None, because Keras variables cannot be partitioned; use
            `tfdist.layers.ShardedEmbedding`.
        sync: Synchronization policy of the replicas, see `tfdist.sync`: `Gradients`, `LocalSGD` or
            `DiLoCo`. Short forms of `Gradients` are "bfloat16", "float16", "replicas", "sum", and a
            function of a list of gradients. None: the gradients of all examples of the global batch
            are averaged in each step.
        tpu: TPU for the strategy `tpu`: a name, a gRPC address, or `local` (default).

    Returns:
        A real `tf.distribute.Strategy`.

    Raises:
        ValueError: If an argument or the cluster is wrong, or TensorFlow has already started.
        TimeoutError: If workers of the cluster did not appear; the message names them.

    Example:
        >>> strategy = make_strategy("one_device", devices="cpu")
        >>> strategy.num_replicas_in_sync
        1
    """
    policy = sync_policies.policy(sync)
    if isinstance(cluster, int):
        raise ValueError(
            f"cluster: expected a ClusterSpec or the path of a file, received {cluster}; did you "
            f"mean devices={cluster}?"
        )
    check_timeouts(timeout, start_timeout)
    options = flags.parsed_options()
    name = _choice("strategy", name or options.get("strategy") or "auto", NAMES)
    communication = _choice(
        "communication",
        communication or options.get("communication") or "auto",
        tuple(COMMUNICATION),
    )
    _choice("cross_device", cross_device, single_process.CROSS_DEVICE_NAMES)
    _choice("reading", reading, READING)
    if variable_partitioner is not None:
        raise ValueError(
            "variable_partitioner: expected None, as a Keras 3 variable cannot be partitioned. "
            "For tables that are too large for one parameter server use "
            "tfdist.layers.ShardedEmbedding."
        )
    devices = options.get("devices") if devices is None else devices
    cluster = resolvers.resolve(cluster or options.get("cluster"), task or options.get("task"))
    if cluster is not None and cluster.task_type == "evaluator":
        return _evaluator(
            cluster, device_names.configure(devices, threads), start_timeout, cross_device
        )
    names = device_names.configure(devices, threads)
    selected, reason = (name, "as asked") if name != "auto" else _choose(cluster, names)
    log.info("strategy %s on %s: %s", selected, ", ".join(names), reason)
    if selected not in SYNCHRONOUS and policy != sync_policies.Gradients():
        raise ValueError(
            f"sync: the strategy {selected} does not support synchronization policies, received "
            f"{sync!r}. Use {', '.join(SYNCHRONOUS[:-1])} or {SYNCHRONOUS[-1]}."
        )
    if selected == "multi_worker_mirrored":
        return _multi_worker(cluster, names, communication, timeout, start_timeout, policy)
    if selected == "parameter_server":
        return _parameter_server(cluster, names, reading, timeout, start_timeout)
    if cluster is not None and len(cluster.training_tasks) > 1:
        raise ValueError(
            f"strategy: {selected} trains in one process, but {cluster.source} lists "
            f"{len(cluster.training_tasks)} training tasks; use multi_worker_mirrored or auto, or "
            "start one process without a cluster."
        )
    if selected == "one_device":
        return single_process.one_device(names[0], policy)
    if selected == "mirrored":
        return single_process.mirrored(names, cross_device, policy)
    if selected == "central_storage":
        return single_process.central_storage(names)
    return _tpu(tpu)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Return whether this process writes a training's checkpoints, logs and console output."""
    engine = engine_of(strategy)
    return engine is None or engine.is_chief


def _choice(option: str, value: str, names: tuple[str, ...]) -> str:
    if value in names:
        return value
    near = difflib.get_close_matches(value, names, 1)
    raise ValueError(
        f"{option}: expected one of {', '.join(names)}; received "
        f"{value!r}{f', did you mean {near[0]!r}?' if near else ''}"
    )


def _choose(cluster: ClusterSpec | None, names: list[str]) -> tuple[str, str]:
    """Return the strategy for a cluster and devices, and the reason."""
    if cluster is not None and "ps" in cluster.jobs:
        return "parameter_server", f"parameter servers in {cluster.source}"
    if cluster is not None and len(cluster.training_tasks) > 1:
        return (
            "multi_worker_mirrored",
            f"{len(cluster.training_tasks)} training tasks in {cluster.source}",
        )
    if len(names) > 1:
        return "mirrored", f"one process with {len(names)} devices"
    return "one_device", "one process with one device"


def _multi_worker(
    cluster: ClusterSpec | None,
    names: list[str],
    communication: str,
    timeout: float,
    start_timeout: float,
    policy: Policy,
):
    if runtime_initialized():
        raise device_names.too_late("a cluster")
    if names[0].startswith("/cpu") and len(names) > 1:
        raise ValueError(
            f"devices: multi_worker_mirrored uses one CPU device a worker, received {len(names)}; "
            "start more workers on this machine instead (tfdist launch --workers N)."
        )
    if communication == "native":
        check_native(names)
    device_names.quiet_tensorflow()
    device_names.restrict(names)
    if cluster is not None:
        preflight.check(cluster, timeout=start_timeout, attempt=resolvers.attempt())
    return multi_worker_mirrored(cluster, names, communication, timeout, policy)


def _parameter_server(
    cluster: ClusterSpec | None,
    names: list[str],
    reading: str,
    timeout: float,
    start_timeout: float,
):
    """Return the strategy in the chief; in a worker or ps task, serve and end the process."""
    counts = {
        job: len(cluster.jobs.get(job, ())) if cluster else 0 for job in ("chief", "worker", "ps")
    }
    if cluster is None or not all(counts.values()):
        missing = " and ".join(job for job, count in counts.items() if not count)
        raise ValueError(
            "strategy: parameter_server needs a chief, at least one worker and at least one ps; "
            f"{cluster.source if cluster else 'no cluster'} lists no {missing}. On one machine, "
            "use `tfdist launch --chief --workers 2 --ps 1 -- COMMAND`."
        )
    if cluster.task is None:
        raise ValueError(
            f'{cluster.source}: the task of this process is missing. Pass task="chief:0", or set '
            "it in TF_CONFIG."
        )
    reconnecting = (
        connected()
    )  # after a parameter server is lost, the chief may make another strategy
    if runtime_initialized() and not reconnecting:
        raise device_names.too_late("a cluster")
    device_names.quiet_tensorflow()
    if cluster.task_type != "chief":
        device_names.restrict_to_one(names, cluster.task.index)
        serve(cluster, start_timeout=start_timeout)
    if not reconnecting:
        check_host(cluster, cluster.task)
    strategy = coordinate(cluster, reading, timeout, start_timeout)
    atexit.register(farewell, cluster)
    return strategy


def _evaluator(cluster: ClusterSpec, names: list[str], start_timeout: float, cross_device: str):
    """Return a strategy of this process alone, for an evaluator.

    The evaluator runs beside the training, under whatever strategy that uses, and reads its
    checkpoints.
    """
    strategy = (
        single_process.mirrored(names, cross_device)
        if len(names) > 1
        else single_process.one_device(names[0])
    )
    chief = cluster.training_tasks[0].address
    listens = len(cluster.training_tasks) > 1 or "ps" in cluster.jobs
    log.info("evaluator on %s of the training with the chief at %s", ", ".join(names), chief)
    Evaluator(strategy, strategy.tfdist_engine, chief, listens, start_timeout)
    return strategy


def _tpu(name: str):
    import tensorflow as tf

    if name == "local" and not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/[0-9]*"):
        raise ValueError(
            "strategy: tpu needs a TPU, but this machine has none (no /dev/accel*, no "
            "/dev/vfio/*). Pass tpu=NAME for a remote one, or use the strategy auto."
        )
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.TPUStrategy(resolver)
