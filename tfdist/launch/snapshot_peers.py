"""Snapshot servers of several hosts: copies of snapshots, and which snapshot is complete.

The server of each host listens at a TCP port. A connection is authenticated, and serves one
request, in the order of a save and of a restart:

    copy      A part that a process of the sender's host has handed over goes to another host, so
              that it survives the loss of one host.
    stored    The first server counts the parts that are stored, and answers when all are.
    complete  The first server tells all that a snapshot is complete: they release older ones.
    list      Which parts a server holds.
    fetch     One part.
    drop      A server releases what it holds of a directory.

All name the generation of the launch, so that a host which the others have given up changes nothing
any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfdist.cluster import json_channel
from tfdist.cluster.pending_connections import PendingConnections
from tfdist.launch.snapshot_holder import Holder, Part, Position
from tfdist.runtime.formatting import format_bytes

HANDSHAKES = 64  # maximum at the same time
GENERATION_S = 10.0  # for the launcher of a host to tell its server of a generation
STALL_S = 10.0  # without a byte, or without an answer to a request
TELL_S = 2.0  # for all servers to answer that they know of a complete snapshot
SAVE_S = 3.0  # of the bound on a save that a copy leaves
RETRY_S = 0.2
TRIES = 3  # requests for what a server holds
NO_COPY_S = 60.0  # without copies after one that failed: each might take as long to fail
STORED = b"\1"  # the answer to a part that has arrived
_CHUNK = 1 << 20
_BLOCK = 1 << 24  # bytes of a copy between two looks at the clock


class Refused(OSError):
    """Error for a request that another host's server has refused; it says why."""


class Over(Refused):
    """Error for a generation that is over.

    Attributes:
        generation: The present one.
    """

    def __init__(self, generation: int, present: int):
        super().__init__(f"generation {generation} is over")
        self.generation = present


@dataclasses.dataclass
class _Generation:
    """Servers of a generation; see `Peers.meet`.

    Attributes:
        neighbour: Address of the server that gets copies; None without another host.
        problem: Reason why the last copy failed.
        next_copy: Time on the monotonic clock at which the next copy is tried.
    """

    number: int
    addresses: list[str]
    own: int
    neighbour: str | None
    problem: str = ""
    next_copy: float = 0.0

    @property
    def others(self) -> list[str]:
        """Return the addresses of the other servers, beginning after the own one."""
        return [*self.addresses[self.own + 1 :], *self.addresses[: self.own]]


@dataclasses.dataclass(frozen=True)
class Found:
    """The newest snapshot that all servers hold together.

    Attributes:
        position: Its position.
        where: Addresses of the servers that hold each part; "" is this one, and comes first.
    """

    position: Position
    where: dict[int, list[str]]


class Peers:
    """Servers of all hosts of a generation, of which this process is one.

    Args:
        holder: Snapshots that this host holds.
        listener: Listening TCP socket of this host.
        secret: Secret that all servers share.
        available: Function that returns the available bytes of memory, or None if unknown.
    """

    def __init__(
        self,
        holder: Holder,
        listener: socket.socket,
        secret: bytes,
        available: Callable[[], int | None],
    ):
        self._holder = holder
        self._secret = secret
        self._available = available
        self._changed = threading.Condition()  # guards the attributes up to the empty line
        self._launch = ""
        self._generation = _Generation(-1, [], 0, None)
        self._stored: dict[tuple[str, Position], set[int]] = {}  # parts; on the first server
        self._completed: dict[str, Position] = {}  # newest complete snapshot
        self._found: dict[str, Found | None] = {}  # until something changes
        self._changes = 0

        self._pending = PendingConnections(HANDSHAKES)
        self._finding = threading.Lock()  # the processes of this host want the same at one time
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def meet(
        self, peers: Sequence[tuple[str, str]], own: int, generation: int, launch: str = ""
    ) -> None:
        """Begin a generation.

        Args:
            peers: All servers of the generation: name of the host, and address as "host:port". A
                host may have several.
            own: Index of this server.
            generation: Number of the generation.
            launch: Name of the launch; another one than before releases all snapshots.
        """
        addresses = [address for _, address in peers]
        following = [*range(own + 1, len(peers)), *range(own)]
        elsewhere = [addresses[each] for each in following if peers[each][0] != peers[own][0]]
        with self._changed:
            if launch != self._launch:
                self._holder.clear()
            self._launch = launch
            self._generation = _Generation(
                generation, addresses, own, elsewhere[0] if elsewhere else None
            )
            self._stored.clear()
            self._completed.clear()
            self._note_change()
            self._changed.notify_all()

    def check(self, generation: int) -> None:
        """Wait until the launcher has told of a generation.

        Raises:
            Over: If a later one has begun.
            TimeoutError: If it does not begin within a bound.
        """
        self._at(generation)

    def share(self, run: str, position: Position, part: int, seconds: float) -> str:
        """Copy a part of this host to another one, and wait until all parts are stored.

        Args:
            run: Directory of the snapshots.
            position: Position of the snapshot.
            part: Index of a part that the holder has.
            seconds: Bound on the wait.

        Returns:
            The reason why no other host has a copy, or "".

        Raises:
            OSError: If the snapshot did not become complete.
        """
        limit = time.monotonic() + seconds
        generation = self._at(position[0])
        problem = generation.problem
        if generation.neighbour is not None and time.monotonic() >= generation.next_copy:
            problem = ""
            try:
                self._copy(generation.neighbour, run, position, part, limit - SAVE_S)
            except (OSError, ValueError) as error:
                problem = f"{generation.neighbour}: {error}"
                generation.next_copy = time.monotonic() + NO_COPY_S
            generation.problem = problem or generation.problem
        parts, _ = self._holder.inventory(run).get(position, (0, []))
        while (left := limit - time.monotonic()) > 0:
            message = self._message("stored", run, position, parts=parts, part=part, seconds=left)
            try:
                with self._request(generation.addresses[0], message, left + 1.0) as (answer, _):
                    if answer["complete"]:
                        return problem
            except Refused:
                raise
            except OSError:  # its server may have been killed, and have a successor
                # It may have told this server before. A later position may be one of an earlier
                # training of this attempt, and says nothing about this one.
                if self._completed.get(run) == position:
                    return problem
                time.sleep(min(RETRY_S, left))
        raise TimeoutError(f"not all parts of a snapshot were stored within {seconds:.3g} s")

    def newest(self, run: str, generation: int) -> Found | None:
        """Return the newest snapshot whose parts are all held by some server, or None.

        Args:
            run: Directory of the snapshots.
            generation: Number of the generation.
        """
        with self._finding:
            with self._changed:
                known = self._at(generation)
                changes = self._changes
                if run in self._found:
                    return self._found[run]
            found: dict[Position, tuple[int, dict[int, list[str]]]] = {}
            message = {"do": "list", "generation": generation, "run": run}
            for address in ["", *known.others]:
                held = self._ask(address, message) if address else self._list(message)["held"]
                for position, parts, indices in held:
                    _, where = found.setdefault(_position(position), (parts, {}))
                    for part in indices:
                        where.setdefault(part, []).append(address)
            whole = [each for each, (parts, where) in found.items() if len(where) == parts]
            result = Found(max(whole), found[max(whole)][1]) if whole else None
            with self._changed:
                if changes == self._changes:
                    self._found[run] = result
            return result

    def fetch(self, run: str, found: Found, part: int) -> None:
        """Make this host hold a part of a snapshot.

        Args:
            run: Directory of the snapshots.
            found: The snapshot.
            part: Index of the part.

        Raises:
            OSError: If it cannot be had.
        """
        with self._finding:
            if (held := self._holder.get(run, found.position, part)) is not None:
                os.close(held[0])
                return
            message = self._message("fetch", run, found.position, part=part)
            message["generation"] = self._generation.number
            problem = OSError("no server holds it")
            for address in filter(None, found.where.get(part, [])):
                try:
                    with self._request(address, message) as (answer, channel):
                        self._check_memory(answer["size"])
                        with channel.detach() as connection:
                            descriptor = _receive(connection, answer["size"])
                    parts = len(found.where)
                    self._holder.add_copy(
                        Part(run, found.position, parts, part, descriptor, answer["size"])
                    )
                    return
                except OSError as error:
                    problem = error
            raise problem

    def drop(self, run: str) -> None:
        """Make all servers release what they hold of a run."""
        self._drop(run)
        generation = self._generation
        self._tell(
            generation.others, {"do": "drop", "generation": generation.number, "run": run}, STALL_S
        )

    # --- As a client ------------------------------------------------------------------------------
    def _at(self, generation: int) -> _Generation:
        """Return a generation once the launcher has told of it."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._generation.number >= generation, GENERATION_S
            ):
                raise TimeoutError(f"the launcher did not begin generation {generation}")
            if self._generation.number > generation:
                raise Over(generation, self._generation.number)
            return self._generation

    def _note_change(self) -> None:
        """Forget what was found; called with the lock."""
        self._changes += 1
        self._found.clear()

    @staticmethod
    def _message(do: str, run: str, position: Position, **facts: Any) -> dict[str, Any]:
        return {"do": do, "generation": position[0], "run": run, "position": position, **facts}

    @contextlib.contextmanager
    def _request(
        self, address: str, message: Mapping[str, Any], seconds: float = STALL_S
    ) -> Iterator[tuple[dict[str, Any], json_channel.Channel]]:
        """Send a request over a new connection; yield the answer, and the connection."""
        with contextlib.closing(json_channel.connect(address, self._secret)) as channel:
            channel.send(message)
            answer = channel.receive(seconds)
            if answer is None:
                raise TimeoutError(f"{address} did not answer within {seconds:g} s")
            if "refused" in answer:
                raise Refused(str(answer["refused"]))
            yield answer, channel

    def _ask(self, address: str, message: Mapping[str, Any]) -> list:
        """Return what a server holds; nothing if it does not answer."""
        for _ in range(TRIES):
            try:
                with self._request(address, message) as (answer, _):
                    return answer["held"]
            except Refused:
                raise
            except OSError:
                time.sleep(RETRY_S)
        return []

    def _tell(self, addresses: Sequence[str], message: Mapping[str, Any], seconds: float) -> None:
        """Send a request to several servers at the same time; wait for the answers for a time."""

        def tell(address: str) -> None:
            with contextlib.suppress(OSError), self._request(address, message):
                pass

        threads = [
            threading.Thread(target=tell, args=(address,), daemon=True) for address in addresses
        ]
        for thread in threads:
            thread.start()
        limit = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, limit - time.monotonic()))

    def _copy(self, address: str, run: str, position: Position, part: int, limit: float) -> None:
        parts, _ = self._holder.inventory(run).get(position, (0, []))
        held = self._holder.get(run, position, part)
        if held is None:
            raise Refused("the part was released meanwhile")
        descriptor, size = held
        message = self._message("copy", run, position, parts=parts, part=part, size=size)
        with (
            open(descriptor, "rb") as file,
            self._request(address, message) as (_, channel),
            channel.detach() as connection,
        ):
            connection.settimeout(STALL_S)
            for offset in range(0, size, _BLOCK):
                connection.sendfile(file, offset, min(_BLOCK, size - offset))
                if time.monotonic() > limit:
                    raise TimeoutError("the copy takes too long")
            if connection.recv(1) != STORED:
                raise Refused("the host ended before it had the whole copy")

    # --- As a server ------------------------------------------------------------------------------
    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = listener.accept()
            except OSError:  # no descriptors are left
                time.sleep(RETRY_S)
                continue
            self._pending.add(connection, address[0])
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError:  # no threads are left
                self._pending.remove(connection)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            channel = json_channel.accept(connection, self._secret)
        except OSError:
            return
        finally:
            self._pending.remove(connection)
        with (
            contextlib.closing(channel),
            contextlib.suppress(OSError, LookupError, TypeError, ValueError),
        ):
            message = channel.receive(STALL_S)
            if message is None:
                return
            try:
                self._at(message["generation"])
                if message["do"] == "copy":
                    self._take_copy(channel, message)
                elif message["do"] == "fetch":
                    self._give(channel, message)
                else:
                    answers = {
                        "stored": self._count,
                        "complete": self._complete,
                        "list": self._list,
                        "drop": lambda message: self._drop(message["run"]),
                    }
                    channel.send(answers[message["do"]](message) or {})
            except Refused as error:
                channel.send({"refused": str(error)})

    def _take_copy(self, channel: json_channel.Channel, message: dict[str, Any]) -> None:
        size = message["size"]
        self._check_memory(size)
        channel.send({})
        with channel.detach() as connection:
            descriptor = _receive(connection, size)
            run, position = message["run"], _position(message["position"])
            with self._changed:
                if self._generation.number != message["generation"]:
                    os.close(descriptor)
                    return
                parts, index = message["parts"], message["part"]
                self._holder.add_copy(Part(run, position, parts, index, descriptor, size))
            connection.sendall(STORED)

    def _count(self, message: dict[str, Any]) -> dict[str, Any]:
        run, position = message["run"], _position(message["position"])
        with self._changed:
            stored = self._stored.setdefault((run, position), set())
            stored.add(message["part"])
            is_last = len(stored) == message["parts"]
            generation = self._generation
        if is_last:
            told = self._message("complete", run, position)
            self._complete(told)
            self._tell(generation.others, told, TELL_S)
        with self._changed:
            if is_last:
                stored.add(-1)  # the others have been told
                for older in [key for key in self._stored if key[0] == run and key[1] < position]:
                    del self._stored[older]
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: -1 in stored or self._generation is not generation, message["seconds"]
            )
            return {"complete": -1 in stored}

    def _complete(self, message: dict[str, Any]) -> None:
        run, position = message["run"], _position(message["position"])
        with self._changed:
            self._note_change()
            self._completed[run] = position
        self._holder.complete(run, position)

    def _list(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "held": [
                [position, parts, held]
                for position, (parts, held) in self._holder.inventory(message["run"]).items()
            ]
        }

    def _give(self, channel: json_channel.Channel, message: dict[str, Any]) -> None:
        held = self._holder.get(message["run"], _position(message["position"]), message["part"])
        if held is None:
            raise Refused("it does not hold this part any more")
        descriptor, size = held
        with open(descriptor, "rb") as file:
            channel.send({"size": size})
            with channel.detach() as connection:
                connection.settimeout(STALL_S)
                connection.sendfile(file, 0, size)

    def _drop(self, run: str) -> None:
        with self._changed:
            self._note_change()
            self._completed.pop(run, None)
            for key in [key for key in self._stored if key[0] == run]:
                del self._stored[key]
        self._holder.drop(run)

    def _check_memory(self, size: int) -> None:
        available = self._available()
        if available is not None and available < 2 * size:
            raise Refused(
                f"{format_bytes(available)} of memory is available, and a copy needs "
                f"{format_bytes(2 * size)}"
            )


def _position(numbers: Sequence[int]) -> Position:
    attempt, epoch, step = numbers
    return attempt, epoch, step


def _receive(connection: socket.socket, size: int) -> int:
    """Return the descriptor of new memory with the bytes that come over a connection."""
    connection.settimeout(STALL_S)
    descriptor = os.memfd_create("tfdist-snapshot", os.MFD_CLOEXEC)
    try:
        view = memoryview(bytearray(min(size, _CHUNK)))
        left = size
        while left:
            count = connection.recv_into(view[: min(left, _CHUNK)])
            if not count:
                raise ConnectionError("the connection ended before all bytes had come")
            written = 0
            while written < count:
                written += os.write(descriptor, view[written:count])
            left -= count
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise
