"""Benchmark jobs, and the files through which processes receive their orders."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from pathlib import Path

ORDERS = "orders.jsonl"
END = -1  # order to exit
POLL_S = 0.02  # polling interval for orders and answers, in seconds


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement of a process group.

    Attributes:
        global_batch: Rows of a step over all replicas; 0 in an all-reduce.
        bytes: Bytes that each replica contributes to an all-reduce; 0 in other kinds.
        modes: Scaling modes of the case, from `results.MODES`.
    """

    global_batch: int = 0
    bytes: int = 0
    modes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Job:
    """All measurements of one strategy with one number of replicas.

    Attributes:
        kind: Kind of benchmark, one of `results.KINDS`.
        directory: Directory of the group's files.
        strategy: Name of the strategy.
        replicas: Number of replicas.
        cases: Cases to measure, in turn.
        words: Config flags for `tfdist.run.train_command.parse`; empty in an all-reduce.
        steps: Timed steps of each measurement. Default: 1.
        warmup: Untimed steps before them. Default: 0.
        threads: Threads of each replica. None: TensorFlow's choice.
        communication: Collective communication, as in `make_strategy`. Default: "auto".
        timeout: Longest wait for other workers, in seconds. Default: 300.
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
        """Return the number of processes."""
        return self.replicas if self.strategy == "multi_worker_mirrored" else 1

    @property
    def title(self) -> str:
        """Return a short name of the job, for messages and directories."""
        return f"{self.strategy}-{self.replicas}"

    def to_json(self) -> str:
        """Serialize the job to JSON.

        Example:
            >>> case = Case(64, modes=("strong",))
            >>> job = Job("scaling", "/tmp/x", "mirrored", 2, (case,), ("--config=a.py",))
            >>> Job.from_json(job.to_json()) == job
            True
        """
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Parse the output of `to_json`."""
        values = json.loads(text)
        cases = tuple(Case(**{**case, "modes": tuple(case["modes"])}) for case in values["cases"])
        return cls(**{**values, "cases": cases, "words": tuple(values["words"])})

    def answers(self, rank: int) -> Path:
        """Return the path of the file into which a worker writes its answers."""
        return Path(self.directory) / f"worker-{rank}.events"


def order(job: Job, number: int) -> None:
    """Tell all processes of a group to measure a case. Each process takes orders in sequence.

    Args:
        job: Job of the group.
        number: Index of the case, or `END`.
    """
    with open(os.path.join(job.directory, ORDERS), "a", encoding="utf-8") as file:
        file.write(f"{number}\n")


def wait_for_order(job: Job, received: int) -> int:
    """Wait for the next order and return the index of its case.

    The wait lasts as long as the benchmark lives, which ends its processes.

    Args:
        job: Job of the group.
        received: Number of orders that were taken before.

    Returns:
        The index of the case, or `END`.
    """
    path = os.path.join(job.directory, ORDERS)
    while True:
        with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
            lines = [line for line in file if line.endswith("\n")]
            if len(lines) > received:
                return int(lines[received])
        time.sleep(POLL_S)
