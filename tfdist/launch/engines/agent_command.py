"""Entry point of `tfdist agent`: supervises one task that a scheduler has started."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping

from tfdist.cluster import resolvers
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.launch.engines.launch_on import interrupt_once
from tfdist.launch.failure_report import format_verdict
from tfdist.launch.failures import Failure, Kind
from tfdist.launch.flags import (
    add_color_flag,
    add_hang_flags,
    add_task_flags,
    hang_timeouts,
    split,
)
from tfdist.launch.output import Console
from tfdist.launch.supervisor import Supervisor
from tfdist.launch.task_plan import plan_tasks, resolve_command
from tfdist.launch.terminal_text import wants_colour
from tfdist.runtime.command import COMMON_EXIT_CODES, Command, usage_errors
from tfdist.runtime.guardian import Guardian
from tfdist.runtime.launch_protocol import (
    CONFIGURATION_CODE,
    PREEMPTED_CODE,
    TRANSIENT_CODE,
    gets_repeated_signals,
    note,
    private,
    take_token,
)
from tfdist.runtime.resource_limits import cores

ALONE = "worker:0"  # name of a task without a cluster
FAILURE_FILE = "failure.json"
# Where Kubernetes reads why a container has ended, for `kubectl describe pod`.
TERMINATION_LOG = "/dev/termination-log"
TERMINATION_BYTES = 4096

DESCRIPTION = """\
Runs COMMAND as one task of a cluster that a scheduler has started: put it before the command of
srun, mpirun or a container. It finds the cluster in the environment, ends a task that hangs, writes
why the task failed, and ends with a code that says whether another start can help.

  srun --kill-on-bad-exit=0 --wait=60 tfdist agent -- train.py --epochs 9
  mpirun -n 2 tfdist agent -- train.py --epochs 9
"""


def _run(flags: argparse.Namespace, words: list[str]) -> int:
    take_token()
    with usage_errors():
        command = resolve_command(words)
        log_dir = _log_dir(flags.log_dir)
    spec = resolvers.resolve()
    task = str(spec.task) if spec is not None and spec.task is not None else ALONE
    job, attempt = resolvers.job_of(os.environ)
    tty = sys.stdout.isatty() and not job  # mpirun gives its processes terminals
    colour = wants_colour(flags.color, tty, os.environ)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    console = Console(
        sys.stdout,
        sys.stderr,
        tasks=[task],
        drawer=task,
        shown=[task],
        colour=colour,
        redraw=tty,
        prefix=False,
        chatter="TF_CPP_MIN_LOG_LEVEL" in os.environ,
    )
    alone = spec is None or spec.task is None
    cluster = ClusterSpec({"worker": ("127.0.0.1:1",)}, "worker", 0) if alone else spec
    assert cluster is not None
    assert cluster.task is not None
    (plan,) = plan_tasks(
        cluster,
        [cluster.task],
        command,
        environ=os.environ,
        log_dir=log_dir,
        attempt=attempt,
        launch=job,
        threads=flags.threads,
        cores=max(1, len(cores()) // _tasks_here(cluster, cluster.task)),
        columns=shutil.get_terminal_size().columns if tty else None,
    )
    if alone:
        environ = {name: value for name, value in plan.environ.items() if name != "TF_CONFIG"}
        plan = dataclasses.replace(plan, environ=environ)
    started = time.time()
    with Guardian() as guardian:
        supervisor = Supervisor(
            lambda number: [plan],
            guardian,
            console,
            log_dir=log_dir,
            grace=flags.grace,
            evaluator_wait=0.0,
            hang_timeouts=hang_timeouts(flags),
            colour=colour,
        )
        interrupt = supervisor.interrupt
        if gets_repeated_signals():
            interrupt = interrupt_once(interrupt)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, interrupt)
        outcome, codes = supervisor.attempt(attempt, [plan])
    if supervisor.interrupted:
        code = supervisor.farewell(time.time() - started, codes)
    elif outcome is None:
        code = 0
    else:
        console.notice(format_verdict(outcome.verdict, started, log_dir, colour))
        cause = outcome.verdict.cause
        code = TRANSIENT_CODE if cause.kind is Kind.LOST_PEERS else cause.code
        write_failure(log_dir, cause, os.environ)
    note(log_dir, "over", code=code)
    return code


def write_failure(log_dir: str, failure: Failure, environ: Mapping[str, str]) -> None:
    """Write why a task has failed to its log directory, and in a pod to its termination log.

    Args:
        log_dir: Log directory of the task.
        failure: The failure.
        environ: Environment variables, which show whether this is a pod.
    """
    record = {**dataclasses.asdict(failure), "kind": failure.kind.value}
    # A full disk must not hide the failure itself, which has been printed.
    with contextlib.suppress(OSError):
        path = os.path.join(log_dir, FAILURE_FILE)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}.part")  # a file that is there would keep its mode
        with open(
            f"{path}.part", "w", encoding="utf-8", errors="backslashreplace", opener=private
        ) as file:
            json.dump(record, file)
        os.replace(f"{path}.part", path)
    if "KUBERNETES_SERVICE_HOST" in environ:
        text = f"{failure.task} {failure.how}: {failure.message}\n{failure.traceback}"
        with contextlib.suppress(OSError), open(TERMINATION_LOG, "wb") as log:
            log.write(text.encode("utf-8", "backslashreplace")[:TERMINATION_BYTES])


def _log_dir(requested: str | None) -> str:
    """Create the log directory of this task, and return its absolute path."""
    job, attempt = resolvers.job_of(os.environ)
    rank = next(
        (
            os.environ[name]
            for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
            if name in os.environ
        ),
        "0",
    )
    parent = requested or os.path.join("runs", "agents", job or f"pid-{os.getpid()}")
    path = os.path.join(parent, f"start-{attempt}", f"task-{rank}")
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--log-dir: expected a directory that can be written, received {path!r}: "
            f"{error.strerror}"
        ) from error
    return os.path.abspath(path)


def _tasks_here(cluster: ClusterSpec, task: Task) -> int:
    """Return the number of tasks on the host of a task."""
    host = (task.address or "").rpartition(":")[0]
    return sum((other.address or "").rpartition(":")[0] == host for other in cluster.tasks)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    task = parser.add_argument_group("task")
    add_task_flags(task)
    add_hang_flags(task)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--log-dir", metavar="D", help="directory for the logs of all starts (runs/agents/JOB)"
    )
    add_color_flag(output)


main = Command(
    name="tfdist agent",
    usage="tfdist agent [FLAGS] -- COMMAND ...",
    description=DESCRIPTION,
    exit_codes={
        **COMMON_EXIT_CODES,
        0: "the task succeeded",
        PREEMPTED_CODE: "SIGTERM ended the task after a snapshot; another start resumes training",
        TRANSIENT_CODE: "the task hung, or lost its peers; another start can help",
        CONFIGURATION_CODE: "a configuration error; another start cannot help",
        "else": "the exit code of the task; 128 + signal if a signal ended it",
    },
    run=_run,
    add_flags=_add_flags,
    split=split,
    others="Write COMMAND and its own flags after `--`: tfdist agent [FLAGS] -- COMMAND ...",
    handles_signals=True,
)
