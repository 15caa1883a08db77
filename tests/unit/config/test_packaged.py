"""Test that configs of the package are found by their names."""

import pytest

from tfdist import cli
from tfdist.config import packaged
from tfdist.run.train_command import parse


def test_a_packaged_config_is_found_in_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse(["--config=digits", "--config.train.epochs=3"]).train.epochs == 3
    (tmp_path / "digits").write_text(
        "import tfdist\ndef get_config():\n    c = tfdist.config.default()\n    c.name = 'mine'\n"
        "    return c\n"
    )
    assert parse(["--config=digits"]).name == "mine"  # a file prevails


def test_every_packaged_config_is_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert packaged.names()
    for name in packaged.names():
        assert parse([f"--config={name}"]).name == name


@pytest.mark.parametrize("name", ["digit", "digits.py", "configs/digits.py"])
def test_a_name_that_is_neither_is_an_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^--config={name}: no such file in .*packaged config"):
        parse([f"--config={name}"])


def test_the_catalog_is_packaged(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["data", "list"]) == 0
    assert "digits" in capsys.readouterr().out
