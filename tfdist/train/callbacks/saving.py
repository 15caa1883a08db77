"""Prepare and release the callbacks that save state or trace steps, around a `fit`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tfdist.train.callbacks import log_files
from tfdist.train.callbacks.backup_and_restore import BackupAndRestore
from tfdist.train.callbacks.image_samples import ImageSamples
from tfdist.train.callbacks.profiler import Profile
from tfdist.train.callbacks.tensorboard import TensorBoard


@contextlib.contextmanager
def backing(
    callbacks: Sequence[keras.callbacks.Callback],
    writes: bool,
    first_epoch: int = 0,
    validation_data: Any = None,
) -> Iterator[None]:
    """Prepare the saving callbacks of a `fit`, run it, and release them afterwards.

    See `BackupAndRestore.prepare`, `BackupAndRestore.release` and `Profile.release`.

    Args:
        callbacks: All callbacks of the fit.
        writes: Whether this process writes the snapshots.
        first_epoch: Epoch at which the fit starts if there is no snapshot.
        validation_data: Validation data of the fit.
    """
    log_files.check_places(callbacks)
    backups = _backups(callbacks)
    for callback in backups:
        callback.prepare(callbacks, writes, first_epoch, validation_data)
    try:
        yield
    finally:
        for callback in backups:
            callback.release()
        for profile in _profiles(callbacks):
            profile.release()
        log_files.leave(callbacks)


def same_on_workers(callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, float]:
    """Return the callback settings that must be equal on all workers, by name for messages.

    The workers synchronize at the steps where one of them saves, traces or predicts.
    """
    every = [callback.every for callback in _backups(callbacks)]
    profiles = _profiles(callbacks)
    samples = [callback.every for callback in callbacks if isinstance(callback, ImageSamples)]
    return {
        "number of BackupAndRestore callbacks": float(len(every)),
        "save_freq of BackupAndRestore": sum(every),
        "memory_freq of BackupAndRestore": float(
            sum(callback.memory_freq or 0 for callback in _backups(callbacks))
        ),
        "number of TensorBoard callbacks with a profile": float(len(profiles)),
        "first step of a profile": float(sum(p.first for p in profiles)),
        "last step of a profile": float(sum(p.last for p in profiles)),
        "number of tfdist.ImageSamples callbacks": float(len(samples)),
        "every of tfdist.ImageSamples": float(sum(samples)),
    }


def _backups(callbacks: Sequence[keras.callbacks.Callback]) -> list[BackupAndRestore]:
    return [callback for callback in callbacks if isinstance(callback, BackupAndRestore)]


def _profiles(callbacks: Sequence[keras.callbacks.Callback]) -> list[Profile]:
    return [
        callback.profile
        for callback in callbacks
        if isinstance(callback, TensorBoard) and callback.profile is not None
    ]
