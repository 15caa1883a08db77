"""Paths become absolute names, and files appear whole or not at all; what they hold is not known here."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
import uuid
from collections.abc import Iterator

import tensorflow as tf

# What TensorFlow and Python raise where a place cannot be written: no permission, no directory, a file in its way, a full disk.
CANNOT_WRITE = (
    OSError,
    tf.errors.PermissionDeniedError,
    tf.errors.NotFoundError,
    tf.errors.FailedPreconditionError,
    tf.errors.UnimplementedError,
    tf.errors.ResourceExhaustedError,
    tf.errors.InvalidArgumentError,
)


def is_remote(path: str) -> bool:
    """Whether a path names another file system: "gs://bucket/file"."""
    return "://" in path


def absolute(path: str | os.PathLike) -> str:
    """The path that means the same in other processes, whose working directory may be another one.

    Args:
        path: A path; one with "://" stays as it is.

    Returns:
        The absolute path.

    Example:
        >>> absolute("gs://bucket/a"), absolute("/data/../data/a")
        ('gs://bucket/a', '/data/a')
    """
    path = os.fspath(path)
    return path if is_remote(path) else os.path.abspath(os.path.expanduser(path))


def temporary(path: str) -> str:
    """A name beside `path` that no other process uses, for a file that is renamed to `path` when it is whole."""
    return f"{path}.{uuid.uuid4().hex[:12]}.tmp"


def write_whole(path: str, content: bytes) -> None:
    """Writes a file, so that others see it whole or not at all.

    Args:
        path: Where to; what is there is replaced.
        content: All of it.

    Raises:
        OSError: Or an error of `CANNOT_WRITE`, where that place cannot be written.
    """
    part = temporary(path)
    try:
        with tf.io.gfile.GFile(part, "wb") as file:
            file.write(content)
        tf.io.gfile.rename(part, path, overwrite=True)
    except BaseException:
        remove(part)
        raise


def remove(path: str) -> None:
    """Removes a file, if it is there and can be removed."""
    with contextlib.suppress(OSError, tf.errors.OpError):
        tf.io.gfile.remove(path)


@contextlib.contextmanager
def locked(path: str | os.PathLike, timeout: float, purpose: str) -> Iterator[None]:
    """Holds the lock of a local file, which the system frees even when its holder is killed.

    Args:
        path: The file; it is made, and stays.
        timeout: Seconds to wait for another process that holds it.
        purpose: What the lock is held for, "preparing mnist": for the message of others.

    Raises:
        TimeoutError: When another process has held it all that time; it is named.
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
                        f"Waited {timeout:g} s for {file.read() or 'another process'}, which is {purpose} and holds the "
                        f"lock {os.fspath(path)}. See whether it still works; end it and start again if it hangs."
                    ) from None
                time.sleep(0.05)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
