"""Keras callbacks on many workers: one worker writes, and all take the same decisions.

Every worker runs the same callbacks, so that early stopping and learning rates stay equal.
Callbacks that write a file of the chief's are redirected on the other workers. (`engine.py` does
the same for `model.save` and `save_weights`, which ModelCheckpoint calls.)
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable

import keras

from tfdist.keras_compat import follow_chief, profiles
from tfdist.storage import files
from tfdist.train.callbacks.backup_and_restore import BackupAndRestore, in_order
from tfdist.train.callbacks.metrics_log import Log
from tfdist.train.callbacks.tensorboard import TensorBoard

_BATCH_METHODS = {
    "train": ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
}


def needs_single_steps(callbacks: Iterable[keras.callbacks.Callback], mode: str) -> bool:
    """Return whether a callback must see the true state after every single batch.

    Args:
        callbacks: Callbacks as given to Keras.
        mode: `"train"` or `"test"`.
    """
    return any(_needs_single_steps(c, mode) for c in callbacks)


def _needs_single_steps(callback, mode: str) -> bool:
    if is_progress_bar(callback):
        return False
    saves = keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore, BackupAndRestore
    if isinstance(callback, saves) and not _extends(callback, *saves, mode=mode):
        return mode == "train" and callback.save_freq != "epoch"
    boards = keras.callbacks.TensorBoard, TensorBoard
    if isinstance(callback, boards) and not _extends(callback, *boards, mode=mode):
        return callback.update_freq != "epoch" or profiles(callback)
    if isinstance(callback, Log) and not _extends(callback, Log, mode=mode):
        return mode == "train" and callback.every is not None
    return _extends(callback, keras.callbacks.Callback, mode=mode)


def _extends(callback, *bases: type, mode: str) -> bool:
    """Return whether a callback has batch methods that none of the classes `bases` defines."""
    return any(
        getattr(getattr(callback, name), "__func__", None) not in [getattr(b, name) for b in bases]
        for name in _BATCH_METHODS[mode]
    )


def listed(callbacks) -> list[keras.callbacks.Callback]:
    """Return the `callbacks` argument of a Keras method as a list."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks.callbacks
    return keras.tree.flatten(callbacks or [])


def backups_last(kwargs: dict) -> list[keras.callbacks.Callback]:
    """Move BackupAndRestore after all other callbacks of the user.

    A snapshot then holds the state of the other callbacks after the step.

    Args:
        kwargs: Keyword arguments of a Keras method. Its callbacks get this order; Keras' own, which
            come last, stay there.

    Returns:
        The callbacks.
    """
    callbacks = kwargs.get("callbacks")
    ordered = in_order(listed(callbacks))
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks[:] = ordered
    elif ordered:
        kwargs["callbacks"] = ordered
    return list(ordered)


def make_directories(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Create the directories of ModelCheckpoint files, up to the first placeholder.

    Keras' own way fails where two workers do it at once.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and (
            directory := os.path.dirname(callback.filepath.partition("{")[0])
        ):
            with contextlib.suppress(OSError):  # Keras raises it again when it writes
                files.make_dirs(directory)


def is_progress_bar(callback) -> bool:
    """Return whether a callback is Keras' progress bar."""
    return isinstance(callback, keras.callbacks.ProgbarLogger)


def worker_callback(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Return a callback as a worker other than the chief runs it."""
    if isinstance(callback, TensorBoard):
        callback.follows = True
    if isinstance(callback, keras.callbacks.TensorBoard):
        callback.log_dir = _scratch_directory()
    elif isinstance(callback, keras.callbacks.CSVLogger):
        callback.filename = os.devnull
    elif isinstance(callback, keras.callbacks.RemoteMonitor):
        return keras.callbacks.Callback()
    elif isinstance(callback, keras.callbacks.BackupAndRestore) and not isinstance(
        callback, BackupAndRestore
    ):
        follow_chief(callback)
    return callback


def _scratch_directory() -> str:
    path = tempfile.mkdtemp(prefix="tfdist-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path
