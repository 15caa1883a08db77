"""Figures become tables of Markdown and files of a report; nothing is measured here."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import shlex
import statistics

QUIET_CPU = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "GLOO_SOCKET_IFNAME": "lo"}


def about(script: str, argv: list[str], rounds: int) -> dict[str, str | int]:
    """What a reader must know to judge the figures."""
    return {
        "Command": f"`{shlex.join(['python', f'benchmarks/{script}', *argv])}`",
        "Date": datetime.date.today().isoformat(),
        "Versions": _versions(),
        "Machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start",
        "Rounds": rounds,
    }


def spread(values: list[float], form: str) -> str:
    """The median, and the range in brackets."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


def row(label: str, *cells: str) -> list[str]:
    """A line of a table."""
    return [f"| {label:46} | " + " | ".join(f"{cell:>24}" for cell in cells) + " |"]


def table(label: str, *cells: str) -> list[str]:
    """The head of a table."""
    return [*row(label, *cells), "|---|" + "--:|" * len(cells)]


def verdict(passed: bool | None, measured: bool) -> str:
    """How a bar was met."""
    return {None: "" if measured else "not measured", True: "pass", False: "FAIL"}[passed]


def write(directory: pathlib.Path, name: str, text: str, document: dict) -> None:
    """Writes a report as text for people, and as figures for programs."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.md").write_text(text)
    (directory / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def positive(text: str) -> int:
    """The type of a command-line argument."""
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, received {text!r}")
    return value


def _versions() -> str:
    packages = ("tfdist", "tensorflow", "keras", "tf_keras", "torch", "numpy")
    found = [f"{p} {importlib.metadata.version(p)}" for p in packages if importlib.util.find_spec(p)]
    return ", ".join([f"Python {platform.python_version()}", *found])
