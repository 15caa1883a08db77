"""Worker processes of an audit: start, commands, bounded waits and cleanup."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterable
from typing import Any

from tfdist.runtime.subprocesses import Children, exit_reason
from tfdist.tools.audit import row_records
from tfdist.tools.audit.settings import Settings
from tfdist.tools.common import events
from tfdist.tools.common.process_logs import end_of

_POLL_S = 0.05  # seconds


class WorkerError(Exception):
    """A worker failed or did not report in time.

    Attributes:
        code: Exit code for the audit.
    """

    def __init__(self, text: str, code: int = 1):
        super().__init__(text)
        self.code = code


class Workers(contextlib.AbstractContextManager):
    """The worker processes of an audit; a context manager that kills them at its end.

    Args:
        settings: Settings of the audit.
        timeout: Longest time without a sign of life from a worker, in seconds.
    """

    def __init__(self, settings: Settings, timeout: float):
        self.settings = settings
        self.timeout = timeout
        self._children = Children()
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> Workers:
        command = ["tfdist.tools.audit.child", self.settings.to_json()]
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._children)
            self._processes = [
                self._children.start(
                    [*command, str(rank)], self.settings.file(rank, "log"), subprocess.PIPE
                )
                for rank in range(self.settings.workers)
            ]
            stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._children.close()

    @property
    def pids(self) -> list[int]:
        """Return the process id of each worker, by rank."""
        return [process.pid for process in self._processes]

    def send(self, command: str, ranks: Iterable[int] | None = None) -> None:
        """Send a command to the workers with these ranks; default: all."""
        for rank in self._ranks(ranks):
            with contextlib.suppress(BrokenPipeError):  # it has ended: `wait` reports that
                pipe = self._processes[rank].stdin
                assert pipe is not None
                pipe.write(f"{command}\n")
                pipe.flush()

    def wait(
        self, *names: str, ranks: Iterable[int] | None = None, doing: str
    ) -> list[dict[str, Any]]:
        """Wait until each worker has reported one of these events.

        Args:
            *names: Names of the events.
            ranks: Ranks of the workers to wait for; default: all.
            doing: Clause about what the workers do meanwhile, for error messages.

        Returns:
            One event per worker, in the order of `ranks`.

        Raises:
            WorkerError: If a worker ends without such an event, or gives no sign of life for too
                long.
        """
        waited = self._ranks(ranks)
        reported: dict[int, dict[str, Any]] = {}
        # Time of each worker's last sign of life, and the bytes that it had written by then.
        life = {rank: (time.monotonic(), -1) for rank in waited}
        while len(reported) < len(waited):
            for rank in waited:
                # Poll before reading, so that events from just before the worker's end are seen.
                ended = self._processes[rank].poll() is not None
                size = self._written(rank)
                if size != life[rank][1]:
                    life[rank] = time.monotonic(), size
                    for name in names:
                        for event in self.reported(rank, name)[-1:]:
                            reported[rank] = event
                if rank in reported:
                    continue
                if ended:
                    raise self._failure(rank)
                if time.monotonic() - life[rank][0] > self.timeout:
                    raise WorkerError(
                        f"worker {rank} has given no sign of life for {self.timeout:g} s "
                        f"{doing}{self._after(rank)}. "
                        f"See where it waits, or pass a longer --timeout.{self._log(rank)}"
                    )
            time.sleep(_POLL_S)
        return [reported[rank] for rank in waited]

    def reported(self, rank: int, name: str) -> list[dict[str, Any]]:
        """Return all events of this name that a worker has reported."""
        return events.named(self.settings.file(rank, "events"), name)

    def _written(self, rank: int) -> int:
        """Return the number of bytes that a worker has written; growth is a sign of life."""
        files = (self.settings.file(rank, kind) for kind in ("events", "steps"))
        return sum(path.stat().st_size for path in files if path.exists())

    def _ranks(self, ranks: Iterable[int] | None) -> list[int]:
        return list(range(self.settings.workers) if ranks is None else ranks)

    def _failure(self, rank: int) -> WorkerError:
        failed = events.last(self.reported(rank, "failed"), "failed")
        if failed and failed["code"] != 1:  # a mistake in the settings, in one sentence
            return WorkerError(failed["error"], failed["code"])
        if failed:
            reason = f"failed{self._after(rank)}: {failed['error']}"
        else:
            reason = f"{exit_reason(self._processes[rank].returncode, self._after(rank))}."
        return WorkerError(f"worker {rank} {reason}{self._log(rank)}{self._remedy()}")

    def _after(self, rank: int) -> str:
        """Return words for how far a worker got, or an empty text."""
        last = self._last(rank)
        return f", after epoch {last[0]}, step {last[1]}" if last else ""

    def _last(self, rank: int) -> tuple[int, int] | None:
        """Return the epoch and step that a worker recorded last, or None."""
        last = None
        with contextlib.suppress(FileNotFoundError):
            for step in row_records.read(self.settings.file(rank, "steps")):
                last = step.epoch, step.step
        return last

    def _remedy(self) -> str:
        """Return words for the flags that would audit the rest, or an empty text."""
        last_steps = [last for rank in range(self.settings.workers) if (last := self._last(rank))]
        if len(last_steps) < self.settings.workers:
            return ""
        epoch, step = min(last_steps)
        order = self.reported(0, "ready")[0]["order"]
        following = (epoch + 1, 0) if order and step + 1 == order["steps"] else (epoch, step + 1)
        flags = "--first-epoch={} --first-step={}".format(*following)
        return (
            f"\nAll workers had read epoch {epoch} up to step {step}. "
            f"To continue from there: {flags}"
        )

    def _log(self, rank: int) -> str:
        return end_of(self.settings.file(rank, "log"))
