"""Test that promises of the docs name tests that exist, and workflows commands that exist."""

import re

import yaml

from tests.launches import ROOT

SECTION = re.compile(r"## Guarantees\n(.*?)\n## ", re.DOTALL)


def test_every_promise_has_its_tests():
    (section,) = SECTION.findall((ROOT / "docs" / "faults.md").read_text())
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 10
    assert not [name for row in rows for name in missing_tests(row)]


def missing_tests(row):
    """Return the tests that a row names and that do not exist; it must name some."""
    names = re.findall(r"`(tests/\S+?\.py)::(\w+)`", row)
    assert names, row
    return [
        f"{path}::{name}"
        for path, name in names
        if not (ROOT / path).exists() or f"def {name}(" not in (ROOT / path).read_text()
    ]


def table(section):
    """Return the cells of the table of a section of docs/engines.md, line by line."""
    text = (ROOT / "docs" / "engines.md").read_text().partition(f"\n## {section}\n")[2]
    rows = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_every_feature_that_an_engine_is_said_to_have_has_its_tests():
    (_, *engines), _, *rows = table("Features")
    cells = {
        (feature, engine): cell
        for feature, *row in rows
        for engine, cell in zip(engines, row, strict=True)
    }
    assert len(cells) >= 12 * 7
    assert set(cells.values()) <= {"tested", "stand-in", "not run", "no"}
    with_test = {cell for cell, text in cells.items() if text in ("tested", "stand-in")}
    named = {}
    missing = []
    for feature, engine, tests in table("Tests")[2:]:
        named[feature, engine] = tests
        missing += missing_tests(tests)
    assert not missing
    assert named.keys() == with_test
    for (feature, engine), tests in named.items():
        is_real = "tests/engines/" in tests
        if cells[feature, engine] == "stand-in":
            assert not is_real, (feature, engine)
        elif not engine.startswith("this machine"):
            assert is_real, (feature, engine)


def test_commands_of_workflows_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = []
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            assert job["timeout-minutes"] > 0, path.name
            commands += [step["run"] for step in job["steps"] if "run" in step]
    assert ".ci/run" in commands
    for command in commands:
        program, *words = command.split()
        if program == "make":
            assert words[0] in targets
        elif program != "git":
            assert (ROOT / (words[0] if program == "python" else program)).is_file()
