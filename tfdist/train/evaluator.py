"""The engine of the evaluator: its `fit` evaluates each new checkpoint of a training elsewhere, and never trains or writes one."""

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
import tensorflow as tf

from tfdist.backup import state
from tfdist.backup.store import SUFFIX, Store
from tfdist.cluster.addresses import Presence
from tfdist.cluster.preflight import PeersAbsent
from tfdist.keras_compat import LOSS_HOOKS, MODEL_HOOKS
from tfdist.train.hooks import Hooks, bind
from tfdist.train.synchronous.engine import Engine
from tfdist.train.synchronous.worker_callbacks import listed

log = logging.getLogger("tfdist")

POLL_S = 0.5  # between two looks at the files, which must be alike for a file to count as written
GIVE_UP_S = 30.0  # for a file that cannot be read and does not change
GONE_S = 10.0  # without the chief until the training has ended
ALONE_S = (
    3600.0  # without a new checkpoint, the same where the chief trains alone and listens nowhere
)
PROGRESS_S = 30.0  # between two lines that say whom we wait for

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
    """A file with a state of the model.

    Attributes:
        path: Where it is.
        stamp: Time of its last change, nanoseconds since the epoch; its size, bytes; its number in the file system.
        epoch: The epoch, from 0, in or at the end of which it was written; None where nothing tells.
        finished: How many epochs are behind it, if it was written at an epoch's end; None where nothing tells.
    """

    path: str
    stamp: tuple[int, int, int]
    epoch: int | None = None
    finished: int | None = None


class Evaluator(Hooks):
    """How the models of the evaluator's strategy are evaluated beside a training.

    Args:
        strategy: The strategy; gets this object as its `tfdist_engine`.
        engine: The one that it had, which evaluates and predicts.
        chief: Address of the training's chief.
        listens: Whether the chief listens there; one that trains alone does not.
        start_timeout: Seconds until a chief that never came is an error.
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
        self._chief, self._listens, self._start_timeout = chief, listens, start_timeout
        self._engine = engine
        self._born = time.time_ns()
        self._known: dict[str, tuple] = {}  # path -> stamp of what is done with
        self._presence: Presence | None = None
        for name in {*MODEL_HOOKS, "feed", "apply", *LOSS_HOOKS} - {
            "fit",
            "save",
            "save_weights",
            "export",
        }:
            setattr(self, name, getattr(engine, name))
        strategy.tfdist_engine = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)  # what is no hook: placement, policy, patience

    @property
    def feeding(self) -> bool:  # type: ignore[override]
        return self._engine.feeding

    def save(self, model, keras_method, *args, **kwargs):
        log.debug("the evaluator leaves model.%s to the chief", keras_method.__name__)

    save_weights = save
    export = save

    def fit(
        self, model: keras.Model, keras_method: Callable, *args, **kwargs
    ) -> keras.callbacks.History:
        """Evaluates each new checkpoint of the fit that the chief runs with the same arguments, until that has ended."""
        call = bind(keras_method, model, args, kwargs)
        callbacks = listed(call["callbacks"])
        data = _validation(call)
        sources = find_sources(callbacks)
        if not model.built:
            model.evaluate(**{**data, "steps": 1}, verbose=0)
        self._presence = self._presence or Presence(self._chief)
        self._forget_old(sources)
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
        """Evaluates what comes until nothing more can come."""
        assert self._presence is not None
        seen: dict[str, Checkpoint] = {}  # at the last look
        failures: dict[Checkpoint, tuple[float, Exception]] = {}
        digests: set[bytes] = set()
        finished, latest, next_line = 0, time.monotonic(), PROGRESS_S
        while True:
            away = (
                self._presence.away()
            )  # before the look at the files: what a chief that is gone wrote is there
            found = self._find_new(sources)
            ready = [c for c in found if seen.get(c.path) == c]
            seen = {c.path: c for c in found}
            for checkpoint in ready:
                latest = time.monotonic()
                try:
                    _load(model, checkpoint)
                except (
                    FileNotFoundError,
                    tf.errors.NotFoundError,
                ):  # BackupAndRestore has removed it, as there are newer ones
                    continue
                except _UNREADABLE as error:
                    first = failures.setdefault(checkpoint, (latest, error))[0]
                    if latest - first > GIVE_UP_S:
                        log.warning(
                            "the evaluator skips %s, which it cannot read: %.300s",
                            checkpoint.path,
                            error,
                        )
                        self._known[checkpoint.path] = checkpoint.stamp
                    continue
                self._known[checkpoint.path] = checkpoint.stamp
                if checkpoint.stamp[0] >= self._born:
                    finished = max(finished, checkpoint.finished or 0)
                digest = _digest(model)
                if digest not in digests:  # two callbacks may save the same state
                    digests.add(digest)
                    report.add(checkpoint, model.evaluate(**data, verbose=0, return_dict=True))
            if found:
                time.sleep(POLL_S)
                continue
            why = self._ended(
                away, finished >= epochs, time.monotonic() - latest, bool(digests or failures)
            )
            if why:
                break
            if self._listens and away is not None and away > next_line:
                log.info("the evaluator waits for the chief at %s since %.0f s", self._chief, away)
                next_line += PROGRESS_S
            time.sleep(POLL_S)
        if not digests and failures:
            checkpoint, (_, cause) = next(iter(failures.items()))
            raise ValueError(
                f"{checkpoint.path}: cannot be loaded into this model: {cause}"
            ) from cause
        log.info("the evaluator ends after %d evaluations: %s", len(digests), why)

    def _ended(self, away: float | None, complete: bool, idle: float, found: bool) -> str:
        """Why no more checkpoint can come; "" if one can. PeersAbsent where there is no training."""
        assert self._presence is not None
        if complete:
            return "the last epoch is evaluated"
        if not self._listens:
            return f"no new checkpoint for {idle:.0f} s" if idle > ALONE_S else ""
        if away is None or away <= (GONE_S if self._presence.seen else self._start_timeout):
            return ""
        if self._presence.seen:
            return f"the chief at {self._chief} has ended"
        if found:
            return f"no chief at {self._chief} for {away:.0f} s"
        raise PeersAbsent(
            f"the evaluator found no checkpoint, and no chief answered at {self._chief} within {self._start_timeout:g} s. Start the "
            "training with this cluster, and let this machine connect to its chief"
        )

    def _find_new(self, sources: Sequence[Source]) -> list[Checkpoint]:
        new = [c for source in sources for c in source() if self._known.get(c.path) != c.stamp]
        return sorted(new, key=lambda c: (c.stamp, c.path))

    def _forget_old(self, sources: Sequence[Source]) -> None:
        """Of the files older than this process, which belong to what went before, only the newest is evaluated."""
        old = [c for c in self._find_new(sources) if c.stamp[0] < self._born]
        self._known.update({c.path: c.stamp for c in old[:-1]})


class _Report:
    """What the evaluations give: a History, a line and scalars each."""

    def __init__(self, model: keras.Model, boards: Iterable[str], say: Callable[[str], Any]):
        self._say = say
        self._writers = [
            tf.summary.create_file_writer(os.path.join(board, "evaluator")) for board in boards
        ]
        self.history = keras.callbacks.History()
        self.history.set_model(model)
        self.history.on_train_begin()

    def add(self, checkpoint: Checkpoint, metrics: dict[str, float]) -> None:
        epoch = checkpoint.epoch
        if epoch is None:
            epoch = max(self.history.epoch, default=-1) + 1
        self.history.on_epoch_end(epoch, {f"val_{name}": value for name, value in metrics.items()})
        values = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._say(f"evaluator: epoch {epoch + 1}: {values} ({os.path.basename(checkpoint.path)})")
        for writer in self._writers:
            with writer.as_default():
                for name, value in metrics.items():
                    tf.summary.scalar(
                        f"epoch_{name}", value, step=epoch
                    )  # beside the chief's, which have this name
            writer.flush()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


# --- Files ---------------------------------------------------------------------------------------------------------
Source = Callable[[], list[Checkpoint]]


def find_sources(callbacks: Iterable[keras.callbacks.Callback]) -> list[Source]:
    """Where the chief's callbacks write checkpoints.

    Args:
        callbacks: Those of the fit; ModelCheckpoint and BackupAndRestore are looked at.

    Returns:
        Functions that find the files that are there now.

    Raises:
        ValueError: There are none.

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
            "callbacks: the evaluator has nothing to evaluate: expected a keras.callbacks.ModelCheckpoint (best with {epoch} in its "
            "filepath) or a tfdist.BackupAndRestore. Give fit one in every task; the chief writes, the evaluator reads."
        )
    return sources


def _saved(filepath: str, at_ends: bool) -> Source:
    """The files of a ModelCheckpoint, whose filepath may have placeholders such as `{epoch:02d}` and `{val_loss:.3f}`."""
    pattern, expression, named = "", "", False
    for text, field, _, _ in string.Formatter().parse(filepath):
        pattern += glob.escape(text)
        expression += re.escape(text)
        if field is not None:
            pattern += "*"
            first, named = field == "epoch" and not named, named or field == "epoch"
            expression += r" *(?P<epoch>\d+)" if first else r"[^/]*"

    def find() -> list[Checkpoint]:
        found = []
        for path in glob.glob(pattern):
            match, stamp = re.fullmatch(expression, path), _stamp(path)
            if match and stamp:
                number = int(match["epoch"]) if named else None  # from 1
                epoch = None if number is None else number - 1
                found.append(Checkpoint(path, stamp, epoch, number if at_ends else None))
        return found

    return find


def _backup(directory: str) -> Source:
    """The newest snapshot of a BackupAndRestore, which removes them when a fit is done."""
    store = Store(directory)
    known: dict[
        tuple[int, int, int], list[Checkpoint]
    ] = {}  # a snapshot is read once to learn when it was made

    def find() -> list[Checkpoint]:
        path = store.path(store.numbers()[-1]) if store.numbers() else directory
        stamp = _stamp(path)
        if not stamp or path == directory:
            return []
        if stamp not in known:
            known.clear()
            try:
                where = store.read(path).facts
            except (ValueError, OSError, tf.errors.OpError):
                return []
            ended = not where["step"]
            trained = Checkpoint(
                path, stamp, where["epoch"] - ended, where["epoch"] if ended else None
            )
            known[stamp] = [] if where.get("first") else [trained]
        return known[stamp]

    return find


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _load(model: keras.Model, checkpoint: Checkpoint) -> None:
    """Loads the weights, but not the optimizer's state; OSError and others where the file is no checkpoint (yet)."""
    if checkpoint.path.endswith(SUFFIX):
        found = Store(os.path.dirname(checkpoint.path)).read(checkpoint.path)
        return state.into_model(found, model, checkpoint.path, weights_only=True)
    with tempfile.TemporaryDirectory(prefix="tfdist-") as directory:
        # A copy, since HDF5 locks the file that it reads: the chief's next save would fail.
        copy = os.path.join(directory, os.path.basename(checkpoint.path))
        shutil.copyfile(checkpoint.path, copy)
        if _stamp(checkpoint.path) != checkpoint.stamp:
            raise OSError("it was written while it was read")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
            model.load_weights(copy)


# --- Below -----------------------------------------------------------------------------------------------------------
def _validation(call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `evaluate` from those of `fit`."""
    data = call["validation_data"]
    if data is None:
        hint = (
            "validation_split takes them from the training data, which the evaluator does not read"
            if call["validation_split"]
            else "received none"
        )
        raise ValueError(
            f"validation_data: the evaluator needs data to evaluate checkpoints on; {hint}. Pass validation_data to fit."
        )
    given = data if isinstance(data, (tuple, list)) else (data,)
    return {
        **dict(zip(("x", "y", "sample_weight"), given, strict=False)),
        "batch_size": call["validation_batch_size"] or call["batch_size"],
        "steps": call["validation_steps"],
    }


def _digest(model: keras.Model) -> bytes:
    digest = hashlib.sha256()
    for weight in model.get_weights():
        digest.update(weight.tobytes())
    return digest.digest()
