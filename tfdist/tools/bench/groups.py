"""A job becomes processes that measure when they are told to, and are waited for within bounds; none outlives its block."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tfdist.tools.audit import events
from tfdist.tools.bench.jobs import END, POLL, Job, order
from tfdist.tools.common.ownership import own
from tfdist.tools.common.process_logs import tail

_GRACE = 5.0  # seconds to end by themselves
_LINES = 12  # of a log, at most


class GroupError(Exception):
    """A group failed, or is late; the message says why.

    Attributes:
        code: Of the process that failed; None: it was late.
    """

    def __init__(self, text: str, code: int | None = None):
        super().__init__(text)
        self.code = code


class Group(contextlib.AbstractContextManager):
    """The processes of one job: those of a launch under multi_worker_mirrored, else one.

    Args:
        job: What they are to measure.
        timeout: Longest wait for an answer of all of them, in seconds.
    """

    def __init__(self, job: Job, timeout: float):
        self.job, self.timeout = job, timeout
        self._process: subprocess.Popen | None = None
        self._log = Path(job.directory) / "log"

    def __enter__(self) -> Group:
        os.makedirs(self.job.directory)
        path = Path(self.job.directory) / "job.json"
        path.write_text(self.job.to_json(), encoding="utf-8")
        self._owned = own(self.job.directory)
        child = ["-m", "tfdist.tools.bench.measure", str(path)]
        if self.job.workers > 1:
            threads = [] if self.job.threads is None else ["--threads", str(self.job.threads)]
            logs = [
                "--log-dir",
                os.path.join(self.job.directory, "launch"),
                "--hang-timeout",
                "0",
                "--grace",
                "1",
                "--color",
                "never",
            ]
            child = [
                "-m",
                "tfdist",
                "launch",
                "--workers",
                str(self.job.workers),
                *threads,
                *logs,
                "--",
                *child,
            ]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *child],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes, and waits until they have ended; a second time it does nothing."""
        process = self._process
        assert process is not None
        if self._owned.closed:
            return
        try:
            self.end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)  # who hangs in a step does not end so
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                if (
                    self.job.workers > 1 and process.poll() is None
                ):  # its tasks are in process groups of their own
                    process.send_signal(signal.SIGTERM)
                    process.wait(_GRACE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._owned.close()

    def ready(self) -> list[dict[str, Any]]:
        """Waits until all processes have built what they measure; what each says of it."""
        return self._answers(
            "ready", 1, "build and compile the model" if self.job.words else "start"
        )

    def measure(self, number: int, times: int) -> list[dict[str, Any]]:
        """Measures a case once; what each process found.

        Args:
            number: Of the case.
            times: How many measurements this group has done before.

        Raises:
            GroupError: A process ended, or did not answer in time.
        """
        order(self.job, number)
        return self._answers("measured", times + 1, "measure")

    def end(self) -> None:
        """Tells the processes that nothing is left to do; leaving the block waits for them."""
        order(self.job, END)

    def _answers(self, name: str, count: int, doing: str) -> list[dict[str, Any]]:
        """The `count`-th event of this name of each process."""
        assert self._process is not None
        end = time.monotonic() + self.timeout
        while True:
            ended = (
                self._process.poll() is not None
            )  # before the files are read: what was said before the end counts
            said = [
                [line for line in events.read(self.job.answers(rank)) if line["event"] == name]
                for rank in range(self.job.workers)
            ]
            missing = [rank for rank, lines in enumerate(said) if len(lines) < count]
            if not missing:
                return [lines[count - 1] for lines in said]
            if ended:
                raise GroupError(*self._cause())
            if time.monotonic() > end:
                who = ", ".join(f"worker {rank}" for rank in missing)
                raise GroupError(
                    f"{who} did not {doing} within {self.timeout:g} s; pass a longer --timeout, or fewer --steps{self._tail()}"
                )
            time.sleep(POLL)

    def _cause(self) -> tuple[str, int]:
        """Why the processes ended, with an exit code: the first mistake named as such, else what the launcher found, else the end of the log."""
        failed = [
            events.last(events.read(self.job.answers(rank)), "failed")
            for rank in range(self.job.workers)
        ]
        told = [line for line in failed if line]
        mistake = next((line for line in told if line["code"] != 1), None)
        if mistake or (told and self.job.workers == 1):
            first = mistake or told[0]
            return first["error"], first["code"]
        # Of several workers those that lost the one which failed first say so too: the launcher knows which it was.
        assert self._process is not None
        code = self._process.returncode
        root = re.search(
            r"^ROOT CAUSE: (.*)$",
            self._log.read_text(encoding="utf-8", errors="replace"),
            re.MULTILINE,
        )
        if root:
            return root[1], code
        how = (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        hint = ", as the system does where memory runs out" if code == -signal.SIGKILL else ""
        return f"its process {how}{hint}{self._tail()}", code

    def _tail(self) -> str:
        lines = tail(self._log, _LINES)
        return (
            "".join(f"\n    {line}" for line in ["; the end of its log:", *lines]) if lines else ""
        )
