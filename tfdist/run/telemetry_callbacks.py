"""The telemetry section of a Run becomes the callbacks that tell of its training; nothing is measured here."""

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

SERVICES = ("wandb", "mlflow")  # words of `telemetry.backends` that are also the packages they need


def callbacks(
    settings: config.Run,
    strategy: tf.distribute.Strategy,
    directory: Path,
    backup: BackupAndRestore,
    test: tf.data.Dataset,
) -> tuple[Log, list[keras.callbacks.Callback]]:
    """What looks at a run's training.

    Args:
        settings: The Run.
        strategy: Under which it trains.
        directory: Of the run.
        backup: What restores it.
        test: What it is evaluated on.

    Returns:
        The callback that keeps the history, and all of them, that one included, for every worker.
    """
    import keras

    import tfdist
    from tfdist.strategies.factory import is_chief

    told, chief, facts = settings.telemetry, is_chief(strategy), hyperparameters(settings, strategy)
    log = tfdist.Log(writers(settings, directory) if chief else [], settings=facts)
    found: list[keras.callbacks.Callback] = [log]
    if "tensorboard" in told.places():
        board = tfdist.TensorBoard(
            directory.parent, directory.name, graph=told.graph, histograms=told.histograms, hparams=facts if told.hparams else None,
            profile=told.profile, profile_workers=told.profile_workers,
        )  # fmt: skip
        found.append(board)
    if told.step_breakdown:
        found.append(tfdist.StepBreakdown(directory))
    if told.images:
        try:
            found.append(
                tfdist.ImageSamples(directory.parent, test, told.images, run=directory.name)
            )
        except ValueError as error:
            raise ValueError(f"telemetry.images: of the evaluation split, {error}") from error
    if chief:
        found.append(
            keras.callbacks.LambdaCallback(
                on_epoch_begin=_NoteSession(settings, strategy, directory, backup)
            )
        )
    return log, found


def check(settings: config.Run) -> None:
    """Raises ValueError for telemetry that this Run, or this machine, cannot have: before anything else begins."""
    told = settings.telemetry
    places = told.places()
    for name in SERVICES:
        if name in places and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"telemetry.backends: {name} needs the package {name}, which is not installed: pip install {name}. Or leave it out."
            )
    for key in ("profile", "images"):
        if getattr(told, key) and "tensorboard" not in places:
            raise ValueError(
                f"telemetry.{key}: expected tensorboard in telemetry.backends, which shows it; received {told.backends!r}."
            )


def writers(settings: config.Run, directory: Path) -> list[Writer]:
    """Where losses and metrics go beside TensorBoard, whose callback has more to tell than these."""
    from tfdist.telemetry import services
    from tfdist.telemetry.writers import ConsoleWriter, JsonlWriter

    makers: dict[str, Callable[[], Writer]] = {
        "jsonl": lambda: JsonlWriter(directory / HISTORY),
        "console": ConsoleWriter,
        "wandb": lambda: services.WandbWriter(directory, name=settings.name),
        "mlflow": lambda: services.MlflowWriter(directory, name=settings.name),
    }
    return [makers[name]() for name in settings.telemetry.places() if name in makers]


def hyperparameters(settings: config.Run, strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """What runs are compared by."""
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
            "global_batch": settings.data.global_batch,
            "data": settings.data.name,
            "model": {"name": settings.model.name, **settings.model.options},
            "strategy": type(strategy).__name__,
            "workers": workers(strategy),
            "replicas": strategy.num_replicas_in_sync,
        }
    )


def workers(strategy: tf.distribute.Strategy) -> int:
    """Tasks that train."""
    from tfdist.keras_compat import engine_of

    place = getattr(engine_of(strategy), "placement", None)
    return place.workers if place else trained_by(strategy).get("workers", 1)


def shown(settings: config.Run, directory: Path) -> Path:
    """What TensorBoard is to show: a run with those beside it, or one whose directory was chosen by hand."""
    return directory.parent if settings.output.dir is None else directory


def trained_by(strategy: tf.distribute.Strategy) -> dict[str, int]:
    """How many tasks train beside this one under parameter servers; nothing under other strategies."""
    import tensorflow as tf

    from tfdist.layers import connected_tasks

    if not isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return {}
    return {"workers": connected_tasks("worker"), "parameter_servers": connected_tasks("ps")}


def sent(strategy: tf.distribute.Strategy, model: keras.Model) -> float | None:
    """Bytes that a replica has sent to others in a step of training, on average; None where that is not known."""
    from tfdist.keras_compat import engine_of

    engine = engine_of(strategy)
    found = engine.bytes_per_step(model) if engine is not None else math.nan
    return None if math.isnan(found) else found


class _NoteSession:
    """Writes a line of `sessions.jsonl` when the first epoch begins: what there was is restored by then."""

    def __init__(
        self,
        settings: config.Run,
        strategy: tf.distribute.Strategy,
        directory: Path,
        backup: BackupAndRestore,
    ):
        self._settings, self._strategy, self._directory, self._backup = (
            settings,
            strategy,
            directory,
            backup,
        )
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
        launched, (resumed, step) = Launched.from_environ(), self._backup.went_on
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
            global_batch=self._settings.data.global_batch,
            versions={
                "tfdist": tfdist.__version__,
                "python": platform.python_version(),
                "tensorflow": tf.__version__,
                "keras": keras.__version__,
            },
        )
        sessions.write(self._directory, session)
