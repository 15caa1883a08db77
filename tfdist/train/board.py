"""Keras' TensorBoard callback becomes the curves of a run, from one chief or from each worker."""

from __future__ import annotations

import os

import keras
import tensorflow as tf

from tfdist.keras_compat import engine_of
from tfdist.telemetry.layout import worker_directory
from tfdist.train.logs import OWN


class TensorBoard(keras.callbacks.TensorBoard):
    """Keras' TensorBoard callback that only the chief writes, with the speed of training beside its results.

    Each epoch adds, beside Keras' `epoch_*` scalars, `speed/examples_per_second` (all replicas), `speed/step_milliseconds` and
    `speed/input_wait` (share of the time, 0 to 1, that steps waited for a batch). They need a strategy made by tfdist.

    Args:
        log_dir: Directory of the logs, which get the subdirectories `train` and `validation`.
        run: Name of this run: its logs go to `log_dir/run`, so that `tensorboard --logdir LOG_DIR` shows runs side by side; None:
            to `log_dir` itself.
        per_worker: Whether each of several workers also writes the speed that it sees, to a subdirectory `worker-<rank>`; default:
            where the run has a name. Losses and metrics are those of all replicas, and the chief's alone.
        **kwargs: As for `keras.callbacks.TensorBoard`.

    >>> TensorBoard("runs", "try-1", write_graph=False).root_dir
    'runs/try-1'
    """

    def __init__(self, log_dir: str | os.PathLike = "logs", run: str | None = None, *, per_worker: bool | None = None, **kwargs):
        self.root_dir = os.path.join(log_dir, run) if run is not None else os.fspath(log_dir)
        super().__init__(log_dir=self.root_dir, **kwargs)
        self.per_worker = run is not None if per_worker is None else per_worker
        self.follows = False  # another worker than the chief; `log_dir` is a directory that nobody looks at then
        self.own_writers: list = []  # beside those of Keras

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self.own_writers[:] = [tf.summary.create_file_writer(path, filename_suffix=OWN) for path in self._own_directories()]

    def on_train_end(self, logs=None):
        super().on_train_end(logs)
        for writer in self.own_writers:
            writer.close()

    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_begin(epoch, logs)
        self._before = self._stats()

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        done = {name: value - self._before.get(name, 0) for name, value in self._stats().items()}
        if not done.get("steps"):
            return
        seconds = done["seconds"]
        for writer in self.own_writers:
            with writer.as_default(), tf.summary.record_if(True):  # whatever step of update_freq the epoch ends at
                tf.summary.scalar("speed/examples_per_second", done["examples"] / seconds, step=epoch)
                tf.summary.scalar("speed/step_milliseconds", 1e3 * seconds / done["steps"], step=epoch)
                tf.summary.scalar("speed/input_wait", done["input_seconds"] / seconds, step=epoch)

    def _own_directories(self) -> list[str]:
        """Where this worker's own curves go."""
        chiefs = [] if self.follows else [os.path.join(self.root_dir, "train")]
        place = getattr(engine_of(self.model.distribute_strategy), "placement", None)
        if self.per_worker and place is not None and place.workers > 1:
            return [*chiefs, str(worker_directory(self.root_dir, place.rank))]
        return chiefs

    def _stats(self) -> dict[str, float]:
        stats = getattr(self.model.train_function, "stats", None)
        return {} if stats is None else dict(vars(stats))
