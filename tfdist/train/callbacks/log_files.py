"""Rewind the log files of Keras callbacks to a snapshot when it is restored.

The event files of TensorBoard and the tables of CSVLogger are truncated to the sizes that the
snapshot recorded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from tfdist.data import files_io
from tfdist.keras_compat import leave_summaries, log_writers
from tfdist.storage import files

NEVER = 2**62  # steps
_EVENTS = "events.out.tfevents."
# Suffix of the event files that tfdist's TensorBoard callback adds to Keras' own.
SPEED_SUFFIX = ".speed"
# Directories of the chief's event files, and how the names of the files end.
_DIRECTORIES = (("train", ""), ("validation", ""), ("worker-0", SPEED_SUFFIX))
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
    for board in boards:
        if mirror := getattr(board, "mirror", None):
            mirror.push()
    return {
        _place(board): {
            name: files.stat(os.path.join(board.log_dir, name)).size
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
    boards = {_place(board): board for board in _boards(callbacks)}
    for place in boards.keys() & recorded.keys():
        log_dir = boards[place].log_dir
        mirror = getattr(boards[place], "mirror", None)
        if mirror is not None:
            mirror.pull(*(directory for directory, _ in _DIRECTORIES))
        for name in _event_files(log_dir):
            path = os.path.join(log_dir, name)
            size = recorded[place].get(name)
            if size is None:
                files.remove(path)
            elif size < files.stat(path).size:
                _truncate(path, size)
        if mirror is not None:
            mirror.push()


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
    """Restore the default summary settings that TensorBoard changed when training began.

    Event files of a fit that failed are uploaded, if they belong to an object store.
    """
    for board in reversed(_boards(callbacks)):
        leave_summaries(board)
        if mirror := getattr(board, "mirror", None):
            for writer in _writers([board]):
                with contextlib.suppress(RuntimeError):  # it is closed
                    writer.flush()
            mirror.push()


def check_places(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Raise ValueError if TensorFlow is to write event files where it cannot.

    Args:
        callbacks: Callbacks of a fit.

    Raises:
        ValueError: If a TensorBoard callback has such a `log_dir`.
    """
    for board in _boards(callbacks):
        place = os.fspath(board.log_dir)
        if not files.tensorflow_writes(place):
            raise ValueError(
                f"TensorBoard(log_dir={place!r}): TensorFlow cannot write event files there. Use "
                "tfdist.TensorBoard, which writes them to a local directory and uploads them."
            )
        if not getattr(board, "follows", False):
            files.make_writable(place, "TensorBoard(log_dir=...)")


def table_sizes(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, int]:
    """Return the sizes in bytes of the CSVLogger tables, by file name."""
    sizes = {}
    for table in _tables(callbacks):
        if getattr(table, "csv_file", None) is not None and not table.csv_file.closed:
            table.csv_file.flush()
        sizes[table.filename] = (
            files.stat(table.filename).size if files.exists(table.filename) else 0
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
        if table.filename not in recorded or not files.exists(table.filename):
            continue
        if recorded[table.filename] < files.stat(table.filename).size:
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


def _place(board: keras.callbacks.TensorBoard) -> str:
    """Return the directory of a callback's logs as the user named it."""
    mirror = getattr(board, "mirror", None)
    return board.log_dir if mirror is None else mirror.url


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
    for part, end in _DIRECTORIES:
        directory = os.path.join(log_dir, part)
        if files.is_dir(directory):
            names += [
                os.path.join(part, name)
                for name in files.list_dir(directory)
                if name.startswith(_EVENTS) and name.endswith(end)
            ]
    return names


def _truncate(path: str, size: int) -> None:
    if not files_io.is_remote(path):
        os.truncate(path, size)
        return
    with files.open_read(path) as file:
        content = file.read(size)
    files_io.write_whole(path, content)
