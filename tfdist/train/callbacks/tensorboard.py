"""Keras' TensorBoard callback becomes what TensorBoard shows of a run, from one chief or from each worker."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.config import nearest, step_range
from tfdist.keras_compat import engine_of
from tfdist.telemetry import hparams as hparams_tab
from tfdist.telemetry.layout import worker_name
from tfdist.train.callbacks.log_files import OWN
from tfdist.train.callbacks.profiler import Profile

log = logging.getLogger("tfdist")
WORKERS = ("chief", "all")


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
        graph: Whether to write the model's layers, and the operations of its forward pass.
        histograms: Histograms of the weights every so many epochs; 0: none.
        hparams: What the run was told, by name, also nested; the tab HPARAMS compares runs by it. None: nothing.
        profile: Steps to trace with TensorFlow's profiler, counted from 1 since training began, such as "steps=10..15". They run
            one by one, on all workers.
        profile_workers: Who traces them: the "chief", to `train`, or "all" workers, each to its `worker-<rank>`.
        **kwargs: As for `keras.callbacks.TensorBoard`.

    Raises:
        ValueError: For a bad argument.

    >>> TensorBoard("runs", "try-1", graph=False).root_dir
    'runs/try-1'
    """

    def __init__(
        self,
        log_dir: str | os.PathLike = "logs",
        run: str | None = None,
        *,
        per_worker: bool | None = None,
        graph: bool = True,
        histograms: int = 0,
        hparams: Mapping[str, Any] | None = None,
        profile: str | None = None,
        profile_workers: str = "chief",
        **kwargs,
    ):
        if profile_workers not in WORKERS:
            raise ValueError(
                f"profile_workers: received {profile_workers!r}. {nearest(str(profile_workers), WORKERS)}"
            )
        self.root_dir = os.path.join(log_dir, run) if run is not None else os.fspath(log_dir)
        super().__init__(
            log_dir=self.root_dir, **{"write_graph": graph, "histogram_freq": histograms, **kwargs}
        )
        self.per_worker = run is not None if per_worker is None else per_worker
        self.hparams, self.profile_workers = hparams, profile_workers
        self.profile = Profile(*step_range("profile", profile)) if profile is not None else None
        self.follows = False  # another worker than the chief; `log_dir` is a directory that nobody looks at then
        self.own_writers: list = []  # beside those of Keras
        self._settings_writer: Any = None

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        chiefs = [] if self.follows else [os.path.join(self.root_dir, "train")]
        own = self._worker_directory()
        paths = [*chiefs, own] if own is not None and self.per_worker else chiefs
        self.own_writers[:] = [
            tf.summary.create_file_writer(path, filename_suffix=OWN) for path in paths
        ]
        if self.profile is not None:
            all_trace = own is not None and self.profile_workers == "all"
            self.profile.begin(self.model, own if all_trace else next(iter(chiefs), None))
        if self.hparams and not self.follows:
            self._settings_writer = tf.summary.create_file_writer(
                self.root_dir, filename_suffix=".hparams"
            )
            hparams_tab.begin(
                self._settings_writer,
                os.path.basename(os.path.abspath(self.root_dir)),
                self.hparams,
            )
        self._graph_due = self.write_graph and not self.follows

    def on_train_end(self, logs=None):
        super().on_train_end(logs)
        for writer in self.own_writers:
            writer.close()
        if self.profile is not None:
            self.profile.end()
        if self._settings_writer is not None:
            hparams_tab.end(self._settings_writer)
            self._settings_writer.close()
            self._settings_writer = None

    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_begin(epoch, logs)
        self._before = self._stats()
        if self.profile is not None:
            self.profile.begin_epoch()

    def on_train_batch_begin(self, batch, logs=None):
        super().on_train_batch_begin(batch, logs)
        if self.profile is not None:
            self.profile.before(batch)

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        if self.profile is not None:
            self.profile.after(batch)

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        if self._graph_due:
            self._graph_due = False
            self._write_operations()
        done = {name: value - self._before.get(name, 0) for name, value in self._stats().items()}
        if not done.get("steps"):
            return
        seconds = done["seconds"]
        for writer in self.own_writers:
            with (
                writer.as_default(),
                tf.summary.record_if(True),
            ):  # whatever step of update_freq the epoch ends at
                tf.summary.scalar(
                    "speed/examples_per_second", done["examples"] / seconds, step=epoch
                )
                tf.summary.scalar(
                    "speed/step_milliseconds", 1e3 * seconds / done["steps"], step=epoch
                )
                tf.summary.scalar("speed/input_wait", done["input_seconds"] / seconds, step=epoch)

    def _worker_directory(self) -> str | None:
        """Where this one of several workers writes what is its own; None: there is one, or no strategy of tfdist."""
        place = getattr(engine_of(self.model.distribute_strategy), "placement", None)
        return (
            os.path.join(self.root_dir, worker_name(place.rank))
            if place is not None and place.workers > 1
            else None
        )  # Path has no gs://

    def _write_operations(self) -> None:
        """Keras writes the layers alone, which the tab GRAPHS does not show by itself; of a subclass it writes nothing."""
        try:
            graph = _forward_pass(self.model)
            if graph is not None:
                with self.own_writers[0].as_default(), tf.summary.record_if(True):
                    tf.summary.graph(graph)
        except Exception as error:  # a picture is not worth a training
            log.warning(
                "TensorBoard gets no graph of %s: its forward pass cannot be traced by itself, or written: %s",
                self.model.name,
                error,
            )

    def _stats(self) -> dict[str, float]:
        stats = getattr(self.model.train_function, "stats", None)
        return {} if stats is None else dict(vars(stats))


def _forward_pass(model: keras.Model) -> tf.Graph | None:
    """The operations of a model that is made of layers; None: it is a subclass, whose inputs are known to its data alone."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return None
    structure = inputs[0] if len(inputs) == 1 else model.input
    specs = keras.tree.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), structure)
    return (
        tf.function(lambda x: model(x, training=False), autograph=False)
        .get_concrete_function(specs)
        .graph
    )
