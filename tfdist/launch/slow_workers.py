"""Replacement of slow workers: decides when an attempt ends to start a worker elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable

from tfdist.runtime.formatting import percent
from tfdist.runtime.launch_protocol import JOURNAL, STRAGGLER, STRAGGLER_OVER, check_event


class SlowWorkers:
    """The stragglers that the chief has named in the journal, and the replacements so far.

    Args:
        log_dir: Log directory of the launch.
        limit: Maximum number of replacements.
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
        self._slow: dict[str, dict] = {}  # by task, of the current attempt
        self.count = 0

    def due(self, attempt: int) -> str:
        """Return the task to replace now, "" for none; each episode is answered once.

        Args:
            attempt: Number of the running attempt.
        """
        for line in self._new_lines():
            if line["event"] == "saved":
                self._saved = True
            elif line["event"] == STRAGGLER and line["attempt"] == attempt:
                self._slow[line["task"]] = line
            elif line["event"] == STRAGGLER_OVER:
                self._slow.pop(line["task"], None)
        if not self._slow or not self._saved:  # without a snapshot all steps would be lost
            return ""
        task, line = self._slow.popitem()
        self._slow.clear()
        if self.count >= self._limit:
            self._show_line(
                f"tfdist: {_describe(line)}; it stays, as no replacement is left "
                f"(--replace-stragglers {self._limit})"
            )
            return ""
        if problem := self._move(task):
            self._show_line(f"tfdist: {_describe(line)}; it stays, as {problem}")
            return ""
        self.count += 1
        self._show_line(
            f"tfdist: {_describe(line)}: saving, to start it anew (replacement {self.count} of "
            f"{self._limit})"
        )
        return task

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
