"""A cluster of a chief and workers becomes devices for `tfdist.parallel.pipeline`; which layers go there is not known here."""

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
from tfdist.strategies.server import addresses, check_host, farewell, serve, wait_for

POLL_S = 2.0  # between two looks at the workers


def pipeline_devices(
    cluster: ClusterSpec | str | os.PathLike | None = None,
    *,
    task: str | None = None,
    timeout: float = 60.0,
    start_timeout: float = 120.0,
    threads: int | None = None,
) -> list[str] | None:
    """Names of the devices for the stages of a pipeline; call it in each task first, before any tensor, data set or model.

    In a cluster this returns in the chief alone, which runs the program and computes on its CPU: a worker serves until the chief ends, and then ends
    its process. Worker i gives one GPU of its machine, the one of number i modulo theirs.

    Args:
        cluster: The cluster with this task, or the path of a YAML or JSON file that describes it. None: as `tfdist.make_strategy` finds it.
        task: This task, such as `worker:1`, where `cluster` does not say.
        timeout: Seconds that a worker may not answer, default 60. Then the chief's process ends with exit code 75 and a line that names the worker:
            a call that waits for one which has stopped never returns.
        start_timeout: Seconds that tasks wait for each other to appear, default 120.
        threads: Threads of an operation in a worker, and operations at once; None leaves TensorFlow's choice.

    Returns:
        In the chief of a cluster, a device of each worker, in their order: a GPU, or the CPU where no worker has a GPU; without a cluster None,
        which stands for this machine's devices.

    Raises:
        ValueError: The cluster has no chief and workers, only some workers have GPUs, or TensorFlow has started already.
        TimeoutError: Workers did not appear; names them.
    """
    for seconds, called in ((timeout, "timeout"), (start_timeout, "start_timeout")):
        if not seconds > 0:
            raise ValueError(
                f"{called}: expected seconds above 0, received {seconds!r}; float('inf') waits for ever."
            )
    options = flags.parsed_options()
    found = resolvers.resolve(cluster or options.get("cluster"), task or options.get("task"))
    if found is None:
        return None
    extra = [job for job in found.jobs if job not in ("chief", "worker")]
    if extra or "chief" not in found.jobs or "worker" not in found.jobs:
        raise ValueError(
            f"pipeline_devices: expected a chief, which runs the program, and a worker for each stage; {found.source} lists the jobs "
            f"{', '.join(found.jobs)}. On one machine: tfdist launch --chief --workers 2 -- COMMAND."
        )
    if found.task is None:
        raise ValueError(
            f'{found.source}: which task is this process? Pass task="chief:0", or set it in TF_CONFIG.'
        )
    if runtime_initialized():
        raise device_names.too_late("a cluster", "pipeline_devices")
    device_names.quiet_tensorflow()
    names = device_names.configure(None, threads)
    if found.task_type != "chief":
        # One GPU a worker: neighbours on a machine of several take one each.
        device_names.restrict([names[found.task.index % len(names)]])
        serve(found, start_timeout=start_timeout)
    device_names.restrict([])  # those of the chief's machine are for the workers there
    check_host(found, found.task)
    workers = [t for t in found.tasks if t.type == "worker"]
    wait_for(workers, start_timeout)
    threading.Thread(
        target=_watch, args=(workers, timeout), name="tfdist pipeline workers", daemon=True
    ).start()  # the next call waits too
    tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec(addresses(found)), job_name="chief", task_index=0, protocol="grpc"
    )
    atexit.register(farewell, found)
    return of_workers(
        [d.name for d in tf.config.list_logical_devices() if "/job:worker/" in d.name]
    )


def of_workers(names: Sequence[str]) -> list[str]:
    """The device that each worker gives to the pipeline.

    Args:
        names: Of all devices of all workers, full.

    Returns:
        The GPUs in the order of the workers, or the CPUs where no worker has a GPU.

    Raises:
        ValueError: Some workers have GPUs and others have none: stages on CPUs would be what all others wait for.

    >>> of_workers([f"/job:worker/replica:0/task:{i}/device:{kind}:0" for kind in ("CPU", "GPU") for i in (1, 0)])
    ['/job:worker/replica:0/task:0/device:GPU:0', '/job:worker/replica:0/task:1/device:GPU:0']
    """
    specs = sorted(
        map(tf.DeviceSpec.from_string, names), key=lambda spec: (spec.task, spec.device_index)
    )
    gpus, cpus = ([spec for spec in specs if spec.device_type == kind] for kind in ("GPU", "CPU"))
    some = {spec.task for spec in gpus}
    none = {spec.task for spec in cpus} - some
    if some and none:
        has, lacks = (
            ", ".join(f"worker:{task}" for task in sorted(tasks)) for tasks in (some, none)
        )
        raise ValueError(
            f"pipeline_devices: expected a GPU in each worker or in none, received GPUs of {has}, and none of {lacks}. Start workers only where "
            "TensorFlow sees a GPU, which `tfdist doctor` tells, or set CUDA_VISIBLE_DEVICES=-1 for all, to take their CPUs."
        )
    return [spec.to_string() for spec in gpus or cpus]


def _watch(workers: Sequence[Task], timeout: float) -> None:
    """Ends this process once a worker has not answered for so many seconds."""
    presences = [(worker, Presence(worker.address)) for worker in workers]
    while True:
        for worker, presence in presences:
            away = presence.away()
            if away is not None and away > timeout:
                print(
                    f"error: {worker} at {worker.address}, which has a stage of the pipeline, did not answer for {timeout:g} s",
                    file=sys.stderr,
                    flush=True,
                )
                _exit(PeersAbsent.exit_code)
        time.sleep(POLL_S)
