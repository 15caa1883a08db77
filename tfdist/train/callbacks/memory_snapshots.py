"""Snapshots in the memory of the host, which outlive the training processes.

The chief hands over the snapshot, and each of several workers a part with its rows of sharded
variables and the metrics of its replicas, which so need no collective. Threads do so while the next
steps run.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import logging

from tfdist.backup import claim, state
from tfdist.backup.memory_tier import HeldSnapshot, MemoryTier
from tfdist.backup.shards import Piece
from tfdist.backup.snapshot import Snapshot, numbered
from tfdist.backup.store import StoredSnapshot
from tfdist.runtime.launch_protocol import TRANSIENT_CODE, Launched
from tfdist.runtime.time_account import time_account
from tfdist.train.hooks import Hooks, MetricCopies

IN_MEMORY = -2  # instead of the number of a snapshot
Position = tuple[int, int]  # epoch, and steps of it that are done
# Fact of a snapshot with a part of each worker: first replica of each, and number of replicas.
_LAYOUT = "layout"
METRICS_OF_REPLICAS = "metrics of replicas/"  # prefix of the names of their arrays


class SnapshotLost(TimeoutError):
    """Error for a snapshot in memory that cannot be restored; the next attempt uses the disk."""

    exit_code = TRANSIENT_CODE


class MemorySnapshots:
    """Snapshots in memory of one `fit`.

    Args:
        whole: Client of the snapshot server, for the chief's snapshots and for reading.
        own: Another one, for the part of this worker.
        usable: Whether the server's snapshot is one of this training.
    """

    def __init__(self, whole: MemoryTier, own: MemoryTier, usable: bool):
        self._whole = whole
        self._own = own
        self._usable = usable
        # The server answers when all parts are there, so none may wait for another one here.
        self._threads = concurrent.futures.ThreadPoolExecutor(2, "tfdist-memory")
        self._saving: list[concurrent.futures.Future] = []
        self._is_sharded: bool | None = None
        self._known_layout: list[int] | None = None
        self._unsharded: int | None = None  # bytes of the model without its rows, and of metrics
        self._largest = 0  # bytes of a part, if there are several
        self._held: HeldSnapshot | None = None  # until it is restored
        self._held_parts: list[Snapshot] | None = None

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
            writes: Whether this process writes the snapshots, apart from its own part.
        """
        if memory_freq is None:
            return None
        server = launched.snapshot_server
        if server is None:
            logging.warning(
                "memory_freq: no snapshots in memory, because no process would hold them after "
                "this one ends: `tfdist launch --restarts` starts one on each host, on Linux, if "
                "the hosts can listen at their addresses, but not with --cluster, and neither "
                "`tfdist agent` nor Kubernetes have one."
            )
            return None
        whole, own = (MemoryTier(directory, launched.attempt, server) for _ in range(2))
        holder = claim.holder(directory)
        usable = holder is not None and holder["launch"] == launched.launch
        if writes and not usable:
            whole.drop()
        return cls(whole, own, usable)

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

        All workers call this.

        Args:
            engine: Engine of the model's strategy.

        Raises:
            SnapshotLost: If a part is missing or damaged. The snapshot is dropped then.
        """
        held = self._parts(engine)

        def of(key: str) -> list[Piece]:
            arrays = [(part.facts["first"], part.arrays[key]) for part in held]
            return [
                (first * math.prod(array.shape[1:]), array.reshape(-1)) for first, array in arrays
            ]

        return of

    def metrics(self, engine: Hooks) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the metrics that the workers handed over, as `metric_totals` does.

        All workers call this. If the replicas are those of the snapshot, only the values of this
        worker's replicas are read, and those of others are zeros. The totals are right else.

        Args:
            engine: Engine of the model's strategy.

        Returns:
            The totals, and the values of each replica, float64 `[replicas, ...]`. The lists are
            empty if the snapshot itself has the metrics.

        Raises:
            SnapshotLost: If a part is missing or damaged. The snapshot is dropped then.
        """
        assert self._held is not None
        held = self._parts(engine)
        totals: list[np.ndarray] = []
        tables: list[np.ndarray] = []
        for i, aggregation in enumerate(held[0].facts["aggregations"] if held else ()):
            parts = [
                (part.facts["first"], part.arrays[f"{METRICS_OF_REPLICAS}{i}"]) for part in held
            ]
            if aggregation is None:
                totals.append(parts[0][1][0])
                tables.append(np.zeros(0))
                continue
            replicas = self._held.snapshot.facts[_LAYOUT][-1]
            table = np.zeros([replicas, *parts[0][1].shape[1:]])
            for first, values in parts:
                table[first : first + len(values)] = values
            tables.append(table)
            totals.append(
                table.sum(0)
                if aggregation == "sum"
                else table.mean(0)
                if aggregation == "mean"
                else table[0]
            )
        return totals, tables

    def restored(self) -> None:
        """Free what was only needed to restore."""
        self._held = None
        self._held_parts = None

    def save(
        self,
        model: Any,
        engine: Hooks,
        position: Position,
        snapshot: Snapshot | None,
        copies: Sequence[MetricCopies] = (),
        values: Sequence[Any] = (),
    ) -> None:
        """Hand over a snapshot, once earlier ones are handed over.

        All workers call this at the same step.

        Args:
            model: Model whose sharded variables are saved.
            engine: Engine of the model's strategy.
            position: Epoch, and steps of it that are done.
            snapshot: The chief's snapshot; None on other workers.
            copies: Copies of the variables of the metrics; none if the chief saves the metrics.
            values: Values of these copies, one after the other.
        """
        self._finish()
        if self._is_sharded is None:
            self._is_sharded = state.is_sharded(model)
        parts = 1  # the chief's
        if self._is_sharded or copies:
            layout = self._layout(engine)
            parts = len(layout)  # and one of each worker
            rows = state.rows_of_model(model) if self._is_sharded else {}
            if self._unsharded is None:
                self._unsharded = state.unsharded_bytes(model) + sum(
                    copy.shape.num_elements() * copy.dtype.size
                    for each in copies
                    for copy in each.copies
                )
            self._largest = self._unsharded + sum(each.nbytes for each in rows.values())
            part = functools.partial(self._put_part, rows, copies, values, engine.replicas()[1])
            self._saving.append(
                self._threads.submit(part, position, self._index(engine), parts, self._largest)
            )
            if snapshot is not None:
                facts = {**snapshot.facts, _LAYOUT: layout}
                snapshot = dataclasses.replace(snapshot, facts=facts)
        if snapshot is not None:
            self._saving.append(
                self._threads.submit(self._whole.put, snapshot, position, 0, parts, self._largest)
            )

    def _put_part(
        self,
        rows: dict[str, np.ndarray],
        copies: Sequence[MetricCopies],
        values: Sequence[Any],
        first: int,
        *where: Any,
    ) -> None:
        """Hand over the part of this worker, whose first replica is given; see `save`."""
        left = iter(values)
        metrics = [np.stack([np.asarray(next(left)) for _ in each.copies]) for each in copies]
        facts = {"first": first, "aggregations": [each.aggregation for each in copies]}
        self._own.put(Snapshot({**rows, **numbered(METRICS_OF_REPLICAS, metrics)}, facts), *where)

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
            self._own.close()

    def _layout(self, engine: Hooks) -> list[int]:
        """Return the first replica of each worker, and the number of replicas.

        All workers make the first call together.
        """
        if self._known_layout is None:
            replicas, first = engine.replicas()
            rows = engine.all_gather([float(first)])
            self._known_layout = [*(int(row[0]) for row in rows), replicas]
        return self._known_layout

    def _index(self, engine: Hooks) -> int:
        """Return the index of this worker's part."""
        return 1 + self._layout(engine).index(engine.replicas()[1])

    def _parts(self, engine: Hooks) -> list[Snapshot]:
        """Return the parts that this worker needs: all, or only its own one.

        Its own one, which its host mostly holds, suffices if the replicas are those of the
        snapshot.
        """
        assert self._held is not None
        if self._held_parts is None:
            indices = range(1, self._held.parts)
            if indices and self._held.snapshot.facts[_LAYOUT] == self._layout(engine):
                own = self._index(engine)
                indices = range(own, own + 1)
            self._held_parts = self._whole.parts(self._held, indices)
        if self._held_parts is None:
            self._whole.drop()
            raise SnapshotLost(
                "memory_freq: a part of the snapshot in memory is missing or damaged. The next "
                "attempt resumes from the disk."
            )
        return self._held_parts

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
