"""One planned task becomes a process that leads a process group of its own, and leaves traces when it has ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping

from tfdist.launch.failures import Ending, last_stacks
from tfdist.launch.guardian import Guardian, kill_group
from tfdist.launch.output import Console, TaskOutput
from tfdist.launch.task_plan import TaskPlan
from tfdist.runtime.launch_protocol import IMPORTS_FILE, Phase, Sign, read_sign

LOG_TAIL_BYTES = 1 << 16


class Process:
    """A started task.

    Args:
        plan: The task.
        console: Shows its output.
        guard: Kills its group should this process die.
        take: Returns a standby process that has begun to run the task; None: start a fresh one.

    Raises:
        ValueError: It cannot be executed.
    """

    def __init__(
        self,
        plan: TaskPlan,
        console: Console,
        guardian: Guardian,
        take: Callable[[TaskPlan], subprocess.Popen | None] = lambda plan: None,
    ):
        self.plan, self._guard = plan, guardian
        self._told: float | None = None
        self._erred = False  # whether there was an error file when it was told to end
        self._time: float | None = None
        self.silence: str | None = None  # in words, once it counts as hung
        traces = (plan.error_path, plan.progress_path, plan.environ.get(IMPORTS_FILE))
        for path in filter(None, traces):  # of an earlier launch into the same directory
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
        os.makedirs(os.path.dirname(plan.log_path), exist_ok=True)
        try:
            self._popen = (
                take(plan)
                or subprocess.Popen(
                    plan.argv,
                    env=plan.environ,
                    stdin=subprocess.DEVNULL,  # N tasks would fight for the terminal's input
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C comes to the launcher only, which ends them in order
                )
            )
        except OSError as error:
            raise ValueError(
                f"COMMAND: cannot execute {plan.argv[0]!r}: {error.strerror}"
            ) from error
        self.pid = self._popen.pid
        guardian.add(self.pid)
        assert self._popen.stdout is not None
        try:
            self.output = TaskOutput(plan.name, self._popen.stdout, plan.log_path, console)
        except OSError as error:
            kill_group(self.pid)
            self._popen.wait()
            guardian.remove(self.pid)
            raise ValueError(
                f"--log-dir: cannot write {plan.log_path}: {error.strerror}"
            ) from error
        self._sign: Sign | None = None
        self._heard = time.monotonic()

    @property
    def ended(self) -> bool:
        """Whether it has ended; its group goes with it."""
        if self._time is None and self._popen.poll() is not None:
            self._time = time.time()
            kill_group(self.pid)  # what it left in the background
            self._guard.remove(self.pid)
        return self._time is not None

    @property
    def failed(self) -> bool:
        """Whether it has failed; a task may write its error and then hang in TensorFlow's shutdown."""
        return (self.ended and self._popen.returncode != 0) or os.path.exists(self.plan.error_path)

    @property
    def code(self) -> int | None:
        """Its return code; None while it runs."""
        return self._popen.returncode

    @property
    def sign(self) -> Sign | None:
        """Its last sign of life; None: none yet."""
        found = read_sign(self.plan.progress_path)
        if found is not None and found != self._sign:
            self._sign, self._heard = found, time.monotonic()
        return self._sign

    def silent_for(self, bounds: Mapping[str, float]) -> float | None:
        """Seconds since its last sign of life, where these are more than its phase allows; else None.

        Args:
            bounds: Seconds by `Phase`; of a phase that is not there nothing is asked.
        """
        sign = self.sign
        if self.ended or sign is None or sign.phase not in bounds:
            return None
        seconds = time.monotonic() - self._heard
        return seconds if seconds > bounds[sign.phase] else None

    def forgive(self) -> None:
        """Begins to count its silence anew."""
        self._heard = time.monotonic()

    @property
    def state(self) -> str:
        """The kernel's letter for what it does: "T" is stopped; "" where the kernel does not say."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="ascii", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    def tell(self, number: int) -> None:
        """Sends a signal to all its processes, unless it has ended; it counts as told to end."""
        if not self.ended:
            if self._told is None:
                self._told, self._erred = time.time(), os.path.exists(self.plan.error_path)
            kill_group(self.pid, number)

    def ask_for_stacks(self) -> None:
        """Has it write the stacks of all threads to its log, as the script runner has arranged."""
        if not self.ended and self.plan.words:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    def stack(self) -> str:
        """The main thread's, as it last wrote it; "" if it never did."""
        return last_stacks(self.log_tail())

    def ending(self) -> Ending:
        """The traces it left."""
        return Ending(
            task=self.plan.name,
            returncode=-signal.SIGKILL if self.code is None else self.code,
            time=self._time or time.time(),
            told=self._told,
            error=_read_error(self.plan.error_path) if self._told is None or self._erred else None,
            log=self.log_tail(),
            log_path=self.plan.log_path,
            silence=self.silence,
        )

    def log_tail(self) -> str:
        """The end of its log."""
        try:
            with open(self.plan.log_path, "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
                return file.read().decode("utf-8", "replace")
        except OSError:  # somebody has removed it
            return ""


def place_of(sign: Sign | None) -> tuple[int, int] | None:
    """Epoch and step of a sign of life in training; None where it tells of none."""
    return (
        None
        if sign is None or (sign.phase == Phase.IDLE and not (sign.epoch or sign.step))
        else (sign.epoch, sign.step)
    )


def _read_error(path: str) -> Mapping | None:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None
