"""`tfdist launch --on ssh`: the hosts that the flags name."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping

from tfdist.launch.engines import ssh
from tfdist.launch.flags import other_tasks
from tfdist.runtime.guardian import Guardian


def fill_in(flags: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Read the hosts, and set the default of --workers; see `launch_on.Machines`."""
    flags.hosts = (
        ssh.parse_hosts(flags.hosts)
        if flags.hosts is not None
        else ssh.read_hosts(flags.hosts_file)
    )
    slots = sum(slots for _, slots in flags.hosts)
    others = other_tasks(flags)
    if flags.workers is None:
        flags.workers = max(slots - others, 0 if flags.chief else 1)
    if flags.workers + others > slots:
        raise ValueError(
            f"{'--hosts' if flags.hosts_file is None else '--hosts-file'}: expected at least "
            f"{flags.workers + others} slots, one for each task, received {slots}; write "
            "HOST:SLOTS, or launch fewer tasks"
        )


def engine(
    flags: argparse.Namespace,
    guardian: Guardian,
    show_line: Callable[[str], None],
    interrupted: Callable[[], bool],
) -> ssh.Ssh:
    """Return the engine of a launch; see `launch_on.Machines`."""
    return ssh.Ssh(
        flags.hosts,
        guardian,
        command=shlex.split(flags.ssh_command or "ssh"),
        python=flags.remote_python,
        gpus_per_task=flags.gpus_per_task or 0,
    )


def describe(flags: argparse.Namespace) -> str:
    """Return where the tasks run, for the launcher's first line."""
    hosts = [host for host, _ in flags.hosts]
    return f"on {', '.join(hosts[:8])}{' ...' if len(hosts) > 8 else ''} by ssh"
