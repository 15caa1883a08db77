"""Execution of one child process with a timeout, failure reasons and cleanup."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.tools.common.ownership import OWNER, own
from tfdist.tools.common.process_logs import tail

_LINES = 15  # maximum number of log lines in a message
_GRACE = 30.0  # seconds that a launcher gets to stop its tasks

_DIFFERS = r"\S+ differs from \S+ in"  # tfdist's error message when workers disagree


class Failed(Exception):
    """Failure or timeout of a process.

    Attributes:
        code: Exit code of the process. None: it timed out.
    """

    def __init__(self, text: str, code: int | None):
        super().__init__(text)
        self.code = code


def run(words: Sequence[str], log: Path, timeout: float, who: str) -> None:
    """Run a Python module and wait until it has exited.

    While the module runs, this process owns the directory of the log (see
    `tfdist.tools.common.ownership`).

    Args:
        words: Arguments after `python -m`.
        log: File for the output of the process.
        timeout: Longest run time in seconds.
        who: Name of the process, for messages.

    Raises:
        Failed: The process did not exit with code 0 in time.
    """
    owned = own(log.parent)
    with open(log, "wb") as file:
        # A process group of its own: this process handles Ctrl-C, and then ends the whole group.
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise Failed(
            (
                f"{who} had not taken its steps after {timeout:g} s. See where it waits, or pass "
                f"a longer --timeout.\n{_tail(log)}"
            ),
            None,
        ) from None
    finally:
        try:
            _end(process)
        finally:
            owned.close()
            (log.parent / OWNER).unlink(missing_ok=True)
    if code:
        raise Failed(reason(log), code)


def _end(process: subprocess.Popen) -> None:
    """Stop a process and its group.

    SIGTERM comes before SIGKILL, so that a launcher can stop its tasks.
    """
    try:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
    finally:  # a second signal may interrupt the wait
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def reason(log: Path) -> str:
    """Return why a process failed.

    The reason is the launcher's root cause, else a configuration error, else the end of the log.
    """
    text = log.read_text(encoding="utf-8", errors="replace")
    if found := re.search(
        r"^ROOT CAUSE: (.*?)(?=^The other tasks:$|^-{20,}$|\Z)", text, re.MULTILINE | re.DOTALL
    ):
        lines = [line for line in found[1].rstrip().splitlines() if not line.startswith("  log: ")]
        # The last line of the traceback is complete, but the headline may be cut off.
        whole = lines[-1].strip()
        ours = re.search(rf": (\w+: {_DIFFERS})", lines[0])
        return (
            f"{lines[0][: ours.start(1)]}{whole}"
            if ours and whole.startswith(ours[1])
            else "\n".join(lines)
        )
    if found := re.search(r"^error: (.*)\Z", text, re.MULTILINE | re.DOTALL):
        return found[1].rstrip()
    return _tail(log)


def workers_differ(reason: str) -> bool:
    """Return whether a failure says that the workers do not run the same computation."""
    return bool(re.search(_DIFFERS, reason))


def _tail(log: Path) -> str:
    return "\n".join(f"  {line}" for line in tail(log, _LINES))
