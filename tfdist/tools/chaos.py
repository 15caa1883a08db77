"""Command `tfdist chaos`: recovery report for a launch with injected faults.

The command only reads the logs of a launch. It starts nothing and changes nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tfdist.runtime.command import (
    COMMON_EXIT_CODES,
    Command,
    ExitCodes,
    Group,
    Subcommand,
    usage_errors,
)
from tfdist.runtime.formatting import aligned, counted
from tfdist.runtime.launch_protocol import JOURNAL
from tfdist.tools.recovery import FaultReport, Recovery, read_recovery
from tfdist.tools.report.run_files import Reader

LATEST = os.path.join("runs", "latest")
COMMANDS = {
    "report": Subcommand(
        "tfdist.tools.chaos:report",
        "recovery times, lost steps, and whether the result equals that of a launch without faults",
    ),
}

_DESCRIPTION = """\
Reports how a launch recovered from the faults of `tfdist launch --chaos`.

  tfdist launch --workers 2 --log-dir runs/calm --chaos none -- train.py
  tfdist launch --workers 2 --restarts 9 --log-dir runs/wild \\
      --chaos "kill worker:1@step=37; kill chief@saving" -- train.py
  tfdist chaos report runs/wild --against runs/calm

Results can be compared if the training uses tfdist.BackupAndRestore. Give each launch its own
directory for its snapshots.
"""
_EXIT_CODES: ExitCodes = {
    **COMMON_EXIT_CODES,
    0: "the launch succeeded, with the same result",
    1: "the launch failed or still runs, or its result differs",
}


def _report(flags: argparse.Namespace, words: list[str]) -> int:
    with usage_errors():
        return _print_report(flags)


def _print_report(flags: argparse.Namespace) -> int:
    recovery = _recovery(
        flags.log_dir or LATEST, "LOG_DIR" if flags.log_dir else "LOG_DIR (default)"
    )
    print("\n".join([*table(recovery.fault_reports), *summary(recovery, time.time())]))
    if not flags.against:
        return 0 if recovery.code == 0 else 1
    other = _recovery(flags.against, "--against")
    if recovery.code != 0:
        print("result: not compared, because the launch did not end well")
        return 1
    if other.code != 0:
        raise ValueError(
            f"--against: expected the logs of a launch that ended well, received {flags.against}, "
            "which did not"
        )
    return _compare(flags.log_dir or LATEST, flags.against)


def _recovery(log_dir: str, flag: str) -> Recovery:
    if not os.path.isdir(log_dir):
        raise ValueError(
            f"{flag}: expected the directory of a launch's logs, received {log_dir}, which is no "
            "directory"
        )
    reader = Reader()
    recovery = read_recovery(Path(log_dir), reader)
    if recovery is None:
        raise ValueError(
            f"{flag}: expected the directory of a launch's logs, received {log_dir}: it has no "
            f"{JOURNAL} with an attempt: {reader.problems[-1]}"
        )
    for problem in reader.problems:
        print(f"tfdist chaos: {problem}", file=sys.stderr)
    return recovery


def _compare(log_dir: str, other_dir: str) -> int:
    from tfdist.backup import result  # imports TensorFlow, so only when it is needed

    mine, other = (result.read(directory) for directory in (log_dir, other_dir))
    comparison = result.compare(mine, other)
    detail = comparison.detail and f": {comparison.detail}"
    print(f"result: {comparison.text} {other_dir}{detail}")
    return 0 if comparison.same else 1


def table(fault_reports: Sequence[FaultReport]) -> list[str]:
    r"""Return the lines of a table with one row for each fault.

    Example:
        >>> kill = FaultReport("kill chief@saving", 2.0, 0.04, 9.5, 3, "snapshot-2")
        >>> print("\n".join(table([kill])))
        fault              struck at  detected  recovered  lost steps  resumed from
        kill chief@saving      2.0 s    0.04 s      9.5 s           3  snapshot-2
    """
    if not fault_reports:
        return ["No fault has struck."]
    rows = [("fault", "struck at", "detected", "recovered", "lost steps", "resumed from")]
    for fault_report in fault_reports:
        lost = "-" if fault_report.lost is None else str(fault_report.lost)
        rows.append(
            (
                fault_report.text,
                _seconds(fault_report.when, 1),
                _seconds(fault_report.detected, 2),
                _seconds(fault_report.recovered, 1),
                lost,
                fault_report.origin or "-",
            )
        )
    return aligned(rows, left=(0, 5))


def summary(recovery: Recovery, now: float) -> list[str]:
    """Return lines that summarize the launch: attempts, lost steps and outcome.

    Args:
        recovery: Recovery computed from the launch's journal.
        now: Current time in seconds since the epoch.

    Returns:
        Lines of text, to print after the table.
    """
    lines = [f"not struck: {text}" for text in recovery.missed]
    count = len(recovery.attempts)
    lost = recovery.lost_steps
    text = (
        f"{counted(count, 'attempt')} in {recovery.seconds:.1f} s, {counted(sum(lost), 'step')} "
        "lost"
    )
    if sum(lost):
        text += f", {max(lost)} at most by one attempt"
    if recovery.interval is not None:
        text += (
            f"; a snapshot every {counted(recovery.interval, 'step')}"
            if recovery.interval > 1
            else "; a snapshot every step"
        )
    lines.append(text)
    if recovery.code is None:
        ago = now - recovery.begun - recovery.seconds
        lines.append(
            "The launch has NOT ENDED: it runs, or its launcher was killed; its journal's last "
            f"line is {ago:.0f} s old."
        )
    elif recovery.code:
        why = f": {recovery.refusal}" if recovery.refusal else ""
        lines.append(f"The launch did NOT END WELL: exit code {recovery.code}{why}.")
    return lines


def _seconds(seconds: float | None, digits: int) -> str:
    return "-" if seconds is None else f"{seconds:.{digits}f} s"


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log_dir", nargs="?", metavar="LOG_DIR", help=f"log directory of a launch ({LATEST})"
    )
    parser.add_argument(
        "--against",
        metavar="LOG_DIR",
        help="log directory of a launch without faults (--chaos none), to compare the results with",
    )


report = Command(
    name="tfdist chaos report",
    description=_DESCRIPTION,
    exit_codes=_EXIT_CODES,
    run=_report,
    add_flags=_add_flags,
)
main = Group("tfdist chaos", _DESCRIPTION, COMMANDS, _EXIT_CODES)
