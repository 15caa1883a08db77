"""Recovery time and lost steps of each fault, computed from the journal of a launch.

Steps are counted since training began. The lost steps of an attempt are the step that it reached,
minus the step from which training continued.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.runtime import fault_plan
from tfdist.runtime.launch_protocol import JOURNAL, check_event
from tfdist.tools.report.run_files import Reader

Line = Mapping[str, Any]  # of the journal: "time" in seconds, "event", and the event's fields


@dataclasses.dataclass(frozen=True)
class FaultReport:
    """Fault of the chaos plan, or a failure outside of it, with its consequences.

    Attributes:
        text: Fault as it is written in the plan. For a failure outside of the plan, the failed task
            in parentheses.
        when: Seconds from the start of the first attempt to the fault.
        detected: Seconds until the launcher detected the failure. None: there was nothing to
            detect, or the launcher did not detect it.
        recovered: Seconds until the next step was done or, if no step was left to do, until the
            state was restored. None: no attempt was lost, or training did not continue.
        lost: Steps that had to be repeated; None as for `recovered`.
        origin: Snapshot or state from which training continued; "" if it did not.
    """

    text: str
    when: float
    detected: float | None
    recovered: float | None
    lost: int | None
    origin: str


@dataclasses.dataclass(frozen=True)
class Attempt:
    """Journal lines of one attempt, from its start to the start of the next attempt."""

    lines: tuple[Line, ...]

    def first(self, event: str) -> Line | None:
        """Return the first line with an event, or None if the event did not happen."""
        return next((line for line in self.lines if line["event"] == event), None)

    @functools.cached_property
    def base(self) -> int | None:
        """Return the step from which the attempt continued; None if it did not get so far."""
        restored = self.first("restored")
        stepping = self.first("stepping")
        if restored is not None:
            return restored["total"]
        return None if stepping is None else stepping["total"] - stepping["step"]

    @functools.cached_property
    def reached(self) -> int:
        """Return the last step that the attempt reached."""
        # After a fault the "ended" line does not count: other tasks may include the step that the
        # fault interrupted.
        lines = [line for line in self.lines if line["event"] != "ended" or not self.culprits]
        return max(
            [self.base or 0, *(line["total"] for line in lines if line.get("total") is not None)]
        )

    @functools.cached_property
    def recovered(self) -> Line | None:
        """Return the line that marks recovery from the attempts before, or None.

        An attempt has recovered when a step is done, or when the state at the end of training is
        restored.
        """
        ended = self.first("ended")
        done = ended is not None and not any(ended["codes"].values())
        return self.first("stepping") or (self.first("restored") if done else None)

    @functools.cached_property
    def culprits(self) -> tuple[Line, ...]:
        """Return the faults that made the attempt fail.

        These faults struck before the failure was detected. Faults that ended by then, and faults
        after which one task was restarted alone, are not among them.
        """
        detected = self.first("detected")
        if detected is None:
            return ()
        alone = self.alone
        return tuple(
            line
            for line in self.lines[: self.lines.index(detected)]
            if line["event"] == fault_plan.EVENT
            and line["number"] not in alone
            and not line["text"].startswith(("corrupt", "kill standby"))
            and not (
                line.get("seconds") is not None
                and line["time"] + line["seconds"] < detected["time"]
            )
        )

    @functools.cached_property
    def alone(self) -> dict[int, Line]:
        """Return the line of each single-task restart, by the number of the fault.

        Only the task of such a fault was restarted, not all tasks.
        """
        first_failures: dict[int, Line] = {}
        for index, line in enumerate(self.lines):
            if line["event"] != "replaced":
                continue
            for fault in reversed(self.lines[:index]):
                if (
                    fault["event"] == fault_plan.EVENT
                    and fault.get("task") == line["task"]
                    and fault["number"] not in first_failures
                ):
                    first_failures[fault["number"]] = line
                    break
        return first_failures


class Recovery:
    """Recovery statistics of a launch.

    Args:
        journal: Lines of the journal, from `launch_protocol.read_journal`.

    Attributes:
        journal: Lines of the journal.
        attempts: Attempts of the launch in order.
        begun: Start of the first attempt in seconds since the epoch; 0 if there is none.
        seconds: Time from `begun` to the last line of the journal, in seconds.

    Example:
        >>> journal = [
        ...     {"time": 5.0, "event": "attempt", "attempt": 0},
        ...     {"time": 7.0, "event": "fault", "number": 0, "text": "kill chief@step=9",
        ...      "task": "worker:0", "total": 9},
        ...     {"time": 7.5, "event": "detected", "task": "worker:0"},
        ...     {"time": 8.0, "event": "attempt", "attempt": 1},
        ...     {"time": 9.0, "event": "restored", "total": 6, "number": 2,
        ...      "path": "backup/snapshot-2.tfdist"},
        ...     {"time": 9.5, "event": "stepping", "total": 7, "step": 7},
        ... ]
        >>> Recovery(journal).fault_reports[0]  # doctest: +NORMALIZE_WHITESPACE
        FaultReport(text='kill chief@step=9', when=2.0, detected=0.5, recovered=2.5, lost=3,
               origin='snapshot-2')
    """

    def __init__(self, journal: Sequence[Line]):
        self.journal = tuple(journal)
        begins = [index for index, line in enumerate(journal) if line["event"] == "attempt"]
        numbers = [journal[index]["attempt"] for index in begins]
        # Each of several hosts writes a line for the same attempt.
        begins = [
            index
            for index, number, before in zip(begins, numbers, [-1, *numbers], strict=False)
            if number != before
        ]
        self.attempts = tuple(
            Attempt(self.journal[begin:end])
            for begin, end in itertools.pairwise([*begins, len(journal)])
        )
        self.begun = float(journal[begins[0]]["time"]) if begins else 0.0
        self.seconds = float(journal[-1]["time"]) - self.begun if begins else 0.0

    @property
    def code(self) -> int | None:
        """Return the launcher's exit code; None if it has not written one."""
        return next((line["code"] for line in self.journal if line["event"] == "over"), None)

    @property
    def refusal(self) -> str:
        """Return why the launcher did not restart the tasks; "" if it has not said so."""
        return next(
            (
                line["text"]
                for line in self.journal
                if line["event"] == "decided" and not line["restart"]
            ),
            "",
        )

    @property
    def plan(self) -> str | None:
        """Return the chaos plan; None if there is none."""
        return next((line["chaos"] for line in self.journal if line["event"] == "launch"), None)

    @property
    def missed(self) -> list[str]:
        """Return the faults of the plan that have not struck."""
        return (
            [fault.text for fault in fault_plan.left(fault_plan.parse(self.plan), self.journal)]
            if self.plan
            else []
        )

    @functools.cached_property
    def fault_reports(self) -> list[FaultReport]:
        """Return the faults and failures in chronological order."""
        fault_reports = []
        for index, attempt in enumerate(self.attempts):
            faults = [line for line in attempt.lines if line["event"] == fault_plan.EVENT]
            failed = attempt.first("detected")
            if failed is not None and not attempt.culprits:
                faults.append(
                    {**failed, "text": f"({failed['task'] or 'a task'} failed)", "number": None}
                )
            for line in sorted(faults, key=lambda line: line["time"]):
                fault_reports.append(self._fault_report(line, index))
        return fault_reports

    @property
    def lost_steps(self) -> list[int]:
        """Return the steps that each attempt lost, 0 if training did not continue after it."""
        return [self.lost(index) or 0 for index in range(len(self.attempts))]

    def lost(self, index: int) -> int | None:
        """Return the steps that an attempt lost; None if training did not continue after it.

        Args:
            index: Index of the attempt, from 0.
        """
        following = next(
            (later.base for later in self.attempts[index + 1 :] if later.base is not None), None
        )
        return None if following is None else max(0, self.attempts[index].reached - following)

    @property
    def interval(self) -> int | None:
        """Return the most steps between consecutive snapshots of an attempt.

        Returns:
            The number of steps. None: no attempt has two snapshots.
        """
        intervals = []
        for attempt in self.attempts:
            totals = [line["total"] for line in attempt.lines if line["event"] == "saved"]
            intervals += [b - a for a, b in itertools.pairwise(totals) if b > a]
        return max(intervals, default=None)

    def _fault_report(self, line: Line, index: int) -> FaultReport:
        attempt = self.attempts[index]
        when = line["time"] - self.begun
        begun = line["time"]
        again = attempt.alone.get(line["number"])
        if again is not None:
            return FaultReport(
                line["text"],
                when,
                again["time"] - begun,
                None,
                None,
                f"{again['task']} began again, alone",
            )
        if line["event"] == fault_plan.EVENT and line not in attempt.culprits:
            ended = line.get("seconds") is not None
            return FaultReport(
                line["text"], when, None, None, None, "all continued" if ended else ""
            )
        detected = attempt.first("detected")
        later = self.attempts[index + 1 :]
        assert detected is not None
        recovered = next(
            (recovery_line for other in later if (recovery_line := other.recovered)), None
        )
        return FaultReport(
            text=line["text"],
            when=when,
            detected=None if line["number"] is None else detected["time"] - begun,
            recovered=None if recovered is None else recovered["time"] - begun,
            lost=self.lost(index),
            origin=next((self._origin(other) for other in later if other.base is not None), ""),
        )

    def _origin(self, attempt: Attempt) -> str:
        restored = attempt.first("restored")
        if restored is None:
            return "the beginning"
        if restored["number"] is None:
            return "memory"
        # Compare only snapshots of the same directory: a script may use several.
        newer = {
            line["number"]
            for line in self.journal[: self.journal.index(restored)]
            if line["event"] == "saved"
            and line["number"] > restored["number"]
            and os.path.dirname(line["path"]) == os.path.dirname(restored["path"])
        }
        damaged = (
            f" ({', '.join(f'snapshot-{number}' for number in sorted(newer))} damaged)"
            if newer
            else ""
        )
        return f"snapshot-{restored['number']}{damaged}"


def read_recovery(log_dir: Path, reader: Reader) -> Recovery | None:
    """Return the recovery statistics of a launch; None if its journal contains no attempt.

    Args:
        log_dir: Directory of the launch's logs.
        reader: Reader that records what is damaged in the journal.
    """
    path = log_dir / JOURNAL
    recovery = Recovery(reader.lines(path, check_event))
    if not recovery.attempts:
        reader.problems.append(f"{path} contains no attempt; it is left out")
        return None
    try:  # events contradict each other where lines between them are damaged
        _ = recovery.fault_reports, recovery.missed, recovery.interval, recovery.lost_steps
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
        reader.problems.append(f"{path} is damaged: an event lacks {error}; it is left out")
        return None
    return recovery
