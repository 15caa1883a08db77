"""Command `tfdist chaos`: recovery report for a launch with injected faults.

The command only reads the logs of a launch. It starts nothing and changes nothing.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

from tfdist.config import nearest
from tfdist.runtime.cli_arguments import Parser, refuse
from tfdist.runtime.formatting import aligned, counted
from tfdist.runtime.launch_protocol import JOURNAL, read_journal
from tfdist.tools.recovery import Recovery, Strike

LATEST = os.path.join("runs", "latest")
COMMANDS = {
    "report": "recovery times, lost steps, and whether the result is that of the undisturbed run"
}

_DESCRIPTION = """\
Tells what became of a launch with a chaos plan. LOG_DIR is the directory of its logs, runs/latest \
if none is named.

  tfdist launch --workers 2 --log-dir runs/calm --chaos none -- train.py
  tfdist launch --workers 2 --restarts 9 --log-dir runs/wild \
--chaos "kill worker:1@step=37; kill chief@saving" -- train.py
  tfdist chaos report runs/wild --against runs/calm

Results are compared where the training uses tfdist.BackupAndRestore. Both launches need \
directories of their own for
their backups, too.
"""
_EPILOG = """\
exit code: 0 when the launch ended well, with the same result; 1 when it did not, goes on, or the \
result is another one;
2 for a mistake on this command line.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command `tfdist chaos`.

    Args:
        argv: Command-line arguments after `tfdist chaos`.

    Returns:
        The exit code.
    """
    words = list(argv)
    if not words:
        print(_parser().format_help(), end="")
        return 2
    known = words[0] in COMMANDS
    try:
        if not known and not words[0].startswith("-"):
            raise ValueError(
                f"expected a command, received {words[0]!r}. "
                f"{nearest(words[0], COMMANDS, 'tfdist chaos ')}"
            )
        return _report(_parser().parse_args(words))
    except ValueError as error:
        return refuse(f"tfdist chaos {words[0]}" if known else "tfdist chaos", error)


def _report(flags: argparse.Namespace) -> int:
    recovery = _recovery(
        flags.log_dir or LATEST, "LOG_DIR" if flags.log_dir else "LOG_DIR (default)"
    )
    print("\n".join([*table(recovery.strikes), *summary(recovery, time.time())]))
    if not flags.against:
        return 0 if recovery.code == 0 else 1
    other = _recovery(flags.against, "--against")
    if recovery.code != 0:
        print("result: none to compare, as the launch did not end well")
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
            f"{flag}: expected the directory of a launch's logs, received {log_dir}, which is none"
        )
    journal = read_journal(log_dir)
    if not any(line["event"] == "attempt" for line in journal):
        raise ValueError(
            f"{flag}: expected the directory of a launch's logs, received {log_dir}: it has no "
            f"{JOURNAL} that tells of an attempt"
        )
    return Recovery(journal)


def _compare(log_dir: str, against: str) -> int:
    from tfdist.backup import result  # imports TensorFlow, so only when it is needed

    mine, other = (result.read(directory) for directory in (log_dir, against))
    found = result.compare(mine, other)
    print(f"result: {found.text} {against}{found.detail and ': '}{found.detail}")
    return 0 if found.same else 1


def table(strikes: Sequence[Strike]) -> list[str]:
    r"""Return the lines of a table with one row for each fault.

    Example:
        >>> print("\n".join(table([Strike("kill chief@saving", 2.0, 0.04, 9.5, 3, "snapshot-2")])))
        fault              struck at  detected  recovered  lost steps  went on from
        kill chief@saving      2.0 s    0.04 s      9.5 s           3  snapshot-2
    """
    if not strikes:
        return ["No fault has struck."]
    rows = [("fault", "struck at", "detected", "recovered", "lost steps", "went on from")]
    for strike in strikes:
        lost = "-" if strike.lost is None else str(strike.lost)
        rows.append(
            (
                strike.text,
                _seconds(strike.when, 1),
                _seconds(strike.detected, 2),
                _seconds(strike.recovered, 1),
                lost,
                strike.origin or "-",
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
    lost = [recovery.lost(place) or 0 for place in range(len(recovery.attempts))]
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


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name}  {summary}" for name, summary in COMMANDS.items()]
    parser = Parser(
        prog="tfdist chaos",
        usage="tfdist chaos [-h] COMMAND ...",
        description=_DESCRIPTION + "\ncommands:\n" + "\n".join(lines),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        prog="tfdist chaos",
        dest="command",
        metavar="COMMAND",
        help=argparse.SUPPRESS,
        required=True,
    )
    report = commands.add_parser(
        "report", description=f"Tells {COMMANDS['report']}.", epilog=_EPILOG, allow_abbrev=False
    )
    report.add_argument(
        "log_dir", nargs="?", metavar="LOG_DIR", help=f"directory of a launch's logs ({LATEST})"
    )
    report.add_argument(
        "--against",
        metavar="LOG_DIR",
        help="that of the undisturbed launch, --chaos none, whose result is the right one",
    )
    return parser
