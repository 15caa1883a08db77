"""Guardian process: kills the child processes of a command that dies, even by `kill -9`.

The guardian is a small process in a session of its own that reads a pipe. The command, such as the
launcher, writes the process groups that are alive into it. The end of the pipe means that the
command is gone. The guardian then kills the groups that are left.
"""

import contextlib
import os
import signal
import subprocess
import sys


class Guardian:
    """A guardian process that exists as long as the command that creates it.

    Example:
        >>> with Guardian() as guardian:
        ...     task = subprocess.Popen(["sleep", "60"], start_new_session=True)
        ...     guardian.add(task.pid)
        >>> task.wait()  # leaving the block ends the groups that were not removed
        -9
    """

    def __init__(self):
        from tfdist.runtime.launch_protocol import environment  # not there with -S

        # -I -S: without site-packages it starts in some 10 ms and does not depend on user code.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__)],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # it outlives the command: no reader may wait for it
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # out of reach of Ctrl-C and of a kill of the command's group
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
        """Register process group `pgid`, which dies with this process from now on."""
        self._write(f"+{pgid}\n")

    def remove(self, pgid: int) -> None:
        """Unregister process group `pgid`, which has ended.

        The system may give its number to another group.
        """
        self._write(f"-{pgid}\n")

    def _write(self, line: str) -> None:
        # This process continues without the guardian if that was killed.
        with contextlib.suppress(BrokenPipeError):
            self._pipe.write(line.encode())
            self._pipe.flush()


def kill_group(pgid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to every process of a group; ignore a group that does not exist.

    Args:
        pgid: Number of the group, which is the process id of its leader.
        number: Signal number, default SIGKILL.
    """
    # macOS returns EPERM for a group of zombies only.
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
