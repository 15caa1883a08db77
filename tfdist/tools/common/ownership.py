"""Processes of a command end with it, by whatever it ends: a lock on a file in their directory tells."""

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
    """Marks a directory's processes as this process': they end when it closes the file returned, or is killed."""
    file = open(os.path.join(directory, OWNER), "w", encoding="utf-8")  # noqa: SIM115  the caller closes it
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def end_with_owner(directory: str | os.PathLike) -> None:
    """Lets this process end, whatever it is doing, when the owner has ended, if by `kill -9`.

    A lock tells, and no pipe or process id: a launcher stands between the two.
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
            pass  # the owner has cleared up
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
