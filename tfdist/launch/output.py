"""What tasks write becomes log files and one readable terminal; no finished line is lost, no redraw is kept.

A progress bar redraws its line many times a second with carriage returns and backspaces. On a terminal the chief's
line in the making stays alive below the finished lines of all tasks. Where nothing can be redrawn (log files, the
output of a CI) the state of the bar becomes a line now and then; the other tasks' bars show only as finished.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from typing import IO, TextIO

from tfdist.launch.terminal_text import Line, clip, is_chatter, paint, printable

SNAPSHOT_SECONDS = 10.0  # how long an unfinished line is drawn over until it becomes a line where nothing can be redrawn


class Console:
    """The launcher's terminal, or the file that stands in its place, shared by all tasks.

    Args:
        out: Where task lines go.
        err: Where the launcher's own words go.
        tasks: Names of all tasks, which fixes their colours.
        drawer: The one task whose unfinished line is shown; the chief.
        shown: Names of the tasks whose output is shown at all.
        colour: Whether to colour; otherwise colour codes of the tasks are removed too.
        redraw: Whether `out` is a terminal on which a line can be redrawn.
        prefix: Whether each line begins with "[worker:0] ".
        chatter: Whether to show TensorFlow's information lines; the log files have them anyway.
    """

    def __init__(
        self,
        out: TextIO,
        err: TextIO,
        *,
        tasks: Iterable[str],
        drawer: str,
        shown: Iterable[str],
        colour: bool = False,
        redraw: bool = False,
        prefix: bool = True,
        chatter: bool = False,
    ):
        self._out, self._err = out, err
        self._prefixes = {
            task: paint(f"[{task}] ", i, colour) if prefix else "" for i, task in enumerate(tasks)
        }
        self._drawer, self._shown = drawer, frozenset(shown)
        self._colour, self._redraw, self._chatter = colour, redraw, chatter
        self._unfinished = ""
        self._lock = threading.Lock()
        self._gone = False

    def show(self, task: str, finished: list[str], unfinished: str, snapshot: bool) -> None:
        """Shows a task's new lines.

        Args:
            task: Whose.
            finished: Lines without their newline.
            unfinished: The line it is writing now.
            snapshot: Whether it is time to show `unfinished` where it cannot be redrawn.
        """
        if task not in self._shown:
            return
        lines = [line for line in finished if self._chatter or not is_chatter(line)]
        with self._lock:
            if task == self._drawer:
                self._unfinished = unfinished if self._redraw else ""
                if snapshot and not self._redraw:
                    lines.append(unfinished)
            prefix = self._prefixes[task]
            self._write(
                self._out, "".join(prefix + printable(line, self._colour) + "\n" for line in lines)
            )

    def notice(self, text: str) -> None:
        """Shows words of the launcher itself."""
        with self._lock:
            self._write(self._out, "", draw=False)
            self._write(self._err, text + "\n", draw=False)
            self._write(self._out, "")

    def _write(self, stream: TextIO, text: str, draw: bool = True) -> None:
        """Puts finished text above the unfinished line."""
        if self._redraw and stream is self._out:
            text = "\r\x1b[K" + text
            if draw and self._unfinished:
                line = self._prefixes[self._drawer] + printable(self._unfinished, self._colour)
                text += clip(line, shutil.get_terminal_size().columns - 1)
        if not text or (self._gone and stream is self._out):
            return
        try:
            stream.write(text)
            stream.flush()
        except (
            OSError,
            ValueError,
        ):  # `| head` is done, the terminal is closed: the run goes on, the logs have all
            self._gone = self._gone or stream is self._out


class TaskOutput:
    """Copies one task's pipe to its log file and to the console in a thread of its own.

    Args:
        task: Name of the task.
        pipe: The reading end of its output and error stream.
        log_path: The file, begun anew.
        console: Where to show it.
        clock: Seconds.
    """

    def __init__(
        self,
        task: str,
        pipe: IO[bytes],
        log_path: str,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._task, self._pipe, self._console, self._clock = task, pipe, console, clock
        log = open(log_path, "w", encoding="utf-8", errors="surrogateescape", newline="")  # noqa: SIM115
        self._log: IO[str] | None = log
        self._thread = threading.Thread(target=self._copy, name=f"output of {task}", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Waits for the pipe's end, bounded: a process that left the task's group may hold it open for ever."""
        self._thread.join(seconds)

    def _copy(self) -> None:
        line = Line()
        since: float | None = (
            None  # when the unfinished line began, or last became a line: a `print` may arrive in two pieces
        )
        while data := os.read(self._pipe.fileno(), 1 << 16):
            finished, now = line.feed(data), self._clock()
            if finished:
                since = None
            if line.text.strip() and since is None:
                since = now
            snapshot = (
                bool(line.text.strip()) and since is not None and now - since >= SNAPSHOT_SECONDS
            )
            if snapshot:
                since = now
            self._keep([*finished, line.text] if snapshot else finished)
            self._console.show(self._task, finished, line.text, snapshot)
        rest = [line.text] if line.text else []
        self._keep(rest)
        self._console.show(self._task, rest, "", False)
        if self._log:
            self._log.close()
        self._pipe.close()

    def _keep(self, lines: list[str]) -> None:
        if not self._log or not lines:
            return
        try:
            self._log.write("".join(line + "\n" for line in lines))
            self._log.flush()
        except (
            OSError
        ) as error:  # a full disk must not stop the reading: the task would block on its pipe
            self._console.notice(f"tfdist: the log of {self._task} ends here: {error}")
            with contextlib.suppress(OSError):
                self._log.close()
            self._log = None
