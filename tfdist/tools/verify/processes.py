"""A command becomes its exit code within a bound, and the reason where it failed; nothing it started is left."""

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

_LINES = 15  # of a log, at most
_GRACE = 30.0  # seconds for a launcher to end its tasks

_DIFFERS = r"\S+ differs from \S+ in"  # as tfdist says it of workers


class Failed(Exception):
    """A process failed, or took too long.

    Attributes:
        code: Its exit code; None: it took too long.
    """

    def __init__(self, text: str, code: int | None):
        super().__init__(text)
        self.code = code


def run(words: Sequence[str], log: Path, timeout: float, who: str) -> None:
    """Runs a Python module, and waits until it has ended.

    The directory of the log is this process' (see `tfdist.tools.common.ownership`) as long as it runs.

    Args:
        words: What comes after `python -m`.
        log: File for all that it says.
        timeout: Seconds that it may take.
        who: It, for messages.

    Raises:
        Failed: It did not end with code 0 in time.
    """
    owned = own(log.parent)
    with open(log, "wb") as file:
        # A group of its own: Ctrl-C comes here first, and then goes to all of it.
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
            f"{who} had not taken its steps after {timeout:g} s. See where it waits, or pass a longer --timeout.\n{_tail(log)}",
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
    """Ends a process and its group: politely first, as a launcher then ends its tasks."""
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
    """Why a process failed: the launcher's root cause, a configuration error, or the end of its log."""
    text = log.read_text(encoding="utf-8", errors="replace")
    if found := re.search(
        r"^ROOT CAUSE: (.*?)(?=^The other tasks:$|^-{20,}$|\Z)", text, re.MULTILINE | re.DOTALL
    ):
        lines = [line for line in found[1].rstrip().splitlines() if not line.startswith("  log: ")]
        whole = lines[-1].strip()  # of the traceback: the headline may be cut off
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
    """Whether processes failed as tfdist found that the workers do not do the same."""
    return bool(re.search(_DIFFERS, reason))


def _tail(log: Path) -> str:
    return "\n".join(f"  {line}" for line in tail(log, _LINES))
