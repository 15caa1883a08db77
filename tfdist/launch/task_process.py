"""Task process: starts one task in its own process group and collects its evidence."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, Protocol

from tfdist.launch.failures import Ending, last_stacks
from tfdist.launch.output import FORMER, Console, TaskOutput
from tfdist.launch.task_plan import TaskPlan
from tfdist.runtime.goodput import account_fact
from tfdist.runtime.guardian import Guardian, kill_group
from tfdist.runtime.launch_protocol import IMPORTS_FILE, HeartbeatRecord, Phase, read_heartbeat

LOG_TAIL_BYTES = 1 << 16


class Handle(Protocol):
    """A started task: a process group on this machine, or one that an agent runs elsewhere.

    Attributes:
        stdout: Read end of the pipe for the task's standard output and error.
        pid: Process id on this machine; 0 if the task runs on another one.
        lost: Description of how the task was lost with its agent, or None.
    """

    stdout: IO[bytes]
    pid: int
    lost: str | None

    def poll(self) -> int | None:
        """Return the return code in the form of `subprocess`, or None while the task runs."""

    def send_signal(self, number: int) -> None:
        """Send a signal to all processes of the task."""

    def request_stacks(self) -> None:
        """Ask the Python program of the task for the stacks of all threads."""

    def is_stopped(self, groups: set[int]) -> bool:
        """Return whether the kernel has stopped the task.

        Args:
            groups: Process groups of this machine that are stopped.
        """

    def release(self) -> None:
        """End what is left of the task's processes, once the task itself has ended."""

    def abandon(self) -> None:
        """Kill the task and wait for it; its log cannot be written."""


class LocalTask:
    """A task on this machine: a process that leads a process group and a session.

    Args:
        popen: The process.
        guardian: Guardian that kills its group if this process dies.
        dumps_stacks: Whether the process writes its stacks on SIGUSR1, which ends other programs.
    """

    lost: str | None = None

    def __init__(self, popen: subprocess.Popen, guardian: Guardian, dumps_stacks: bool):
        assert popen.stdout is not None
        self._popen = popen
        self._guardian = guardian
        self._dumps_stacks = dumps_stacks
        self.stdout: IO[bytes] = popen.stdout
        self.pid = popen.pid
        guardian.add(self.pid)

    def poll(self) -> int | None:
        """See `Handle`."""
        return self._popen.poll()

    def send_signal(self, number: int) -> None:
        """See `Handle`."""
        kill_group(self.pid, number)

    def request_stacks(self) -> None:
        """See `Handle`. The script runner has installed the signal handler."""
        if self._dumps_stacks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    def is_stopped(self, groups: set[int]) -> bool:
        """See `Handle`."""
        return self.pid in groups

    def release(self) -> None:
        """See `Handle`."""
        kill_group(self.pid)  # its background processes
        self._guardian.remove(self.pid)

    def abandon(self) -> None:
        """See `Handle`."""
        kill_group(self.pid)
        self._popen.wait()
        self._guardian.remove(self.pid)


class Process:
    """A started task.

    Args:
        plan: Plan of the task.
        console: Console that shows its output.
        start: Function that starts the task.

    Raises:
        ValueError: If the command cannot be executed, or the log cannot be written.
    """

    def __init__(self, plan: TaskPlan, console: Console, start: Callable[[TaskPlan], Handle]):
        self.plan = plan
        self._signalled_at: float | None = None
        self._had_error = False  # whether the error file existed when it was told to end
        self._time: float | None = None
        self._hang: str | None = None
        self.stopped = False  # whether the kernel had stopped it when the attempt failed
        former = plan.log_path + FORMER
        traces = (plan.error_path, plan.progress_path, plan.environ.get(IMPORTS_FILE), former)
        for path in filter(None, traces):  # left by an earlier launch into the same directory
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
        os.makedirs(os.path.dirname(plan.log_path), exist_ok=True)
        self._handle = start(plan)
        try:
            self.output = TaskOutput(plan.name, self._handle.stdout, plan.log_path, console)
        except OSError as error:
            self._handle.abandon()
            raise ValueError(
                f"--log-dir: cannot write {plan.log_path}: {error.strerror}"
            ) from error
        self._heartbeat: HeartbeatRecord | None = None
        self._last_heartbeat_time = time.monotonic()

    @property
    def ended(self) -> bool:
        """Return whether it has ended; the first time, kill the rest of its group."""
        if self._time is None and self._handle.poll() is not None:
            self._time = time.time()
            self._handle.release()
        return self._time is not None

    @property
    def pid(self) -> int:
        """Return its process id on this machine; 0 if it runs on another one."""
        return self._handle.pid

    @property
    def hang(self) -> str | None:
        """Return how it counts as hung, or was lost with its agent; None for neither."""
        return self._hang or self._handle.lost

    @hang.setter
    def hang(self, description: str) -> None:
        self._hang = description

    @property
    def failed(self) -> bool:
        """Return whether it has failed.

        A task may write its error and then hang in TensorFlow's shutdown, so an error file counts
        as a failure.
        """
        return (self.ended and self.code != 0) or os.path.exists(self.plan.error_path)

    @property
    def code(self) -> int | None:
        """Return its return code, or None while it runs."""
        return self._handle.poll()

    @property
    def heartbeat(self) -> HeartbeatRecord | None:
        """Return its last heartbeat, or None."""
        newest = read_heartbeat(self.plan.progress_path)
        if newest is not None and newest != self._heartbeat:
            self._heartbeat = newest
            self._last_heartbeat_time = time.monotonic()
        return self._heartbeat

    def account_fact(self) -> dict[str, Any] | None:
        """Return its time account for the journal; None if it has none."""
        heartbeat = self.heartbeat
        if heartbeat is None or heartbeat.account is None:
            return None
        silent = time.monotonic() - self._last_heartbeat_time
        return account_fact(heartbeat.account, heartbeat.phase, silent)

    def seconds_silent(self, bounds: Mapping[str, float]) -> float | None:
        """Return the seconds since its last heartbeat if its phase allows fewer, else None.

        Args:
            bounds: Watchdog timeout in seconds by `Phase`; a phase without one has no limit.
        """
        heartbeat = self.heartbeat
        if self.ended or heartbeat is None or heartbeat.phase not in bounds:
            return None
        seconds = time.monotonic() - self._last_heartbeat_time
        return seconds if seconds > bounds[heartbeat.phase] else None

    def reset_timer(self) -> None:
        """Reset its silence timer."""
        self._last_heartbeat_time = time.monotonic()

    @property
    def state(self) -> str:
        """Return the kernel's letter for its state: "T" is stopped; "" if unavailable."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="ascii", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    def send_signal(self, number: int) -> None:
        """Send a signal to all processes of its group, unless it has ended.

        From then on it counts as told to end.
        """
        if not self.ended:
            if self._signalled_at is None:
                self._signalled_at = time.time()
                self._had_error = os.path.exists(self.plan.error_path)
            self._handle.send_signal(number)

    def inject(self, number: int) -> None:
        """Send a signal as a fault: the task does not count as told to end."""
        self._handle.send_signal(number)

    def is_stopped(self, groups: set[int]) -> bool:
        """Return whether the kernel has stopped it; see `stopped_among`."""
        return not self.ended and self._handle.is_stopped(groups)

    def request_stacks(self) -> None:
        """Ask it to write the stacks of all threads to its log."""
        if not self.ended:
            self._handle.request_stacks()

    def stack(self) -> str:
        """Return the last stack of its main thread in the log, or ""."""
        return last_stacks(self.log_tail())

    def ending(self) -> Ending:
        """Return the evidence about its end."""
        return Ending(
            task=self.plan.name,
            returncode=-signal.SIGKILL if self.code is None else self.code,
            time=self._time or time.time(),
            signalled=self._signalled_at,
            error=_read_error(self.plan.error_path)
            if self._signalled_at is None or self._had_error
            else None,
            log=self.log_tail(),
            log_path=self.plan.log_path,
            hang=self.hang,
            stopped=self.stopped,
        )

    def log_tail(self) -> str:
        """Return the tail of its log."""
        tail = b""
        for path in (self.plan.log_path, self.plan.log_path + FORMER):
            # It was removed, or there is no former file.
            with contextlib.suppress(OSError), open(path, "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - (LOG_TAIL_BYTES - len(tail))))
                tail = file.read() + tail
            if len(tail) >= LOG_TAIL_BYTES:
                break
        return tail.decode("utf-8", "replace")


def start_local(
    plan: TaskPlan,
    guardian: Guardian,
    take: Callable[[TaskPlan], subprocess.Popen | None] = lambda plan: None,
) -> LocalTask:
    """Start a task on this machine.

    Args:
        plan: Plan of the task.
        guardian: Guardian that kills its group if this process dies.
        take: Function that returns a standby process that has begun to run the task, or None to
            start a fresh one.

    Raises:
        ValueError: If the command cannot be executed.
    """
    try:
        popen = take(plan) or subprocess.Popen(
            plan.argv,
            env=plan.environ,
            stdin=subprocess.DEVNULL,  # tasks must not share the terminal's input
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only the launcher, which ends the tasks
        )
    except OSError as error:
        raise ValueError(f"COMMAND: cannot execute {plan.argv[0]!r}: {error.strerror}") from error
    return LocalTask(popen, guardian, dumps_stacks=bool(plan.words))


def stopped_among(group: Iterable[Process]) -> list[Process]:
    """Return those processes of a group that the kernel has stopped."""
    groups = stopped_groups()
    return [process for process in group if process.is_stopped(groups)]


def stopped_groups() -> set[int]:
    """Return the ids of the process groups in which the kernel has stopped a process.

    A task is a group, as its command may be a shell that waits for the stopped program. The states
    are "T", by a signal, and "t", by a debugger.
    """
    groups = set()
    for path in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            with open(path, encoding="ascii", errors="replace") as file:
                state, _, group, *_ = file.read().rpartition(")")[2].split()
            if state in "Tt":
                groups.add(int(group))
    return groups


def position_of(heartbeat: HeartbeatRecord | None) -> tuple[int, int] | None:
    """Return the epoch and step of a heartbeat in training, or None outside training."""
    return (
        None
        if heartbeat is None
        or (heartbeat.phase == Phase.IDLE and not (heartbeat.epoch or heartbeat.step))
        else (heartbeat.epoch, heartbeat.step)
    )


def _read_error(path: str) -> Mapping | None:
    """Return the exception that a task wrote; None if the file is missing or damaged."""
    try:
        with open(path, "rb") as file:
            record = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("time"), int | float):
        return None
    words = (record.get(name) for name in ("type", "message", "traceback"))
    return record if all(isinstance(word, str) for word in words) else None
