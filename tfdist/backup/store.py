"""Snapshot store: a directory of the last few snapshots, written atomically.

Snapshots are numbered consecutively. A damaged one is skipped with a warning, and the one before it
is used. A process that claims the directory is its only writer from then on.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from absl import logging

from tfdist.backup import claim
from tfdist.backup.shards import Piece
from tfdist.backup.snapshot import Damaged, Snapshot, check, layout, pack, unpack
from tfdist.storage import files

__all__ = ["Store", "StoredSnapshot"]

SUFFIX = ".tfdist"
_NAME = re.compile(r"snapshot-(\d+)\.tfdist")
_ROWS = re.compile(r"snapshot-(\d+)\.\w+\.\d+-of-\d+\.rows")
_PART = re.compile(rf"(snapshot-\d+\.tfdist|{_ROWS.pattern}|{re.escape(claim.NAME)})(\.\w+)?\.part")
_BUFFER = 1 << 20  # bytes, so that small arrays are written in one call


class StoredSnapshot(NamedTuple):
    """Snapshot of a directory, and its number there.

    Attributes:
        number: Number of the snapshot.
        snapshot: The snapshot.
    """

    number: int
    snapshot: Snapshot


class Numbers:
    """Flat array in a file, of which only slices are read.

    Args:
        path: Path of the file.
        kind: Data type of the numbers.
        begin: Position of the first byte in the file.
        count: Number of elements.
    """

    def __init__(self, path: str, kind: np.dtype, begin: int, count: int):
        self._path = path
        self._kind = kind
        self._begin = begin
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> np.ndarray:
        first, last, _ = part.indices(self._count)
        with files.open_read(self._path) as file:
            file.seek(self._begin + first * self._kind.itemsize)
            return np.frombuffer(file.read((last - first) * self._kind.itemsize), self._kind)


class Store:
    """Directory of snapshots.

    Args:
        directory: Path of the directory, or a URL such as "s3://bucket/run"; see
            `tfdist.storage.files`. It need not exist.
        keep: Number of most recent snapshots to keep, 1 or more; 2 by default.

    Example:
        >>> import tempfile
        >>> store = Store(tempfile.mkdtemp(), keep=2)
        >>> for epoch in range(4):
        ...     number = store.write(Snapshot({}, {"epoch": epoch}))
        >>> store.numbers(), store.newest()
        ([2, 3], StoredSnapshot(number=3, snapshot=Snapshot(arrays={}, facts={'epoch': 3})))
    """

    def __init__(self, directory: str | os.PathLike, keep: int = 2):
        self.directory = os.fspath(directory)
        self.keep = keep
        # Called with "saving" when a file is partly written, and with "saved" when it is complete.
        self.on_write: Callable[[str], None] = lambda moment: None
        self._token: str | None = None

    def claim(self, launch: str = "", attempt: int = 0) -> None:
        """Make this process the directory's only writer.

        A process that never claimed the directory writes without a check.

        Args:
            launch: Name of the launch that this process belongs to; "" if there is none.
            attempt: Attempt of that launch.

        Raises:
            Superseded: If a later attempt of the same launch is the writer.
            OSError: If the directory cannot be written.
        """
        self._token = claim.claim(self.directory, launch, attempt)

    def numbers(self) -> list[int]:
        """Return the numbers of the snapshots in the directory, oldest first."""
        return _numbers(self._names())

    def path(self, number: int) -> str:
        """Return the path of a snapshot."""
        return os.path.join(self.directory, f"snapshot-{number}{SUFFIX}")

    def next(self) -> int:
        """Return the number that the next snapshot will have."""
        return _next(self.numbers())

    def write(self, snapshot: Snapshot) -> int:
        """Add a snapshot, and then remove those beyond the number to keep.

        Args:
            snapshot: Snapshot. Files of rows, if there are any, are written before, and named in
                its fact "rows".

        Returns:
            The number of the snapshot.

        Raises:
            OSError: If the directory cannot be written. Earlier snapshots are still there.
            Superseded: If this process claimed the directory, and another one has claimed it since.
                Nothing was added.
        """
        names = self._names()
        numbers = _numbers(names)
        number = _next(numbers)
        self._write(self.path(number), snapshot)
        self.on_write("saved")
        self._keep([*numbers, number][-self.keep :], names)
        return number

    def rows_path(self, number: int, token: str, rank: int, workers: int) -> str:
        """Return the path of one worker's rows of a snapshot's sharded variables.

        Args:
            number: Number of the snapshot.
            token: Letters and digits that distinguish this attempt to write the snapshot from
                others with the same number.
            rank: Rank of the worker.
            workers: Number of workers.
        """
        return os.path.join(self.directory, f"snapshot-{number}.{token}.{rank}-of-{workers}.rows")

    def write_rows(self, path: str, rows: Snapshot) -> None:
        """Add a file of rows. Every worker writes its own.

        The file becomes valid once a snapshot names it.

        Args:
            path: Path that `rows_path` returned.
            rows: Rows of this worker.

        Raises:
            OSError: If the directory cannot be written.
        """
        self._write(path, rows)

    def pieces(self, snapshot: Snapshot) -> Callable[[str], list[Piece]]:
        """Return a function that finds a snapshot's sharded variables by their keys.

        Only the slices that are requested from the pieces are read.

        Args:
            snapshot: Snapshot that `newest` returned, which has checked its files.

        Raises:
            OSError: If a file cannot be read.
        """
        layouts = {}
        for path in self._rows_of(snapshot):
            with files.open_read(path) as file:
                layouts[path] = layout(file, path)

        def of(key: str) -> list[Piece]:
            arrays = [
                (path, each.facts["first"], *each.arrays[key]) for path, each in layouts.items()
            ]
            return [
                (first * shape[1], Numbers(path, kind, begin, math.prod(shape)))
                for path, first, kind, shape, begin in arrays
            ]

        return of

    def _rows_of(self, snapshot: Snapshot) -> list[str]:
        return [os.path.join(self.directory, name) for name in snapshot.facts.get("rows", [])]

    def _write(self, path: str, snapshot: Snapshot) -> None:
        part = f"{path}.{self._token}.part" if self._token else f"{path}.part"
        try:
            files.make_dirs(self.directory)
            if files.through_fsspec(path):
                self._upload(path, snapshot)
            elif files.is_object_store(path):
                self._check()
                files.write_pieces(path, self._pieces(snapshot))
            elif files.is_remote(path):
                files.write_pieces(part, self._pieces(snapshot))
                self._check()
                files.rename(part, path)
            else:
                write_local(part, self._pieces(snapshot))
                self._check()
                rename_local(part, path)
        except OSError as error:
            self._remove(part)
            raise OSError(
                f"{path}: cannot be written: {error.strerror or error}. Expected a writable "
                "directory with free space. Earlier snapshots are kept."
            ) from error
        except BaseException:
            self._remove(part)
            raise

    def _upload(self, path: str, snapshot: Snapshot) -> None:
        """Write a file of an object store, which no process that lost the claim can replace.

        A claim may change between a check of it and the end of an upload. So the upload creates the
        file. If it exists, its writer had claimed the directory before, and the check after that
        finds out whether it is this process.
        """
        self._check()
        if not files.can_create(path):
            files.write_pieces(path, self._pieces(snapshot))
            return
        try:
            files.create_pieces(path, self._pieces(snapshot))
        except FileExistsError:
            self._check()
            files.write_pieces(path, self._pieces(snapshot))

    def newest(self) -> StoredSnapshot | None:
        """Return the newest snapshot that is complete, or None if there are no snapshots.

        A snapshot is complete if all its files of rows are complete too. Rows are read in pieces to
        check them, and not kept in memory.

        Raises:
            Damaged: If there are snapshots, and all are damaged.
            ValueError: If another version of tfdist wrote the newest one.
        """
        numbers = self.numbers()
        for number in reversed(numbers):
            path = self.path(number)
            try:
                snapshot = self.read(path)
                for part in self._rows_of(snapshot):
                    with files.open_read(part) as file:
                        check(file, part)
                return StoredSnapshot(number, snapshot)
            except (Damaged, OSError) as error:
                reason = (
                    str(error)
                    if isinstance(error, Damaged)
                    else f"{path}: cannot be read, or its rows: {error}"
                )
                logging.warning("%s The previous snapshot is used if there is one.", reason)
        if numbers:
            raise Damaged(
                f"{self.directory}: none of its {len(numbers)} snapshots can be read; the log has "
                "the causes. Restore one from a copy, or remove the directory to start from the "
                "beginning."
            )
        return None

    @staticmethod
    def read(path: str) -> Snapshot:
        """Return the snapshot in a file.

        Raises:
            Damaged: If the file is not what was written.
            ValueError: If another version of tfdist wrote the file.
            OSError: If the file cannot be read.
        """
        return unpack(files.read(path), path)

    def clear(self) -> None:
        """Remove the snapshots, the claim, and the directory if nothing else is in it.

        Raises:
            Superseded: If this process claimed the directory, and another one has claimed it since.
                Nothing was removed.
        """
        self._check()
        self._keep([], self._names())
        for name in claim.names(self.directory):
            self._remove(os.path.join(self.directory, name))
        self._token = None
        with contextlib.suppress(OSError):
            if not files.list_dir(self.directory):
                files.remove_tree(self.directory)

    def sweep(self) -> None:
        """Remove the files that killed writers left behind.

        Only the directory's writer may call this, before it writes.
        """
        with contextlib.suppress(OSError):
            names = self._names()
            for name in filter(_PART.fullmatch, names):
                self._remove(os.path.join(self.directory, name))
            self._keep(_numbers(names), names)

    def _names(self) -> list[str]:
        try:
            return files.list_dir(self.directory)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _keep(self, numbers: list[int], names: list[str]) -> None:
        """Remove the snapshots of other numbers, and then the rows that belong to none.

        Args:
            numbers: Numbers of the snapshots to keep.
            names: File names to consider.
        """
        for kind in (_NAME, _ROWS):
            for name in names:
                if (match := kind.fullmatch(name)) and int(match[1]) not in numbers:
                    self._remove(os.path.join(self.directory, name))

    def _pieces(self, snapshot: Snapshot) -> Iterator[bytes | memoryview]:
        for i, piece in enumerate(pack(snapshot)):
            if i == 3:  # the header is written, but no array
                self.on_write("saving")
            yield piece

    def _check(self) -> None:
        if self._token is not None:
            claim.check(self.directory, self._token)

    @staticmethod
    def _remove(path: str) -> None:
        files.remove(path)


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def _next(numbers: list[int]) -> int:
    return numbers[-1] + 1 if numbers else 0


def write_local(path: str, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file, and flush it to disk before returning."""
    with open(path, "wb", buffering=_BUFFER) as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def rename_local(part: str, path: str) -> None:
    """Rename a file, and flush its directory to disk before returning.

    Even a loss of power does not undo the rename.
    """
    os.replace(part, path)
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
