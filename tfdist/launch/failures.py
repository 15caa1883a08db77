"""The traces of ended tasks become typed failures with one root cause; nothing is read, started or killed here.

The traces are exit codes, error files and logs. Whichever task fails first takes the others with it, and often a
victim is the first to exit. So a task that was killed, or that failed for a reason of its own, is blamed before one
that only lost its peers.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import re
import signal
from collections.abc import Mapping, Sequence

from tfdist.launch.terminal_text import is_chatter, printable
from tfdist.runtime.launch_protocol import CONFIGURATION_CODE, PREEMPTED_CODE, TRANSIENT_CODE

_LOST_PEERS = re.compile(
    r"PeersAbsent|UnavailableError|AbortedError|CancelledError|DeadlineExceededError"
    r"|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED|Collective ops is aborted|Collective has timed out"
    r"|Connection refused|Connection reset|Socket closed|Broken pipe|[Ff]ailed to connect"
    r"|unhealthy|heartbeat|different incarnation|coordination service|Mutex corrupt"
    r"|waited too long for \S+:\d|data:\d+ at \S+ (?:no longer answers|never answered)"
)
# What Python, curl, requests, TensorFlow's file systems, boto and Keras' downloads say where no network is.
_NO_NETWORK = re.compile(
    r"name resolution|Name or service not known|No address associated with hostname|NameResolutionError"
    r"|[Cc]ould(?: not|n't) resolve|[Ff]ailed to resolve|[Nn]etwork is unreachable|urlopen error|URL fetch failure"
    r"|HTTPS?ConnectionPool|Could not connect to the endpoint|Cannot connect to host"
)
_TF_TASK = r"/job:(\w+)/replica:\d+/task:(\d+)"
_UNHEALTHY = re.compile(
    rf"(?:unhealthy[^/]*{_TF_TASK}|{_TF_TASK} heartbeat timeout|(data):(\d+) at \S+ no longer answers)"
)
_SAYS_ERROR = re.compile(r"\berror\b", re.IGNORECASE)
_TRACEBACK = "Traceback (most recent call last):"
_FATAL = "Fatal Python error:"  # faulthandler's
_STACK = "Current thread 0x"  # of faulthandler too: signals come to the main thread

_HINTS = {
    "SIGKILL": "from outside: `kill -9`, a scheduler's limit, or the out-of-memory killer (see `dmesg`)",
    "SIGSEGV": "native code touched memory that is not its own",
    "SIGBUS": "memory that is gone; often /dev/shm or the disk is full",
    "SIGABRT": "native code gave up; the reason is in the log's last lines",
    "SIGILL": "an instruction that this CPU does not have: a wheel built for another machine, or AMX in a virtual machine that "
    "shows it but does not allow it (set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16)",
    "SIGFPE": "an arithmetic fault in native code",
    "SIGTERM": "asked to end from outside: `kill`, a scheduler, a preemption",
    "SIGINT": "interrupted from outside",
    "SIGXCPU": "over its CPU time limit (`ulimit -t`)",
}
_EXIT_HINTS = {
    CONFIGURATION_CODE: "a configuration error",
    TRANSIENT_CODE: "its peers were absent, or its port was taken",
    PREEMPTED_CODE: "asked to end by SIGTERM; it saved its state, and another start goes on from there",
    126: "the shell could not execute the command",
    127: "the shell did not find the command",
}
_CUT_OFF = "these tasks are cut off from the network; fetch the data before, or pass --allow-remote to `tfdist launch`"


class Kind(enum.Enum):
    """What made a task fail."""

    SIGNAL = "signal"  # it died of a signal that the launcher did not send
    ERROR = "error"  # an exception or exit code of its own
    CONFIGURATION = "configuration"
    ENDED_EARLY = "ended early"  # with code 0, while its peers needed it
    UNRESPONSIVE = "unresponsive"  # it ran, but its peers or the launcher heard nothing from it
    TRANSIENT = "transient"
    PREEMPTED = "preempted"  # it was asked to end, and has saved its state
    LOST_PEERS = "lost peers"  # it only noticed that another was gone


_OF_ITS_OWN = (Kind.SIGNAL, Kind.ERROR, Kind.CONFIGURATION, Kind.UNRESPONSIVE)


@dataclasses.dataclass(frozen=True)
class Ending:
    """What is known of one task when all have ended.

    Attributes:
        task: Its name, "worker:1".
        returncode: As `subprocess` gives it: -9 is death by SIGKILL.
        time: When it ended, seconds since the epoch.
        told: When the launcher told it to end; None: it ended by itself.
        error: Its error file, if it was there before the launcher told it to end: type, message, traceback, time.
        log: The end of its log.
        log_path: Where the log is.
        silence: Why it counts as hung, in words; None: it does not.
    """

    task: str
    returncode: int
    time: float
    told: float | None = None
    error: Mapping | None = None
    log: str = ""
    log_path: str = ""
    silence: str | None = None


@dataclasses.dataclass(frozen=True)
class Failure:
    """One task's failure, in words.

    Attributes:
        task: Its name.
        kind: What made it fail.
        code: The exit code that a shell would see: 128 + signal for a death by signal.
        time: When, seconds since the epoch.
        how: How it ended: "failed with exit code 1", "was killed by SIGKILL".
        message: One line of the error itself; may be empty.
        hint: What that may mean; may be empty.
        traceback: The error's traceback, or the log's last lines; may be empty.
        log_path: Where the log is.
    """

    task: str
    kind: Kind
    code: int
    time: float
    how: str
    message: str = ""
    hint: str = ""
    traceback: str = ""
    log_path: str = ""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The root cause, the failures that are not, and the tasks that the launcher had to end."""

    cause: Failure
    others: tuple[Failure, ...] = ()
    stopped: tuple[str, ...] = ()


def judge(endings: Sequence[Ending], isolated: bool = False) -> Verdict | None:
    """Finds the root cause among the endings of all tasks of an attempt.

    Args:
        endings: One per task.
        isolated: Whether the tasks were cut off from the network, which may be the root cause's reason.

    Returns:
        The verdict, or None where no task failed by itself.

    Example:
        >>> lost = {"type": "UnavailableError", "message": "Socket closed", "traceback": "", "time": 5.0}
        >>> verdict = judge([Ending("worker:0", 1, 5.2, error=lost), Ending("worker:1", -9, 5.3)])
        >>> verdict.cause.task, verdict.cause.code, [other.task for other in verdict.others]
        ('worker:1', 137, ['worker:0'])
    """
    failures = sorted(filter(None, map(classify, endings)), key=lambda failure: failure.time)
    if not failures:
        return None
    own = [failure for failure in failures if failure.kind in _OF_ITS_OWN]
    preempted = [failure for failure in failures if failure.kind is Kind.PREEMPTED]
    cause = (own or preempted or [_silent_cause(endings, failures) or failures[0]])[0]
    others = tuple(failure for failure in failures if failure is not cause)
    if isolated and _NO_NETWORK.search(f"{cause.message}\n{cause.traceback}"):
        cause = dataclasses.replace(cause, hint=_CUT_OFF)
    return Verdict(
        cause=cause,
        others=others,
        stopped=tuple(
            ending.task
            for ending in endings
            if ending.told is not None
            and ending.task not in {cause.task, *(f.task for f in failures)}
        ),
    )


def classify(ending: Ending) -> Failure | None:
    """One task's ending as a failure; None where it did its work or ended because the launcher told it to.

    Example:
        >>> classify(Ending("worker:0", 3, 1.0)).how
        'failed with exit code 3'
        >>> classify(Ending("worker:0", -15, 1.0, told=0.5)) is None
        True
    """
    error = ending.error
    if ending.silence is not None:
        return Failure(
            task=ending.task,
            kind=Kind.UNRESPONSIVE,
            code=TRANSIENT_CODE,
            time=ending.told or ending.time,
            how=ending.silence,
            traceback=last_stacks(ending.log),
            log_path=ending.log_path,
        )
    if error is None and (ending.told is not None or ending.returncode == 0):
        return None
    # A task whose error file is there may have hung on its way out, and then ended by the launcher's signal.
    code = ending.returncode if error is None or ending.returncode > 0 else 1
    name = signal_name(code)
    how = f"was killed by {name}" if name else f"failed with exit code {code}"
    if name and code > 0:
        how = f"failed with exit code {code}, a shell's word for {name}"
    traceback = error["traceback"].strip() if error else last_traceback(ending.log)
    shown = traceback or _last_lines(ending.log)
    said = f"{error['type']}: {error['message']}" if error else _last_words(shown)
    # A native crash says why, if it does, before faulthandler's report.
    lost = _LOST_PEERS.search(said or ending.log.partition(_FATAL)[0][-4000:])
    if name and name != "SIGABRT":
        kind = Kind.SIGNAL
    elif code == CONFIGURATION_CODE:
        kind = Kind.CONFIGURATION
    elif code == PREEMPTED_CODE:
        kind = Kind.PREEMPTED
    elif code == TRANSIENT_CODE:
        kind = Kind.TRANSIENT
    elif lost:
        kind = Kind.LOST_PEERS
    else:
        kind = Kind.SIGNAL if name else Kind.ERROR
    return Failure(
        task=ending.task,
        kind=kind,
        code=128 - code if code < 0 else code,
        time=error["time"] if error else ending.time,
        how=how,
        message=_headline(said, kind),
        hint=_HINTS.get(name, "") if name else _EXIT_HINTS.get(code, ""),
        traceback=shown,
        log_path=ending.log_path,
    )


def signal_name(code: int) -> str:
    """The signal behind a return code, or "": -9 and a shell's 137 are both SIGKILL.

    Example:
        >>> signal_name(-9), signal_name(137), signal_name(1), signal_name(255)
        ('SIGKILL', 'SIGKILL', '', '')
    """
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number).name if number > 0 else ""
    except ValueError:
        return f"signal {number}" if code < 0 else ""


def last_traceback(log: str) -> str:
    """The last Python traceback in a log, or faulthandler's report of a native crash; "" where there is none.

    Example:
        >>> last_traceback("step 1\\nTraceback (most recent call last):\\n  File ...\\nKeyError: 1\\nbye")
        'Traceback (most recent call last):\\n  File ...\\nKeyError: 1'
    """
    log = printable(log, colour=False)
    start = max(log.rfind(_TRACEBACK), log.rfind(_FATAL))
    if start < 0:
        return ""
    lines = log[start:].splitlines()
    if lines[0].startswith(_FATAL):
        return "\n".join([*log[:start].splitlines()[-8:], *lines[:32]]).strip()
    # The error itself is the first line that is not indented; where its message has more lines, nothing marks the end.
    ends = (i for i, line in enumerate(lines[1:], 2) if line.strip() and not line.startswith(" "))
    return "\n".join(lines[: next(ends, len(lines))]).rstrip()


def last_stacks(log: str) -> str:
    """The main thread's stack in the last dump that SIGUSR1 asked for; "" where there is none.

    Example:
        >>> last_stacks("step 1\\nCurrent thread 0x1 (most recent call first):\\n  File a.py, line 3 in wait\\nstep 2")
        'Current thread 0x1 (most recent call first):\\n  File a.py, line 3 in wait'
    """
    start = log.rfind(_STACK)
    if start < 0:
        return ""
    first, *rest = log[start:].splitlines()
    return "\n".join([first, *itertools.takewhile(lambda line: line.startswith("  "), rest)])


def _silent_cause(endings: Sequence[Ending], victims: Sequence[Failure]) -> Failure | None:
    """Whom the victims lost where nobody died or failed by itself."""
    first = victims[0]
    # Nobody needs the evaluator. Times do not count: a process closes its sockets, and its peers notice, up to
    # two seconds before it is gone.
    group = [ending for ending in endings if not ending.task.startswith("evaluator")]
    early = [ending for ending in group if ending.told is None and classify(ending) is None]
    if early:
        gone = min(early, key=lambda ending: ending.time)
        peers = " and ".join(e.task for e in group if e not in early)
        return Failure(
            task=gone.task,
            kind=Kind.ENDED_EARLY,
            code=first.code,
            time=gone.time,
            how=f"ended with code 0 while {peers} still needed it",
            hint="all tasks of a synchronous run must take the same steps; look for an early return or exit",
            log_path=gone.log_path,
        )
    running = {ending.task: ending for ending in endings if ending.told is not None}
    for victim in victims:
        for match in _UNHEALTHY.finditer(f"{victim.message}\n{victim.traceback}"):
            name = "{}:{}".format(*filter(None, match.groups()))
            if name in running:
                return Failure(
                    task=name,
                    kind=Kind.UNRESPONSIVE,
                    code=victim.code,
                    time=victim.time,
                    how=f"no longer answered, says {victim.task}; the launcher found it alive and ended it",
                    hint="frozen (SIGSTOP, a debugger, swapping) or cut off from the network",
                    log_path=running[name].log_path,
                )
    return None


def _last_lines(log: str) -> str:
    lines = [
        line for line in printable(log, colour=False).strip().splitlines() if not is_chatter(line)
    ]
    return "\n".join(lines[-15:])


def _last_words(text: str) -> str:
    """The line that says what went wrong: a traceback's last, a program's last that speaks of an error."""
    if _FATAL in text:
        return ""
    lines = text.splitlines()
    if _TRACEBACK in text:
        return lines[-1]
    return next((line for line in reversed(lines) if _SAYS_ERROR.search(line)), "")


def _headline(said: str, kind: Kind) -> str:
    """One line of a message: the telling one where TensorFlow writes twenty."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if not lines:
        return ""
    if kind is Kind.LOST_PEERS and not _LOST_PEERS.search(lines[0].partition(":")[2]):
        telling = next((line for line in lines[1:] if _LOST_PEERS.search(line)), None)
        if telling:
            return f"{lines[0].partition(':')[0]}: {telling}"[:200].rstrip(":")
    return lines[0][:200]
