"""Single-writer lock of a snapshot directory: the last process to claim it may write.

A process that was given up may still run, for example behind a network partition. It must not
overwrite the work of its successor.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
import zlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from tfdist.runtime.launch_protocol import CONFIGURATION_CODE

NAME = "writer.json"


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
    owner = holder(directory)
    if owner and launch and owner["launch"] == launch and owner["attempt"] > attempt:
        raise Superseded(
            f"{directory}: attempt {attempt} of the launch {launch} may no longer write there, "
            f"because attempt {owner['attempt']} does ({_describe(owner)}). End this process."
        )
    token = uuid.uuid4().hex
    facts = {
        "launch": launch,
        "attempt": attempt,
        "token": token,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
    }
    facts["crc32"] = _checksum(facts)
    path = os.path.join(directory, NAME)
    part = f"{path}.{token}.part"
    try:
        tf.io.gfile.makedirs(directory)
        with tf.io.gfile.GFile(part, "w") as file:
            file.write(json.dumps(facts))
        tf.io.gfile.rename(part, path, overwrite=True)
    except (OSError, tf.errors.OpError) as error:
        with contextlib.suppress(OSError, tf.errors.OpError):
            tf.io.gfile.remove(part)
        reason = getattr(error, "message", None) or str(error)
        raise OSError(
            f"{path}: cannot be written: {reason}. Expected a writable directory with free space."
        ) from error
    return token


def holder(directory: str) -> Mapping[str, Any] | None:
    """Return the claim of the current writer, or None.

    It is None if no process has claimed the directory, or if the file there is no claim, or
    damaged.
    """
    try:
        with tf.io.gfile.GFile(os.path.join(directory, NAME), "rb") as file:
            owner = json.loads(file.read())
    except (tf.errors.NotFoundError, tf.errors.FailedPreconditionError):
        return None
    except (ValueError, RecursionError):
        owner = None
    if isinstance(owner, dict) and owner.pop("crc32", None) == _checksum(owner):
        return owner
    logging.warning(
        "%s: damaged: it no longer says which process is the writer.",
        os.path.join(directory, NAME),
    )
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
            f"{directory}: this process is no longer its writer, because {NAME} was removed or "
            "damaged. Only one training may use a directory."
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
