"""Test models of KerasHub, Keras Applications, Keras Recommenders, and KerasTuner's searches.

`make test-ecosystem` runs this, in an environment with these packages. What was seen is written to
docs/ecosystem.md as a table. Arguments are passed on to pytest; with any, nothing is written.
"""

from __future__ import annotations

import importlib.metadata
import pathlib
import platform
import subprocess
import sys
import xml.etree.ElementTree

import tables

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "ecosystem.md"
RESULTS = ROOT / "build" / "ecosystem.xml"
BEGIN = "<!-- of make test-ecosystem -->\n"
MODELS = "tests/ecosystem"
OTHERS = ("tests/cluster/test_kerashub.py", "tests/cluster/test_tuning.py")
WAYS = {
    "mirrored": "two devices, `mirrored`",
    "workers": "two workers",
    "servers": "parameter servers",
    "fsdp": "FSDP, two workers",
    "pipeline": "two pipeline stages",
    "layouts": "its layout map, two devices",
}
PACKAGES = ("keras-hub", "keras-rs", "keras-tuner", "tensorflow", "keras")


def main(words: list[str]) -> int:
    """Return the exit code of pytest."""
    RESULTS.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", MODELS, *OTHERS]
    code = subprocess.run([*command, f"--junitxml={RESULTS}", *words], cwd=ROOT).returncode
    if not words and code in (0, 1):  # not where pytest was interrupted, or could not start
        tables.write(PAGE, BEGIN, table(RESULTS))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return code


def table(results: pathlib.Path) -> str:
    """Return the table of the page, from pytest's results as JUnit's XML."""
    cells: dict[str, dict[str, str]] = {}
    for case in xml.etree.ElementTree.parse(results).iter("testcase"):
        test, _, words = case.attrib["name"].rstrip("]").partition("[")
        if test == "test_numbers_are_those_of_keras":
            name, _, way = words.rpartition("-")
            cells.setdefault(name, {})[way] = said(case)
    lines = [
        f"| model | {' | '.join(WAYS.values())} |",
        f"|---|{'---|' * len(WAYS)}",
        *(
            f"| {name} | {' | '.join(row.get(way, '—') for way in WAYS)} |"
            for name, row in cells.items()
        ),
    ]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return "\n".join([*lines, "", f"With {versions}, Python {platform.python_version()}."])


def said(case: xml.etree.ElementTree.Element) -> str:
    """Return what the page says of a test."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "**fails**"
    return "equal" if case.find("skipped") is None else "no"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
