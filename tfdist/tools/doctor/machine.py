"""Facts about this host, collected without TensorFlow."""

from __future__ import annotations

import contextlib
import dataclasses
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
from tfdist.runtime.installed_packages import version_of
from tfdist.runtime.launch_protocol import THREAD_VARIABLES, inherited
from tfdist.runtime.resource_limits import cores, memory, quota, read_text

# Seconds for nvidia-smi, which takes seconds itself if no process keeps the driver awake.
SMI_S = 20.0
_NVIDIA = "0x10de"  # vendor of a PCI device
_DISPLAY = "0x03"  # beginning of the class of a PCI device


@dataclasses.dataclass(frozen=True)
class Card:
    """GPU as its driver reports it.

    Attributes:
        name: Name of the card's model.
        total: Bytes of the card's memory.
        free: Bytes of memory that are free.
        uuid: Identifier of this card alone.
    """

    name: str
    total: int
    free: int
    uuid: str = ""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Facts about a host.

    Attributes:
        python: Version of Python, such as (3, 11, 4).
        versions: Version of each package; None if it is not installed.
        backend: Value of the variable KERAS_BACKEND; None if it is not set.
        cards: Number of GPUs on the PCI bus.
        driven: Number of GPUs that the driver has.
        visible: Value of the variable CUDA_VISIBLE_DEVICES; None if it is not set.
        smi: GPUs with their memory, if nvidia-smi reports them.
        available: Bytes of memory that processes can still take; None if unknown.
        capacity: Bytes of memory in total; None if unknown.
        cores: Number of cores that this process may use.
        machine_cores: Number of cores of the machine.
        quota: CPU time that a container may use, in cores; None if there is no limit.
        threads: Variables for numbers of threads that are set, with their values.
        shm: Bytes of /dev/shm, free and in total; None if there is no /dev/shm.
        files: Limit of open files of a process, and the value to which it may raise the limit.
        now: Seconds since the epoch, by this host's clock.
        installed: Time of tfdist's installation by the file system, in seconds since the epoch.
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
        """Return the number of GPUs that a TensorFlow process would find on this host."""
        return visible_count(self.driven, self.visible)

    @property
    def shown(self) -> tuple[Card, ...]:
        """Return the cards of `smi` that CUDA shows to a process.

        The result is empty if one of them is unknown, for example a part of a card.
        """
        if self.visible is None:
            return self.smi
        words = [word.strip() for word in self.visible.split(",")][: self.gpus]
        cards = [_named(word, self.smi) for word in words]
        return tuple(card for card in cards if card) if all(cards) else ()


def look(root: str | os.PathLike = "/") -> Machine:
    """Collect the facts about this host.

    Args:
        root: Directory that contains proc, sys and dev, default "/".

    Returns:
        The facts.
    """
    root = Path(root)
    variables = inherited(*THREAD_VARIABLES, "CUDA_VISIBLE_DEVICES", "KERAS_BACKEND")
    available, capacity = memory(root)
    driven = driven_cards(root)
    return Machine(
        python=sys.version_info[:3],
        versions={package: version_of(package) for package in PACKAGES},
        backend=variables.pop("KERAS_BACKEND", None),
        cards=pci_cards(root),
        driven=driven,
        visible=variables.pop("CUDA_VISIBLE_DEVICES", None),
        smi=_smi() if driven else (),
        available=available,
        capacity=capacity,
        cores=len(cores()),
        machine_cores=os.cpu_count() or 1,
        quota=quota(root),
        threads=variables,
        shm=_space(root / "dev" / "shm"),
        files=resource.getrlimit(resource.RLIMIT_NOFILE),
        now=time.time(),
        installed=os.stat(tfdist.__file__).st_mtime,
    )


def visible_count(driven: int, visible: str | None) -> int:
    """Count the GPUs of the driver that CUDA shows to a process.

    CUDA ignores all entries after the first one that it does not know.

    Args:
        driven: Number of GPUs that the driver has.
        visible: Value of CUDA_VISIBLE_DEVICES; None if it is not set.

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
    """Return the card that an entry of CUDA_VISIBLE_DEVICES names; None if no card matches.

    The entry is the number of the card, or the beginning of its UUID.
    """
    if word.isdecimal():
        return cards[int(word)] if int(word) < len(cards) else None
    return next((card for card in cards if word and card.uuid.startswith(word)), None)


def pci_cards(root: Path) -> int:
    """Count NVIDIA's display and computing cards on the PCI bus, with or without a driver."""
    count = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        count += read_text(device / "vendor") == _NVIDIA and read_text(device / "class").startswith(
            _DISPLAY
        )
    return count


def driven_cards(root: Path) -> int:
    """Count the GPUs that the driver has.

    In a container, only the GPUs that the container was given are counted.
    """
    known = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    listed = len(
        [
            entry
            for entry in (root / "dev").glob("nvidia*")
            if re.fullmatch(r"nvidia\d+", entry.name)
        ]
    )
    return min(known, listed) if known and listed else known


def _space(path: Path) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.free, usage.total


def _smi() -> tuple[Card, ...]:
    """Return the cards that nvidia-smi reports; none if it is missing, fails or hangs."""
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
