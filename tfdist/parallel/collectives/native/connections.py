"""Authenticated connections of all workers: UNIX sockets on a host, TCP between hosts.

All workers first gather facts about each other over connections that exist, such as TensorFlow's.
These tell which of them run on one host, and their random nonces make the name of the session.
Then each connects to those of lower rank. Both sides of a connection prove that they know the job's
token (see `cluster.json_channel`) and say who they are in the session. On one host, the kernel must
confirm that both belong to the same user.

A UNIX socket has an abstract name, and the shared memory has none, so nothing is left on the host
after a crash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import math
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tfdist.cluster.addresses import join_address, resolve_address, split_address
from tfdist.cluster.handshake import ConfigurationError, PeersAbsent
from tfdist.cluster.json_channel import WrongToken, accept, authenticate
from tfdist.cluster.pending_connections import PendingConnections

Gather = Callable[[np.ndarray], np.ndarray]

HELLO_S = 5.0  # timeout of the handshake with a process that may be a stranger
RETRY_S = 0.01  # pause before the next attempt to reach a worker that does not listen yet
STRANGERS = 16  # connections that may be in their handshake at once, beyond those of the workers

_NUMBER_BYTES = 6  # of the bytes that a float64 holds exactly
_HOST_BYTES = 18
_NONCE_BYTES = 18


@dataclasses.dataclass(frozen=True)
class Endpoints:
    """Identities of all workers, as each of them knows them.

    Attributes:
        session: Name of the session, different each time.
        hosts: Identity of each worker's host, by rank.
        facts: Numbers that each worker has told, by rank.
    """

    session: str
    hosts: tuple[bytes, ...]
    facts: tuple[int, ...]

    @property
    def by_host(self) -> list[list[int]]:
        """Return the ranks of each host, that of the first rank first."""
        ranks: dict[bytes, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            ranks.setdefault(host, []).append(rank)
        return list(ranks.values())


def meet(gather: Gather, fact: int = 0) -> Endpoints:
    """Exchange identities with all workers.

    Args:
        gather: Function that returns the float64 numbers of all workers, `[workers, n]`, from this
            worker's `[n]`.
        fact: Number to tell the other workers.
    """
    own = host_identity() + secrets.token_bytes(_NONCE_BYTES)
    rows = gather(np.array([*_to_numbers(own), fact], np.float64))
    told = [_to_bytes(row[:-1]) for row in rows]
    return Endpoints(
        hashlib.sha256(b"".join(told)).hexdigest()[:32],
        tuple(row[:_HOST_BYTES] for row in told),
        tuple(int(row[-1]) for row in rows),
    )


def host_identity() -> bytes:
    """Return bytes that are equal for processes that can connect by abstract UNIX sockets.

    They have the same kernel, network namespace and user.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    network = os.stat("/proc/self/ns/net")
    text = f"{boot} {network.st_dev} {network.st_ino} {os.getuid()}"
    return hashlib.sha256(text.encode()).digest()[:_HOST_BYTES]


def connect(
    rank: int,
    endpoints: Endpoints,
    addresses: Sequence[str],
    names: Sequence[str],
    token: bytes,
    gather: Gather,
    timeout: float,
) -> list[socket.socket | None]:
    """Connect with all other workers.

    Args:
        rank: Rank of this worker.
        endpoints: Result of `meet`.
        addresses: Address of each worker's task. TCP sockets are bound to this worker's, with a
            port that the kernel chooses.
        names: Name of each worker, for messages.
        token: Secret of all workers; see `json_channel.check_token`.
        gather: Function as for `meet`, called if the workers are on several hosts.
        timeout: Seconds for all connections.

    Returns:
        Connected socket of each worker, by rank; None for this one.

    Raises:
        ConfigurationError: If a worker does not know the token.
        PeersAbsent: If workers did not connect; the message names them.
    """
    limit = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        unix = stack.enter_context(_listen_locally(endpoints.session, rank))
        tcp = None
        ports = [0] * len(names)
        if len(set(endpoints.hosts)) > 1:
            tcp = stack.enter_context(_listen_at(addresses[rank]))
            ports = [int(x) for x in gather(np.array([tcp.getsockname()[1]], np.float64))[:, 0]]
        connected: dict[int, socket.socket] = {}
        try:
            server = _Server(rank, endpoints, names, token, limit)
            for listener in filter(None, (unix, tcp)):
                stack.enter_context(server.listening(listener))
            for peer in range(rank):
                connected[peer] = _connect_to(
                    peer, rank, endpoints, addresses, ports, names, token, limit
                )
            while len(connected) < len(names) - 1:
                peer, accepted = server.next(connected)
                connected[peer] = accepted
        except BaseException:
            for connection in connected.values():
                connection.close()
            raise
    for connection in connected.values():
        _watch_peer(connection)
    return [connected.get(r) for r in range(len(names))]


def share_memory(
    rank: int,
    endpoints: Endpoints,
    sockets: Sequence[socket.socket | None],
    size: Callable[[int], int],
    gather: Gather,
    timeout: float,
) -> int | None:
    """Return the descriptor of memory that the workers of this host share, or None.

    Workers share memory if all hosts have equally many of them, and more than one. The memory has
    no name. The first worker of a host makes it, and passes the descriptor through the UNIX
    sockets. All hosts have such memory, or none has.

    Args:
        rank: Rank of this worker.
        endpoints: Result of `meet`.
        sockets: Result of `connect`.
        size: Function that returns the bytes of memory for so many workers.
        gather: Function as for `meet`, called if the workers are on several hosts.
        timeout: Seconds to wait for the first worker of this host.
    """
    hosts = endpoints.by_host
    [ranks] = [ranks for ranks in hosts if rank in ranks]
    if len(ranks) == 1 or any(len(others) != len(ranks) for others in hosts):
        return None
    peers = [sockets[r] for r in ranks]
    descriptor = _share_on_host(ranks.index(rank), peers, size(len(ranks)), timeout)
    if len(hosts) > 1 and not gather(np.array([descriptor is not None], np.float64)).all():
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def _share_on_host(
    number: int, sockets: Sequence[socket.socket | None], size: int, timeout: float
) -> int | None:
    """Return the descriptor of a host's memory, for one of its workers by its number there."""
    if number == 0:
        descriptor = None
        with contextlib.suppress(OSError):
            descriptor = os.memfd_create("tfdist", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, size)
            # Otherwise a peer that cuts it off would crash the others.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        for peer in filter(None, sockets):
            peer.settimeout(timeout)
            socket.send_fds(peer, [b"m"], [] if descriptor is None else [descriptor])
        return descriptor
    first = sockets[0]
    assert first is not None
    first.settimeout(timeout)
    data, descriptors, _, _ = socket.recv_fds(first, 1, 1)
    if data != b"m":
        raise ConnectionError("the first worker closed its connection before it shared memory")
    if not descriptors:
        return None
    os.set_inheritable(descriptors[0], False)
    if os.fstat(descriptors[0]).st_size != size:
        os.close(descriptors[0])
        raise ConnectionError(f"expected {size} bytes of shared memory from the first worker")
    return descriptors[0]


class _Server:
    """Acceptance of connections from workers of higher rank.

    Each connection has a thread, so that a stranger who says nothing delays nobody.
    """

    def __init__(
        self, rank: int, endpoints: Endpoints, names: Sequence[str], token: bytes, limit: float
    ):
        self._rank = rank
        self._endpoints = endpoints
        self._names = names
        self._token = token
        self._limit = limit
        self._arrived: queue.Queue[tuple[int, socket.socket] | WrongToken] = queue.Queue()
        self._pending = PendingConnections(len(names) + STRANGERS)
        self._open = True

    @contextlib.contextmanager
    def listening(self, listener: socket.socket) -> Iterator[None]:
        """Accept connections in the context."""
        thread = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._open = False
            thread.join()

    def next(self, connected: dict[int, socket.socket]) -> tuple[int, socket.socket]:
        """Return the next worker that has connected, and its connection."""
        refused: WrongToken | None = None
        while (left := self._limit - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                arrived = self._arrived.get(timeout=left)
                if isinstance(arrived, WrongToken):
                    refused = arrived  # a stranger, or a worker with another token
                elif arrived[0] not in connected:
                    return arrived
                else:
                    arrived[1].close()
        late = [
            name
            for number, name in enumerate(self._names)
            if number > self._rank and number not in connected
        ]
        raise PeersAbsent(
            f"communication native: {', '.join(late)} did not connect to "
            f"{self._names[self._rank]} in time"
            + (f"; somebody else tried: {refused}" if refused else "")
        )

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(0.05)
        while self._open:
            try:
                connection, address = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            host = address[0] if listener.family != socket.AF_UNIX else ""
            self._pending.add(connection, host)
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            _check_user(connection)
            channel = accept(connection, self._token, HELLO_S)
            hello = channel.receive(self._limit - time.monotonic()) or {}
            peer = hello.get("from")
            expected = _hello(self._endpoints, peer, self._rank)
            higher = range(self._rank + 1, len(self._names))
            if hello != expected or not isinstance(peer, int) or peer not in higher:
                channel.close()
                return
            self._pending.remove(connection)  # from here on, nobody may shut it down
            channel.send(_hello(self._endpoints, self._rank, peer))
            self._arrived.put((peer, channel.detach()))
        except WrongToken as error:
            self._arrived.put(error)
        except OSError:  # a stranger, or a worker that has ended
            connection.close()
        finally:
            self._pending.remove(connection)


def _connect_to(
    peer: int,
    rank: int,
    endpoints: Endpoints,
    addresses: Sequence[str],
    ports: Sequence[int],
    names: Sequence[str],
    token: bytes,
    limit: float,
) -> socket.socket:
    who = f"communication native: {names[rank]} cannot connect to {names[peer]}"
    local = endpoints.hosts[peer] == endpoints.hosts[rank]
    reason = ""
    while (left := limit - time.monotonic()) > 0:
        connection: socket.socket | None = None
        try:
            if local:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(left)
                connection.connect(_unix_name(endpoints.session, peer))
                _check_user(connection)
            else:
                host = split_address(addresses[peer])[0]
                family, sockaddr = resolve_address(join_address(host, ports[peer]))
                connection = socket.socket(family, socket.SOCK_STREAM)
                connection.settimeout(min(left, HELLO_S))
                connection.connect(sockaddr)
            channel = authenticate(connection, names[peer], token, left)
            channel.send(_hello(endpoints, rank, peer))
            # A worker that has answered expects no other connection, so this one may not give up.
            if channel.receive(limit - time.monotonic()) != _hello(endpoints, peer, rank):
                channel.close()
                raise ConnectionError("another process listens there")
            return channel.detach()
        except WrongToken as error:
            raise ConfigurationError(f"{who}: {error}") from error
        except OSError as error:
            if connection is not None:
                connection.close()
            reason = str(error)
            time.sleep(RETRY_S)
    raise PeersAbsent(f"{who} in time: {reason}")


def _hello(endpoints: Endpoints, sender: Any, receiver: int) -> dict[str, Any]:
    return {"session": endpoints.session, "from": sender, "to": receiver}


def _listen_locally(session: str, rank: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(_unix_name(session, rank))
    listener.listen(128)
    return listener


def _listen_at(address: str) -> socket.socket:
    family, sockaddr = resolve_address(address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((sockaddr[0], 0, *sockaddr[2:]))
    listener.listen(128)
    return listener


def _unix_name(session: str, rank: int) -> str:
    return f"\0tfdist {session} {rank}"  # an abstract name, without a file


def _check_user(connection: socket.socket) -> None:
    """Raise PermissionError if the peer of a UNIX socket belongs to another user."""
    if connection.family != socket.AF_UNIX:
        return
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    user = struct.unpack("iII", credentials)[1]
    if user != os.getuid():
        raise PermissionError(f"the peer belongs to user {user}, not to {os.getuid()}")


def _watch_peer(connection: socket.socket) -> None:
    """Let the kernel find out when the machine of a TCP peer is gone."""
    if connection.family == socket.AF_UNIX:
        return
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
    ):
        connection.setsockopt(level, option, value)


def _to_numbers(data: bytes) -> list[int]:
    assert len(data) % _NUMBER_BYTES == 0
    return [
        int.from_bytes(data[i : i + _NUMBER_BYTES], "big")
        for i in range(0, len(data), _NUMBER_BYTES)
    ]


def _to_bytes(numbers: np.ndarray) -> bytes:
    assert all(math.isfinite(x) for x in numbers)
    return b"".join(int(x).to_bytes(_NUMBER_BYTES, "big") for x in numbers)
