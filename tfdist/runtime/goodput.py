"""Goodput: the share of a job's time that was training, and where the rest went.

The launcher's journal says when each attempt began, failed and ended, and the time accounts of the
tasks say what they did meanwhile. Together they put each second of a job, over all its attempts,
into exactly one of `CATEGORIES`. With several workers, a second is a mean over them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfdist.runtime.formatting import duration
from tfdist.runtime.launch_protocol import PREEMPTED_CODE, Phase, clock, read_heartbeat
from tfdist.runtime.time_account import RECORDED, Account

Line = Mapping[str, Any]  # of a journal, as `launch_protocol.check_event` returns it

CATEGORIES = {
    "training": "steps whose result was kept, communication included",
    "validation": "steps of evaluation",
    "input": "steps that waited for their batch",
    "sync": "waiting for slower workers, where the step breakdown measures it",
    "compile": "calls that trace and compile a function, with their steps",
    "save": "training waits for a snapshot or a saved model",
    "restore": "reading a snapshot and restoring it",
    "lost": "steps that ran a second time, as a failure took their result",
    "detection": "from the last sign of life to the detection of a failure",
    "startup": "until the first step: processes, imports, cluster, model, data",
    "restart": "the same after a failure or preemption, and the end of the tasks before it",
    "queue": "waiting for machines of the engine",
    "idle": "Python around the steps, callbacks, the end, between launches",
}
REMEDIES = {
    "validation": "validate less often (validation_freq) or on fewer batches",
    "input": "`tfdist data audit` names the slowest stage of the data pipeline",
    "sync": "look for `straggler` in the journal; --replace-stragglers moves a slow worker",
    "compile": "keep shapes equal, so that nothing is traced twice; it weighs less in a longer job",
    "save": "save less often (save_freq), or on a faster disk",
    "restore": "keep snapshots on a faster disk",
    "lost": "save more often (save_freq)",
    "detection": "a lower --hang-timeout finds hung tasks sooner",
    "startup": "it weighs less in a longer job; a smaller or cached data set loads sooner",
    "restart": "--standby keeps processes ready; `tfdist chaos report` lists the failures",
    "queue": "ask for fewer nodes or another partition",
    "idle": "fewer or cheaper callbacks, no callback on each batch, steps_per_execution",
}
LOSSES = 3  # shown with their remedies
_STEPS = ("training", "input", "sync")  # the time of steps, which a failure can lose
_LAUNCHER = ("launch", "allocated", "attempt", "detected", "ended", "decided", "over")
_TAILS = {Phase.IDLE: "idle", Phase.TRACING: "compile"}  # after a task's last sign of life


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Time of a job by category.

    Attributes:
        seconds: Seconds by `CATEGORIES`; their sum is the job's time.
        attempts: Number of attempts.
        launches: Number of launches.
        tasks: Largest number of tasks whose accounts an attempt has.
        lost_steps: Number of steps that ran a second time.
        unmeasured: Seconds of attempts without accounts, which count as idle.
        problems: Sentences about what is missing or damaged.
    """

    seconds: dict[str, float]
    attempts: int = 0
    launches: int = 0
    tasks: int = 0
    lost_steps: int = 0
    unmeasured: float = 0.0
    problems: tuple[str, ...] = ()

    @property
    def wall(self) -> float:
        """Return the time of the job in seconds."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Return the share of training, from 0 to 1."""
        return self.seconds["training"] / self.wall if self.wall > 0 else 0.0

    @property
    def losses(self) -> list[tuple[str, float]]:
        """Return the largest losses and their seconds."""
        others = [(name, value) for name, value in self.seconds.items() if name != "training"]
        return sorted((x for x in others if x[1] > 0), key=lambda x: -x[1])[:LOSSES]

    def to_json(self) -> dict[str, Any]:
        """Return one object for programs."""
        return {
            "goodput": round(self.share, 4),
            "wall_seconds": round(self.wall, 3),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "largest_losses": [
                {"category": name, "seconds": round(value, 3), "remedy": REMEDIES[name]}
                for name, value in self.losses
            ],
            "launches": self.launches,
            "attempts": self.attempts,
            "tasks": self.tasks,
            "lost_steps": self.lost_steps,
            "unmeasured_seconds": round(self.unmeasured, 3),
            "problems": list(self.problems),
        }

    def line(self) -> str:
        """Return the figure and the largest losses in one line."""
        losses = ", ".join(
            f"{name} {duration(value)} ({100 * value / self.wall:.1f} %)"
            for name, value in self.losses
        )
        text = f"goodput {100 * self.share:.1f} % of {duration(self.wall)}"
        return f"{text}; largest losses: {losses}" if losses else text

    def markdown(self) -> str:
        """Return the figure and a table of the largest losses with their remedies."""
        lines = [f"Goodput {100 * self.share:.1f} % of {duration(self.wall)}"]
        if self.losses:
            lines += ["", "| largest losses | time | share | remedy |", "|---|--:|--:|---|"]
        lines += [
            f"| {name} | {duration(value)} | {100 * value / self.wall:.1f} % | {REMEDIES[name]} |"
            for name, value in self.losses
        ]
        return "\n".join(lines)


@dataclasses.dataclass
class _Attempt:
    """Seconds of an attempt by category, and the steps of its accounts.

    `failed_in` is the category of the time before the first step if the attempt failed in that
    time, else "".
    """

    seconds: dict[str, float]
    failed_in: str = ""
    accounts: int = 0
    base: int = 0
    reached: int = 0
    steps: int = 0  # run, over all fits


def measure(journals: Sequence[Sequence[Line]]) -> Goodput:
    """Return the goodput of a job.

    Args:
        journals: Lines of the journal of each of its launches, in any order.

    Example:
        >>> account = dict.fromkeys(RECORDED, 0.0) | {"startup": 3.0, "training": 5.0}
        >>> account |= {"steps": 10, "base": 0, "reached": 10, "phase": "idle", "silent": 1.0}
        >>> journal = [
        ...     {"time": 0.0, "event": "launch"},
        ...     {"time": 0.0, "event": "attempt", "attempt": 0},
        ...     {"time": 10.0, "event": "ended", "attempt": 0, "codes": {},
        ...      "accounts": {"worker:0": account}},
        ...     {"time": 10.0, "event": "over", "code": 0},
        ... ]
        >>> goodput = measure([journal])
        >>> goodput.share, goodput.seconds["startup"], goodput.seconds["idle"]
        (0.5, 4.0, 1.0)
    """
    problems: list[str] = []
    whole = dict.fromkeys(CATEGORIES, 0.0)
    attempts: list[_Attempt] = []
    launches = 0
    unmeasured = 0.0
    former_end: float | None = None
    for journal in sorted(filter(None, journals), key=lambda journal: journal[0]["time"]):
        events, damage = _on_one_clock(journal)
        if not any(line["event"] == "attempt" for _, line in events):
            continue
        launches += 1
        problems += damage
        if former_end is not None:
            whole["idle"] += max(0.0, journal[0]["time"] - former_end)
        former_end = max(line["time"] for line in journal)
        attempts += _attempts(journal, events, whole)
    lost_steps = _lose_steps(attempts)
    without = [attempt for attempt in attempts if not attempt.accounts]
    if len(without) < len(attempts):  # others train: those that failed had not come so far
        for attempt in without:
            if attempt.failed_in:
                attempt.seconds[attempt.failed_in] = attempt.seconds["idle"]
                attempt.seconds["idle"] = 0.0
        without = [attempt for attempt in without if not attempt.failed_in]
    for attempt in attempts:
        for name, seconds in attempt.seconds.items():
            whole[name] += seconds
    if without:
        unmeasured = sum(sum(attempt.seconds.values()) for attempt in without)
        problems.append(
            f"{len(without)} of {len(attempts)} attempts have no time accounts, and count as idle: "
            "they ran no fit under a strategy of tfdist, or an older version of it"
        )
    return Goodput(
        seconds=whole,
        attempts=len(attempts),
        launches=launches,
        tasks=max((attempt.accounts for attempt in attempts), default=0),
        lost_steps=lost_steps,
        unmeasured=unmeasured,
        problems=tuple(problems),
    )


def so_far(journal: Sequence[Line], attempt: int, account: Account) -> Goodput:
    """Return the goodput of a job as one of its training processes sees it.

    Args:
        journal: Lines of the journal when the process started; empty without a launcher.
        attempt: Number of the running attempt.
        account: Time account of the process.
    """
    now = time.time()
    fact = account_fact(account, Phase.RUNNING, 0.0)
    ended = {"time": now, "event": "ended", "attempt": attempt, "codes": {}}
    ended["accounts"] = {"here": fact}
    begin = next((x for x in journal if x["event"] == "attempt" and x["attempt"] == attempt), None)
    if begin is None:
        since = now - sum(account.seconds.values())
        return measure([[{"time": since, "event": "attempt", "attempt": attempt}, ended]])
    if begin.get("boot") == clock()["boot"]:
        ended |= clock()
    return measure([[*journal, ended]])


def with_open_attempt(journal: Sequence[Line], log_dir: str) -> list[Line]:
    """Return a journal with an end of an attempt that runs, or whose launcher was killed.

    The end is the last sign of life: the last line, or the last heartbeat.

    Args:
        journal: Lines of the journal.
        log_dir: Directory of the launch, in which the tasks leave their heartbeats.
    """
    lines = list(journal)
    last = next((x for x in reversed(lines) if x["event"] in ("attempt", "ended", "over")), None)
    if last is None or last["event"] != "attempt":
        return lines
    number = last["attempt"]
    directory = os.path.join(log_dir, f"attempt-{number}") if number else log_dir
    heartbeats = {}
    for task in last["tasks"] if isinstance(last.get("tasks"), list) else ():
        path = os.path.join(directory, f"{str(task).replace(':', '-')}.progress")
        heartbeat = read_heartbeat(path)
        if heartbeat is not None and heartbeat.account is not None:
            with contextlib.suppress(OSError):
                heartbeats[task] = heartbeat, os.stat(path).st_mtime
    since = [line["time"] for line in lines[lines.index(last) :]]
    end = max([*since, *(time for _, time in heartbeats.values())])
    accounts = {
        task: account_fact(heartbeat.account, heartbeat.phase, end - time)
        for task, (heartbeat, time) in heartbeats.items()
        if heartbeat.account is not None
    }
    ended = {"time": end, "event": "ended", "attempt": number, "codes": {}, "accounts": accounts}
    return [*lines, ended]


def account_fact(account: Account, phase: str, silent: float) -> dict[str, Any]:
    """Return what the journal's line `ended` says about a task.

    Args:
        account: Last time account of the task.
        phase: Phase of its last heartbeat.
        silent: Seconds from that heartbeat to the line.
    """
    silent = round(max(0.0, silent), 3)
    return {**account.to_json(), "phase": phase, "silent": silent}


def _on_one_clock(journal: Sequence[Line]) -> tuple[list[tuple[float, Line]], list[str]]:
    """Return the launcher's lines with their seconds since the first, and problems.

    Where several hosts share a journal, the lines are those of the first one.
    """
    lines = [line for line in journal if line["event"] in _LAUNCHER]
    boot = lines[0].get("boot") if lines else None
    lines = [line for line in lines if line.get("boot") in (boot, None)]
    events: list[tuple[float, Line]] = []
    seconds = 0.0
    backwards = 0
    for before, line in zip([None, *lines], lines, strict=False):
        if before is not None:
            name = "time" if None in (before.get("clock"), line.get("clock")) else "clock"
            step = line[name] - before[name]
            backwards += step < 0
            seconds += max(0.0, step)
        events.append((seconds, line))
    problems = []
    if backwards:
        problems.append(
            f"{backwards} of {len(lines)} lines of the launcher go back in time, as its clock was "
            "set: the time between them counts as 0 s"
        )
    return events, problems


def _attempts(
    journal: Sequence[Line], events: list[tuple[float, Line]], whole: dict[str, float]
) -> Iterable[_Attempt]:
    """Return the attempts of a launch; add the time between them to `whole`."""
    begins: list[int] = []
    for index, (_, line) in enumerate(events):
        if line["event"] == "attempt" and not any(
            events[begin][1]["attempt"] == line["attempt"] for begin in begins
        ):
            begins.append(index)
    end = 0.0
    first = 0
    for count, begin in enumerate(begins):
        gap = events[begin][0] - end
        queue = sum(
            float(line.get("seconds") or 0.0)
            for _, line in events[first:begin]
            if line["event"] == "allocated"
        )
        queue = min(max(0.0, queue), gap)
        whole["queue"] += queue
        whole["restart" if count else "startup"] += gap - queue
        followed = count + 1 < len(begins)
        first = begins[count + 1] if followed else len(events)
        own = events[begin:first]
        start = own[0][0]
        ended = next((x for x in reversed(own) if x[1]["event"] == "ended"), None)
        end = own[-1][0] if ended is None else ended[0]
        detected = next((t for t, line in own if line["event"] == "detected"), None)
        yield _attempt(
            _accounts(journal, own[0][1]["attempt"]),
            end - start,
            0.0 if detected is None else max(0.0, end - detected),
            failed=detected is not None,
            began=any(
                x["event"] == "stepping" and x.get("attempt") == own[0][1]["attempt"]
                for x in journal
            ),
            preempted=PREEMPTED_CODE in _codes(ended),
            starting="restart" if count else "startup",
            ending="restart" if followed else "idle",
        )
        if not followed:
            whole["idle"] += events[-1][0] - end


def _codes(ended: tuple[float, Line] | None) -> Iterable[Any]:
    return () if ended is None else ended[1]["codes"].values()


def _accounts(journal: Sequence[Line], attempt: int) -> list[Line]:
    """Return the accounts of an attempt, which each of several hosts writes for its own tasks."""
    accounts: dict[str, Any] = {}
    for line in journal:
        if line["event"] == "ended" and line.get("attempt") == attempt:
            accounts.update(line.get("accounts") or {})
    return [account for account in accounts.values() if _is_sound(account)]


def _is_sound(account: Any) -> bool:
    """Return whether a journal's account is as `account_fact` returns it."""
    if not isinstance(account, dict) or not isinstance(account.get("phase"), str):
        return False
    silent = account.get("silent")
    if isinstance(silent, bool) or not isinstance(silent, int | float):
        return False
    with contextlib.suppress(ValueError):
        Account.from_json(account)
        return 0 <= silent < math.inf
    return False


def _attempt(
    accounts: Sequence[Line],
    seconds: float,
    teardown: float,
    *,
    failed: bool,
    began: bool,
    preempted: bool,
    starting: str,
    ending: str,
) -> _Attempt:
    """Divide the time of an attempt: for each task, and then the mean.

    Args:
        accounts: Accounts of its tasks.
        seconds: Time of the attempt.
        teardown: Time from the detection of a failure to its end.
        failed: Whether a failure was detected.
        began: Whether its tasks made a step.
        preempted: Whether the tasks were asked to end.
        starting: Category of the time before the first step.
        ending: Category of the teardown.
    """
    whole = dict.fromkeys(CATEGORIES, 0.0)
    failed_in = starting if failed and not began else ""
    if not accounts:
        whole["idle"] = seconds
        return _Attempt(whole, failed_in)
    for fact in accounts:
        own = {name: float(fact[name]) for name in RECORDED if name != "startup"}
        tail = _TAILS.get(fact["phase"], "detection" if failed else "idle")
        tail = ending if preempted else tail
        silent = max(0.0, float(fact["silent"]) - teardown)
        left = seconds
        # What comes first is the most certain; clocks and roundings only take from the others.
        for name, value in (*own.items(), (tail, silent), (ending, teardown)):
            taken = min(value, left)
            whole[name] += taken / len(accounts)
            left -= taken
        whole[starting] += left / len(accounts)
    stepped = [fact for fact in accounts if fact["steps"]]
    return _Attempt(
        whole,
        failed_in,
        len(accounts),
        base=min((int(fact["base"]) for fact in stepped), default=0),
        reached=max((int(fact["reached"]) for fact in stepped), default=0),
        steps=max((int(fact["steps"]) for fact in stepped), default=0),
    )


def _lose_steps(attempts: Sequence[_Attempt]) -> int:
    """Move the time of steps that a later attempt runs again to `lost`; return their number.

    A step counts as much as the mean step of its attempt.
    """
    lost_steps = 0
    kept: int | None = None  # step from which a later attempt continued
    for attempt in reversed(attempts):
        if not attempt.steps:
            continue
        if kept is not None:
            lost = max(0, attempt.reached - max(attempt.base, kept))
            lost_steps += lost
            share = min(1.0, lost / attempt.steps)
            for name in _STEPS:
                seconds = share * attempt.seconds[name]
                attempt.seconds[name] -= seconds
                attempt.seconds["lost"] += seconds
        kept = attempt.base if kept is None else min(kept, attempt.base)
    return lost_steps
