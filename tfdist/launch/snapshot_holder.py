"""Holder of snapshots in memory: which parts of which snapshots this host has."""

from __future__ import annotations

import dataclasses
import os
import threading

Position = tuple[int, int, int]  # attempt of the launch, epoch, and steps of it that are done
Inventory = dict[Position, tuple[int, list[int]]]  # number of parts, and indices of those held


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a snapshot.

    Attributes:
        run: Directory of the snapshots, by which trainings are distinguished.
        position: Position of the snapshot.
        parts: Number of its parts.
        index: Index of this one.
        descriptor: Descriptor of its memory.
        size: Its bytes.
    """

    run: str
    position: Position
    parts: int
    index: int
    descriptor: int
    size: int


@dataclasses.dataclass
class _Snapshot:
    """Parts of one snapshot.

    Attributes:
        parts: Number of all parts.
        held: Descriptor and bytes of each part that is held, by its index.
    """

    parts: int
    held: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def release(self) -> None:
        """Close the descriptors, which frees the memory that no client has open."""
        for descriptor, _ in self.held.values():
            os.close(descriptor)
        self.held.clear()


class Holder:
    """Snapshots of each directory, by position.

    Whoever learns that a snapshot is complete releases the older ones by `complete`. Newer ones,
    whose parts arrive, are held beside it. Any thread may call any method.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str, dict[Position, _Snapshot]] = {}
        self._attempts: dict[str, int] = {}  # newest one that has put a part here

    def put(self, part: Part) -> int | None:
        """Hold a part that a process of this host hands over; its descriptor is this object's now.

        Args:
            part: The part.

        Returns:
            None; or the later attempt that has put a part, and then this part is not held.
        """
        with self._lock:
            newest = self._attempts.get(part.run, 0)
            if part.position[0] < newest:
                os.close(part.descriptor)
                return newest
            self._attempts[part.run] = part.position[0]
            self._add(part)
            return None

    def add_copy(self, part: Part) -> None:
        """Hold a part that came from another host; its descriptor is this object's now."""
        with self._lock:
            self._add(part)

    def complete(self, run: str, position: Position) -> None:
        """Release what is older than a snapshot, all of whose parts are held by some host."""
        with self._lock:
            snapshots = self._runs.get(run, {})
            for older in [each for each in snapshots if each < position]:
                snapshots.pop(older).release()

    def inventory(self, run: str) -> Inventory:
        """Return which parts are held of the snapshots of a run."""
        with self._lock:
            return {
                position: (snapshot.parts, sorted(snapshot.held))
                for position, snapshot in self._runs.get(run, {}).items()
            }

    def is_whole(self, run: str, position: Position) -> bool:
        """Return whether all parts of a snapshot are held here."""
        with self._lock:
            snapshot = self._runs.get(run, {}).get(position)
            return snapshot is not None and len(snapshot.held) == snapshot.parts

    def get(self, run: str, position: Position, part: int) -> tuple[int, int] | None:
        """Return a descriptor of a part, which the caller closes, and its bytes; None without it.

        Args:
            run: Directory of the snapshots.
            position: Position of the snapshot.
            part: Index of the part.
        """
        with self._lock:
            snapshot = self._runs.get(run, {}).get(position)
            held = snapshot and snapshot.held.get(part)
            return (os.dup(held[0]), held[1]) if held else None

    def drop(self, run: str) -> None:
        """Release all snapshots of a run."""
        with self._lock:
            for snapshot in self._runs.pop(run, {}).values():
                snapshot.release()

    def clear(self) -> None:
        """Release all snapshots, and forget the attempts."""
        with self._lock:
            runs = list(self._runs)
            self._attempts.clear()
        for run in runs:
            self.drop(run)

    def _add(self, part: Part) -> None:
        snapshots = self._runs.setdefault(part.run, {})
        held = snapshots.setdefault(part.position, _Snapshot(part.parts)).held
        replaced = held.pop(part.index, None)
        if replaced is not None:
            os.close(replaced[0])
        held[part.index] = part.descriptor, part.size
