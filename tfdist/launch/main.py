"""The flags of `tfdist launch` become a supervised group of tasks; nothing starts where they are wrong."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterable, Sequence

from tfdist.addresses import free_ports
from tfdist.cluster import ClusterSpec, Task
from tfdist.launch.flags import parse
from tfdist.launch.guard import Guard
from tfdist.launch.isolation import isolate, warning
from tfdist.launch.output import Console
from tfdist.launch.plan import data_names, plan_tasks, resolve_command
from tfdist.launch.report import short_path
from tfdist.launch.supervisor import Supervisor
from tfdist.launch.text import wants_colour


def main(argv: Sequence[str]) -> int:
    """Runs `tfdist launch`.

    Args:
        argv: The words after `launch`.

    Returns:
        The exit code.
    """
    try:
        return _launch(argv)
    except ValueError as error:
        print(f"tfdist launch: error: {error}\nSee `tfdist launch --help`.", file=sys.stderr)
        return 2


def _launch(argv: Sequence[str]) -> int:
    flags, words = parse(argv)
    spec, members = find_tasks(flags)
    command = resolve_command(words)
    log_dir = make_log_dir(flags.log_dir)
    names = [*map(str, members), *data_names(flags.data_workers or 0)]
    drawer = next((str(task) for task in members if _is_chief(spec, task)), names[0])
    tty = sys.stdout.isatty()
    colour = wants_colour(flags.color, tty, os.environ)
    prefix_width = 0 if flags.no_prefix else max(map(len, names)) + 3
    columns = shutil.get_terminal_size().columns - prefix_width if tty else None
    # A terminal that speaks no UTF-8 shows "?" for a bar's blocks.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    console = Console(
        sys.stdout,
        sys.stderr,
        tasks=names,
        drawer=drawer,
        shown={"all": names, "chief": [drawer], "none": []}[flags.show],
        colour=colour,
        redraw=tty and os.environ.get("TERM") != "dumb",
        prefix=not flags.no_prefix,
        chatter="TF_CPP_MIN_LOG_LEVEL" in os.environ,  # who sets it chooses
    )

    # Now: the guardian is the first child, the tasks' outputs are the first threads, and free ports are found after it.
    isolated = False
    if not flags.cluster and not flags.allow_remote:
        refusal = isolate()
        isolated = refusal is None
        if refusal:
            console.notice(warning(refusal, colour))

    def plan(attempt: int):
        cluster = spec if flags.cluster else _local(flags)
        return plan_tasks(
            cluster,
            members if flags.cluster else cluster.tasks,
            command,
            environ=os.environ,
            log_dir=log_dir,
            attempt=attempt,
            threads=flags.threads,
            cores=_cores(),
            columns=columns,
            data_workers=_data_addresses(flags.data_workers or 0, cluster),
        )

    with Guard() as guard:
        supervisor = Supervisor(
            plan,
            guard,
            console,
            log_dir=log_dir,
            grace=flags.grace,
            evaluator_wait=flags.evaluator_wait,
            isolated=isolated,
            colour=colour,
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
                signal.signal(number, supervisor.interrupt)
        place = "on this host, cut off from the network (--allow-remote lifts that)" if isolated else "on this host"
        console.notice(f"tfdist: {_listing(names)} {place}; logs in {short_path(log_dir)}")
        return supervisor.run()


def find_tasks(flags: argparse.Namespace) -> tuple[ClusterSpec, tuple[Task, ...]]:
    """The cluster, and those of its tasks that are to run here.

    Args:
        flags: Of `parse`.

    Raises:
        ValueError: The cluster file is wrong, or none of its tasks can run here.
    """
    if flags.cluster is None:
        spec = _local(flags)
        return spec, spec.tasks
    spec = ClusterSpec.from_file(flags.cluster, task=flags.task)
    if spec.task is not None:
        members: tuple[Task, ...] = (spec.task,)
    else:
        members = tuple(task for task in spec.tasks if task.address and is_here(task.address))
    if not members:
        listing = ", ".join(f"{task} {task.address}" for task in spec.tasks)
        raise ValueError(
            f"--cluster {flags.cluster}: expected a task with an address of this host, received {listing}; "
            f"run it there, or say which task this is: --task {spec.tasks[0]}"
        )
    for task in members:
        spec.for_task(task.type, task.index).check_host()
    return spec, members


def is_here(address: str) -> bool:
    """Whether host:port is of this host: whether a socket can be bound to one of its IP addresses.

    Example:
        >>> is_here("127.0.0.1:1"), is_here("192.0.2.1:1")  # the second is reserved for documentation
        (True, False)
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        family, _, _, _, place = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((place[0], 0))
        return True
    except OSError:
        return False


def make_log_dir(wanted: str | None) -> str:
    """Makes the directory of this launch.

    Args:
        wanted: --log-dir; None: a new directory of `runs`, which `runs/latest` then points to.

    Returns:
        Its absolute path: a task may change its working directory.
    """
    flag, parent = "--log-dir", wanted or "runs"
    try:
        os.makedirs(parent, exist_ok=True)
        if wanted:
            return os.path.abspath(wanted)
        flag, stamp = "--log-dir (default)", datetime.datetime.now().strftime("launch-%Y%m%d-%H%M%S")
        name, count = stamp, 1
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(parent, name))
                break
            count += 1
            name = f"{stamp}-{count}"
    except OSError as error:
        problem = f"received {parent!r}: {error.strerror}"
        raise ValueError(f"{flag}: expected a directory that can be written, {problem}") from error
    latest = os.path.join(parent, "latest")
    with contextlib.suppress(OSError):  # a convenience, which some file systems do not have
        os.symlink(name, f"{latest}.{os.getpid()}")
        os.replace(f"{latest}.{os.getpid()}", latest)
    return os.path.abspath(os.path.join(parent, name))


def _local(flags: argparse.Namespace) -> ClusterSpec:
    return ClusterSpec.local(
        workers=1 if flags.workers is None else flags.workers,
        ps=flags.ps or 0,
        chief=bool(flags.chief),
        evaluator=bool(flags.evaluator),
    )


def _data_addresses(count: int, cluster: ClusterSpec) -> list[str]:
    """Free addresses on this machine, none of which the cluster has."""
    taken = {task.address for task in cluster.tasks}
    free = [f"127.0.0.1:{port}" for port in free_ports(count + len(taken))] if count else []
    return [address for address in free if address not in taken][:count]


def _is_chief(spec: ClusterSpec, task: Task) -> bool:
    return spec.for_task(task.type, task.index).is_chief


def _cores() -> int:
    # A container or `taskset` may allow fewer than the machine has; macOS does not say.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _listing(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:7])} and {len(names) - 7} more"
