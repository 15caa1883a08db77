"""Failure report: formats the root cause and the other failures of an attempt."""

from __future__ import annotations

import os
import time

from tfdist.launch.failures import Failure, Verdict

_RULE = "-" * 72


def format_verdict(verdict: Verdict, started: float, log_dir: str, colour: bool = False) -> str:
    """Format the final report of a failed attempt.

    Args:
        verdict: Root cause and the other failures.
        started: Start of the attempt in seconds since the epoch.
        log_dir: Log directory.
        colour: Whether the headline may be red, default False.

    Returns:
        Several lines, without a newline at the end.
    """
    cause = verdict.cause
    clock = time.strftime("%H:%M:%S", time.localtime(cause.time))
    headline = f"ROOT CAUSE: {cause.task} {_ended(cause)}"
    lines = [_RULE, f"\x1b[1;31m{headline}\x1b[0m" if colour else headline]
    if cause.hint:
        lines.append(f"  that is: {cause.hint}")
    lines.append(f"  when:    {clock}, {max(0.0, cause.time - started):.1f} s after the start")
    lines.append(f"  log:     {short_path(cause.log_path)}")
    if cause.traceback:
        lines += ["", *("  " + line for line in cause.traceback.splitlines())]
    if verdict.others or verdict.stopped:
        lines += ["", "The other tasks:"]
        lines += [
            f"  {other.task} {_ended(other)} ({after(other, cause)})" for other in verdict.others
        ]
        if verdict.stopped:
            lines.append(f"  {', '.join(verdict.stopped)}: ended by the launcher")
        lines.append(f"  logs: {short_path(log_dir)}")
    return "\n".join([*lines, _RULE])


def short_path(path: str) -> str:
    """Return a path relative to the working directory if it lies below it, else unchanged.

    Example:
        >>> short_path(os.path.join(os.getcwd(), "runs", "a")), short_path("/elsewhere")
        ('runs/a', '/elsewhere')
    """
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


def after(failure: Failure, cause: Failure) -> str:
    """Return how much later than the root cause a failure came.

    A victim may also be earlier than the cause.

    Example:
        >>> from tfdist.launch.failures import Kind
        >>> cause, other = (Failure("worker:0", Kind.ERROR, 1, at, "failed") for at in (10.0, 11.5))
        >>> after(other, cause), after(cause, other)
        ('1.5 s later', '1.5 s earlier')
    """
    seconds = failure.time - cause.time
    return f"{abs(seconds):.1f} s {'later' if seconds >= 0 else 'earlier'}"


def _ended(failure: Failure) -> str:
    return f"{failure.how}: {failure.message}" if failure.message else failure.how
