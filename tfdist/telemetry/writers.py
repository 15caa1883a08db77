"""Scalars of a step become console lines, lines of JSON or TensorBoard curves; nothing is computed here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO


class Writer(Protocol):
    """Takes the scalars of a step somewhere."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of a step, to be seen even if the process dies next."""


class Telemetry:
    """Sends scalars to several writers.

    Args:
        writers: Where to; none: nowhere, as on workers other than the chief.

    Example:
        >>> Telemetry([ConsoleWriter(sys.stdout)]).scalars(3, {"loss": 0.25, "accuracy": 1})
        step 3  loss 0.25  accuracy 1
    """

    def __init__(self, writers: Sequence[Writer]):
        self.writers = tuple(writers)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of a step to every writer."""
        for writer in self.writers:
            writer.scalars(step, values)


class ConsoleWriter:
    """One line per step, of four significant digits.

    Args:
        stream: Where to; default: standard error.
    """

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        words = [f"step {step}", *(f"{name} {value:.4g}" for name, value in values.items())]
        print("  ".join(words), file=self.stream or sys.stderr, flush=True)


class JsonlWriter:
    """One JSON object per step, `{"step": ..., name: value, ...}`, each appended as a whole.

    Args:
        path: File; its directory is made.

    Example:
        >>> import tempfile
        >>> writer = JsonlWriter(Path(tempfile.mkdtemp()) / "history.jsonl")
        >>> writer.scalars(0, {"loss": 2.5})
        >>> read_jsonl(writer.path)
        [{'step': 0, 'loss': 2.5}]
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        line = json.dumps({"step": step, **{name: float(value) for name, value in values.items()}}) + "\n"
        # A single write to a file opened for appending: a reader, or a process killed here, leaves no half
        # line.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def rewind(self, step: int) -> None:
        """Drops the lines of this step and later ones, which a resumed run writes again."""
        if not self.path.exists():
            return
        kept = [line for line in read_jsonl(self.path) if line["step"] < step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        temporary.replace(self.path)


class TensorBoardWriter:
    """Curves for TensorBoard; TensorFlow is imported by the first value.

    Args:
        log_dir: Directory of the logs.
    """

    def __init__(self, log_dir: str | os.PathLike):
        self.log_dir = os.fspath(log_dir)
        self._writer: Any = None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        import tensorflow as tf

        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self.log_dir)
        with self._writer.as_default(step):
            for name, value in values.items():
                tf.summary.scalar(name, value)
        self._writer.flush()


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
