"""Execution of the recording process of `tfdist verify`, and the reason for its failure."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tfdist.runtime.subprocesses import Children, exit_reason
from tfdist.tools.common.process_logs import end_of

_GRACE_S = 30.0  # seconds that a launcher gets to stop its tasks

_DIFFERS = r"\S+ differs from \S+ in"  # tfdist's error message when workers disagree


class RecordingFailed(Exception):
    """Failure or timeout of a process.

    Attributes:
        code: Exit code of the process. None: it timed out.
    """

    def __init__(self, text: str, code: int | None):
        super().__init__(text)
        self.code = code


def run(words: Sequence[str], log: Path, timeout: float, who: str) -> None:
    """Run a Python module and wait until it has exited.

    Args:
        words: Arguments after `python -m`.
        log: File for the output of the process.
        timeout: Longest run time in seconds.
        who: Name of the process, for messages.

    Raises:
        RecordingFailed: If the process did not exit with code 0 in time.
    """
    with Children(_GRACE_S) as children:
        try:
            code = children.start(words, log).wait(timeout)
        except subprocess.TimeoutExpired:
            raise RecordingFailed(
                f"{who} had not taken its steps after {timeout:g} s. See where it waits, or pass "
                f"a longer --timeout.{end_of(log)}",
                None,
            ) from None
    if code:
        raise RecordingFailed(reason(log, code), code)


def reason(log: Path, code: int) -> str:
    """Return why a process failed.

    The reason is the launcher's root cause, else a configuration error, else the way the process
    ended and the end of its log.

    Args:
        log: File with the output of the process.
        code: Exit code of the process.
    """
    text = log.read_text(encoding="utf-8", errors="replace")
    if root := re.search(
        r"^ROOT CAUSE: (.*?)(?=^The other tasks:$|^-{20,}$|\Z)", text, re.MULTILINE | re.DOTALL
    ):
        lines = [line for line in root[1].rstrip().splitlines() if not line.startswith("  log: ")]
        # The last line of the traceback is complete, but the headline may be cut off.
        whole = lines[-1].strip()
        headline_error = re.search(rf": (\w+: {_DIFFERS})", lines[0])
        return (
            f"{lines[0][: headline_error.start(1)]}{whole}"
            if headline_error and whole.startswith(headline_error[1])
            else "\n".join(lines)
        )
    if mistake := re.search(r"^error: (.*)\Z", text, re.MULTILINE | re.DOTALL):
        return mistake[1].rstrip()
    return f"its process {exit_reason(code)}.{end_of(log)}"


def workers_differ(reason: str) -> bool:
    """Return whether a failure says that the workers do not run the same computation."""
    return bool(re.search(_DIFFERS, reason))
