"""Placement of a process among the workers and replicas of a training.

Replicas have the same order as rows: `tfdist.data.order.rows_of_replicas` says which rows of a
global batch each replica takes.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Placement:
    """Position of this process among the workers and replicas.

    Args:
        workers: Number of processes that train together, default 1.
        rank: Index of this process among the workers, from 0, which is the chief.
        local_replicas: Number of replicas that this process holds, default 1; equal on every
            worker.
        tasks: Name of each worker by rank, as messages show it; default `worker:RANK`.

    >>> placement = Placement(workers=2, rank=1, local_replicas=2)
    >>> placement.replicas, placement.first_replica, placement.is_chief
    (4, 2, False)
    """

    workers: int = 1
    rank: int = 0
    local_replicas: int = 1
    tasks: tuple[str, ...] = ()

    @property
    def replicas(self) -> int:
        """Return the number of copies of the model in all processes."""
        return self.workers * self.local_replicas

    @property
    def first_replica(self) -> int:
        """Return the number of the first replica that this process holds."""
        return self.rank * self.local_replicas

    @property
    def is_chief(self) -> bool:
        """Return whether this process writes checkpoints, logs and console output."""
        return self.rank == 0

    def task(self, rank: int) -> str:
        """Return the name of the worker with this rank, such as `worker:1`."""
        return self.tasks[rank] if self.tasks else f"worker:{rank}"
