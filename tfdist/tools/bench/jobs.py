"""What the processes of one setup are told to measure, as files of a directory that they share; nothing is measured here."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from pathlib import Path

ORDERS = "orders.jsonl"
END = -1  # an order: nothing is left to do
POLL = 0.02  # seconds between two looks for an order, or an answer


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing that a group of processes measures.

    Attributes:
        global_batch: Rows of a step, of all replicas together; 0 in an all-reduce.
        bytes: That each replica gives into an all-reduce; 0 elsewhere.
        modes: Of `results.MODES`.
    """

    global_batch: int = 0
    bytes: int = 0
    modes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Job:
    """What a group of processes is to do: all measurements of one strategy with so many replicas.

    Attributes:
        kind: Of `results.KINDS`.
        directory: Where the group's files lie.
        strategy: Name of the strategy.
        replicas: How many.
        cases: What to measure, by turns.
        words: About the config, for `tfdist.run.parse`; none in an all-reduce.
        steps: Of each measurement, that count.
        warmup: Before them.
        threads: Of each replica; None: TensorFlow's choice.
        communication: As `make_strategy` takes it.
        timeout: Longest wait for other workers, in seconds.
    """

    kind: str
    directory: str
    strategy: str
    replicas: int
    cases: tuple[Case, ...]
    words: tuple[str, ...] = ()
    steps: int = 1
    warmup: int = 0
    threads: int | None = None
    communication: str = "auto"
    timeout: float = 300.0

    @property
    def workers(self) -> int:
        """Processes."""
        return self.replicas if self.strategy == "multi_worker_mirrored" else 1

    @property
    def title(self) -> str:
        """The group in a few words, for messages and directories."""
        return f"{self.strategy}-{self.replicas}"

    def to_json(self) -> str:
        """The job as text.

        Example:
            >>> job = Job("scaling", "/tmp/x", "mirrored", 2, (Case(64, modes=("strong",)),), ("--config=a.py",))
            >>> Job.from_json(job.to_json()) == job
            True
        """
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse of `to_json`."""
        values = json.loads(text)
        cases = tuple(Case(**{**case, "modes": tuple(case["modes"])}) for case in values["cases"])
        return cls(**{**values, "cases": cases, "words": tuple(values["words"])})

    def answers(self, rank: int) -> Path:
        """The file of what a worker has to say."""
        return Path(self.directory) / f"worker-{rank}.events"


def order(job: Job, number: int) -> None:
    """Tells all processes of a group to measure a case; each takes the orders one after another.

    Args:
        job: Of the group.
        number: Of the case.
    """
    with open(os.path.join(job.directory, ORDERS), "a", encoding="utf-8") as file:
        file.write(f"{number}\n")


def wait_for_order(job: Job, taken: int) -> int:
    """The case that the next order names; waits as long as the owner lives (see `tfdist.tools.common.ownership`).

    Args:
        job: Of the group.
        taken: Orders that were taken before.
    """
    path = os.path.join(job.directory, ORDERS)
    while True:
        with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
            lines = [line for line in file if line.endswith("\n")]
            if len(lines) > taken:
                return int(lines[taken])
        time.sleep(POLL)
