"""A meeting of all tasks on TensorFlow's ports ends in agreement or a named fault; TensorFlow never runs.

TensorFlow waits an hour for a task that never comes and for ever where two tasks disagree. So before it
starts, every task listens at its own address, asks every other task who it is, and leaves when all have met
all. A question and an answer are one JSON line each.
"""

import concurrent.futures
import errno
import hashlib
import importlib.metadata
import json
import logging
import platform
import socket
import socketserver
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tfdist.addresses import PortTaken, UnresolvedAddress, bind_problem, resolve_address, split_address
from tfdist.cluster import ClusterSpec, Task
from tfdist.contract import CONFIGURATION_CODE, TRANSIENT_CODE

logger = logging.getLogger("tfdist")

PROGRESS_S = 10.0  # between two lines that say whom we wait for
FIRST_S, RETRY_S = 0.02, 0.2  # between two attempts to reach an absent task: the first time, and at most
EXCHANGE_S = 3.0  # for one question and its answer
LINGER_S = 1.0  # how long a task that failed goes on answering
LINE_BYTES = 8192
NAMED = 16  # names of tasks in one message at most


class ConfigurationError(ValueError):
    """The tasks do not fit together, and starting them again will not help."""

    exit_code = CONFIGURATION_CODE


class PeersAbsent(TimeoutError):
    """Some tasks did not come in time; starting again may help."""

    exit_code = TRANSIENT_CODE


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
        _Meeting(spec, spec.task, timeout, attempt, versions or installed_versions(), progress).hold()


def installed_versions() -> str:
    """The versions that must be equal on all tasks, from the packages' metadata.

    >>> "python 3." in installed_versions()
    True
    """
    found = [f"python {'.'.join(platform.python_version_tuple()[:2])}"]
    for package in ("tensorflow", "keras", "tfdist"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


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
        self.spec, self.me, self.timeout, self.attempt, self.progress = spec, me, timeout, attempt, progress
        self.peers = {str(task): task for task in spec.listening_tasks if task != me}
        self.leader = spec.listening_tasks[0]
        nonce = uuid.uuid4().hex
        self.badge: dict[str, Any] = {
            "tfdist": 1,
            "task": str(me),
            "cluster": _fingerprint(spec),
            "versions": versions,
            "attempt": attempt,
            "nonce": nonce,
        }
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
                    self._wait(lambda: dict.fromkeys(self.peers.keys() - self.told, "has not heard: go"))
                else:
                    self._wait(self._leader_waits)
            except (ConfigurationError, PeersAbsent) as error:
                self._fail(error)
                # Those we know hear the reason now, those about to come when they ask: nobody waits in vain.
                self._ask_all(self.peers.keys() & self.nonces.keys())
                time.sleep(LINGER_S)
                raise
        logger.info("preflight: all %d tasks met after %.1f s", len(self.peers) + 1, self._elapsed())

    def answer(self, hello: Mapping[str, Any], host: str) -> dict[str, Any]:
        """The reply to another process's badge."""
        if hello.get("attempt") != self.attempt:
            return self.badge  # a process of another attempt, on its way out: no fault
        name = str(hello.get("task"))
        if self._judge(hello, f"{name} at {host}") and hello.get("ready"):
            self.ready.add(name)
        return {**self._message(), "go": self.go, "missing": _some(self.peers.keys() - self.ready)}

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
            reason = f"it waits for {_short(reply.get('missing'))}"
        return {str(self.leader): reason} if reason else {}

    def _ask(self, task: Task, ready: bool = False) -> tuple[dict[str, Any], str]:
        """A task's reply to our badge and "", or {} and why there is none; what cannot mend is a fault."""
        limit = time.monotonic() + EXCHANGE_S
        try:
            with socket.create_connection(split_address(task.address), timeout=EXCHANGE_S) as connection:
                _send(connection, {**self._message(), "ready": ready})
                reply = _receive(connection, limit)
        except (OSError, ValueError) as error:
            return {}, str(error)
        if reply.get("nonce") == self.badge["nonce"]:
            return {}, "nobody listens"  # Linux can connect a free port to itself
        if reply.get("attempt") != self.attempt:
            return {}, f"still attempt {_short(reply.get('attempt'))} there, this is attempt {self.attempt}"
        if not self._judge(reply, f"{task} at {task.address}", expected=str(task)):
            return {}, "see the fault"
        return reply, ""

    def _judge(self, badge: Mapping[str, Any], who: str, expected: str | None = None) -> bool:
        """Whether another process fits this one; if not, that is this meeting's fault."""
        try:
            self._compare(badge, who)
            if expected and badge["task"] != expected:
                raise ConfigurationError(
                    f"{self.me} expected {who} and found {badge['task']}: the address leads to another "
                    "machine; check the hosts' names and addresses"
                )
            if "fault" in badge:
                kind = ConfigurationError if badge.get("permanent") else PeersAbsent
                raise kind(f"{badge['task']} gave up: {badge['fault']}")
        except (ConfigurationError, PeersAbsent) as error:
            self._fail(error)
            return False
        return True

    def _compare(self, badge: Mapping[str, Any], who: str) -> None:
        if badge.get("cluster") != self.badge["cluster"]:
            raise ConfigurationError(
                f"{who} has a different cluster spec: {_short(badge.get('cluster'))}; {self.me} has "
                f"{self.badge['cluster']} from {self.spec.source}; give all of them the same file"
            )
        if badge.get("versions") != self.badge["versions"]:
            raise ConfigurationError(
                f"{who} has different versions: {_short(badge.get('versions'))}; {self.me} has "
                f"{self.badge['versions']}; install the same on all machines"
            )
        with self.lock:
            known = self.nonces.setdefault(str(badge.get("task")), str(badge.get("nonce")))
        if known != badge.get("nonce"):
            raise ConfigurationError(
                f"two processes claim to be {badge.get('task')}, {self.me} saw one as {who}; start each "
                "task once, and after a failure all of them again"
            )

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
            tasks = {str(task): task for task in self.spec.listening_tasks}
            whom = "; ".join(
                f"{name} at {tasks[name].address} ({missing[name]})" for name in _some(missing.keys())
            )
            if self._elapsed() >= self.timeout:
                raise PeersAbsent(
                    f"preflight of {self.me}: after {self.timeout:g} s, {len(missing)} of {len(tasks)} tasks "
                    f"are absent: {whom}. Start them with this cluster, and let this machine connect to them"
                )
            if time.monotonic() >= self.next_line:
                self.next_line += PROGRESS_S
                self.progress(f"preflight: after {self._elapsed():.0f} s {self.me} waits for {whom}")
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
            hello = _receive(self.request, time.monotonic() + EXCHANGE_S)
            reply = self.server.meeting.answer(hello, self.client_address[0])
            _send(self.request, reply)
            self.request.settimeout(EXCHANGE_S)
            self.request.recv(1)  # the asker closes first: TIME_WAIT stays with it, not on TensorFlow's port
        except (OSError, ValueError):
            return  # a stranger, or a task that left; a task asks again
        if reply.get("go"):
            self.server.meeting.told.add(str(hello["task"]))


def _serve(meeting: _Meeting) -> _Server:
    try:
        return _Server(meeting)
    except OSError as error:
        kind: type[ValueError] = PortTaken if error.errno == errno.EADDRINUSE else ConfigurationError
        raise kind(bind_problem(str(meeting.me), meeting.me.address, error)) from error


def _fingerprint(spec: ClusterSpec) -> str:
    tasks = [[str(task), task.address] for task in spec.listening_tasks]
    return f"{len(tasks)} tasks, {hashlib.sha256(json.dumps(tasks).encode()).hexdigest()[:12]}"


def _some(names: Iterable[str]) -> list[str]:
    return sorted(names)[:NAMED]


def _short(value: Any) -> str:
    return str(value)[:300]  # from the network


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, limit: float) -> dict[str, Any]:
    """One JSON line of a tfdist task, complete before `limit` on the monotonic clock."""
    line = b""
    try:
        while not line.endswith(b"\n"):
            connection.settimeout(max(limit - time.monotonic(), 0.001))
            piece = connection.recv(LINE_BYTES)
            line += piece
            if not piece or len(line) > LINE_BYTES:
                raise ValueError("closed" if not piece else "too long a line")
            if not line.startswith(b"{"):  # TensorFlow of a task that may go already; closing would wait for the end of its line
                raise ValueError("not of tfdist")
        message = json.loads(line)
        if not isinstance(message, dict) or message.get("tfdist") != 1:
            raise ValueError("not of tfdist")
    except (TimeoutError, ValueError, RecursionError) as error:
        raise ValueError(
            f"a process listens there, but is no tfdist preflight: it sent {line[:40]!r} ({error})"
        ) from error
    return message
