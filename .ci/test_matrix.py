"""Test the hooks into Keras, and parity, with each TensorFlow and Keras that can be installed.

`make test-matrix` runs this. Each combination gets an environment of its own below .venv-matrix,
which stays for the next time (about 2 GB each). What was seen is printed as a table, written to
docs/versions.md, and what passed to `TESTED` of tfdist/keras_compat/tested_versions.py.

Without arguments, these are all TensorFlow and Keras versions with the Python that runs this, and
the newest TensorFlow with the newest Keras on each other Python of the PATH. To run some only, name
them, with a Python or without: `make test-matrix COMBINATIONS="2.19:3.10 2.21:3.15:3.12"`; the rows
of the others then stay as they are. The Keras version "master" is built from source, from GitHub or
from the directory KERAS_SOURCE. "nightly:nightly" are the nightly builds of both.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys

import tables

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".venv-matrix"
PAGE = ROOT / "docs" / "versions.md"
MODULE = ROOT / "tfdist" / "keras_compat" / "tested_versions.py"
TENSORFLOW = ("2.19", "2.20", "2.21")
KERAS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.15")
MASTER = "master"
NIGHTLY = "nightly"
NAMED = (MASTER, NIGHTLY)  # versions with a name in the place of a number
KERAS_SOURCE = "git+https://github.com/keras-team/keras"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
OWN_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
SUITES = {
    "hooks": ("tests/unit/keras_compat",),
    "parity": ("tests/parity", "-k", "mirrored-2"),
    "workers": ("tests/parity/test_parity.py", "-k", "workers-2"),
}
PACKAGES = ("pytest>=8", "pytest-timeout>=2.3")
NOT_INSTALLED = ("not installable", "installation failed")  # cells of the table
NOT_RUN = "not run"
NOT_INSTALLABLE = re.compile(
    r"ResolutionImpossible|No matching distribution found|requires a different Python"
)
HEADER = (
    "| TensorFlow | Keras | Python | hooks | parity, `mirrored-2` | parity, two workers |",
    "|---|---|---|---|---|---|",
)
BEGIN = "<!-- of make test-matrix -->\n"
INSTALL_S = 1800
TESTS_S = 3600


@dataclasses.dataclass(frozen=True)
class Row:
    """Result of a combination: versions as installed, and what its tests said.

    Attributes:
        combination: Minor versions of TensorFlow, Keras and Python; Keras may be "master", or
            both "nightly".
        cells: Cells of the table.
    """

    combination: tuple[str, str, str]
    cells: tuple[str, ...]

    @property
    def installed(self) -> bool:
        """Return whether the tests could run."""
        return self.cells[3] not in NOT_INSTALLED

    @property
    def passed(self) -> bool:
        """Return whether all tests passed that have run."""
        return all(re.fullmatch(rf"passed \(.*\)|{NOT_RUN}", cell) for cell in self.cells[3:])

    def __str__(self) -> str:
        return f"| {' | '.join(self.cells)} |"


def main(argv: list[str]) -> int:
    """Return 0 if no combination failed, else 1."""
    parser = argparse.ArgumentParser(prog="make test-matrix", description=__doc__)
    parser.add_argument("combinations", nargs="*", metavar="TENSORFLOW:KERAS[:PYTHON]")
    words = parser.parse_args(argv).combinations or everything()
    combinations = []
    for word in words:
        match = re.fullmatch(
            rf"(\d+\.\d+:(?:\d+\.\d+|{MASTER})|{NIGHTLY}:{NIGHTLY})(?::(\d+\.\d+))?", word
        )
        if not match:
            parser.error(
                f"{word}: expected minor versions such as 2.21:3.15 or 2.21:3.15:3.12, "
                f"2.21:{MASTER} or {NIGHTLY}:{NIGHTLY}"
            )
        pair, python = match.groups(OWN_PYTHON)
        tensorflow, keras = pair.split(":")
        if not runs(python):
            parser.error(f"{word}: expected python{python} on the PATH, found none that runs")
        combinations.append((tensorflow, keras, python))
    rows = {row.combination: row for row in rows_of(PAGE.read_text(encoding="utf-8"))}
    seen = []
    for combination in combinations:
        row = run(*combination)
        print(row, flush=True)
        seen.append(row)
        rows[row.combination] = row
        write(sorted(rows.values(), key=lambda row: numbers(row.combination)))  # as far as it came
    print("\n".join(["", *HEADER, *map(str, seen)]))
    return int(any(not row.passed and row.installed for row in seen))


def everything() -> list[str]:
    """Return all combinations that are tested where none is named."""
    newest = f"{TENSORFLOW[-1]}:{KERAS[-1]}"
    return [
        *(f"{tensorflow}:{keras}" for tensorflow in TENSORFLOW for keras in (*KERAS, MASTER)),
        f"{NIGHTLY}:{NIGHTLY}",
        *(f"{newest}:{python}" for python in PYTHONS if python != OWN_PYTHON and runs(python)),
    ]


def command_of(python: str) -> str | None:
    """Return the path of a Python of this version; None if there is none."""
    return sys.executable if python == OWN_PYTHON else shutil.which(f"python{python}")


def runs(python: str) -> bool:
    """Return whether there is a Python of this version; a shim of pyenv may have none."""
    command = command_of(python)
    return (
        bool(command) and not subprocess.run([command, "--version"], capture_output=True).returncode
    )


def numbers(combination: tuple[str, ...]) -> list[list[float]]:
    """Return the versions as numbers, by which they are sorted; names are the newest."""
    return [
        [float("inf") if part in NAMED else int(part) for part in version.split(".")]
        for version in combination
    ]


def run(tensorflow: str, keras: str, python_version: str) -> Row:
    """Install a combination, and return what its tests say."""
    combination = (tensorflow, keras, python_version)
    directory = ENVIRONMENTS / f"tensorflow-{tensorflow}-keras-{keras}-python-{python_version}"
    python = directory / "bin" / "python"
    if keras in NAMED:  # pip would keep another commit of the same version
        shutil.rmtree(directory, ignore_errors=True)
    if not python.exists():
        # The pip of an old Python may take half an hour to choose versions.
        command = [str(command_of(python_version)), "-m", "venv", "--upgrade-deps", directory]
        subprocess.run(command, check=True)
    packages = wanted(tensorflow, keras)
    print(f"{' '.join(packages)}: installing into {directory.relative_to(ROOT)}", flush=True)
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    log = directory / "install.log"
    code, text = output(log, [*pip, "--no-deps", "--editable", "."], INSTALL_S)
    if not code:
        # Of these, pip would not take a nightly build for the package that it replaces.
        others = requirements(python, without=("tensorflow", "keras"))
        code, text = output(log, [*pip, *packages, *others, *PACKAGES], INSTALL_S)
    if code:
        why = NOT_INSTALLED[0 if NOT_INSTALLABLE.search(text) else 1]
        return Row(combination, (tensorflow, keras, python_version, *[why] * len(SUITES)))
    print(f"{' '.join(packages)}: testing", flush=True)
    show = (
        "import platform; from tfdist.runtime.installed_packages import version_of; "
        "print(version_of('tensorflow'), version_of('keras'), platform.python_version())"
    )
    _, text = output(directory / "versions.log", [python, "-c", show], 60)
    versions = text.split()[-3:]
    for index, name in enumerate((tensorflow, keras)):
        if name in NAMED:
            versions[index] += f" ({name})"
    cells = []
    for suite, words in SUITES.items():
        log = directory / f"{suite}.log"
        cells.append(verdict(*output(log, [python, "-m", "pytest", "-q", *words], TESTS_S)))
    return Row(combination, (*versions, *cells))


def wanted(tensorflow: str, keras: str) -> list[str]:
    """Return what pip has to install for a combination."""
    if tensorflow == NIGHTLY:
        return ["tf-nightly", "keras-nightly"]
    if keras != MASTER:
        return [f"tensorflow=={tensorflow}.*", f"keras=={keras}.*"]
    source = os.environ.get("KERAS_SOURCE", KERAS_SOURCE)
    if os.path.isdir(source):
        source = pathlib.Path(source).resolve().as_uri()
    return [f"tensorflow=={tensorflow}.*", f"keras @ {source}"]


def requirements(python: pathlib.Path, without: tuple[str, ...]) -> list[str]:
    """Return what tfdist requires, apart from some packages, in an environment that has it."""
    show = "import importlib.metadata as m; print(*m.requires('tfdist'), sep='\\n')"
    text = subprocess.run([python, "-c", show], check=True, capture_output=True, text=True).stdout
    left_out = re.compile(rf"({'|'.join(without)})\b(?!-)|.*; *extra ==")
    return [line for line in text.splitlines() if not left_out.match(line)]


def output(log: pathlib.Path, command: list, timeout: float) -> tuple[int, str]:
    """Return exit code and output of a command, which is kept in a log."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # On some CPUs, TensorFlow computes without oneDNN unless told, and rounds in another way.
    environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    with log.open("w") as file:
        try:
            code = subprocess.run(
                [str(word) for word in command],
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=timeout,
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    return code, log.read_text(errors="replace")


def verdict(code: int, text: str) -> str:
    """Return what a run of pytest says, from its last line.

    Example:
        >>> verdict(0, "60 passed, 2 skipped in 9.00s")
        'passed (60, 2 skipped)'
        >>> verdict(1, "2 failed, 58 passed in 9.00s")
        'failed (2 of 60)'
    """
    if code == 124:
        return "failed (not done in time)"
    last = text.strip().rpartition("\n")[2]
    counts = {
        word: int(number)
        for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)s?\b", last)
    }
    bad = counts.get("failed", 0) + counts.get("error", 0)
    if code == 0 and counts.get("passed"):
        skipped = f", {counts['skipped']} skipped" if "skipped" in counts else ""
        return f"passed ({counts['passed']}{skipped})"
    return f"failed ({bad} of {bad + counts.get('passed', 0)})" if bad else "failed (did not start)"


def rows_of(page: str) -> list[Row]:
    """Return the rows of the table on the page."""
    rows = []
    for line in tables.read(page, BEGIN).splitlines()[len(HEADER) :]:
        cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
        rows.append(Row((minor(cells[0]), minor(cells[1]), minor(cells[2])), cells))
    return rows


def minor(version: str) -> str:
    """Return the minor version of a version, or the name in its parentheses.

    Example:
        >>> minor("2.21.0"), minor("3.16.0 (master)")
        ('2.21', 'master')
    """
    name = re.search(r"\((.*)\)", version)
    return name[1] if name else ".".join(version.split(".")[:2])


def write(rows: list[Row]) -> None:
    """Write the table of the page, and `TESTED` of the package."""
    tables.write(PAGE, BEGIN, "\n".join([*HEADER, *map(str, rows)]))
    passed = dict.fromkeys(row.combination[:2] for row in rows if row.passed)
    failed = {row.combination[:2] for row in rows if row.installed and not row.passed}
    pairs = [f'("{a}", "{b}"),' for a, b in passed if b not in NAMED and (a, b) not in failed]
    lines = "".join(f"\n    {pair}" for pair in pairs) + "\n" if len(pairs) > 1 else "".join(pairs)
    module, count = re.subn(
        r"(?ms)^(TESTED: [^=]* = )\(.*?\)\n\n",
        lambda match: f"{match[1]}({lines})\n\n",
        MODULE.read_text(encoding="utf-8"),
    )
    assert count == 1, MODULE
    MODULE.write_text(module, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
