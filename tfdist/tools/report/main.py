"""The command `tfdist report`, which writes one HTML file about runs or a benchmark."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import tfdist
from tfdist.runtime.cli_arguments import Parser, refuse
from tfdist.runtime.formatting import moment
from tfdist.runtime.launch_protocol import JOURNAL
from tfdist.telemetry import layout
from tfdist.tools.bench.results import FILE
from tfdist.tools.report import comparison, outline, page, style
from tfdist.tools.report.bench import read_benchmark
from tfdist.tools.report.curves import slug
from tfdist.tools.report.page import Chapter
from tfdist.tools.report.read import is_benchmark, is_run, read_run

NAME = "report.html"
_DESCRIPTION = """\
Makes one HTML file about LOGDIR, which opens offline: the directory of a run, of several runs, \
or of a benchmark.

  tfdist report runs/digits
  tfdist report runs                                    all runs in there, compared
  tfdist report runs/bench-digits --png figures         the figures as images, too
  tfdist report logs --launch runs/launch-20260102-030405   a script's logs, and what its \
launcher tells of restarts
"""
_EPILOG = """\
exit code: 0 when the page was written; 1 when it was but files are damaged, setups failed or \
values are not finite, which it
names, or when it could not be written; 2 for a mistake on this command line, such as a \
directory that holds no run.
"""


class _WriteError(Exception):
    """The page or an image cannot be written."""


def main(argv: Sequence[str]) -> int:
    """Run the command `tfdist report`.

    Args:
        argv: Command-line arguments after `tfdist report`.

    Returns:
        The exit code.
    """
    try:
        flags = _parser().parse_args(list(argv))
        chapters = read(Path(flags.logdir), [Path(place) for place in flags.launch])
    except ValueError as error:
        return refuse("tfdist report", error)
    try:
        return _write(
            chapters,
            Path(flags.out or os.path.join(flags.logdir, NAME)),
            flags.png and Path(flags.png),
        )
    except _WriteError as error:
        print(f"tfdist report: error: {error}", file=sys.stderr)
        return 1


def read(directory: Path, launches: Sequence[Path] = ()) -> list[Chapter]:
    """Return the chapters of the report about a directory.

    Args:
        directory: Directory of a run, of several runs, or of a benchmark.
        launches: Directories of launchers; allowed for one run only.

    Raises:
        ValueError: If the directory holds none of these.
    """
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "is not there"
        raise ValueError(
            "LOGDIR: expected the directory of a run, of runs or of a benchmark, "
            f"received {directory}, which {what}"
        )
    for place in launches:
        if not (place / JOURNAL).is_file():
            raise ValueError(
                f"--launch: expected the directory of a launch's logs, received {place}: "
                f"it has no {JOURNAL}"
            )
    if is_benchmark(directory):
        if launches:
            raise ValueError(
                "--launch: expected with the directory of one run, received with "
                f"{directory}, which holds a benchmark"
            )
        return [comparison.of_benchmark(read_benchmark(directory))]
    if is_run(directory):
        return [outline.chapter(read_run(directory, launches), "run")]
    try:
        below = sorted(
            path for path in directory.iterdir() if path.is_dir() and not path.is_symlink()
        )
    except OSError as error:
        raise ValueError(f"LOGDIR: {directory} cannot be read: {error.strerror}") from error
    found = [path for path in below if is_run(path)]
    if not found:
        raise ValueError(f"LOGDIR: {_nothing(directory, below)}")
    if launches:
        raise ValueError(
            "--launch: expected with the directory of one run, received with "
            f"{directory}, which holds {len(found)}"
        )
    runs = sorted(
        (read_run(path) for path in found), key=lambda run: (run.begun or 0.0, str(run.path))
    )
    chapters = [
        outline.chapter(run, slug(f"{place} {run.path.name}")) for place, run in enumerate(runs, 1)
    ]
    return [
        comparison.of_runs(directory, runs, [path for path in below if is_benchmark(path)]),
        *chapters,
    ]


def _nothing(directory: Path, below: Sequence[Path]) -> str:
    """Explain why there is no report for a directory, and what you can do."""
    if (directory / JOURNAL).is_file():
        return (
            f"{directory} holds the logs of a launch, but no run; expected the run's directory: "
            f"tfdist report RUN --launch {directory}, or for its faults alone: tfdist "
            f"chaos report {directory}"
        )
    benchmarks = [path for path in below if is_benchmark(path)]
    if benchmarks:
        return f"{directory} holds no run, but a benchmark: tfdist report {benchmarks[0]}"
    files = (
        f"{layout.CONFIG}, {layout.HISTORY}, {layout.SESSIONS} or {layout.SUMMARY}, event "
        f"files of TensorBoard in train/, or a {FILE}"
    )
    return (
        f"{directory} holds no run; expected {files}, in it or one directory below. `tfdist "
        "train` writes to runs/NAME"
    )


def _write(chapters: Sequence[Chapter], out: Path, images: Path | None) -> int:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise _WriteError(
            "matplotlib draws the figures, and is not installed: pip install 'tfdist[plot]'"
        ) from error
    foot = (
        f"Made by tfdist {tfdist.__version__} on {moment(time.time())}. This file needs no other."
    )
    _whole(out, page.render(chapters, foot).encode(), "--out")
    print(f"report   {out}, {out.stat().st_size / 1000:,.0f} kB")
    if images is not None:
        drawn = {
            f"{_prefix(chapter, chapters)}{figure.name}.png": figure
            for chapter in chapters
            for figure in chapter.figures
        }
        for name, figure in drawn.items():
            _whole(images / name, style.png(figure), "--png")
        print(f"images   {len(drawn)} in {images}")
    for chapter in chapters:
        own = f"{chapter.title}: " if len(chapters) > 1 else ""
        for sentence in chapter.absent:
            print(f"left out {own}{sentence}")
    damaged = [(chapter, sentence) for chapter in chapters for sentence in chapter.problems]
    for chapter, sentence in damaged:
        print(
            f"tfdist report: {chapter.title}: {sentence}"
            if len(chapters) > 1
            else f"tfdist report: {sentence}",
            file=sys.stderr,
        )
    return 1 if damaged else 0


def _prefix(chapter: Chapter, chapters: Sequence[Chapter]) -> str:
    return "" if len(chapters) == 1 else f"{chapter.name}-"


def _whole(path: Path, content: bytes, flag: str) -> None:
    """Write a file atomically, and create the directories above it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _WriteError(
            f"{path} cannot be written: {error.strerror}; name another place with {flag}"
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tfdist report",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "logdir", metavar="LOGDIR", help="directory of a run, of several, or of a benchmark"
    )
    parser.add_argument("--out", metavar="FILE", help=f"where the page goes (LOGDIR/{NAME})")
    parser.add_argument("--png", metavar="DIR", help="where the figures go as images (nowhere)")
    parser.add_argument(
        "--launch",
        metavar="DIR",
        action="append",
        default=[],
        help="logs of a launcher, if the run does not name them; may be repeated",
    )
    return parser
