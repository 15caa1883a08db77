"""Test the reference of configuration keys, in the terminal and in the docs."""

from tests.processes import ROOT
from tfdist.config import reference


def test_every_key_has_a_meaning():
    keys = [key for _, _, keys in reference.sections() for key in keys]
    assert len(keys) > 50
    assert [key.name for key in keys if not key.meaning] == []
    assert [key.name for key in keys if key.type == ""] == []


def test_docs_have_the_reference():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page.endswith(reference.markdown()), (
        "docs/configuration.md: expected it to end with what "
        "`python -c \"from tfdist.config import reference; print(reference.markdown(), end='')\"` "
        "prints"
    )


def test_help_says_meaning_type_default_and_allowed_values():
    text = " ".join(reference.text().split())
    assert "--config.train.epochs=8 (whole number; at least 1) Number of passes over" in text
    assert "--config.train.schedule=constant (text; constant, cosine, polynomial, steps, " in text
    assert "--config.output.dir (text, or none)" in text
    assert "--config.train.optimizer_options.NAME (mapping)" in text
