"""What a worker took of each global batch becomes a record in its file, at once; a record cut short by its end is not read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

_HEAD = 6  # int64 words before the numbers


class Step(NamedTuple):
    """A worker's rows of one global batch.

    Fields:
        epoch: 0, 1, ...
        step: 0, 1, ...
        rows: Rows of the global batch.
        fingerprint: What the pipeline says of the batch, equal on all workers.
        size: Bytes of the worker's rows.
        numbers: Numbers of their examples, int64 `[rows of the worker]`; -1 where a row is none.
    """

    epoch: int
    step: int
    rows: int
    fingerprint: float
    size: int
    numbers: np.ndarray


def append(file: Any, step: Step) -> None:
    """Writes a record into a binary file, in one piece.

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
    """The records of a file, one after the other."""
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
    """Whether so many words are left in a file."""
    return os.fstat(file.fileno()).st_size - file.tell() >= 8 * words
