"""Devices of a cluster's workers, as stages for pipeline parallelism."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Sequence
from os import _exit  # ends the process from any thread

import tensorflow as tf

from tfdist import flags
from tfdist.cluster import resolvers
from tfdist.cluster.addresses import Presence
from tfdist.cluster.preflight import PeersAbsent
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.keras_compat import runtime_initialized
from tfdist.strategies import devices as device_names
from tfdist.strategies.base import check_timeouts
from tfdist.strategies.server import addresses, check_host, farewell, serve, wait_for

POLL_S = 2.0  # seconds between two checks of the workers


def pipeline_devices(
    cluster: ClusterSpec | str | os.PathLike | None = None,
    *,
    task: str | None = None,
    timeout: float = 60.0,
    start_timeout: float = 120.0,
    threads: int | None = None,
) -> list[str] | None:
    """Return the devices of a cluster's workers, as stages for pipeline parallelism.

    Call it first in each task, before any tensor, data set or model. In a cluster it returns only
    in the chief, which runs the program and computes on its CPU. A worker serves until the chief
    ends, and then ends its process. Worker i offers one GPU of its machine: the GPU with number i
    modulo the number of GPUs there.

    Args:
        cluster: Cluster with this task, or the path of a YAML or JSON file that describes it. None:
            the cluster that `tfdist.make_strategy` would find.
        task: Name of this task, such as `worker:1`, if `cluster` does not contain it.
        timeout: Seconds that a worker may fail to answer, default 60. After that the chief's
            process ends with exit code 75 and a line that names the worker, because a call that
            waits for a stopped worker never returns.
        start_timeout: Seconds that tasks wait for each other to appear, default 120.
        threads: Number of threads of an operation in a worker, and of operations at once; None
            leaves TensorFlow's choice.

    Returns:
        In the chief of a cluster, one device of each worker, in the workers' order: a GPU, or the
        CPU if no worker has a GPU. Without a cluster None, which stands for this machine's devices.

    Raises:
        ValueError: If the cluster has no chief or no workers, only some workers have GPUs, or
            TensorFlow has already started.
        TimeoutError: If workers did not appear; the message names them.
    """
    check_timeouts(timeout, start_timeout)
    options = flags.parsed_options()
    spec = resolvers.resolve(cluster or options.get("cluster"), task or options.get("task"))
    if spec is None:
        return None
    extra = [job for job in spec.jobs if job not in ("chief", "worker")]
    if extra or "chief" not in spec.jobs or "worker" not in spec.jobs:
        raise ValueError(
            "pipeline_devices: expected a chief, which runs the program, and a worker for each "
            f"stage; {spec.source} lists the jobs {', '.join(spec.jobs)}. On one machine, use "
            "`tfdist launch --chief --workers 2 -- COMMAND`."
        )
    if spec.task is None:
        raise ValueError(
            f'{spec.source}: the task of this process is missing. Pass task="chief:0", or '
            "set it in TF_CONFIG."
        )
    if runtime_initialized():
        raise device_names.too_late("a cluster", "pipeline_devices")
    device_names.quiet_tensorflow()
    names = device_names.configure(None, threads)
    if spec.task_type != "chief":
        device_names.restrict_to_one(names, spec.task.index)
        serve(spec, start_timeout=start_timeout)
    device_names.restrict([])  # GPUs of the chief's machine are for the workers there
    check_host(spec, spec.task)
    workers = [t for t in spec.tasks if t.type == "worker"]
    wait_for(workers, start_timeout)
    threading.Thread(
        target=_watch, args=(workers, timeout), name="tfdist pipeline workers", daemon=True
    ).start()  # before the next call, which waits for workers too
    tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec(addresses(spec)), job_name="chief", task_index=0, protocol="grpc"
    )
    atexit.register(farewell, spec)
    return of_workers(
        [d.name for d in tf.config.list_logical_devices() if "/job:worker/" in d.name]
    )


def of_workers(names: Sequence[str]) -> list[str]:
    """Return the device that each worker offers as a stage.

    Args:
        names: Full names of all devices of all workers.

    Returns:
        The GPUs in the order of the workers, or the CPUs if no worker has a GPU.

    Raises:
        ValueError: If only some workers have GPUs: all other stages would wait for those on CPUs.

    >>> of_workers([f"/job:worker/replica:0/task:{i}/device:{kind}:0"
    ...             for kind in ("CPU", "GPU") for i in (1, 0)])
    ['/job:worker/replica:0/task:0/device:GPU:0', '/job:worker/replica:0/task:1/device:GPU:0']
    """
    specs = sorted(
        map(tf.DeviceSpec.from_string, names), key=lambda spec: (spec.task, spec.device_index)
    )
    gpus, cpus = ([spec for spec in specs if spec.device_type == kind] for kind in ("GPU", "CPU"))
    with_gpu = {spec.task for spec in gpus}
    without_gpu = {spec.task for spec in cpus} - with_gpu
    if with_gpu and without_gpu:
        gpu_names, cpu_names = (
            ", ".join(f"worker:{task}" for task in sorted(tasks))
            for tasks in (with_gpu, without_gpu)
        )
        raise ValueError(
            f"pipeline_devices: expected a GPU in each worker or in none, received GPUs of "
            f"{gpu_names}, and none of {cpu_names}. Start workers only where TensorFlow sees a GPU "
            "(`tfdist doctor` shows this), or set CUDA_VISIBLE_DEVICES=-1 for all workers to use "
            "their CPUs."
        )
    return [spec.to_string() for spec in gpus or cpus]


def _watch(workers: Sequence[Task], timeout: float) -> None:
    """End this process after a worker has not answered for this number of seconds."""
    presences = [(worker, Presence(worker.address)) for worker in workers]
    while True:
        for worker, presence in presences:
            absent_s = presence.absent_seconds()
            if absent_s is not None and absent_s > timeout:
                print(
                    f"error: {worker} at {worker.address}, which runs a stage of pipeline "
                    f"parallelism, did not answer for {timeout:g} s",
                    file=sys.stderr,
                    flush=True,
                )
                _exit(PeersAbsent.exit_code)
        time.sleep(POLL_S)
