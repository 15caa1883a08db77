"""Write tests of the directories that training will use.

A test writes as a snapshot is written. Existing files in the directory stay as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from tfdist.runtime.formatting import duration, format_bytes
from tfdist.tools.doctor.check_results import HOST, Check, graded

# Attempts to write: the doctor of another host may remove the directory that it has created there.
TRIES = 5
DIRECTORY_S = 20.0  # seconds for the test of one directory; a network disk may hang forever
# Bytes free: warns below, fails below.
LITTLE = 2 << 30
NOTHING = 100 << 20
# Seconds between this host's clock and the clock of the file server: warns above, fails above.
SKEW_S = 5.0
WRONG_S = 300.0
_PREFIX = ".tfdist-doctor-"


@dataclasses.dataclass(frozen=True)
class WriteTest:
    """Result of a write test of a directory.

    Attributes:
        path: Directory, as it was given.
        error: Step that failed and the reason; "" if none failed.
        free: Free bytes there; None if unknown.
        total: Size of the disk in bytes; None if unknown.
        skew: Seconds by which the clock of its files is ahead of this host's; None if unknown.
    """

    path: str
    error: str = ""
    free: int | None = None
    total: int | None = None
    skew: float | None = None


def is_remote(path: str) -> bool:
    """Return whether only TensorFlow can write to a path, such as "gs://bucket/runs"."""
    return "://" in path


def token_name(token: str | None = None) -> str:
    """Return the name of a file of the doctor, for a token or for a new random one.

    Example:
        >>> token_name("ab")
        '.tfdist-doctor-ab'
    """
    return _PREFIX + (token or uuid.uuid4().hex)


def is_token(text: object) -> bool:
    """Return whether a value is a valid token, which can be part of the name of such a file.

    A valid token cannot lead to another directory.

    Example:
        >>> is_token("0" * 32), is_token("../../etc/passwd"), is_token(7)
        (True, False, False)
    """
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{32}", text) is not None


def look(paths: Sequence[str], timeout: float = DIRECTORY_S) -> list[WriteTest]:
    """Test directories of this host's file systems, all at once.

    Args:
        paths: Directories, which need not exist.
        timeout: Seconds after which a directory that does not answer is given up, default 20.

    Returns:
        Results in the order of `paths`.
    """
    results: dict[str, WriteTest] = {}
    threads = [
        threading.Thread(target=lambda p=path: results.update({p: try_directory(p)}), daemon=True)
        for path in paths
    ]  # type: ignore[misc]
    end = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    late = f"no answer within {timeout:g} s: its file server may be gone"
    return [results.get(path, WriteTest(path, error=late)) for path in paths]


def try_directory(path: str) -> WriteTest:
    """Test that a file in a directory can be written, flushed, replaced by renaming and read.

    The file is removed afterwards. A missing directory is created, and removed again.

    Example:
        >>> import tempfile
        >>> try_directory(tempfile.mkdtemp()).error
        ''
    """
    made = missing(path)
    step = "making the directory"
    target = os.path.join(path, token_name())
    part = f"{target}.part"
    try:
        for left in reversed(range(TRIES)):
            step = "making the directory"
            os.makedirs(path, exist_ok=True)
            step = "writing a file"
            try:
                _write(target, "old")
                break
            except FileNotFoundError:
                if not left:
                    raise
        _write(part, "new")
        skew = os.stat(part).st_mtime - time.time()
        step = "renaming a file over another one"
        os.replace(part, target)
        step = "flushing the directory"
        _flush(path)
        step = "reading it back"
        if (text := Path(target).read_text(encoding="utf-8")) != "new":
            return WriteTest(
                path,
                error="renaming a file over another one: expected the new one there, "
                f"read {text[:20]!r}",
            )
        usage = shutil.disk_usage(path)
        return WriteTest(path, free=usage.free, total=usage.total, skew=skew)
    except OSError as error:
        return WriteTest(path, error=f"{step}: {error.strerror}")
    finally:
        for name in (target, part):
            with contextlib.suppress(OSError):
                os.remove(name)
        for directory in made:
            with contextlib.suppress(OSError):  # somebody else writes there already
                os.rmdir(directory)


def check_directory(result: WriteTest) -> Check:
    """Check whether training can write to a directory.

    Args:
        result: Result of `try_directory`.
    """
    name = "directory"
    if result.error:
        return graded(
            HOST,
            name,
            f"{result.path}: {result.error}",
            f"{_remedy(result.error)}, or choose another directory",
            fails=True,
        )
    if result.free is None or result.total is None:
        return graded(HOST, name, f"{result.path}: written, renamed and read through TensorFlow")
    description = (
        f"{result.path}: {format_bytes(result.free)} free of {format_bytes(result.total)}; "
        "renaming is atomic"
    )
    skew = result.skew or 0.0
    if abs(skew) > SKEW_S:
        description += (
            f"; its clock is {duration(abs(skew))} "
            f"{'ahead of' if skew > 0 else 'behind'} this host's"
        )
    few = result.free < LITTLE
    remedy = (
        "free some space there: each snapshot is written beside the one before it"
        if few
        else "set the clocks: timedatectl set-ntp true"
    )
    return graded(
        HOST,
        name,
        description,
        remedy,
        fails=result.free < NOTHING or abs(skew) > WRONG_S,
        warns=few or abs(skew) > SKEW_S,
    )


def _remedy(error: str) -> str:
    for text, remedy in (
        ("Permission denied", "give this user the right to write there"),
        ("Read-only", "mount it for writing"),
        ("No space", "free some space there"),
        ("quota", "free some of your quota"),
        ("Not a directory", "a file is in its way: move it"),
        ("File exists", "a file is in its way: move it"),
        ("no answer", "see whether it is mounted, and its server runs"),
        ("renaming", "its file system cannot replace a file atomically"),
    ):
        if text.lower() in error.lower():
            return remedy
    return "make sure that it exists and can be written"


def missing(path: str) -> list[str]:
    """Return the directories that must be created for a path, the innermost first."""
    absent = []
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        absent.append(path)
        path = os.path.dirname(path)
    return absent


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
