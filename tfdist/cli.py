"""Command-line interface `tfdist COMMAND`, which imports only the module of the command."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import tfdist


class Command(NamedTuple):
    """Module of a command with `main(argv) -> int | None`, and its line in `tfdist --help`."""

    module: str
    summary: str


COMMANDS = {
    "launch": Command(
        "tfdist.launch.main", "run a script as a group of processes: workers, chief, evaluator, ps"
    ),
    "train": Command(
        "tfdist.run.train_command",
        "train what a config file describes: tfdist train --config=configs/X.py",
    ),
    "data": Command(
        "tfdist.tools.data", "look at data sets: tfdist data list, show, head, write, audit"
    ),
    "doctor": Command(
        "tfdist.tools.doctor.main",
        "find what is wrong with this host, a cluster or a run, before it starts",
    ),
    "verify": Command(
        "tfdist.tools.verify.main",
        "prove that several replicas compute what one does, step by step",
    ),
    "plan": Command(
        "tfdist.tools.plan.main",
        "predict memory and traffic of a run over N devices, and how to spread it: tfdist plan "
        "--config=...",
    ),
    "bench": Command(
        "tfdist.tools.bench.main",
        "measure how training, inference or sums scale, and why not: tfdist bench --config=...",
    ),
    "report": Command(
        "tfdist.tools.report.main",
        "make one HTML file of a run, of several, or of a benchmark: tfdist report runs/digits",
    ),
    "chaos": Command(
        "tfdist.tools.chaos", "tell what faults have cost a launch: tfdist chaos report"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `tfdist` command.

    Args:
        argv: Words after `tfdist`; default: those of this process.

    Returns:
        The exit code: 0 for success, 2 for a mistake on the command line, else the value that the
        command returned.

    Example:
        >>> main(["--version"])  # doctest: +ELLIPSIS
        tfdist ...
        0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0 if words else 2
    if words[0] == "--version":
        print("tfdist", tfdist.__version__)
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"tfdist: error: {_unknown(words[0])}", file=sys.stderr)
        return 2
    return importlib.import_module(command.module).main(words[1:]) or 0


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="tfdist",
        usage="tfdist [-h] [--version] COMMAND ...",
        description="Distributed training for Keras 3 on TensorFlow.",
        epilog="commands:\n" + "\n".join(lines) + "\n\n`tfdist COMMAND --help` explains a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    return parser.format_help()


def _unknown(word: str) -> str:
    nearest = difflib.get_close_matches(word, COMMANDS, n=1)
    remedy = f"Did you mean `tfdist {nearest[0]}`?" if nearest else "See `tfdist --help`."
    return f"expected a command ({', '.join(COMMANDS)}), received {word!r}. {remedy}"
