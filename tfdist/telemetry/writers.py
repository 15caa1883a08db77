"""What a run tells becomes console lines, lines of JSON, curves of TensorBoard or runs of a tracking service; nothing is computed here."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from tfdist.telemetry.layout import append_json, read_json_lines


class Writer(Protocol):
    """Takes what a run tells somewhere. A new one has these four methods; training code stays as it is."""

    def scalars(self, step: int, values: Mapping[str, float], axis: str = "epoch") -> None:
        """Writes the values of an epoch, or of a step since training began, to be seen even if the process dies next.

        Args:
            step: Number of the epoch from 0, or of steps done.
            values: Numbers by name.
            axis: "epoch" or "step": what `step` counts.
        """

    def settings(self, values: Mapping[str, Any]) -> None:
        """Writes what the run was told, by name."""

    def rewind(self, epoch: int, steps: int) -> None:
        """Drops what was written of this epoch and later ones, and of later steps: a resumed run writes it again."""

    def close(self) -> None:
        """Ends what is open; more may be written afterwards, by another fit."""


class Telemetry:
    """Sends the same to several writers.

    Args:
        writers: Where to; none: nowhere, as on workers other than the chief.

    Example:
        >>> Telemetry([ConsoleWriter(sys.stdout)]).scalars(3, {"loss": 0.25, "accuracy": 1})
        epoch 3  loss 0.25  accuracy 1
    """

    def __init__(self, writers: Sequence[Writer]):
        self.writers = tuple(writers)

    def scalars(self, step: int, values: Mapping[str, float], axis: str = "epoch") -> None:
        """Writes values to every writer."""
        for writer in self.writers:
            writer.scalars(step, values, axis)

    def settings(self, values: Mapping[str, Any]) -> None:
        """Writes settings to every writer."""
        for writer in self.writers:
            writer.settings(values)

    def rewind(self, epoch: int, steps: int) -> None:
        """Lets every writer drop what is written again."""
        for writer in self.writers:
            writer.rewind(epoch, steps)

    def close(self) -> None:
        """Closes every writer, also those after one that fails."""
        with contextlib.ExitStack() as stack:
            for writer in reversed(self.writers):  # it calls the last one first
                stack.callback(writer.close)


class ConsoleWriter:
    """One line per epoch or step, of four significant digits.

    Args:
        stream: Where to; default: standard error.
    """

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream

    def scalars(self, step: int, values: Mapping[str, float], axis: str = "epoch") -> None:
        words = [
            f"{axis} {step}",
            *(f"{name} {value:.4g}" for name, value in values.items() if name != "time"),
        ]
        print("  ".join(words), file=self.stream or sys.stderr, flush=True)

    def settings(self, values: Mapping[str, Any]) -> None:
        print(
            "  ".join(f"{name}={value}" for name, value in values.items()),
            file=self.stream or sys.stderr,
            flush=True,
        )

    def rewind(self, epoch: int, steps: int) -> None:
        """What was printed stays."""

    def close(self) -> None:
        """Nothing is open."""


class JsonlWriter:
    """One JSON object per epoch, `{"step": epoch, name: value, ...}`, each appended as a whole; per step, `{"batch": steps, ...}`.

    Settings are left out: a run's are in its `config.json`.

    Args:
        path: File; its directory is made.

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
        key = "step" if axis == "epoch" else "batch"
        append_json(
            self.path, {key: step, **{name: float(value) for name, value in values.items()}}
        )

    def settings(self, values: Mapping[str, Any]) -> None:
        """They are in another file."""

    def rewind(self, epoch: int, steps: int) -> None:
        if not self.path.exists():
            return
        kept = [
            line
            for line in read_json_lines(self.path)
            if (line["step"] < epoch if "step" in line else line["batch"] <= steps)
        ]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        temporary.replace(self.path)

    def close(self) -> None:
        """Nothing is open."""


class TensorBoardWriter:
    """Curves for TensorBoard; TensorFlow is imported by the first value.

    Args:
        log_dir: Directory of the logs.
    """

    def __init__(self, log_dir: str | os.PathLike):
        self.log_dir = os.fspath(log_dir)
        self._writer: Any = None

    def _open(self) -> Any:
        import tensorflow as tf

        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self.log_dir)
        return self._writer

    def scalars(self, step: int, values: Mapping[str, float], axis: str = "epoch") -> None:
        import tensorflow as tf

        metadata = tf.compat.v1.SummaryMetadata(
            plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
        )
        summary = (
            tf.compat.v1.Summary()
        )  # of all values, as tf.summary.scalar would write each, in a fifth of the time
        for name, value in values.items():
            summary.value.add(
                tag=name, tensor=tf.make_tensor_proto(value, tf.float32), metadata=metadata
            )
        with self._open().as_default(step), tf.summary.record_if(True):  # whatever others have set
            tf.summary.experimental.write_raw_pb(summary.SerializeToString())
        self._writer.flush()

    def settings(self, values: Mapping[str, Any]) -> None:
        import tensorflow as tf

        rows = [f"| {name} | {value} |" for name, value in values.items()]
        with self._open().as_default(0), tf.summary.record_if(True):
            tf.summary.text("settings", "\n".join(["| key | value |", "| --- | --- |", *rows]))

    def rewind(self, epoch: int, steps: int) -> None:
        """TensorBoard itself forgets points that come again, once the new ones are there."""

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
