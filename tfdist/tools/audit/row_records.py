"""Binary records of the rows that a worker received in each step.

A record is written at once. The reader skips a record that was cut short by the worker's end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

_HEAD = 6  # int64 words before the numbers


class Step(NamedTuple):
    """A worker's rows of one global batch.

    Attributes:
        epoch: Number of the epoch, from 0.
        step: Number of the step in its epoch, from 0.
        rows: Number of rows of the global batch.
        fingerprint: Fingerprint that the data pipeline computes for the batch; equal on all
            workers.
        size: Bytes of the worker's rows.
        numbers: Numbers of the rows' examples, int64 `[rows of the worker]`; -1 marks a row without
            an example.
    """

    epoch: int
    step: int
    rows: int
    fingerprint: float
    size: int
    numbers: np.ndarray


def append(file: Any, step: Step) -> None:
    """Write a record to a binary file, in one piece.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile(buffering=0) as file:
        ...     append(file, Step(0, 5, 8, 1.5, 100, np.array([3, 1])))
        ...     append(file, Step(0, 6, 8, 1.5, 100, np.array([2, -1])))
        ...     file.truncate(120)
        ...     [(s.step, s.numbers.tolist()) for s in read(file.name)]
        120
        [(5, [3, 1])]
    """
    head = [
        step.epoch,
        step.step,
        step.rows,
        int(np.float64(step.fingerprint).view(np.int64)),
        step.size,
        len(step.numbers),
    ]
    file.write(np.concatenate([np.array(head, np.int64), step.numbers]).astype("<i8").tobytes())


def read(path: str | os.PathLike) -> Iterator[Step]:
    """Yield the complete records of a file, in order."""
    with open(path, "rb") as file:
        while _whole(file, _HEAD):
            epoch, step, rows, fingerprint, size, count = map(
                int, np.frombuffer(file.read(8 * _HEAD), "<i8")
            )
            if not _whole(file, count):
                return
            numbers = np.frombuffer(file.read(8 * count), "<i8").astype(np.int64)
            yield Step(
                epoch, step, rows, float(np.int64(fingerprint).view(np.float64)), size, numbers
            )


def _whole(file: Any, words: int) -> bool:
    """Return whether at least `words` int64 words are left in a file."""
    return os.fstat(file.fileno()).st_size - file.tell() >= 8 * words
