"""TensorFlow server of a worker or ps task, until the parameter-server job ends.

TensorFlow's server never ends by itself and knows nothing of a job. So the process watches the
chief. A chief that is gone may come back, unless it sent a farewell.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import NoReturn

import tensorflow as tf

from tfdist.cluster.addresses import Presence, UnresolvedAddress, answers
from tfdist.cluster.preflight import PeersAbsent
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.runtime.launch_protocol import note_met
from tfdist.runtime.termination import ends_by_exception

log = logging.getLogger("tfdist")

POLL_S = 1.0  # seconds between two checks of the chief
LEAVING_S = 0.1  # the same, after the chief's farewell
PROGRESS_S = 30.0  # seconds between two log lines while waiting
# A loop on a worker around an update on a ps blocks one of the worker's threads, and hangs if the
# worker has no second one.
MIN_THREADS = 8

# The farewell is a remote call of a Python function in the server's process. TensorFlow gives this
# name to the first Python function of a process.
_FIRST_FUNCTION = b"pyfunc_0"
_FAREWELL = b"tfdist: farewell"

_servers: list = []  # objects kept until the process ends: TensorFlow cannot stop a server


def serve(
    cluster: ClusterSpec, *, start_timeout: float = 120.0, return_timeout: float = 60.0
) -> NoReturn:
    """Serve as this process's task of a parameter-server job; end the process with the job.

    A worker serves the GPUs that this process may see (`tf.config.set_visible_devices`), a ps
    serves none.

    Args:
        cluster: Cluster with this process's task, a worker or ps.
        start_timeout: Seconds to wait for the chief to appear at first, default 120.
        return_timeout: Seconds that a chief which is gone without a farewell has to come back,
            default 60.

    Raises:
        SystemExit: With code 0 when the job has ended; 75, with a line on standard error, when no
            chief came; 130 after Ctrl-C.
        ValueError: If the cluster has no chief, or this task cannot listen at its address.
    """
    task = cluster.task
    chief = chief_of(cluster)
    assert task is not None
    check_host(cluster, task)
    farewell = threading.Event()
    _servers.append(_farewell_receiver(farewell))
    _servers.append(
        tf.distribute.Server(
            tf.train.ClusterSpec(addresses(cluster)), task.type, task.index, "grpc", _settings(task)
        )
    )
    note_met()
    log.info("%s serves at %s, until the chief at %s ends", task, task.address, chief.address)
    try:
        log.info(
            "%s ends: %s",
            task,
            _wait_for_end(task, Presence(chief.address), farewell, start_timeout, return_timeout),
        )
    except PeersAbsent as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(0)


def end_servers(cluster: ClusterSpec, timeout: float = 10.0) -> None:
    """Tell all workers and ps that this chief ends for good, so that they end after it.

    Call it when a coordinator has done its work, while its strategy is still connected. Without
    this call the servers wait for another chief; so do servers that do not answer, or no longer
    know this chief.

    Args:
        cluster: Cluster whose servers end.
        timeout: Seconds after which the remaining servers are not told, default 10.
    """
    limit = time.monotonic() + timeout
    for task in cluster.tasks:
        if (
            task.type not in ("worker", "ps")
            or time.monotonic() > limit
            or not answers(task.address, timeout=1.0)
        ):
            continue
        try:
            with tf.device(f"/job:{task.type}/replica:0/task:{task.index}/device:CPU:0"):
                tf.raw_ops.PyFunc(
                    input=[tf.constant(_FAREWELL)], token=_FIRST_FUNCTION, Tout=[tf.bool]
                )
        except (tf.errors.OpError, ValueError) as error:  # ValueError: not connected
            log.debug("no farewell to %s: %s", task, error)


def farewell(cluster: ClusterSpec) -> None:
    """End the servers at the exit of a chief that has done its work.

    After an error the servers stay for the next chief.
    """
    if not ends_by_exception():
        end_servers(cluster)


def wait_for(tasks: list[Task], seconds: float) -> None:
    """Wait until all tasks serve, or raise PeersAbsent.

    TensorFlow itself would wait without a limit, and without naming the missing tasks.
    """
    end = time.monotonic() + seconds
    last_warning = time.monotonic()
    while missing := [t for t in tasks if not answers(t.address, 1.0)]:
        names = ", ".join(f"{t} at {t.address}" for t in missing)
        if time.monotonic() > end:
            raise PeersAbsent(
                f"{names} did not answer within {seconds:g} s. Start "
                f"{'it' if len(missing) == 1 else 'them'} with the same cluster, or look for the "
                f"cause in {'its log' if len(missing) == 1 else 'their logs'}."
            )
        if time.monotonic() - last_warning > 10:
            last_warning = time.monotonic()
            log.warning("chief waits for %s", names)
        time.sleep(0.2)
    note_met()


def addresses(cluster: ClusterSpec) -> dict[str, list[str]]:
    """Return the jobs that TensorFlow's servers connect to, all except the evaluator."""
    return {job: list(tasks) for job, tasks in cluster.jobs.items() if job != "evaluator"}


def chief_of(cluster: ClusterSpec) -> Task:
    """Return the coordinator of a parameter-server job; raise ValueError if there is none."""
    first = cluster.tasks[0]
    if first.type != "chief":
        raise ValueError(
            f"{cluster.source}: parameter_server needs a chief, which coordinates; the jobs are "
            f"{', '.join(cluster.jobs)}. Add the job chief with one address (tfdist launch "
            "--chief ...)."
        )
    return first


def _wait_for_end(
    task: Task,
    chief: Presence,
    farewell: threading.Event,
    start_timeout: float,
    return_timeout: float,
) -> str:
    """Wait until the job has ended and return the reason; raise PeersAbsent if it never began."""
    previous: float | None = 0.0
    next_line = PROGRESS_S
    while True:
        absent_s = chief.absent_seconds()
        if absent_s is None:
            if previous is not None:
                log.info("%s: the chief at %s answers", task, chief.address)
            next_line = PROGRESS_S
        elif farewell.is_set():
            return f"the chief at {chief.address} has finished"
        elif chief.seen and absent_s > return_timeout:
            return (
                f"the chief at {chief.address} is gone and did not come back within "
                f"{return_timeout:g} s"
            )
        elif not chief.seen and absent_s > start_timeout:
            raise PeersAbsent(
                f"{task} serves at {task.address}, but no chief answered at {chief.address} within "
                f"{start_timeout:g} s. Start the chief with this cluster, and let this machine "
                "connect to it"
            )
        elif previous is None:
            log.warning(
                "%s: the chief at %s is gone; waiting %g s for it to come back",
                task,
                chief.address,
                return_timeout,
            )
        elif absent_s > next_line:
            log.warning(
                "%s has waited for the chief at %s for %.0f s", task, chief.address, absent_s
            )
            next_line += PROGRESS_S
        previous = absent_s
        if farewell.wait(POLL_S):
            time.sleep(LEAVING_S)


def _farewell_receiver(farewell: threading.Event) -> tf.Graph:
    """Make the function that `end_servers` calls; it exists as long as the returned graph."""

    def receive(*words):
        if len(words) != 1 or words[0] != _FAREWELL:
            raise RuntimeError(
                "a tf.py_function or tf.numpy_function of the coordinator cannot run on a worker "
                "or ps"
            )
        farewell.set()
        return True

    with tf.Graph().as_default() as graph:
        token = tf.numpy_function(receive, [tf.constant(b"")], tf.bool).op.get_attr("token")
    if token != _FIRST_FUNCTION:
        log.debug(
            "%s is not the first Python function in this process, so the chief's farewell cannot "
            "be received",
            token,
        )
    return graph


def _settings(task: Task) -> tf.compat.v1.ConfigProto:
    threads = tf.config.threading
    settings = tf.compat.v1.ConfigProto(
        # 0: the environment's choice
        intra_op_parallelism_threads=threads.get_intra_op_parallelism_threads(),
        inter_op_parallelism_threads=max(
            MIN_THREADS, threads.get_inter_op_parallelism_threads() or os.cpu_count() or 1
        ),
    )
    if task.type == "ps":
        settings.device_count["GPU"] = 0
        return settings
    settings.gpu_options.allow_growth = True
    seen = [gpu.name.rpartition(":")[2] for gpu in tf.config.get_visible_devices("GPU")]
    if seen:
        settings.gpu_options.visible_device_list = ",".join(seen)
    else:
        settings.device_count["GPU"] = 0
    return settings


def check_host(cluster: ClusterSpec, task: Task) -> None:
    """Run `ClusterSpec.check_host`, but ignore other tasks' names, which may resolve later."""
    try:
        cluster.check_host()
    except UnresolvedAddress as error:
        if str(task) in error.reasons:
            raise
        log.debug("%s", error)
