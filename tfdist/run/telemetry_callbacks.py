"""Callbacks and writers for the telemetry section of a run."""

from __future__ import annotations

import importlib.util
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.telemetry.hparams import flat
from tfdist.telemetry.layout import HISTORY

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from tfdist import config
    from tfdist.telemetry.writers import Writer
    from tfdist.train.callbacks.backup_and_restore import BackupAndRestore
    from tfdist.train.callbacks.metrics_log import Log

# Words of `telemetry.backends` that are also the names of the packages they need.
SERVICES = ("wandb", "mlflow")


def callbacks(
    settings: config.Run,
    strategy: tf.distribute.Strategy,
    directory: Path,
    backup: BackupAndRestore,
    test: tf.data.Dataset,
) -> tuple[Log, list[keras.callbacks.Callback]]:
    """Return the callbacks that log a run's training.

    Args:
        settings: Run to log.
        strategy: Strategy that trains the model.
        directory: Directory of the run.
        backup: Callback that restores the run.
        test: Evaluation batches.

    Returns:
        The callback that keeps the history, and the list of all callbacks for every worker, which
        includes it.
    """
    import keras

    import tfdist
    from tfdist.strategies.factory import is_chief

    telemetry = settings.telemetry
    chief = is_chief(strategy)
    facts = hyperparameters(settings, strategy)
    log = tfdist.Log(writers(settings, directory) if chief else [], settings=facts)
    result: list[keras.callbacks.Callback] = [log]
    if "tensorboard" in telemetry.backend_names():
        board = tfdist.TensorBoard(
            directory.parent,
            directory.name,
            graph=telemetry.graph,
            histograms=telemetry.histograms,
            hparams=facts if telemetry.hparams else None,
            profile=telemetry.profile,
            profile_workers=telemetry.profile_workers,
        )
        result.append(board)
    if telemetry.step_breakdown:
        result.append(tfdist.StepBreakdown(directory))
    if telemetry.images:
        try:
            result.append(
                tfdist.ImageSamples(directory.parent, test, telemetry.images, run=directory.name)
            )
        except ValueError as error:
            raise ValueError(f"telemetry.images: evaluation split: {error}") from error
    if chief:
        result.append(
            keras.callbacks.LambdaCallback(
                on_epoch_begin=_NoteSession(settings, strategy, directory, backup)
            )
        )
    return log, result


def check(settings: config.Run) -> None:
    """Raise ValueError for telemetry settings that this run or machine does not support.

    Call it before anything else begins.
    """
    telemetry = settings.telemetry
    backends = telemetry.backend_names()
    for name in SERVICES:
        if name in backends and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"telemetry.backends: {name} needs the package {name}, which is not installed: pip "
                f"install {name}. Or remove it from telemetry.backends."
            )
    for key in ("profile", "images"):
        if getattr(telemetry, key) and "tensorboard" not in backends:
            raise ValueError(
                f"telemetry.{key}: expected tensorboard in telemetry.backends, which shows it; "
                f"received {telemetry.backends!r}."
            )


def writers(settings: config.Run, directory: Path) -> list[Writer]:
    """Return the writers of losses and metrics, other than TensorBoard.

    TensorBoard has a callback of its own, which logs more than these writers.
    """
    from tfdist.telemetry import services
    from tfdist.telemetry.writers import ConsoleWriter, JsonlWriter

    makers: dict[str, Callable[[], Writer]] = {
        "jsonl": lambda: JsonlWriter(directory / HISTORY),
        "console": ConsoleWriter,
        "wandb": lambda: services.WandbWriter(directory, name=settings.name),
        "mlflow": lambda: services.MlflowWriter(directory, name=settings.name),
    }
    return [makers[name]() for name in settings.telemetry.backend_names() if name in makers]


def hyperparameters(settings: config.Run, strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Return the hyperparameters by which runs are compared."""
    return flat(
        {
            **{
                name: getattr(settings.train, name)
                for name in (
                    "optimizer",
                    "learning_rate",
                    "schedule",
                    "epochs",
                    "precision",
                    "seed",
                )
            },
            "global_batch": settings.data.global_batch_size,
            "data": settings.data.name,
            "model": {"name": settings.model.name, **settings.model.options},
            "strategy": type(strategy).__name__,
            "workers": workers(strategy),
            "replicas": strategy.num_replicas_in_sync,
        }
    )


def workers(strategy: tf.distribute.Strategy) -> int:
    """Return the number of tasks that train."""
    from tfdist.keras_compat import engine_of

    placement = getattr(engine_of(strategy), "placement", None)
    return placement.workers if placement else trained_by(strategy).get("workers", 1)


def shown(settings: config.Run, directory: Path) -> Path:
    """Return the log directory for TensorBoard to show.

    It contains the run and those beside it, or only the run if you chose its directory.
    """
    return directory.parent if settings.output.dir is None else directory


def trained_by(strategy: tf.distribute.Strategy) -> dict[str, int]:
    """Return the number of workers and parameter servers under a parameter-server strategy.

    The result is empty under other strategies.
    """
    import tensorflow as tf

    from tfdist.layers import connected_tasks

    if not isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return {}
    return {"workers": connected_tasks("worker"), "parameter_servers": connected_tasks("ps")}


def sent(strategy: tf.distribute.Strategy, model: keras.Model) -> float | None:
    """Return the average number of bytes that a replica has sent per training step.

    It is None if the number is unknown.
    """
    from tfdist.keras_compat import engine_of

    engine = engine_of(strategy)
    sent_bytes = engine.bytes_per_step(model) if engine is not None else math.nan
    return None if math.isnan(sent_bytes) else sent_bytes


class _NoteSession:
    """Callback that writes a line of `sessions.jsonl` when the first epoch begins.

    A snapshot, if there is one, is already restored by then.
    """

    def __init__(
        self,
        settings: config.Run,
        strategy: tf.distribute.Strategy,
        directory: Path,
        backup: BackupAndRestore,
    ):
        self._settings = settings
        self._strategy = strategy
        self._directory = directory
        self._backup = backup
        self._written = False

    def __call__(self, epoch: int, logs: dict) -> None:
        import keras
        import tensorflow as tf

        import tfdist
        from tfdist.runtime.launch_protocol import Launched
        from tfdist.telemetry import sessions

        if self._written:
            return
        self._written = True
        launched = Launched.from_environ()
        resumed, step = self._backup.resumed
        session = sessions.Session(
            time=time.time(),
            epoch=epoch,
            step=step,
            resumed=resumed,
            attempt=launched.attempt,
            launch=launched.log_dir,
            strategy=type(self._strategy).__name__,
            workers=workers(self._strategy),
            replicas=self._strategy.num_replicas_in_sync,
            global_batch=self._settings.data.global_batch_size,
            versions={
                "tfdist": tfdist.__version__,
                "python": platform.python_version(),
                "tensorflow": tf.__version__,
                "keras": keras.__version__,
            },
        )
        sessions.write(self._directory, session)
