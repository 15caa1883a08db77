"""Failure analysis: classifies how tasks ended and finds the root cause of a failure.

The evidence is exit codes, error files and logs, which the caller collects. The first task that
fails takes the others with it, and often a victim is the first to exit. So a task that was killed,
or that failed for a reason of its own, is blamed before a task that only lost its peers.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import re
import signal
from collections.abc import Mapping, Sequence

from tfdist.launch.terminal_text import printable
from tfdist.runtime.launch_protocol import (
    CONFIGURATION_CODE,
    LOG_SAYS_WHY,
    PREEMPTED_CODE,
    TRANSIENT_CODE,
)
from tfdist.runtime.startup_lines import is_chatter

_LOST_PEERS = re.compile(
    r"PeersAbsent|UnavailableError|AbortedError|CancelledError|DeadlineExceededError"
    r"|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED|Collective ops is aborted|Collective has timed out"
    r"|Connection refused|Connection reset|Socket closed|Broken pipe|[Ff]ailed to connect"
    r"|unhealthy|heartbeat|different incarnation|coordination service|Mutex corrupt"
    r"|waited too long for \S+:\d|lost its connection to \S+:\d"
    r"|data:\d+ at \S+ (?:no longer answers|never answered)"
    rf"|{re.escape(LOG_SAYS_WHY)}"
)
# Error messages of Python, curl, requests, TensorFlow's file systems, boto and Keras' downloads
# without a network.
_NO_NETWORK = re.compile(
    r"name resolution|Name or service not known|No address associated with hostname"
    r"|NameResolutionError|[Cc]ould(?: not|n't) resolve|[Ff]ailed to resolve"
    r"|[Nn]etwork is unreachable|urlopen error|URL fetch failure"
    r"|HTTPS?ConnectionPool|Could not connect to the endpoint|Cannot connect to host"
)
_TF_TASK = r"/job:(\w+)/replica:\d+/task:(\d+)"
_UNHEALTHY = re.compile(
    rf"(?:unhealthy[^/]*{_TF_TASK}|{_TF_TASK} heartbeat timeout"
    r"|(data):(\d+) at \S+ no longer answers)"
)
_SAYS_ERROR = re.compile(r"\berror\b", re.IGNORECASE)
_NAMES_ERROR = re.compile(r"\w*(?:Error|Exception):(?! in user code:)")
# Lines of TensorFlow's errors in graphs that say where, and not what.
_OF_GRAPH = re.compile(
    r"Detected at node|File \"|\d+ root error\(s\) found|\[\[|<?stack trace", re.IGNORECASE
)
_TRACEBACK = "Traceback (most recent call last):"
_FATAL = "Fatal Python error:"  # from faulthandler
_STACK = "Current thread 0x"  # from faulthandler too: signals arrive in the main thread

_HINTS = {
    "SIGKILL": "from outside: `kill -9`, a scheduler's limit, or the out-of-memory killer (see "
    "`dmesg`)",
    "SIGSEGV": "native code accessed invalid memory",
    "SIGBUS": "memory that no longer exists; often /dev/shm or the disk is full",
    "SIGABRT": "native code aborted; the reason is in the log's last lines",
    "SIGILL": "an instruction that this CPU does not have: a wheel built for another machine, or "
    "AMX in a virtual machine that shows it but does not allow it (set "
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16)",
    "SIGFPE": "an arithmetic fault in native code",
    "SIGTERM": "asked to end from outside: `kill`, a scheduler, a preemption",
    "SIGINT": "interrupted from outside",
    "SIGXCPU": "over its CPU time limit (`ulimit -t`)",
}
_EXIT_HINTS = {
    CONFIGURATION_CODE: "a configuration error",
    TRANSIENT_CODE: "its peers were absent, or its port was taken",
    PREEMPTED_CODE: "ended by SIGTERM after it saved its state; another start resumes from it",
    126: "the shell could not execute the command",
    127: "the shell did not find the command",
}
_CUT_OFF = (
    "these tasks have no access to the network; download the data first, or pass --allow-remote "
    "to `tfdist launch`"
)


class Kind(enum.Enum):
    """Category of a task's failure."""

    SIGNAL = "signal"  # died of a signal that the launcher did not send
    ERROR = "error"  # raised an exception or returned an exit code of its own
    CONFIGURATION = "configuration"
    ENDED_EARLY = "ended early"  # returned 0 while its peers still needed it
    UNRESPONSIVE = "unresponsive"  # ran, but its peers or the launcher received no heartbeat
    STOPPED = "stopped"  # the kernel had stopped it (SIGSTOP, a debugger) when its peers failed
    TRANSIENT = "transient"
    PREEMPTED = "preempted"  # was asked to end, and has saved a snapshot
    LOST_PEERS = "lost peers"  # only noticed that another task was gone


_OWN_FAILURES = (Kind.SIGNAL, Kind.ERROR, Kind.CONFIGURATION, Kind.UNRESPONSIVE)


@dataclasses.dataclass(frozen=True)
class Ending:
    """Evidence about one task after all tasks have ended.

    Attributes:
        task: Name of the task, such as "worker:1".
        returncode: Return code in the form of `subprocess`: -9 is death by SIGKILL.
        time: Time of the end in seconds since the epoch.
        signalled: Time at which the launcher told the task to end; None if it ended by itself.
        error: Content of its error file (type, message, traceback, time), if the file existed
            before the launcher told the task to end.
        log: Tail of its log.
        log_path: Path of the log.
        hang: Reason why the task counts as hung, or None if it does not.
        stopped: Whether the kernel had stopped the task (SIGSTOP, a debugger) when the launcher saw
            the first failure, here or on another host. Default False.
    """

    task: str
    returncode: int
    time: float
    signalled: float | None = None
    error: Mapping | None = None
    log: str = ""
    log_path: str = ""
    hang: str | None = None
    stopped: bool = False


@dataclasses.dataclass(frozen=True)
class Failure:
    """One task's failure in words.

    Attributes:
        task: Name of the task.
        kind: Category of the failure.
        code: Exit code as a shell reports it: 128 + signal for a death by signal.
        time: Time in seconds since the epoch.
        how: Description of the end: "failed with exit code 1", "was killed by SIGKILL".
        message: One line of the error itself; may be empty.
        hint: Possible meaning of the failure; may be empty.
        traceback: Traceback of the error, or the last lines of the log; may be empty.
        log_path: Path of the log.
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
    """The root cause, the failures that followed, and the tasks that the launcher had to end."""

    cause: Failure
    others: tuple[Failure, ...] = ()
    stopped: tuple[str, ...] = ()


def judge(endings: Sequence[Ending], isolated: bool = False) -> Verdict | None:
    """Find the root cause among the endings of all tasks of an attempt.

    Args:
        endings: Evidence, one ending per task.
        isolated: Whether the tasks were cut off from the network, which may explain the root cause.
            Default False.

    Returns:
        The verdict, or None if no task failed by itself.

    Example:
        >>> lost = {
        ...     "type": "UnavailableError", "message": "Socket closed", "traceback": "", "time": 5.0
        ... }
        >>> verdict = judge([Ending("worker:0", 1, 5.2, error=lost), Ending("worker:1", -9, 5.3)])
        >>> verdict.cause.task, verdict.cause.code, [other.task for other in verdict.others]
        ('worker:1', 137, ['worker:0'])
    """
    failures = sorted(filter(None, map(classify, endings)), key=lambda failure: failure.time)
    if not failures:
        cause = _stopped_cause(endings, failures)  # other hosts have the victims
        return Verdict(cause) if cause else None
    own_failures = [failure for failure in failures if failure.kind in _OWN_FAILURES]
    preempted = [failure for failure in failures if failure.kind is Kind.PREEMPTED]
    cause = (own_failures or preempted or [_silent_cause(endings, failures) or failures[0]])[0]
    others = tuple(failure for failure in failures if failure.task != cause.task)
    if isolated and _NO_NETWORK.search(f"{cause.message}\n{cause.traceback}"):
        cause = dataclasses.replace(cause, hint=_CUT_OFF)
    return Verdict(
        cause=cause,
        others=others,
        stopped=tuple(
            ending.task
            for ending in endings
            if ending.signalled is not None
            and ending.task not in {cause.task, *(f.task for f in failures)}
        ),
    )


def classify(ending: Ending) -> Failure | None:
    """Return one task's failure, or None if it succeeded or the launcher ended it.

    Example:
        >>> classify(Ending("worker:0", 3, 1.0)).how
        'failed with exit code 3'
        >>> classify(Ending("worker:0", -15, 1.0, signalled=0.5)) is None
        True
    """
    error = ending.error
    if ending.hang is not None:
        return Failure(
            task=ending.task,
            kind=Kind.UNRESPONSIVE,
            code=TRANSIENT_CODE,
            time=ending.signalled or ending.time,
            how=ending.hang,
            traceback=last_stacks(ending.log),
            log_path=ending.log_path,
        )
    if error is None and (ending.signalled is not None or ending.returncode == 0):
        return None
    # A task that has written its error file may have hung during its shutdown, until the launcher's
    # signal ended it.
    code = ending.returncode if error is None or ending.returncode > 0 else 1
    name = signal_name(code)
    how = f"was killed by {name}" if name else f"failed with exit code {code}"
    if name and code > 0:
        how = f"failed with exit code {code}, the shell's code for {name}"
    traceback = error["traceback"].strip() if error else last_traceback(ending.log)
    details = traceback or _last_lines(ending.log)
    error_text = f"{error['type']}: {error['message']}" if error else _last_words(details)
    # A native crash prints its reason, if any, before faulthandler's report.
    lost = _LOST_PEERS.search(error_text or ending.log.partition(_FATAL)[0][-4000:])
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
        message=_headline(error_text, kind),
        hint=_HINTS.get(name, "") if name else _EXIT_HINTS.get(code, ""),
        traceback=details,
        log_path=ending.log_path,
    )


def signal_name(code: int) -> str:
    """Return the signal behind a return code, or "": -9 and a shell's 137 are both SIGKILL.

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
    r"""Return the last Python traceback in a log, or faulthandler's report of a native crash.

    Without either, return "".

    Example:
        >>> last_traceback(
        ...     "step 1\nTraceback (most recent call last):\n  File ...\nKeyError: 1\nbye"
        ... )
        'Traceback (most recent call last):\n  File ...\nKeyError: 1'
    """
    log = printable(log, colour=False)
    start = max(log.rfind(_TRACEBACK), log.rfind(_FATAL))
    if start < 0:
        return ""
    lines = log[start:].splitlines()
    if lines[0].startswith(_FATAL):
        return "\n".join([*log[:start].splitlines()[-8:], *lines[:32]]).strip()
    # The error itself is the first line that is not indented. If its message has more lines,
    # nothing marks its end.
    ends = (i for i, line in enumerate(lines[1:], 2) if line.strip() and not line.startswith(" "))
    return "\n".join(lines[: next(ends, len(lines))]).rstrip()


def last_stacks(log: str) -> str:
    r"""Return the main thread's stack from the last dump that SIGUSR1 triggered, or "".

    Example:
        >>> last_stacks(
        ...     "step 1\nCurrent thread 0x1 (most recent call first):\n"
        ...     "  File a.py, line 3 in wait\nstep 2"
        ... )
        'Current thread 0x1 (most recent call first):\n  File a.py, line 3 in wait'
    """
    start = log.rfind(_STACK)
    if start < 0:
        return ""
    first, *rest = log[start:].splitlines()
    return "\n".join([first, *itertools.takewhile(lambda line: line.startswith("  "), rest)])


def _silent_cause(endings: Sequence[Ending], victims: Sequence[Failure]) -> Failure | None:
    """Return the task that the victims lost when no task died or failed by itself."""
    if (stopped := _stopped_cause(endings, victims)) is not None:
        return stopped
    first = victims[0]
    # No task needs the evaluator. The times cannot decide: a process closes its sockets, and its
    # peers notice, up to two seconds before it has exited.
    group = [ending for ending in endings if not ending.task.startswith("evaluator")]
    early = [ending for ending in group if ending.signalled is None and classify(ending) is None]
    if early:
        ended = min(early, key=lambda ending: ending.time)
        peers = " and ".join(e.task for e in group if e not in early)
        return Failure(
            task=ended.task,
            kind=Kind.ENDED_EARLY,
            code=first.code,
            time=ended.time,
            how=f"ended with code 0 while {peers} still needed it",
            hint="all tasks of a synchronous run must take the same steps; look for an early "
            "return or exit",
            log_path=ended.log_path,
        )
    running = {ending.task: ending for ending in endings if ending.signalled is not None}
    for victim in victims:
        for match in _UNHEALTHY.finditer(f"{victim.message}\n{victim.traceback}"):
            name = "{}:{}".format(*filter(None, match.groups()))
            if name in running:
                return Failure(
                    task=name,
                    kind=Kind.UNRESPONSIVE,
                    code=victim.code,
                    time=victim.time,
                    how=f"no longer answered {victim.task}; the launcher found it alive and killed "
                    "it",
                    hint="frozen (SIGSTOP, a debugger, swapping) or cut off from the network",
                    log_path=running[name].log_path,
                )
    return None


def _stopped_cause(endings: Sequence[Ending], victims: Sequence[Failure]) -> Failure | None:
    """Return the first task that the kernel had stopped, if there is one.

    It reports nothing, and the errors of its peers need not name it: if it is the chief,
    TensorFlow's coordination service has stopped with it.
    """
    ending = next((ending for ending in endings if ending.stopped), None)
    if ending is None:
        return None
    return Failure(
        task=ending.task,
        kind=Kind.STOPPED,
        code=TRANSIENT_CODE,
        time=victims[0].time if victims else ending.signalled or ending.time,
        how="was stopped while its peers needed it; the launcher killed it",
        hint="SIGSTOP, a suspended job or a debugger",
        log_path=ending.log_path,
    )


def _last_lines(log: str) -> str:
    lines = [
        line for line in printable(log, colour=False).strip().splitlines() if not is_chatter(line)
    ]
    return "\n".join(lines[-15:])


def _last_words(text: str) -> str:
    """Return the line that names the error.

    This is the last line of a traceback, or the last line of a program that mentions an error.
    """
    if _FATAL in text:
        return ""
    lines = text.splitlines()
    if _TRACEBACK in text:
        return lines[-1]
    return next((line for line in reversed(lines) if _SAYS_ERROR.search(line)), "")


def _headline(error_text: str, kind: Kind) -> str:
    """Return one line of a message; if TensorFlow writes twenty, the most informative one."""
    lines = [line.strip() for line in error_text.splitlines() if line.strip()]
    if not lines:
        return ""
    if kind is Kind.LOST_PEERS and not _LOST_PEERS.search(lines[0].partition(":")[2]):
        informative = next((line for line in lines[1:] if _LOST_PEERS.search(line)), None)
        if informative:
            return f"{lines[0].partition(':')[0]}: {informative}"[:200].rstrip(":")
    return _reason(lines)[:200]


def _reason(lines: list[str]) -> str:
    """Return the line of TensorFlow's message that says what is wrong; or else the first one.

    An error in a function that AutoGraph has converted, or in a graph, says first where it was.
    """
    kind, _, first = lines[0].partition(": ")
    if first == "in user code:":
        return next((line for line in lines if _NAMES_ERROR.match(line)), lines[0])
    if first == "Graph execution error:":
        reason = next((line for line in lines[1:] if not _OF_GRAPH.match(line)), None)
        return f"{kind}: {reason}" if reason else lines[0]
    return lines[0]
