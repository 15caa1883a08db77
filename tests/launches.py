"""Run `tfdist launch` in a directory of its own, with processes that bear a mark."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import uuid

from tests.forkserver import OFF, Popen, environ_of
from tests.processes import ROOT, lean

TIMEOUT_S = 120  # seconds for any launch here; each takes one to five where nothing else runs

# What every script begins with. A victim fails as TensorFlow does when a peer is gone.
PRELUDE = """\
import json, os, signal, subprocess, sys, time
me = os.environ["TFDIST_TASK"]
class UnavailableError(Exception): pass
def lose_peers():
    time.sleep(0.4)
    raise UnavailableError("Graph execution error:\\n\\nCollective ops is aborted by: Socket closed")
def ready(): open(f"{me}.ready", "w").close()
"""  # noqa: E501


USES_TENSORFLOW = r"import (tensorflow|keras|tfdist)\b|from (keras|tfdist) import"


class Launch:
    """Run `tfdist launch` in a directory of its own; its processes' environments bear a mark."""

    def __init__(self, directory, bound=TIMEOUT_S):
        self.directory = directory
        self.bound = bound
        self.mark = f"LAUNCH_TEST_MARK={uuid.uuid4()}"
        self._process = None

    def start(self, *flags, script=None, command=("task.py",), environ=None, prefix=()):
        fresh = {}
        if script is not None:
            (self.directory / "task.py").write_text(PRELUDE + script)
            if not re.search(
                USES_TENSORFLOW, script
            ):  # then a process starts more quickly than a large one forks
                fresh = {OFF: "1"}
        name, _, value = self.mark.partition("=")
        self._process = Popen(
            [*prefix, sys.executable, "-m", "tfdist", "launch", *flags, "--", *command],
            cwd=self.directory,
            env=lean(
                {**os.environ, "PYTHONPATH": str(ROOT), name: value, **fresh, **(environ or {})}
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a process group of its own, to be killed as a whole
        )
        return self._process

    def finish(self):
        """Wait for the end; return exit code, output and errors."""
        out, err = self._process.communicate(timeout=self.bound)
        return self._process.returncode, out, err

    def run(self, *flags, **options):
        self.start(*flags, **options)
        return self.finish()

    def wait_for(self, *names):
        deadline = time.monotonic() + self.bound
        while not all((self.directory / name).exists() for name in names):
            assert time.monotonic() < deadline, f"waited for {names}"
            time.sleep(0.02)

    def log(self, task):
        return (self.directory / "runs" / "latest" / f"{task}.log").read_text()

    def living(self, tasks=False):
        """Return process ids of launcher, guardian, tasks and children; or of tasks only."""
        name, _, value = self.mark.partition("=")
        pids = []
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            environ = environ_of(entry.name)
            if environ.get(name) == value and (not tasks or "TFDIST_TASK" in environ):
                pids.append(int(entry.name))
        return pids

    def pid_of(self, task):
        """Return the process id of a task."""
        return next(
            pid for pid in self.living(tasks=True) if environ_of(pid).get("TFDIST_TASK") == task
        )

    def wait_for_nobody(self, seconds=5.0):
        deadline = time.monotonic() + seconds
        while (left := self.living()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def check_nobody_left(self, seconds=5.0):
        """Check that all processes end; kill those that do not."""
        left = self.wait_for_nobody(seconds)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"processes left behind: {left}"
