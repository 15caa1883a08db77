"""Snapshot servers of several hosts: copies of snapshots, and which snapshot is complete.

The server of each host listens at a TCP port. A connection is authenticated, and serves one
request, in the order of a save and of a restart:

    copy     A part that a process of the sender's host has handed over goes to the next host, so
             that it survives the loss of one host.
    stored   The first host counts the parts that are stored, and answers when all are.
    list     Which parts a host holds.
    fetch    One part.
    drop     A host releases what it holds of a directory.

All name the generation of the launch, so that a host which the others have given up changes nothing
any more.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfdist.cluster import json_channel
from tfdist.cluster.pending_connections import PendingConnections
from tfdist.launch.snapshot_holder import Holder, Position
from tfdist.runtime.formatting import format_bytes

HANDSHAKES = 64  # maximum at the same time
GENERATION_S = 10.0  # for the launcher of a host to tell its server of a generation
STALL_S = 10.0  # without a byte, or without an answer to a request
RETRY_S = 0.2
NO_COPY_S = 60.0  # without copies after one that failed: each might take as long to fail
STORED = b"\1"  # the answer to a part that has arrived
_CHUNK = 1 << 20


class Refused(OSError):
    """Error for a request that another host's server has refused; it says why."""


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
        self._changed = threading.Condition()  # guards the attributes below
        self._generation = -1
        self._addresses: list[str] = []
        self._own = 0
        self._neighbour: str | None = None  # address of the server that gets copies
        self._problem = ""  # with the last copy
        self._next_copy = 0.0  # time on the monotonic clock
        self._stored: dict[tuple[str, Position], set[int]] = {}  # parts; on the first host
        # The newest snapshots, as long as no process of the generation has saved.
        self._found: dict[str, tuple[Position, dict[int, str]] | None] = {}
        self._pending = PendingConnections(HANDSHAKES)
        self._fetching = threading.Lock()  # two processes of this host may want the same part
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def meet(self, peers: Sequence[tuple[str, str]], own: int, generation: int) -> None:
        """Begin a generation.

        Args:
            peers: All servers of the generation: name of the host, and address as "host:port". A
                host may have several.
            own: Index of this server.
            generation: Number of the generation.
        """
        hosts = [host for host, _ in peers]
        with self._changed:
            self._addresses = [address for _, address in peers]
            self._own = own
            following = [*range(own + 1, len(peers)), *range(own)]
            self._neighbour = next(
                (self._addresses[each] for each in following if hosts[each] != hosts[own]), None
            )
            self._problem = ""
            self._next_copy = 0.0
            self._generation = generation
            self._stored.clear()
            self._found.clear()
            self._changed.notify_all()

    def share(self, run: str, position: Position, part: int, seconds: float) -> str:
        """Copy a part of this host to the next one, and wait until all parts are stored.

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
        addresses, _ = self._at(position[0])
        self._found.pop(run, None)
        neighbour = self._neighbour
        if neighbour is not None and time.monotonic() >= self._next_copy:
            try:
                self._copy(neighbour, run, position, part)
                self._problem = ""
            except (OSError, ValueError) as error:
                self._problem = f"{neighbour}: {error}"
                self._next_copy = time.monotonic() + NO_COPY_S
        parts, _ = self._holder.inventory(run).get(position, (0, []))
        while True:
            left = limit - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"not all parts were stored within {seconds:g} s")
            try:
                message = {
                    "do": "stored",
                    "generation": position[0],
                    "run": run,
                    "position": position,
                    "parts": parts,
                    "part": part,
                    "seconds": left,
                }
                with self._request(addresses[0], message, left + 1.0) as (answer, _):
                    if answer["complete"]:
                        return self._problem
            except Refused:
                raise
            except OSError:  # its server may have been killed, and have a successor
                time.sleep(min(RETRY_S, left))

    def newest(self, run: str, generation: int) -> tuple[Position, dict[int, str]] | None:
        """Return the newest snapshot whose parts are all held by some host, and where each is.

        Call it before any process of the generation saves.

        Args:
            run: Directory of the snapshots.
            generation: Number of the generation.

        Returns:
            Position, and the address of a server for each part; "" for this host. None if there is
            no such snapshot.
        """
        addresses, own = self._at(generation)
        if run in self._found:
            return self._found[run]
        found: dict[Position, tuple[int, dict[int, str]]] = {}
        all_answered = True

        def add(address: str, position: Position, parts: int, held: Sequence[int]) -> None:
            _, where = found.setdefault(position, (parts, {}))
            for part in held:
                where.setdefault(part, address)

        for position, (parts, held) in self._holder.inventory(run).items():
            add("", position, parts, held)
        for address in [*addresses[:own], *addresses[own + 1 :]]:
            message = {"do": "list", "generation": generation, "run": run}
            try:
                with self._request(address, message) as (answer, _):
                    for position, parts, held in answer["held"]:
                        add(address, _position(position), parts, held)
            except (OSError, LookupError, TypeError, ValueError):
                all_answered = False
        whole = [position for position, (parts, where) in found.items() if len(where) == parts]
        result = (max(whole), found[max(whole)][1]) if whole else None
        if all_answered:
            self._found[run] = result
        return result

    def fetch(self, address: str, run: str, position: Position, part: int, parts: int) -> None:
        """Make this host hold a part that another one holds.

        Args:
            address: Address of the other host's server.
            run: Directory of the snapshots.
            position: Position of the snapshot.
            part: Index of the part.
            parts: Number of its parts.

        Raises:
            OSError: If it cannot be had.
        """
        with self._fetching:
            if (held := self._holder.get(run, position, part)) is not None:
                os.close(held[0])
                return
            message = {
                "do": "fetch",
                "generation": self._generation,
                "run": run,
                "position": position,
                "part": part,
            }
            with (
                self._request(address, message) as (answer, channel),
                channel.detach() as connection,
            ):
                descriptor = _receive(connection, answer["size"])
            self._holder.add_copy(run, position, parts, part, descriptor, answer["size"])

    def drop(self, run: str) -> None:
        """Make all hosts release what they hold of a run."""
        self._drop(run)
        addresses, own = self._at(self._generation)
        message = {"do": "drop", "generation": self._generation, "run": run}
        for address in [*addresses[:own], *addresses[own + 1 :]]:
            with contextlib.suppress(OSError), self._request(address, message):
                pass

    # --- As a client ------------------------------------------------------------------------------
    def _at(self, generation: int) -> tuple[list[str], int]:
        """Return the addresses of a generation and the own index, once the launcher told them."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._generation >= generation, GENERATION_S):
                raise TimeoutError(f"the launcher did not begin generation {generation}")
            if self._generation > generation:
                raise Refused(f"generation {generation} is over")
            return self._addresses, self._own

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

    def _copy(self, address: str, run: str, position: Position, part: int) -> None:
        held = self._holder.get(run, position, part)
        if held is None:
            raise Refused("it was released meanwhile")
        descriptor, size = held
        parts, _ = self._holder.inventory(run)[position]
        with open(descriptor, "rb") as file:
            message = {
                "do": "copy",
                "generation": position[0],
                "run": run,
                "position": position,
                "parts": parts,
                "part": part,
                "size": size,
            }
            with self._request(address, message) as (_, channel), channel.detach() as connection:
                connection.settimeout(STALL_S)
                connection.sendfile(file, 0, size)
                if connection.recv(1) != STORED:
                    raise Refused("it ended before the copy was complete")

    # --- As a server ------------------------------------------------------------------------------
    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = listener.accept()
            except OSError:
                time.sleep(RETRY_S)  # no descriptors are left
                continue
            self._pending.add(connection, address[0])
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

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
            except OSError as error:
                channel.send({"refused": str(error)})
                return
            answer = {
                "copy": self._take_copy,
                "stored": self._count,
                "list": self._list,
                "fetch": self._give,
                "drop": lambda channel, message: self._drop(message["run"]),
            }[message["do"]](channel, message)
            if message["do"] in ("stored", "list", "drop"):
                channel.send(answer or {})

    def _take_copy(self, channel: json_channel.Channel, message: dict[str, Any]) -> None:
        size = message["size"]
        available = self._available()
        if available is not None and available < 2 * size:
            reason = f"{format_bytes(available)} of memory is available, and a copy needs "
            channel.send({"refused": reason + format_bytes(2 * size)})
            return
        channel.send({})
        with channel.detach() as connection:
            descriptor = _receive(connection, size)
            run, position = message["run"], _position(message["position"])
            with self._changed:
                if self._generation != message["generation"]:
                    os.close(descriptor)
                    return
                self._holder.add_copy(
                    run, position, message["parts"], message["part"], descriptor, size
                )
            connection.sendall(STORED)

    def _count(self, channel: json_channel.Channel, message: dict[str, Any]) -> dict[str, Any]:
        run, position = message["run"], _position(message["position"])
        with self._changed:
            stored = self._stored.setdefault((run, position), set())
            stored.add(message["part"])
            if len(stored) == message["parts"]:
                for older in [key for key in self._stored if key[0] == run and key[1] < position]:
                    del self._stored[older]
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    len(stored) == message["parts"] or self._generation != message["generation"]
                ),
                message["seconds"],
            )
            complete = len(stored) == message["parts"]
        return {"complete": complete}

    def _list(self, channel: json_channel.Channel, message: dict[str, Any]) -> dict[str, Any]:
        return {
            "held": [
                [position, parts, held]
                for position, (parts, held) in self._holder.inventory(message["run"]).items()
            ]
        }

    def _give(self, channel: json_channel.Channel, message: dict[str, Any]) -> None:
        held = self._holder.get(message["run"], _position(message["position"]), message["part"])
        if held is None:
            channel.send({"refused": "it does not hold this part any more"})
            return
        descriptor, size = held
        with open(descriptor, "rb") as file:
            channel.send({"size": size})
            with channel.detach() as connection:
                connection.settimeout(STALL_S)
                connection.sendfile(file, 0, size)

    def _drop(self, run: str) -> None:
        with self._changed:
            self._found.pop(run, None)
            for key in [key for key in self._stored if key[0] == run]:
                del self._stored[key]
        self._holder.drop(run)


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
