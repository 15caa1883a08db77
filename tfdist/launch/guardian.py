"""The launcher's death, however sudden, becomes the death of its tasks; a living launcher is never disturbed.

The guardian is a small process, in a session of its own, that reads a pipe. The launcher writes which process groups
live. The pipe's end means that the launcher is gone, if by `kill -9`, and the guardian kills the groups that are left.
"""

import contextlib
import os
import signal
import subprocess
import sys


class Guardian:
    """Keeps a guardian process for the life of the launcher.

    Example:
        >>> with Guard() as guard:
        ...     task = subprocess.Popen(["sleep", "60"], start_new_session=True)
        ...     guard.add(task.pid)
        >>> task.wait()  # leaving the block ends the groups that were not removed
        -9
    """

    def __init__(self):
        # -I -S: no site-packages, so that it starts in some 10 ms and depends on nothing of the user's.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # it outlives the launcher: no reader shall wait for it
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # out of reach of Ctrl-C and of a kill of the launcher's group
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self._pipe.close()
        self._process.wait()

    def add(self, pgid: int) -> None:
        """From now on process group `pgid` dies with the launcher."""
        self._write(f"+{pgid}\n")

    def remove(self, pgid: int) -> None:
        """Process group `pgid` is over: its number may come to belong to somebody else."""
        self._write(f"-{pgid}\n")

    def _write(self, line: str) -> None:
        # Somebody killed the guardian: the launcher can still do its own work.
        with contextlib.suppress(BrokenPipeError):
            self._pipe.write(line.encode())
            self._pipe.flush()


def kill_group(pgid: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal to every process of a group; a group that is gone is fine.

    Args:
        pgid: The group's number: the process id of the task that leads it.
        number: The signal.
    """
    # macOS answers EPERM for a group of zombies only.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def _watch(pipe) -> None:
    groups: set[int] = set()
    for line in pipe:
        (groups.add if line.startswith(b"+") else groups.discard)(int(line[1:]))
    for pgid in groups:
        kill_group(pgid)


if __name__ == "__main__":
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, signal.SIG_IGN)
    _watch(sys.stdin.buffer)
