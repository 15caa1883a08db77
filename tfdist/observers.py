"""The telemetry section of a Run becomes the callbacks that tell of its training; nothing is measured here."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tfdist.telemetry.layout import HISTORY

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from tfdist import config
    from tfdist.train.backup import BackupAndRestore
    from tfdist.train.metrics_log import Log


def callbacks(
    settings: config.Run, strategy: tf.distribute.Strategy, directory: Path, backup: BackupAndRestore
) -> tuple[Log, list[keras.callbacks.Callback]]:
    """What looks at a run's training.

    Args:
        settings: The Run.
        strategy: Under which it trains.
        directory: Of the run.
        backup: What restores it.

    Returns:
        The callback that keeps the history, and all of them, that one included, for every worker.
    """
    import keras

    import tfdist
    from tfdist.strategies import is_chief
    from tfdist.telemetry.writers import JsonlWriter

    chief = is_chief(strategy)
    log = tfdist.Log([JsonlWriter(directory / HISTORY)] if chief else [])
    sessions = []
    if chief:
        sessions = [keras.callbacks.LambdaCallback(on_epoch_begin=_NoteSession(settings, strategy, directory, backup))]
    return log, [tfdist.TensorBoard(directory.parent, directory.name), log, *sessions]


def shown(settings: config.Run, directory: Path) -> Path:
    """What TensorBoard is to show: a run with those beside it, or one whose directory was chosen by hand."""
    return directory.parent if settings.output.dir is None else directory


def trained_by(strategy: tf.distribute.Strategy) -> dict[str, int]:
    """How many tasks train beside this one under parameter servers; nothing under other strategies."""
    import tensorflow as tf

    from tfdist.keras_compat import connected_tasks

    if not isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return {}
    return {"workers": connected_tasks("worker"), "parameter_servers": connected_tasks("ps")}


class _NoteSession:
    """Writes a line of `sessions.jsonl` when the first epoch begins: what there was is restored by then."""

    def __init__(self, settings: config.Run, strategy: tf.distribute.Strategy, directory: Path, backup: BackupAndRestore):
        self._settings, self._strategy, self._directory, self._backup = settings, strategy, directory, backup
        self._written = False

    def __call__(self, epoch: int, logs: dict) -> None:
        import keras
        import tensorflow as tf

        import tfdist
        from tfdist.contract import Launched
        from tfdist.keras_compat import engine_of
        from tfdist.telemetry import sessions

        if self._written:
            return
        self._written = True
        launched, (resumed, step) = Launched.from_environ(), self._backup.went_on
        place = getattr(engine_of(self._strategy), "placement", None)
        session = sessions.Session(
            time=time.time(),
            epoch=epoch,
            step=step,
            resumed=resumed,
            attempt=launched.attempt,
            launch=launched.log_dir,
            strategy=type(self._strategy).__name__,
            workers=place.workers if place else trained_by(self._strategy).get("workers", 1),
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
