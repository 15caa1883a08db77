"""TensorBoard logging with training speed, for one chief or for every worker."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.config import nearest, step_range
from tfdist.keras_compat import engine_of, log_writers
from tfdist.runtime.goodput import so_far
from tfdist.runtime.launch_protocol import Launched, read_journal
from tfdist.runtime.time_account import time_account
from tfdist.storage import files
from tfdist.storage.mirror import Mirror
from tfdist.telemetry import hparams as hparams_tab
from tfdist.telemetry.layout import worker_name
from tfdist.telemetry.named_scalars import named_scalars
from tfdist.train.callbacks.log_files import SPEED_SUFFIX, check_places
from tfdist.train.callbacks.profiler import Profile

log = logging.getLogger("tfdist")
WORKERS = ("chief", "all")


class TensorBoard(keras.callbacks.TensorBoard):
    """Keras' TensorBoard callback, written by the chief only, with the training speed added.

    If the result of a metric is a vector or a dict, each entry has a curve of its own, such as
    `epoch_f1_score/0`. In addition to Keras' `epoch_*` scalars, each epoch adds
    `speed/examples_per_second` (all replicas), `speed/step_milliseconds` and `speed/input_wait`
    (fraction of the time, 0 to 1, that steps waited for a batch). The chief adds `goodput/training`
    and the shares of the other categories of `tfdist goodput`, of the whole job so far, and the
    text `goodput/losses`, a table of the largest losses with their remedies. These need a strategy
    made by tfdist.

    Args:
        log_dir: Directory of the logs, in which the subdirectories `train` and `validation` are
            made.
        run: Name of this run. Its logs go to `log_dir/run`, so that `tensorboard --logdir LOG_DIR`
            shows runs side by side. None: the logs go to `log_dir` itself.
        per_worker: Whether each of several workers also writes the speed that it measures, to a
            subdirectory `worker-<rank>`. By default this is true if the run has a name. Losses and
            metrics are those of all replicas, and only the chief writes them.
        graph: Whether to write the model's layers and the operations of its forward pass.
        histograms: Number of epochs between histograms of the weights; 0: no histograms.
        hparams: Hyperparameters of the run by name, possibly nested, by which the tab HPARAMS
            compares runs. None: no hyperparameters are written.
        profile: Steps to trace with TensorFlow's profiler, counted from 1 since training began,
            such as "steps=10..15". These steps run one by one, on all workers.
        profile_workers: Workers that trace these steps: the "chief", to `train`, or "all" workers,
            each to its `worker-<rank>`.
        **kwargs: Further arguments of `keras.callbacks.TensorBoard`.

    Raises:
        ValueError: If an argument is invalid; when training begins, if `log_dir` cannot be written.

    Example:
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
        **kwargs: Any,
    ):
        if profile_workers not in WORKERS:
            raise ValueError(
                f"profile_workers: received {profile_workers!r}. "
                f"{nearest(str(profile_workers), WORKERS)}"
            )
        self.root_dir = os.path.join(log_dir, run) if run is not None else os.fspath(log_dir)
        self.name = os.path.basename(os.path.abspath(self.root_dir))
        # TensorFlow writes event files, but not in most stores. They are written here and uploaded,
        # also to gs:// if gcsfs is installed, so that all files there have the same credentials.
        self.mirror = Mirror(self.root_dir) if files.through_fsspec(self.root_dir) else None
        if self.mirror is not None:
            self.root_dir = self.mirror.local
        super().__init__(
            log_dir=self.root_dir, **{"write_graph": graph, "histogram_freq": histograms, **kwargs}
        )
        self.per_worker = run is not None if per_worker is None else per_worker
        self.hparams = hparams
        self.profile_workers = profile_workers
        self.profile = Profile(*step_range("profile", profile)) if profile is not None else None
        # True on workers other than the chief. Nothing reads the `log_dir` of such a worker.
        self.follows = False
        self.own_writers: list = []  # in addition to Keras' writers
        self._settings_writer: Any = None

    def set_model(self, model):
        """See `keras.callbacks.Callback`."""
        check_places([self])  # before Keras writes there; engines have checked all callbacks
        super().set_model(model)

    def on_train_begin(self, logs=None):
        """See `keras.callbacks.Callback`."""
        super().on_train_begin(logs)
        chiefs = [] if self.follows else [os.path.join(self.root_dir, "train")]
        own = self._worker_directory()
        paths = [*chiefs, own] if own is not None and self.per_worker else chiefs
        self.own_writers[:] = [
            tf.summary.create_file_writer(path, filename_suffix=SPEED_SUFFIX) for path in paths
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
                self.name,
                self.hparams,
            )
        self._graph_due = self.write_graph and not self.follows
        self._launched = Launched.from_environ()
        log_dir = self._launched.log_dir
        self._journal = read_journal(log_dir) if log_dir and not self.follows else []

    def on_train_end(self, logs=None):
        """See `keras.callbacks.Callback`."""
        super().on_train_end(logs)
        for writer in self.own_writers:
            writer.close()
        if self.profile is not None:
            self.profile.end()
        if self._settings_writer is not None:
            hparams_tab.end(self._settings_writer)
            self._settings_writer.close()
            self._settings_writer = None
        self.push()

    def push(self) -> None:
        """Upload event files that have changed, if `log_dir` is in an object store."""
        if self.mirror is not None:
            self.mirror.push()

    def on_epoch_begin(self, epoch, logs=None):
        """See `keras.callbacks.Callback`."""
        super().on_epoch_begin(epoch, logs)
        self._before = self._stats()
        if self.profile is not None:
            self.profile.begin_epoch()

    def on_train_batch_begin(self, batch, logs=None):
        """See `keras.callbacks.Callback`."""
        super().on_train_batch_begin(batch, logs)
        if self.profile is not None:
            self.profile.before(batch)

    def on_train_batch_end(self, batch, logs=None):
        """See `keras.callbacks.Callback`."""
        super().on_train_batch_end(batch, _scalars(logs) if isinstance(logs, dict) else logs)
        if self.profile is not None:
            self.profile.after(batch)

    def on_epoch_end(self, epoch, logs=None):
        """See `keras.callbacks.Callback`."""
        super().on_epoch_end(epoch, _scalars(logs or {}))
        if self._graph_due:
            self._graph_due = False
            self._write_operations()
        self._write_speed(epoch)
        if self.mirror is not None:
            for writer in (*self.own_writers, *log_writers(self).values()):
                writer.flush()
            self.push()

    def _write_speed(self, epoch: int) -> None:
        done = {name: value - self._before.get(name, 0) for name, value in self._stats().items()}
        if not done.get("steps"):
            return
        seconds = done["seconds"]
        for writer in self.own_writers:
            # Keras records only every `update_freq` steps; the epoch may end at another step.
            with writer.as_default(), tf.summary.record_if(True):
                for name, value in {
                    "speed/examples_per_second": done["examples"] / seconds,
                    "speed/step_milliseconds": 1e3 * seconds / done["steps"],
                    "speed/input_wait": done["input_seconds"] / seconds,
                }.items():
                    tf.summary.scalar(name, np.float32(value), step=epoch)
        if not self.follows:
            self._write_goodput(epoch)

    def _write_goodput(self, epoch: int) -> None:
        goodput = so_far(self._journal, self._launched.attempt, time_account().state())
        with self.own_writers[0].as_default(), tf.summary.record_if(True):
            for name, seconds in goodput.seconds.items():
                tf.summary.scalar(f"goodput/{name}", np.float32(seconds / goodput.wall), step=epoch)
            tf.summary.text("goodput/losses", goodput.markdown(), step=epoch)

    def on_test_end(self, logs=None):
        """See `keras.callbacks.Callback`."""
        super().on_test_end(_scalars(logs or {}))

    def _worker_directory(self) -> str | None:
        """Return the directory in which this worker writes its own logs, or None.

        It is None if there is only one worker, or no strategy made by tfdist.
        """
        placement = getattr(engine_of(self.model.distribute_strategy), "placement", None)
        return (
            os.path.join(self.root_dir, worker_name(placement.rank))
            if placement is not None and placement.workers > 1
            else None
        )  # pathlib.Path does not support gs://

    def _write_operations(self) -> None:
        """Write the operations of the forward pass, which the tab GRAPHS shows.

        Keras writes only the layers, which the tab does not show by default, and nothing for a
        subclassed model.
        """
        try:
            graph = _forward_pass(self.model)
            if graph is not None:
                with self.own_writers[0].as_default(), tf.summary.record_if(True):
                    tf.summary.graph(graph)
        except Exception as error:  # a missing graph must not end training
            log.warning(
                "TensorBoard gets no graph of %s, because its forward pass could not be traced or "
                "written: %s",
                self.model.name,
                error,
            )

    def _stats(self) -> dict[str, float]:
        stats = getattr(self.model.train_function, "stats", None)
        return {} if stats is None else dict(vars(stats))


def _scalars(logs: Mapping[str, Any]) -> dict[str, np.float32]:
    """Return logs as NumPy's numbers; TensorFlow keeps tensors of Python's for ever (#68196)."""
    return {name: np.float32(value) for name, value in named_scalars(logs).items()}


def _forward_pass(model: keras.Model) -> tf.Graph | None:
    """Return the graph of the forward pass of a Sequential or functional model.

    It is None for a subclassed model, whose inputs are known only from its data.
    """
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
