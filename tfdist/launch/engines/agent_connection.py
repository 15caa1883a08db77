"""Connection of a launcher to the agent of a task, and the task as the supervisor sees it."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Protocol

from tfdist.launch.engines.agent_protocol import PING_S, SILENT_PINGS, bytes_of, decode, encode
from tfdist.launch.task_plan import TaskPlan
from tfdist.runtime import launch_protocol
from tfdist.runtime.guardian import Guardian, kill_group

SAID_LINES = 20  # lines of other programs that are kept for error messages
CLOSE_S = 5.0


class AgentLost(TimeoutError):
    """An agent cannot be reached; the message names the host and the reason."""


class AgentLate(AgentLost):
    """An agent has not answered yet."""


class Transport(Protocol):
    """Carries lines to and from an agent."""

    def write(self, line: bytes) -> None:
        """Send a line; raise OSError if the connection has ended."""

    def read(self) -> bytes:
        """Wait for a line and return it; b"" once the connection has ended."""

    def close(self) -> None:
        """End the connection, and with it the agent and its task."""

    def ending(self) -> str:
        """Return how a connection has ended that nobody closed, such as "ssh ended with 255"."""


class ProcessTransport:
    """Standard input and output of a program that runs an agent elsewhere, such as `ssh`.

    Args:
        argv: Command of the program.
        guardian: Guardian that kills the program if this process dies; None for a program that ends
            with its standard input.
        environ: Environment of the program; None for that of this process.
        remedies: Remedy by exit code of the program, default none.
    """

    def __init__(
        self,
        argv: Sequence[str],
        guardian: Guardian | None,
        environ: Mapping[str, str] | None = None,
        remedies: Mapping[int, str] | None = None,
    ):
        self._remedies = remedies or {}
        self._name = os.path.basename(argv[0])
        self._guardian = guardian
        self._popen = subprocess.Popen(
            argv,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only the launcher
        )
        if guardian is not None:
            guardian.add(self._popen.pid)

    def write(self, line: bytes) -> None:
        """See `Transport`."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(line)
        self._popen.stdin.flush()

    def read(self) -> bytes:
        """See `Transport`."""
        assert self._popen.stdout is not None
        return self._popen.stdout.readline()

    def close(self) -> None:
        """See `Transport`."""
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):
            self._popen.stdin.close()
        # SIGTERM makes srun end its step, which SIGKILL would leave behind.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(CLOSE_S)
                break
            kill_group(self._popen.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
            self._popen.wait(CLOSE_S)
        if self._guardian is not None:
            self._guardian.remove(self._popen.pid)

    def ending(self) -> str:
        """See `Transport`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._popen.wait(1.0)
            remedy = self._remedies.get(code, "")
            return f"{self._name} ended with {code}" + (f" ({remedy})" if remedy else "")
        return f"{self._name} closed the connection"


class AgentConnection:
    """Connection to one agent, which runs one task at a time.

    Args:
        host: Name of the host, for messages.
        transport: Connection to the agent.
        log_dir: Log directory of the launch, whose journal gets the events of the task.
        signalled: Function that gets the number of a signal that the scheduler has sent to the
            agent.
    """

    def __init__(
        self,
        host: str,
        transport: Transport,
        log_dir: str | None = None,
        signalled: Callable[[int], None] = lambda number: None,
    ):
        self.host = host
        self._transport = transport
        self._log_dir = log_dir
        self._signalled = signalled
        self._unanswered = 0  # pings since the agent's last message
        self._lock = threading.Lock()
        self._replies: queue.Queue[dict[str, Any]] = queue.Queue()
        self._said: collections.deque[str] = collections.deque(maxlen=SAID_LINES)
        self._task: RemoteTask | None = None
        self.lost: str | None = None
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"agent on {host}")
        self._reader.start()
        threading.Thread(target=self._ping, daemon=True, name=f"ping of {host}").start()

    def send(self, kind: str, **facts: Any) -> None:
        """Send an order; if the connection has ended, the agent counts as lost."""
        with self._lock:
            try:
                self._transport.write(encode({"type": kind, **facts}))
            except (OSError, ValueError):  # broken, or closed
                self._lose()

    def wait_for(self, kind: str, deadline: float) -> dict[str, Any]:
        """Wait for the agent's reply.

        Args:
            kind: Type of the reply.
            deadline: Time on the monotonic clock.

        Returns:
            The message.

        Raises:
            AgentLost: If the agent is lost.
            AgentLate: If it does not reply in time.
            ValueError: If the agent refuses.
        """
        while True:
            try:
                reply = self._replies.get(timeout=max(0.0, min(0.2, deadline - time.monotonic())))
            except queue.Empty:
                if self.lost is not None:
                    raise AgentLost(self._problem(self.lost)) from None
                if time.monotonic() >= deadline:
                    raise AgentLate(self._problem(f"sent no {kind!r}")) from None
                continue
            if reply["type"] == "refused":
                raise ValueError(f"host {self.host}: {reply['text']}")
            if reply["type"] == kind:
                return reply

    def start(
        self, plan: TaskPlan, tasks_here: int, snapshots: Mapping[str, Any] | None = None
    ) -> RemoteTask:
        """Start a task; see `task_process.Handle`.

        Args:
            plan: Plan of the task, with the variables that differ from the agent's environment.
            tasks_here: Number of tasks on the host of the agent.
            snapshots: Arguments of `SnapshotServer.meet` for the agent's server; None without one.
        """
        self._task = RemoteTask(self, plan)
        if self.lost is None:
            self.send(
                "start",
                argv=list(plan.argv),
                environ=dict(plan.environ),
                tasks_here=tasks_here,
                snapshots=snapshots,
                journal=self._journal(),
            )
        if self.lost is not None:
            self._task.lose(self._problem(self.lost))
        return self._task

    def close(self) -> None:
        """End the agent and its task."""
        self._closed.set()
        self._transport.close()

    def _problem(self, problem: str) -> str:
        said = "; ".join(line for line in self._said if line)
        return f"{self.host}: {problem}" + (f": {said}" if said else "")

    def _lose(self, reason: str = "") -> None:
        if self.lost is None:
            self.lost = (
                reason or self._transport.ending() if not self._closed.is_set() else "closed"
            )

    def _ping(self) -> None:
        while self.lost is None and not self._closed.wait(PING_S):
            if self._unanswered >= SILENT_PINGS:
                self._lose(f"sent nothing for {SILENT_PINGS * PING_S:g} s")
                self._lose_task()
                return
            self._unanswered += 1
            self.send("ping")

    def _lose_task(self) -> None:
        if self._task is not None and not self._closed.is_set():
            self._task.lose(self._problem(self.lost or ""))

    def _read(self) -> None:
        while line := self._transport.read():
            self._unanswered = 0
            message = decode(line)
            if message is None:
                self._said.append(line.decode("utf-8", "replace").strip()[:200])
            elif message["type"] in ("hello", "prepared", "refused"):
                self._replies.put(message)
                if message["type"] == "refused" and self._task:
                    self._task.receive({"type": "output", "text": f"tfdist: {message['text']}\n"})
                    self._task.receive({"type": "exit", "code": 127})
            elif message["type"] == "journal":
                self._copy_journal(message["text"])
            elif message["type"] == "signalled":
                if not self._closed.is_set():
                    self._signalled(message["number"])
            elif message["type"] == "result":
                if self._log_dir is not None:
                    path = os.path.join(self._log_dir, launch_protocol.RESULT)
                    _replace(path, message["text"])
            elif self._task is not None:
                self._task.receive(message)
        self._lose()
        self._lose_task()

    def _journal(self) -> str:
        if self._log_dir is None:
            return ""
        lines = launch_protocol.read_journal(self._log_dir)
        return "".join(json.dumps(line) + "\n" for line in lines)

    def _copy_journal(self, lines: str) -> None:
        if self._log_dir is None:
            return
        path = os.path.join(self._log_dir, launch_protocol.JOURNAL)
        with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
            file.write(bytes_of(lines))


class RemoteTask:
    """A task that an agent runs on another machine; a `task_process.Handle`.

    Args:
        agent: Connection to the agent.
        plan: Plan of the task; its error and progress files are written here.
    """

    pid = 0

    def __init__(self, agent: AgentConnection, plan: TaskPlan):
        self._agent = agent
        self._plan = plan
        self._code: int | None = None
        self._stopped = False
        self.lost: str | None = None
        read, self._pipe = os.pipe()
        self.stdout: IO[bytes] = os.fdopen(read, "rb")
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """See `Handle`."""
        return self._code

    def send_signal(self, number: int) -> None:
        """See `Handle`."""
        self._agent.send("signal", number=int(number))

    def request_stacks(self) -> None:
        """See `Handle`."""
        self._agent.send("stacks")

    def is_stopped(self, groups: set[int]) -> bool:
        """See `Handle`."""
        return self._stopped

    def release(self) -> None:
        """See `Handle`. The agent has done it."""

    def abandon(self) -> None:
        """See `Handle`."""
        self.send_signal(signal.SIGKILL)

    def lose(self, reason: str) -> None:
        """Note that the task is lost with its agent."""
        if self._code is None:
            self.lost = f"was lost with its host {reason}"
            self._end(-signal.SIGKILL)

    def receive(self, message: Mapping[str, Any]) -> None:
        """Take a message of the agent about this task."""
        kind = message["type"]
        if kind == "output":
            self._write_output(bytes_of(message["text"]))
        elif kind == "heartbeat":
            _replace(self._plan.progress_path, message["text"])
        elif kind == "error":
            _replace(self._plan.error_path, message["text"])
        elif kind == "stopped":
            self._stopped = bool(message["stopped"])
        elif kind == "exit":
            self._end(message["code"])

    def _write_output(self, data: bytes) -> None:
        with self._lock:
            view = memoryview(data)
            with contextlib.suppress(OSError):
                while view and self._pipe >= 0:
                    view = view[os.write(self._pipe, view) :]

    def _end(self, code: int) -> None:
        with self._lock:
            if self._pipe >= 0:
                os.close(self._pipe)
                self._pipe = -1
        self._code = code


def _replace(path: str, text: str) -> None:
    """Write a file so that a reader sees the whole text, or the former one."""
    with contextlib.suppress(OSError):
        with open(f"{path}.part", "wb", opener=launch_protocol.private) as file:
            file.write(bytes_of(text))
        os.replace(f"{path}.part", path)
