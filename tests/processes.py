"""Run commands in bounded processes; a failing test shows their logs.

No process outlives its `with` block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tests.forkserver import LEAN, Popen
from tests.forkserver import ROOT as ROOT

if TYPE_CHECKING:
    from tfdist import ClusterSpec


@dataclasses.dataclass
class Group:
    """Run the processes of one test, each in a process group of its own, with a log file."""

    directory: pathlib.Path
    processes: dict[str, subprocess.Popen] = dataclasses.field(default_factory=dict)

    def start(
        self, name: str, command: Sequence[str], stderr: int = subprocess.STDOUT, **environ: str
    ) -> subprocess.Popen:
        """Start a command; log its output to `<name>.log`, and errors unless `stderr` is given."""
        with open(self.directory / f"{name}.log", "w", encoding="utf-8") as log:
            self.processes[name] = Popen(
                command,
                stdout=log,
                stderr=stderr,
                env=environment(**environ),
                start_new_session=True,
            )
        return self.processes[name]

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def says(self, name: str, pattern: str, seconds: float) -> float:
        """Wait until a process' output matches a pattern, and return the time.

        Fail with all logs otherwise.
        """
        end = time.monotonic() + seconds
        while not re.search(pattern, self.log(name), re.DOTALL):
            ended = self.processes[name].poll() is not None and not re.search(
                pattern, self.log(name), re.DOTALL
            )
            if ended or time.monotonic() > end:
                raise AssertionError(
                    f"{name} did not say {pattern!r} within {seconds:g} s\n{self.logs()}"
                )
            time.sleep(0.05)
        return time.monotonic()

    def wait(self, seconds: float) -> dict[str, int]:
        """Return the exit codes of all processes; fail with their logs if one is late."""
        end = time.monotonic() + seconds
        for name, process in self.processes.items():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(
                    f"{name} is still running after {seconds:g} s\n{self.logs()}"
                ) from None
        return {name: process.returncode for name, process in self.processes.items()}

    def succeed(self, seconds: float) -> None:
        """Wait for all processes and fail with their logs unless each ended with 0."""
        codes = self.wait(seconds)
        assert not any(codes.values()), f"exit codes {codes}\n{self.logs()}"

    def logs(self, characters: int = 4000) -> str:
        return "\n".join(
            f"--- {name}.log\n{self.log(name)[-characters:]}" for name in self.processes
        )


@contextlib.contextmanager
def group(directory: pathlib.Path) -> Iterator[Group]:
    """Yield a group whose processes, and their children, are killed when the block ends."""
    members = Group(directory)
    try:
        yield members
    finally:
        for process in members.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def environment(**more: str) -> Mapping[str, str]:
    """Return this process' environment without the variables of launchers and schedulers."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("TF_CONFIG", "TFDIST_", "SLURM_", "OMPI_"))
    }
    return lean({**kept, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **more})


def lean(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment whose Python processes start quickly."""
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join([*filter(None, [environ.get("PYTHONPATH")]), str(LEAN)]),
    }


def run(command: Sequence[str], timeout: float = 120.0, **options) -> subprocess.CompletedProcess:
    """Run a command as `subprocess.run` does, for text; raise an error when it takes too long."""
    with Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def is_gone(pid: int | str) -> bool:
    """Return whether a process has ended, even if its parent has not waited for it."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def workers(members: Group, count: int, command: Sequence[str], **environ: str) -> None:
    """Start a cluster of workers on loopback, as `tasks` does."""
    from tfdist import ClusterSpec

    tasks(members, ClusterSpec.local(workers=count), command, **environ)


def tasks(members: Group, spec: ClusterSpec, command: Sequence[str], **environ: str) -> None:
    """Start all tasks of a cluster; `{index}` in the command is the task's index."""
    for task in spec.tasks:
        members.start(
            str(task).replace(":", "-"),
            [c.format(index=task.index) for c in command],
            TF_CONFIG=spec.for_task(task.type, task.index).to_tf_config(),
            **environ,
        )


PYTHON = sys.executable
