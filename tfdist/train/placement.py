"""A cluster becomes numbers: which replicas this process holds, and which rows of a global batch each takes.

No tensors and no strategies here. The order of replicas is the order of rows: replica r takes rows
[r * per, (r + 1) * per) of each global batch, per = ceil(rows / replicas), so that a short batch leaves the last ones short.
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


def share(rows, first: int, count: int, replicas: int, minimum=min):
    """The rows that `count` replicas from `first` on take of a global batch.

    Args:
        rows: Rows in the global batch; a number or, with `minimum=tf.minimum`, a scalar tensor.
        first: First replica.
        count: Number of neighbouring replicas.
        replicas: Replicas altogether.
        minimum: The function that takes the lesser of two.

    Returns:
        Begin and end of the rows, the end excluded.

    >>> [share(10, r, 1, 4) for r in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    >>> [share(2, r, 1, 3) for r in range(3)]
    [(0, 1), (1, 2), (2, 2)]
    """
    per = -(-rows // replicas)
    return minimum(rows, first * per), minimum(rows, (first + count) * per)
