"""`tfdist launch --on slurm`: what the flags and the job around the launcher say."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence

from tfdist.launch.engines import slurm_commands, slurm_job
from tfdist.launch.engines.slurm import Slurm, request_of
from tfdist.launch.flags import QUEUE_TIMEOUT_S, other_tasks
from tfdist.launch.policy import Policy
from tfdist.runtime.cli_arguments import flag_of
from tfdist.runtime.guardian import Guardian
from tfdist.runtime.launch_protocol import PREEMPTED_CODE, TRANSIENT_CODE, read_journal

# Flags that describe an allocation to make.
OF_ALLOCATION = ("nodes", "partition", "time", "account", "slurm_options", "queue_timeout")
START = re.compile(r"start-(\d+)")


def fill_in(flags: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Find the job around this process, and set the default of --workers.

    Args:
        flags: Checked flags of the launcher; gets the attribute `job`, which is None outside of a
            job.
        environ: Environment variables of the launcher.

    Raises:
        ValueError: If the flags do not fit the job.
        NoRoom: If Slurm's controller does not answer.
    """
    slurm_commands.check_installed()
    others = other_tasks(flags)
    flags.job = None
    if "SLURM_JOB_ID" not in environ:
        if flags.workers is None:
            flags.workers = max((flags.nodes or 1) - others, 0 if flags.chief else 1)
        return
    number = environ["SLURM_JOB_ID"]
    for name in OF_ALLOCATION:
        if getattr(flags, name) is not None:
            raise ValueError(
                f"{flag_of(name)}: expected outside of a Slurm job; received within job {number}, "
                "whose nodes the tasks get; give it to `tfdist submit`, sbatch or salloc"
            )
    flags.job = slurm_job.find(number)
    slots = flags.job.slots
    if flags.workers is None:
        flags.workers = max(flags.job.tasks - others, 0 if flags.chief else 1)
    if flags.workers + others > slots:
        raise ValueError(
            f"--workers: expected at most {slots} tasks, for which job {number} has room, received "
            f"{flags.workers + others}; ask for more by --ntasks and --nodes of sbatch or salloc"
        )


def engine(
    flags: argparse.Namespace,
    guardian: Guardian,
    show_line: Callable[[str], None],
    interrupted: Callable[[], bool],
) -> Slurm:
    """Return the engine of a launch; see `launch_on.Machines`."""
    per_task = (
        gpus_of_environ(os.environ, len(flags.job.quotas))
        if flags.job
        else gpus_of_options(shlex.split(flags.slurm_options or ""), flags.gpus_per_task or 0)
    )
    return Slurm(
        flags.job and flags.job.id,
        request(flags),
        python=flags.remote_python,
        gpus_per_task=[flags.gpus_per_task] if flags.job and flags.gpus_per_task else per_task,
        queue_timeout=QUEUE_TIMEOUT_S if flags.queue_timeout is None else flags.queue_timeout,
        show_line=show_line,
        interrupted=interrupted,
    )


def request(flags: argparse.Namespace, name: str = "tfdist") -> list[str]:
    """Return the options of `salloc` or `sbatch` for the tasks of a launch."""
    return request_of(
        flags.workers + other_tasks(flags),
        name=name,
        nodes=flags.nodes,
        partition=flags.partition,
        time_limit=flags.time,
        account=flags.account,
        gpus_per_task=flags.gpus_per_task,
        options=shlex.split(flags.slurm_options or ""),
    )


def gpus_of_environ(environ: Mapping[str, str], components: int) -> list[int]:
    """Return the GPUs of each task, by component of the job around the launcher.

    Args:
        environ: Environment variables of the launcher.
        components: Number of components of a heterogeneous job; 0 for other jobs.

    Example:
        >>> gpus_of_environ({"SLURM_GPUS_PER_TASK": "2"}, 0)
        [2]
        >>> gpus_of_environ({"SLURM_GPUS_PER_TASK_HET_GROUP_1": "a100:1"}, 2)
        [0, 1]
    """
    suffixes = [f"_HET_GROUP_{number}" for number in range(components)] or [""]
    return [gpu_count(environ.get(f"SLURM_GPUS_PER_TASK{suffix}", "")) for suffix in suffixes]


def gpus_of_options(options: Sequence[str], gpus: int) -> list[int]:
    """Return the GPUs of each task, by component of the allocation that options ask for.

    Args:
        options: Options of `salloc`, with ":" between components.
        gpus: GPUs of each task of the first component, unless the options say otherwise.

    Example:
        >>> gpus_of_options(["--exclusive", ":", "--gpus-per-task=2"], 1)
        [1, 2]
    """
    counts = [gpus]
    for option in options:
        name, _, value = option.partition("=")
        if option == ":":
            counts.append(0)
        elif name == "--gpus-per-task":
            counts[-1] = gpu_count(value)
    return counts


def gpu_count(text: str) -> int:
    """Return the number of GPUs in the value of `--gpus-per-task`.

    Example:
        >>> gpu_count("a100:2"), gpu_count("1"), gpu_count("")
        (2, 1, 0)
    """
    last = text.rpartition(":")[2]
    return int(last) if last.isdecimal() else 0


def describe(flags: argparse.Namespace) -> str:
    """Return where the tasks run, for the launcher's first line."""
    if flags.job is None:
        return "on nodes that Slurm gives for this launch"
    return f"on the nodes of Slurm job {flags.job.id}"


def is_requeued(flags: argparse.Namespace) -> bool:
    """Return whether this is a batch job, which its script queues again after 42 and 75."""
    return flags.on == "slurm" and flags.job is not None and flags.job.is_batch


def log_dir(flags: argparse.Namespace) -> str | None:
    """Return the log directory: in a batch job, one for each start of the job."""
    if not is_requeued(flags):
        return flags.log_dir
    parent = flags.log_dir or os.path.join("runs", f"slurm-{flags.job.id}")
    return os.path.join(parent, f"start-{os.environ.get('SLURM_RESTART_COUNT', '0')}")


def restarts_used(directory: str) -> int:
    """Return the number of restarts that the earlier starts of a batch job have used.

    A start that ended with 42 (preempted, saved) counts nothing itself. Any other is followed by
    this start only because a node was lost, or because it was killed before it had saved.

    Args:
        directory: Log directory of this start; those of the earlier ones are beside it.
    """
    here = START.fullmatch(os.path.basename(directory))
    parent = os.path.dirname(directory)
    if here is None or not os.path.isdir(parent):
        return 0
    numbers = [int(found[1]) for name in os.listdir(parent) if (found := START.fullmatch(name))]
    earlier = [number for number in numbers if number < int(here[1])]
    if not earlier:
        return 0
    journal = read_journal(os.path.join(parent, f"start-{max(earlier)}"))
    counts = [line["used"] for line in journal if isinstance(line.get("used"), int)]
    saved = any(line["event"] == "over" and line["code"] == PREEMPTED_CODE for line in journal)
    return max(counts, default=0) + (not saved)


def final_code(
    code: int, policy: Policy, show_line: Callable[[str], None], interrupted: bool = False
) -> int:
    """Return the exit code of a launcher in a batch job.

    75 makes the job's script queue the job again, which counts as a restart. Without a restart that
    is left, the code is 1. A preemption before the tasks could save, such as one while they start,
    also gives 75.

    Args:
        code: Exit code of the launch.
        policy: Restart policy, which knows what is left.
        show_line: Function that shows a line to the user.
        interrupted: Whether a signal to the launcher has ended the launch.
    """
    if interrupted and code == 128 + signal.SIGTERM:
        show_line(
            "tfdist: no task has saved before it ended; this counts as a restart (--restarts)"
        )
        code = TRANSIENT_CODE
    if code != TRANSIENT_CODE or policy.left > 0:
        return code
    show_line(
        f"tfdist: no restart is left for the job (it has used {policy.used}; --restarts): the exit "
        "code is 1 instead of 75, so that the job is not queued again"
    )
    return 1
