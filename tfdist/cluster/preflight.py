"""Preflight check: a barrier of all tasks on TensorFlow's ports before TensorFlow starts.

TensorFlow waits an hour for a task that never comes, and for ever if two tasks disagree. So before
it starts, every task listens at its own address, asks other tasks for their identities, and leaves
when all tasks have met. Up to 32 tasks, each asks all others. In a larger cluster, the first task
asks all others, and each of the others asks the first task and the one before it in TensorFlow's
ring, so that the number of connections grows with the number of tasks and not with its square. A
request and a reply are one JSON line each. The check does not run TensorFlow.
"""

import dataclasses
import errno
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tfdist.cluster import meeting
from tfdist.cluster.addresses import (
    PortTaken,
    UnresolvedAddress,
    bind_problem,
)
from tfdist.cluster.handshake import (
    LINE_BYTES,
    ConfigurationError,
    PeersAbsent,
    absent,
    absent_too_long,
    another_task,
    check_signature,
    claimed_twice,
    compare,
    excerpt,
    hello_message,
    installed_versions,
    receive,
    send,
    short,
)
from tfdist.cluster.meeting import ACKNOWLEDGED, Attempts, TaskServer, Wait, connect, for_each
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.runtime.formatting import printable
from tfdist.runtime.launch_protocol import note_met, task_secret

logger = logging.getLogger("tfdist")

PROGRESS_S = 10.0  # between two progress lines
# Pause between two attempts to reach an absent task: the first one, and the maximum.
FIRST_S = 0.02
RETRY_S = 0.2
EXCHANGE_S = 3.0  # timeout of one request and its reply
LINGER_S = 1.0  # time for which a failed task still replies
ALL_PAIRS = 32  # maximum number of tasks of which each asks all others
# In a larger cluster, pauses and the timeout of the first task's replies grow with the number of
# tasks, because all of them ask the first one.
LEADER_AT_ONCE = 64  # tasks that the first task asks at the same time
ROUND_S = 1.0  # time after which no further task is asked in a round
FAREWELL_S = 10.0  # time after which no further task is told of a fault
REPLIES = 128  # number of requests that a task can answer within EXCHANGE_S on a busy machine


def check(
    spec: ClusterSpec,
    timeout: float = 300.0,
    attempt: str = "0",
    versions: str | None = None,
    progress: Callable[[str], None] = logger.info,
    secret: bytes | None = None,
) -> None:
    """Block until the listening tasks (all but the evaluator) have met.

    Each of these tasks calls it. Up to 32 tasks, every pair of them meets. In a larger cluster, the
    first task meets all others, and each task also meets the one before it in TensorFlow's ring.
    Afterwards this task's port is free for TensorFlow. An evaluator returns at once.

    Args:
        spec: Cluster with this process's task.
        timeout: Seconds until absent tasks are an error, default 300. Tasks whose names do not
            resolve count as absent.
        attempt: Number of the start of the cluster, default "0". A task of another attempt counts
            as absent.
        versions: Text that must be equal on all tasks, default `installed_versions()`.
        progress: Function that receives a line every 10 s with the missing tasks, default the INFO
            log.
        secret: Secret of the tasks of this launch, default that of the launcher. With it, messages
            of processes that do not have it are ignored; b"" for none.

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
            spec,
            spec.task,
            timeout,
            attempt,
            versions or installed_versions(),
            progress,
            task_secret() if secret is None else secret,
        ).run()


@dataclasses.dataclass(frozen=True)
class _Fault:
    """The reason why a task gives up.

    Attributes:
        error: Error to raise here.
        finder: Task that found the fault.
        text: Message of the error there.
        sender: Task that told this one; "" if this one found it.
    """

    error: Exception
    finder: str
    text: str
    sender: str = ""


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
        secret: bytes,
    ):
        self.secret = secret
        self.spec = spec
        self.me = me
        self.attempt = attempt
        self.tasks = {str(task): task for task in spec.listening_tasks}
        self.leader = spec.listening_tasks[0]
        self.peers = peers_of(spec.listening_tasks, me)  # the tasks that this task asks
        self.at_once = LEADER_AT_ONCE if len(self.tasks) > ALL_PAIRS else meeting.AT_ONCE
        self.pause = RETRY_S * max(1.0, len(self.tasks) / ALL_PAIRS)
        # Set when another task's message may have ended the wait.
        self.news = threading.Event()
        self.wait = Wait(
            spec,
            str(me),
            timeout,
            lambda line: progress(f"preflight: {line}"),
            (FIRST_S, RETRY_S),
            PROGRESS_S,
            self._sleep,
        )
        nonce = uuid.uuid4().hex
        self.hello = hello_message(spec, str(me), versions, attempt, nonce)
        self.nonces = {str(me): nonce}  # by task, of every process that sent a hello message
        self.attempts = Attempts(FIRST_S, self.pause if me == self.leader else RETRY_S)
        self.reasons: dict[str, str] = {}  # of the last failure to meet a task, by task
        self.missing: dict[str, str] = {}  # what this task waits for now
        self.missing_count = 0  # the number of tasks for which the leader waits
        self.met: set[str] = set()  # peers that replied at their address and are compatible
        self.ready: set[str] = set()  # on the leader: the tasks that have met their peers
        self.notified: set[str] = set()  # on the leader: the tasks that have received the go
        self.released = False
        self.fault: _Fault | None = None
        self.lock = threading.Lock()

    def run(self) -> None:
        self._wait(self._names_missing)
        with _serve(self):
            try:
                self._wait(self._tasks_missing)
                self.attempts = Attempts(self.pause, self.pause)
                if self.me == self.leader:
                    for name in self.peers:
                        self.attempts.asked(name)
                    self._wait(self._unready, self.pause)
                    self.released = True
                    self.attempts = Attempts(self.pause, self.pause)
                    self._wait(self._unnotified, self.pause)
                else:
                    self._wait(self._leader_missing, self.pause)
            except (ConfigurationError, PeersAbsent) as error:
                self._fail(self._own_fault(error))
                # Tell the known tasks the reason now. Tasks that come later receive it in a reply.
                self._tell_fault(self.fault.sender if self.fault else "")
                time.sleep(LINGER_S)
                raise
        logger.info("preflight: all %d tasks met after %.1f s", len(self.tasks), self.wait.elapsed)
        note_met()

    def answer(self, hello: Mapping[str, Any], host: str) -> dict[str, Any]:
        """Return the reply to another process's hello message."""
        if hello.get("attempt") != self.attempt:
            return self.hello  # a process of another attempt is about to exit: not a fault
        name = short(hello.get("task"))
        if self._is_compatible(hello, f"{name} at {host}"):
            if hello.get("ready"):
                self.ready.add(name)
            if name in self.peers and (name not in self.met or name == str(self.leader)):
                self.attempts.heard(name)
        self.news.set()
        return {
            **self._message(),
            "go": self.released,
            "missing": {} if self.fault else excerpt(self.missing),
            "missing_count": len(self.missing),
        }

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the timeout."""
        return self.wait.timeout - self.wait.elapsed

    def note_received(self, name: str) -> None:
        """Take note that a task has received the go."""
        self.notified.add(name)
        self.news.set()

    def _message(self) -> dict[str, Any]:
        if not self.fault:
            return self.hello
        return {
            **self.hello,
            "fault": self.fault.text[: LINE_BYTES // 8],
            "fault_of": self.fault.finder,
            "permanent": isinstance(self.fault.error, ConfigurationError),
        }

    def _names_missing(self) -> dict[str, str]:
        try:
            self.spec.check_host(
                tasks=[
                    task
                    for name, task in self.tasks.items()
                    if task == self.me or name in self.peers
                ]
            )
        except UnresolvedAddress as error:
            return dict(error.reasons)
        except PortTaken:
            raise
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        return {}

    def _tasks_missing(self) -> dict[str, str]:
        missing = self.peers.keys() - self.met
        answers = self._exchange_due(missing)
        self.met |= {name for name, (reply, _) in answers.items() if reply}
        return {
            name: self.reasons.get(name) or "not asked yet: the others took all the time"
            for name in missing - self.met
        }

    def _unready(self) -> dict[str, str]:
        """Return why other tasks have not met their peers, as far as they say it."""
        missing = self.peers.keys() - self.ready
        for name, (reply, _) in self._exchange_due(missing).items():
            if waits_for := self._reasons_in(reply):
                self.reasons[name] = f"not ready: it waits for {absent(waits_for, self.spec)}"
        return {name: self.reasons.get(name) or "not ready" for name in missing}

    def _unnotified(self) -> dict[str, str]:
        """Call the tasks, which then ask for the go; return those that have not received it."""
        missing = self.peers.keys() - self.notified
        self._exchange_due(missing)
        text = "has not received the start signal"
        return {
            name: f"{text}: {self.reasons[name]}" if self.reasons.get(name) else text
            for name in missing - self.notified
        }

    def _leader_missing(self) -> dict[str, str]:
        """Ask the leader for the go; return the tasks for which it waits, or why it is absent."""
        leader = str(self.leader)
        for reply, reason in self._exchange_due([leader], ready=True).values():
            if reply.get("go"):
                return {}
            self.missing = self._missing_there(reply) or {
                leader: reason or "it waits for the others"
            }
        return self.missing or {leader: "not asked yet"}

    def _missing_there(self, reply: Mapping[str, Any]) -> dict[str, str]:
        """Return for which tasks the leader waits, as its reply says, and note how many."""
        reasons = self._reasons_in(reply)
        count = reply.get("missing_count")
        self.missing_count = count if reasons and isinstance(count, int) else 0
        return {name: f"{self.leader}: {text}" for name, text in reasons.items()}

    def _reasons_in(self, reply: Mapping[str, Any]) -> dict[str, str]:
        """Return for which tasks another one waits, as its reply says."""
        reasons = reply.get("missing")
        if not isinstance(reasons, Mapping):
            return {}
        return {name: short(reasons[name]) for name in reasons if name in self.tasks}

    def _exchange_due(
        self, names: Iterable[str], ready: bool = False
    ) -> dict[str, tuple[dict[str, Any], str]]:
        """Exchange messages with those of the tasks whose time has come.

        The round is short even if many machines do not answer, so that a task that has just been
        heard from does not wait for them.
        """
        end = time.monotonic() + ROUND_S

        def exchange(name: str) -> tuple[dict[str, Any], str] | None:
            if time.monotonic() >= end:
                return None
            self.attempts.asked(name)
            answer = self._exchange(self.tasks[name], ready)
            self.reasons[name] = answer[1]
            return answer

        answers = for_each(exchange, self.attempts.due(names), self.at_once)
        return {name: answer for name, answer in answers.items() if answer}

    def _tell_fault(self, sender: str) -> None:
        """Tell the known tasks that this one gives up, except the one from which it learned it."""
        end = time.monotonic() + FAREWELL_S

        def tell(name: str) -> None:
            if time.monotonic() < end:
                self._exchange(self.tasks[name])

        known = [name for name in self.peers if name in self.nonces and name != sender]
        for_each(tell, known, self.at_once)

    def _exchange(self, task: Task, ready: bool = False) -> tuple[dict[str, Any], str]:
        """Send the hello message to a task; return its reply and "", or {} and why there is none.

        A permanent error is recorded as the fault of this side.
        """
        try:
            with connect(task.address, EXCHANGE_S) as connection:
                send(connection, {**self._message(), "ready": ready}, self.secret)
                reply = receive(connection, time.monotonic() + self._reply_s(task))
                check_signature(reply, self.secret)
                if reply.get("go"):
                    connection.sendall(ACKNOWLEDGED)
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

    def _reply_s(self, task: Task) -> float:
        if task != self.leader or len(self.tasks) <= REPLIES:
            return EXCHANGE_S
        return max(EXCHANGE_S, min(EXCHANGE_S * len(self.tasks) / REPLIES, self.seconds_left))

    def _is_compatible(
        self, hello: Mapping[str, Any], peer: str, expected: str | None = None
    ) -> bool:
        """Return whether another process is compatible; record the fault if it is not."""
        try:
            self._compare(hello, peer)
            if expected and hello["task"] != expected:
                raise another_task(hello["task"], str(self.me), peer)
        except ConfigurationError as error:
            self._fail(self._own_fault(error))
            return False
        if "fault" in hello:
            finder = short(hello.get("fault_of"))
            text = printable(str(hello["fault"]))
            kind = ConfigurationError if hello.get("permanent") else PeersAbsent
            received = _Fault(kind(f"{finder} gave up: {text}"), finder, text, str(hello["task"]))
            self._fail(received)
            return False
        return True

    def _compare(self, hello: Mapping[str, Any], peer: str) -> None:
        compare(hello, peer, self.hello, self.spec.source)
        with self.lock:
            first_nonce = self.nonces.setdefault(str(hello.get("task")), str(hello.get("nonce")))
        if first_nonce != hello.get("nonce"):
            raise claimed_twice(hello.get("task"), str(self.me), peer)

    def _own_fault(self, error: Exception) -> _Fault:
        return _Fault(error, str(self.me), str(error))

    def _fail(self, fault: _Fault) -> None:
        with self.lock:
            self.fault = self.fault or fault
        self.news.set()

    def _sleep(self, seconds: float) -> None:
        """Wait until there is news, and a little longer for news that comes together."""
        if self.news.wait(seconds):
            time.sleep(min(seconds, FIRST_S))
            self.news.clear()

    def _wait(
        self, missing_tasks: Callable[[], dict[str, str]], longest: float | None = None
    ) -> None:
        """Wait until no task is missing; raise the fault of this side, or `PeersAbsent`."""

        def missing_or_fault() -> dict[str, str]:
            self.missing = missing_tasks()
            if self.fault:
                raise self.fault.error
            return self.missing

        if missing := self.wait.until_none(missing_or_fault, longest):
            if str(self.leader) in self.met:  # it may wait for more tasks than this one
                reply, _ = self._exchange(self.leader)
                missing = {**self._missing_there(reply), **missing}
                if self.fault:
                    raise self.fault.error
            seconds = self.wait.timeout
            reasons = absent_too_long(missing, self.spec, seconds, self.missing_count)
            raise PeersAbsent(f"preflight of {self.me}: {reasons}")


def peers_of(tasks: Sequence[Task], me: Task) -> dict[str, Task]:
    """Return the tasks that a task asks, by name: all others, or few in a large cluster.

    Args:
        tasks: The listening tasks of the cluster.
        me: One of them.
    """
    others = [task for task in tasks if task != me]
    if len(tasks) > ALL_PAIRS and me != tasks[0]:
        # TensorFlow's ring has the tasks in the lexicographical order of their names, and each
        # fetches from the one before it (collective_param_resolver_local.cc, EstablishGlobalRank).
        ring = sorted(tasks, key=str)
        before = ring[ring.index(me) - 1]
        others = [task for task in others if task in (tasks[0], before)]
    return {str(task): task for task in others}


class _Server(TaskServer):
    def __init__(self, barrier: _Barrier):
        self.exchange_s = EXCHANGE_S
        self.barrier = barrier
        self.secret = barrier.secret
        # All tasks may ask the leader at the same moment.
        self.request_queue_size = max(TaskServer.request_queue_size, len(barrier.tasks))
        self.at_once = max(TaskServer.at_once, 2 * len(barrier.tasks))
        super().__init__(barrier.me)

    def reply(self, request: Mapping[str, Any], host: str) -> dict[str, Any]:
        return self.barrier.answer(request, host)

    def acknowledge_s(self, reply: Mapping[str, Any]) -> float:
        """See `TaskServer`. A task that has received the go is gone: it cannot be asked again."""
        return max(EXCHANGE_S, self.barrier.seconds_left if reply.get("go") else 0.0)

    def was_received(self, request: Mapping[str, Any], reply: Mapping[str, Any]) -> None:
        if reply.get("go"):
            self.barrier.note_received(str(request["task"]))


def _serve(barrier: _Barrier) -> _Server:
    try:
        return _Server(barrier)
    except OSError as error:
        kind: type[ValueError] = (
            PortTaken if error.errno == errno.EADDRINUSE else ConfigurationError
        )
        raise kind(bind_problem(str(barrier.me), barrier.me.address, error)) from error
