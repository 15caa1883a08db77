"""The log files that callbacks write become part of a snapshot: what was written after it is undone when it is restored.

The files of TensorBoard and of CSVLogger are cut to the sizes that they had. Nothing here knows of models or steps.
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
OWN = ".speed"  # how the names of files end that tfdist's own callback writes beside Keras'
_FREQUENCIES = (
    (keras.callbacks.TensorBoard, "update_freq"),
    (keras.callbacks.ModelCheckpoint, "save_freq"),
)


def sizes(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, dict[str, int]]:
    """How far the logs are.

    Args:
        callbacks: Callbacks, of which Keras' TensorBoard and what is derived from it are looked at.

    Returns:
        For each `log_dir` the files of events in it, and their sizes in bytes, all that was logged so far included.
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
    """Makes the logs what they were; those of a `log_dir` that was not recorded stay as they are.

    Args:
        recorded: What `sizes` returned.
        callbacks: Those of the training that goes on, before they write.
    """
    for log_dir in {board.log_dir for board in _boards(callbacks)} & recorded.keys():
        for name in _event_files(log_dir):
            path, size = os.path.join(log_dir, name), recorded[log_dir].get(name)
            if size is None:
                tf.io.gfile.remove(path)
            elif size < tf.io.gfile.stat(path).length:
                _cut(path, size)


def close(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Lets TensorBoard begin new files: those of a fit that an error has ended are still open."""
    boards = _boards(callbacks)
    for writer in _writers(boards):
        writer.close()
    for board in boards:
        log_writers(board).clear()


def leave(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Lets summaries of others be as they were before TensorBoard began to train."""
    for board in reversed(_boards(callbacks)):
        leave_summaries(board)


def table_sizes(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, int]:
    """How far the tables of Keras' CSVLogger are: bytes, by file name."""
    found = {}
    for table in _tables(callbacks):
        if getattr(table, "csv_file", None) is not None and not table.csv_file.closed:
            table.csv_file.flush()
        found[table.filename] = (
            tf.io.gfile.stat(table.filename).length if tf.io.gfile.exists(table.filename) else 0
        )
    return found


def rewind_tables(
    recorded: Mapping[str, int], callbacks: Iterable[keras.callbacks.Callback]
) -> None:
    """Makes the tables what they were, and has those callbacks go on in them.

    Args:
        recorded: What `table_sizes` returned.
        callbacks: Those of the training that goes on, before they write.
    """
    for table in _tables(callbacks):
        if table.filename not in recorded or not tf.io.gfile.exists(table.filename):
            continue
        if recorded[table.filename] < tf.io.gfile.stat(table.filename).length:
            _cut(table.filename, recorded[table.filename])
        table.append = True  # it would begin anew, and lose what the epochs before have written


class Silence:
    """Callbacks that write after so many steps write nothing, until the end of the silence.

    Args:
        callbacks: Callbacks, of which TensorBoard and ModelCheckpoint are changed.

    Example:
        >>> board = keras.callbacks.TensorBoard(update_freq=3)
        >>> silence = Silence([board])
        >>> board.update_freq == NEVER
        True
        >>> silence.end()
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
        """Makes them as they were; once is enough."""
        before, self._before = self._before, []
        for callback, name, value in before:
            setattr(callback, name, value)


def _boards(callbacks: Iterable[keras.callbacks.Callback]) -> list[keras.callbacks.TensorBoard]:
    return [callback for callback in callbacks if isinstance(callback, keras.callbacks.TensorBoard)]


def _tables(callbacks: Iterable[keras.callbacks.Callback]) -> list[keras.callbacks.CSVLogger]:
    return [callback for callback in callbacks if isinstance(callback, keras.callbacks.CSVLogger)]


def _writers(boards: Iterable[keras.callbacks.TensorBoard]) -> list[Any]:
    """All their writers; those of tfdist's own are in its `own_writers`."""
    return [
        writer
        for board in boards
        for writer in (*log_writers(board).values(), *getattr(board, "own_writers", ()))
    ]


def _event_files(log_dir: str) -> list[str]:
    """Those of the chief: other files of `worker-0`, as those of other workers, are not its callbacks' to cut."""
    found = []
    for part, end in (("train", ""), ("validation", ""), ("worker-0", OWN)):
        directory = os.path.join(log_dir, part)
        if tf.io.gfile.isdir(directory):
            found += [
                os.path.join(part, name)
                for name in tf.io.gfile.listdir(directory)
                if name.startswith(_EVENTS) and name.endswith(end)
            ]
    return found


def _cut(path: str, size: int) -> None:
    if not files_io.is_remote(path):
        os.truncate(path, size)
        return
    with tf.io.gfile.GFile(path, "rb") as file:
        kept = file.read(size)
    files_io.write_whole(path, kept)
