"""A cluster becomes numbers: which replicas this process holds; no tensors and no strategies here.

The order of replicas is the order of rows: `tfdist.data.order.rows_of_replicas` says which rows of a global batch each takes.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where this process stands among the replicas.

    Args:
        workers: Processes that train together.
        rank: Index of this one, 0 is the chief.
        local_replicas: Replicas that this process holds; the same number on every worker.
        tasks: Name of each worker by rank, as messages give it.

    >>> place = Placement(workers=2, rank=1, local_replicas=2)
    >>> place.replicas, place.first_replica, place.is_chief
    (4, 2, False)
    """

    workers: int = 1
    rank: int = 0
    local_replicas: int = 1
    tasks: tuple[str, ...] = ()

    @property
    def replicas(self) -> int:
        """Copies of the model in all processes."""
        return self.workers * self.local_replicas

    @property
    def first_replica(self) -> int:
        """Number of the first replica that this process holds."""
        return self.rank * self.local_replicas

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints, logs and console."""
        return self.rank == 0

    def task(self, rank: int) -> str:
        """Name of the worker of this rank, such as `worker:1`."""
        return self.tasks[rank] if self.tasks else f"worker:{rank}"
