"""What `tfdist launch` and the processes it starts tell each other, by variables, files and exit codes; nothing waits here.

The launcher sets the variables. A process tells of its progress in one file, and of what happened to it in a journal that all
share. Without a launcher all of this is silent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import Mapping
from typing import Any

PREEMPTED_CODE = 42  # ended by SIGTERM after a snapshot: starting again goes on from there
TRANSIENT_CODE = (
    75  # sysexits.h EX_TEMPFAIL: peers were absent or lost; another attempt may find them
)
CONFIGURATION_CODE = 78  # sysexits.h EX_CONFIG: wrong in itself, never worth a restart

TASK = "TFDIST_TASK"
LAUNCH = "TFDIST_LAUNCH"
ATTEMPT = "TFDIST_ATTEMPT"
RESTARTS = "TFDIST_RESTARTS"
LOG_DIR = "TFDIST_LOG_DIR"
ERROR_FILE = "TFDIST_ERROR_FILE"
PROGRESS_FILE = "TFDIST_PROGRESS_FILE"
IMPORTS_FILE = "TFDIST_IMPORTS_FILE"  # for what a standby process is to import
CHAOS = "TFDIST_CHAOS"

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)  # sizes of a task's pools

JOURNAL = "events.jsonl"  # in the directory of the logs
RESULT = "result.tfdist"  # there too, of a launch with a chaos plan


@dataclasses.dataclass(frozen=True)
class Launched:
    """What the launcher told this process.

    Attributes:
        task: "worker:1"; of a process that nobody launched, "".
        launch: Names the launch; equal in all its attempts and on all hosts.
        attempt: 0, 1, ...; higher ones supersede lower ones of the same launch.
        restarts: How often the launcher starts again after failures.
        log_dir: Directory of this launch, where there is one.
        progress_file: Where to tell of progress.
        chaos: Faults to inject, as in `tfdist launch --chaos`; None: none, and none to be reported either.
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
        """What the environment says.

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


def environment(**more: str) -> dict[str, str]:
    """That of this process, and more, for a process that it starts."""
    return {**os.environ, **more}


def inherited(*names: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables of this process that the tasks it starts will find too; those that are not set are left out.

    Example:
        >>> inherited("OMP_NUM_THREADS", "HOME", environ={"OMP_NUM_THREADS": "2"})
        {'OMP_NUM_THREADS': '2'}
    """
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in names if name in environ}


class Phase:
    """What a process is doing, which decides how long it may be silent."""

    IDLE = "idle"  # nothing that the launcher could judge
    TRACING = "tracing"  # a function's first call, which compiles
    RUNNING = "running"  # steps follow each other


class Progress:
    """Tells the launcher that a process is alive: its phase, and where in the training it is.

    Args:
        path: The file; None: nobody wants to know.
    """

    def __init__(self, path: str | None):
        self._path, self._file, self._beats = path, -1, 0

    def beat(self, phase: str, epoch: int, step: int, total: int = 0) -> None:
        """Tells of one more sign of life.

        Args:
            phase: Of `Phase`.
            epoch: The epoch, from 0.
            step: Steps of it that are done.
            total: Steps since training began.
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
    """Of this process."""
    return Progress(Launched.from_environ().progress_file)


@dataclasses.dataclass(frozen=True)
class Sign:
    """What a process last told; see `Progress.beat`. `beats` grows with each."""

    phase: str
    epoch: int
    step: int
    total: int
    beats: int


def read_sign(path: str) -> Sign | None:
    """What `Progress` last wrote; None: nothing yet.

    Example:
        >>> import tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "worker-0.progress")
        >>> Progress(path).beat(Phase.RUNNING, 1, 37, 137)
        >>> read_sign(path)
        Sign(phase='running', epoch=1, step=37, total=137, beats=1)
    """
    with contextlib.suppress(OSError, ValueError):
        with open(path, encoding="ascii") as file:
            phase, *numbers = file.read().split()
        return Sign(phase, *map(int, numbers))
    return None


def note(log_dir: str | None, event: str, **facts: Any) -> None:
    """Adds a line to the journal of a launch: what happened, and when.

    Args:
        log_dir: Of the launch; None: there is none.
        event: Its name.
        **facts: As JSON knows them.
    """
    if log_dir is None:
        return
    line = json.dumps({"time": time.time(), "event": event, **facts}) + "\n"
    # One write to a file opened for appending: lines of several processes do not mix.
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


def read_journal(log_dir: str) -> list[dict[str, Any]]:
    """The lines of a launch's journal; a last line that was cut off is left out.

    Example:
        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> note(directory, "saved", step=3)
        >>> [(line["event"], line["step"]) for line in read_journal(directory)]
        [('saved', 3)]
    """
    events = []
    with (
        contextlib.suppress(FileNotFoundError),
        open(os.path.join(log_dir, JOURNAL), encoding="utf-8") as file,
    ):
        for line in file:
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
    return events
