"""Replacement of slow workers: decides when an attempt ends to start a worker elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection

from tfdist.runtime.formatting import percent
from tfdist.runtime.launch_protocol import JOURNAL, STRAGGLER, STRAGGLER_OVER, check_event


class SlowWorkers:
    """The stragglers that the chief has named in the journal, and the replacements so far.

    Args:
        log_dir: Log directory of the launch.
        limit: Maximum number of replacements. One replaces all workers that are slow then.
        show_line: Function that shows a line to the user.
        move: Function that gives up the place of a task, so that the next attempt starts it in
            another one; it returns why that is impossible, or "".
    """

    def __init__(
        self,
        log_dir: str,
        limit: int,
        show_line: Callable[[str], None],
        move: Callable[[str], str] = lambda task: "",
    ):
        self._path = os.path.join(log_dir, JOURNAL)
        self._limit = limit
        self._show_line = show_line
        self._move = move
        self._read = 0  # bytes of the journal
        self._saved = False
        self._attempt = 0
        self._slow: dict[str, dict] = {}  # by task, of the current attempt
        self.count = 0

    def due(self, attempt: int, tasks: Collection[str]) -> list[str]:
        """Return the tasks to replace now, all in one restart; each episode is answered once.

        Args:
            attempt: Number of the running attempt.
            tasks: Names of the tasks that train; none unless all of them are within a fit, because
                they save only there.
        """
        if attempt != self._attempt:  # its tasks are other processes
            self._attempt = attempt
            self._slow.clear()
        for line in self._new_lines():
            if line["event"] == "saved":
                self._saved = True
            elif line["event"] == STRAGGLER and line["attempt"] == attempt:
                self._slow[line["task"]] = line
            elif line["event"] == STRAGGLER_OVER and line["attempt"] == attempt:
                self._slow.pop(line["task"], None)
        if not tasks:  # the next fit compares its workers anew
            self._slow.clear()
        if not self._saved:  # without a snapshot all steps would be lost
            return []
        slow = [line for task, line in self._slow.items() if task in tasks]
        self._slow.clear()
        moved = []
        for line in slow:
            if problem := self._problem(line["task"]):
                self._show_line(f"tfdist: {_describe(line)}; it stays, as {problem}")
            else:
                moved.append(line)
        self.count += bool(moved)
        for line in moved:
            self._show_line(
                f"tfdist: {_describe(line)}: saving, to start it anew (replacement {self.count} of "
                f"{self._limit})"
            )
        return [line["task"] for line in moved]

    def _problem(self, task: str) -> str:
        """Give up the place of a task; return why it stays, or ""."""
        if self.count >= self._limit:
            return f"no replacement is left (--replace-stragglers {self._limit})"
        return self._move(task)

    def _new_lines(self) -> list[dict]:
        lines = []
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            file.seek(self._read)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read += len(whole)
            for text in whole.splitlines():
                with contextlib.suppress(ValueError, RecursionError):
                    lines.append(check_event(json.loads(text)))
        return lines


def _describe(line: dict) -> str:
    slower = line.get("slower")
    share = f" by {percent(slower)}" if isinstance(slower, int | float) else ""
    host = f" on {line['host']}" if line.get("host") else ""
    return f"{line['task']}{host} is slower than the median of the other workers{share}"
