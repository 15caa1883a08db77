"""What a run tells becomes a run of a tracking service: Weights & Biases or MLflow, where they are installed; nothing is computed here.

Where they send it is for themselves to know: WANDB_MODE, WANDB_BASE_URL, MLFLOW_TRACKING_URI and so on count as for any script.
What fails when a run begins is an error; later it is told once, and the training goes on.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("tfdist")


def load(package: str, writer: str) -> Any:
    """A service's package.

    Raises:
        ValueError: It is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(
            f"{writer} needs the package {package}, which cannot be imported ({error}): pip install {package}."
        ) from error


class WandbWriter:
    """A run of Weights & Biases; the first value begins it. A resumed training goes on in the same run.

    Args:
        directory: Of the run; wandb's own files go there, and the run's id, to `wandb.id`.
        project: As wandb calls what groups runs.
        name: Of the run.

    Raises:
        ValueError: wandb is not installed.
    """

    def __init__(
        self, directory: str | os.PathLike, project: str = "tfdist", name: str | None = None
    ):
        self._wandb = load("wandb", "WandbWriter")
        self._directory, self._project, self._name = Path(directory), project, name
        self._id, self._outage = _Remembered(self._directory / "wandb.id"), _Outage("wandb")
        self._run: Any = None

    def scalars(self, step: int, values: Mapping[str, float], axis: str = "epoch") -> None:
        """A value's axis is `epoch` or `step`, as wandb's own count of calls says nothing of either."""
        run = self._begin()
        with self._outage.survived():
            run.log({**values, axis: step})

    def settings(self, values: Mapping[str, Any]) -> None:
        self._begin().config.update(dict(values), allow_val_change=True)

    def rewind(self, epoch: int, steps: int) -> None:
        """What was sent stays: values that come again are there twice."""

    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            with self._outage.survived():
                run.finish()

    def _begin(self) -> Any:
        if self._run is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            known = {"id": self._id.read()} if self._id.read() else {}
            self._run = self._wandb.init(
                project=self._project,
                name=self._name,
                dir=str(self._directory),
                resume="allow",
                **known,
            )
            self._id.write(self._run.id)
            for axis in ("epoch", "step"):
                self._run.define_metric(axis, hidden=True)
            self._run.define_metric("batch_*", step_metric="step")
            self._run.define_metric("*", step_metric="epoch")
        return self._run


class MlflowWriter:
    """A run of MLflow; the first value begins it. A resumed training goes on in the same run.

    Args:
        directory: Of the run; keeps the MLflow run's id, in `mlflow.id`.
        experiment: As MLflow calls what groups runs.
        name: Of the run.

    Raises:
        ValueError: mlflow is not installed.
    """

    def __init__(
        self, directory: str | os.PathLike, experiment: str = "tfdist", name: str | None = None
    ):
        self._mlflow = load("mlflow", "MlflowWriter")
        self._experiment, self._name = experiment, name
        self._id, self._outage = _Remembered(Path(directory) / "mlflow.id"), _Outage("mlflow")
        self._client: Any = None
        self._run = ""

    def scalars(self, step: int, values: Mapping[str, float], axis: str = "epoch") -> None:
        client = self._begin()
        with self._outage.survived():
            for name, value in values.items():
                client.log_metric(self._run, name, float(value), step=step)

    def settings(self, values: Mapping[str, Any]) -> None:
        client = self._begin()
        known = client.get_run(self._run).data.params
        for name, value in values.items():
            if name not in known:  # MLflow refuses to change one; a resumed run has the same
                client.log_param(self._run, name, value)

    def rewind(self, epoch: int, steps: int) -> None:
        """What was sent stays: values that come again are there twice."""

    def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            with self._outage.survived():
                client.set_terminated(self._run)

    def _begin(self) -> Any:
        if self._client is None:
            client = self._mlflow.MlflowClient()
            self._run = self._id.read()
            if self._run:
                client.update_run(self._run, status="RUNNING")
            else:
                found = client.get_experiment_by_name(self._experiment)
                experiment = (
                    found.experiment_id
                    if found is not None
                    else client.create_experiment(self._experiment)
                )
                self._run = client.create_run(experiment, run_name=self._name).info.run_id
                self._id.write(self._run)
            self._client = client
        return self._client


class _Outage:
    """A service that fails in the middle of a training, which is the chief's alone to see: it is told once, and no error."""

    def __init__(self, service: str):
        self._service, self._told = service, False

    @contextlib.contextmanager
    def survived(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._told:
                log.warning(
                    "%s does not take what this run tells: %s: %s. Training goes on, and what fails is missing there; this is said once.",
                    self._service, type(error).__name__, error,
                )  # fmt: skip
            self._told = True


class _Remembered:
    """A service's name of a run, in a file of the run, so that a training that is resumed finds it."""

    def __init__(self, path: Path):
        self._path = path

    def read(self) -> str:
        return self._path.read_text(encoding="utf-8").strip() if self._path.exists() else ""

    def write(self, name: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(name + "\n", encoding="utf-8")
