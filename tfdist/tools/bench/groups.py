"""Process groups that run benchmark jobs, with timeouts and guaranteed cleanup.

No process of a group outlives its `with` block.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from tfdist.runtime.subprocesses import Children, exit_reason
from tfdist.tools.bench.jobs import END, POLL_S, Job, order
from tfdist.tools.common import events
from tfdist.tools.common.process_logs import end_of

_GRACE_S = 5.0  # seconds that processes get to exit by themselves


class GroupError(Exception):
    """Failure or timeout of a process group; the message says why.

    Attributes:
        code: Exit code of the process that failed. None: the group timed out.
    """

    def __init__(self, text: str, code: int | None = None):
        super().__init__(text)
        self.code = code


class Group(contextlib.AbstractContextManager):
    """Processes of one benchmark job.

    They are the workers of a launch under multi_worker_mirrored, and otherwise one process.

    Args:
        job: Job to measure.
        timeout: Longest wait for an answer of all processes, in seconds.
    """

    def __init__(self, job: Job, timeout: float):
        self.job = job
        self.timeout = timeout
        self._process: subprocess.Popen | None = None
        self._log = Path(job.directory) / "log"
        # Tasks are in process groups of their own, so a launcher must have the time to stop them.
        self._children = Children(grace=_GRACE_S if job.workers > 1 else 0.0)

    def __enter__(self) -> Group:
        os.makedirs(self.job.directory)
        path = Path(self.job.directory) / "job.json"
        path.write_text(self.job.to_json(), encoding="utf-8")
        words = ["tfdist.tools.bench.measure", str(path)]
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
            launch = ["tfdist", "launch", "--workers", str(self.job.workers), *threads, *logs]
            words = [*launch, "--", "-m", *words]
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._children)
            self._process = self._children.start(words, self._log)
            stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop the processes and wait until they have exited. Safe to call repeatedly."""
        assert self._process is not None
        try:
            if self._process.poll() is None:
                self.end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(
                        _GRACE_S
                    )  # a process that hangs in a step does not exit here
        finally:
            self._children.close()

    def ready(self) -> list[dict[str, Any]]:
        """Wait until all processes have built what they measure.

        Returns:
            Facts from each process, by rank.

        Raises:
            GroupError: If a process exited, or did not answer in time.
        """
        return self._answers(
            "ready", 1, "build and compile the model" if self.job.words else "start"
        )

    def measure(self, number: int, times: int) -> list[dict[str, Any]]:
        """Measure a case once.

        Args:
            number: Index of the case.
            times: Number of measurements that this group has done before.

        Returns:
            Measurement of each process, by rank.

        Raises:
            GroupError: If a process exited, or did not answer in time.
        """
        order(self.job, number)
        return self._answers("measured", times + 1, "measure")

    def end(self) -> None:
        """Tell the processes that no orders are left. Leaving the block waits for them."""
        order(self.job, END)

    def _answers(self, name: str, count: int, doing: str) -> list[dict[str, Any]]:
        """Wait for the `count`-th event with this name from each process.

        Args:
            name: Name of the event.
            count: Number of such events to wait for, from 1.
            doing: Verb phrase for the error message of a timeout.

        Returns:
            The event of each process, by rank.

        Raises:
            GroupError: If a process exited, or did not answer in time.
        """
        assert self._process is not None
        end = time.monotonic() + self.timeout
        while True:
            # Poll before the files are read, so that answers from just before the exit count.
            ended = self._process.poll() is not None
            answers = [
                events.named(self.job.answers(rank), name) for rank in range(self.job.workers)
            ]
            missing = [rank for rank, answered in enumerate(answers) if len(answered) < count]
            if not missing:
                return [answered[count - 1] for answered in answers]
            if ended:
                raise GroupError(*self._cause())
            if time.monotonic() > end:
                who = ", ".join(f"worker {rank}" for rank in missing)
                raise GroupError(
                    f"{who} did not {doing} within {self.timeout:g} s; pass a longer --timeout, "
                    f"or fewer --steps.{end_of(self._log)}"
                )
            time.sleep(POLL_S)

    def _cause(self) -> tuple[str, int]:
        """Return why the processes exited, with an exit code.

        The reason is the first configuration error, else the launcher's root cause, else the end of
        the log.
        """
        failures = [
            failure
            for rank in range(self.job.workers)
            if (failure := events.last(events.read(self.job.answers(rank)), "failed"))
        ]
        mistake = next((failure for failure in failures if failure["code"] != 1), None)
        if mistake or (failures and self.job.workers == 1):
            first = mistake or failures[0]
            return first["error"], first["code"]
        # Workers that lost their peer fail too. Only the launcher knows which worker failed first.
        assert self._process is not None
        code = self._process.returncode
        root = re.search(
            r"^ROOT CAUSE: (.*)$",
            self._log.read_text(encoding="utf-8", errors="replace"),
            re.MULTILINE,
        )
        if root:
            return root[1], code
        return f"its process {exit_reason(code)}.{end_of(self._log)}", code
