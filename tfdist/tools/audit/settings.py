"""Settings of an audit, passed to its worker processes as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tfdist.config import user_functions

if TYPE_CHECKING:
    import tensorflow as tf

PARTS = (
    "replica_rows",
    "order",
    "epochs",
    "errors",
    "batches",
)  # attributes of a data pipeline that an audit uses


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of an audit.

    Attributes:
        directory: Directory for the files of all processes.
        config: Arguments for `tfdist.run.parse`; empty with `pipeline`.
        pipeline: "FILE.py:FUNCTION", a function without arguments that returns what
            `tfdist.data.pipeline` does.
        split: Split of the config's run, "train" or "eval".
        workers: Number of processes.
        devices: Number of replicas per process.
        epochs: Number of epochs to read.
        first_epoch: Number of the first epoch.
        first_step: Step of the first epoch at which to begin.
        stage_seconds: Seconds to measure each stage; 0 skips the measurement.
    """

    directory: str
    config: tuple[str, ...] = ()
    pipeline: str | None = None
    split: str = "train"
    workers: int = 1
    devices: int = 1
    epochs: int = 1
    first_epoch: int = 0
    first_step: int = 0
    stage_seconds: float = 2.0

    def to_json(self) -> str:
        """Return the settings as one command-line argument."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Settings:
        """Create settings from the text that `to_json` returned.

        Example:
            >>> settings = Settings("/tmp/x", config=("--config=a.py",), workers=3)
            >>> Settings.of_json(settings.to_json()) == settings
            True
        """
        values = json.loads(text)
        return cls(**{**values, "config": tuple(values["config"])})

    def file(self, rank: int, kind: str) -> Path:
        """Return the path of a worker's file of kind "log", "events" or "steps"."""
        return Path(self.directory) / f"worker-{rank}.{kind}"

    def make_pipeline(self) -> tf.data.Dataset:
        """Create the data pipeline to audit.

        Returns:
            A dataset as returned by `tfdist.data.pipeline`.

        Raises:
            ValueError: If the file or function does not exist, or if it returns something else.
        """
        if self.pipeline is None:
            from tfdist.run import input_pipeline, train_command

            pipeline = input_pipeline.pipeline(train_command.parse(self.config), self.split)
            setting = "data.name"
        else:
            check_function(self.pipeline)
            setting = f"--pipeline={self.pipeline}"
            pipeline = user_functions.load(self.pipeline, "--pipeline")()
        absent = next((part for part in PARTS if not hasattr(pipeline, part)), None)
        if absent:
            raise ValueError(
                f"{setting}: expected what tfdist.data.pipeline returns, received "
                f"{type(pipeline).__name__}, which has no {absent}."
            )
        return pipeline


def check_function(text: str) -> None:
    """Raise ValueError unless `text` is "FILE.py:FUNCTION" and the file exists."""
    path, colon, name = text.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise ValueError(
            f"--pipeline={text}: expected FILE.py:FUNCTION, such as train.py:make_pipeline."
        )
    if not os.path.isfile(path):
        raise ValueError(f"--pipeline={text}: no such file as {path} in {os.getcwd()}.")
