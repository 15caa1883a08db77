"""Entry points of `tfdist jobs`, `tfdist logs` and `tfdist cancel`, for submitted jobs."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from tfdist.launch.engines import schedulers
from tfdist.launch.terminal_text import printable
from tfdist.runtime.command import COMMON_EXIT_CODES, Command, usage_errors
from tfdist.runtime.launch_protocol import TRANSIENT_CODE, take_token

EXIT_CODES = {**COMMON_EXIT_CODES, TRANSIENT_CODE: "the scheduler does not answer"}


def _jobs(flags: argparse.Namespace, words: list[str]) -> int:
    take_token()
    with usage_errors():
        found = schedulers.find(flags.on).jobs()
    rows = [("JOB", "STATE", "NAME", "TIME", "WHERE"), *map(dataclasses.astuple, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        print(printable("  ".join(cells).rstrip(), colour=False))
    return 0


def _logs(flags: argparse.Namespace, words: list[str]) -> int:
    take_token()

    def show(text: str) -> None:
        sys.stdout.write(printable(text, colour=sys.stdout.isatty()))
        sys.stdout.flush()

    def tell(line: str) -> None:
        print(f"tfdist logs: {line}", file=sys.stderr, flush=True)

    with usage_errors():
        schedulers.find(flags.on).logs(flags.job, flags.follow, show, tell)
    return 0


def _cancel(flags: argparse.Namespace, words: list[str]) -> int:
    take_token()
    with usage_errors():
        schedulers.find(flags.on).cancel(flags.job)
    return 0


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job", metavar="JOB", help="number of the job, as `tfdist submit` prints it"
    )
    schedulers.add_flag(parser)


def _add_logs_flags(parser: argparse.ArgumentParser) -> None:
    _add_job(parser)
    parser.add_argument(
        "--follow", action="store_true", help="wait for more output, until the job is over"
    )


jobs = Command(
    name="tfdist jobs",
    description="Lists your jobs of `tfdist submit` that wait or run.",
    exit_codes={**EXIT_CODES, 0: "the list is printed"},
    run=_jobs,
    add_flags=schedulers.add_flag,
)

logs = Command(
    name="tfdist logs",
    description="Shows the output of a job of `tfdist submit`.",
    exit_codes={
        **EXIT_CODES,
        0: "the output is shown; with --follow, the job is over",
        TRANSIENT_CODE: "the job has no output yet, or the scheduler does not answer",
    },
    run=_logs,
    add_flags=_add_logs_flags,
)

cancel = Command(
    name="tfdist cancel",
    description="Ends a job of `tfdist submit`, which does not start again.",
    exit_codes={**EXIT_CODES, 0: "the scheduler ends the job"},
    run=_cancel,
    add_flags=_add_job,
)
