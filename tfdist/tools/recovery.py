"""A launch's journal becomes what each fault has cost; no file is read here.

Steps are counted since training began. What an attempt lost is how far it came, less the step from which training went on.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.runtime import fault_plan

Line = Mapping[str, Any]  # of the journal: "time" in seconds, "event", and its facts


@dataclasses.dataclass(frozen=True)
class Strike:
    """A fault, or a failure that no plan had, and what followed from it.

    Attributes:
        text: The fault as it was written; of another failure, in brackets, who failed.
        when: Seconds after the first attempt began.
        detected: Seconds until the launcher knew; None: there was nothing to know, or it did not.
        recovered: Seconds until the next step was done, or, where no step was left to do, until the state was restored; None: no attempt
            was lost, or training did not go on.
        lost: Steps done that had to be done again; None as for `recovered`.
        origin: From what training went on; "": it did not.
    """

    text: str
    when: float
    detected: float | None
    recovered: float | None
    lost: int | None
    origin: str


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The lines of one attempt, from its beginning to the next one's."""

    lines: tuple[Line, ...]

    def first(self, event: str) -> Line | None:
        """The first line of an event; None: it did not happen."""
        return next((line for line in self.lines if line["event"] == event), None)

    @functools.cached_property
    def base(self) -> int | None:
        """The step from which it went on; None: it did not come so far."""
        restored, stepping = self.first("restored"), self.first("stepping")
        if restored is not None:
            return restored["total"]
        return None if stepping is None else stepping["total"] - stepping["step"]

    @functools.cached_property
    def reached(self) -> int:
        """How far training was."""
        # Where a fault has struck: others may count the step that it broke off.
        lines = [line for line in self.lines if line["event"] != "ended" or not self.culprits]
        return max(
            [self.base or 0, *(line["total"] for line in lines if line.get("total") is not None)]
        )

    @functools.cached_property
    def recovered(self) -> Line | None:
        """When it had made good for the attempts before: a step was done, or the end restored."""
        ended = self.first("ended")
        done = ended is not None and not any(ended["codes"].values())
        return self.first("stepping") or (self.first("restored") if done else None)

    @functools.cached_property
    def culprits(self) -> tuple[Line, ...]:
        """The faults for which it failed: those that had struck when a failure was seen, and that nobody goes on after."""
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
        """By their numbers the faults whose task was started again alone, and when."""
        found: dict[int, Line] = {}
        for place, line in enumerate(self.lines):
            if line["event"] != "replaced":
                continue
            for fault in reversed(self.lines[:place]):
                if (
                    fault["event"] == fault_plan.EVENT
                    and fault.get("task") == line["task"]
                    and fault["number"] not in found
                ):
                    found[fault["number"]] = line
                    break
        return found


class Recovery:
    """What a launch went through.

    Args:
        journal: Its lines, `contract.read_journal`.

    Example:
        >>> journal = [
        ...     {"time": 5.0, "event": "attempt", "attempt": 0},
        ...     {"time": 7.0, "event": "fault", "number": 0, "text": "kill chief@step=9", "task": "worker:0", "total": 9},
        ...     {"time": 7.5, "event": "detected", "task": "worker:0"},
        ...     {"time": 8.0, "event": "attempt", "attempt": 1},
        ...     {"time": 9.0, "event": "restored", "total": 6, "number": 2, "path": "backup/snapshot-2.tfdist"},
        ...     {"time": 9.5, "event": "stepping", "total": 7, "step": 7},
        ... ]
        >>> Recovery(journal).strikes[0]
        Strike(text='kill chief@step=9', when=2.0, detected=0.5, recovered=2.5, lost=3, origin='snapshot-2')
    """

    def __init__(self, journal: Sequence[Line]):
        self._journal = tuple(journal)
        begins = [place for place, line in enumerate(journal) if line["event"] == "attempt"]
        numbers = [journal[place]["attempt"] for place in begins]
        # Several hosts tell of the same attempt.
        begins = [
            place
            for place, number, before in zip(begins, numbers, [-1, *numbers], strict=False)
            if number != before
        ]
        self.attempts = tuple(
            Attempt(self._journal[begin:end])
            for begin, end in zip(begins, [*begins[1:], len(journal)], strict=True)
        )
        self.begun = float(journal[begins[0]]["time"]) if begins else 0.0
        self.seconds = float(journal[-1]["time"]) - self.begun if begins else 0.0

    @property
    def code(self) -> int | None:
        """The launcher's exit code; None: it has not told."""
        return next((line["code"] for line in self._journal if line["event"] == "over"), None)

    @property
    def refusal(self) -> str:
        """Why the launcher did not start again; "" where it has not said so."""
        return next(
            (
                line["text"]
                for line in self._journal
                if line["event"] == "decided" and not line["restart"]
            ),
            "",
        )

    @property
    def plan(self) -> str | None:
        """The chaos plan; None: there is none."""
        return next((line["chaos"] for line in self._journal if line["event"] == "launch"), None)

    @property
    def missed(self) -> list[str]:
        """Faults of the plan that have not struck."""
        return (
            [fault.text for fault in fault_plan.left(fault_plan.parse(self.plan), self._journal)]
            if self.plan
            else []
        )

    @functools.cached_property
    def strikes(self) -> list[Strike]:
        """In the order of time."""
        found = []
        for place, attempt in enumerate(self.attempts):
            faults = [line for line in attempt.lines if line["event"] == fault_plan.EVENT]
            failed = attempt.first("detected")
            if failed is not None and not attempt.culprits:
                faults.append(
                    {**failed, "text": f"({failed['task'] or 'a task'} failed)", "number": None}
                )
            for line in sorted(faults, key=lambda line: line["time"]):
                found.append(self._strike(line, place))
        return found

    def lost(self, place: int) -> int | None:
        """Steps that an attempt did in vain; None: training did not go on after it.

        Args:
            place: 0, 1, ...
        """
        following = next(
            (later.base for later in self.attempts[place + 1 :] if later.base is not None), None
        )
        return None if following is None else max(0, self.attempts[place].reached - following)

    @property
    def interval(self) -> int | None:
        """The most steps from one snapshot of an attempt to its next; None: there are no two."""
        found = []
        for attempt in self.attempts:
            totals = [line["total"] for line in attempt.lines if line["event"] == "saved"]
            found += [b - a for a, b in itertools.pairwise(totals) if b > a]
        return max(found, default=None)

    def _strike(self, line: Line, place: int) -> Strike:
        attempt, when, begun = self.attempts[place], line["time"] - self.begun, line["time"]
        again = attempt.alone.get(line["number"])
        if again is not None:
            return Strike(
                line["text"],
                when,
                again["time"] - begun,
                None,
                None,
                f"{again['task']} began again, alone",
            )
        if line["event"] == fault_plan.EVENT and line not in attempt.culprits:
            ended = line.get("seconds") is not None
            return Strike(line["text"], when, None, None, None, "all went on" if ended else "")
        detected, later = attempt.first("detected"), self.attempts[place + 1 :]
        assert detected is not None
        recovered = next((found for other in later if (found := other.recovered)), None)
        return Strike(
            text=line["text"],
            when=when,
            detected=None if line["number"] is None else detected["time"] - begun,
            recovered=None if recovered is None else recovered["time"] - begun,
            lost=self.lost(place),
            origin=next((self._origin(other) for other in later if other.base is not None), ""),
        )

    def _origin(self, attempt: Attempt) -> str:
        restored = attempt.first("restored")
        if restored is None:
            return "the beginning"
        # Of the same directory: a script may have several.
        newer = {
            line["number"]
            for line in self._journal[: self._journal.index(restored)]
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
