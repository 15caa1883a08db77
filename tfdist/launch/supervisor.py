"""Planned tasks become running processes that end together; what their endings mean is decided elsewhere.

An attempt is all or nothing: as soon as one task has failed, the others get a moment to report their own errors and
are then ended, every process is waited for, and no process group outlives the attempt.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.launch.failures import Ending, Verdict, judge, signal_name
from tfdist.launch.guard import Guard, kill_group
from tfdist.launch.output import Console, TaskOutput
from tfdist.launch.plan import Role, TaskPlan
from tfdist.launch.report import format_verdict, short_path

POLL_SECONDS = 0.05
PEER_SECONDS = 3.0  # after a failure: peers notice within 3 s, see their own error, and end
DRAIN_SECONDS = (
    2.0  # for what is left in a pipe; a daemon that left the task's group may hold it open for ever
)
REAP_SECONDS = 10.0  # after SIGKILL: only a process stuck in the kernel (a dead network disk) takes longer
LOG_TAIL_BYTES = 1 << 16


class Supervisor:
    """Runs a group of tasks to their common end.

    Args:
        plan: The tasks of attempt 0, 1, ...: new ports each time.
        guard: Kills the tasks should this process die.
        console: Shows their output.
        log_dir: For the report.
        grace: Seconds from the request to end until SIGKILL.
        evaluator_wait: Seconds for the evaluator to finish once training is done.
        isolated: Whether the tasks are cut off from the network.
        colour: Whether the report may be coloured.
    """

    def __init__(
        self,
        plan: Callable[[int], Sequence[TaskPlan]],
        guard: Guard,
        console: Console,
        *,
        log_dir: str,
        grace: float,
        evaluator_wait: float,
        isolated: bool = False,
        colour: bool = False,
    ):
        self._plan, self._guard, self._console = plan, guard, console
        self._log_dir, self._grace, self._evaluator_wait = log_dir, grace, evaluator_wait
        self._isolated, self._colour = isolated, colour
        self._signals: list[int] = []

    def interrupt(self, number: int, frame: object = None) -> None:
        """Asks for the end of all tasks; the second time, at once. It is a signal handler, too."""
        self._signals.append(number)

    def run(self) -> int:
        """Runs attempts until one settles the matter, which today the first does.

        Returns:
            The exit code: 0, that of the root cause, or 128 + signal after an interruption.
        """
        started = time.time()
        verdict = self.attempt(0)
        seconds = time.time() - started
        if verdict:
            self._console.notice(format_verdict(verdict, started, self._log_dir, self._colour))
            return verdict.cause.code
        if self._signals:
            self._console.notice(f"tfdist: ended by {signal_name(-self._signals[0])} after {seconds:.1f} s")
            return 128 + self._signals[0]
        self._console.notice(
            f"tfdist: all tasks done after {seconds:.1f} s; logs in {short_path(self._log_dir)}"
        )
        return 0

    def attempt(self, number: int) -> Verdict | None:
        """Runs one group of processes until it is done, failed or interrupted, and leaves none behind.

        Args:
            number: 0, 1, ...

        Returns:
            Why it failed, or None where no task failed by itself.
        """
        group: list[_Process] = []
        try:
            for plan in self._plan(number):
                group.append(_Process(plan, self._console, self._guard))
            self._watch(group)
        finally:
            self._end(group)
        return judge([process.ending() for process in group], self._isolated)

    def _watch(self, group: list[_Process]) -> None:
        """Returns when there is nothing more to wait for."""
        evaluators = [process for process in group if process.plan.role is Role.EVALUATES]
        # A host that runs no training task, only a ps, say, waits for what it has.
        awaited = [process for process in group if process.plan.role is Role.TRAINS] or group

        def failed() -> bool:
            return any(process.failed for process in group)

        self._until(lambda: failed() or all(process.ended for process in awaited))
        if evaluators and not failed():
            self._until(
                lambda: failed() or all(process.ended for process in evaluators), self._evaluator_wait
            )
            late = [process.plan.name for process in evaluators if not process.ended and not self._signals]
            if late and not failed():
                seconds = f"{self._evaluator_wait:g} s"
                self._console.notice(
                    f"tfdist: training is done; ending {', '.join(late)}, still busy {seconds} later"
                )
        if failed():
            self._until(lambda: all(process.ended for process in group), PEER_SECONDS)

    def _end(self, group: list[_Process]) -> None:
        """Ends what still runs: politely, then surely."""
        # After a failure a survivor is mostly stuck in a collective and deaf to SIGTERM; a ps has nothing to save.
        grace = self._grace if self._signals else min(self._grace, PEER_SECONDS)
        # Ctrl-C is passed on as it is: TensorFlow's coordination service swallows SIGTERM, whereas Python turns
        # SIGINT into KeyboardInterrupt between two steps.
        number = signal.SIGINT if self._signals[:1] == [signal.SIGINT] else signal.SIGTERM
        if self._signals:
            name = signal_name(-self._signals[0])
            self._console.notice(
                f"tfdist: {name}: ending the tasks within {grace:g} s; once more ends them at once"
            )
        for process in group:
            process.tell(number)
        self._until(lambda: all(process.ended for process in group), grace, signals=len(self._signals[:1]))
        for process in group:
            process.tell(signal.SIGKILL)
        deadline = time.monotonic() + REAP_SECONDS
        while not all(process.ended for process in group) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for process in group:
            process.output.join(DRAIN_SECONDS)
            if not process.ended:
                self._console.notice(
                    f"tfdist: {process.plan.name} (pid {process.pid}) outlives SIGKILL: see `ps -l`"
                )

    def _until(self, condition: Callable[[], bool], seconds: float = float("inf"), signals: int = 0) -> None:
        """Waits for the condition, more than that many signals, or the bound."""
        deadline = time.monotonic() + seconds
        while not condition() and len(self._signals) <= signals and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


class _Process:
    """A started task: leads a process group of its own, which never outlives it."""

    def __init__(self, plan: TaskPlan, console: Console, guard: Guard):
        self.plan, self._guard = plan, guard
        self._told: float | None = None
        self._time: float | None = None
        if os.path.exists(plan.error_path):
            os.remove(plan.error_path)  # of an earlier launch into the same directory
        try:
            self._popen = subprocess.Popen(
                plan.argv,
                env=plan.environ,
                stdin=subprocess.DEVNULL,  # N tasks would fight for the terminal's input
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes to the launcher only, which ends them in order
            )
        except OSError as error:
            raise ValueError(f"COMMAND: cannot execute {plan.argv[0]!r}: {error.strerror}") from error
        self.pid = self._popen.pid
        guard.add(self.pid)
        assert self._popen.stdout is not None
        self.output = TaskOutput(plan.name, self._popen.stdout, plan.log_path, console)

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

    def tell(self, number: int) -> None:
        """Sends a signal to all its processes, unless it has ended."""
        if not self.ended:
            self._told = self._told or time.time()
            kill_group(self.pid, number)

    def ending(self) -> Ending:
        """The traces it left."""
        code = self._popen.returncode
        return Ending(
            task=self.plan.name,
            returncode=-signal.SIGKILL if code is None else code,
            time=self._time or time.time(),
            told=self._told,
            error=_read_error(self.plan.error_path),
            log=_read_tail(self.plan.log_path),
            log_path=self.plan.log_path,
        )


def _read_error(path: str) -> Mapping | None:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def _read_tail(path: str) -> str:
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
        return file.read().decode("utf-8", "replace")
