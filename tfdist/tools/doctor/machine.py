"""This host becomes facts, without TensorFlow; nothing is judged here."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import tfdist
from tfdist.cluster.handshake import PACKAGES
from tfdist.runtime.launch_protocol import THREAD_VARIABLES, inherited
from tfdist.runtime.resource_limits import cores, memory, quota, read_text

SMI_S = 20.0  # for nvidia-smi, which takes seconds where no process keeps the driver awake
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # a PCI device's vendor, and the beginning of its class


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU as its driver sees it: its name, memory in bytes, all and free, and the word that names this card alone."""

    name: str
    total: int
    free: int
    uuid: str = ""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What doctor knows of a host.

    Attributes:
        python: Version, such as (3, 11, 4).
        versions: Package -> version; None: not installed.
        backend: What the variable KERAS_BACKEND says; None: nothing.
        cards: GPUs on the PCI bus.
        driven: GPUs that the driver has.
        visible: What the variable CUDA_VISIBLE_DEVICES says; None: nothing.
        smi: GPUs with their memory, where nvidia-smi tells.
        available: Bytes of memory that a process may still take here; None: unknown.
        capacity: Bytes of memory of all of them; None: unknown.
        cores: Cores that this process may use.
        machine_cores: Cores of the machine.
        quota: Cores' worth of time that a container may use; None: no limit.
        threads: Variables for numbers of threads that are set.
        shm: Bytes of /dev/shm, free and all; None: there is none.
        files: Files that a process may have open: its limit, and what it may raise it to.
        now: Seconds since the epoch, by this host's clock.
        installed: When tfdist was installed, by the file system.
    """

    python: tuple[int, int, int] = (3, 11, 0)
    versions: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    backend: str | None = None
    cards: int = 0
    driven: int = 0
    visible: str | None = None
    smi: tuple[Card, ...] = ()
    available: int | None = None
    capacity: int | None = None
    cores: int = 1
    machine_cores: int = 1
    quota: float | None = None
    threads: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shm: tuple[int, int] | None = None
    files: tuple[int, int] = (1024, 1024)
    now: float = 0.0
    installed: float = 0.0

    @property
    def gpus(self) -> int:
        """GPUs that a process of TensorFlow would find here."""
        return visible_count(self.driven, self.visible)

    @property
    def shown(self) -> tuple[Card, ...]:
        """Those of `smi` that CUDA shows to a process; none where one of them is not known, as a part of a card is."""
        if self.visible is None:
            return self.smi
        words = [word.strip() for word in self.visible.split(",")][: self.gpus]
        found = [_named(word, self.smi) for word in words]
        return tuple(card for card in found if card) if all(found) else ()


def look(root: str | os.PathLike = "/") -> Machine:
    """Looks at this host.

    Args:
        root: Where proc, sys and dev lie.

    Returns:
        The facts.
    """
    root, told = Path(root), inherited(*THREAD_VARIABLES, "CUDA_VISIBLE_DEVICES", "KERAS_BACKEND")
    available, capacity = memory(root)
    driven = driven_cards(root)
    return Machine(
        python=sys.version_info[:3],
        versions={package: version(package) for package in PACKAGES},
        backend=told.pop("KERAS_BACKEND", None),
        cards=pci_cards(root),
        driven=driven,
        visible=told.pop("CUDA_VISIBLE_DEVICES", None),
        smi=_smi() if driven else (),
        available=available,
        capacity=capacity,
        cores=len(cores()),
        machine_cores=os.cpu_count() or 1,
        quota=quota(root),
        threads=told,
        shm=_space(root / "dev" / "shm"),
        files=resource.getrlimit(resource.RLIMIT_NOFILE),
        now=time.time(),
        installed=os.stat(tfdist.__file__).st_mtime,
    )


def version(package: str) -> str | None:
    """A package's version from its metadata; the package is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def visible_count(driven: int, visible: str | None) -> int:
    """How many of the driver's GPUs CUDA shows to a process; it stops at the first that it does not know.

    Example:
        >>> [visible_count(4, text) for text in (None, "", "-1", "0,2", "1,7,2")]
        [4, 0, 0, 2, 1]
    """
    if visible is None:
        return driven
    count = 0
    for word in visible.split(","):
        word = word.strip()
        if not (word.isdecimal() and int(word) < driven) and not (
            driven and re.match(r"GPU-|MIG-", word)
        ):
            break
        count += 1
    return count


def _named(word: str, cards: Sequence[Card]) -> Card | None:
    """The card that a word of CUDA_VISIBLE_DEVICES names, by number or by the beginning of its own word."""
    if word.isdecimal():
        return cards[int(word)] if int(word) < len(cards) else None
    return next((card for card in cards if word and card.uuid.startswith(word)), None)


def pci_cards(root: Path) -> int:
    """NVIDIA's display and computing cards on the PCI bus, with a driver or without."""
    found = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        found += read_text(device / "vendor") == _NVIDIA and read_text(device / "class").startswith(
            _DISPLAY
        )
    return found


def driven_cards(root: Path) -> int:
    """GPUs that the driver has; of a container's, those that it was given."""
    known = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    given = len(
        [
            entry
            for entry in (root / "dev").glob("nvidia*")
            if re.fullmatch(r"nvidia\d+", entry.name)
        ]
    )
    return min(known, given) if known and given else known


def _space(path: Path) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.free, usage.total


def _smi() -> tuple[Card, ...]:
    """What nvidia-smi says; nothing where it is missing, fails or hangs."""
    query = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,memory.free,uuid",
        "--format=csv,noheader,nounits",
    ]
    cards = []
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        for line in subprocess.run(
            query, capture_output=True, text=True, timeout=SMI_S, check=True
        ).stdout.splitlines():
            name, total, free, uuid = line.rsplit(",", 3)
            cards.append(Card(name.strip(), int(total) << 20, int(free) << 20, uuid.strip()))
    return tuple(cards)
