"""Time all-reduces of several implementations in this process, pinned to one core."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist import ClusterSpec

SHARED = "native, shared memory"
IN_PLACE = "native, shared memory, in place"
# Name: arguments of open_transport, and on how many hosts the processes seem to be; 0: each on one.
NATIVE: dict[str, tuple[dict[str, Any], int]] = {
    SHARED: ({}, 1),
    "native, UNIX sockets": ({"shared": False}, 1),
    "native, TCP": ({}, 0),
    "native in Python, UNIX sockets": ({"compiled": False}, 1),
}
SHARED_ON_HOSTS = "shared memory on each host, sockets between hosts"
EACH_WITH_EACH = "sockets between all processes"
ON_HOSTS: dict[str, tuple[dict[str, Any], int]] = {
    SHARED_ON_HOSTS: ({}, 2),
    EACH_WITH_EACH: ({"shared": False}, 2),
}
RING = "TensorFlow's ring"
COPY = "copy of the tensor"
GLOO = "gloo (torch)"
CONTENDERS = (COPY, IN_PLACE, *NATIVE, RING, GLOO)


@dataclasses.dataclass(frozen=True)
class Job:
    """Describe one process: its cluster and task, core, a port for gloo, and bounds of waits.

    With `on_hosts`, the processes seem to be on two hosts.
    """

    cluster: ClusterSpec
    core: int
    port: int
    timeout: float
    on_hosts: bool = False


def contenders(on_hosts: bool = False) -> tuple[str, ...]:
    """Return the implementations that are installed here."""
    if on_hosts:
        return tuple(ON_HOSTS)
    return CONTENDERS if importlib.util.find_spec("torch") else CONTENDERS[:-1]


def serve(job: Job) -> tuple[int, Callable[[str, int, int], dict[str, float]]]:
    """Return the rank, and a function that times calls: of a contender, with bytes, so often."""
    os.sched_setaffinity(0, {job.core})  # before TensorFlow counts cores and makes threads
    import tensorflow as tf

    import tfdist
    from tfdist.parallel.collectives.native import connections
    from tfdist.parallel.collectives.native.library import ALL_REDUCE
    from tfdist.parallel.collectives.native.transport import open_transport
    from tfdist.runtime import launch_protocol
    from tfdist.train.synchronous.replica_state import all_gather

    strategy = tfdist.make_strategy(
        "multi_worker_mirrored",
        job.cluster,
        "cpu",
        communication="native",
        start_timeout=job.timeout,
    )
    engine = strategy.tfdist_engine
    placement = engine.placement
    addresses = [task.address for task in job.cluster.training_tasks]
    host_identity = connections.host_identity

    def transport(options: dict[str, Any], hosts: int):
        per_host = placement.workers // hosts if hosts else 1
        own = bytes([placement.rank // per_host]) * len(host_identity())
        connections.host_identity = lambda: own
        return open_transport(
            placement.rank,
            addresses,
            placement.tasks,
            launch_protocol.task_secret(),
            functools.partial(all_gather, strategy, placement),
            job.timeout,
            **options,
        )

    native = ON_HOSTS if job.on_hosts else NATIVE
    transports = {name: transport(*how) for name, how in native.items()}
    engine.use_transport(None)
    group = tfdist.parallel.Group.of(strategy, "benchmark")
    gloo = _gloo(job, placement) if GLOO in contenders(job.on_hosts) else None

    @functools.cache
    def tensor(count: int) -> tf.Tensor:
        return tf.fill([count], 1.0 + placement.rank)

    @functools.cache
    def call(contender: str, count: int) -> Callable[[], Any]:
        """Return a function that makes one all-reduce of so many float32."""
        x = tensor(count)
        if contender == COPY:
            source, target = x.numpy(), np.zeros(count, np.float32)
            return lambda: np.copyto(target, source)
        if contender == IN_PLACE:  # zeros, because the sum of each call is the input of the next
            run = transports[SHARED]._exchange.run
            zeros = [np.zeros(count, np.float32)]
            return lambda: run(ALL_REDUCE, "sum", zeros, in_place=True)
        if contender == GLOO:
            assert gloo is not None
            return functools.partial(gloo, np.zeros(count, np.float32))  # sums in place
        if contender == RING:
            return tf.function(lambda: group.all_reduce(x, f"ring {count}"), autograph=False)
        chosen = transports[contender]
        return tf.function(lambda: chosen.all_reduce([x], "sum")[0], autograph=False)

    def measure(contender: str, size: int, times: int) -> dict[str, float]:
        function = call(contender, size // 4)
        result = function()
        if contender not in (COPY, IN_PLACE, GLOO):
            expected = sum(range(1, placement.workers + 1))
            assert float(result[0]) == float(result[-1]) == expected, (contender, result)
        seconds = []
        cpu = time.process_time()
        for _ in range(times):
            begin = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - begin)
        return {
            "wall": statistics.median(seconds),
            "cpu": (time.process_time() - cpu) / times,
        }

    return placement.rank, measure


def _gloo(job: Job, placement) -> Callable[[np.ndarray], None]:
    import datetime

    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{job.port}",
        rank=placement.rank,
        world_size=placement.workers,
        timeout=datetime.timedelta(seconds=job.timeout),
    )
    return lambda array: distributed.all_reduce(torch.from_numpy(array))
