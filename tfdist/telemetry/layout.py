"""File names in a run's directory, and helpers for JSON Lines files.

runs/digits/                    the run; `tensorboard --logdir runs` shows all runs
  config.json                   its settings
  sessions.jsonl                one line per start of training: the time, the first step, the setup
  history.jsonl                 one line per epoch: losses and metrics of all replicas
  summary.json                  final results; exists only after the run has finished
  train/ validation/            the chief's curves, for TensorBoard
  worker-0/ worker-1/ ...       one per worker: step_breakdown.jsonl and the worker's own curves
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

CONFIG = "config.json"
SESSIONS = "sessions.jsonl"
HISTORY = "history.jsonl"
SUMMARY = "summary.json"  # marks a run that is finished
STEP_BREAKDOWN = "step_breakdown.jsonl"  # in each worker's directory


def worker_name(rank: int) -> str:
    """Return the name of a worker's directory within its run's directory.

    Example:
        >>> worker_name(1)
        'worker-1'
    """
    return f"worker-{rank}"


def worker_directory(run: str | os.PathLike, rank: int) -> Path:
    """Return the directory for the files of one worker.

    Example:
        >>> worker_directory("runs/digits", 1).as_posix()
        'runs/digits/worker-1'
    """
    return Path(run) / worker_name(rank)


def worker_directories(run: str | os.PathLike) -> dict[int, Path]:
    """Return the existing worker directories, keyed and sorted by rank."""
    directories = {
        int(path.name.removeprefix("worker-")): path
        for path in Path(run).glob("worker-*")
        if path.name[7:].isdecimal()
    }
    return dict(sorted(directories.items()))


def append_json(path: str | os.PathLike, value: dict[str, Any]) -> None:
    """Append one line to a JSON Lines file.

    If the last line is incomplete, for example because the disk was full, the new line starts after
    a line break, so that it stays readable.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        unwritten = (
            ("\n" if torn else "") + json.dumps(value) + "\n"
        ).encode()  # one write, so that readers see whole lines
        while unwritten:
            unwritten = unwritten[os.write(descriptor, unwritten) :]  # a write may be partial
    finally:
        os.close(descriptor)


def read_json_lines(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file, or an empty list if the file is missing.

    Lines that are no JSON objects are skipped, such as lines that were cut off.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    values = []
    for line in lines:
        # A torn line, maybe within a UTF-8 character.
        with contextlib.suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return [value for value in values if isinstance(value, dict)]
