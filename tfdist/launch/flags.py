"""Command-line flags of `tfdist launch`: definition and validation."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence

from tfdist.cluster.addresses import address_problem
from tfdist.cluster.spec import DATA_WORKERS
from tfdist.launch.config_options import add_flag
from tfdist.runtime.cli_arguments import flag_of, real, whole
from tfdist.runtime.launch_protocol import Phase

USAGE = "tfdist launch [FLAGS] -- COMMAND ..."
DESCRIPTION = """\
Runs COMMAND once for each task of a cluster. Each task gets its own TF_CONFIG.

  tfdist launch --workers 4 -- train.py --learning_rate 0.1
  tfdist launch --workers 2 -- tfdist train --config=configs/digits.py

  on each host of a cluster file, or for one of its tasks:
  tfdist launch --cluster cluster.yaml -- train.py
  tfdist launch --cluster cluster.yaml --task worker:1 -- train.py

  on each host of a cluster that may grow and shrink:
  tfdist launch --rendezvous a:2222 --max-workers 4 --min-workers 2 --restarts 9 -- train.py

  on hosts that you reach by ssh, from one terminal:
  tfdist launch --on ssh --hosts a:2,b:2 --restarts 9 -- train.py

  on the nodes of a Slurm job, or, outside of one, on nodes that Slurm gives for this launch:
  tfdist launch --on slurm --workers 4 --nodes 2 --time 60 -- train.py

  on the nodes of a Ray cluster, from one of them:
  tfdist launch --on ray --workers 4 -- train.py

COMMAND is a Python file, -m MODULE, `tfdist train`, or any program. Without --cluster,
--rendezvous and --on, all tasks run on this host, on free ports and without access to the network.
Press Ctrl-C to end all tasks, and press it again to kill them at once.
"""


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide the command line into the launcher's words and COMMAND, which follows `--`.

    Example:
        >>> split(["--workers", "4", "--", "train.py", "--lr", "1"])
        (['--workers', '4'], ['train.py', '--lr', '1'])
    """
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def check(flags: argparse.Namespace, words: Sequence[str]) -> None:
    """Check the combination of the flags, and set defaults that depend on several of them.

    Args:
        flags: Flags of the launcher.
        words: COMMAND.

    Raises:
        ValueError: If flags contradict each other. The message names the flag, the expected and the
            received value.
    """
    if flags.cluster is None and flags.task is not None:
        raise ValueError(
            "--task: expected together with --cluster FILE, received alone; without --cluster, all "
            "tasks run on this host"
        )
    if flags.cluster is not None and flags.data_workers is not None:
        raise ValueError(
            "--data-workers: expected without --cluster, received both; start `python -m "
            "tfdist.data.service HOST:PORT` on each host that reads data, and set "
            f"{DATA_WORKERS}=HOST:PORT,... for all tasks"
        )
    counts = {
        "--workers": flags.workers,
        "--ps": flags.ps,
        "--chief": flags.chief,
        "--evaluator": flags.evaluator,
    }
    set_flags = [flag for flag, value in counts.items() if value is not None]
    if flags.cluster is not None and set_flags:
        raise ValueError(
            f"{set_flags[0]}: expected without --cluster, received both; the file {flags.cluster} "
            "lists the tasks"
        )
    _check_engine(flags)
    restarts = flags.restarts or flags.replace_stragglers
    if flags.standby and not restarts and flags.rendezvous is None:
        raise ValueError(
            f"--standby: expected together with --restarts K, received --standby {flags.standby} "
            "alone; standby processes only serve restarts"
        )
    _check_stragglers(flags)
    _check_hosts(flags)
    if flags.ps and not flags.chief:
        raise ValueError(
            f"--ps: expected together with --chief, received --ps {flags.ps} alone; a chief "
            "coordinates the workers of parameter servers"
        )
    if flags.workers == 0 and not flags.chief:
        raise ValueError(
            "--workers: expected at least 1 without --chief, received 0; at least one task must "
            "train"
        )


OF_ENGINES = {  # flags of --on, and the engines that take each
    "hosts": ("ssh",),
    "hosts_file": ("ssh",),
    "ssh_command": ("ssh",),
    "remote_python": ("ssh", "slurm", "ray"),
    "gpus_per_task": ("ssh", "slurm", "ray"),
    "directory": ("ssh", "slurm", "ray"),
    "env": ("ssh", "slurm", "ray"),
    "nodes": ("slurm",),
    "partition": ("slurm",),
    "time": ("slurm",),
    "account": ("slurm",),
    "slurm_options": ("slurm",),
    "queue_timeout": ("slurm", "ray"),
    "address": ("ray",),
    "cpus_per_task": ("ray",),
    "placement_strategy": ("ray",),
}
ENGINES = ("ssh", "slurm", "ray")
JOIN_TIMEOUT_S = 300.0
QUEUE_TIMEOUT_S = 3600.0
STRAGGLER_SHARE = 0.5
STRAGGLER_WINDOW_S = 30.0
RAY_TIMEOUT_S = 300.0  # nodes that are not there within minutes do not come


def other_tasks(flags: argparse.Namespace) -> int:
    """Return the number of tasks that are no workers."""
    return (flags.ps or 0) + bool(flags.chief) + bool(flags.evaluator)


def _check_engine(flags: argparse.Namespace) -> None:
    """Check the combination of --on with other flags."""
    for name, engines in OF_ENGINES.items():
        if getattr(flags, name) is not None and flags.on not in engines:
            raise ValueError(
                f"{flag_of(name)}: expected together with --on {' or '.join(engines)}, received "
                f"{'--on ' + flags.on if flags.on else 'alone'}"
            )
    if flags.on is None:
        return
    for name in ("cluster", "rendezvous", "data_workers", "standby", "check", "allow_remote"):
        if getattr(flags, name) not in (None, False):
            raise ValueError(
                f"{flag_of(name)}: expected without --on, received both; --on {flags.on} starts "
                "the tasks on other machines by itself"
            )
    if flags.on == "ssh" and (flags.hosts is None) == (flags.hosts_file is None):
        raise ValueError(
            "--on ssh: expected either --hosts HOST:SLOTS,... or --hosts-file FILE, received "
            f"{'none' if flags.hosts is None else 'both'}"
        )
    if flags.join_timeout is None:
        flags.join_timeout = JOIN_TIMEOUT_S
    if flags.on == "slurm":
        _check_slurm_options(flags.slurm_options)


def _check_stragglers(flags: argparse.Namespace) -> None:
    """Check --replace-stragglers and its limits, and set `flags.stragglers` for the tasks."""
    given = (flags.replace_stragglers, flags.straggler_share, flags.straggler_window)
    flags.stragglers = None
    if given == (None, None, None):
        return
    for name in ("cluster", "rendezvous"):
        if flags.replace_stragglers and getattr(flags, name) is not None:
            raise ValueError(
                f"--replace-stragglers: expected without {flag_of(name)}, received both; there, "
                "each host has a launcher of its own, which cannot move a worker to another host. "
                "The log and the journal name stragglers: take the slow host away by hand"
            )
    if flags.replace_stragglers and flags.ps:
        raise ValueError(
            "--replace-stragglers: expected without --ps, received both; workers of parameter "
            "servers do not wait for each other"
        )
    share = STRAGGLER_SHARE if flags.straggler_share is None else flags.straggler_share
    window = STRAGGLER_WINDOW_S if flags.straggler_window is None else flags.straggler_window
    flags.stragglers = f"{share:g} {window:g}"


def _check_slurm_options(text: str | None) -> None:
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        raise ValueError(f"--slurm-options: expected words as in a shell: {error}") from error
    if word := next((word for word in words if not word.startswith("-") and word != ":"), None):
        raise ValueError(
            f"--slurm-options: expected options in the form --NAME=VALUE, received {word!r}"
        )


def _check_hosts(flags: argparse.Namespace) -> None:
    """Check the combination of the multi-host flags and set their defaults."""
    of_rendezvous = (
        "token_file",
        "host",
        "max_workers",
        "min_workers",
        "restart_window",
        "host_timeout",
        *(() if flags.on else ("join_timeout",)),
    )
    if flags.rendezvous is None:
        for name in of_rendezvous:
            if getattr(flags, name) is not None:
                raise ValueError(
                    f"{flag_of(name)}: expected together with --rendezvous HOST:PORT, received "
                    "alone"
                )
        return
    if problem := address_problem(flags.rendezvous):
        raise ValueError(f"--rendezvous: {flags.rendezvous!r} {problem}")
    for name in ("cluster", "ps", "chief", "evaluator", "data_workers"):
        if getattr(flags, name) is not None:
            raise ValueError(
                f"{flag_of(name)}: expected without --rendezvous, where all tasks are workers, "
                "received both"
            )
    if flags.max_workers is None:
        raise ValueError(
            "--max-workers: expected the number of workers on all hosts together, which "
            "--rendezvous needs; received nothing"
        )
    if flags.workers == 0:
        raise ValueError("--workers: expected at least 1 with --rendezvous, received 0")
    flags.min_workers = flags.max_workers if flags.min_workers is None else flags.min_workers
    if flags.min_workers > flags.max_workers:
        raise ValueError(
            f"--min-workers: expected at most --max-workers {flags.max_workers}, received "
            f"{flags.min_workers}"
        )
    for name, default in (
        ("restart_window", 30.0),
        ("host_timeout", 5.0),
        ("join_timeout", JOIN_TIMEOUT_S),
    ):
        if getattr(flags, name) is None:
            setattr(flags, name, default)
    for name in ("host_timeout", "join_timeout"):
        if not getattr(flags, name):
            raise ValueError(f"{flag_of(name)}: expected more than 0 seconds, received 0")


def _threads(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"expected auto or a whole number of at least 1, received {text!r}"
        )
    return int(text)


seconds = real("seconds, 0 or more", lambda value: 0 <= value < float("inf"))


def add_task_flags(tasks) -> None:
    """Add the flags of a task that the launcher and a scheduler's agent share to a group."""
    tasks.add_argument(
        "--threads",
        type=_threads,
        metavar="N",
        help="threads per task (auto: the cores of this host / its tasks)",
    )
    tasks.add_argument(
        "--grace",
        type=seconds,
        default=10.0,
        metavar="S",
        help="seconds that tasks have after SIGTERM or SIGINT, before SIGKILL (10)",
    )


def add_hang_flags(faults) -> None:
    """Add the watchdog timeouts to a group."""
    faults.add_argument(
        "--hang-timeout",
        type=seconds,
        default=300.0,
        metavar="S",
        help="seconds without a step after which a task counts as hung (300; 0 means never)",
    )
    faults.add_argument(
        "--start-timeout",
        type=seconds,
        default=1800.0,
        metavar="S",
        help="the same for the first call of a function, which TensorFlow compiles (1800; 0 means "
        "never)",
    )


def add_slurm_flags(group) -> None:
    """Add the flags that ask Slurm for nodes to a group."""
    group.add_argument(
        "--nodes", type=whole(1), metavar="N", help="number of nodes (Slurm's choice)"
    )
    group.add_argument("--partition", metavar="P", help="partition (Slurm's default)")
    group.add_argument(
        "--time",
        type=slurm_time,
        metavar="T",
        help="time limit: MINUTES, HH:MM:SS or DAYS-HH:MM:SS",
    )
    group.add_argument("--account", metavar="A", help="account (Slurm's default)")
    group.add_argument(
        "--slurm-options",
        metavar="WORDS",
        help='other options of salloc or sbatch, such as "--cpus-per-task=8 --exclusive"',
    )
    group.add_argument(
        "--queue-timeout",
        type=seconds,
        metavar="S",
        help="seconds to wait for the nodes (3600, with --on ray 300); after that, exit code 75",
    )


def _add_ray_flags(group) -> None:
    group.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="address of the cluster (auto: RAY_ADDRESS, or the cluster that this machine is in)",
    )
    group.add_argument(
        "--cpus-per-task",
        type=whole(1),
        metavar="C",
        help="CPUs that Ray reserves for each task, which has as many threads (1)",
    )
    group.add_argument(
        "--placement-strategy",
        choices=("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
        help="how Ray places the tasks: on few nodes, on many, on one, or each on its own (PACK)",
    )


def slurm_time(text: str) -> str:
    """Return a time limit that has one of Slurm's forms.

    Example:
        >>> slurm_time("2-12:30"), slurm_time("90")
        ('2-12:30', '90')
        >>> slurm_time("2h")
        Traceback (most recent call last):
        argparse.ArgumentTypeError: expected MINUTES, HH:MM:SS or DAYS-HH:MM:SS, received '2h'
    """
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", text):
        raise argparse.ArgumentTypeError(
            f"expected MINUTES, HH:MM:SS or DAYS-HH:MM:SS, received {text!r}"
        )
    return text


def add_color_flag(output) -> None:
    """Add --color to a group."""
    output.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="whether to color the output (auto: on a terminal, unless NO_COLOR is set)",
    )


def hang_timeouts(flags: argparse.Namespace) -> dict[str, float]:
    """Return the watchdog timeout of each phase in seconds.

    Args:
        flags: Checked flags of the launcher.
    """
    tracing = max(flags.start_timeout, flags.hang_timeout) if flags.start_timeout else 0.0
    bounds = {Phase.RUNNING: flags.hang_timeout, Phase.TRACING: tracing}
    return {phase: seconds for phase, seconds in bounds.items() if seconds}


def add_flags(parser: argparse.ArgumentParser, on: bool = True) -> None:
    """Add the flags of the launcher to a parser.

    Args:
        parser: The parser.
        on: Whether to add --on, default True.
    """
    add_flag(parser)
    local = parser.add_argument_group("a cluster on this machine")
    local.add_argument("--workers", type=whole(0), metavar="N", help="number of workers (1)")
    local.add_argument("--ps", type=whole(0), metavar="M", help="number of parameter servers (0)")
    local.add_argument(
        "--chief", action="store_true", default=None, help="add a chief to the workers"
    )
    local.add_argument(
        "--evaluator", action="store_true", default=None, help="add an evaluator to the workers"
    )
    local.add_argument(
        "--data-workers",
        type=whole(0),
        metavar="N",
        help="number of processes that read data for the tasks (0); see pipeline(service=True)",
    )
    local.add_argument(
        "--allow-remote",
        action="store_true",
        help="give tasks access to the network, and other hosts access to them (always so with "
        "--cluster)",
    )
    written = parser.add_argument_group("several hosts that a file lists")
    written.add_argument(
        "--cluster", metavar="FILE", help="YAML or JSON file with the addresses of each job"
    )
    written.add_argument(
        "--task",
        metavar="worker:1",
        help="task to run here (all tasks with an address of this host)",
    )
    hosts = parser.add_argument_group(
        "several hosts that find each other; run the same command on each"
    )
    hosts.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where the launchers meet: the first host, and a free port on it",
    )
    hosts.add_argument(
        "--token-file",
        metavar="FILE",
        help="file with the secret that all hosts share; without it, the environment variable "
        "TFDIST_TOKEN holds the secret",
    )
    hosts.add_argument(
        "--host",
        metavar="ADDRESS",
        help="address at which other hosts reach this host (the local address of the "
        "connection to the rendezvous)",
    )
    hosts.add_argument(
        "--max-workers",
        type=whole(1),
        metavar="B",
        help="maximum number of workers on all hosts together; --workers counts those of this host",
    )
    hosts.add_argument(
        "--min-workers",
        type=whole(1),
        metavar="A",
        help="minimum number of workers to continue with after hosts are lost (B)",
    )
    hosts.add_argument(
        "--restart-window",
        type=seconds,
        metavar="S",
        help="seconds to wait for a lost host to come back, or for another host to join (30)",
    )
    hosts.add_argument(
        "--host-timeout",
        type=seconds,
        metavar="S",
        help="seconds without a heartbeat after which a host counts as lost (5)",
    )
    hosts.add_argument(
        "--join-timeout",
        type=seconds,
        metavar="S",
        help="seconds within which at least A workers must join, and with --on all hosts must "
        "answer (300)",
    )
    engine = parser.add_argument_group("machines of an engine, from one terminal")
    if on:
        engine.add_argument(
            "--on", choices=ENGINES, help="where to start the tasks; the output comes back here"
        )
    engine.add_argument(
        "--hosts", metavar="A:2,B", help="hosts for --on ssh, with the number of tasks of each (1)"
    )
    engine.add_argument(
        "--hosts-file", metavar="FILE", help="file with HOST or HOST:SLOTS on each line"
    )
    engine.add_argument(
        "--ssh-command", metavar="WORDS", help='ssh and its options, such as "ssh -p 2222" (ssh)'
    )
    engine.add_argument(
        "--remote-python",
        metavar="PATH",
        help="Python with tfdist on the hosts (the path of the Python that runs this command)",
    )
    engine.add_argument(
        "--directory", metavar="DIR", help="working directory of the tasks (the current one)"
    )
    engine.add_argument(
        "--env",
        action="append",
        metavar="NAME=VALUE",
        help="variable for the tasks; NAME alone passes on the value from here; repeatable",
    )
    engine.add_argument(
        "--gpus-per-task",
        type=whole(0),
        metavar="K",
        help="GPUs of each task, by CUDA_VISIBLE_DEVICES (every task sees all GPUs of its host)",
    )
    add_slurm_flags(parser.add_argument_group("nodes of Slurm (--on slurm)"))
    _add_ray_flags(parser.add_argument_group("nodes of Ray (--on ray)"))
    tasks = parser.add_argument_group("tasks")
    add_task_flags(tasks)
    tasks.add_argument(
        "--evaluator-wait",
        type=seconds,
        default=300.0,
        metavar="S",
        help="seconds that the evaluator may take to finish after training (300)",
    )
    tasks.add_argument(
        "--check",
        action="store_true",
        help="run `tfdist doctor` first, and start only if no check fails; with --cluster, on all "
        "hosts at once",
    )
    faults = parser.add_argument_group("failures")
    faults.add_argument(
        "--restarts",
        type=whole(0),
        default=0,
        metavar="K",
        help="maximum number of restarts after failures (0); preemptions do not count",
    )
    faults.add_argument(
        "--standby",
        type=whole(0),
        metavar="N",
        help="number of standby processes, which import TensorFlow beforehand so that a restart is "
        "faster; they take 0.7 GB each (with --restarts: one for each Python task here, if memory "
        "allows; else 0)",
    )
    add_hang_flags(faults)
    faults.add_argument(
        "--replace-stragglers",
        type=whole(0),
        metavar="K",
        help="end the tasks after a snapshot, at most K times, to start a worker that is slower "
        "than the others in another process or on another machine (0); this is no restart",
    )
    faults.add_argument(
        "--straggler-share",
        type=real("a share greater than 0", lambda value: 0 < value < float("inf")),
        metavar="F",
        help="share by which the steps of a slow worker take longer than the median of the others "
        f"({STRAGGLER_SHARE:g})",
    )
    faults.add_argument(
        "--straggler-window",
        type=seconds,
        metavar="S",
        help=f"seconds over which workers are compared ({STRAGGLER_WINDOW_S:g})",
    )
    faults.add_argument(
        "--chaos",
        metavar="PLAN",
        help='faults to inject, such as "kill worker:1@step=37; corrupt newest"; "none" for a '
        "launch without faults to compare with",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--log-dir",
        metavar="D",
        help="directory for the logs of the tasks (a new runs/launch-DATE-TIME)",
    )
    output.add_argument(
        "--show",
        choices=("all", "chief", "none"),
        default="all",
        help="tasks whose output to show (all)",
    )
    add_color_flag(output)
    output.add_argument(
        "--no-prefix", action="store_true", help="do not begin each line with the name of its task"
    )
