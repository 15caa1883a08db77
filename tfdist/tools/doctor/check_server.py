"""Server of the doctor protocol, at the addresses of this host's tasks.

A client chooses no path, address or size. A stranger can make the server tell who it is, and take a
limited number of bytes. A stranger can make it send such bytes to another task of the server's own
cluster file, as often as a cluster of that size needs. A stranger can also make it look for a file
with a name of the doctor's in directories that the server's own command line names. A client that
knows the cluster can also claim a fault of another task, and claim that a task is done.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.cluster.handshake import excerpt, send, short
from tfdist.cluster.meeting import TaskServer
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.tools.doctor.exchange import EXCHANGE_S, LINE_BYTES, STREAM_BYTES, STREAM_S, measure
from tfdist.tools.doctor.file_systems import is_token, token_name

AT_ONCE = 32  # maximum connections at a time, unless the cluster has more tasks
TOKENS = 1000  # maximum number of files to look for, unless the cluster has many tasks
# Seconds for a file of another host to appear, because network disks remember for a while that it
# was missing.
APPEAR_S = 3.0


class Responder:
    """Answers of this process to the doctors of other hosts, for all tasks of this host.

    Args:
        spec: Cluster spec.
        hello: Hello message of this process.
        facts: Further facts about this host to tell.
        directories: Directories that should be the same on all hosts; None for one that cannot be
            used here.
        show_line: Function that receives a line when another process asks for the first time, or
            says that it is done.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        hello: Mapping[str, Any],
        facts: Mapping[str, Any],
        directories: Sequence[str | None] = (),
        show_line: Callable[[str], None] = lambda line: None,
    ):
        self.spec = spec
        self.hello = dict(hello)
        self.facts = dict(facts)
        self.directories = tuple(directories)
        self.addresses = {str(task): task.address for task in spec.listening_tasks}
        self.done: dict[str, str] = {}  # task -> fault that its doctor found, "" for none
        self.waits_for: dict[str, str] = {}  # tasks that are missing here, and why
        # process -> tasks of this host that it asked who they are
        self.askers: dict[str, set[str]] = {}
        self._show_line = show_line
        self._known = set[str]()
        self._measuring = threading.Lock()
        self._left = {
            "measure": 4 * len(self.addresses) + 40,
            "stream": 4 * len(self.addresses) + 40,
            "token": max(TOKENS, 8 * len(self.addresses)),
        }
        self._lock = threading.Lock()

    def answer(self, request: Mapping[str, Any], task: str, host: str) -> dict[str, Any]:
        """Answer a question.

        Args:
            request: Message that was received.
            task: Task of this host that was asked.
            host: Name of the host that asked, for messages.

        Returns:
            Fields of the answer.
        """
        question = short(request.get("ask"))
        received_at = time.time()
        nonce = short(request.get("nonce"))
        self._notice(request, host)
        own = {**self.hello, "task": task}
        if question == "hello":
            with self._lock:
                if nonce in self.askers or len(self.askers) < 10000:
                    self.askers.setdefault(nonce, set()).add(task)
            missing = {"missing": excerpt(self.waits_for), "missing_count": len(self.waits_for)}
            times = {"received": received_at, "now": time.time()}
            return {**own, **self.facts, **missing, **times}
        if request.get("cluster") != self.hello["cluster"]:
            return {**own, "refused": "the cluster specs differ"}
        if question == "done":
            self._note_done(request)
            return own
        if question in self._left and not self._use_quota(question):
            return {
                **own,
                "refused": f"this doctor was asked to {question} too often; start it again",
            }
        if question == "token":
            return {**own, **self._token_content(request)}
        if question == "measure":
            return {**own, **self._measure(task, request.get("peer"))}
        if question == "stream":
            return own
        return {**own, "refused": f"no such question: {question!r}"}

    def _notice(self, request: Mapping[str, Any], host: str) -> None:
        name = f"{short(request.get('task'))} at {host}"
        with self._lock:
            new = name not in self._known and len(self._known) < 10000
            self._known.add(name) if new else None
        if new:
            self._show_line(f"{name} asks")

    def _note_done(self, request: Mapping[str, Any]) -> None:
        names = request.get("serves")
        wrong = short(request.get("wrong") or "")
        for name in names if isinstance(names, list) else []:
            if not isinstance(name, str) or name not in self.addresses:
                continue
            with self._lock:
                # A fault counts even if somebody said before that there is none.
                new = name not in self.done or bool(wrong and not self.done[name])
                self.done[name] = wrong if new else self.done[name]
            if new:
                self._show_line(
                    f"{name} is done" + (f": {self.done[name]}" if self.done[name] else "")
                )

    def _use_quota(self, question: str) -> bool:
        with self._lock:
            self._left[question] -= 1
            return self._left[question] >= 0

    def _token_content(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of a token's file that another host has written.

        The file is looked for in the directory with the same number on this host.
        """
        number = request.get("directory")
        token = request.get("token")
        if not isinstance(number, int) or isinstance(number, bool) or not is_token(token):
            return {"refused": "no token"}
        directory = self.directories[number] if 0 <= number < len(self.directories) else None
        if directory is None:
            return {"directory": None}
        path = Path(directory) / token_name(str(token))
        end = time.monotonic() + APPEAR_S
        while True:
            with contextlib.suppress(OSError):
                os.listdir(path.parent)  # makes some network disks look again
            with (
                contextlib.suppress(OSError),
                open(path, encoding="ascii", errors="replace") as file,
            ):
                text = file.read(33)
                return {
                    "directory": directory,
                    "content": text if re.fullmatch(r"[0-9a-f]{32}", text) else "",
                }
            if time.monotonic() > end:
                return {"directory": directory, "content": None}
            time.sleep(0.1)

    def _measure(self, task: str, peer: Any) -> dict[str, Any]:
        if not isinstance(peer, str) or peer not in self.addresses:
            return {"refused": "no task of this cluster"}
        with self._measuring:
            link = measure(task, peer, self.addresses[peer], self.hello)
        return {"latency": link.latency, "rate": link.rate, "error": link.error}


class Server(TaskServer):
    """Server at the address of one task, which answers from the `with` statement on.

    Args:
        responder: Source of the answers.
        task: Task at whose address it listens.

    Raises:
        OSError: If the address cannot be listened at.
    """

    exchange_s = EXCHANGE_S
    line_bytes = LINE_BYTES
    service = "doctor"

    def __init__(self, responder: Responder, task: Task):
        self.responder = responder
        # In a large cluster, all tasks may ask the first one at the same moment.
        self.at_once = max(AT_ONCE, len(responder.addresses))
        self.request_queue_size = max(TaskServer.request_queue_size, self.at_once)
        super().__init__(task)

    def reply(self, request: Mapping[str, Any], host: str) -> dict[str, Any]:
        """See `TaskServer`."""
        return self.responder.answer(request, str(self.task), host)

    def after_reply(
        self, request: Mapping[str, Any], reply: Mapping[str, Any], connection: Any
    ) -> None:
        """See `TaskServer`."""
        if request.get("ask") == "stream" and "refused" not in reply:
            _receive_stream(connection)


def _receive_stream(connection: socket.socket) -> None:
    """Echo single bytes, then count the bytes of a stream until its end or a limit.

    The limits are a number of bytes and a time.
    """
    limit = time.monotonic() + EXCHANGE_S + STREAM_S
    count = 0
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
