"""Binary records of the rows that a worker received in each step.

A record is written at once. The reader skips a record that was cut short by the worker's end.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Step", "read"]

_HEAD = 7  # int64 words before the numbers; the last holds the CRC-32 of each of both


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
        ...     file.truncate(140)
        ...     [(s.step, s.numbers.tolist()) for s in read(file.name)]
        140
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
    begin = np.array(head, "<i8").tobytes()
    numbers = np.asarray(step.numbers).astype("<i8").tobytes()
    file.write(begin + _checksum(begin) + _checksum(numbers) + numbers)


def read(path: str | os.PathLike) -> Iterator[Step]:
    """Yield the complete records of a file, in order.

    Raises:
        ValueError: If a record is damaged; the message names the file and the byte.
    """
    with open(path, "rb") as file:
        while _whole(file, _HEAD):
            offset = file.tell()
            head = file.read(8 * (_HEAD - 1))
            sums = file.read(8)
            epoch, step, rows, fingerprint, size, count = map(int, np.frombuffer(head, "<i8"))
            is_damaged = sums[:4] != _checksum(head)
            if not is_damaged:
                if not _whole(file, count):
                    return
                content = file.read(8 * count)
                is_damaged = sums[4:] != _checksum(content)
            if is_damaged:
                raise ValueError(
                    f"{os.fspath(path)}, byte {offset}: damaged: the checksum of a record is "
                    "wrong. Run the command again."
                )
            numbers = np.frombuffer(content, "<i8").astype(np.int64)
            yield Step(
                epoch, step, rows, float(np.int64(fingerprint).view(np.float64)), size, numbers
            )


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little")


def _whole(file: Any, words: int) -> bool:
    """Return whether at least `words` int64 words are left in a file."""
    return os.fstat(file.fileno()).st_size - file.tell() >= 8 * words
