"""Snapshots become files of one directory, of which the last few are kept; a file is there whole or not at all.

Each has the next number. One that is damaged is passed over for the one before it, with a warning. Who claims the directory is its
only writer from then on.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import tensorflow as tf
from absl import logging

from tfdist.backup import claim
from tfdist.backup.snapshot import Damaged, Snapshot, pack, unpack

SUFFIX = ".tfdist"
_NAME = re.compile(r"snapshot-(\d+)\.tfdist")
_PART = re.compile(rf"(snapshot-\d+\.tfdist|{re.escape(claim.NAME)})(\.\w+)?\.part")
_BUFFER = 1 << 20  # bytes: small arrays reach the file in one call
_CANNOT = (OSError, tf.errors.OpError)


class Found(NamedTuple):
    """A snapshot of a directory, and its number there."""

    number: int
    snapshot: Snapshot


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
        self.reached: Callable[[str], None] = lambda moment: None  # told when a file is "saving", half of it, and "saved"
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
        try:
            names = tf.io.gfile.listdir(self.directory)
        except (tf.errors.NotFoundError, tf.errors.FailedPreconditionError):
            return []
        return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))

    def path(self, number: int) -> str:
        """Of a snapshot."""
        return os.path.join(self.directory, f"snapshot-{number}{SUFFIX}")

    def write(self, snapshot: Snapshot) -> int:
        """Adds a snapshot, and then removes those that are too many.

        Args:
            snapshot: The snapshot.

        Returns:
            Its number.

        Raises:
            OSError: It cannot be written there; what was there before still is.
            Superseded: This process claimed the directory, and another has done so since; nothing was added.
        """
        numbers = self.numbers()
        number = numbers[-1] + 1 if numbers else 0
        path = self.path(number)
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
        self.reached("saved")
        for old in numbers[: len(numbers) + 1 - self.keep]:
            self._remove(self.path(old))
        return number

    def newest(self) -> Found | None:
        """The newest snapshot that is whole; None where there is none.

        Raises:
            Damaged: There are snapshots, and all are damaged.
            ValueError: The newest was written by another version of tfdist.
        """
        numbers = self.numbers()
        for number in reversed(numbers):
            path = self.path(number)
            try:
                return Found(number, self.read(path))
            except (Damaged, *_CANNOT) as error:
                why = str(error) if isinstance(error, Damaged) else f"{path}: cannot be read: {getattr(error, 'message', error)}"
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
        for number in self.numbers():
            self._remove(self.path(number))
        self._remove(os.path.join(self.directory, claim.NAME))
        self._token = None
        with contextlib.suppress(*_CANNOT):
            if not tf.io.gfile.listdir(self.directory):
                tf.io.gfile.rmtree(self.directory)

    def sweep(self) -> None:
        """Removes what writers that were killed left behind; for the only writer, before it writes."""
        with contextlib.suppress(*_CANNOT):
            for name in tf.io.gfile.listdir(self.directory):
                if _PART.fullmatch(name):
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
