"""Ownership locks that end the child processes of a command when the command ends.

The command holds a lock on a file in the directory of its processes. The lock is released however
the command ends, even by `kill -9`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from typing import Any

OWNER = "owner.lock"


def own(directory: str | os.PathLike) -> Any:
    """Lock a directory, so that its processes end when this process releases it or is killed.

    Args:
        directory: Directory of the processes; the lock file `OWNER` is written to it.

    Returns:
        The locked file. Its processes end when the caller closes it.
    """
    # The caller closes the file.
    file = open(os.path.join(directory, OWNER), "w", encoding="utf-8")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def end_with_owner(directory: str | os.PathLike) -> None:
    """Kill this process when the owner of a directory has ended, even by `kill -9`.

    A thread watches the owner's lock, and kills this process whatever it is doing. A lock is used
    instead of a pipe or a process id, because a launcher stands between the two processes.

    Args:
        directory: Directory that the owner has locked with `own`.
    """

    def watch() -> None:
        try:
            with open(os.path.join(directory, OWNER), encoding="utf-8") as file:
                while True:
                    with contextlib.suppress(BlockingIOError):
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        break
                    time.sleep(0.5)
        except FileNotFoundError:
            pass  # the owner has removed the directory
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
