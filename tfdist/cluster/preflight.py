"""A meeting of all tasks on TensorFlow's ports ends in agreement or a named fault; TensorFlow never runs.

TensorFlow waits an hour for a task that never comes and for ever where two tasks disagree. So before it
starts, every task listens at its own address, asks every other task who it is, and leaves when all have met
all. A question and an answer are one JSON line each.
"""

import concurrent.futures
import errno
import logging
import socket
import socketserver
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tfdist.cluster.addresses import (
    PortTaken,
    UnresolvedAddress,
    bind_problem,
    resolve_address,
    split_address,
)
from tfdist.cluster.handshake import (
    LINE_BYTES,
    ConfigurationError,
    PeersAbsent,
    absent,
    absent_too_long,
    another_task,
    badge,
    claimed_twice,
    compare,
    installed_versions,
    receive,
    send,
    short,
    some,
)
from tfdist.cluster.spec import ClusterSpec, Task

logger = logging.getLogger("tfdist")

PROGRESS_S = 10.0  # between two lines that say whom we wait for
FIRST_S, RETRY_S = (
    0.02,
    0.2,
)  # between two attempts to reach an absent task: the first time, and at most
EXCHANGE_S = 3.0  # for one question and its answer
LINGER_S = 1.0  # how long a task that failed goes on answering


def check(
    spec: ClusterSpec,
    timeout: float = 300.0,
    attempt: str = "0",
    versions: str | None = None,
    progress: Callable[[str], None] = logger.info,
) -> None:
    """Returns when every task that listens (all but the evaluator) has met all others; each of them calls it.

    Afterwards this task's port is free for TensorFlow. An evaluator returns at once.

    Args:
      spec: the cluster, with this process's task.
      timeout: seconds until absent tasks are an error, default 300; names that do not resolve count as
        absent.
      attempt: which start of the cluster this is; a task of another one counts as absent. Default "0".
      versions: what must be equal on all tasks; default `installed_versions()`.
      progress: takes a line every 10 s that says who is missing; default the INFO log.

    Raises:
      ConfigurationError: a ValueError: this process's address or port cannot be used, or the tasks disagree:
        different clusters, different versions, two processes that claim one task, another task at an address.
      PeersAbsent: a TimeoutError: names each missing task with its address and its last error.

    >>> check(ClusterSpec.local(workers=1).for_task("worker", 0))
    """
    if spec.task is None:
        raise ConfigurationError(
            f"{spec.source}: this process is no task of the cluster; choose one with for_task"
        )
    if spec.task in spec.listening_tasks:
        _Meeting(
            spec, spec.task, timeout, attempt, versions or installed_versions(), progress
        ).hold()


class _Meeting:
    """One task's part in the meeting: it asks in the caller's thread and answers in the server's."""

    def __init__(
        self,
        spec: ClusterSpec,
        me: Task,
        timeout: float,
        attempt: str,
        versions: str,
        progress: Callable[[str], None],
    ):
        self.spec, self.me, self.timeout, self.attempt, self.progress = (
            spec,
            me,
            timeout,
            attempt,
            progress,
        )
        self.peers = {str(task): task for task in spec.listening_tasks if task != me}
        self.leader = spec.listening_tasks[0]
        nonce = uuid.uuid4().hex
        self.badge = badge(spec, str(me), versions, attempt, nonce)
        self.nonces = {str(me): nonce}  # of every process that showed a badge, by task
        self.met: set[str] = set()  # asked at their address and found in order
        self.ready: set[str] = set()  # the leader's list of those who have met everybody
        self.told: set[str] = set()  # those of them who heard that they may go
        self.go = False
        self.fault: Exception | None = None
        self.lock = threading.Lock()
        self.started = time.monotonic()
        self.next_line = self.started + PROGRESS_S

    def hold(self) -> None:
        self._wait(self._names_missing)
        with _serve(self):
            try:
                self._wait(self._tasks_missing)
                if self.me == self.leader:
                    self._wait(lambda: dict.fromkeys(self.peers.keys() - self.ready, "not ready"))
                    self.go = True
                    self._wait(
                        lambda: dict.fromkeys(self.peers.keys() - self.told, "has not heard: go")
                    )
                else:
                    self._wait(self._leader_waits)
            except (ConfigurationError, PeersAbsent) as error:
                self._fail(error)
                # Those we know hear the reason now, those about to come when they ask: nobody waits in vain.
                self._ask_all(self.peers.keys() & self.nonces.keys())
                time.sleep(LINGER_S)
                raise
        logger.info(
            "preflight: all %d tasks met after %.1f s", len(self.peers) + 1, self._elapsed()
        )

    def answer(self, hello: Mapping[str, Any], host: str) -> dict[str, Any]:
        """The reply to another process's badge."""
        if hello.get("attempt") != self.attempt:
            return self.badge  # a process of another attempt, on its way out: no fault
        name = str(hello.get("task"))
        if self._judge(hello, f"{name} at {host}") and hello.get("ready"):
            self.ready.add(name)
        return {**self._message(), "go": self.go, "missing": some(self.peers.keys() - self.ready)}

    def _message(self) -> dict[str, Any]:
        if not self.fault:
            return self.badge
        permanent = isinstance(self.fault, ConfigurationError)
        return {**self.badge, "fault": str(self.fault)[: LINE_BYTES // 8], "permanent": permanent}

    def _names_missing(self) -> dict[str, str]:
        try:
            self.spec.check_host()
        except UnresolvedAddress as error:
            return dict(error.reasons)
        except PortTaken:
            raise
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        return {}

    def _tasks_missing(self) -> dict[str, str]:
        answers = self._ask_all(self.peers.keys() - self.met)
        self.met |= {name for name, (reply, _) in answers.items() if reply}
        return {name: reason for name, (reply, reason) in answers.items() if not reply}

    def _ask_all(self, names: Iterable[str]) -> dict[str, tuple[dict[str, Any], str]]:
        tasks = [self.peers[name] for name in names]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            return dict(zip(map(str, tasks), pool.map(self._ask, tasks), strict=True))

    def _leader_waits(self) -> dict[str, str]:
        reply, reason = self._ask(self.leader, ready=True)
        if reply and not reply.get("go"):
            reason = f"it waits for {short(reply.get('missing'))}"
        return {str(self.leader): reason} if reason else {}

    def _ask(self, task: Task, ready: bool = False) -> tuple[dict[str, Any], str]:
        """A task's reply to our badge and "", or {} and why there is none; what cannot mend is a fault."""
        limit = time.monotonic() + EXCHANGE_S
        try:
            with socket.create_connection(
                split_address(task.address), timeout=EXCHANGE_S
            ) as connection:
                send(connection, {**self._message(), "ready": ready})
                reply = receive(connection, limit)
        except (OSError, ValueError) as error:
            return {}, str(error)
        if reply.get("nonce") == self.badge["nonce"]:
            return {}, "nobody listens"  # Linux can connect a free port to itself
        if reply.get("attempt") != self.attempt:
            return (
                {},
                f"still attempt {short(reply.get('attempt'))} there, this is attempt {self.attempt}",
            )
        if not self._judge(reply, f"{task} at {task.address}", expected=str(task)):
            return {}, "see the fault"
        return reply, ""

    def _judge(self, badge: Mapping[str, Any], who: str, expected: str | None = None) -> bool:
        """Whether another process fits this one; if not, that is this meeting's fault."""
        try:
            self._compare(badge, who)
            if expected and badge["task"] != expected:
                raise another_task(badge["task"], str(self.me), who)
            if "fault" in badge:
                kind = ConfigurationError if badge.get("permanent") else PeersAbsent
                raise kind(f"{badge['task']} gave up: {badge['fault']}")
        except (ConfigurationError, PeersAbsent) as error:
            self._fail(error)
            return False
        return True

    def _compare(self, badge: Mapping[str, Any], who: str) -> None:
        compare(badge, who, self.badge, self.spec.source)
        with self.lock:
            known = self.nonces.setdefault(str(badge.get("task")), str(badge.get("nonce")))
        if known != badge.get("nonce"):
            raise claimed_twice(badge.get("task"), str(self.me), who)

    def _fail(self, error: Exception) -> None:
        with self.lock:
            self.fault = self.fault or error

    def _wait(self, pending: Callable[[], dict[str, str]]) -> None:
        """Repeats `pending`, which returns the tasks we wait for with the reason, until there are none."""
        pause = FIRST_S
        while True:
            missing = pending()
            if self.fault:
                raise self.fault
            if not missing:
                return
            if self._elapsed() >= self.timeout:
                raise PeersAbsent(
                    f"preflight of {self.me}: {absent_too_long(missing, self.spec, self.timeout)}"
                )
            if time.monotonic() >= self.next_line:
                self.next_line += PROGRESS_S
                self.progress(
                    f"preflight: after {self._elapsed():.0f} s {self.me} waits for {absent(missing, self.spec)}"
                )
            time.sleep(pause)
            pause = min(2 * pause, RETRY_S)

    def _elapsed(self) -> float:
        return time.monotonic() - self.started


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = False  # closing waits for the answers under way, each within 2 * EXCHANGE_S
    request_queue_size = 128

    def __init__(self, meeting: _Meeting):
        self.address_family, sockaddr = resolve_address(meeting.me.address)
        self.meeting = meeting
        super().__init__(sockaddr, _Handler)

    def __enter__(self) -> "_Server":
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        try:
            hello = receive(self.request, time.monotonic() + EXCHANGE_S)
            reply = self.server.meeting.answer(hello, self.client_address[0])
            send(self.request, reply)
            self.request.settimeout(EXCHANGE_S)
            self.request.recv(
                1
            )  # the asker closes first: TIME_WAIT stays with it, not on TensorFlow's port
        except (OSError, ValueError):
            return  # a stranger, or a task that left; a task asks again
        if reply.get("go"):
            self.server.meeting.told.add(str(hello["task"]))


def _serve(meeting: _Meeting) -> _Server:
    try:
        return _Server(meeting)
    except OSError as error:
        kind: type[ValueError] = (
            PortTaken if error.errno == errno.EADDRINUSE else ConfigurationError
        )
        raise kind(bind_problem(str(meeting.me), meeting.me.address, error)) from error
