"""Fault injection plans: the parser for `--chaos` and the faults that are still pending.

A plan is a list of faults with semicolons between them:

    kill worker:1@step=37; stop worker:0@step=80 for 20s; kill chief@saving; corrupt newest;
    fill disk@step=40

The journal of the launch records each fault when it is injected.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

NONE = "none"  # a plan without faults, for the undisturbed reference run
EVENT = "fault"  # journal event of an injected fault

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}

_TASK_VERBS = (*SIGNALS, "hang", "raise")
_MOMENTS = ("start", "saving", "saved", "restoring", "end")
_GRAMMAR = re.compile(
    r"(?:(?P<verb>kill|stop|term|hang|raise)\s+(?P<task>chief|[a-z]+:\d+)"
    r"|(?P<other>corrupt\s+newest|fill\s+disk|kill\s+standby))"
    r"(?:\s*@\s*(?:step\s*=\s*(?P<step>\d+)|(?P<moment>[a-z]+)))?"
    r"(?:\s+for\s+(?P<seconds>\d+(?:\.\d+)?)\s*s)?"
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault, which is injected once.

    Attributes:
        number: Position in the plan, from 0.
        text: The fault as the user wrote it.
        verb: "kill", "stop", "term", "hang", "raise", "corrupt newest", "fill disk" or "kill
            standby" (at a hand-over).
        task: Name of the target such as "worker:1"; "chief" for the task that writes, whatever its
            name; "" for faults without a target task.
        step: Number of steps since the beginning of training after which the fault is injected;
            None if it does not depend on a step.
        moment: "start" of a fit, "saving" (half of the file is written), "saved" (the file is
            complete), "restoring", "end" of a fit; or "".
        seconds: Duration in seconds; None for no limit.
    """

    number: int
    text: str
    verb: str
    task: str
    step: int | None
    moment: str
    seconds: float | None

    def of(self, task: str, is_chief: bool) -> bool:
        """Return whether the fault targets this task."""
        return self.task == task or (is_chief and self.task in ("chief", ""))


def parse(plan: str) -> tuple[Fault, ...]:
    """Parse a fault injection plan.

    Args:
        plan: Faults with semicolons between them, or "none".

    Raises:
        ValueError: If a fault is malformed. The message quotes the fault and says what was
            expected.

    Example:
        >>> faults = parse("kill worker:1@step=37; stop worker:0@step=80 for 20s")
        >>> [(fault.verb, fault.task, fault.step, fault.seconds) for fault in faults]
        [('kill', 'worker:1', 37, None), ('stop', 'worker:0', 80, 20.0)]
        >>> parse("kill chief@saving")[0].moment
        'saving'
    """
    if plan.strip() == NONE:
        return ()
    words = [text.strip() for text in plan.split(";") if text.strip()]
    if not words:
        raise ValueError(
            'expected faults such as "kill worker:1@step=37; kill chief@saving", or "none", '
            "received nothing"
        )
    return tuple(_fault(number, text) for number, text in enumerate(words))


def _fault(number: int, text: str) -> Fault:
    match = _GRAMMAR.fullmatch(text)
    moment = match["moment"] or "" if match else ""
    if not match or (moment and moment not in _MOMENTS):
        raise ValueError(
            f"expected VERB TASK@WHEN [for Ns] with a verb of {', '.join(_TASK_VERBS)}, a task "
            f"such as worker:1 or chief, and step=N, {', '.join(_MOMENTS[:-1])} or {_MOMENTS[-1]} "
            f"after the @; or `corrupt newest`, `fill disk` or `kill standby`; received {text!r}"
        )
    verb = match["verb"] or " ".join(match["other"].split())
    if match["verb"] and not (moment or match["step"]):
        raise ValueError(
            f"{text!r}: expected a moment, such as {verb} {match['task']}@step=37 or @saving"
        )
    if match["seconds"] and verb != "stop":
        raise ValueError(f"{text!r}: expected `for {match['seconds']}s` after `stop` only")
    if match["other"] and moment:
        raise ValueError(f"{text!r}: expected @step=N or nothing after `{verb}`")
    if verb == "kill standby" and match["step"]:
        raise ValueError(
            f"{text!r}: expected nothing after `kill standby`, which strikes when a task is next "
            "handed over"
        )
    return Fault(
        number=number,
        text=text,
        verb=verb,
        task=match["task"] or "",
        step=int(match["step"]) if match["step"] else None,
        moment=moment,
        seconds=float(match["seconds"]) if match["seconds"] else None,
    )


def left(faults: Sequence[Fault], journal: Sequence[Mapping[str, Any]]) -> list[Fault]:
    """Return the faults that have not been injected yet.

    Args:
        faults: Faults of the plan.
        journal: Events of the launch, as `launch_protocol.read_journal` returns them.

    Example:
        >>> left(parse("kill chief@end; corrupt newest"), [{"event": EVENT, "number": 0}])[0].verb
        'corrupt newest'
    """
    injected = {line["number"] for line in journal if line["event"] == EVENT}
    return [fault for fault in faults if fault.number not in injected]
