"""ssh engine: runs agents on hosts that a flag or a file lists, through the system's ssh."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence

from tfdist.launch.engines.agent_connection import ProcessTransport
from tfdist.launch.engines.fleet import Slot
from tfdist.runtime.guardian import Guardian

# No question on the terminal, and the end of a connection whose network is cut is noticed in 15 s.
OPTIONS = (
    "-oBatchMode=yes",
    "-oConnectTimeout=10",
    "-oServerAliveInterval=5",
    "-oServerAliveCountMax=3",
)
# Exit codes of a shell: the file is missing, or may not be executed.
REMEDIES = dict.fromkeys((126, 127), "name the Python of that host by --remote-python")


class Ssh:
    """The hosts of an ssh launch; see `fleet.Engine`.

    Args:
        hosts: Host and number of its slots, in order.
        guardian: Guardian that kills the ssh clients if this process dies.
        command: Words of the ssh command.
        python: Python of the agents; None for the path of this one.
        gpus_per_task: GPUs of each task; 0 to let each task see all GPUs of its host.
    """

    def __init__(
        self,
        hosts: Sequence[tuple[str, int]],
        guardian: Guardian,
        *,
        command: Sequence[str] = ("ssh",),
        python: str | None = None,
        gpus_per_task: int = 0,
    ):
        self._hosts = tuple(hosts)
        self._guardian = guardian
        self._command = tuple(command)
        self._python = python or sys.executable
        self._gpus_per_task = gpus_per_task
        self._avoided: set[str] = set()

    def allocate(self, count: int, lost: Sequence[Slot]) -> list[Slot]:
        """See `Engine`. A lost host is tried again."""
        slots = [
            Slot(host, host.rpartition("@")[2], str(number), self._gpus(number))
            for host, slots_of_host in self._hosts
            for number in range(slots_of_host)
        ]
        if len(slots) < count:
            raise ValueError(
                f"--hosts: expected at least {count} slots, one for each task, received "
                f"{len(slots)}; write HOST:SLOTS, or launch fewer tasks"
            )
        return sorted(slots, key=lambda slot: slot.host in self._avoided)[:count]

    def avoid(self, slot: Slot, count: int) -> bool:
        """See `Fleet.give_up`."""
        avoided = {*self._avoided, slot.host}
        if sum(slots for host, slots in self._hosts if host not in avoided) < count:
            return False
        self._avoided = avoided
        return True

    def connect(self, slot: Slot) -> ProcessTransport:
        """See `Engine`."""
        agent = shlex.join([self._python, "-m", "tfdist.launch.engines.agent_process"])
        return ProcessTransport(
            [*self._command, *OPTIONS, slot.host, f"exec {agent}"],
            self._guardian,
            remedies=REMEDIES,
        )

    def close(self) -> None:
        """See `Engine`. Nothing is held."""

    def _gpus(self, number: int) -> tuple[tuple[str, str], ...]:
        if not self._gpus_per_task:
            return ()
        first = number * self._gpus_per_task
        gpus = map(str, range(first, first + self._gpus_per_task))
        return (("CUDA_VISIBLE_DEVICES", ",".join(gpus)),)


def parse_hosts(text: str, source: str = "--hosts") -> list[tuple[str, int]]:
    """Parse a list of hosts with their numbers of slots.

    Args:
        text: Hosts as `HOST`, `HOST:SLOTS` or `USER@HOST:SLOTS`, separated by commas or lines.
            Text from "#" to the end of its line is ignored.
        source: Flag or file, for messages.

    Raises:
        ValueError: If an entry has another form, or a host is listed twice.

    Example:
        >>> parse_hosts("a:2,me@b")
        [('a', 2), ('me@b', 1)]
    """
    entries = re.split(r"[,\n]", re.sub(r"#.*", "", text))
    hosts: dict[str, int] = {}
    for entry in filter(None, map(str.strip, entries)):
        match = re.fullmatch(r"((?:[\w.-]+@)?[\w.-]+)(?::([1-9]\d{0,4}))?", entry)
        if not match:
            raise ValueError(f"{source}: expected HOST or HOST:SLOTS, received {entry!r}")
        if match[1] in hosts:
            raise ValueError(
                f"{source}: expected each host once, received {match[1]} twice; write "
                f"{match[1]}:SLOTS"
            )
        hosts[match[1]] = int(match[2] or 1)
    if not hosts:
        raise ValueError(f"{source}: expected at least one host, received none")
    return list(hosts.items())


def read_hosts(path: str) -> list[tuple[str, int]]:
    """Read a file with a list of hosts; see `parse_hosts`.

    Raises:
        ValueError: If the file cannot be read, or is wrong.
    """
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            return parse_hosts(file.read(), f"--hosts-file {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--hosts-file: expected a text file with a host on each line, received {path!r}: "
            f"{error}"
        ) from error
