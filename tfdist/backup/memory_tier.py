"""Memory tier: the newest snapshot in memory that outlives the training process.

A snapshot has the same format and checksum there as in a file. The snapshot server of the host
holds it (`tfdist.runtime.snapshot_protocol`), and that of another host holds a copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from absl import logging

from tfdist.backup.claim import Superseded
from tfdist.backup.snapshot import Snapshot, pack, unpack
from tfdist.runtime import resource_limits
from tfdist.runtime.formatting import format_bytes
from tfdist.runtime.snapshot_protocol import (
    GET_S,
    MESSAGE_S,
    PACKET_BYTES,
    address_of,
    is_own,
)

PARTS_S = 15.0  # for the other workers to hand over their parts of a snapshot
COPY_BYTES_PER_S = 1 << 26  # at least, to another host
LATE_S = 2.0  # for the server to say what it waited for
SUCCESSOR_S = 3.0  # for a server that was killed to have a successor
LATE_SAVES = 2  # in a row, after which no further one is tried
SEGMENTS = 2  # one that the server holds, and one to write the next snapshot into
_PIECES = 512  # at most 1024 in a call of the system
_ROUND = 1 << 20  # bytes: a history that grows needs no new memory at each save


@dataclasses.dataclass(frozen=True)
class HeldSnapshot:
    """Snapshot that the server holds, or one part of it.

    Attributes:
        position: Attempt of the launch, epoch, and steps of it that are done.
        parts: Number of its parts.
        snapshot: The content.
    """

    position: tuple[int, int, int]
    parts: int
    snapshot: Snapshot

    @property
    def at(self) -> tuple[int, int]:
        """Return the epoch, and the steps of it that are done."""
        return self.position[1:]


class MemoryTier:
    """Client of the snapshot server, for one directory of snapshots.

    Where memory is short, or the server does not answer in time, no further snapshot is held. Where
    the server was killed, the next one is. A line in the log says so once. Training goes on, and
    resumes from the disk if it fails.

    Args:
        directory: Directory of the snapshots, by which the server distinguishes trainings.
        attempt: Attempt of the launch.
        server: Name of the server.
        available: Function that returns the available bytes of memory, or None if unknown.
    """

    def __init__(
        self,
        directory: str,
        attempt: int,
        server: str,
        available: Callable[[], int | None] = lambda: resource_limits.memory()[0],
    ):
        self._directory = directory
        self._attempt = attempt
        self._server = server
        self._available = available
        self._connection: socket.socket | None = None
        self._segments: list[_Segment] = []
        self._warned: str | None = None
        self._given_up = False
        self._late = 0  # saves in a row that were not complete in time
        self._patience = SUCCESSOR_S

    def put(
        self,
        snapshot: Snapshot,
        at: Sequence[int],
        part: int = 0,
        parts: int = 1,
        largest: int = 0,
    ) -> bool:
        """Hand over a snapshot, and wait until all its parts are there.

        Args:
            snapshot: The snapshot, or one part of it.
            at: Epoch, and steps of it that are done.
            part: Index of the part.
            parts: Number of parts, each of which another worker may hand over.
            largest: Bytes of the largest part, default those of this one.

        Returns:
            Whether the server holds it now.

        Raises:
            Superseded: If a later attempt of the launch has saved already.
        """
        if self._given_up:
            return False
        pieces = list(pack(snapshot))
        size = sum(map(len, pieces))
        seconds = PARTS_S + max(size, largest) / COPY_BYTES_PER_S
        message = {
            "put": self._directory,
            "attempt": self._attempt,
            "part": part,
            "parts": parts,
            "at": list(at),
            "size": size,
            "seconds": seconds,
        }
        try:
            answer = self._hand_over(message, pieces, seconds)
        except _TooLittleMemory as error:
            self._give_up(str(error))
            return False
        except TimeoutError:
            self._late += 1
            reason = (
                "the snapshot server, or another worker with its part of the snapshot, did not "
                f"answer in {seconds:.3g} s"
            )
            if self._late < LATE_SAVES:  # the worker may have been stopped for some time
                self._close_segments()  # the server may hold either
                self._warn(f"{reason}. The next save tries again to hold a snapshot in memory.")
            else:  # each further one would cost as much time
                self._give_up(reason)
            return False
        except OSError as error:
            self._warn(
                f"the snapshot server does not answer ({error}). Snapshots in {self._directory} "
                "are written as before; each save tries again to hold one in memory."
            )
            return False
        self._late = 0
        if "superseded" in answer:
            raise Superseded(
                f"{self._directory}: attempt {self._attempt} of the launch may no longer save, "
                f"because attempt {answer['superseded']} does. End this process."
            )
        if "failed" in answer:
            self._give_up(f"the hosts could not complete a snapshot: {answer['failed']}")
            return False
        self._segments.reverse()  # the server has released the other one
        if answer["uncopied"]:
            self._warn(
                f"no other host holds a copy of the snapshots of this host ({answer['uncopied']}). "
                f"If this host is lost, training resumes from {self._directory}."
            )
        else:
            self._warned = None
        return True

    def _hand_over(
        self, message: dict[str, Any], pieces: Sequence[bytes | memoryview], seconds: float
    ) -> dict[str, Any]:
        """Write a part into shared memory and send it; return the server's answer."""
        limit: float | None = None  # from the first failure on
        while True:
            segment = self._free_segment(message["size"])
            segment.write(pieces)
            try:
                answer, _ = self._ask(message, segment.descriptor, seconds + LATE_S)
                self._patience = SUCCESSOR_S
                return answer
            except TimeoutError:
                raise
            except OSError:
                # The server may hold either segment, so that neither can be written again.
                self._close_segments()
                limit = limit or time.monotonic() + self._patience
                if time.monotonic() > limit:
                    self._patience = 0.0  # or each save would take that time, if none comes
                    raise
                time.sleep(0.1)

    def get(self, part: int = 0) -> HeldSnapshot | None:
        """Return the newest complete snapshot that the server holds, or None.

        It is None too if it is damaged, or if another version of tfdist saved it.

        Args:
            part: Index of the part of the snapshot.
        """
        try:
            message = {"get": self._directory, "part": part, "attempt": self._attempt}
            answer, descriptor = self._ask(message, seconds=GET_S)
            if descriptor is None:
                return None
            self._close_segments()  # it may be one of them, and must not change
            try:
                content = mmap.mmap(descriptor, answer["size"], prot=mmap.PROT_READ)
            finally:
                os.close(descriptor)
            attempt, epoch, step = answer["position"]
            snapshot = unpack(content, f"{self._directory} (snapshot in memory)")
            return HeldSnapshot((attempt, epoch, step), answer["parts"], snapshot)
        except OSError as error:
            self._warn(
                f"the snapshot server does not answer ({error}). Training resumes from "
                f"{self._directory}."
            )
        except ValueError as error:
            self._warn(f"{error} Training resumes from {self._directory}.")
            self.drop()
        return None

    def parts(self, whole: HeldSnapshot, indices: Iterable[int]) -> list[Snapshot] | None:
        """Return other parts of the held snapshot; None if one is missing or damaged.

        Args:
            whole: Part 0 of the snapshot.
            indices: Indices of the parts.
        """
        found = [self.get(part) for part in indices]
        held = [
            each.snapshot
            for each in found
            if each is not None and (each.position, each.parts) == (whole.position, whole.parts)
        ]
        return held if len(held) == len(found) else None

    def drop(self) -> None:
        """Make the server release what it holds for the directory."""
        with contextlib.suppress(OSError):
            self._ask({"drop": self._directory}, seconds=GET_S)

    def close(self) -> None:
        """Close the connection; the server keeps what it holds."""
        self._close_segments()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _free_segment(self, size: int) -> _Segment:
        """Return the segment that the server does not hold, with room for a size."""
        while len(self._segments) < SEGMENTS:
            self._segments.append(_Segment())
        segment = self._segments[0]
        if segment.capacity < size:
            needed = 2 * (size - segment.capacity)  # what is left must suffice for other processes
            available = self._available()
            if available is not None and available < needed:
                raise _TooLittleMemory(
                    f"{format_bytes(available)} of memory is available, and a snapshot needs "
                    f"{format_bytes(needed)}"
                )
            segment.capacity = -(-size // _ROUND) * _ROUND
        return segment

    def _ask(
        self, message: dict[str, Any], descriptor: int | None = None, seconds: float = MESSAGE_S
    ) -> tuple[dict[str, Any], int | None]:
        """Send a message, and return the answer and the descriptor that came with it."""
        try:
            if self._connection is None:
                self._connection = self._connect()
            self._connection.settimeout(seconds)
            data = json.dumps(message).encode()
            socket.send_fds(self._connection, [data], [] if descriptor is None else [descriptor])
            data, fds, _, _ = socket.recv_fds(self._connection, PACKET_BYTES, 1)
            if not data:
                raise ConnectionError("it has ended")
            return json.loads(data), fds[0] if fds else None
        except OSError:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            raise

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(MESSAGE_S)
            connection.connect(address_of(self._server))
            if not is_own(connection):
                raise PermissionError("a process of another user has taken its place")
        except BaseException:
            connection.close()
            raise
        return connection

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._close_segments()
        self._warn(
            f"{reason}. Training goes on with snapshots in {self._directory} only: this process "
            "saves nothing more in memory."
        )

    def _close_segments(self) -> None:
        for segment in self._segments:
            segment.close()
        self._segments.clear()

    def _warn(self, text: str) -> None:
        known = re.sub(r"\d[\d.]*", "", text)  # the memory that is available changes
        if self._warned != known:
            self._warned = known
            logging.warning("memory_freq: %s", text)


class _TooLittleMemory(Exception):
    """Error: a snapshot would take the memory that training needs."""


class _Segment:
    """Shared memory without a name.

    Attributes:
        descriptor: Its file descriptor.
        capacity: Bytes that it may take.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("tfdist-snapshot", os.MFD_CLOEXEC)
        self.capacity = 0

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Write pieces one after the other, from the beginning."""
        views = [memoryview(piece) for piece in pieces]
        offset = 0
        try:
            while views:
                written = os.pwritev(self.descriptor, views[:_PIECES], offset)
                offset += written
                while views and written >= len(views[0]):
                    written -= len(views.pop(0))
                if written:
                    views[0] = views[0][written:]
        except OSError as error:
            raise _TooLittleMemory(
                f"the system gave no memory for a snapshot of {format_bytes(sum(map(len, pieces)))}"
                f" ({error.strerror})"
            ) from error

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)
