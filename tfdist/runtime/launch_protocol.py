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
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.runtime.time_account import RECORDED, Account, TimeAccount, time_account

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
TOKEN = "TFDIST_TOKEN"  # secret of the launchers, which no process that they start receives
# Secret of the tasks of a launch, with which they know each other. It does not let anybody join the
# launchers or steer them.
TASK_SECRET = "TFDIST_TASK_SECRET"
STRAGGLERS = "TFDIST_STRAGGLERS"
SNAPSHOT_SERVER = "TFDIST_SNAPSHOT_SERVER"

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)  # thread pool sizes of a task

# How the error of a task ends that only reports the failure of another one.
LOG_SAYS_WHY = "its log says why"

JOURNAL = "events.jsonl"  # in the log directory
# Size from which on the journal takes no more events of single saves, the only ones without a bound
# on their number. Some 100,000 saves fit.
JOURNAL_BYTES = 32 << 20
OF_SAVES = ("saving", "saved")
MET = "met"  # event of a task in the journal
STRAGGLER = "straggler"  # event of the chief: a worker has become one
STRAGGLER_OVER = "straggler over"
RESULT = "result.tfdist"  # in the log directory of a launch with a fault plan
ACCOUNT_S = 0.1  # interval at which a heartbeat brings the time account up to date


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
    STRAGGLER: ("task", "attempt"),
    STRAGGLER_OVER: ("task", "attempt"),
    "stepping": ("step", "total"),
    "saved": ("total", "path"),
    "restored": ("total", "path"),
}
_KINDS = {  # types of facts, which may also be None
    ("time", "seconds", "clock"): (int, float),
    ("attempt", "number", "total", "step", "epoch", "pid", "code"): (int,),
    ("text", "task", "path", "chaos", "boot"): (str,),
    ("tasks",): (list,),
    ("codes", "accounts"): (dict,),
}


@dataclasses.dataclass(frozen=True)
class Launched:
    """Parameters that the launcher has passed to this process.

    Attributes:
        task: Task name such as "worker:1"; "" for a process that the launcher did not start.
        launch: Unique name of the launch, equal in all its attempts and on all hosts.
        attempt: Number of the attempt, from 0. Higher attempts supersede lower ones of the same
            launch.
        restarts: Number of restarts that the launcher allows, after failures or for stragglers.
        log_dir: Log directory of the launch, or None.
        progress_file: Path of the progress file, or None.
        chaos: Fault plan, as in `tfdist launch --chaos`; None to inject no fault and report none.
        stragglers: Share and window, such as "0.5 30", for which all workers measure their steps;
            None to measure only where a callback asks for it.
        snapshot_server: Name of the process that holds snapshots in memory, or None.
    """

    task: str = ""
    launch: str = ""
    attempt: int = 0
    restarts: int = 0
    log_dir: str | None = None
    progress_file: str | None = None
    chaos: str | None = None
    stragglers: str | None = None
    snapshot_server: str | None = None

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
            stragglers=environ.get(STRAGGLERS),
            snapshot_server=environ.get(SNAPSHOT_SERVER),
        )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def environment(**more: str) -> dict[str, str]:
    """Return the variables of this process plus `more`, for a process that it starts.

    All processes that it starts share a secret, also if this process has none. They do not get the
    secret of the launchers.
    """
    variables = {TASK_SECRET: _secret_of_children(), **os.environ, **more}
    variables.pop(TOKEN, None)
    return variables


def take_token() -> str | None:
    """Remove the secret of the launchers from the environment; return it, or None.

    No process that this one starts afterwards receives it.
    """
    return os.environ.pop(TOKEN, None)


@functools.cache
def _secret_of_children() -> str:
    return secrets.token_hex(32)


def task_secret(environ: Mapping[str, str] | None = None) -> bytes:
    """Return the secret that the tasks of this launch share; b"" if there is none.

    Example:
        >>> task_secret({"TFDIST_TASK_SECRET": "5ec2e7"}), task_secret({})
        (b'5ec2e7', b'')
    """
    return (os.environ if environ is None else environ).get(TASK_SECRET, "").encode()


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
        account: Time account to write, default none.
    """

    def __init__(self, path: str | None, account: TimeAccount | None = None):
        self._path = path
        self._file = -1
        self._beats = 0
        self._account = account
        self._account_text = ""
        self._account_time = 0.0

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
        account = self._text_of_account(phase)
        line = f"{phase:8} {epoch:12} {step:12} {total:12} {self._beats:12}{account}\n".encode()
        try:
            if self._file < 0:
                self._file = private(self._path, os.O_WRONLY | os.O_CREAT)
            os.pwrite(self._file, line, 0)
        except OSError:  # a full disk must not end the training
            return

    def _text_of_account(self, phase: str) -> str:
        if self._account is None:
            return ""
        now = time.monotonic()
        if phase != Phase.RUNNING or now - self._account_time >= ACCOUNT_S:
            state = self._account.state()
            self._account_time = now
            self._account_text = "".join(f" {state.seconds[name]:14.3f}" for name in RECORDED)
        counts = self._account.steps, self._account.base, self._account.reached
        return self._account_text + "".join(f" {count:12}" for count in counts)


@functools.cache
def progress() -> Progress:
    """Return the heartbeat of this process."""
    return Progress(Launched.from_environ().progress_file, time_account())


@dataclasses.dataclass(frozen=True)
class HeartbeatRecord:
    """The last heartbeat of a process.

    Attributes:
        phase: See `Progress.beat`.
        epoch: See `Progress.beat`.
        step: See `Progress.beat`.
        total: See `Progress.beat`.
        beats: Number of heartbeats so far, which grows with each.
        account: Time account of the process, or None.
    """

    phase: str
    epoch: int
    step: int
    total: int
    beats: int
    account: Account | None = dataclasses.field(default=None, repr=False)


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
            phase, epoch, step, total, beats, *numbers = file.read().split()
        if phase in _PHASES:
            account = Account.from_numbers(numbers) if numbers else None
            return HeartbeatRecord(phase, int(epoch), int(step), int(total), int(beats), account)
    return None


def private(path: str, flags: int) -> int:
    """Open a file that only its user may read; an `opener` of `open`.

    Output, tracebacks and variables of tasks may contain secrets.
    """
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def clock() -> dict[str, Any]:
    """Return the time that cannot be set, and the boot whose lines can be compared by it."""
    return {"clock": round(time.monotonic(), 3), "boot": _boot()}


@functools.cache
def _boot() -> str:
    """Return what is equal for processes that share a monotonic clock; "" if unknown."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read()[:8]
    return ""


def note(log_dir: str | None, event: str, **facts: Any) -> None:
    """Append an event with its time to the journal of a launch.

    Each line also has a time that cannot be set, `clock`, which lines with the same `boot` share.

    Args:
        log_dir: Log directory of the launch; None to write nothing.
        event: Name of the event.
        **facts: JSON-serializable values.
    """
    if log_dir is None:
        return
    line = json.dumps({"time": time.time(), "event": event, **facts, **clock()}) + "\n"
    # A single write to a file opened for appending keeps the lines of several processes apart.
    with contextlib.suppress(OSError):
        descriptor = private(os.path.join(log_dir, JOURNAL), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            if event not in OF_SAVES or os.fstat(descriptor).st_size < JOURNAL_BYTES:
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
    return list(journal_events(log_dir))


def journal_events(log_dir: str) -> Iterator[dict[str, Any]]:
    """Yield the events that `read_journal` returns, one at a time: a journal may have 32 MB."""
    with (
        contextlib.suppress(FileNotFoundError),
        open(os.path.join(log_dir, JOURNAL), "rb") as file,
    ):
        for line in file:
            event = None
            with contextlib.suppress(ValueError, RecursionError):
                event = check_event(json.loads(line))
            if event is not None:
                yield event


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
