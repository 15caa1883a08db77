"""Metric writers for the console, JSON Lines and TensorBoard."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from tfdist.storage import files
from tfdist.telemetry.layout import append_json, read_json_lines
from tfdist.telemetry.named_scalars import named_scalars

__all__ = ["ConsoleWriter", "JsonlWriter", "Telemetry", "TensorBoardWriter", "Writer"]

log = logging.getLogger("tfdist")


class Writer(Protocol):
    """Interface of a metric writer.

    To add a destination, implement these four methods. Training code does not change.
    """

    def scalars(self, step: int, values: Mapping[str, float], axis: str = "epoch") -> None:
        """Write the values of an epoch, or of a step since training began.

        The values must be readable even if the process dies right after this call.

        Args:
            step: Number of the epoch from 0, or number of steps done.
            values: Numbers by name.
            axis: Unit of `step`: "epoch" (default) or "step".
        """

    def settings(self, values: Mapping[str, Any]) -> None:
        """Write the settings of the run, by name.

        Args:
            values: Settings by name.
        """

    def rewind(self, epoch: int, steps: int) -> None:
        """Drop the values of this epoch and later ones, and of steps after `steps`.

        A resumed run writes them again.

        Args:
            epoch: First epoch that is written again.
            steps: Number of steps, since training began, whose values are kept.
        """

    def close(self) -> None:
        """Close open files; another fit may write more afterwards."""


class Telemetry:
    """Sends the same values to several writers.

    Writers get single numbers: a vector or a dict is split into its entries, see `named_scalars`.

    Args:
        writers: Destinations. The sequence is empty on workers other than the chief.

    Example:
        >>> Telemetry([ConsoleWriter(sys.stdout)]).scalars(3, {"loss": 0.25, "accuracy": 1})
        epoch 3  loss 0.25  accuracy 1
    """

    def __init__(self, writers: Sequence[Writer]):
        self.writers = tuple(writers)

    def scalars(self, step: int, values: Mapping[str, Any], axis: str = "epoch") -> None:
        """Write values to every writer.

        Args:
            step: Number of the epoch from 0, or number of steps done.
            values: Numbers by name, or nests of numbers, each of which gets a name of its own.
            axis: Unit of `step`: "epoch" (default) or "step".
        """
        numbers = named_scalars(values)
        for writer in self.writers:
            writer.scalars(step, numbers, axis)

    def settings(self, values: Mapping[str, Any]) -> None:
        """Write settings to every writer.

        Args:
            values: Settings by name.
        """
        for writer in self.writers:
            writer.settings(values)

    def rewind(self, epoch: int, steps: int) -> None:
        """Let every writer drop the values that will be written again.

        Args:
            epoch: First epoch that is written again.
            steps: Number of steps, since training began, whose values are kept.
        """
        for writer in self.writers:
            writer.rewind(epoch, steps)

    def close(self) -> None:
        """Close every writer, even if one of them fails."""
        with contextlib.ExitStack() as stack:
            for writer in reversed(self.writers):  # ExitStack calls the last callback first
                stack.callback(writer.close)


class ConsoleWriter:
    """Prints one line per epoch or step, with four significant digits.

    Args:
        stream: Stream to print to; default: standard error.
    """

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream

    def scalars(self, step: int, values: Mapping[str, float], axis: str = "epoch") -> None:
        """Print the values on one line.

        Args:
            step: Number of the epoch from 0, or number of steps done.
            values: Numbers by name.
            axis: Unit of `step`: "epoch" (default) or "step".
        """
        words = [
            f"{axis} {step}",
            *(f"{name} {value:.4g}" for name, value in values.items() if name != "time"),
        ]
        print("  ".join(words), file=self.stream or sys.stderr, flush=True)

    def settings(self, values: Mapping[str, Any]) -> None:
        """Print the settings on one line.

        Args:
            values: Settings by name.
        """
        print(
            "  ".join(f"{name}={value}" for name, value in values.items()),
            file=self.stream or sys.stderr,
            flush=True,
        )

    def rewind(self, epoch: int, steps: int) -> None:
        """Do nothing: printed lines stay.

        Args:
            epoch: First epoch that is written again.
            steps: Number of steps, since training began, whose values are kept.
        """

    def close(self) -> None:
        """Do nothing: no file is open."""


class JsonlWriter:
    """Writes one JSON object per epoch or per step to a JSON Lines file.

    An epoch is written as `{"step": epoch, name: value, ...}`.
    A step is written as `{"batch": steps, ...}`. Each object is appended as a whole.

    Settings are left out, because `config.json` of the run has them.

    Args:
        path: Path of the file; its directory is created.

    Example:
        >>> import tempfile
        >>> writer = JsonlWriter(Path(tempfile.mkdtemp()) / "history.jsonl")
        >>> writer.scalars(0, {"loss": 2.5})
        >>> read_json_lines(writer.path)
        [{'step': 0, 'loss': 2.5}]
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def scalars(self, step: int, values: Mapping[str, float], axis: str = "epoch") -> None:
        """Append the values as one line.

        Args:
            step: Number of the epoch from 0, or number of steps done.
            values: Numbers by name.
            axis: Unit of `step`: "epoch" (default) or "step".
        """
        key = "step" if axis == "epoch" else "batch"
        append_json(
            self.path, {key: step, **{name: float(value) for name, value in values.items()}}
        )

    def settings(self, values: Mapping[str, Any]) -> None:
        """Do nothing: `config.json` has the settings.

        Args:
            values: Settings by name.
        """

    def rewind(self, epoch: int, steps: int) -> None:
        """Remove the lines that a resumed run writes again, and those that cannot be read.

        Args:
            epoch: First epoch that is written again.
            steps: Number of steps, since training began, whose values are kept.
        """
        if not self.path.exists():
            return
        lines = []
        for line in read_json_lines(self.path):
            number = line.get("step", line.get("batch"))
            if isinstance(number, bool) or not isinstance(number, int | float):
                log.warning("%s: the line %.80s is damaged, and is left out.", self.path, line)
            elif number < epoch if "step" in line else number <= steps:
                lines.append(line)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        temporary.replace(self.path)

    def close(self) -> None:
        """Do nothing: no file is open."""


class TensorBoardWriter:
    """Writes curves for TensorBoard; the first value imports TensorFlow.

    Args:
        log_dir: Directory of the logs.
    """

    def __init__(self, log_dir: str | os.PathLike):
        self.log_dir = os.fspath(log_dir)
        self._writer: Any = None

    def _open(self) -> Any:
        import tensorflow as tf

        if self._writer is None:
            files.make_writable(self.log_dir, "TensorBoardWriter(log_dir=...)")
            self._writer = tf.summary.create_file_writer(self.log_dir)
        return self._writer

    def scalars(self, step: int, values: Mapping[str, float], axis: str = "epoch") -> None:
        """Write the values as scalar summaries.

        Args:
            step: Number of the epoch from 0, or number of steps done.
            values: Numbers by name.
            axis: Unit of `step`: "epoch" (default) or "step".
        """
        import tensorflow as tf

        metadata = tf.compat.v1.SummaryMetadata(
            plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
        )
        # One summary for all values takes a fifth of the time of `tf.summary.scalar` for each.
        summary = tf.compat.v1.Summary()
        for name, value in values.items():
            summary.value.add(
                tag=name, tensor=tf.make_tensor_proto(value, tf.float32), metadata=metadata
            )
        # `record_if` overrides what other code may have set.
        with self._open().as_default(step), tf.summary.record_if(True):
            tf.summary.experimental.write_raw_pb(summary.SerializeToString())
        self._writer.flush()

    def settings(self, values: Mapping[str, Any]) -> None:
        """Write the settings as a table in a text summary.

        Args:
            values: Settings by name.
        """
        import tensorflow as tf

        rows = [f"| {name} | {value} |" for name, value in values.items()]
        with self._open().as_default(0), tf.summary.record_if(True):
            tf.summary.text("settings", "\n".join(["| key | value |", "| --- | --- |", *rows]))

    def rewind(self, epoch: int, steps: int) -> None:
        """Do nothing: TensorBoard drops old points once newer ones for the same steps exist.

        Args:
            epoch: First epoch that is written again.
            steps: Number of steps, since training began, whose values are kept.
        """

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
