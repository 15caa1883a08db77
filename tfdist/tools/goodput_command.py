"""Command `tfdist goodput`: the share of training in the time of a job, and its losses.

The command only reads the logs of launches, also of one that runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.runtime.command import COMMON_EXIT_CODES, Command, usage_errors
from tfdist.runtime.formatting import aligned, counted, duration
from tfdist.runtime.goodput import CATEGORIES, REMEDIES, Goodput, Line, measure, with_open_attempt
from tfdist.runtime.launch_protocol import JOURNAL, check_event
from tfdist.telemetry.layout import SESSIONS, read_json_lines
from tfdist.tools.report.read import find_launch
from tfdist.tools.report.run_files import Reader

LATEST = os.path.join("runs", "latest")
_DESCRIPTION = """\
Says which share of a job's time was training, and where the rest went. RUN is the log directory of
a launch, the directory of a run, or the parent directory of a batch job's starts; several are one
job, whose launches followed each other.

  tfdist goodput                                      (the latest launch on this host)
  tfdist goodput runs/digits --json
  tfdist goodput runs/launch-20260102-030405 runs/launch-20260103-040506
"""


def _run(flags: argparse.Namespace, words: list[str]) -> int:
    with usage_errors():
        goodput = read(flags.runs or [LATEST])
    if flags.json:
        print(json.dumps(goodput.to_json(), indent=2))
    else:
        print("\n".join(text(goodput)))
        for problem in goodput.problems:
            print(f"tfdist goodput: {problem}", file=sys.stderr)
    return 0


def read(directories: Sequence[str]) -> Goodput:
    """Return the goodput of a job.

    Args:
        directories: Directories of its launches or of its run.

    Raises:
        ValueError: If a directory has no journal, or no journal tells where the time went.
    """
    launches: dict[Path, Path] = {}
    for directory in directories:
        for path in launches_of(directory):
            launches.setdefault(path.resolve(), path)
    reader = Reader()
    journals: list[list[Line]] = []
    for path in launches.values():
        lines = reader.lines(path / JOURNAL, check_event)
        journals.append(with_open_attempt(lines, str(path)))
    goodput = measure(journals)
    damage = f": {'; '.join(reader.problems)}" if reader.problems else ""
    names = ", ".join(map(str, launches.values()))
    if not goodput.attempts:
        raise ValueError(f"RUN: expected a launch with an attempt, received {names}{damage}")
    if not goodput.tasks:
        raise ValueError(
            f"RUN: expected a launch whose journal has time accounts, received {names}: its tasks "
            "ran no `fit` under a strategy of tfdist, or an older version of tfdist wrote it; "
            f"`tfdist chaos report` still shows its restarts{damage}"
        )
    return dataclasses.replace(goodput, problems=(*reader.problems, *goodput.problems))


def launches_of(directory: str) -> list[Path]:
    """Return the log directories of the launches that a directory is or names.

    Raises:
        ValueError: If there are none.
    """
    root = Path(directory)
    if (root / JOURNAL).is_file():
        return [root]
    if starts := sorted(path.parent for path in root.glob(f"start-*/{JOURNAL}")):
        return starts
    sessions = read_json_lines(root / SESSIONS) if root.is_dir() else []
    names = dict.fromkeys(name for line in sessions if isinstance(name := line.get("launch"), str))
    found = [path for name in names if (path := find_launch(root, Path(name)))]
    if found:
        return found
    if names:
        problem = f"its launches in {', '.join(names)} were moved or removed; name them instead"
    elif not root.is_dir():
        problem = "there is no such directory"
    else:
        problem = f"it has no {JOURNAL}, and no {SESSIONS} that names a launch"
    raise ValueError(
        f"RUN: expected the directory of a launch by `tfdist launch`, received {directory}: "
        f"{problem}"
    )


def text(goodput: Goodput) -> list[str]:
    """Return the lines for a terminal."""
    tasks = f", means over {counted(goodput.tasks, 'task')}" if goodput.tasks > 1 else ""
    lost = f", {counted(goodput.lost_steps, 'step')} lost" if goodput.lost_steps else ""
    lines = [
        f"goodput {100 * goodput.share:.1f} % of {duration(goodput.wall)}: "
        f"{counted(goodput.launches, 'launch', 'launches')}, "
        f"{counted(goodput.attempts, 'attempt')}{lost}{tasks}",
        "",
    ]
    rows = [("category", "time", "share", "what it is")]
    for name, what in CATEGORIES.items():
        if (seconds := goodput.seconds[name]) > 0 or name == "training":
            share = f"{100 * seconds / goodput.wall:.1f} %" if goodput.wall else "-"
            rows.append((name, duration(seconds), share, what))
    lines += aligned(rows, left=(0, 3))
    if goodput.losses:
        lines += ["", "largest losses"]
        lines += [
            f"{number}. {name}, {duration(seconds)}: {REMEDIES[name]}"
            for number, (name, seconds) in enumerate(goodput.losses, 1)
        ]
    return lines


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help=f"directory of a launch or of a run ({LATEST})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for programs")


main = Command(
    name="tfdist goodput",
    description=_DESCRIPTION,
    exit_codes={**COMMON_EXIT_CODES, 0: "the figures are printed"},
    run=_run,
    add_flags=_add_flags,
)
