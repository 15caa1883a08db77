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
from tfdist.cluster.handshake import LINE_BYTES, absent, receive, send
from tfdist.cluster.spec import ClusterSpec, Task

AT_ONCE = 16  # tasks that are asked at the same time
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


def for_each(function: Callable[[str], T], names: Iterable[str]) -> dict[str, T]:
    """Call a function with the name of each task, several at a time, and return the results."""
    names = list(names)
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(function, names), strict=True))


class Wait:
    """A wait for other tasks that ends at a timeout, and names them every few seconds.

    Args:
        spec: Cluster of the tasks.
        who: Name of the waiting side, for the lines.
        timeout: Seconds for all waits together.
        show_line: Function that receives the lines.
        pauses: Seconds between the first two attempts, and the maximum between later ones.
        interval: Seconds between two lines.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        who: str,
        timeout: float,
        show_line: Callable[[str], None],
        pauses: tuple[float, float],
        interval: float,
    ):
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

    def until_none(self, missing_tasks: Callable[[], dict[str, str]]) -> dict[str, str]:
        """Wait until no task is missing.

        Args:
            missing_tasks: Function that returns why tasks are missing, by task. It is called until
                it returns none; an error that it raises ends the wait.

        Returns:
            What it returned last: an empty dict, or the tasks that are missing at the timeout.
        """
        pause, longest = self._pauses
        while missing := missing_tasks():
            elapsed = self.elapsed
            if elapsed >= self.timeout:
                return missing
            if time.monotonic() >= self._next_line:
                self._next_line += self._interval
                self._show_line(
                    f"after {elapsed:.0f} s {self._who} waits for {absent(missing, self._spec)}"
                )
            time.sleep(min(pause, self.timeout - elapsed))
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

    def __init__(self, task: Task):
        self.address_family, sockaddr = resolve_address(task.address)
        self.task = task
        super().__init__(sockaddr, _Handler)

    def reply(self, request: Mapping[str, Any], host: str) -> dict[str, Any]:
        """Return the reply to a request from a host."""
        raise NotImplementedError

    def after_reply(
        self, request: Mapping[str, Any], reply: Mapping[str, Any], connection: Any
    ) -> None:
        """Go on with a connection after the reply was sent. By default, do nothing."""

    def was_received(self, request: Mapping[str, Any], reply: Mapping[str, Any]) -> None:
        """Take note that a client has received the reply and left. By default, do nothing."""

    def __enter__(self) -> TaskServer:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
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
            reply = server.reply(request, self.client_address[0])
            send(connection, reply)
            server.after_reply(request, reply, connection)
            connection.settimeout(server.exchange_s)
            # The client closes first, so TIME_WAIT stays with it and not on TensorFlow's port.
            connection.recv(1)
            server.was_received(request, reply)
