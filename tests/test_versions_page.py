"""Test that docs/versions.md and the package have the same tested versions, and who writes both."""

import ast
import pathlib
import re
import shutil
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "versions.md"
MODULE = ROOT / "tfdist" / "keras_compat" / "tested_versions.py"


def versions_in(path):
    """Return `TESTED` of a module, which is not imported: that would load TensorFlow."""
    (value,) = (
        node.value
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "TESTED"
    )
    return ast.literal_eval(value)


@pytest.fixture
def matrix(ci_program, tmp_path, monkeypatch):
    """Return the program of `make test-matrix`, which writes to copies of page and module."""
    module = ci_program("test_matrix")
    monkeypatch.setattr(module, "PAGE", shutil.copy(PAGE, tmp_path / "versions.md"))
    monkeypatch.setattr(module, "MODULE", shutil.copy(MODULE, tmp_path / "tested_versions.py"))
    return module


def test_page_has_the_tested_versions():
    page = PAGE.read_text(encoding="utf-8")
    table = page.partition("<!-- of make test-matrix -->")[2].partition("<!-- end -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.strip().splitlines()[2:]
    ]
    passed = [
        tuple(".".join(version.split(".")[:2]) for version in (tensorflow, keras))
        for tensorflow, keras, _, *results in rows
        if all(re.fullmatch(r"passed \(.*\)|not run", result) for result in results)
        and "(" not in keras  # master and nightly
    ]
    assert list(dict.fromkeys(passed)) == list(versions_in(MODULE))
    assert passed


def test_only_versions_that_passed_become_tested(matrix):
    rows = [
        matrix.Row((*map(matrix.minor, versions),), (*versions, *results))
        for versions, results in (
            (("2.19.1", "3.10.0", "3.11.7"), ("passed (9)", "passed (8)")),
            (("2.20.0", "3.9.0", "3.11.7"), ("passed (9)", "failed (1 of 8)")),
            (("2.21", "3.11", "3.11"), ("not installable", "not installable")),
            (("2.21.0", "3.15.1", "3.11.7"), ("passed (9)", "passed (8)")),
            (("2.21.0", "3.15.1", "3.13.0"), ("passed (9)", "not run")),
            (("2.21.0", "3.16.0 (master)", "3.11.7"), ("passed (9)", "passed (8)")),
            (
                ("2.23.0.dev20261026 (nightly)", "3.16.0.dev2 (nightly)", "3.11.7"),
                ("passed (9)", "passed (8)"),
            ),
        )
    ]
    assert [row.installed for row in rows] == [True, True, False, True, True, True, True]
    assert sorted(rows, key=lambda row: matrix.numbers(row.combination)) == rows
    matrix.write(rows[:1])
    assert versions_in(matrix.MODULE) == (("2.19", "3.10"),)
    matrix.write([])
    assert versions_in(matrix.MODULE) == ()
    matrix.write(rows)
    assert versions_in(matrix.MODULE) == (("2.19", "3.10"), ("2.21", "3.15"))
    page = matrix.PAGE.read_text(encoding="utf-8")
    assert matrix.rows_of(page) == rows
    before, after = (text.partition(matrix.BEGIN)[0] for text in (PAGE.read_text("utf-8"), page))
    assert before == after
    assert page.endswith(PAGE.read_text("utf-8").partition("<!-- end -->\n")[2])


@pytest.mark.parametrize(
    ("code", "text", "verdict"),
    [
        (0, "....\n60 passed, 2 skipped in 9.00s\n", "passed (60, 2 skipped)"),
        (1, "..F\n1 failed, 59 passed in 9.00s\n", "failed (1 of 60)"),
        (1, "2 errors in 1.00s\n", "failed (2 of 2)"),
        (0, "2 skipped in 9.00s\n", "failed (did not start)"),
        (4, "ImportError while loading conftest\n", "failed (did not start)"),
        (124, "...\n", "failed (not done in time)"),
    ],
)
def test_last_line_of_pytest_is_understood(matrix, code, text, verdict):
    assert matrix.verdict(code, text) == verdict


def test_nightly_builds_take_the_place_of_releases(matrix, monkeypatch):
    monkeypatch.delenv("KERAS_SOURCE", raising=False)
    assert matrix.wanted("nightly", "nightly") == ["tf-nightly", "keras-nightly"]
    assert matrix.wanted("2.21", "3.15") == ["tensorflow==2.21.*", "keras==3.15.*"]
    others = matrix.requirements(pathlib.Path(sys.executable), without=("tensorflow", "keras"))
    names = {re.split(r"[<>=]", line)[0] for line in others}
    assert {"absl-py", "tensorflow-datasets"} < names
    assert not names & {"tensorflow", "keras", "pytest"}


@pytest.mark.parametrize("word", ["nightly:3.15", "2.21:nightly", "nightly", "2.21:3.15:nightly"])
def test_names_of_other_combinations_are_errors(matrix, word, capsys):
    with pytest.raises(SystemExit):
        matrix.main([word])
    assert f"{word}: expected minor versions such as 2.21:3.15" in capsys.readouterr().err
