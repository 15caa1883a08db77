"""A cluster and a user's command become what each task executes, in which environment; nothing starts here."""

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
    """What a task's end means to its group."""

    TRAINS = "trains"  # the work is done when all of these have ended
    EVALUATES = "evaluates"  # may finish its last evaluation then
    SERVES = "serves"  # never ends by itself; is ended then


@dataclasses.dataclass(frozen=True)
class TaskPlan:
    """One task to start.

    Attributes:
        name: "worker:1".
        role: What its end means.
        argv: What to execute.
        environ: Its whole environment.
        log_path: The file for its output.
        error_path: The file for its uncaught exception.
        progress_path: The file for its signs of life.
        replaceable: Whether it may be started again alone, while its group goes on.
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
        """The Python program and its arguments, which the script runner runs; of other commands none."""
        return (
            self.argv[len(SCRIPT_RUNNER) :]
            if self.argv[: len(SCRIPT_RUNNER)] == SCRIPT_RUNNER
            else ()
        )

    def life(self, number: int) -> TaskPlan:
        """The same task started once more, with files of its own; life 0 is this one."""
        if not number:
            return self
        stem = f"{self.log_path.removesuffix('.log')}.{number}"
        paths = {
            launch_protocol.ERROR_FILE: f"{stem}.error.json",
            launch_protocol.PROGRESS_FILE: f"{stem}.progress",
        }
        return dataclasses.replace(
            self, environ={**self.environ, **paths}, log_path=f"{stem}.log", error_path=paths[launch_protocol.ERROR_FILE],
            progress_path=paths[launch_protocol.PROGRESS_FILE],
        )  # fmt: skip


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
) -> list[TaskPlan]:
    """Plans the tasks of a cluster that run on this host.

    Args:
        spec: The cluster.
        members: Its tasks that run here.
        argv: What each executes; see `resolve_command`.
        environ: The launcher's own environment, which the tasks inherit; what it sets wins over our defaults.
        log_dir: Directory of this launch; each attempt after the first has a directory of its own in it.
        attempt: 0, 1, ...
        launch: Names the launch.
        restarts: How often the launcher starts again after failures.
        threads: Threads of each task's pools; None: what `environ` says, else the cores shared evenly.
        cores: Cores that this process may use.
        columns: Width left for a task's line on the terminal, if there is one.
        data_workers: Addresses of the processes to start that read data for them.
        chaos: Faults that tasks inject into themselves.
        standby: Whether tasks are to record what they import, for standby processes.

    Returns:
        One plan per member, then one per data worker.
    """
    members = tuple(members)
    share = str(threads or max(1, cores // (len(members) + len(data_workers))))
    defaults = {
        **dict.fromkeys(launch_protocol.THREAD_VARIABLES, share),
        "PYTHONUNBUFFERED": "1",  # into a pipe, lines would come late or, after a crash, never
        "TF_CPP_MIN_LOG_LEVEL": "1",  # without information lines, some 20 per task; warnings and errors stay
    }
    if columns:
        defaults["COLUMNS"] = str(columns)
    inherited = {**defaults, **environ}
    if data_workers:
        inherited[DATA_WORKERS] = ",".join(data_workers)

    directory = os.path.join(log_dir, f"attempt-{attempt}") if attempt else log_dir

    def plan(name: str, role: Role, words: Sequence[str], tf_config: str | None) -> TaskPlan:
        stem = os.path.join(directory, log_name(name))
        told = {
            launch_protocol.TASK: name,
            launch_protocol.LAUNCH: launch,
            launch_protocol.LOG_DIR: log_dir,
            launch_protocol.ATTEMPT: str(attempt),
            launch_protocol.RESTARTS: str(restarts),
            launch_protocol.ERROR_FILE: f"{stem}.error.json",
            launch_protocol.PROGRESS_FILE: f"{stem}.progress",
            **(dict.fromkeys(launch_protocol.THREAD_VARIABLES, share) if threads else {}),
            **({} if chaos is None else {launch_protocol.CHAOS: chaos}),
            **({launch_protocol.IMPORTS_FILE: f"{stem}.imports"} if standby else {}),
        }
        whole = {**inherited, **told}
        whole.pop("TF_CONFIG", None)  # of another cluster
        if tf_config is not None:
            whole["TF_CONFIG"] = tf_config
        return TaskPlan(
            name=name,
            role=role,
            argv=tuple(words),
            environ=whole,
            log_path=f"{stem}.log",
            error_path=f"{stem}.error.json",
            progress_path=f"{stem}.progress",
            # Coordinators go on without a worker, and nobody waits for the evaluator's results.
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
    """The names of data workers, which are tasks of the launch but of no cluster.

    Example:
        >>> data_names(2)
        ['data:0', 'data:1']
    """
    return [f"data:{number}" for number in range(count)]


def role_of(task_type: str, jobs: Iterable[str]) -> Role:
    """What a task of this type does in a cluster of these jobs.

    Example:
        >>> role_of("worker", ["worker", "ps"]).value, role_of("worker", ["chief", "worker", "ps"]).value
        ('trains', 'serves')
    """
    # In a parameter-server job the chief is the coordinator: its workers only execute what it sends them.
    serving = {"ps", "worker"} if {"ps", "chief"} <= set(jobs) else {"ps"}
    if task_type in serving:
        return Role.SERVES
    return Role.EVALUATES if task_type == "evaluator" else Role.TRAINS


def resolve_command(words: Sequence[str]) -> tuple[str, ...]:
    """Makes of what the user typed what a task executes: Python programs go through the script runner.

    Args:
        words: `train.py ARGS`, `python train.py ARGS`, `-m MODULE ARGS`, `tfdist train ARGS`, or any command.

    Returns:
        The words to execute.

    Raises:
        ValueError: There is no command, or its script, module or program does not exist.

    Example:
        >>> resolve_command(["sh", "-c", "echo $TFDIST_TASK"])
        ('sh', '-c', 'echo $TFDIST_TASK')
    """
    if not words:
        raise ValueError(
            "expected a COMMAND after `--`, received none; such as: tfdist launch --workers 2 -- train.py"
        )
    program, rest = words[0], tuple(words[1:])
    # `python` is the one that runs tfdist, as in an activated environment; a path to another one stays as it is.
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
    """The stem of a task's files in the log directory.

    Example:
        >>> log_name("worker:1")
        'worker-1'
    """
    return task.replace(":", "-")


def _script(path: str) -> str:
    if not os.path.isfile(path):
        raise ValueError(
            f"COMMAND: expected a Python file, received {path!r}; there is no such file in {os.getcwd()}"
        )
    return path


def _module(name: str) -> str:
    # Only the outermost package is looked for: looking for a submodule would import its parents.
    top = name.partition(".")[0]
    known = importlib.machinery.PathFinder.find_spec(
        top, [os.getcwd()]
    ) or importlib.util.find_spec(top)
    if not known:
        raise ValueError(
            f"COMMAND: expected a module that can be imported, received -m {name}; there is no {top!r}"
        )
    return name
