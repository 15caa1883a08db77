"""Single-writer lock of a snapshot directory: the last process to claim it may write.

A process that was given up may still run, for example behind a network partition. It must not
overwrite the work of its successor.

On a disk, the claim is a file that each writer replaces. In an object store that can create a file
only if it does not exist, claims are numbered, and the highest number is the writer's: of several
processes that claim the next number, exactly one succeeds, and the others judge its claim.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import uuid
import zlib
from collections.abc import Mapping
from typing import Any

from absl import logging

from tfdist.runtime.launch_protocol import CONFIGURATION_CODE
from tfdist.storage import files
from tfdist.storage.store_errors import UnusableStore

__all__ = ["Superseded", "holder"]

NAME = "writer.json"
NUMBERED = re.compile(r"writer-(\d+)\.json")


class Superseded(RuntimeError):
    """Raised when another process has become the writer of the directory.

    A restart would only take the directory away from that process.
    """

    exit_code = CONFIGURATION_CODE


def claim(directory: str, launch: str, attempt: int) -> str:
    """Make this process the writer of a directory.

    Args:
        directory: Directory of the snapshots; created if it does not exist.
        launch: Name of the launch that this process belongs to; "" if there is none.
        attempt: Attempt of that launch.

    Returns:
        The token by which `check` recognizes the writer.

    Raises:
        Superseded: If a later attempt of the same launch is the writer.
        OSError: If the claim cannot be written.

    Example:
        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> check(directory, claim(directory, "", 0))
    """
    token = uuid.uuid4().hex
    try:
        files.make_dirs(directory)
        while not _claim_once(directory, launch, attempt, token):
            pass  # another process was faster: it may be a later attempt
    except (Superseded, UnusableStore):
        raise
    except OSError as error:
        raise OSError(
            f"{os.path.join(directory, NAME)}: cannot be written: {error.strerror or error}. "
            "Expected a writable directory with free space."
        ) from error
    return token


def _claim_once(directory: str, launch: str, attempt: int, token: str) -> bool:
    """Claim a directory, and return whether no other process was faster."""
    number = max(_numbers(directory), default=0)
    owner = holder(directory)
    if owner and launch and owner["launch"] == launch and owner["attempt"] > attempt:
        raise Superseded(
            f"{directory}: attempt {attempt} of the launch {launch} may no longer write there, "
            f"because attempt {owner['attempt']} does ({_describe(owner)}). End this process."
        )
    facts = {
        "launch": launch,
        "attempt": attempt,
        "token": token,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
    }
    facts["crc32"] = _checksum(facts)
    content = json.dumps(facts).encode()
    if not files.can_create(directory):
        files.write_whole(os.path.join(directory, NAME), content)
        return True
    try:
        files.create(_path(directory, number + 1), content)
    except FileExistsError:
        return False
    numbers = _numbers(directory)
    for older in numbers:
        if older < number:  # the one before stays, so that numbers never begin again
            files.remove(_path(directory, older))
    # False if this process was so slow that its number had been used and removed already.
    return numbers[-1] == number + 1


def names(directory: str) -> list[str]:
    """Return the names of a directory's claims: one on a disk, numbered ones in a store.

    Args:
        directory: Directory of the snapshots.
    """
    return [NAME, *(os.path.basename(_path(directory, n)) for n in _numbers(directory))]


def _numbers(directory: str) -> list[int]:
    """Return the numbers of the claims in an object store; none on a disk."""
    if not files.can_create(directory):
        return []
    try:
        listed = files.list_dir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in listed if (match := NUMBERED.fullmatch(name)))


def _path(directory: str, number: int) -> str:
    return os.path.join(directory, f"writer-{number:06d}.json")


def holder(directory: str) -> Mapping[str, Any] | None:
    """Return the claim of the current writer, or None.

    It is None if no process has claimed the directory, or if the file there is no claim, or
    damaged.
    """
    path = os.path.join(directory, NAME)
    if files.can_create(directory):
        numbers = _numbers(directory)
        if not numbers:
            return None
        path = _path(directory, numbers[-1])
    try:
        owner = json.loads(files.read(path))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnusableStore):
            raise
        owner = None
    if isinstance(owner, dict) and owner.pop("crc32", None) == _checksum(owner):
        return owner
    logging.warning("%s: damaged: it no longer says which process is the writer.", path)
    return None


def check(directory: str, token: str) -> None:
    """Raise Superseded unless the process with this token is still the writer.

    Args:
        directory: Directory of the snapshots.
        token: Token of the process's claim.

    Raises:
        Superseded: If another process is the writer, or the claim was removed.
    """
    owner = holder(directory)
    if owner is None:
        raise Superseded(
            f"{directory}: this process is no longer its writer, because its claim, {NAME}, was "
            "removed or damaged. Only one training may use a directory."
        )
    if owner["token"] != token:
        raise Superseded(
            f"{directory}: this process is no longer its writer; another one is: "
            f"{_describe(owner)}. Only one training may use a directory: end this process, or "
            "name another backup_dir."
        )


def _checksum(facts: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _describe(owner: Mapping[str, Any]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["time"]))
    return f"process {owner['pid']} on {owner['host']}, since {since}"
