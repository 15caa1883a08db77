"""`tfdist launch --on ray`: what the flags say."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Mapping

from tfdist.cluster.addresses import address_problem
from tfdist.launch.engines.ray_engine import Ray
from tfdist.launch.flags import RAY_TIMEOUT_S, other_tasks
from tfdist.runtime.guardian import Guardian


def fill_in(flags: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Check the address, and set the defaults; see `launch_on.Machines`."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError(
            "--on ray: expected Ray in this Python, found none; pip install 'tfdist[ray]', in the "
            "version of the cluster"
        )
    flags.address = flags.address or "auto"
    if flags.address != "auto" and (problem := address_problem(flags.address)):
        raise ValueError(
            f"--address: {flags.address!r} {problem}; give the HOST:PORT that `ray start` has "
            "printed, from a machine that belongs to the cluster"
        )
    if flags.workers is None:
        flags.workers = max(1 - other_tasks(flags), 0 if flags.chief else 1)


def engine(
    flags: argparse.Namespace,
    guardian: Guardian,
    show_line: Callable[[str], None],
    interrupted: Callable[[], bool],
) -> Ray:
    """Return the engine of a launch; see `launch_on.Machines`."""
    return Ray(
        flags.address,
        cpus_per_task=1 if flags.cpus_per_task is None else flags.cpus_per_task,
        gpus_per_task=flags.gpus_per_task or 0,
        strategy=flags.placement_strategy or "PACK",
        python=flags.remote_python,
        queue_timeout=RAY_TIMEOUT_S if flags.queue_timeout is None else flags.queue_timeout,
        show_line=show_line,
        interrupted=interrupted,
    )


def describe(flags: argparse.Namespace) -> str:
    """Return where the tasks run, for the launcher's first line."""
    return "on nodes of Ray" + ("" if flags.address == "auto" else f" at {flags.address}")
