"""Test that docs/ecosystem.md has each model that is tested, and who writes its table."""

import importlib.util
import pathlib
import shutil

import pytest

from tests.ecosystem.models import MODELS

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
def program(tmp_path):
    """Return the program of `make test-ecosystem`, which writes to a copy of the page."""
    spec = importlib.util.spec_from_file_location("ecosystem", ROOT / ".ci" / "test_ecosystem.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.PAGE = shutil.copy(PAGE, tmp_path / "ecosystem.md")
    module.PACKAGES = ("keras",)
    return module


def test_page_has_each_model(program):
    lines = (
        PAGE.read_text("utf-8").partition(program.BEGIN)[2].partition(program.END)[0].split("\n")
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    assert [name for name, *_ in rows[2:]] == list(MODELS)
    assert {cell for _, *cells in rows[2:] for cell in cells} == {"equal", "no"}


def test_failures_are_in_the_table(program, tmp_path):
    (tmp_path / "results.xml").write_text(RESULTS)
    program.write(program.table(tmp_path / "results.xml"))
    page, before = program.PAGE.read_text("utf-8"), PAGE.read_text("utf-8")
    assert "| GPT-2 | equal | **fails** | **fails** |  | no |" in page
    for text in (page, before):
        assert text.count(program.BEGIN) == text.count(program.END) == 1
    assert page.partition(program.BEGIN)[0] == before.partition(program.BEGIN)[0]
    assert page.partition(program.END)[2] == before.partition(program.END)[2]
