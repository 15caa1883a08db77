"""Snapshots become files of one directory, of which the last few are kept; a file is there whole or not at all.

Each has the next number. One that is damaged is passed over for the one before it, with a warning. Who claims the directory is its
only writer from then on.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.backup import claim
from tfdist.backup.shards import Piece
from tfdist.backup.snapshot import Damaged, Snapshot, check, layout, pack, unpack

SUFFIX = ".tfdist"
_NAME = re.compile(r"snapshot-(\d+)\.tfdist")
_ROWS = re.compile(r"snapshot-(\d+)\.\w+\.\d+-of-\d+\.rows")
_PART = re.compile(rf"(snapshot-\d+\.tfdist|{_ROWS.pattern}|{re.escape(claim.NAME)})(\.\w+)?\.part")
_BUFFER = 1 << 20  # bytes: small arrays reach the file in one call
_CANNOT = (OSError, tf.errors.OpError)


class Found(NamedTuple):
    """A snapshot of a directory, and its number there."""

    number: int
    snapshot: Snapshot


class Numbers:
    """A flat array that lies in a file, of which only slices are read.

    Args:
        path: Of the file.
        kind: Of the numbers.
        begin: Place of its first byte.
        count: Of the numbers.
    """

    def __init__(self, path: str, kind: np.dtype, begin: int, count: int):
        self._path, self._kind, self._begin, self._count = path, kind, begin, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> np.ndarray:
        first, last, _ = part.indices(self._count)
        with tf.io.gfile.GFile(self._path, "rb") as file:
            file.seek(self._begin + first * self._kind.itemsize)
            return np.frombuffer(file.read((last - first) * self._kind.itemsize), self._kind)


class Store:
    """A directory of snapshots.

    Args:
        directory: Where; also on other file systems that TensorFlow knows. It need not exist.
        keep: How many of the last ones to keep, 1 or more.

    Example:
        >>> import tempfile
        >>> store = Store(tempfile.mkdtemp(), keep=2)
        >>> for epoch in range(4):
        ...     number = store.write(Snapshot({}, {"epoch": epoch}))
        >>> store.numbers(), store.newest()
        ([2, 3], Found(number=3, snapshot=Snapshot(arrays={}, facts={'epoch': 3})))
    """

    def __init__(self, directory: str | os.PathLike, keep: int = 2):
        self.directory = os.fspath(directory)
        self.keep = keep
        self.reached: Callable[[str], None] = lambda moment: (
            None
        )  # told when a file is "saving", half of it, and "saved"
        self._token: str | None = None

    def claim(self, launch: str = "", attempt: int = 0) -> None:
        """Makes this process the directory's only writer; one that never claimed it writes unchecked.

        Args:
            launch: Names the launch that this process belongs to; "": none.
            attempt: Of that launch.

        Raises:
            Superseded: A later attempt of the same launch is the writer.
            OSError: It cannot be written there.
        """
        self._token = claim.claim(self.directory, launch, attempt)

    def numbers(self) -> list[int]:
        """Of the snapshots that are there, oldest first."""
        return _numbers(self._names())

    def path(self, number: int) -> str:
        """Of a snapshot."""
        return os.path.join(self.directory, f"snapshot-{number}{SUFFIX}")

    def next(self) -> int:
        """The number that the next snapshot will have."""
        return _next(self.numbers())

    def write(self, snapshot: Snapshot) -> int:
        """Adds a snapshot, and then removes those that are too many.

        Args:
            snapshot: The snapshot. Rows of it, if there are, are written before, and named in its fact "rows".

        Returns:
            Its number.

        Raises:
            OSError: It cannot be written there; what was there before still is.
            Superseded: This process claimed the directory, and another has done so since; nothing was added.
        """
        names = self._names()
        numbers = _numbers(names)
        number = _next(numbers)
        self._write(self.path(number), snapshot)
        self.reached("saved")
        self._keep([*numbers, number][-self.keep :], names)
        return number

    def rows_path(self, number: int, token: str, rank: int, workers: int) -> str:
        """Of the rows that one worker holds of a snapshot's sharded variables.

        Args:
            number: Of the snapshot.
            token: Tells it from other attempts to write one of this number; letters and digits.
            rank: Of the worker.
            workers: How many there are.
        """
        return os.path.join(self.directory, f"snapshot-{number}.{token}.{rank}-of-{workers}.rows")

    def write_rows(self, path: str, rows: Snapshot) -> None:
        """Adds a file of rows, which counts once a snapshot names it; every worker writes its own.

        Args:
            path: Of `rows_path`.
            rows: What it holds.

        Raises:
            OSError: It cannot be written there.
        """
        self._write(path, rows)

    def pieces(self, snapshot: Snapshot) -> Callable[[str], list[Piece]]:
        """What finds a snapshot's sharded variables, by their keys; of the pieces, what is sliced is read.

        Args:
            snapshot: Of `newest`, which has checked its files.

        Raises:
            OSError, tf.errors.OpError: A file cannot be read.
        """
        files = {}
        for path in self._rows_of(snapshot):
            with tf.io.gfile.GFile(path, "rb") as file:
                files[path] = layout(file, path)

        def of(key: str) -> list[Piece]:
            found = [(path, each.facts["first"], *each.arrays[key]) for path, each in files.items()]
            return [
                (first * shape[1], Numbers(path, kind, begin, math.prod(shape)))
                for path, first, kind, shape, begin in found
            ]

        return of

    def _rows_of(self, snapshot: Snapshot) -> list[str]:
        return [os.path.join(self.directory, name) for name in snapshot.facts.get("rows", [])]

    def _write(self, path: str, snapshot: Snapshot) -> None:
        part = f"{path}.{self._token}.part" if self._token else f"{path}.part"
        try:
            tf.io.gfile.makedirs(self.directory)
            if "://" in self.directory:
                with tf.io.gfile.GFile(part, "wb") as file:
                    for piece in self._pieces(snapshot):
                        file.write(bytes(piece))
                self._check()
                tf.io.gfile.rename(part, path, overwrite=True)
            else:
                write_local(part, self._pieces(snapshot))
                self._check()
                rename_local(part, path)
        except _CANNOT as error:
            self._remove(part)
            why = getattr(error, "message", None) or str(error)
            raise OSError(
                f"{path}: cannot be written: {why}. Expected a directory with room that this process may write to; the snapshots that are there stay."
            ) from error
        except BaseException:
            self._remove(part)
            raise

    def newest(self) -> Found | None:
        """The newest snapshot that is whole, and whose files of rows all are; None where there is none. Rows are read in pieces, and not kept.

        Raises:
            Damaged: There are snapshots, and all are damaged.
            ValueError: The newest was written by another version of tfdist.
        """
        numbers = self.numbers()
        for number in reversed(numbers):
            path = self.path(number)
            try:
                found = self.read(path)
                for part in self._rows_of(found):
                    with tf.io.gfile.GFile(part, "rb") as file:
                        check(file, part)
                return Found(number, found)
            except (Damaged, *_CANNOT) as error:
                why = (
                    str(error)
                    if isinstance(error, Damaged)
                    else f"{path}: cannot be read, or its rows: {getattr(error, 'message', error)}"
                )
                logging.warning("%s The one before it is taken, if there is one.", why)
        if numbers:
            raise Damaged(
                f"{self.directory}: none of its {len(numbers)} snapshots can be read; the log has the causes. Put one back from elsewhere, or remove the "
                "directory to begin anew."
            )
        return None

    @staticmethod
    def read(path: str) -> Snapshot:
        """One snapshot.

        Raises:
            Damaged: It is not what was written.
            ValueError: It was written by another version of tfdist.
            OSError, tf.errors.OpError: It cannot be read.
        """
        with tf.io.gfile.GFile(path, "rb") as file:
            return unpack(file.read(), path)

    def clear(self) -> None:
        """Removes the snapshots and the claim, and the directory if nothing else is in it.

        Raises:
            Superseded: This process claimed the directory, and another has done so since; nothing was removed.
        """
        self._check()
        self._keep([], self._names())
        self._remove(os.path.join(self.directory, claim.NAME))
        self._token = None
        with contextlib.suppress(*_CANNOT):
            if not tf.io.gfile.listdir(self.directory):
                tf.io.gfile.rmtree(self.directory)

    def sweep(self) -> None:
        """Removes what writers that were killed left behind; for the only writer, before it writes."""
        with contextlib.suppress(*_CANNOT):
            names = self._names()
            for name in filter(_PART.fullmatch, names):
                self._remove(os.path.join(self.directory, name))
            self._keep(_numbers(names), names)

    def _names(self) -> list[str]:
        try:
            return tf.io.gfile.listdir(self.directory)
        except (tf.errors.NotFoundError, tf.errors.FailedPreconditionError):
            return []

    def _keep(self, numbers: list[int], names: list[str]) -> None:
        """Of the files of these names, removes snapshots of other numbers, and then rows of snapshots that are no more or never were."""
        for kind in (_NAME, _ROWS):
            for name in names:
                if (found := kind.fullmatch(name)) and int(found[1]) not in numbers:
                    self._remove(os.path.join(self.directory, name))

    def _pieces(self, snapshot: Snapshot) -> Iterator[bytes | memoryview]:
        for place, piece in enumerate(pack(snapshot)):
            if place == 3:  # the header is written, and no array
                self.reached("saving")
            yield piece

    def _check(self) -> None:
        if self._token is not None:
            claim.check(self.directory, self._token)

    @staticmethod
    def _remove(path: str) -> None:
        with contextlib.suppress(*_CANNOT):
            tf.io.gfile.remove(path)


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))


def _next(numbers: list[int]) -> int:
    return numbers[-1] + 1 if numbers else 0


def write_local(path: str, pieces: Iterable[bytes | memoryview]) -> None:
    """The file is on the disk when this returns."""
    with open(path, "wb", buffering=_BUFFER) as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def rename_local(part: str, path: str) -> None:
    """The name is on the disk when this returns, so that not even a loss of power undoes it."""
    os.replace(part, path)
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
