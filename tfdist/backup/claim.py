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
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

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
        Superseded: A later attempt of the same launch is the writer.
        OSError: The claim cannot be written.

    Example:
        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> check(directory, claim(directory, "", 0))
    """
    held = holder(directory)
    if held and launch and held["launch"] == launch and held["attempt"] > attempt:
        raise Superseded(
            f"{directory}: attempt {attempt} of the launch {launch} may not write there any more: "
            f"attempt {held['attempt']} does, "
            f"{_described(held)}. End this process."
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
        why = getattr(error, "message", None) or str(error)
        raise OSError(
            f"{path}: cannot be written: {why}. Expected a directory with room that this process "
            "may write to."
        ) from error
    return token


def holder(directory: str) -> Mapping[str, Any] | None:
    """Return the claim of the current writer, or None.

    It is None if no process has claimed the directory, or if the file there is not a claim.
    """
    try:
        with tf.io.gfile.GFile(os.path.join(directory, NAME)) as file:
            held = json.loads(file.read())
        return (
            held if {"launch", "attempt", "token", "host", "pid", "time"} <= held.keys() else None
        )
    except (tf.errors.NotFoundError, tf.errors.FailedPreconditionError, ValueError, AttributeError):
        return None


def check(directory: str, token: str) -> None:
    """Raise Superseded unless the process with this token is still the writer.

    Raises:
        Superseded: Another process is the writer, or the claim was removed.
    """
    held = holder(directory)
    if held is None:
        raise Superseded(
            f"{directory}: this process was its writer, and now nobody is: {NAME} was removed. "
            "Only one training may use a directory."
        )
    if held["token"] != token:
        raise Superseded(
            f"{directory}: this process was its writer, and now another is: {_described(held)}. "
            "Only one training may use a directory: end this "
            "process, or name another backup_dir."
        )


def _described(held: Mapping[str, Any]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(held["time"]))
    return f"process {held['pid']} on {held['host']}, since {since}"
