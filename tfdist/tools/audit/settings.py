"""The words of an audit become what each of its processes is told; nothing is read here but the user's own file."""

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
)  # of a pipeline, that an audit uses


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to audit.

    Attributes:
        directory: Where each process writes what it did.
        config: Words for `tfdist.run.parse`; none with `pipeline`.
        pipeline: "FILE.py:FUNCTION", a function without arguments that returns what `tfdist.data.pipeline` does.
        split: Of the config's run, "train" or "eval".
        workers: Processes.
        devices: Replicas of each.
        epochs: How many to read.
        first_epoch: The first of them.
        first_step: Where to begin in it.
        stage_seconds: How long to measure each stage; 0: not at all.
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
        """The settings as a word on a command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Settings:
        """The settings that `to_json` wrote.

        Example:
            >>> settings = Settings("/tmp/x", config=("--config=a.py",), workers=3)
            >>> Settings.of_json(settings.to_json()) == settings
            True
        """
        values = json.loads(text)
        return cls(**{**values, "config": tuple(values["config"])})

    def file(self, rank: int, kind: str) -> Path:
        """A worker's file: "log", "events" or "steps"."""
        return Path(self.directory) / f"worker-{rank}.{kind}"

    def make_pipeline(self) -> tf.data.Dataset:
        """The pipeline to audit.

        Returns:
            What `tfdist.data.pipeline` does.

        Raises:
            ValueError: For a file or function that is not there, or that returns something else.
        """
        if self.pipeline is None:
            from tfdist.run import input_pipeline, train_command

            pipeline, given = (
                input_pipeline.pipeline(train_command.parse(self.config), self.split),
                "data.name",
            )
        else:
            check_function(self.pipeline)
            given = f"--pipeline={self.pipeline}"
            pipeline = user_functions.load(self.pipeline, "--pipeline")()
        absent = next((part for part in PARTS if not hasattr(pipeline, part)), None)
        if absent:
            raise ValueError(
                f"{given}: expected what tfdist.data.pipeline returns, received {type(pipeline).__name__}, which has no {absent}."
            )
        return pipeline


def check_function(text: str) -> None:
    """Raises ValueError unless this is "FILE.py:FUNCTION", and the file is there."""
    path, colon, name = text.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise ValueError(
            f"--pipeline={text}: expected FILE.py:FUNCTION, such as train.py:make_pipeline."
        )
    if not os.path.isfile(path):
        raise ValueError(f"--pipeline={text}: no such file as {path} in {os.getcwd()}.")
