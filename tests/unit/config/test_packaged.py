"""Test that configs of the package are found by their names."""

import dataclasses

import pytest

from tfdist import cli, config
from tfdist.config import packaged
from tfdist.run.train_command import parse, run


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


def test_directory_that_a_packaged_config_reads_must_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("IMAGENET", raising=False)
    message = (
        r"^data\.data_dir: expected .*received 'imagenet'; there is no directory .*imagenet\. Set "
        r"the environment variable IMAGENET"
    )
    with pytest.raises(ValueError, match=message):
        run(parse(["--config=imagenet_resnet34"]))
    monkeypatch.setenv("IMAGENET", "images")
    section = parse(["--config=imagenet_resnet34"]).data
    with pytest.raises(ValueError, match="received 'images'"):
        packaged.check_data_dir(section)
    (tmp_path / "images").mkdir()
    packaged.check_data_dir(section)
    packaged.check_data_dir(dataclasses.replace(section, data_dir="gs://bucket/images"))


@pytest.mark.parametrize("name", ["tfdist_digits", "mine.py:examples"])
def test_directories_of_other_data_may_be_made_later(name, tmp_path):
    packaged.check_data_dir(config.Data(name=name, data_dir=str(tmp_path / "absent")))


@pytest.mark.parametrize("name", ["digit", "digits.py", "configs/digits.py"])
def test_a_name_that_is_neither_is_an_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^--config={name}: no such file in .*packaged config"):
        parse([f"--config={name}"])


def test_the_catalog_is_packaged(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["data", "list"]) == 0
    assert "digits" in capsys.readouterr().out
