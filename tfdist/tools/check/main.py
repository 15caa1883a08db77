"""Entry point of `tfdist check`: prints the traps of a Keras script, by line."""

from __future__ import annotations

import argparse
import json
import textwrap

from tfdist.runtime.command import COMMON_EXIT_CODES, Command, UsageError
from tfdist.tools.check import traps

TRAPS_CODE = 1
_DESCRIPTION = """\
Reads a Keras script, without running it, and prints which traps it has on the way to several
replicas: line, problem, remedy, and page of the docs. It finds them by names in the code, so that
no finding is no proof: `tfdist verify` compares the numbers.

  tfdist check train.py
"""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", metavar="SCRIPT", help="Python file to read")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def _run(flags: argparse.Namespace, words: list[str]) -> int:
    try:
        with open(flags.script, encoding="utf-8") as file:
            found = traps.find(file.read())
    except OSError as error:
        raise UsageError(
            f"SCRIPT: expected a Python file, received {flags.script}: {error.strerror}"
        ) from error
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{flags.script}:{line}" if line else flags.script
        raise UsageError(f"SCRIPT: expected Python, received {where}: {error}") from error
    if flags.json:
        print(json.dumps([_entry(finding) for finding in found], indent=2))
    else:
        for finding in found:
            print(_text(flags.script, finding))
        print(f"{flags.script}: {len(found) or 'no'} trap{'s' * (len(found) != 1)} found")
    return TRAPS_CODE if found else 0


def _entry(finding: traps.Finding) -> dict[str, str | int]:
    trap = traps.TRAPS[finding.kind]
    return {
        "line": finding.line,
        "kind": finding.kind,
        "problem": trap.problem,
        "remedy": trap.remedy,
        "page": f"docs/{trap.page}",
    }


def _text(script: str, finding: traps.Finding) -> str:
    trap = traps.TRAPS[finding.kind]
    lines = [f"{script}:{finding.line}: {finding.kind}: {trap.problem}."]
    for line in (f"Remedy: {trap.remedy}.", f"See docs/{trap.page}"):
        lines += textwrap.wrap(line, 96, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


main = Command(
    name="tfdist check",
    description=_DESCRIPTION,
    exit_codes={**COMMON_EXIT_CODES, 0: "no trap is found", TRAPS_CODE: "traps are found"},
    run=_run,
    add_flags=_add_flags,
)
