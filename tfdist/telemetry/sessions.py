"""Sessions of a run: one record in `sessions.jsonl` for each start of its training."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from tfdist.telemetry.layout import SESSIONS, append_json


@dataclasses.dataclass(frozen=True)
class Session:
    """One start of a run's training, as the chief sees it.

    Attributes:
        time: Time when the first epoch of the session began, in seconds since 1970.
        epoch: Number of that epoch, from 0.
        step: Number of steps of that epoch that were already done.
        resumed: True if training continued from a snapshot of interrupted training.
        attempt: Attempt number of the launch; 0 without a launcher.
        launch: Directory of the launcher, with its `events.jsonl`; None if no launcher started this
            process.
        strategy: Class name of the strategy.
        workers: Number of tasks that train.
        replicas: Number of copies of the model; under parameter servers, the copies of one worker.
        global_batch: Number of examples per step.
        versions: Versions of tfdist, python, tensorflow and keras.
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
    """Append a session to the sessions of a run.

    Example:
        >>> import tempfile
        >>> from tfdist.telemetry.layout import read_json_lines
        >>> versions = {
        ...     "tfdist": "0.1.0", "python": "3.12.1", "tensorflow": "2.21.0", "keras": "3.15.1"
        ... }
        >>> session = Session(1.5, 0, 0, False, 0, None, "MirroredStrategy", 1, 2, 64, versions)
        >>> run = tempfile.mkdtemp()
        >>> write(run, session)
        >>> [Session(**line) for line in read_json_lines(Path(run) / SESSIONS)] == [session]
        True
    """
    append_json(Path(run) / SESSIONS, dataclasses.asdict(session))
