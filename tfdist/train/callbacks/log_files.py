"""Rewind the log files of Keras callbacks to a snapshot when it is restored.

The event files of TensorBoard and the tables of CSVLogger are truncated to the sizes that the
snapshot recorded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.data import files_io
from tfdist.keras_compat import leave_summaries, log_writers

NEVER = 2**62  # steps
_EVENTS = "events.out.tfevents."
# Suffix of the event files that tfdist's TensorBoard callback adds to Keras' own.
SPEED_SUFFIX = ".speed"
_FREQUENCIES = (
    (keras.callbacks.TensorBoard, "update_freq"),
    (keras.callbacks.ModelCheckpoint, "save_freq"),
)


def sizes(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, dict[str, int]]:
    """Return the sizes of the event files that these callbacks have written so far.

    The writers are flushed first, so the sizes include everything logged so far.

    Args:
        callbacks: Callbacks. Only Keras' TensorBoard and its subclasses are considered.

    Returns:
        For each `log_dir`, the event files in it and their sizes in bytes.
    """
    boards = _boards(callbacks)
    for writer in _writers(boards):
        writer.flush()
    return {
        board.log_dir: {
            name: tf.io.gfile.stat(os.path.join(board.log_dir, name)).length
            for name in _event_files(board.log_dir)
        }
        for board in boards
    }


def rewind(
    recorded: Mapping[str, Mapping[str, int]], callbacks: Iterable[keras.callbacks.Callback]
) -> None:
    """Truncate the event files to their recorded sizes.

    Event files that were not recorded are removed. A `log_dir` that was not recorded stays
    unchanged.

    Args:
        recorded: Sizes that `sizes` returned.
        callbacks: Callbacks of the resumed training, before they write.
    """
    for log_dir in {board.log_dir for board in _boards(callbacks)} & recorded.keys():
        for name in _event_files(log_dir):
            path = os.path.join(log_dir, name)
            size = recorded[log_dir].get(name)
            if size is None:
                tf.io.gfile.remove(path)
            elif size < tf.io.gfile.stat(path).length:
                _truncate(path, size)


def close(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Close the writers, so that TensorBoard starts new files.

    The files of a fit that failed are still open.
    """
    boards = _boards(callbacks)
    for writer in _writers(boards):
        writer.close()
    for board in boards:
        log_writers(board).clear()


def leave(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Restore the default summary settings that TensorBoard changed when training began."""
    for board in reversed(_boards(callbacks)):
        leave_summaries(board)


def table_sizes(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, int]:
    """Return the sizes in bytes of the CSVLogger tables, by file name."""
    sizes = {}
    for table in _tables(callbacks):
        if getattr(table, "csv_file", None) is not None and not table.csv_file.closed:
            table.csv_file.flush()
        sizes[table.filename] = (
            tf.io.gfile.stat(table.filename).length if tf.io.gfile.exists(table.filename) else 0
        )
    return sizes


def rewind_tables(
    recorded: Mapping[str, int], callbacks: Iterable[keras.callbacks.Callback]
) -> None:
    """Truncate the CSVLogger tables to their recorded sizes, and make the callbacks append.

    Args:
        recorded: Sizes that `table_sizes` returned.
        callbacks: Callbacks of the resumed training, before they write.
    """
    for table in _tables(callbacks):
        if table.filename not in recorded or not tf.io.gfile.exists(table.filename):
            continue
        if recorded[table.filename] < tf.io.gfile.stat(table.filename).length:
            _truncate(table.filename, recorded[table.filename])
        table.append = True  # else CSVLogger would overwrite the rows of earlier epochs


class SuspendedFrequencies:
    """Suspends the callbacks that write every so many steps, until `end` is called.

    Args:
        callbacks: Callbacks, of which TensorBoard and ModelCheckpoint are changed.

    Example:
        >>> board = keras.callbacks.TensorBoard(update_freq=3)
        >>> suspended = SuspendedFrequencies([board])
        >>> board.update_freq == NEVER
        True
        >>> suspended.end()
        >>> board.update_freq
        3
    """

    def __init__(self, callbacks: Iterable[keras.callbacks.Callback] = ()):
        pairs = (
            (callback, name)
            for callback in callbacks
            for kind, name in _FREQUENCIES
            if isinstance(callback, kind)
        )
        self._before = [
            (callback, name, getattr(callback, name))
            for callback, name in pairs
            if getattr(callback, name) != "epoch"
        ]
        for callback, name, _ in self._before:
            setattr(callback, name, NEVER)

    def end(self) -> None:
        """Restore the callbacks' frequencies. Further calls have no effect."""
        before = self._before
        self._before = []
        for callback, name, value in before:
            setattr(callback, name, value)


def _boards(callbacks: Iterable[keras.callbacks.Callback]) -> list[keras.callbacks.TensorBoard]:
    return [callback for callback in callbacks if isinstance(callback, keras.callbacks.TensorBoard)]


def _tables(callbacks: Iterable[keras.callbacks.Callback]) -> list[keras.callbacks.CSVLogger]:
    return [callback for callback in callbacks if isinstance(callback, keras.callbacks.CSVLogger)]


def _writers(boards: Iterable[keras.callbacks.TensorBoard]) -> list[Any]:
    """Return all summary writers, including the `own_writers` of tfdist's TensorBoard."""
    return [
        writer
        for board in boards
        for writer in (*log_writers(board).values(), *getattr(board, "own_writers", ()))
    ]


def _event_files(log_dir: str) -> list[str]:
    """Return the event files of the chief, relative to `log_dir`.

    Other files of `worker-0`, and the files of other workers, do not belong to these callbacks.
    """
    names = []
    for part, end in (("train", ""), ("validation", ""), ("worker-0", SPEED_SUFFIX)):
        directory = os.path.join(log_dir, part)
        if tf.io.gfile.isdir(directory):
            names += [
                os.path.join(part, name)
                for name in tf.io.gfile.listdir(directory)
                if name.startswith(_EVENTS) and name.endswith(end)
            ]
    return names


def _truncate(path: str, size: int) -> None:
    if not files_io.is_remote(path):
        os.truncate(path, size)
        return
    with tf.io.gfile.GFile(path, "rb") as file:
        content = file.read(size)
    files_io.write_whole(path, content)
