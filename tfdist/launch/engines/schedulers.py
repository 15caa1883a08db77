"""Registry and interface of schedulers, which take jobs of `tfdist submit`.

A scheduler is a module that provides the functions of `Scheduler`. To add one, list it here.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

MODULES = {
    "slurm": "tfdist.launch.engines.slurm_scheduler",
    "kubernetes": "tfdist.launch.engines.kubernetes_scheduler",
}


@dataclasses.dataclass(frozen=True)
class JobLine:
    """A job in the list of `tfdist jobs`.

    Attributes:
        id: Identifier that `tfdist logs` and `tfdist cancel` take.
        state: State, in the scheduler's word.
        name: Name of the job.
        time: Time that it has run.
        where: Its nodes, or why it waits for them.
    """

    id: str
    state: str
    name: str
    time: str
    where: str


class Scheduler(Protocol):
    """Takes jobs, and tells about them. Each function raises ValueError or TimeoutError."""

    def is_installed(self) -> bool:
        """Return whether this machine has what reaches the scheduler."""

    def manifest(
        self, flags: argparse.Namespace, launch_words: Sequence[str], command: Sequence[str]
    ) -> str:
        """Return the script or manifest of a job.

        Args:
            flags: Checked flags of `tfdist submit`.
            launch_words: Flags of `tfdist launch` that the user has given.
            command: COMMAND.
        """

    def submit(self, flags: argparse.Namespace, manifest: str) -> str:
        """Send a job; return its id."""

    def jobs(self) -> list[JobLine]:
        """Return the jobs that tfdist has submitted and that are not over."""

    def logs(self, job: str, follow: bool, show: Callable[[str], Any], tell: Callable[[str], Any]):
        """Show the output of a job.

        Args:
            job: Id of the job.
            follow: Whether to wait for more until the job is over.
            show: Function that shows text of the output.
            tell: Function that tells the user a line about the job.
        """

    def cancel(self, job: str) -> None:
        """End a job, and do not start it again."""


def find(name: str | None) -> Scheduler:
    """Return the scheduler with a name, or the one that this machine has.

    Args:
        name: Value of --on; None for the first one that is installed.

    Raises:
        ValueError: If it is not installed, or none is.
    """
    if name is not None:
        return importlib.import_module(MODULES[name])
    known = map(importlib.import_module, MODULES.values())
    installed = next((module for module in known if module.is_installed()), None)
    if installed is None:
        raise ValueError(
            f"--on: expected a scheduler ({', '.join(MODULES)}), found the commands of none in "
            "PATH; run this on a login node, or load the scheduler's module"
        )
    return installed


def add_flag(parser) -> None:
    """Add --on to a parser."""
    parser.add_argument(
        "--on", choices=tuple(MODULES), help="scheduler (the one that this machine has)"
    )
