"""Snapshots in the memory of the host, which outlive the training processes.

The chief hands over the snapshot, and each worker its rows of sharded variables. Threads do so
while the next steps run.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable
from typing import Any

from absl import logging

from tfdist.backup import claim, state
from tfdist.backup.memory_tier import HeldSnapshot, MemoryTier
from tfdist.backup.shards import Piece
from tfdist.backup.snapshot import Snapshot
from tfdist.backup.store import StoredSnapshot
from tfdist.runtime.launch_protocol import TRANSIENT_CODE, Launched
from tfdist.runtime.time_account import time_account
from tfdist.train.hooks import Hooks

IN_MEMORY = -2  # instead of the number of a snapshot
Position = tuple[int, int]  # epoch, and steps of it that are done
_LAYOUT = "layout"  # fact of a sharded snapshot: first replica of each part, number of replicas


class SnapshotLost(TimeoutError):
    """Error for a snapshot in memory that cannot be restored; the next attempt uses the disk."""

    exit_code = TRANSIENT_CODE


class MemorySnapshots:
    """Snapshots in memory of one `fit`.

    Args:
        whole: Client of the snapshot server, for the chief's snapshots and for reading.
        rows: Another one, for this worker's rows of sharded variables.
        usable: Whether the server's snapshot is one of this training.
    """

    def __init__(self, whole: MemoryTier, rows: MemoryTier, usable: bool):
        self._whole = whole
        self._rows = rows
        self._usable = usable
        # The server answers when all parts are there, so none may wait for another one here.
        self._threads = concurrent.futures.ThreadPoolExecutor(2, "tfdist-memory")
        self._saving: list[concurrent.futures.Future] = []
        self._is_sharded: bool | None = None
        self._known_layout: list[int] | None = None
        self._largest = 0  # bytes of a part, if there are several
        self._held: HeldSnapshot | None = None  # until it is restored

    @classmethod
    def open(
        cls, memory_freq: int | None, directory: str, launched: Launched, writes: bool
    ) -> MemorySnapshots | None:
        """Return the snapshots in memory of a directory; None where there are none.

        Call it before this process claims the directory. A snapshot of this launch is not used, and
        the chief drops it, if another launch has claimed the directory since, or if somebody has
        removed the directory.

        Args:
            memory_freq: Number of steps between two of them, or None.
            directory: Absolute path or URL of the directory.
            launched: Settings of the launcher.
            writes: Whether this process writes the snapshots, apart from rows.
        """
        if memory_freq is None:
            return None
        server = launched.snapshot_server
        if server is None:
            logging.warning(
                "memory_freq: no snapshots in memory, because no process would hold them after "
                "this one ends: `tfdist launch --restarts` starts one on each host, on Linux, if "
                "the hosts can listen at their addresses, but not with --cluster."
            )
            return None
        whole, rows = (MemoryTier(directory, launched.attempt, server) for _ in range(2))
        holder = claim.holder(directory)
        usable = holder is not None and holder["launch"] == launched.launch
        if writes and not usable:
            whole.drop()
        return cls(whole, rows, usable)

    def newest(self, stored: StoredSnapshot | None) -> StoredSnapshot | None:
        """Return the snapshot in memory if it is newer than the one on the disk, else that one.

        Args:
            stored: Newest snapshot in the directory.
        """
        held = self._whole.get() if self._usable else None
        if held is None or (stored is not None and held.at <= _position(stored)):
            return stored
        self._held = held
        return StoredSnapshot(IN_MEMORY, held.snapshot)

    def pieces(self, engine: Hooks) -> Callable[[str], list[Piece]]:
        """Return a function that finds the sharded variables of the snapshot by their keys.

        All workers call this. If the replicas are those of the snapshot, each reads only its own
        rows, which its host mostly holds; else all rows.

        Args:
            engine: Engine of the model's strategy.

        Raises:
            SnapshotLost: If rows are missing or damaged. The snapshot is dropped then.
        """
        assert self._held is not None
        parts = range(1, self._held.parts)
        if parts and self._held.snapshot.facts[_LAYOUT] == self._layout(engine):
            own = self._part(engine)
            parts = range(own, own + 1)
        pieces = self._whole.pieces(self._held, parts)
        if pieces is None:
            self._whole.drop()
            raise SnapshotLost(
                "memory_freq: rows of the snapshot in memory are missing or damaged. The next "
                "attempt resumes from the disk."
            )
        return pieces

    def restored(self) -> None:
        """Free what was only needed to restore."""
        self._held = None

    def save_rows(self, model: Any, engine: Hooks, position: Position) -> int:
        """Hand over this worker's rows of sharded variables, once earlier ones are handed over.

        All workers call this at the same step.

        Args:
            model: Model whose sharded variables are saved.
            engine: Engine of the model's strategy.
            position: Epoch, and steps of it that are done.

        Returns:
            The number of parts of the snapshot, of which part 0 is the chief's.
        """
        self._finish()
        if self._is_sharded is None:
            self._is_sharded = state.is_sharded(model)
        if not self._is_sharded:
            return 1
        rows = state.rows_of_model(model)
        parts = len(self._layout(engine))  # the chief's snapshot, and rows of each worker
        self._largest = state.unsharded_bytes(model) + sum(each.nbytes for each in rows.values())
        self._saving.append(
            self._threads.submit(
                self._rows.put,
                Snapshot(rows, {"first": engine.replicas()[1]}),
                position,
                self._part(engine),
                parts,
                self._largest,
            )
        )
        return parts

    def save(self, snapshot: Snapshot, position: Position, parts: int) -> None:
        """Hand over a snapshot; only the chief does.

        Args:
            snapshot: The snapshot.
            position: Epoch, and steps of it that are done.
            parts: Number of its parts, which `save_rows` has returned.
        """
        if self._known_layout is not None:
            facts = {**snapshot.facts, _LAYOUT: self._known_layout}
            snapshot = dataclasses.replace(snapshot, facts=facts)
        self._saving.append(
            self._threads.submit(self._whole.put, snapshot, position, 0, parts, self._largest)
        )

    def end(self, drop: bool) -> None:
        """End the saves of a `fit`.

        Args:
            drop: Whether training is complete, so that nobody needs the snapshot any more.
        """
        try:
            self._finish()
        finally:
            self._threads.shutdown()
            if drop:
                self._whole.drop()
            self._whole.close()
            self._rows.close()

    def _layout(self, engine: Hooks) -> list[int]:
        """Return the first replica of each worker, and the number of replicas.

        All workers make the first call together.
        """
        if self._known_layout is None:
            replicas, first = engine.replicas()
            rows = engine.all_gather([float(first)])
            self._known_layout = [*(int(row[0]) for row in rows), replicas]
        return self._known_layout

    def _part(self, engine: Hooks) -> int:
        """Return the index of the part that has this worker's rows."""
        return 1 + self._layout(engine).index(engine.replicas()[1])

    def _finish(self) -> None:
        """Wait until the last snapshot is handed over, and raise the error if it failed."""
        saving = self._saving
        self._saving = []
        for each in saving:
            if not each.done():
                with time_account().during("save"):
                    each.result()
            each.result()


def _position(stored: StoredSnapshot) -> Position:
    return stored.snapshot.facts["epoch"], stored.snapshot.facts["step"]
