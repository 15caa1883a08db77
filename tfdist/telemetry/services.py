"""Writers for the experiment trackers Weights & Biases and MLflow.

Both packages are optional. They read their own configuration, as in any other script: WANDB_MODE,
WANDB_BASE_URL, MLFLOW_TRACKING_URI and so on. A failure at the start of a run raises an error. A
later failure is logged once, and the training goes on.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["MlflowWriter", "WandbWriter"]

log = logging.getLogger("tfdist")


def load(package: str, writer: str) -> Any:
    """Import and return the package of a tracking service.

    Args:
        package: Name of the package to import.
        writer: Name of the class that needs it, for the error message.

    Raises:
        ValueError: If the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(
            f"{writer} needs the package {package}, which cannot be imported ({error}): "
            f"pip install {package}."
        ) from error


class WandbWriter:
    """Logs a run to Weights & Biases; resumed training continues the same run.

    The first value starts the run.

    Args:
        directory: Directory of the run. wandb writes its own files there, and the run's id is kept
            there in `wandb.id`.
        project: Name of the wandb project.
        name: Name of the run.

    Raises:
        ValueError: If wandb is not installed.
    """

    def __init__(
        self, directory: str | os.PathLike, project: str = "tfdist", name: str | None = None
    ):
        self._wandb = load("wandb", "WandbWriter")
        self._directory = Path(directory)
        self._project = project
        self._name = name
        self._id = _RunIdFile(self._directory / "wandb.id")
        self._outage = _Outage("wandb")
        self._run: Any = None

    def scalars(self, step: int, values: Mapping[str, float], axis: str = "epoch") -> None:
        """Log values with the axis `epoch` or `step`.

        wandb's own step counter counts calls, so it matches neither of them.

        Args:
            step: Number of the epoch from 0, or number of steps done.
            values: Numbers by name.
            axis: Unit of `step`: "epoch" (default) or "step".
        """
        run = self._begin()
        with self._outage.tolerate():
            run.log({**values, axis: step})

    def settings(self, values: Mapping[str, Any]) -> None:
        """Add settings to the config of the wandb run.

        Args:
            values: Settings by name.
        """
        self._begin().config.update(dict(values), allow_val_change=True)

    def rewind(self, epoch: int, steps: int) -> None:
        """Keep the values that were sent; values that are logged again appear twice.

        Args:
            epoch: First epoch that is written again.
            steps: Number of steps, since training began, whose values are kept.
        """

    def close(self) -> None:
        """Finish the wandb run."""
        if self._run is not None:
            run = self._run
            self._run = None
            with self._outage.tolerate():
                run.finish()

    def _begin(self) -> Any:
        if self._run is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            run_id = {"id": self._id.read()} if self._id.read() else {}
            self._run = self._wandb.init(
                project=self._project,
                name=self._name,
                dir=str(self._directory),
                resume="allow",
                **run_id,
            )
            self._id.write(self._run.id)
            for axis in ("epoch", "step"):
                self._run.define_metric(axis, hidden=True)
            self._run.define_metric("batch_*", step_metric="step")
            self._run.define_metric("*", step_metric="epoch")
        return self._run


class MlflowWriter:
    """Logs a run to MLflow; resumed training continues the same run.

    The first value starts the run.

    Args:
        directory: Directory of the run. The MLflow run's id is kept there in `mlflow.id`.
        experiment: Name of the MLflow experiment.
        name: Name of the run.

    Raises:
        ValueError: If mlflow is not installed.
    """

    def __init__(
        self, directory: str | os.PathLike, experiment: str = "tfdist", name: str | None = None
    ):
        self._mlflow = load("mlflow", "MlflowWriter")
        self._experiment = experiment
        self._name = name
        self._id = _RunIdFile(Path(directory) / "mlflow.id")
        self._outage = _Outage("mlflow")
        self._client: Any = None
        self._run = ""

    def scalars(self, step: int, values: Mapping[str, float], axis: str = "epoch") -> None:
        """Log values as MLflow metrics.

        Args:
            step: Number of the epoch from 0, or number of steps done.
            values: Numbers by name.
            axis: Unit of `step`: "epoch" (default) or "step".
        """
        client = self._begin()
        with self._outage.tolerate():
            for name, value in values.items():
                client.log_metric(self._run, name, float(value), step=step)

    def settings(self, values: Mapping[str, Any]) -> None:
        """Log settings as MLflow parameters, except those that the run already has.

        Args:
            values: Settings by name.
        """
        client = self._begin()
        existing = client.get_run(self._run).data.params
        for name, value in values.items():
            if (
                name not in existing
            ):  # MLflow refuses to change a parameter; resumed runs repeat them
                client.log_param(self._run, name, value)

    def rewind(self, epoch: int, steps: int) -> None:
        """Keep the values that were sent; values that are logged again appear twice.

        Args:
            epoch: First epoch that is written again.
            steps: Number of steps, since training began, whose values are kept.
        """

    def close(self) -> None:
        """Mark the MLflow run as finished."""
        if self._client is not None:
            client = self._client
            self._client = None
            with self._outage.tolerate():
                client.set_terminated(self._run)

    def _begin(self) -> Any:
        if self._client is None:
            client = self._mlflow.MlflowClient()
            self._run = self._id.read()
            if self._run:
                client.update_run(self._run, status="RUNNING")
            else:
                experiment_found = client.get_experiment_by_name(self._experiment)
                experiment = (
                    experiment_found.experiment_id
                    if experiment_found is not None
                    else client.create_experiment(self._experiment)
                )
                self._run = client.create_run(experiment, run_name=self._name).info.run_id
                self._id.write(self._run)
            self._client = client
        return self._client


class _Outage:
    """Guards calls to a tracking service that may fail during training.

    Only the chief calls the service. A failure is logged once and raises no error.
    """

    def __init__(self, service: str):
        self._service = service
        self._warned = False

    @contextlib.contextmanager
    def tolerate(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._warned:
                log.warning(
                    "%s: a call failed: %s: %s. Training continues, and values of failed calls "
                    "are missing there. Later failures are not logged.",
                    self._service,
                    type(error).__name__,
                    error,
                )
            self._warned = True


class _RunIdFile:
    """File in the run's directory that stores the service's id of the run.

    Resumed training reads the id and continues the same run.
    """

    def __init__(self, path: Path):
        self._path = path

    def read(self) -> str:
        if not self._path.exists():
            return ""
        run_id = self._path.read_text(encoding="utf-8", errors="replace").strip()
        if not re.fullmatch(r"[\w.-]+", run_id, re.ASCII):
            log.warning("%s: damaged: it has no run id. A new run starts.", self._path)
            return ""
        return run_id

    def write(self, name: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(name + "\n", encoding="utf-8")
