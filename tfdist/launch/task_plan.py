"""Task plans: the command, environment and files of each task of a cluster on this host."""

from __future__ import annotations

import dataclasses
import enum
import importlib.machinery
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence

from tfdist.cluster.spec import DATA_WORKERS, ClusterSpec, Task
from tfdist.runtime import launch_protocol

SCRIPT_RUNNER = (sys.executable, "-m", "tfdist.launch.script_runner")


class Role(enum.Enum):
    """Role of a task in its group, which determines what its end means."""

    TRAINS = "trains"  # the job is done when all of these have ended
    EVALUATES = "evaluates"  # may finish its last evaluation after that
    SERVES = "serves"  # never ends by itself; the launcher ends it after that


@dataclasses.dataclass(frozen=True)
class TaskPlan:
    """Plan of one task to start.

    Attributes:
        name: Name of the task, such as "worker:1".
        role: Role of the task.
        argv: Command to execute.
        environ: Complete environment.
        log_path: Path of the file for its output.
        error_path: Path of the file for its uncaught exception.
        progress_path: Path of the file for its heartbeats.
        replaceable: Whether the task may be restarted alone while its group continues, default
            False.
    """

    name: str
    role: Role
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    log_path: str
    error_path: str
    progress_path: str
    replaceable: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """Return the Python program and its arguments for the script runner.

        The result is empty for other commands.
        """
        return (
            self.argv[len(SCRIPT_RUNNER) :]
            if self.argv[: len(SCRIPT_RUNNER)] == SCRIPT_RUNNER
            else ()
        )

    def restarted(self, number: int) -> TaskPlan:
        """Return the plan of the same task for restart `number`, with its own files.

        Number 0 is this plan.
        """
        if not number:
            return self
        stem = f"{self.log_path.removesuffix('.log')}.{number}"
        paths = {
            launch_protocol.ERROR_FILE: f"{stem}.error.json",
            launch_protocol.PROGRESS_FILE: f"{stem}.progress",
        }
        return dataclasses.replace(
            self,
            environ={**self.environ, **paths},
            log_path=f"{stem}.log",
            error_path=paths[launch_protocol.ERROR_FILE],
            progress_path=paths[launch_protocol.PROGRESS_FILE],
        )


def plan_tasks(
    spec: ClusterSpec,
    members: Iterable[Task],
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    log_dir: str,
    attempt: int,
    launch: str = "",
    restarts: int = 0,
    threads: int | None,
    cores: int,
    columns: int | None = None,
    data_workers: Sequence[str] = (),
    chaos: str | None = None,
    standby: bool = False,
    secret: str = "",
    stragglers: str | None = None,
    snapshot_server: str | None = None,
) -> list[TaskPlan]:
    """Plan the tasks of a cluster that run on this host.

    Args:
        spec: Cluster.
        members: Tasks of the cluster that run here.
        argv: Command of each task; see `resolve_command`.
        environ: Environment of the launcher, which the tasks inherit; its variables take precedence
            over the defaults here.
        log_dir: Log directory of this launch; each attempt after the first has its own directory in
            it.
        attempt: Number of the attempt, from 0.
        launch: Unique name of the launch.
        restarts: Number of restarts that the launcher allows, default 0.
        threads: Threads in each thread pool of a task; None for the values in `environ`, else an
            equal share of the cores.
        cores: Number of cores that this process may use.
        columns: Width left for a task's line on the terminal, or None.
        data_workers: Addresses of the data workers to start.
        chaos: Fault plan for the tasks, or None.
        standby: Whether the tasks record their imports for standby processes, default False.
        secret: Secret that the tasks of this launch share; "" (default) for that of `environ`, if
            any.
        stragglers: Definition of a straggler, for which all tasks measure their steps; or None.
        snapshot_server: Name of the process that holds their snapshots in memory, or None.

    Returns:
        One plan per member, then one per data worker.
    """
    members = tuple(members)
    share = str(threads or max(1, cores // (len(members) + len(data_workers))))
    defaults = {
        **dict.fromkeys(launch_protocol.THREAD_VARIABLES, share),
        "PYTHONUNBUFFERED": "1",  # else a pipe delays lines, or loses them in a crash
        # Hides the information lines, some 20 per task; warnings and errors stay.
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }
    if columns:
        defaults["COLUMNS"] = str(columns)
    inherited = {**defaults, **environ}
    if data_workers:
        inherited[DATA_WORKERS] = ",".join(data_workers)

    directory = os.path.join(log_dir, f"attempt-{attempt}") if attempt else log_dir

    def plan(name: str, role: Role, words: Sequence[str], tf_config: str | None) -> TaskPlan:
        stem = os.path.join(directory, log_name(name))
        task_environ = {
            launch_protocol.TASK: name,
            launch_protocol.LAUNCH: launch,
            launch_protocol.LOG_DIR: log_dir,
            launch_protocol.ATTEMPT: str(attempt),
            launch_protocol.RESTARTS: str(restarts),
            launch_protocol.ERROR_FILE: f"{stem}.error.json",
            launch_protocol.PROGRESS_FILE: f"{stem}.progress",
            **(dict.fromkeys(launch_protocol.THREAD_VARIABLES, share) if threads else {}),
            **({} if chaos is None else {launch_protocol.CHAOS: chaos}),
            **({} if stragglers is None else {launch_protocol.STRAGGLERS: stragglers}),
            **(
                {}
                if snapshot_server is None
                else {launch_protocol.SNAPSHOT_SERVER: snapshot_server}
            ),
            **({launch_protocol.IMPORTS_FILE: f"{stem}.imports"} if standby else {}),
            **({launch_protocol.TASK_SECRET: secret} if secret else {}),
        }
        full_environ = {**inherited, **task_environ}
        full_environ.pop("TF_CONFIG", None)  # it would describe another cluster
        full_environ.pop(launch_protocol.TOKEN, None)
        if snapshot_server is None:
            full_environ.pop(launch_protocol.SNAPSHOT_SERVER, None)  # of another launch
        if tf_config is not None:
            full_environ["TF_CONFIG"] = tf_config
        return TaskPlan(
            name=name,
            role=role,
            argv=tuple(words),
            environ=full_environ,
            log_path=f"{stem}.log",
            error_path=f"{stem}.error.json",
            progress_path=f"{stem}.progress",
            # A coordinator continues without a worker, and no task waits for the evaluator.
            replaceable=role is Role.EVALUATES
            or (role is Role.SERVES and name.startswith("worker")),
        )

    plans = []
    for task in members:
        config = spec.for_task(task.type, task.index).to_tf_config()
        plans.append(plan(str(task), role_of(task.type, spec.jobs), argv, config))
    for name, address in zip(data_names(len(data_workers)), data_workers, strict=True):
        plans.append(
            plan(name, Role.SERVES, (*SCRIPT_RUNNER, "-m", "tfdist.data.service", address), None)
        )
    return plans


def data_names(count: int) -> list[str]:
    """Return the names of data workers, which belong to the launch but not to the cluster.

    Example:
        >>> data_names(2)
        ['data:0', 'data:1']
    """
    return [f"data:{number}" for number in range(count)]


def role_of(task_type: str, jobs: Iterable[str]) -> Role:
    """Return the role of a task of this type in a cluster with these jobs.

    Example:
        >>> role_of("worker", ["worker", "ps"]).value
        'trains'
        >>> role_of("worker", ["chief", "worker", "ps"]).value
        'serves'
    """
    # In a parameter-server job the chief is the coordinator: its workers only execute the functions
    # that it sends.
    serving = {"ps", "worker"} if {"ps", "chief"} <= set(jobs) else {"ps"}
    if task_type in serving:
        return Role.SERVES
    return Role.EVALUATES if task_type == "evaluator" else Role.TRAINS


def resolve_command(words: Sequence[str]) -> tuple[str, ...]:
    """Return the command that a task executes; Python programs run in the script runner.

    Args:
        words: `train.py ARGS`, `python train.py ARGS`, `-m MODULE ARGS`, `tfdist train ARGS`, or
            any command.

    Returns:
        The words to execute.

    Raises:
        ValueError: If there is no command, or if its script, module or program does not exist.

    Example:
        >>> resolve_command(["sh", "-c", "echo $TFDIST_TASK"])
        ('sh', '-c', 'echo $TFDIST_TASK')
    """
    if not words:
        raise ValueError(
            "expected a COMMAND after `--`, received none; such as: tfdist launch --workers 2 -- "
            "train.py"
        )
    program = words[0]
    rest = tuple(words[1:])
    # `python` means the interpreter that runs tfdist, as in an activated environment. A path to
    # another interpreter stays unchanged.
    if rest and (re.fullmatch(r"python3?", program) or program == sys.executable):
        if rest[0] == "-m" or rest[0].endswith(".py"):
            return resolve_command(rest)
        return (sys.executable, *rest)
    if program == "-m":
        if not rest:
            raise ValueError("-m: expected a module's name, received nothing")
        return (*SCRIPT_RUNNER, "-m", _module(rest[0]), *rest[1:])
    if program == "tfdist":
        return (*SCRIPT_RUNNER, "-m", "tfdist", *rest)
    if program.endswith(".py"):
        return (*SCRIPT_RUNNER, _script(program), *rest)
    if shutil.which(program) is None:
        hint = (
            "make it executable (chmod +x)"
            if os.path.isfile(program)
            else "check its name and PATH"
        )
        raise ValueError(
            f"COMMAND: expected a program that can be executed, received {program!r}; {hint}"
        )
    return tuple(words)


def log_name(task: str) -> str:
    """Return the stem of a task's file names in the log directory.

    Example:
        >>> log_name("worker:1")
        'worker-1'
    """
    return task.replace(":", "-")


def _script(path: str) -> str:
    if not os.path.isfile(path):
        raise ValueError(
            f"COMMAND: expected a Python file, received {path!r}; there is no such file in "
            f"{os.getcwd()}"
        )
    return path


def _module(name: str) -> str:
    # Find only the outermost package: find_spec of a submodule would import its parents.
    top = name.partition(".")[0]
    module_spec = importlib.machinery.PathFinder.find_spec(
        top, [os.getcwd()]
    ) or importlib.util.find_spec(top)
    if not module_spec:
        raise ValueError(
            f"COMMAND: expected a module that can be imported, received -m {name}; there is no "
            f"{top!r}"
        )
    return name
