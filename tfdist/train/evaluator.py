"""Evaluator engine: `fit` evaluates each new checkpoint of a training run elsewhere.

It never trains or writes a checkpoint.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import logging
import os
import re
import shutil
import string
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.backup import state
from tfdist.backup.store import SUFFIX, Store
from tfdist.cluster.addresses import Presence
from tfdist.cluster.preflight import PeersAbsent
from tfdist.keras_compat import LOSS_HOOKS, MODEL_HOOKS
from tfdist.storage import files
from tfdist.telemetry.named_scalars import named_scalars
from tfdist.train.hooks import Hooks, bind
from tfdist.train.synchronous.engine import Engine
from tfdist.train.synchronous.worker_callbacks import listed

log = logging.getLogger("tfdist")

# Seconds between two polls of the files. A file counts as written if both polls find it unchanged.
POLL_S = 0.5
GIVE_UP_S = 30.0  # until a file that cannot be read and does not change is skipped
GONE_S = 10.0  # without the chief until the training counts as ended
# Seconds without a new checkpoint until the training counts as ended, where the chief trains alone
# and does not listen.
ALONE_S = 3600.0
PROGRESS_S = 30.0  # between two log lines that name the task that the evaluator waits for

_UNREADABLE = (
    OSError,
    tf.errors.OpError,
    EOFError,
    KeyError,
    ValueError,
    RuntimeError,
    zipfile.BadZipFile,
)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """File with a state of the model.

    Attributes:
        path: Path of the file.
        stamp: Time of its last change in nanoseconds since 1970, its size in bytes, and its inode
            number.
        epoch: Epoch, from 0, in or at the end of which it was written; None if unknown.
        finished: Number of epochs that were finished, if it was written at the end of an epoch;
            None if unknown.
    """

    path: str
    stamp: tuple[int, int, int]
    epoch: int | None = None
    finished: int | None = None


class Evaluator(Hooks):
    """Engine that evaluates the models of the evaluator's strategy beside a training run.

    Args:
        strategy: The strategy. Its attribute `tfdist_engine` is set to this object.
        engine: Previous engine of the strategy, which evaluates and predicts.
        chief: Address of the training's chief.
        listens: Whether the chief listens there; a chief that trains alone does not.
        start_timeout: Seconds until a chief that never answered is an error.
    """

    is_chief = False

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        engine: Engine,
        chief: str,
        listens: bool,
        start_timeout: float,
    ):
        self._chief = chief
        self._listens = listens
        self._start_timeout = start_timeout
        self._engine = engine
        self._started_ns = time.time_ns()
        self._handled: dict[str, tuple] = {}  # path -> stamp of each file that is done with
        self._presence: Presence | None = None
        for name in {*MODEL_HOOKS, "feed", "apply", "call_loss", "update_mean", *LOSS_HOOKS} - {
            "fit",
            "save",
            "save_weights",
            "export",
        }:
            setattr(self, name, getattr(engine, name))
        strategy.tfdist_engine = self

    def __getattr__(self, name: str) -> Any:
        # Everything that is not a hook belongs to the engine, such as placement and aggregation.
        return getattr(self._engine, name)

    @property
    def feeding(self) -> bool:  # type: ignore[override]
        """Return whether Keras is in `fit`, `evaluate` or `predict`."""
        return self._engine.feeding

    def save(self, model, keras_method, *args, **kwargs):
        """Do nothing: only the chief of the training saves the model."""
        log.debug("the evaluator does not write in model.%s; the chief does", keras_method.__name__)

    save_weights = save
    export = save

    def fit(
        self, model: keras.Model, keras_method: Callable, *args, **kwargs
    ) -> keras.callbacks.History:
        """Evaluate each new checkpoint of the chief's fit until that fit has ended.

        The chief runs its `fit` with the same arguments.
        """
        call = bind(keras_method, model, args, kwargs)
        callbacks = listed(call["callbacks"])
        data = _validation(call)
        sources = find_sources(callbacks)
        if not model.built:
            model.evaluate(**{**data, "steps": 1}, verbose=0)
        self._presence = self._presence or Presence(self._chief)
        self._skip_old(sources)
        boards = [c.log_dir for c in callbacks if isinstance(c, keras.callbacks.TensorBoard)]
        report = _Report(model, boards, print if call["verbose"] else log.info)
        try:
            self._follow(model, data, sources, report, call["epochs"])
        finally:
            report.close()
        return report.history

    def _follow(
        self, model, data: dict, sources: Sequence[Source], report: _Report, epochs: int
    ) -> None:
        """Evaluate new checkpoints until no more can come."""
        assert self._presence is not None
        seen: dict[str, Checkpoint] = {}  # at the last poll
        failures: dict[Checkpoint, tuple[float, Exception]] = {}
        digests: set[bytes] = set()
        finished = 0
        latest = time.monotonic()
        next_line = PROGRESS_S
        while True:
            # Ask for the chief before polling the files: if it is gone, all its files are there.
            absent_s = self._presence.absent_seconds()
            candidates = self._find_new(sources)
            ready = [c for c in candidates if seen.get(c.path) == c]
            seen = {c.path: c for c in candidates}
            for checkpoint in ready:
                latest = time.monotonic()
                try:
                    _load(model, checkpoint)
                except (FileNotFoundError, tf.errors.NotFoundError):
                    # BackupAndRestore has removed the file, because there are newer ones.
                    continue
                except _UNREADABLE as error:
                    first = failures.setdefault(checkpoint, (latest, error))[0]
                    if latest - first > GIVE_UP_S:
                        log.warning(
                            "the evaluator skips %s, because it cannot read the file: %.300s",
                            checkpoint.path,
                            error,
                        )
                        self._handled[checkpoint.path] = checkpoint.stamp
                    continue
                self._handled[checkpoint.path] = checkpoint.stamp
                if checkpoint.stamp[0] >= self._started_ns:
                    finished = max(finished, checkpoint.finished or 0)
                digest = _digest(model)
                if digest not in digests:  # two callbacks may save the same state
                    digests.add(digest)
                    report.add(checkpoint, model.evaluate(**data, verbose=0, return_dict=True))
            if candidates:
                time.sleep(POLL_S)
                continue
            reason = self._end_reason(
                absent_s, finished >= epochs, time.monotonic() - latest, bool(digests or failures)
            )
            if reason:
                break
            if self._listens and absent_s is not None and absent_s > next_line:
                log.info(
                    "the evaluator has waited for the chief at %s for %.0f s", self._chief, absent_s
                )
                next_line += PROGRESS_S
            time.sleep(POLL_S)
        if not digests and failures:
            checkpoint, (_, cause) = next(iter(failures.items()))
            raise ValueError(
                f"{checkpoint.path}: cannot be loaded into this model: {cause}"
            ) from cause
        log.info("the evaluator ends after %d evaluations: %s", len(digests), reason)

    def _end_reason(
        self, absent_s: float | None, complete: bool, idle: float, any_evaluated: bool
    ) -> str:
        """Return why no more checkpoint can come; an empty string if one can.

        Raises:
            PeersAbsent: If there is no training: no checkpoint was found and the chief did not
                answer.
        """
        assert self._presence is not None
        if complete:
            return "the last epoch is evaluated"
        if not self._listens:
            return f"no new checkpoint for {idle:.0f} s" if idle > ALONE_S else ""
        if absent_s is None or absent_s <= (GONE_S if self._presence.seen else self._start_timeout):
            return ""
        if self._presence.seen:
            return f"the chief at {self._chief} has ended"
        if any_evaluated:
            return f"no chief at {self._chief} for {absent_s:.0f} s"
        raise PeersAbsent(
            f"the evaluator found no checkpoint, and no chief answered at {self._chief} within "
            f"{self._start_timeout:g} s. Start the training with this cluster, and let this "
            "machine connect to its chief"
        )

    def _find_new(self, sources: Sequence[Source]) -> list[Checkpoint]:
        new = [c for source in sources for c in source() if self._handled.get(c.path) != c.stamp]
        return sorted(new, key=lambda c: (c.stamp, c.path))

    def _skip_old(self, sources: Sequence[Source]) -> None:
        """Ignore all but the newest of the files that are older than this process.

        They belong to an earlier run.
        """
        old = [c for c in self._find_new(sources) if c.stamp[0] < self._started_ns]
        self._handled.update({c.path: c.stamp for c in old[:-1]})


class _Report:
    """Report of the evaluations: a History, and for each evaluation a line and scalars."""

    def __init__(self, model: keras.Model, boards: Iterable[str], print_line: Callable[[str], Any]):
        self._print_line = print_line
        paths = [os.path.join(board, "evaluator") for board in boards]
        for path in paths:
            files.make_writable(path, "TensorBoard(log_dir=...)")
        self._writers = [tf.summary.create_file_writer(path) for path in paths]
        self.history = keras.callbacks.History()
        self.history.set_model(model)
        self.history.on_train_begin()

    def add(self, checkpoint: Checkpoint, metrics: dict[str, Any]) -> None:
        """Add the metrics of one checkpoint."""
        epoch = checkpoint.epoch
        if epoch is None:
            epoch = max(self.history.epoch, default=-1) + 1
        self.history.on_epoch_end(epoch, {f"val_{name}": value for name, value in metrics.items()})
        scalars = named_scalars(metrics)
        values = ", ".join(f"{name} {value:.4f}" for name, value in scalars.items())
        self._print_line(
            f"evaluator: epoch {epoch + 1}: {values} ({os.path.basename(checkpoint.path)})"
        )
        for writer in self._writers:
            with writer.as_default():
                for name, value in scalars.items():
                    # TensorBoard shows this curve beside the chief's, which has the same name.
                    tf.summary.scalar(f"epoch_{name}", np.float32(value), step=epoch)
            writer.flush()

    def close(self) -> None:
        """Close the TensorBoard writers."""
        for writer in self._writers:
            writer.close()


# --- Files ----------------------------------------------------------------------------------------
Source = Callable[[], list[Checkpoint]]


def find_sources(callbacks: Iterable[keras.callbacks.Callback]) -> list[Source]:
    """Return functions that find the checkpoints that the chief's callbacks write.

    Args:
        callbacks: Callbacks of the fit. Only ModelCheckpoint and BackupAndRestore are used.

    Returns:
        Functions that return the checkpoints that exist when they are called.

    Raises:
        ValueError: If no callback writes checkpoints.

    Example:
        >>> source, = find_sources([keras.callbacks.ModelCheckpoint("no/such/{epoch}.keras")])
        >>> source()
        []
    """
    sources: list[Source] = []
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            sources.append(_saved(callback.filepath, at_ends=callback.save_freq == "epoch"))
        elif isinstance(callback, keras.callbacks.BackupAndRestore):
            sources.append(_backup(callback.backup_dir))
    if not sources:
        raise ValueError(
            "callbacks: the evaluator has no checkpoints to evaluate: expected a "
            "keras.callbacks.ModelCheckpoint (best with {epoch} in its filepath) or a "
            "tfdist.BackupAndRestore. Pass one to fit in every task: the chief writes the files, "
            "the evaluator reads them."
        )
    return sources


def _saved(filepath: str, at_ends: bool) -> Source:
    """Return a source of the files of a ModelCheckpoint.

    Its filepath may have placeholders such as `{epoch:02d}` and `{val_loss:.3f}`.
    """
    pattern = ""
    expression = ""
    has_epoch = False
    for text, field, _, _ in string.Formatter().parse(filepath):
        pattern += glob.escape(text)
        expression += re.escape(text)
        if field is not None:
            pattern += "*"
            first = field == "epoch" and not has_epoch
            has_epoch = has_epoch or field == "epoch"
            expression += r" *(?P<epoch>\d+)" if first else r"[^/]*"

    def find() -> list[Checkpoint]:
        checkpoints = []
        for path in glob.glob(pattern):
            match = re.fullmatch(expression, path)
            stamp = _stamp(path)
            if match and stamp:
                number = int(match["epoch"]) if has_epoch else None  # Keras counts from 1 here
                epoch = None if number is None else number - 1
                checkpoints.append(Checkpoint(path, stamp, epoch, number if at_ends else None))
        return checkpoints

    return find


def _backup(directory: str) -> Source:
    """Return a source of the newest snapshot of a BackupAndRestore.

    BackupAndRestore removes its snapshots when a fit is done.
    """
    store = Store(directory)
    # Each snapshot is read only once to learn its epoch.
    known: dict[tuple[int, int, int], list[Checkpoint]] = {}

    def find() -> list[Checkpoint]:
        path = store.path(store.numbers()[-1]) if store.numbers() else directory
        stamp = _stamp(path)
        if not stamp or path == directory:
            return []
        if stamp not in known:
            known.clear()
            try:
                facts = store.read(path).facts
            except (ValueError, OSError, tf.errors.OpError):
                return []
            ended = not facts["step"]
            checkpoint = Checkpoint(
                path, stamp, facts["epoch"] - ended, facts["epoch"] if ended else None
            )
            known[stamp] = [] if facts.get("first") else [checkpoint]
        return known[stamp]

    return find


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _load(model: keras.Model, checkpoint: Checkpoint) -> None:
    """Load the weights, but not the optimizer's state.

    Raises:
        OSError: If the file is no checkpoint, or not one yet. Other errors of `_UNREADABLE` are
            possible.
    """
    if checkpoint.path.endswith(SUFFIX):
        snapshot = Store(os.path.dirname(checkpoint.path)).read(checkpoint.path)
        return state.into_model(snapshot, model, checkpoint.path, weights_only=True)
    with tempfile.TemporaryDirectory(prefix="tfdist-") as directory:
        # Read a copy, because HDF5 locks the file that it reads, and the chief's next save would
        # fail.
        copy = os.path.join(directory, os.path.basename(checkpoint.path))
        shutil.copyfile(checkpoint.path, copy)
        if _stamp(checkpoint.path) != checkpoint.stamp:
            raise OSError("it was written while it was read")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
            model.load_weights(copy)


# --- Helpers --------------------------------------------------------------------------------------
def _validation(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `evaluate` that correspond to those of `fit`."""
    data = call["validation_data"]
    if data is None:
        hint = (
            "validation_split is a part of the training data, which the evaluator does not read"
            if call["validation_split"]
            else "received none"
        )
        raise ValueError(
            f"validation_data: the evaluator needs data to evaluate checkpoints on; {hint}. Pass "
            "validation_data to fit."
        )
    arguments = data if isinstance(data, (tuple, list)) else (data,)
    return {
        **dict(zip(("x", "y", "sample_weight"), arguments, strict=False)),
        "batch_size": call["validation_batch_size"] or call["batch_size"],
        "steps": call["validation_steps"],
    }


def _digest(model: keras.Model) -> bytes:
    digest = hashlib.sha256()
    for weight in model.get_weights():
        digest.update(weight.tobytes())
    return digest.digest()
