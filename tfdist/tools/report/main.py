"""Entry point of `tfdist report`: writes one HTML file about runs or a benchmark."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import tfdist
from tfdist.runtime.command import COMMON_EXIT_CODES, Command, usage_errors
from tfdist.runtime.formatting import counted, format_bytes, moment
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
Writes one HTML file about LOGDIR, the directory of a run, of several runs, or of a benchmark. You
can open the file offline.

  tfdist report runs/digits
  tfdist report runs                                       (all runs in this directory, compared)
  tfdist report runs/bench-digits --png figures            (also writes the figures as images)
  tfdist report logs --launch runs/launch-20260102-030405  (with the restarts that a launch logged)
"""


class _WriteError(Exception):
    """The page or an image cannot be written."""


def _report(flags: argparse.Namespace, words: list[str]) -> int:
    with usage_errors():
        chapters = read(Path(flags.logdir), [Path(directory) for directory in flags.launch])
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
        problem = "is a file" if directory.exists() else "does not exist"
        raise ValueError(
            "LOGDIR: expected the directory of a run, of runs or of a benchmark, "
            f"received {directory}, which {problem}"
        )
    for launch in launches:
        if not (launch / JOURNAL).is_file():
            raise ValueError(
                f"--launch: expected the directory of a launch's logs, received {launch}: "
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
    directories = [path for path in below if is_run(path)]
    if not directories:
        raise ValueError(f"LOGDIR: {_nothing(directory, below)}")
    if launches:
        raise ValueError(
            "--launch: expected with the directory of one run, received with "
            f"{directory}, which holds {len(directories)}"
        )
    runs = sorted(
        (read_run(path) for path in directories), key=lambda run: (run.begun or 0.0, str(run.path))
    )
    chapters = [
        outline.chapter(run, slug(f"{number} {run.path.name}"))
        for number, run in enumerate(runs, 1)
    ]
    return [
        comparison.of_runs(directory, runs, [path for path in below if is_benchmark(path)]),
        *chapters,
    ]


def _nothing(directory: Path, below: Sequence[Path]) -> str:
    """Explain why there is no report for a directory, and what you can do."""
    own = (directory / JOURNAL).is_file()
    benchmarks = [path for path in below if is_benchmark(path)]
    if benchmarks and not own:
        return f"{directory} holds no run; for its benchmark: tfdist report {benchmarks[0]}"
    launches = [directory] if own else [path for path in below if (path / JOURNAL).is_file()]
    if launches:
        launch = launches[-1]  # the newest, by its name
        return (
            f"{directory} holds the logs of {counted(len(launches), 'launch', 'launches')}, but no "
            f"run; expected the directory of the run: tfdist report RUN --launch {launch}. "
            "`tfdist train` writes a run to runs/NAME. A script writes one to RUN with "
            "model.fit(..., callbacks=[tfdist.TensorBoard(RUN)]). Without a run, "
            f"`tfdist goodput {launch}` says where the time of the launch went, and "
            f"`tfdist chaos report {launch}` what injected faults cost"
        )
    files = (
        f"{layout.CONFIG}, {layout.HISTORY}, {layout.SESSIONS} or {layout.SUMMARY}, event "
        f"files of TensorBoard in train/, or a {FILE}"
    )
    return (
        f"{directory} holds no run; expected {files}, in this directory or directly below it. "
        "`tfdist train` writes to runs/NAME, and a script with tfdist.TensorBoard(LOGDIR)"
    )


def _write(chapters: Sequence[Chapter], out: Path, images: Path | None) -> int:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise _WriteError(
            "matplotlib, which draws the figures, is not installed: pip install 'tfdist[plot]'"
        ) from error
    foot = f"Made by tfdist {tfdist.__version__} on {moment(time.time())}."
    _whole(out, page.render(chapters, foot).encode(), "--out")
    print(f"report   {out}, {format_bytes(out.stat().st_size)}")
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
            f"{path} cannot be written: {error.strerror}; name another path with {flag}"
        ) from error


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logdir", metavar="LOGDIR", help="directory of a run, of several runs, or of a benchmark"
    )
    parser.add_argument("--out", metavar="FILE", help=f"file to write (LOGDIR/{NAME})")
    parser.add_argument(
        "--png", metavar="DIR", help="directory in which to write the figures as images, too (none)"
    )
    parser.add_argument(
        "--launch",
        metavar="DIR",
        action="append",
        default=[],
        help="directory of a launch's logs, if the run does not name it; may be repeated",
    )


main = Command(
    name="tfdist report",
    description=_DESCRIPTION,
    exit_codes={
        **COMMON_EXIT_CODES,
        0: "the report is written",
        1: "the report names damaged files, failed setups or values that are not finite; or it "
        "could not be written",
    },
    run=_report,
    add_flags=_add_flags,
    word_remedy="LOGDIR is one directory. To compare runs, name the directory that holds all of "
    "them: tfdist report runs",
)
