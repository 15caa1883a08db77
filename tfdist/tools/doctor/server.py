"""Questions at the addresses of this host's tasks are answered for a while; who asks chooses no path, address or size.

What a stranger can make it do: tell who it is; take a bounded number of bytes; send such to another task of its own cluster file, so
often as a cluster of its size needs; look for a file with a name of doctor's in places that its own command line names; who also knows
its cluster can claim a fault of another task, and that a task is done.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.cluster.addresses import resolve_address
from tfdist.cluster.handshake import receive, send, short
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.tools.doctor.exchange import EXCHANGE_S, LINE_BYTES, STREAM_BYTES, STREAM_S, measure
from tfdist.tools.doctor.file_systems import is_token, token_name

AT_ONCE = 32  # connections
SEEN_S = 3.0  # for a file of another host to appear: network disks remember for a while that it was not there


class Desk:
    """What this process answers, whichever of its tasks is asked.

    Args:
        spec: The cluster.
        badge: Of this process.
        facts: What else it tells of its host.
        places: Directories that are to be the same on all hosts; None for one that cannot be used here.
        heard: Takes a line when another process asks for the first time, or says that it is done.
    """

    def __init__(self, spec: ClusterSpec, badge: Mapping[str, Any], facts: Mapping[str, Any], places: Sequence[str | None] = (),
                 heard: Callable[[str], None] = lambda line: None):  # fmt: skip
        self.spec, self.badge, self.facts, self.places = (
            spec,
            dict(badge),
            dict(facts),
            tuple(places),
        )
        self.addresses = {str(task): task.address for task in spec.listening_tasks}
        self.done: dict[str, str] = {}  # task -> what its doctor found wrong, "" for nothing
        self.asked: dict[
            str, set[str]
        ] = {}  # process -> tasks of this host that it asked who they are
        self._heard, self._known = heard, set[str]()
        self._measuring = threading.Lock()
        self._left = {
            "measure": 4 * len(self.addresses) + 40,
            "stream": 4 * len(self.addresses) + 40,
            "token": 1000,
        }
        self._lock = threading.Lock()

    def answer(self, asked: Mapping[str, Any], task: str, host: str) -> dict[str, Any]:
        """The answer to a question.

        Args:
            asked: The line that came.
            task: Which of this host's tasks was asked.
            host: Who asked, for the messages.
        """
        question, came, nonce = short(asked.get("ask")), time.time(), short(asked.get("nonce"))
        self._notice(asked, host)
        own = {**self.badge, "task": task}
        if question == "hello":
            with self._lock:
                if nonce in self.asked or len(self.asked) < 10000:
                    self.asked.setdefault(nonce, set()).add(task)
            return {**own, **self.facts, "received": came, "now": time.time()}
        if asked.get("cluster") != self.badge["cluster"]:
            return {**own, "refused": "the cluster specs differ"}
        if question == "done":
            self._note_done(asked)
            return own
        if question in self._left and not self._spend(question):
            return {
                **own,
                "refused": f"this doctor was asked to {question} too often; start it again",
            }
        if question == "token":
            return {**own, **self._seen(asked)}
        if question == "measure":
            return {**own, **self._measure(task, asked.get("peer"))}
        if question == "stream":
            return own
        return {**own, "refused": f"no such question: {question!r}"}

    def _notice(self, asked: Mapping[str, Any], host: str) -> None:
        name = f"{short(asked.get('task'))} at {host}"
        with self._lock:
            new = name not in self._known and len(self._known) < 10000
            self._known.add(name) if new else None
        if new:
            self._heard(f"{name} asks")

    def _note_done(self, asked: Mapping[str, Any]) -> None:
        names, wrong = asked.get("serves"), short(asked.get("wrong") or "")
        for name in names if isinstance(names, list) else []:
            if not isinstance(name, str) or name not in self.addresses:
                continue
            with self._lock:
                new = name not in self.done or bool(
                    wrong and not self.done[name]
                )  # a fault counts, whoever said before that there is none
                self.done[name] = wrong if new else self.done[name]
            if new:
                self._heard(f"{name} is done" + (f": {self.done[name]}" if self.done[name] else ""))

    def _spend(self, question: str) -> bool:
        with self._lock:
            self._left[question] -= 1
            return self._left[question] >= 0

    def _seen(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What a file of a token holds, which another host has written to the place with the same number."""
        number, token = asked.get("place"), asked.get("token")
        if not isinstance(number, int) or isinstance(number, bool) or not is_token(token):
            return {"refused": "no token"}
        place = self.places[number] if 0 <= number < len(self.places) else None
        if place is None:
            return {"place": None}
        path, end = Path(place) / token_name(str(token)), time.monotonic() + SEEN_S
        while True:
            with contextlib.suppress(OSError):
                os.listdir(path.parent)  # makes some network disks look again
            with (
                contextlib.suppress(OSError),
                open(path, encoding="ascii", errors="replace") as file,
            ):
                text = file.read(33)
                return {
                    "place": place,
                    "content": text if re.fullmatch(r"[0-9a-f]{32}", text) else "",
                }
            if time.monotonic() > end:
                return {"place": place, "content": None}
            time.sleep(0.1)

    def _measure(self, task: str, peer: Any) -> dict[str, Any]:
        if not isinstance(peer, str) or peer not in self.addresses:
            return {"refused": "no task of this cluster"}
        with self._measuring:
            link = measure(task, peer, self.addresses[peer], self.badge)
        return {"latency": link.latency, "rate": link.rate, "error": link.error}


class Server(socketserver.ThreadingTCPServer):
    """Answers at one task's address, from the `with` statement on.

    Args:
        desk: Gives the answers.
        task: The task.

    Raises:
        OSError: The address cannot be listened at.
    """

    allow_reuse_address = True
    daemon_threads = False  # closing waits for the answers under way, which are bounded: TensorFlow's port must be free then
    request_queue_size = 128

    def __init__(self, desk: Desk, task: Task):
        self.address_family, sockaddr = resolve_address(task.address)
        self.desk, self.task = desk, task
        self._free = threading.BoundedSemaphore(AT_ONCE)
        super().__init__(sockaddr, _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def __enter__(self) -> Server:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(socketserver.BaseRequestHandler):
    server: Server

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # a stranger, or somebody who left
            connection: socket.socket = self.request
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked = receive(connection, time.monotonic() + EXCHANGE_S, LINE_BYTES, "doctor")
            answer = self.server.desk.answer(asked, str(self.server.task), self.client_address[0])
            send(connection, answer)
            if asked.get("ask") == "stream" and "refused" not in answer:
                _take(connection)
            connection.settimeout(EXCHANGE_S)
            connection.recv(
                1
            )  # the asker closes first: TIME_WAIT stays with it, not on TensorFlow's port


def _take(connection: socket.socket) -> None:
    """Sends back single bytes, then counts those of a stream until its end, its bound or its time."""
    limit, count = time.monotonic() + EXCHANGE_S + STREAM_S, 0
    while count < 2 * STREAM_BYTES and time.monotonic() < limit:
        connection.settimeout(max(limit - time.monotonic(), 0.001))
        piece = connection.recv(1 << 20)
        if not piece:
            break
        if piece == b"p" and not count:
            connection.sendall(piece)
            continue
        count += len(piece)
    send(connection, {"tfdist": 1, "ask": "stream", "received": count})
