"""Preflight check: a barrier of all tasks on TensorFlow's ports before TensorFlow starts.

TensorFlow waits an hour for a task that never comes, and for ever if two tasks disagree. So before
it starts, every task listens at its own address, asks every other task for its identity, and leaves
when all tasks have met all others. A request and a reply are one JSON line each. The check does not
run TensorFlow.
"""

import errno
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tfdist.cluster.addresses import (
    PortTaken,
    UnresolvedAddress,
    bind_problem,
)
from tfdist.cluster.handshake import (
    LINE_BYTES,
    ConfigurationError,
    PeersAbsent,
    absent_too_long,
    another_task,
    claimed_twice,
    compare,
    hello_message,
    installed_versions,
    receive,
    send,
    short,
    some,
)
from tfdist.cluster.meeting import TaskServer, Wait, connect, for_each
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.runtime.launch_protocol import note_met

logger = logging.getLogger("tfdist")

PROGRESS_S = 10.0  # between two progress lines
# Pause between two attempts to reach an absent task: the first one, and the maximum.
FIRST_S = 0.02
RETRY_S = 0.2
EXCHANGE_S = 3.0  # timeout of one request and its reply
LINGER_S = 1.0  # time for which a failed task still replies


def check(
    spec: ClusterSpec,
    timeout: float = 300.0,
    attempt: str = "0",
    versions: str | None = None,
    progress: Callable[[str], None] = logger.info,
) -> None:
    """Block until every listening task (all but the evaluator) has met all others.

    Each of these tasks calls it. Afterwards this task's port is free for TensorFlow. An evaluator
    returns at once.

    Args:
        spec: Cluster with this process's task.
        timeout: Seconds until absent tasks are an error, default 300. Tasks whose names do not
            resolve count as absent.
        attempt: Number of the start of the cluster, default "0". A task of another attempt counts
            as absent.
        versions: Text that must be equal on all tasks, default `installed_versions()`.
        progress: Function that receives a line every 10 s with the missing tasks, default the INFO
            log.

    Raises:
        ConfigurationError: If this process's address or port cannot be used, or if the tasks
            disagree: different clusters, different versions, two processes that claim one task,
            another task at an address. It is a ValueError.
        PeersAbsent: If tasks are missing at the timeout. It is a TimeoutError that names each of
            them with its address and its last error.

    Example:
        >>> check(ClusterSpec.local(workers=1).for_task("worker", 0))
    """
    if spec.task is None:
        raise ConfigurationError(
            f"{spec.source}: this process is not a task of the cluster; choose a task with for_task"
        )
    if spec.task in spec.listening_tasks:
        _Barrier(
            spec, spec.task, timeout, attempt, versions or installed_versions(), progress
        ).run()


class _Barrier:
    """One task's side of the barrier.

    It sends requests from the caller's thread and replies from the server's threads.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        me: Task,
        timeout: float,
        attempt: str,
        versions: str,
        progress: Callable[[str], None],
    ):
        self.spec = spec
        self.me = me
        self.attempt = attempt
        self.wait = Wait(
            spec,
            str(me),
            timeout,
            lambda line: progress(f"preflight: {line}"),
            (FIRST_S, RETRY_S),
            PROGRESS_S,
        )
        self.peers = {str(task): task for task in spec.listening_tasks if task != me}
        self.leader = spec.listening_tasks[0]
        nonce = uuid.uuid4().hex
        self.hello = hello_message(spec, str(me), versions, attempt, nonce)
        self.nonces = {str(me): nonce}  # by task, of every process that sent a hello message
        self.met: set[str] = set()  # tasks that replied at their address and are compatible
        self.ready: set[str] = set()  # on the leader: the tasks that have met all others
        self.notified: set[str] = set()  # on the leader: the tasks that have received the go
        self.released = False
        self.fault: Exception | None = None
        self.lock = threading.Lock()

    def run(self) -> None:
        self._wait(self._names_missing)
        with _serve(self):
            try:
                self._wait(self._tasks_missing)
                if self.me == self.leader:
                    self._wait(lambda: dict.fromkeys(self.peers.keys() - self.ready, "not ready"))
                    self.released = True
                    self._wait(
                        lambda: dict.fromkeys(
                            self.peers.keys() - self.notified, "has not received the start signal"
                        )
                    )
                else:
                    self._wait(self._leader_missing)
            except (ConfigurationError, PeersAbsent) as error:
                self._fail(error)
                # Tell the known tasks the reason now. Tasks that come later receive it in a reply.
                self._exchange_all(self.peers.keys() & self.nonces.keys())
                time.sleep(LINGER_S)
                raise
        logger.info(
            "preflight: all %d tasks met after %.1f s", len(self.peers) + 1, self.wait.elapsed
        )
        note_met()

    def answer(self, hello: Mapping[str, Any], host: str) -> dict[str, Any]:
        """Return the reply to another process's hello message."""
        if hello.get("attempt") != self.attempt:
            return self.hello  # a process of another attempt is about to exit: not a fault
        name = str(hello.get("task"))
        if self._is_compatible(hello, f"{name} at {host}") and hello.get("ready"):
            self.ready.add(name)
        return {
            **self._message(),
            "go": self.released,
            "missing": some(self.peers.keys() - self.ready),
        }

    def _message(self) -> dict[str, Any]:
        if not self.fault:
            return self.hello
        permanent = isinstance(self.fault, ConfigurationError)
        return {**self.hello, "fault": str(self.fault)[: LINE_BYTES // 8], "permanent": permanent}

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
        answers = self._exchange_all(self.peers.keys() - self.met)
        self.met |= {name for name, (reply, _) in answers.items() if reply}
        return {name: reason for name, (reply, reason) in answers.items() if not reply}

    def _exchange_all(self, names: Iterable[str]) -> dict[str, tuple[dict[str, Any], str]]:
        return for_each(lambda name: self._exchange(self.peers[name]), names)

    def _leader_missing(self) -> dict[str, str]:
        reply, reason = self._exchange(self.leader, ready=True)
        if reply and not reply.get("go"):
            reason = f"it waits for {short(reply.get('missing'))}"
        return {str(self.leader): reason} if reason else {}

    def _exchange(self, task: Task, ready: bool = False) -> tuple[dict[str, Any], str]:
        """Send the hello message to a task; return its reply and "", or {} and why there is none.

        A permanent error is recorded as the fault of this side.
        """
        limit = time.monotonic() + EXCHANGE_S
        try:
            with connect(task.address, EXCHANGE_S) as connection:
                send(connection, {**self._message(), "ready": ready})
                reply = receive(connection, limit)
        except (OSError, ValueError) as error:
            return {}, str(error)
        if reply.get("attempt") != self.attempt:
            return (
                {},
                f"still attempt {short(reply.get('attempt'))} there, this is attempt "
                f"{self.attempt}",
            )
        if not self._is_compatible(reply, f"{task} at {task.address}", expected=str(task)):
            return {}, "see the fault"
        return reply, ""

    def _is_compatible(
        self, hello: Mapping[str, Any], peer: str, expected: str | None = None
    ) -> bool:
        """Return whether another process is compatible; record the fault if it is not."""
        try:
            self._compare(hello, peer)
            if expected and hello["task"] != expected:
                raise another_task(hello["task"], str(self.me), peer)
            if "fault" in hello:
                kind = ConfigurationError if hello.get("permanent") else PeersAbsent
                raise kind(f"{hello['task']} gave up: {hello['fault']}")
        except (ConfigurationError, PeersAbsent) as error:
            self._fail(error)
            return False
        return True

    def _compare(self, hello: Mapping[str, Any], peer: str) -> None:
        compare(hello, peer, self.hello, self.spec.source)
        with self.lock:
            first_nonce = self.nonces.setdefault(str(hello.get("task")), str(hello.get("nonce")))
        if first_nonce != hello.get("nonce"):
            raise claimed_twice(hello.get("task"), str(self.me), peer)

    def _fail(self, error: Exception) -> None:
        with self.lock:
            self.fault = self.fault or error

    def _wait(self, missing_tasks: Callable[[], dict[str, str]]) -> None:
        """Wait until no task is missing; raise the fault of this side, or `PeersAbsent`."""

        def missing_or_fault() -> dict[str, str]:
            missing = missing_tasks()
            if self.fault:
                raise self.fault
            return missing

        if missing := self.wait.until_none(missing_or_fault):
            seconds = self.wait.timeout
            raise PeersAbsent(
                f"preflight of {self.me}: {absent_too_long(missing, self.spec, seconds)}"
            )


class _Server(TaskServer):
    def __init__(self, barrier: _Barrier):
        self.exchange_s = EXCHANGE_S
        self.barrier = barrier
        super().__init__(barrier.me)

    def reply(self, request: Mapping[str, Any], host: str) -> dict[str, Any]:
        return self.barrier.answer(request, host)

    def was_received(self, request: Mapping[str, Any], reply: Mapping[str, Any]) -> None:
        if reply.get("go"):
            self.barrier.notified.add(str(request["task"]))


def _serve(barrier: _Barrier) -> _Server:
    try:
        return _Server(barrier)
    except OSError as error:
        kind: type[ValueError] = (
            PortTaken if error.errno == errno.EADDRINUSE else ConfigurationError
        )
        raise kind(bind_problem(str(barrier.me), barrier.me.address, error)) from error
