"""Output of the tasks: log files, and a terminal that shows the lines of all tasks.

A progress bar redraws its line many times a second with carriage returns and backspaces. On a
terminal, the unfinished line of the chief stays below the finished lines of all tasks. Log files
and the output of a CI cannot be redrawn: there the state of the bar is written as a line from time
to time, and the bars of the other tasks appear only when they are finished. No finished line is
lost, and redraws are not kept.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from typing import IO, TextIO

from tfdist.launch.terminal_text import Line, clip, paint, printable
from tfdist.runtime.launch_protocol import private
from tfdist.runtime.startup_lines import is_chatter

# Interval at which an unfinished line is written as a line where it cannot be redrawn.
SNAPSHOT_S = 10.0
LOG_CHARACTERS = 100_000_000  # of a log file, which then gets the ending of `FORMER`
FORMER = ".1"  # ending of the one former log file that is kept


class Console:
    """The launcher's terminal, or the file in its place, shared by all tasks.

    Args:
        out: Stream for the lines of the tasks.
        err: Stream for the launcher's own messages.
        tasks: Names of all tasks, which determine their colours.
        drawer: Name of the one task whose unfinished line is shown; the chief.
        shown: Names of the tasks whose output is shown.
        colour: Whether to use colours, default False; without them the colour codes of the tasks
            are removed too.
        redraw: Whether `out` is a terminal on which a line can be redrawn, default False.
        prefix: Whether each line begins with "[worker:0] ", default True.
        chatter: Whether to show TensorFlow's information lines, default False; the log files always
            contain them.
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
        self._out = out
        self._err = err
        self._prefixes = {
            task: paint(f"[{task}] ", i, colour) if prefix else "" for i, task in enumerate(tasks)
        }
        self._drawer = drawer
        self._shown = frozenset(shown)
        self._colour = colour
        self._redraw = redraw
        self._chatter = chatter
        self._unfinished = ""
        self._lock = threading.Lock()
        self._closed = False

    def show(self, task: str, finished: list[str], unfinished: str, snapshot: bool) -> None:
        """Show a task's new lines.

        Args:
            task: Name of the task.
            finished: Finished lines without their newline.
            unfinished: Unfinished line.
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
        """Show a message of the launcher itself, which may quote a task."""
        text = printable(text, self._colour)
        with self._lock:
            self._write(self._out, "", draw=False)
            self._write(self._err, text + "\n", draw=False)
            self._write(self._out, "")

    def _write(self, stream: TextIO, text: str, draw: bool = True) -> None:
        """Write finished text above the unfinished line."""
        if self._redraw and stream is self._out:
            text = "\r\x1b[K" + text
            if draw and self._unfinished:
                line = self._prefixes[self._drawer] + printable(self._unfinished, self._colour)
                text += clip(line, shutil.get_terminal_size().columns - 1)
        if not text or (self._closed and stream is self._out):
            return
        try:
            stream.write(text)
            stream.flush()
        # `| head` has exited, or the terminal is closed: the launch continues, and the logs are
        # complete.
        except (OSError, ValueError):
            self._closed = self._closed or stream is self._out


class TaskOutput:
    """Copy one task's pipe to its log file and to the console in a separate thread.

    Args:
        task: Name of the task.
        pipe: Read end of the pipe for its standard output and error.
        log_path: Path of the log file, which is overwritten.
        console: Console that shows the output.
        clock: Clock in seconds, default `time.monotonic`.
    """

    def __init__(
        self,
        task: str,
        pipe: IO[bytes],
        log_path: str,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._task = task
        self._pipe = pipe
        self._console = console
        self._clock = clock
        self._log_path = log_path
        self._log: IO[str] | None = self._open()
        self._thread = threading.Thread(target=self._copy, name=f"output of {task}", daemon=True)
        self._thread.start()

    def _open(self) -> IO[str]:
        self._written = 0
        return open(
            self._log_path,
            "w",
            encoding="utf-8",
            errors="surrogateescape",
            newline="",
            opener=private,
        )

    def join(self, seconds: float) -> None:
        """Wait for the end of the pipe, at most `seconds`.

        A process that left the task's group may keep the pipe open for ever.
        """
        self._thread.join(seconds)

    def _copy(self) -> None:
        line = Line()
        # Time at which the unfinished line began or was last written as a line; a `print` may
        # arrive in two pieces.
        since: float | None = None
        while data := os.read(self._pipe.fileno(), 1 << 16):
            finished = line.feed(data)
            now = self._clock()
            if finished:
                since = None
            if line.text.strip() and since is None:
                since = now
            snapshot = bool(line.text.strip()) and since is not None and now - since >= SNAPSHOT_S
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
            if self._written > LOG_CHARACTERS:
                self._log.close()
                os.replace(self._log_path, self._log_path + FORMER)
                self._log = self._open()
            self._written += self._log.write("".join(line + "\n" for line in lines))
            self._log.flush()
        # A full disk must not stop this thread from reading: the task would block on its pipe.
        except OSError as error:
            self._console.notice(f"tfdist: the log of {self._task} ends here: {error}")
            with contextlib.suppress(OSError):
                self._log.close()
            self._log = None
