"""Memory and CPU limits of this process, from the host and its control groups."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def memory(root: Path = ROOT) -> tuple[int | None, int | None]:
    """Return the available bytes and the total bytes of memory.

    A lower limit of a container replaces the host's values. A value is None if it is unknown.
    """
    rows = {
        name: int(size) * 1024
        for name, size in re.findall(
            r"^(\w+): +(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE
        )
    }
    available = rows.get("MemAvailable")
    capacity = rows.get("MemTotal")
    for most, used in _memory_limits(root):
        if capacity is None or most < capacity:
            capacity = most
            left = max(most - used, 0)
            available = left if available is None else min(available, left)
    return available, capacity


def quota(root: Path) -> float | None:
    """Return the CPU quota of the control groups in cores, or None without a limit."""
    limits = []
    for group in _groups(root):
        most, _, period = read_text(group / "cpu.max").partition(" ")
        if most.isdecimal() and period.isdecimal():
            limits.append(int(most) / int(period))
    old = root / "sys/fs/cgroup/cpu"
    most = read_text(old / "cpu.cfs_quota_us")
    period = read_text(old / "cpu.cfs_period_us")
    if most.isdecimal() and period.isdecimal():
        limits.append(int(most) / int(period))
    return min(limits, default=None)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the allowed and the used bytes of each control group with a limit."""
    old = root / "sys/fs/cgroup/memory"
    groups = [
        *((group, ("memory.max", "memory.current")) for group in _groups(root)),
        (old, ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ]
    for group, names in groups:
        most, used = (read_text(group / name) for name in names)
        if most.isdecimal() and used.isdecimal():
            yield int(most), int(used)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the control group of this process (version 2) and its ancestors."""
    top = root / "sys/fs/cgroup"
    name = next(
        (
            line[3:]
            for line in read_text(root / "proc/self/cgroup").splitlines()
            if line.startswith("0::")
        ),
        "/",
    )
    group = Path(os.path.normpath(f"{top}/{name.lstrip('/')}"))
    while group.is_relative_to(top):
        yield group
        group = group.parent


def cores() -> tuple[int, ...]:
    """Return the numbers of the cores that this process may use.

    A container or `taskset` may allow fewer cores than the machine has. macOS does not report this.
    """
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def read_text(path: Path) -> str:
    """Return the stripped text of a small file, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
