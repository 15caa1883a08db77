"""Protocol between `tfdist launch` and its processes: variables, files and exit codes.

The launcher sets environment variables. Each process writes its progress to a file of its own and
appends events to a journal that all processes share. Without a launcher, all of these functions do
nothing. None of them waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import secrets
import time
from collections.abc import Mapping
from typing import Any

PREEMPTED_CODE = 42  # ended by SIGTERM after a snapshot; another start resumes from it
# sysexits.h EX_TEMPFAIL: peers were absent or lost; another attempt may find them
TRANSIENT_CODE = 75
CONFIGURATION_CODE = 78  # sysexits.h EX_CONFIG: a restart cannot help

TASK = "TFDIST_TASK"
LAUNCH = "TFDIST_LAUNCH"
ATTEMPT = "TFDIST_ATTEMPT"
RESTARTS = "TFDIST_RESTARTS"
LOG_DIR = "TFDIST_LOG_DIR"
ERROR_FILE = "TFDIST_ERROR_FILE"
PROGRESS_FILE = "TFDIST_PROGRESS_FILE"
IMPORTS_FILE = "TFDIST_IMPORTS_FILE"  # record of the imports, for standby processes
CHAOS = "TFDIST_CHAOS"
TOKEN = "TFDIST_TOKEN"  # secret of the launchers of a launch, and of its tasks

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)  # thread pool sizes of a task

JOURNAL = "events.jsonl"  # in the log directory
MET = "met"  # event of a task in the journal
RESULT = "result.tfdist"  # in the log directory of a launch with a fault plan


_FACTS = {  # that every event of a name has, besides its time
    "launch": ("chaos",),
    "attempt": ("attempt", "tasks"),
    "ended": ("codes",),
    "over": ("code",),
    "decided": ("restart", "text"),
    "fault": ("number", "text"),
    "detected": ("task",),
    "replaced": ("task",),
    MET: ("task", "attempt"),
    "stepping": ("step", "total"),
    "saved": ("total", "path"),
    "restored": ("total", "path"),
}
_KINDS = {  # types of facts, which may also be None
    ("time", "seconds"): (int, float),
    ("attempt", "number", "total", "step", "epoch", "pid", "code"): (int,),
    ("text", "task", "path", "chaos"): (str,),
    ("tasks",): (list,),
    ("codes",): (dict,),
}


@dataclasses.dataclass(frozen=True)
class Launched:
    """Parameters that the launcher has passed to this process.

    Attributes:
        task: Task name such as "worker:1"; "" for a process that the launcher did not start.
        launch: Unique name of the launch, equal in all its attempts and on all hosts.
        attempt: Number of the attempt, from 0. Higher attempts supersede lower ones of the same
            launch.
        restarts: Number of restarts that the launcher allows after failures.
        log_dir: Log directory of the launch, or None.
        progress_file: Path of the progress file, or None.
        chaos: Fault plan, as in `tfdist launch --chaos`; None to inject no fault and report none.
    """

    task: str = ""
    launch: str = ""
    attempt: int = 0
    restarts: int = 0
    log_dir: str | None = None
    progress_file: str | None = None
    chaos: str | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Launched:
        """Read the parameters from the environment variables.

        Example:
            >>> Launched.from_environ({"TFDIST_TASK": "worker:1", "TFDIST_ATTEMPT": "2"}).attempt
            2
        """
        environ = os.environ if environ is None else environ
        return cls(
            task=environ.get(TASK, ""),
            launch=environ.get(LAUNCH, ""),
            attempt=_number(environ.get(ATTEMPT, "")),
            restarts=_number(environ.get(RESTARTS, "")),
            log_dir=environ.get(LOG_DIR),
            progress_file=environ.get(PROGRESS_FILE),
            chaos=environ.get(CHAOS),
        )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def token(environ: Mapping[str, str] | None = None) -> bytes:
    """Return the secret that all tasks of a launch share; b"" if there is none."""
    return (os.environ if environ is None else environ).get(TOKEN, "").encode()


def environment(**more: str) -> dict[str, str]:
    """Return the variables of this process plus `more`, for a process that it starts.

    All processes that it starts share a secret, also if this process has none.
    """
    return {TOKEN: _token_of_children(), **os.environ, **more}


@functools.cache
def _token_of_children() -> str:
    return secrets.token_hex(32)


def gets_repeated_signals(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether a scheduler sends this process the same SIGTERM more than once.

    Slurm signals every process of a step, also those to which a launcher or an agent passes the
    signal on. It ends with SIGKILL what does not end in time.

    Example:
        >>> gets_repeated_signals({"SLURM_JOB_ID": "7"}), gets_repeated_signals({})
        (True, False)
    """
    return "SLURM_JOB_ID" in (os.environ if environ is None else environ)


def inherited(*names: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return those of the named variables that this process has set and its tasks inherit.

    Example:
        >>> inherited("OMP_NUM_THREADS", "HOME", environ={"OMP_NUM_THREADS": "2"})
        {'OMP_NUM_THREADS': '2'}
    """
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in names if name in environ}


class Phase:
    """The phase of a process, which decides how long it may go without a heartbeat."""

    IDLE = "idle"  # outside training: the watchdog does not apply
    TRACING = "tracing"  # the first call of a tf.function, which traces and compiles it
    RUNNING = "running"  # executing steps


_PHASES = (Phase.IDLE, Phase.TRACING, Phase.RUNNING)


class Progress:
    """A heartbeat that tells the launcher the phase and the position in training.

    Args:
        path: Path of the progress file; None to write nothing.
    """

    def __init__(self, path: str | None):
        self._path = path
        self._file = -1
        self._beats = 0

    def beat(self, phase: str, epoch: int, step: int, total: int = 0) -> None:
        """Write one heartbeat.

        Args:
            phase: One of `Phase`.
            epoch: Index of the epoch, from 0.
            step: Number of finished steps of the epoch.
            total: Number of steps since training began, default 0.
        """
        if self._path is None:
            return
        self._beats += 1
        line = f"{phase:8} {epoch:12} {step:12} {total:12} {self._beats:12}\n".encode()
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.pwrite(self._file, line, 0)
        except OSError:  # a full disk must not end the training
            return


@functools.cache
def progress() -> Progress:
    """Return the heartbeat of this process."""
    return Progress(Launched.from_environ().progress_file)


@dataclasses.dataclass(frozen=True)
class HeartbeatRecord:
    """The last heartbeat of a process.

    Attributes:
        phase: See `Progress.beat`.
        epoch: See `Progress.beat`.
        step: See `Progress.beat`.
        total: See `Progress.beat`.
        beats: Number of heartbeats so far, which grows with each.
    """

    phase: str
    epoch: int
    step: int
    total: int
    beats: int


def read_heartbeat(path: str) -> HeartbeatRecord | None:
    """Return the heartbeat that `Progress` last wrote, or None if there is none yet.

    A damaged file is as good as none: the process writes its next heartbeat over it.

    Example:
        >>> import tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "worker-0.progress")
        >>> Progress(path).beat(Phase.RUNNING, 1, 37, 137)
        >>> read_heartbeat(path)
        HeartbeatRecord(phase='running', epoch=1, step=37, total=137, beats=1)
    """
    with contextlib.suppress(OSError, ValueError):
        with open(path, encoding="ascii") as file:
            phase, epoch, step, total, beats = file.read().split()
        if phase in _PHASES:
            return HeartbeatRecord(phase, int(epoch), int(step), int(total), int(beats))
    return None


def note(log_dir: str | None, event: str, **facts: Any) -> None:
    """Append an event with its time to the journal of a launch.

    Args:
        log_dir: Log directory of the launch; None to write nothing.
        event: Name of the event.
        **facts: JSON-serializable values.
    """
    if log_dir is None:
        return
    line = json.dumps({"time": time.time(), "event": event, **facts}) + "\n"
    # A single write to a file opened for appending keeps the lines of several processes apart.
    with contextlib.suppress(OSError):
        descriptor = os.open(
            os.path.join(log_dir, JOURNAL),
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
            0o644,
        )
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def note_met() -> None:
    """Tell the launcher that this process has met the other tasks, or serves them.

    The launcher warns of tasks that end well without it.
    """
    launched = Launched.from_environ()
    note(launched.log_dir, MET, task=launched.task, attempt=launched.attempt)


def read_journal(log_dir: str) -> list[dict[str, Any]]:
    """Return the events in a launch's journal, without lines that were cut off or damaged.

    Example:
        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> note(directory, "stepping", step=3, total=3)
        >>> [(line["event"], line["step"]) for line in read_journal(directory)]
        [('stepping', 3)]
    """
    events = []
    with (
        contextlib.suppress(FileNotFoundError),
        open(os.path.join(log_dir, JOURNAL), "rb") as file,
    ):
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                events.append(check_event(json.loads(line)))
    return events


def check_event(line: Any) -> dict[str, Any]:
    """Return an event of a journal; raise ValueError if it is none, or damaged.

    Example:
        >>> check_event({"time": 1.5, "event": "fault", "number": 0, "text": "kill chief@end"})[
        ...     "text"
        ... ]
        'kill chief@end'
        >>> check_event({"time": 1.5, "event": "fault"})
        Traceback (most recent call last):
        ValueError: expected number of the event 'fault', received none
    """
    if not isinstance(line, dict) or not isinstance(line.get("event"), str):
        raise ValueError(f"expected an event, received {line!r:.80}")
    for name in ("time", *_FACTS.get(line["event"], ())):
        if name not in line:
            raise ValueError(f"expected {name} of the event {line['event']!r}, received none")
    for names, kinds in _KINDS.items():
        for name in names:
            value = line.get(name)
            wrong = isinstance(value, bool) or (
                isinstance(value, float) and not math.isfinite(value)
            )
            if value is not None and (wrong or not isinstance(value, kinds)):
                raise ValueError(f"{name} of the event {line['event']!r}: received {value!r:.80}")
    if line["time"] is None:
        raise ValueError(f"expected time of the event {line['event']!r}, received none")
    return line
