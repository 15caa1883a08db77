"""The begins of a training: when, from which step, where and with what, one line of `sessions.jsonl` each."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from tfdist.telemetry.layout import SESSIONS, append_json


@dataclasses.dataclass(frozen=True)
class Session:
    """One begin of a run's training, as the chief sees it.

    Attributes:
        time: When its first epoch began, in seconds since 1970.
        epoch: That epoch, from 0.
        step: Steps of that epoch which were done already.
        resumed: Whether it went on from a snapshot of a training that was interrupted.
        attempt: Of the launch; 0 without one.
        launch: The launcher's directory, with its `events.jsonl`; None: nobody launched this process.
        strategy: The strategy's class.
        workers: Tasks that train.
        replicas: Copies of the model; under parameter servers those of one worker.
        global_batch: Examples of a step.
        versions: Of tfdist, python, tensorflow and keras.
    """

    time: float
    epoch: int
    step: int
    resumed: bool
    attempt: int
    launch: str | None
    strategy: str
    workers: int
    replicas: int
    global_batch: int
    versions: Mapping[str, str]


def write(run: str | os.PathLike, session: Session) -> None:
    """Adds a line to the sessions of a run.

    Example:
        >>> import tempfile
        >>> from tfdist.telemetry.layout import read_json_lines
        >>> versions = {"tfdist": "0.1.0", "python": "3.12.1", "tensorflow": "2.21.0", "keras": "3.15.1"}
        >>> session = Session(1.5, 0, 0, False, 0, None, "MirroredStrategy", 1, 2, 64, versions)
        >>> run = tempfile.mkdtemp()
        >>> write(run, session)
        >>> [Session(**line) for line in read_json_lines(Path(run) / SESSIONS)] == [session]
        True
    """
    append_json(Path(run) / SESSIONS, dataclasses.asdict(session))
