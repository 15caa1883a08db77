"""File utilities: absolute paths, atomic writes and file locks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator

import tensorflow as tf

from tfdist.storage import files
from tfdist.storage.store_errors import UnusableStore

# Errors of TensorFlow, Python and object stores if a path cannot be written: no permission, no
# directory, a file in the way, a full disk.
CANNOT_WRITE = (
    OSError,
    UnusableStore,
    tf.errors.PermissionDeniedError,
    tf.errors.NotFoundError,
    tf.errors.FailedPreconditionError,
    tf.errors.UnimplementedError,
    tf.errors.ResourceExhaustedError,
    tf.errors.InvalidArgumentError,
)


def is_remote(path: str) -> bool:
    """Return whether a path names a remote file system: "gs://bucket/file"."""
    return "://" in path


def absolute(path: str | os.PathLike) -> str:
    """Return the absolute path, which means the same in every process.

    Other processes may have another working directory.

    Args:
        path: A path. A path with "://" is returned unchanged.

    Returns:
        The absolute path.

    Example:
        >>> absolute("gs://bucket/a"), absolute("/data/../data/a")
        ('gs://bucket/a', '/data/a')
    """
    path = os.fspath(path)
    return path if is_remote(path) else os.path.abspath(os.path.expanduser(path))


def write_whole(path: str, content: bytes) -> None:
    """Write a file atomically: other processes see the whole file or none.

    Args:
        path: Path of the file; an existing file is replaced.
        content: Complete content of the file.

    Raises:
        OSError: If the path cannot be written; or another error of `CANNOT_WRITE`.
    """
    files.write_whole(path, content)


def remove(path: str) -> None:
    """Remove a file if it exists and can be removed."""
    files.remove(path)


@contextlib.contextmanager
def locked(path: str | os.PathLike, timeout: float, purpose: str) -> Iterator[None]:
    """Hold the lock of a local file.

    The operating system frees the lock even when the process that holds it is killed.

    Args:
        path: The file; it is created, and is not removed.
        timeout: Seconds to wait for another process that holds the lock.
        purpose: Purpose of the lock, such as "preparing mnist"; other processes show it in their
            error message.

    Raises:
        TimeoutError: If another process has held the lock for the whole timeout. The message names
            that process.
    """
    deadline = time.monotonic() + timeout
    with open(path, "a+", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise TimeoutError(
                        f"Waited {timeout:g} s for {file.read() or 'another process'}, which is "
                        f"{purpose} and holds the lock {os.fspath(path)}. If that process hangs, "
                        "end it and start again."
                    ) from None
                time.sleep(0.05)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
