"""Meetings of tasks: a client, a server at a task's address, and bounded waits for others.

The preflight and the doctor build on it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from tfdist.cluster.addresses import resolve_address, split_address
from tfdist.cluster.handshake import (
    LINE_BYTES,
    Unsigned,
    absent,
    check_signature,
    receive,
    send,
)
from tfdist.cluster.pending_connections import PendingConnections
from tfdist.cluster.spec import ClusterSpec, Task

AT_ONCE = 16  # tasks that are asked at the same time
ACKNOWLEDGED = b"\n"  # what a client may send after a reply
T = TypeVar("T")


def connect(address: str, timeout: float) -> socket.socket:
    """Connect to the address of a task.

    Args:
        address: Address of the task.
        timeout: Seconds for each operation on the connection.

    Raises:
        OSError: If there is no connection.
    """
    connection = socket.create_connection(split_address(address), timeout)
    try:
        # Linux can connect a free port to itself.
        if connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError("no process listens")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        connection.close()
        raise
    return connection


def for_each(
    function: Callable[[str], T], names: Iterable[str], at_once: int = AT_ONCE
) -> dict[str, T]:
    """Call a function with the name of each task, several at a time, and return the results."""
    names = list(names)
    if not names:
        return {}
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        return dict(zip(names, pool.map(function, names), strict=True))


class Attempts:
    """Times at which other tasks are asked again.

    A task is asked at once, then after pauses that double up to a longest one, and at once when it
    has been heard from.

    Args:
        first: Seconds before a task is asked for the second time.
        longest: Longest pause in seconds.
        clock: Monotonic clock in seconds, default `time.monotonic`.

    Example:
        >>> attempts = Attempts(first=1, longest=60, clock=lambda: 0.0)
        >>> attempts.due(["worker:1", "worker:2"])
        ['worker:1', 'worker:2']
        >>> attempts.asked("worker:1"), attempts.due(["worker:1"])
        (None, [])
        >>> attempts.heard("worker:1"), attempts.due(["worker:1"])
        (None, ['worker:1'])
    """

    def __init__(self, first: float, longest: float, clock: Callable[[], float] = time.monotonic):
        self._first = first
        self._longest = longest
        self._clock = clock
        self._pauses: dict[str, float] = {}
        self._due: dict[str, float] = {}

    def due(self, names: Iterable[str]) -> list[str]:
        """Return the tasks to ask now; those that have waited longest come first."""
        now = self._clock()
        due = [name for name in names if self._due.get(name, 0.0) <= now]
        return sorted(due, key=lambda name: self._due.get(name, 0.0))

    def asked(self, name: str) -> None:
        """Take note that a task is asked now."""
        self._pauses[name] = min(2 * self._pauses.get(name, self._first / 2), self._longest)
        self._due[name] = self._clock() + self._pauses[name]

    def heard(self, name: str) -> None:
        """Take note that a task has been heard from, so that asking it may succeed now."""
        self._due[name] = -1.0


class Wait:
    """A wait for other tasks that ends at a timeout, and names them every few seconds.

    Args:
        spec: Cluster of the tasks.
        who: Name of the waiting side, for the lines.
        timeout: Seconds for all waits together.
        show_line: Function that receives the lines.
        pauses: Seconds between the first two attempts, and the maximum between later ones.
        interval: Seconds between two lines.
        sleep: Function that waits for seconds, or until it is worth looking again. Default
            `time.sleep`.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        who: str,
        timeout: float,
        show_line: Callable[[str], None],
        pauses: tuple[float, float],
        interval: float,
        sleep: Callable[[float], object] = time.sleep,
    ):
        self._sleep = sleep
        self._spec = spec
        self._who = who
        self._show_line = show_line
        self._pauses = pauses
        self._interval = interval
        self._next_line = time.monotonic() + interval
        self.timeout = timeout
        self.started = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Return the seconds since the object was created."""
        return time.monotonic() - self.started

    def until_none(
        self, missing_tasks: Callable[[], dict[str, str]], longest: float | None = None
    ) -> dict[str, str]:
        """Wait until no task is missing.

        Args:
            missing_tasks: Function that returns why tasks are missing, by task. It is called until
                it returns none; an error that it raises ends the wait.
            longest: Maximum of the seconds between later attempts, default that of this object.

        Returns:
            What it returned last: an empty dict, or the tasks that are missing at the timeout.
        """
        pause = self._pauses[0]
        longest = self._pauses[1] if longest is None else longest
        while missing := missing_tasks():
            elapsed = self.elapsed
            if elapsed >= self.timeout:
                return missing
            if time.monotonic() >= self._next_line:
                self._next_line += self._interval
                self._show_line(
                    f"after {elapsed:.0f} s {self._who} waits for {absent(missing, self._spec)}"
                )
            until_line = max(self._next_line - time.monotonic(), 0.0)
            self._sleep(min(pause, self.timeout - elapsed, until_line))
            pause = min(2 * pause, longest)
        return {}


class TaskServer(socketserver.ThreadingTCPServer):
    """TCP server at the address of a task, which answers from the `with` statement on.

    Args:
        task: Task at whose address it listens.

    Attributes:
        exchange_s: Seconds for a request and its reply.
        line_bytes: Maximum size of a request.
        service: Name of the service, for messages.
        secret: Secret of the tasks of this launch, default b"" (none). With it, only their requests
            are answered.
        at_once: Maximum number of connections, except from tasks that have the secret.

    Raises:
        OSError: If the address cannot be listened at.
    """

    allow_reuse_address = True
    # Closing waits for the replies under way, which take a limited time: TensorFlow's port must be
    # free afterwards.
    daemon_threads = False
    request_queue_size = 128
    exchange_s = 5.0
    line_bytes = LINE_BYTES
    service = "preflight"
    secret = b""
    at_once = 256

    def __init__(self, task: Task):
        self.address_family, sockaddr = resolve_address(task.address)
        self.task = task
        self.pending = PendingConnections(self.at_once)
        self.silent: set[socket.socket] = set()  # connections without a request yet
        super().__init__(sockaddr, _Handler)

    def reply(self, request: Mapping[str, Any], host: str) -> dict[str, Any]:
        """Return the reply to a request from a host."""
        raise NotImplementedError

    def after_reply(
        self, request: Mapping[str, Any], reply: Mapping[str, Any], connection: Any
    ) -> None:
        """Go on with a connection after the reply was sent. By default, do nothing."""

    def acknowledge_s(self, reply: Mapping[str, Any]) -> float:
        """Return for how many seconds a client may acknowledge a reply, default `exchange_s`."""
        return self.exchange_s

    def was_received(self, request: Mapping[str, Any], reply: Mapping[str, Any]) -> None:
        """Take note that a client has acknowledged the reply. By default, do nothing."""

    def process_request(self, request: Any, client_address: Any) -> None:
        """See `socketserver.BaseServer`."""
        self.pending.add(request, client_address[0])
        self.silent.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """See `socketserver.BaseServer`."""
        self.pending.remove(request)
        self.silent.discard(request)
        super().shutdown_request(request)

    def __enter__(self) -> TaskServer:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        for connection in list(self.silent):  # closing would wait for their requests
            with contextlib.suppress(OSError):  # it has ended meanwhile
                connection.shutdown(socket.SHUT_RD)
        self.server_close()


class _Handler(socketserver.BaseRequestHandler):
    server: TaskServer

    def handle(self) -> None:
        server = self.server
        connection: socket.socket = self.request
        with contextlib.suppress(OSError, ValueError):  # a stranger, or a client that has left
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            limit = time.monotonic() + server.exchange_s
            request = receive(connection, limit, server.line_bytes, server.service)
            server.silent.discard(connection)
            try:
                check_signature(request, server.secret)
            except Unsigned:  # tell only that this is another launch
                return send(connection, {"tfdist": 1}, server.secret)
            if server.secret:
                server.pending.remove(connection)
            reply = server.reply(request, self.client_address[0])
            send(connection, reply, server.secret)
            server.after_reply(request, reply, connection)
            connection.settimeout(server.acknowledge_s(reply))
            # The client closes first, so TIME_WAIT stays with it and not on TensorFlow's port.
            if connection.recv(1) == ACKNOWLEDGED:
                server.was_received(request, reply)
                connection.recv(1)
