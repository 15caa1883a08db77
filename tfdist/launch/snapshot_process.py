"""Snapshot process: holds the newest snapshots of a launch in memory.

    python -I -S snapshot_process.py NAME [DESCRIPTOR OF THE LISTENING SOCKET]

`tfdist.runtime.snapshot_protocol` describes what clients send. The launcher sends JSON lines to the
standard input, whose end means that the launcher is gone: {"secret": HEX} first, and for each
generation of a launch over several hosts {"peers": [[HOST, ADDRESS], ...], "own": INDEX,
"generation": NUMBER, "launch": NAME}.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tfdist.launch.snapshot_holder import Holder, Part, Position
from tfdist.launch.snapshot_peers import Over, Peers
from tfdist.runtime import resource_limits
from tfdist.runtime.snapshot_protocol import PACKET_BYTES, address_of, is_own

NICE = 5  # lower than that of training, which waits for an answer only at its next save


class Service:
    """Answer the messages of clients and of the launcher.

    Attributes:
        peers: Servers of the other hosts; None without other hosts.
    """

    def __init__(self) -> None:
        self.peers: Peers | None = None
        self._listener: socket.socket | None = None
        self._holder = Holder()
        self._waiting: dict[tuple[str, Position], list[socket.socket]] = {}

    def obey(self, message: dict[str, Any], listener: socket.socket | None) -> None:
        """Process a message of the launcher.

        Args:
            message: The message.
            listener: Listening socket for the servers of other hosts, if any.
        """
        if "secret" in message:
            if listener is not None:
                self.peers = Peers(
                    self._holder,
                    listener,
                    bytes.fromhex(message["secret"]),
                    lambda: resource_limits.memory()[0],
                )
        elif self.peers is not None:
            self.peers.meet(**message)

    def answer(self, message: dict[str, Any], connection: socket.socket, fds: list[int]) -> None:
        """Answer a message of a client; the descriptors now belong to this object.

        Args:
            message: Message of the client.
            connection: Connection to the client.
            fds: Descriptors that came with the message.
        """
        if "put" in message and len(fds) == 1:
            self._put(message, connection, fds)
        elif "get" in message:
            self._in_thread(self._get, message["get"], message, connection)
        elif "drop" in message:
            self._in_thread(self._drop, message["drop"], connection)

    def _in_thread(self, function: Any, *args: Any) -> None:
        """Call a function, in a thread of its own if it has to wait for other hosts."""
        if self.peers is None:
            function(*args)
        else:
            threading.Thread(target=function, args=args, daemon=True).start()

    def _put(self, put: dict[str, Any], connection: socket.socket, fds: list[int]) -> None:
        seconds = put["seconds"]
        position = (put["attempt"], *put["at"])
        part = Part(put["put"], position, put["parts"], put["part"], fds[0], put["size"])
        if self.peers is None:
            fds.clear()
            self._hold(part, connection)
        else:
            self._in_thread(self._share, part, seconds, connection)
            fds.clear()  # not before: there may be no thread left

    def _hold(self, part: Part, connection: socket.socket) -> None:
        """Hold a part, and answer all who wait for the snapshot if it is the last one."""
        run, position = part.run, part.position
        superseded = self._holder.put(part)
        if superseded is not None:
            send(connection, {"superseded": superseded})
            return
        waiting = self._waiting.setdefault((run, position), [])
        waiting.append(connection)
        if self._holder.is_whole(run, position):
            self._holder.complete(run, position)
            for each in waiting:
                send(each, {"complete": position[1:], "uncopied": ""})
            for older in [key for key in self._waiting if key[0] == run and key[1] <= position]:
                del self._waiting[older]

    def _share(self, part: Part, seconds: float, connection: socket.socket) -> None:
        """Hold a part, and answer once all hosts together have the snapshot."""
        assert self.peers is not None
        limit = time.monotonic() + seconds
        try:
            self.peers.check(part.position[0])
        except Over as error:
            os.close(part.descriptor)
            send(connection, {"superseded": error.generation})
            return
        except TimeoutError as error:
            os.close(part.descriptor)
            send(connection, {"failed": str(error)})
            return
        superseded = self._holder.put(part)
        if superseded is not None:
            send(connection, {"superseded": superseded})
            return
        try:
            left = limit - time.monotonic()
            problem = self.peers.share(part.run, part.position, part.index, left)
        except Exception as error:
            send(connection, {"failed": str(error)})
            return
        send(connection, {"complete": part.position[1:], "uncopied": problem})

    def _get(self, run: str, get: dict[str, Any], connection: socket.socket) -> None:
        part = get["part"]
        try:
            held = self._find(run, part, get["attempt"])
        except Exception:  # of another host; training resumes from the disk
            held = None
        if held is None:
            send(connection, {})
            return
        position, parts, descriptor, size = held
        send(connection, {"position": position, "parts": parts, "size": size}, descriptor)
        os.close(descriptor)

    def _find(self, run: str, part: int, attempt: int) -> tuple[Position, int, int, int] | None:
        """Return position, number of parts, descriptor and bytes of a part of the newest one."""
        if self.peers is None:
            inventory = self._holder.inventory(run)
            whole = [each for each, (parts, held) in inventory.items() if len(held) == parts]
            if not whole:
                return None
            position = max(whole)
            parts = inventory[position][0]
        else:
            found = self.peers.newest(run, attempt)
            if found is None:
                return None
            position, parts = found.position, len(found.where)
            self.peers.fetch(run, found, part)
        held = self._holder.get(run, position, part)
        return None if held is None else (position, parts, *held)

    def _drop(self, run: str, connection: socket.socket) -> None:
        try:
            if self.peers is None:
                self._holder.drop(run)
            else:
                self.peers.drop(run)
        finally:
            send(connection, {})


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


def serve(name: str, stdin: int, listener: socket.socket | None) -> None:
    """Serve until the launcher is gone.

    Args:
        name: Name of the server.
        stdin: Descriptor of the pipe with the launcher's messages.
        listener: Listening socket for the servers of other hosts, if any.
    """
    service = Service()
    lines = b""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as clients,
        selectors.DefaultSelector() as selector,
    ):
        clients.bind(address_of(name))
        clients.listen(128)
        clients.setblocking(False)
        selector.register(clients, selectors.EVENT_READ)
        selector.register(stdin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == stdin:
                    data = os.read(stdin, PACKET_BYTES)
                    if not data:
                        return
                    *whole, lines = (lines + data).split(b"\n")
                    for line in whole:
                        service.obey(json.loads(line), listener)
                    continue
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is clients:
                    with contextlib.suppress(OSError):
                        client, _ = clients.accept()
                        client.setblocking(False)
                        if is_own(client):
                            selector.register(client, selectors.EVENT_READ)
                        else:
                            client.close()
                elif not _serve_one(service, connection):
                    selector.unregister(connection)
                    connection.close()


def _serve_one(service: Service, connection: socket.socket) -> bool:
    """Answer a client's next message; return whether the connection is still of use."""
    fds: list[int] = []
    try:
        data, fds, _, _ = socket.recv_fds(connection, PACKET_BYTES, 4)
        if not data:
            return False
        service.answer(json.loads(data), connection, fds)
        return True
    except BlockingIOError:
        return True
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return False  # a client that is gone, or no client of this version
    finally:
        for descriptor in fds:
            os.close(descriptor)


def main() -> None:
    """Run the process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    name, *descriptors = sys.argv[1:]
    listener = socket.socket(fileno=int(descriptors[0])) if descriptors else None
    serve(name, sys.stdin.fileno(), listener)


if __name__ == "__main__":
    main()
