"""The files of a run's directory: their names, and what a reader finds in them; nothing is computed here.

runs/digits/                    the run; `tensorboard --logdir runs` shows all runs
  config.json                   its settings
  sessions.jsonl                one line per begin of training: when, from which step, with what
  history.jsonl                 one line per epoch: losses and metrics of all replicas
  summary.json                  how it ended; there only when it has
  train/ validation/            the chief's curves, for TensorBoard
  worker-0/ worker-1/ ...       of each worker: step_breakdown.jsonl, and curves of its own
"""

from __future__ import annotations

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
    """The name of a worker's directory in that of its run.

    Example:
        >>> worker_name(1)
        'worker-1'
    """
    return f"worker-{rank}"


def worker_directory(run: str | os.PathLike, rank: int) -> Path:
    """Where a worker writes what is its own.

    Example:
        >>> worker_directory("runs/digits", 1).as_posix()
        'runs/digits/worker-1'
    """
    return Path(run) / worker_name(rank)


def worker_directories(run: str | os.PathLike) -> dict[int, Path]:
    """The directories of workers that are there, by rank, in order."""
    found = {
        int(path.name.removeprefix("worker-")): path
        for path in Path(run).glob("worker-*")
        if path.name[7:].isdecimal()
    }
    return dict(sorted(found.items()))


def append_json(path: str | os.PathLike, value: dict[str, Any]) -> None:
    """Adds a line to a file of JSON lines; one before it that was cut off, as by a full disk, stays apart from it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        left = (
            ("\n" if torn else "") + json.dumps(value) + "\n"
        ).encode()  # one write, so that readers find whole lines
        while left:
            left = left[os.write(descriptor, left) :]  # it may take a part of them
    finally:
        os.close(descriptor)


def read_json_lines(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; none where it is missing; lines that are no JSON are left out, as those that were cut off."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
