"""Supervisor: runs the tasks of an attempt, watches them and restarts them after failures.

An attempt is all or nothing. As soon as one task has failed, the others get a moment to report
their own errors. Then they are ended, every process is waited for, and no process group outlives
the attempt. Only a task without which its group can continue is restarted alone. `failures`
classifies the endings, and `policy` decides about restarts.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.cluster.spec import ClusterSpec
from tfdist.launch.failure_report import format_verdict, short_path
from tfdist.launch.failures import Kind, judge, signal_name
from tfdist.launch.fault_injection import Chaos
from tfdist.launch.output import Console
from tfdist.launch.policy import Failed, Policy
from tfdist.launch.slow_workers import SlowWorkers
from tfdist.launch.standby import Standbys
from tfdist.launch.task_plan import Role, TaskPlan
from tfdist.launch.task_process import (
    Handle,
    Process,
    position_of,
    start_local,
    stopped_among,
)
from tfdist.runtime.guardian import Guardian
from tfdist.runtime.launch_protocol import (
    MET,
    OF_SAVES,
    PREEMPTED_CODE,
    Phase,
    journal_events,
    note,
)

POLL_S = 0.05
REAP_POLL_S = 0.01  # after SIGKILL
CHECK_S = 0.5  # interval of the watchdog
PEER_S = 3.0  # after a failure: peers notice it, raise their own error and end in 3 s
STUCK_S = 0.3  # after a failure, for tasks that have nothing left to report
STACK_S = 1.0  # time to write the stacks of all threads
# Time to read the rest of a pipe, which a daemon that left the task's group may keep open for ever.
DRAIN_S = 2.0
SETTLE_S = 20.0  # after which tasks without heartbeats count as started
# After SIGKILL: only a process stuck in the kernel (a dead network disk) takes longer.
REAP_S = 10.0


class Supervisor:
    """Run a group of tasks until all are done or no restart is left.

    Args:
        plan: Function that returns the tasks of attempt 0, 1, ..., with new ports each time.
        guardian: Guardian that kills the tasks if this process dies.
        console: Console that shows their output.
        log_dir: Log directory, for the report and the journal.
        grace: Seconds from the request to end until SIGKILL.
        evaluator_wait: Seconds for the evaluator to finish once training is done.
        policy: Restart policy, default no restarts.
        hang_timeouts: Watchdog timeout in seconds by `launch_protocol.Phase`, after which a silent
            task counts as hung.
        isolated: Whether the tasks are cut off from the network, default False.
        colour: Whether the report may use colours, default False.
        chaos: Faults to inject, or None.
        standbys: Standby processes to hand tasks over to; None to start a fresh process for each
            task.
        start: Function that starts a task elsewhere; None to start all tasks on this machine.
        slow_workers: Slow workers to replace; None to replace none.
    """

    def __init__(
        self,
        plan: Callable[[int], Sequence[TaskPlan]],
        guardian: Guardian,
        console: Console,
        *,
        log_dir: str,
        grace: float,
        evaluator_wait: float,
        policy: Policy | None = None,
        hang_timeouts: Mapping[str, float] | None = None,
        isolated: bool = False,
        colour: bool = False,
        chaos: Chaos | None = None,
        standbys: Standbys | None = None,
        start: Callable[[TaskPlan], Handle] | None = None,
        slow_workers: SlowWorkers | None = None,
    ):
        self._plan = plan
        self._guardian = guardian
        self._console = console
        self._log_dir = log_dir
        self._grace = grace
        self._evaluator_wait = evaluator_wait
        self._policy = policy or Policy(0)
        self._hang_timeouts = hang_timeouts or {}
        self._isolated = isolated
        self._colour = colour
        self._chaos = chaos
        self._standbys = standbys
        self._start_task = start or self._start_locally
        self._slow_workers = slow_workers
        self._replaced: list[str] = []  # tasks for whose replacement the attempt ends
        self._number = 0  # of the attempt
        self._signals: list[int] = []
        self._last_check = time.monotonic()
        self._started = self._last_check
        self._errors: dict[Process, float] = {}  # time at which the error of each was seen

    def interrupt(self, number: int, frame: object = None) -> None:
        """Ask all tasks to end; a second call ends them at once. Usable as a signal handler."""
        self._signals.append(number)

    @property
    def interrupted(self) -> bool:
        """Return whether a signal has asked for the end."""
        return bool(self._signals)

    def run(self) -> int:
        """Run attempts until one succeeds or there is no further restart.

        Returns:
            The exit code: 0, the exit code of the root cause, 42 if the tasks saved a snapshot
            after an interruption, or 128 + signal.
        """
        started = time.monotonic()
        number = 0
        while True:
            attempt_started = time.time()
            outcome, codes = self.attempt(number, self._plan(number))
            if self._signals:
                return self.farewell(time.monotonic() - started, codes)
            if outcome is None and self._replaced and any(codes.values()):
                verb = "was" if len(self._replaced) == 1 else "were"
                text = f"{', '.join(self._replaced)} {verb} slow: restart that does not count"
                note(self._log_dir, "decided", attempt=number, restart=True, delay=0.0, text=text)
                self._console.notice(f"tfdist: {text}")
                number += 1
                continue
            if outcome is None:
                self._console.notice(
                    f"tfdist: all tasks done after {time.monotonic() - started:.1f} s; logs in "
                    f"{short_path(self._log_dir)}"
                )
                return 0
            decision = self._policy.decide(outcome.cause)
            note(
                self._log_dir,
                "decided",
                attempt=number,
                restart=decision.restart,
                delay=decision.delay,
                text=decision.text,
                used=self._policy.used,
            )
            report = format_verdict(outcome.verdict, attempt_started, self._log_dir, self._colour)
            decision_text = decision.text and f"\ntfdist: {decision.text}"
            if decision.restart and decision.delay:
                decision_text += f", in {decision.delay:g} s"
            self._console.notice(report + decision_text)
            if not decision.restart:
                return outcome.verdict.cause.code
            self._until(lambda: False, decision.delay)
            if self._signals:
                return self.farewell(time.monotonic() - started, {})
            if self._chaos:
                self._chaos.between()
            number += 1

    def attempt(
        self,
        number: int,
        plans: Sequence[TaskPlan],
        ordered: Callable[[], bool] = lambda: False,
        peer_grace: Callable[[], float] = lambda: PEER_S,
    ) -> tuple[Failed | None, dict[str, int | None]]:
        """Run one group of processes until it is done, failed, interrupted or ordered to end.

        No process outlives the call.

        Args:
            number: Number of the attempt, from 0.
            plans: Plans of its tasks.
            ordered: Function that returns whether a remote order has requested the end.
            peer_grace: Function that returns the seconds from then until SIGKILL, at most `grace`;
                0 for at once. The value may decrease during the wait.

        Returns:
            The failure, or None if no task failed by itself; and the return codes by task.
        """
        group: list[Process] = []
        self._errors = {}
        self._replaced = []
        self._number = number
        self._started = time.monotonic()
        note(self._log_dir, "attempt", attempt=number, tasks=[plan.name for plan in plans])
        try:
            for plan in plans:
                group.append(self._start(plan))
            self._watch(group, ordered)
            if ordered() and peer_grace() <= PEER_S:  # a failure on another host
                self._note_stopped(group)
        finally:
            self._end(group, ordered, peer_grace)
        codes = {process.plan.name: process.code for process in group}
        heartbeats = [heartbeat for process in group if (heartbeat := process.heartbeat)]
        note(
            self._log_dir,
            "ended",
            attempt=number,
            codes=codes,
            total=max((heartbeat.total for heartbeat in heartbeats), default=0),
            accounts={
                process.plan.name: fact
                for process in group
                if process.plan.role is Role.TRAINS and (fact := process.account_fact())
            },
        )
        verdict = judge([process.ending() for process in group], self._isolated)
        if verdict is None:
            self._warn_of_tasks_that_never_met(group)
            return None, codes
        positions = [position for heartbeat in heartbeats if (position := position_of(heartbeat))]
        running = any(heartbeat.phase == Phase.RUNNING for heartbeat in heartbeats)
        stepped = running or any(
            line["event"] == "stepping" and line.get("attempt") == number
            for line in journal_events(self._log_dir)
        )
        return Failed(verdict, stepped, max(positions, default=None)), codes

    def farewell(self, seconds: float, codes: Mapping[str, int | None]) -> int:
        """Show how an interruption has ended the tasks; return the exit code.

        Args:
            seconds: Seconds since the launch.
            codes: Return codes by task.
        """
        name = signal_name(-self._signals[0])
        saved = PREEMPTED_CODE in codes.values()
        saved_note = "; the training is saved, and the same command resumes it" if saved else ""
        self._console.notice(f"tfdist: ended by {name} after {seconds:.1f} s{saved_note}")
        return PREEMPTED_CODE if saved else 128 + self._signals[0]

    def _note_stopped(self, group: Sequence[Process]) -> None:
        """Note which processes the kernel has stopped, before they are killed."""
        for process in stopped_among(group):
            process.stopped = True

    def _warn_of_tasks_that_never_met(self, group: Sequence[Process]) -> None:
        """Show which tasks of a cluster have ended well, but have never met the others."""
        met: set[str] = set()
        for line in journal_events(self._log_dir):
            if line["event"] == "attempt":
                met.clear()
            elif line["event"] == MET:
                met.add(line["task"])
        unmet = [
            process.plan.name
            for process in group
            if process.code == 0
            and process.plan.role is Role.TRAINS
            and process.plan.name not in met
            and _has_peers(process.plan)
        ]
        if unmet:
            self._console.notice(
                f"tfdist: {', '.join(unmet)} ended without having met the other tasks of the "
                "cluster, because the program did not call tfdist.init() or make_strategy(). "
                "Unless it connects the tasks by itself (TF_CONFIG), each has done the whole work "
                "alone, and all have written the same files. Call tfdist.init() first, or launch "
                "a single task."
            )

    def _start(self, plan: TaskPlan) -> Process:
        return Process(plan, self._console, self._start_task)

    def _start_locally(self, plan: TaskPlan) -> Handle:
        return start_local(plan, self._guardian, self._take_standby)

    def _take_standby(self, plan: TaskPlan) -> subprocess.Popen | None:
        inject_fault = self._chaos.hand_over if self._chaos else lambda pid: None
        return self._standbys.take(plan, inject_fault) if self._standbys else None

    def _watch(self, group: list[Process], ordered: Callable[[], bool]) -> None:
        """Wait until the group is done, has failed or must end."""
        evaluators = [process for process in group if process.plan.role is Role.EVALUATES]
        # A host without training tasks, for example with a ps only, waits for its other tasks.
        names = {process.plan.name for process in group if process.plan.role is Role.TRAINS}
        restarts: dict[str, int] = {}
        last_errors: dict[str, str] = {}  # how each restarted task had ended

        def awaited_tasks() -> list[Process]:
            return [process for process in group if process.plan.name in names] or group

        def failed() -> bool:
            if self._chaos:
                self._chaos.poll(group)
            self._replace(group, restarts, last_errors)
            self._check_heartbeats(group)
            return ordered() or any(
                (process.failed and not self._exits_for_restart(process)) or process.hang
                for process in group
            )

        def over() -> bool:
            return failed() or bool(self._replaced)

        self._until(lambda: over() or all(process.ended for process in awaited_tasks()))
        if self._replaced:
            return
        if evaluators and not failed():
            self._until(
                lambda: (
                    failed()
                    or all(
                        process.ended for process in group if process.plan.role is Role.EVALUATES
                    )
                ),
                self._evaluator_wait,
            )
            still_running = [
                p.plan.name
                for p in group
                if p.plan.role is Role.EVALUATES and not p.ended and not self._signals
            ]
            if still_running and not failed():
                seconds = f"{self._evaluator_wait:g} s"
                self._console.notice(
                    f"tfdist: training is done; ending {', '.join(still_running)}, still busy "
                    f"{seconds} later"
                )
        if failed() and not ordered():
            first = next((process for process in group if process.failed or process.hang), None)
            note(self._log_dir, "detected", task=first and first.plan.name)
            self._note_stopped(group)
            if any(process.hang for process in group):
                self._stacks(group)
            else:
                # A killed task is the cause. An error may come from a victim, before its cause is
                # known.
                killed = any(process.ended and process.code == -signal.SIGKILL for process in group)
                bound = time.monotonic() + PEER_S
                if not (killed and self._all_blocked(group)):
                    self._until_ended(awaited_tasks(), lambda: bound, wait_if_stuck=not killed)

    def _replace(
        self, group: list[Process], restarts: dict[str, int], last_errors: dict[str, str]
    ) -> None:
        """Restart failed tasks alone if the others continue without them and restarts are left."""
        for i, process in enumerate(group):
            if not (process.plan.replaceable and process.ended and process.failed):
                continue
            name = process.plan.name
            process.output.join(DRAIN_S)
            verdict = judge([process.ending()])
            description = f"{verdict.cause.how}: {verdict.cause.message}" if verdict else "is gone"
            same_error = (
                verdict is not None
                and verdict.cause.kind is Kind.ERROR
                and description == last_errors.get(name)
            )
            if same_error or not self._policy.allow_one():  # the attempt ends, too
                continue
            last_errors[name] = description
            restarts[name] = restarts.get(name, 0) + 1
            self._console.notice(
                f"tfdist: {name} {description.removesuffix(': ')}; the launcher restarts it, the "
                "other tasks continue"
            )
            note(
                self._log_dir,
                "replaced",
                task=name,
                life=restarts[name],
                used=self._policy.used,
            )
            group[i] = self._start(process.plan.restarted(restarts[name]))

    def _exits_for_restart(self, process: Process) -> bool:
        """Return whether a task has reported its error, exits now and will be restarted alone."""
        if process.ended or not process.plan.replaceable or not self._policy.left:
            return False
        first = self._errors.setdefault(process, time.monotonic())
        if time.monotonic() - first > PEER_S:
            process.send_signal(signal.SIGKILL)  # hangs in its shutdown
        return True

    def _check_heartbeats(self, group: list[Process]) -> None:
        """Mark the task that has been silent for longer than its phase allows."""
        now = time.monotonic()
        if now - self._last_check < CHECK_S:
            return
        if now - self._last_check > 10 * CHECK_S:  # this process itself was stopped
            for process in group:
                process.reset_timer()
        self._last_check = now
        if self._slow_workers and not self._replaced:
            self._replaced = self._slow_workers.due(self._number, self._within_a_fit(group))
        if self._standbys:
            self._standbys.keep([process.plan for process in group], self._training(group, now))
        if any(process.hang for process in group):  # the hung task is known already
            return
        if any(process.seconds_silent(self._hang_timeouts) is not None for process in group):
            # The last heartbeat of the task for which these wait may be slightly later.
            half = {phase: seconds / 2 for phase, seconds in self._hang_timeouts.items()}
            self._blame(group, half)

    def _within_a_fit(self, group: Sequence[Process]) -> list[str]:
        """Return the names of the tasks that train; none if one of them is outside of a fit."""
        training = [process for process in group if process.plan.role is Role.TRAINS]
        inside = all(
            not process.ended
            and (heartbeat := process.heartbeat) is not None
            and heartbeat.phase != Phase.IDLE
            for process in training
        )
        return [process.plan.name for process in training if inside]

    def _training(self, group: Sequence[Process], now: float) -> bool:
        """Return whether the tasks have started and leave time for standby processes."""
        training = [process for process in group if process.plan.role is Role.TRAINS]
        phases = [process.heartbeat.phase if process.heartbeat else None for process in training]
        if Phase.TRACING in phases:  # takes minutes and all cores for a large model
            return False
        if now - self._started > SETTLE_S:
            return True
        return bool(phases) and set(phases) == {Phase.RUNNING}

    def _blame(self, group: list[Process], bounds: Mapping[str, float]) -> None:
        """Find the hung task among those that wait for each other.

        None is hung yet if one of them goes on or ends while the stacks are written.

        Args:
            group: All tasks of this host.
            bounds: Seconds by `Phase` after which a task is silent.
        """
        silent = [process for process in group if process.seconds_silent(bounds) is not None]
        stopped = stopped_among(silent)
        self._stacks([process for process in silent if process not in stopped])
        silences = {process: process.seconds_silent(bounds) for process in silent}
        if None in silences.values():
            return  # a step, or an end: the others may have waited for that
        # In a collective the main thread is inside TensorFlow, but not in a task that hangs in user
        # code.
        in_user_code = [
            process for process in silent if (stack := process.stack()) and not _in_framework(stack)
        ]
        earliest = min(
            (position_of(process.heartbeat) or (0, 0) for process in silent), default=(0, 0)
        )
        at_earliest = [
            process for process in silent if (position_of(process.heartbeat) or (0, 0)) == earliest
        ]
        culprit = (stopped or in_user_code or at_earliest)[0]
        heartbeat = culprit.heartbeat
        position = (
            ""
            if heartbeat is None
            else f" after step {heartbeat.step} of epoch {heartbeat.epoch + 1}"
        )
        reason = "; it is stopped (SIGSTOP, a debugger)" if culprit in stopped else ""
        culprit.hang = (
            f"made no step for {silences[culprit]:.0f} s{position}, and was killed as hung{reason}"
        )

    def _stacks(self, group: list[Process]) -> None:
        """Ask all processes to write their stacks to their logs."""
        for process in group:
            process.request_stacks()
        self._until(lambda: False, STACK_S)

    def _end(
        self, group: list[Process], ordered: Callable[[], bool], peer_grace: Callable[[], float]
    ) -> None:
        """End all processes that still run: first with a signal they can handle, then SIGKILL."""

        def grace() -> float:
            if self._signals or self._replaced:
                return self._grace
            # After a failure a survivor is usually stuck in a collective and does not react to
            # SIGTERM; a ps has nothing to save.
            return min(self._grace, peer_grace() if ordered() else PEER_S)

        started = time.monotonic()
        at_once = not grace()
        may_save = bool(self._signals or self._replaced) or (ordered() and peer_grace() > PEER_S)
        # Pass Ctrl-C on as SIGINT: Python raises KeyboardInterrupt between two steps.
        number = signal.SIGINT if self._signals[:1] == [signal.SIGINT] else signal.SIGTERM
        if self._signals:
            name = signal_name(-self._signals[0])
            self._console.notice(
                f"tfdist: {name}: ending the tasks within {self._grace:g} s; send it again to "
                "end them at once"
            )
        hung = any(process.hang for process in group)
        all_blocked = not may_save and self._all_blocked(group)
        # Training tasks may have to read what they save from the parameter servers, so end those
        # last.
        serving = (
            [process for process in group if process.plan.role is Role.SERVES] if may_save else []
        )
        for part in ([process for process in group if process not in serving], serving):
            for process in part:
                process.send_signal(signal.SIGKILL if hung or all_blocked or at_once else number)
            self._until_ended(
                part,
                lambda: started + grace(),
                wait_if_stuck=may_save,
                signals=len(self._signals[:1]),
            )
        for process in group:
            process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + REAP_S
        while not all(process.ended for process in group) and time.monotonic() < deadline:
            time.sleep(REAP_POLL_S)
        for process in group:
            process.output.join(DRAIN_S)
            if not process.ended:
                self._console.notice(
                    f"tfdist: {process.plan.name} (pid {process.pid}) did not end after SIGKILL: "
                    "see `ps -l`"
                )

    def _until_ended(
        self,
        group: list[Process],
        deadline: Callable[[], float],
        wait_if_stuck: bool,
        signals: int = 0,
    ) -> None:
        """Wait for the end of all processes.

        Args:
            group: Processes to wait for.
            deadline: Function that returns the end of the wait on the monotonic clock.
            wait_if_stuck: Whether processes may still do useful work; if not, return early when
                all are stuck.
            signals: Number of interruptions after which to return.
        """
        soon = time.monotonic() + STUCK_S

        def over() -> bool:
            now = time.monotonic()
            return (
                all(process.ended for process in group)
                or now >= deadline()
                or (not wait_if_stuck and now > soon and self._stuck(group))
            )

        self._until(over, signals=signals)

    def _stuck(self, group: list[Process]) -> bool:
        """Return whether no running process has anything left to report or to save.

        After a failure this holds if each is within a fit or has reported its error, and none
        writes a snapshot.
        """
        living = [process for process in group if not process.ended]
        if not all(
            process.failed
            or ((heartbeat := process.heartbeat) is not None and heartbeat.phase != Phase.IDLE)
            for process in living
        ):
            return False
        last = None
        for line in journal_events(self._log_dir):
            if line["event"] in OF_SAVES:
                last = line
        return (
            last is None
            or last["event"] == "saved"
            or last.get("task") not in {process.plan.name for process in living}
        )

    def _all_blocked(self, group: list[Process]) -> bool:
        """Return whether all that run wait in a step for a failed peer, without an error file.

        A process inside a collective does not react to SIGTERM, and all that it could report is the
        loss of its peer.
        """
        return self._stuck(group) and not any(
            process.failed for process in group if not process.ended
        )

    def _until(
        self, condition: Callable[[], bool], seconds: float = float("inf"), signals: int = 0
    ) -> None:
        """Wait for the condition, for more than `signals` interruptions, or for the timeout."""
        deadline = time.monotonic() + seconds
        while not condition() and len(self._signals) <= signals and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _has_peers(plan: TaskPlan) -> bool:
    config = plan.environ.get("TF_CONFIG")
    return config is not None and len(ClusterSpec.from_tf_config(config).listening_tasks) > 1


def _in_framework(stack: str) -> bool:
    """Return whether the innermost call of a stack, its first line, is TensorFlow's."""
    first = next((line for line in stack.splitlines()[1:]), "")
    return "tensorflow" in first
