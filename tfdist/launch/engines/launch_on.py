"""`tfdist launch --on ENGINE`: the tasks of a launch on the machines of an engine."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

from tfdist.cluster.spec import ClusterSpec
from tfdist.launch.engines import ray_launch, slurm_launch, ssh_launch
from tfdist.launch.engines.fleet import Engine, Fleet, Prepared
from tfdist.launch.task_plan import TaskPlan
from tfdist.runtime.guardian import Guardian
from tfdist.runtime.launch_protocol import THREAD_VARIABLES

# Variables that an agent sets for its own host, unless the user has set them there.
SET_BY_AGENTS = (*THREAD_VARIABLES, "PYTHONUNBUFFERED", "TF_CPP_MIN_LOG_LEVEL")


class Machines(Protocol):
    """Makes an engine from the flags of a launch. Each value of --on has a module that does."""

    def fill_in(self, flags: argparse.Namespace, environ: Mapping[str, str]) -> None:
        """Check what the flags say about the machines, and set the default of --workers.

        Args:
            flags: Checked flags of the launcher.
            environ: Environment variables of the launcher.

        Raises:
            ValueError: If the machines are wrong, or have fewer places than there are tasks.
            NoRoom: If the engine does not answer.
        """

    def engine(
        self,
        flags: argparse.Namespace,
        guardian: Guardian,
        show_line: Callable[[str], None],
        interrupted: Callable[[], bool],
    ) -> Engine:
        """Return the engine of a launch.

        Args:
            flags: Flags, as `fill_in` returns them.
            guardian: Guardian that kills what runs on this machine if this process dies.
            show_line: Function that shows a line to the user.
            interrupted: Function that returns whether the user has ended the launch.
        """

    def describe(self, flags: argparse.Namespace) -> str:
        """Return where the tasks run, for the launcher's first line."""


MACHINES: dict[str, Machines] = {"ssh": ssh_launch, "slurm": slurm_launch, "ray": ray_launch}


def fill_in(flags: argparse.Namespace) -> None:
    """See `Machines.fill_in`."""
    MACHINES[flags.on].fill_in(flags, os.environ)


@contextlib.contextmanager
def open_fleet(
    flags: argparse.Namespace,
    words: Sequence[str],
    guardian: Guardian,
    log_dir: str,
    interrupted: Callable[[], bool],
    signalled: Callable[[int], None],
    show_line: Callable[[str], None],
    snapshot_secret: str = "",
) -> Iterator[Fleet | None]:
    """Yield the agents of a launch; None without --on.

    Args:
        flags: Flags, as `fill_in` returns them.
        words: COMMAND.
        guardian: Guardian that kills what runs on this machine if this process dies.
        log_dir: Log directory of the launch.
        interrupted: Function that returns whether the user has ended the launch.
        signalled: Function that gets the number of a signal that the scheduler has sent to a task.
        show_line: Function that shows a line to the user.
        snapshot_secret: See `Fleet`.
    """
    if not flags.on:
        yield None
        return
    fleet = Fleet(
        MACHINES[flags.on].engine(flags, guardian, show_line, interrupted),
        words,
        flags.directory or os.getcwd(),
        log_dir=log_dir,
        timeout=flags.join_timeout,
        interrupted=interrupted,
        signalled=signalled,
        snapshot_secret=snapshot_secret,
    )
    with contextlib.closing(fleet):
        yield fleet


def interrupt_once(interrupt: Callable[..., None]) -> Callable[..., None]:
    """Return a signal handler that passes on only the first SIGTERM.

    A scheduler sends SIGTERM to the launcher, to its script and to each agent, and means it once.

    Args:
        interrupt: Signal handler.

    Example:
        >>> handler = interrupt_once(lambda number, frame=None: print("signal", number))
        >>> for number in (15, 15, 2, 2): handler(number)
        signal 15
        signal 2
        signal 2
    """
    seen: list[int] = []

    def handle(number: int, frame: object = None) -> None:
        if number != signal.SIGTERM or not seen:
            seen.append(number)
            interrupt(number, frame)

    return handle


def task_environ(flags: argparse.Namespace) -> dict[str, str]:
    """Return the variables that the user passes on to the tasks.

    Args:
        flags: Flags of the launcher.

    Raises:
        ValueError: If --env names a variable that is not set here.
    """
    environ = {}
    for entry in flags.env or ():
        name, assigned, value = entry.partition("=")
        if not assigned:
            if name not in os.environ:
                raise ValueError(
                    f"--env {name}: expected NAME=VALUE, or a variable that is set here; received "
                    "one that is not set"
                )
            value = os.environ[name]
        environ[name] = value
    return environ


def cluster_of(spec: ClusterSpec, prepared: Sequence[Prepared]) -> ClusterSpec:
    """Return the cluster with the addresses of the tasks' slots.

    Args:
        spec: Cluster with any addresses.
        prepared: One slot per task of the cluster, in the order of `spec.tasks`.
    """
    jobs: dict[str, list[str]] = {job: [] for job in spec.jobs}
    for task, place in zip(spec.tasks, prepared, strict=True):
        jobs[task.type].append(place.address)
    return ClusterSpec({job: tuple(addresses) for job, addresses in jobs.items()})


def for_agents(
    plans: Sequence[TaskPlan], prepared: Sequence[Prepared], kept: Collection[str]
) -> list[TaskPlan]:
    """Return the plans with the agents' commands, without the variables that agents set.

    Args:
        plans: Plans of the tasks, for this machine.
        prepared: The slot of each task.
        kept: Names of variables that the user has set.
    """
    return [
        dataclasses.replace(
            plan,
            argv=place.argv,
            environ={
                name: value
                for name, value in plan.environ.items()
                if name in kept or name not in SET_BY_AGENTS
            },
        )
        for plan, place in zip(plans, prepared, strict=True)
    ]


def describe(flags: argparse.Namespace) -> str:
    """Return where the tasks run, for the launcher's first line."""
    return MACHINES[flags.on].describe(flags)
