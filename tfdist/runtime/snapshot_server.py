"""Snapshot server: a process that holds the newest snapshots of a launch in memory.

A training process writes a snapshot into shared memory that has no name (`memfd_create`), and sends
its file descriptor over a Unix socket. The server keeps the descriptor of the newest complete
snapshot of each directory, so that the memory outlives the training process. It does not read or
copy the content. The kernel frees the memory once no process has the descriptor, however the
processes end: nothing is left in /dev/shm.

The server and its clients exchange JSON objects, one a packet. They accept only processes of the
same user.

    {"put": RUN, "attempt": N, "part": I, "parts": K, "at": [EPOCH, STEP], "size": BYTES}, with a
        descriptor; answered when all parts of the snapshot are there: {"complete": AT}, or at once
        {"superseded": ATTEMPT}
    {"get": RUN, "part": I}; answered with a descriptor and its put, or by {}
    {"drop": RUN}; answered by {}
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from typing import Any

PACKET_BYTES = 1 << 16
MESSAGE_S = 10.0  # for an answer that needs no other process
NICE = 5  # lower than that of training, which waits for an answer only at its next save
MAX_RESTARTS = 10  # of a server that was killed
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def is_supported() -> bool:
    """Return whether this system has shared memory without a name, and sockets without a file."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def address_of(name: str) -> str:
    """Return the address of a server's socket, which is not in the file system."""
    return f"\0{name}"


def is_own(connection: socket.socket) -> bool:
    """Return whether a process of this user is at the other end of a Unix socket."""
    facts = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(facts)[1] == os.getuid()


class SnapshotServer:
    """The server process of a launcher, which ends with the launcher.

    A server that is killed is replaced by one that holds nothing yet.

    Attributes:
        name: Name by which clients find it.
    """

    def __init__(self) -> None:
        self.name = f"tfdist-{secrets.token_hex(16)}"
        self._lock = threading.Lock()
        self._closed = False
        self._process = self._start()
        self._thread = threading.Thread(target=self._replace, name="snapshot-server", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    def close(self) -> None:
        """End the server, which releases what it holds."""
        with self._lock:
            self._closed = True
            self._process.kill()
        self._thread.join()

    def _start(self) -> subprocess.Popen:
        # -I -S: without site-packages it starts in some 10 ms and does not depend on user code.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), self.name],
            stdin=subprocess.PIPE,  # its end tells the server that the launcher is gone
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # out of reach of Ctrl-C and of a kill of the launcher's group
        )

    def _replace(self) -> None:
        for _ in range(MAX_RESTARTS):
            process = self._process
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            with self._lock:
                if self._closed:
                    return
                try:
                    self._process = self._start()
                except OSError:  # no process, no memory: training goes on without it
                    return
        self._process.wait()


@dataclasses.dataclass
class _Parts:
    """Parts of one snapshot.

    Attributes:
        put: Message of the first part.
        held: Descriptor and message of each part.
        waiting: Connections that wait until all parts are there.
    """

    put: dict[str, Any]
    held: dict[int, tuple[int, dict[str, Any]]] = dataclasses.field(default_factory=dict)
    waiting: list[socket.socket] = dataclasses.field(default_factory=list)

    def belongs(self, put: dict[str, Any]) -> bool:
        """Return whether a message is of a part of the same snapshot."""
        return all(put[name] == self.put[name] for name in ("attempt", "parts", "at"))

    def add(self, put: dict[str, Any], descriptor: int) -> None:
        """Hold a part, and release the one that it replaces."""
        old = self.held.pop(put["part"], None)
        if old is not None:
            os.close(old[0])
        self.held[put["part"]] = descriptor, put

    def release(self) -> None:
        """Close the descriptors, which frees the memory that no client has open."""
        for descriptor, _ in self.held.values():
            os.close(descriptor)
        self.held.clear()


@dataclasses.dataclass
class _Run:
    """Snapshots of one directory: the newest complete one, and one whose parts arrive."""

    attempt: int = 0
    complete: _Parts | None = None
    pending: _Parts | None = None

    def release(self) -> None:
        """Release both snapshots."""
        for parts in (self.complete, self.pending):
            if parts is not None:
                parts.release()
        self.complete = self.pending = None


class Holder:
    """State of the server: what it answers to a message."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    def answer(self, message: dict[str, Any], connection: socket.socket, fds: list[int]) -> None:
        """Answer a message of a client; the descriptors now belong to this object.

        Args:
            message: Message of the client.
            connection: Connection to the client.
            fds: Descriptors that came with the message.
        """
        if "put" in message and len(fds) == 1:
            self._put(message, connection, fds.pop())
        elif "get" in message:
            run = self._runs.get(message["get"])
            held = run and run.complete and run.complete.held.get(message["part"])
            if held:
                send(connection, held[1], held[0])
            else:
                send(connection, {})
        elif "drop" in message:
            run = self._runs.pop(message["drop"], None)
            if run is not None:
                run.release()
            send(connection, {})

    def _put(self, put: dict[str, Any], connection: socket.socket, descriptor: int) -> None:
        run = self._runs.setdefault(put["put"], _Run(put["attempt"]))
        if put["attempt"] < run.attempt:
            os.close(descriptor)
            send(connection, {"superseded": run.attempt})
            return
        run.attempt = put["attempt"]
        if run.pending is None or not run.pending.belongs(put):
            if run.pending is not None:
                run.pending.release()
            run.pending = _Parts(put)
        pending = run.pending
        pending.add(put, descriptor)
        pending.waiting.append(connection)
        if len(pending.held) == put["parts"]:
            if run.complete is not None:
                run.complete.release()
            run.complete = pending
            run.pending = None
            for each in pending.waiting:
                send(each, {"complete": put["at"]})
            pending.waiting.clear()


def send(connection: socket.socket, message: dict[str, Any], descriptor: int | None = None) -> None:
    """Send a message, without waiting if the connection does not block.

    A client that is gone, or does not read, is ignored.

    Args:
        connection: Connection to the client.
        message: JSON-serializable message.
        descriptor: Descriptor to send along, or None.
    """
    with contextlib.suppress(OSError):
        data = json.dumps(message).encode()
        socket.send_fds(connection, [data], [] if descriptor is None else [descriptor])


def serve(name: str, stdin: int) -> None:
    """Serve until the end of a pipe.

    Args:
        name: Name of the server.
        stdin: Descriptor of the pipe, whose end means that the launcher is gone.
    """
    holder = Holder()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        selectors.DefaultSelector() as selector,
    ):
        listener.bind(address_of(name))
        listener.listen(128)
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(stdin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == stdin:
                    return
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is listener:
                    with contextlib.suppress(OSError):
                        client, _ = listener.accept()
                        client.setblocking(False)
                        if is_own(client):
                            selector.register(client, selectors.EVENT_READ)
                        else:
                            client.close()
                elif not _serve_one(holder, connection):
                    selector.unregister(connection)
                    connection.close()


def _serve_one(holder: Holder, connection: socket.socket) -> bool:
    """Answer a client's next message; return whether the connection is still of use."""
    fds: list[int] = []
    try:
        data, fds, _, _ = socket.recv_fds(connection, PACKET_BYTES, 4)
        if not data:
            return False
        holder.answer(json.loads(data), connection, fds)
        return True
    except BlockingIOError:
        return True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # a client that is gone, or no client of this version
    finally:
        for descriptor in fds:
            os.close(descriptor)


if __name__ == "__main__":
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, signal.SIG_IGN)
    os.nice(NICE)
    serve(sys.argv[1], sys.stdin.fileno())
