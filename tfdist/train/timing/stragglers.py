"""Straggler detection: compares the steps of the workers, one window after the other."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

SHARE = 0.5
WINDOW_S = 30.0
MIN_STEPS = 5  # in a window: fewer say nothing


@dataclasses.dataclass(frozen=True)
class Change:
    """Begin or end of an episode in which a worker is a straggler.

    Attributes:
        rank: Rank of the worker.
        begins: Whether the episode begins.
        own: Seconds of a step of this worker, without its wait for others.
        others: Median of the same over the other workers.
    """

    rank: int
    begins: bool
    own: float
    others: float

    @property
    def slower(self) -> float:
        """Return by which share the worker is slower than the median of the others."""
        return self.own / self.others - 1.0 if self.others > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits beyond which a worker is a straggler.

    Attributes:
        share: Share by which a worker's steps take longer than the median of the others'.
        window: Seconds of steps over which they are compared.
    """

    share: float = SHARE
    window: float = WINDOW_S

    @classmethod
    def from_text(cls, text: str | None) -> Limits:
        """Parse "SHARE WINDOW", as the launcher passes it on; None means the defaults.

        Example:
            >>> Limits.from_text("0.3 60")
            Limits(share=0.3, window=60.0)
        """
        return cls(*map(float, text.split())) if text else cls()


class StragglerDetector:
    """Compare the workers in one window after the other.

    A worker is a straggler from the end of a window in which it was too slow until the end of one
    in which it was not.

    Args:
        limits: Definition of a straggler.

    Example:
        >>> detector = StragglerDetector(Limits(0.5, 10.0))
        >>> detector.add([0.2, 0.2, 0.9], steps=10, seconds=10.0)
        [Change(rank=2, begins=True, own=0.09, others=0.02)]
        >>> detector.add([0.2, 0.2, 0.9], steps=10, seconds=10.0)
        []
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._slow: set[int] = set()
        self._busy: list[float] = []
        self._steps = 0
        self._seconds = 0.0

    def add(self, busy: Sequence[float], steps: int, seconds: float) -> list[Change]:
        """Add steps; return what has changed if they complete a window.

        Args:
            busy: Seconds that each worker was busy with these steps, by rank.
            steps: Number of steps.
            seconds: Time that they took.
        """
        if len(self._busy) != len(busy):
            self._busy = [0.0] * len(busy)
        self._busy = [a + max(0.0, b) for a, b in zip(self._busy, busy, strict=True)]
        self._steps += steps
        self._seconds += seconds
        if self._seconds < self._limits.window or self._steps < MIN_STEPS:
            return []
        changes = []
        for rank, own in enumerate(self._busy):
            others = statistics.median(self._busy[:rank] + self._busy[rank + 1 :] or [own])
            is_slow = own > (1.0 + self._limits.share) * others > 0.0
            if is_slow != (rank in self._slow):
                self._slow ^= {rank}
                changes.append(Change(rank, is_slow, own / self._steps, others / self._steps))
        self._busy = []
        self._steps = 0
        self._seconds = 0.0
        return changes
