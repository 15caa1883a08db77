"""Test that docs/ecosystem.md has each model that is tested, and who writes its table."""

import pathlib
import shutil

import pytest

from tests.ecosystem.models import MODELS
from tests.ecosystem.test_models import WAYS

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "ecosystem.md"
RESULTS = """<testsuites><testsuite>
<testcase name="test_numbers_are_those_of_keras[GPT-2-mirrored]" />
<testcase name="test_numbers_are_those_of_keras[GPT-2-workers]"><failure>x</failure></testcase>
<testcase name="test_numbers_are_those_of_keras[GPT-2-servers]"><error>x</error></testcase>
<testcase name="test_numbers_are_those_of_keras[GPT-2-pipeline]"><skipped>x</skipped></testcase>
<testcase name="test_the_search_of_the_docs" />
</testsuite></testsuites>"""


@pytest.fixture
def program(ci_program, tmp_path, monkeypatch):
    """Return the program of `make test-ecosystem`, which writes to a copy of the page."""
    module = ci_program("test_ecosystem")
    monkeypatch.setattr(module, "PAGE", shutil.copy(PAGE, tmp_path / "ecosystem.md"))
    monkeypatch.setattr(module, "PACKAGES", ("keras",))
    return module


def test_page_has_each_model_and_way(program):
    lines = program.tables.read(PAGE.read_text("utf-8"), program.BEGIN).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    assert [name for name, *_ in rows[2:]] == list(MODELS)
    assert {cell for _, *cells in rows[2:] for cell in cells} == {"equal", "no", "—"}
    assert tuple(program.WAYS) == WAYS


def test_failures_are_in_the_table(program, tmp_path):
    (tmp_path / "results.xml").write_text(RESULTS)
    program.tables.write(program.PAGE, program.BEGIN, program.table(tmp_path / "results.xml"))
    page, before = program.PAGE.read_text("utf-8"), PAGE.read_text("utf-8")
    assert "| GPT-2 | equal | **fails** | **fails** | — | no | — |" in page
    for text in (page, before):
        assert text.count(program.BEGIN) == text.count("<!-- end -->") == 1
    assert page.partition(program.BEGIN)[0] == before.partition(program.BEGIN)[0]
    assert page.partition("<!-- end -->")[2] == before.partition("<!-- end -->")[2]
