"""Options, tables and files of the benchmarks' reports."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import secrets
import shlex
import signal
import statistics
import sys
from typing import Any

_QUIET_CPU = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "GLOO_SOCKET_IFNAME": "lo"}


def begin(script: str, argv: list[str], rounds: int, **environ: str) -> dict[str, str | int]:
    """Prepare the process of a benchmark, in which SIGTERM clears up files and processes.

    Args:
        script: Name of the benchmark's file.
        argv: Arguments of the command line.
        rounds: Number of rounds.
        **environ: Variables for its processes, which compute on CPUs.

    Returns:
        Facts that a reader needs to judge the figures.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # As `tfdist launch` does, so that workers use the collectives that its workers use.
    os.environ.update(_QUIET_CPU | {"TFDIST_TASK_SECRET": secrets.token_hex(32)} | environ)
    return {
        "Command": f"`{shlex.join(['python', f'benchmarks/{script}', *argv])}`",
        "Date": datetime.date.today().isoformat(),
        "Versions": _versions(),
        "Machine": (
            f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, load "
            f"{os.getloadavg()[0]:.1f} at the start"
        ),
        "Rounds": rounds,
    }


def heading(title: str, facts: dict[str, str | int]) -> list[str]:
    """Return the first lines of a report: its title, and a list of what `begin` returned."""
    return [f"# {title}", "", *(f"- {key}: {value}" for key, value in facts.items()), ""]


def spread(values: list[float], form: str) -> str:
    """Return the median, and the range in brackets."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


def ratios_of(times: dict[str, list[float]], one: str, other: str) -> list[float]:
    """Return the ratio of two times in each round."""
    return [a / b for a, b in zip(times[one], times[other], strict=True)]


def row(label: str, *cells: str) -> list[str]:
    """Return a line of a table."""
    return [f"| {label:46} | " + " | ".join(f"{cell:>24}" for cell in cells) + " |"]


def table(label: str, *cells: str) -> list[str]:
    """Return the head of a table."""
    return [*row(label, *cells), "|---|" + "--:|" * len(cells)]


def verdict(passed: bool | None, measured: bool) -> str:
    """Return how a bar was met."""
    return {None: "" if measured else "not measured", True: "pass", False: "FAIL"}[passed]


def verdict_rows(verdicts: list[dict]) -> list[str]:
    """Return a row for each bar, with the figure that was found."""
    rows = []
    for each in verdicts:
        figures = (f"{each['bar']:.3g}", f"{each['found']:.3g}")
        rows += row(each["name"], *figures, verdict(each["passed"], True))
    return rows


def ratio_verdict(name: str, bar: float, ratios: list[float]) -> dict:
    """Return how the median of ratios over the rounds meets its bar, the most that it may be."""
    passed = statistics.median(ratios) <= bar
    return {"name": name, "bar": bar, "rounds": ratios, "passed": passed}


def ratio_rows(verdicts: list[dict], title: str) -> list[str]:
    """Return a table of the bars on ratios, with the medians over the rounds.

    Args:
        verdicts: Bars, as from `ratio_verdict`.
        title: What the ratios are of.
    """
    rows = table(title, "median", "bar", "")
    for each in verdicts:
        median = spread(each["rounds"], ".2f")
        rows += row(each["name"], median, f"<= {each['bar']}", verdict(each["passed"], True))
    return rows


def _write(directory: pathlib.Path, name: str, text: str, document: dict) -> None:
    """Write a report as text for people, and as figures for programs."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.md").write_text(text)
    (directory / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def add_options(parser: argparse.ArgumentParser, rounds: int, steps: str = "") -> None:
    """Add the arguments that every benchmark has.

    Args:
        parser: Parser to add the arguments to.
        rounds: The default of --rounds, for its help.
        steps: The help of --steps; "" (default) for a benchmark without it.
    """
    parser.set_defaults(partial=False)
    parser.add_argument(
        "--rounds", type=positive, help=f"rounds over all contenders, default {rounds}"
    )
    if steps:
        parser.add_argument("--steps", type=positive, help=steps)
    parser.add_argument(
        "--timeout", type=positive, default=300, help="seconds that any wait may take, default 300"
    )
    parser.add_argument(
        "--out",
        type=_directory,
        help="directory of the report, default benchmarks/reports; none with --quick, or if only "
        "parts run",
    )
    parser.add_argument(
        "--quick", action="store_true", help="smoke run of 1 round, its figures mean nothing"
    )


class _StoreParts(argparse.Action):
    """Action of an option that names parts of a benchmark.

    The report of some of them may not replace the whole one.
    """

    def __call__(self, parser, namespace, values, option_string=None):
        """Store the parts; note whether they are other ones than the default."""
        setattr(namespace, self.dest, values)
        namespace.partial |= not self.default or not set(values) >= set(self.default)


def add_parts(parser: argparse.ArgumentParser, flag: str, choices: Any, **options: Any) -> None:
    """Add an option that names parts of a benchmark, default all.

    Args:
        parser: Parser to add the option to.
        flag: Flag of the option.
        choices: The parts; None for any.
        **options: Other options of `add_argument`, in place of the default and the help.
    """
    if "default" not in options:
        options["default"] = list(choices)
    options.setdefault("help", "default: all")
    parser.add_argument(flag, action=_StoreParts, nargs="+", choices=choices, **options)


def fill_options(args: argparse.Namespace, rounds: int, quick_steps: int = 0) -> None:
    """Fill in the defaults of arguments that were not given.

    Args:
        args: Arguments of the command line.
        rounds: The default of --rounds.
        quick_steps: The default of --steps with --quick, 0 for a benchmark without it.
    """
    args.rounds = args.rounds or (1 if args.quick else rounds)
    if args.quick and quick_steps:
        args.steps = args.steps or quick_steps
    if not args.quick and args.out is None and not args.partial:
        args.out = pathlib.Path(__file__).parents[1] / "reports"


def cores(parser: argparse.ArgumentParser) -> list[int]:
    """Return a core for each of two workers; end the process where it may use fewer."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        parser.error(
            f"two workers need a core each, but this process may use only {usable}; give it two, "
            "or run elsewhere"
        )
    return usable[:2]


def conclude(
    args: argparse.Namespace, name: str, facts: dict, verdicts: list[dict], text: str, **figures
) -> int:
    """Print and write a report; return exit code 1 if a bar was missed, but not in a smoke run.

    Args:
        args: Arguments of the command line.
        name: Name of the report's files.
        facts: Facts that `begin` returned.
        verdicts: A dictionary for each bar; "passed" is None if it was not measured.
        text: The report as Markdown.
        **figures: Figures of the report as JSON, besides facts and verdicts.
    """
    print(text)
    if args.out:
        _write(args.out, name, text, {"about": facts, "bars": verdicts, **figures})
    return int(not args.quick and any(each["passed"] is False for each in verdicts))


def positive(text: str) -> int:
    """Parse a command-line argument that must be a positive whole number."""
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, received {text!r}")
    return value


def _directory(text: str) -> pathlib.Path:
    """Parse a command-line argument that must be a directory to write to; make it."""
    path = pathlib.Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"expected a directory to write to, received {text!r}: {error.strerror}"
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(
            f"expected a directory to write to, received {text!r}, which this user may not write to"
        )
    return path


def _versions() -> str:
    packages = ("tfdist", "tensorflow", "keras", "tf_keras", "torch", "numpy")
    installed = [
        f"{p} {importlib.metadata.version(p)}" for p in packages if importlib.util.find_spec(p)
    ]
    return ", ".join([f"Python {platform.python_version()}", *installed])
