"""Agent of one task: starts, watches and ends it for a launcher on another machine.

Usage:
    python -m tfdist.launch.engines.agent_process

An engine starts this program where a task is to run. Its standard input and output are the
connection to the launcher (`agent_protocol`). It forwards the output, heartbeats, journal and error
file of the task, and kills the task when the connection ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.addresses import free_ports
from tfdist.launch.engines.agent_protocol import ORPHAN_S, bytes_of, decode, encode, text_of
from tfdist.launch.snapshot_server import SnapshotServer
from tfdist.launch.task_plan import SCRIPT_RUNNER, resolve_command
from tfdist.launch.task_process import stopped_groups
from tfdist.runtime import launch_protocol
from tfdist.runtime.guardian import Guardian, kill_group
from tfdist.runtime.installed_packages import version_of
from tfdist.runtime.resource_limits import cores
from tfdist.runtime.snapshot_protocol import is_supported

POLL_S = 0.05
FORWARD_S = 0.2  # interval at which heartbeats are forwarded
STOPPED_S = 2.0  # interval at which processes are looked at
OUTPUT_BYTES = 1 << 15
# Time to read the rest of the output; a daemon that left the task's group may keep the pipe open.
DRAIN_S = 2.0
END_S = 5.0  # from SIGTERM to SIGKILL when the launcher is gone
PACKAGES = ("tfdist", "tensorflow", "keras", "numpy")


class Agent:
    """The agent: reads orders from `orders`, and writes what happens to `output`.

    Args:
        orders: Binary stream of the launcher's messages.
        output: File descriptor for the messages to the launcher.
        guardian: Guardian that kills the task if this process dies.
        signalled: Event of a SIGTERM, by which a scheduler announces the end of the job.
    """

    def __init__(self, orders, output: int, guardian: Guardian, signalled: threading.Event):
        self._output = output
        self._signalled = signalled
        self._lock = threading.Lock()
        self._guardian = guardian
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._task: _Task | None = None
        self._snapshots: SnapshotServer | None = None  # outlives the tasks
        self._last_order = time.monotonic()
        threading.Thread(target=self._read, args=(orders,), daemon=True).start()

    def send(self, kind: str, **facts: Any) -> None:
        """Write a message to the launcher; an error means that the launcher is gone."""
        line = encode({"type": kind, **facts})
        with self._lock:
            view = memoryview(line)
            try:
                while view:
                    view = view[os.write(self._output, view) :]
            except OSError:
                self._queue.put(None)

    def run(self) -> None:
        """Serve until the launcher is gone."""
        self.send("hello", **facts_of_this_host())
        while True:
            try:
                order = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                pass
            else:
                if order is None:
                    break
                self._last_order = time.monotonic()
                self._obey(order)
            if time.monotonic() - self._last_order > ORPHAN_S:
                break
            if self._signalled.is_set():
                self._signalled.clear()
                self.send("signalled", number=int(signal.SIGTERM))
            if self._task and not self._task.forward():
                self._task = None
        if self._task:
            self._task.end()
        if self._snapshots:
            self._snapshots.close()

    def _read(self, orders) -> None:
        for line in orders:
            order = decode(line)
            if order is not None:
                self._queue.put(order)
        self._queue.put(None)

    def _obey(self, order: Mapping[str, Any]) -> None:
        kind = order["type"]
        if kind == "prepare":
            self._prepare(order)
        elif kind == "start" and self._task is None:
            server = self._snapshots if order["snapshots"] else None
            if server is not None:
                server.meet(**order["snapshots"])
            try:
                name = None if server is None else server.name
                self._task = _Task(order, self.send, self._guardian, name)
            except OSError as error:
                self.send("refused", text=f"cannot execute {order['argv'][0]!r}: {error.strerror}")
        elif kind == "ping":
            self.send("pong")
        elif kind == "signal" and self._task:
            self._task.send_signal(order["number"])
        elif kind == "stacks" and self._task:
            self._task.request_stacks()

    def _prepare(self, order: Mapping[str, Any]) -> None:
        """Check that the command can run here, and find a free port for its task."""
        words, directory = order["words"], order["directory"]
        try:
            if directory:
                os.chdir(directory)
            argv = resolve_command(words)
        except OSError as error:
            self.send("refused", text=f"directory {directory}: {error.strerror}")
            return
        except ValueError as error:
            self.send("refused", text=str(error))
            return
        self.send(
            "prepared",
            argv=list(argv),
            script=digest_of(argv),
            port=free_ports(1, "")[0],
            snapshot_port=self._snapshot_port(order["address"], order["snapshot_secret"]),
        )

    def _snapshot_port(self, address: str, secret: str) -> int:
        """Return the port of this agent's snapshot server; 0 if there is none."""
        if self._snapshots is None and secret and is_supported():
            # Without it, `memory_freq` has no effect, and a line in the task's log says so.
            with contextlib.suppress(OSError):
                self._snapshots = SnapshotServer(address, bytes.fromhex(secret))
        return 0 if self._snapshots is None else self._snapshots.port


class _Task:
    """One task, which leads a process group of its own."""

    def __init__(
        self, order: Mapping[str, Any], send, guardian: Guardian, snapshot_server: str | None
    ):
        self._send = send
        self._guardian = guardian
        self._runs_python = tuple(order["argv"][: len(SCRIPT_RUNNER)]) == SCRIPT_RUNNER
        self._directory = tempfile.mkdtemp(prefix="tfdist-task-")
        self._error_path = os.path.join(self._directory, "error.json")
        self._progress_path = os.path.join(self._directory, "progress")
        self._progress = ""
        journal = bytes_of(order["journal"])  # of former attempts: each fault is injected once
        with open(os.path.join(self._directory, launch_protocol.JOURNAL), "wb") as file:
            file.write(journal)
        self._journal_read = len(journal)
        self._stopped = False
        self._forwarded = self._looked = 0.0
        self._killed_at: float | None = None
        environ = {**defaults(order["tasks_here"]), **os.environ, **order["environ"]}
        environ |= {
            launch_protocol.LOG_DIR: self._directory,
            launch_protocol.ERROR_FILE: self._error_path,
            launch_protocol.PROGRESS_FILE: self._progress_path,
        }
        environ.pop(launch_protocol.SNAPSHOT_SERVER, None)  # of another launch
        if snapshot_server is not None:
            environ[launch_protocol.SNAPSHOT_SERVER] = snapshot_server
        self._popen = subprocess.Popen(
            order["argv"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        guardian.add(self._popen.pid)
        self._reader = threading.Thread(target=self._copy, daemon=True)
        self._reader.start()
        send("started", pid=self._popen.pid)

    def forward(self) -> bool:
        """Forward what is new; return whether the task still runs."""
        now = time.monotonic()
        code = self._popen.poll()
        if code is None and now - self._forwarded < FORWARD_S:
            return True
        self._forwarded = now
        if code is not None:
            kill_group(self._popen.pid)  # its background processes
            self._guardian.remove(self._popen.pid)
            self._reader.join(DRAIN_S)
        self._forward_files()
        if code is None:
            self._forward_stopped(now)
            return True
        if result := _read(os.path.join(self._directory, launch_protocol.RESULT), 0):
            self._send("result", text=result)
        self._send("exit", code=code)
        shutil.rmtree(self._directory, ignore_errors=True)
        return False

    def send_signal(self, number: int) -> None:
        kill_group(self._popen.pid, number)

    def request_stacks(self) -> None:
        if self._runs_python:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._popen.pid, signal.SIGUSR1)

    def end(self) -> None:
        """End the task, because its launcher is gone."""
        self.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(END_S)
        self.send_signal(signal.SIGKILL)
        self._popen.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _copy(self) -> None:
        assert self._popen.stdout is not None
        while data := os.read(self._popen.stdout.fileno(), OUTPUT_BYTES):
            self._send("output", text=text_of(data))

    def _forward_files(self) -> None:
        progress = _read(self._progress_path, 0)
        if progress and progress != self._progress:
            self._progress = progress
            self._send("heartbeat", text=progress)
        journal = _read(os.path.join(self._directory, launch_protocol.JOURNAL), self._journal_read)
        whole = journal[: journal.rfind("\n") + 1]
        if whole:
            self._journal_read += len(bytes_of(whole))
            self._send("journal", text=whole)
        if error := _read(self._error_path, 0):
            os.remove(self._error_path)
            self._send("error", text=error)

    def _forward_stopped(self, now: float) -> None:
        if now - self._looked < STOPPED_S:
            return
        self._looked = now
        stopped = self._popen.pid in stopped_groups()
        if stopped != self._stopped:
            self._stopped = stopped
            self._send("stopped", stopped=stopped)


def facts_of_this_host() -> dict[str, Any]:
    """Return the host's name, the versions of what trains, and the number of cores."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in PACKAGES:
        if (version := version_of(package)) is not None:
            versions[package] = version
    return {"host": socket.gethostname(), "pid": os.getpid(), "versions": versions}


def defaults(tasks_here: int) -> dict[str, str]:
    """Return the variables of a task that a user may set otherwise.

    Args:
        tasks_here: Number of tasks that share the cores of this host.
    """
    share = str(max(1, len(cores()) // tasks_here))
    return {
        **dict.fromkeys(launch_protocol.THREAD_VARIABLES, share),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }


def digest_of(argv: tuple[str, ...]) -> str:
    """Return a digest of the script that a command runs; "" if it runs none."""
    script = next((word for word in argv if word.endswith(".py") and os.path.isfile(word)), None)
    if script is None:
        return ""
    with open(script, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def _read(path: str, start: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return text_of(file.read())
    except OSError:
        return ""


def main() -> None:
    """Serve the launcher at the other end of standard input and output."""
    # The launcher decides when the task ends: a scheduler's or terminal's signal to all processes
    # of a step must not end the agent first.
    # With handlers: the task would inherit SIG_IGN, and be deaf to Ctrl-C.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signalled = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: signalled.set())
    output = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed here is no message
    os.set_inheritable(output, False)
    launch_protocol.take_token()
    with Guardian() as guardian:
        Agent(sys.stdin.buffer, output, guardian, signalled).run()


if __name__ == "__main__":
    main()
