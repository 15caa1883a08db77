"""Test that `tfdist new` writes projects that run, and nothing where it cannot."""

import os
import py_compile
import re
import stat
import subprocess
import sys

import pytest

from tests.processes import PYTHON, ROOT, environment, group
from tfdist import cli
from tfdist.tools import new

PROJECT_S = 300  # for the tests of a project


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("template", new.TEMPLATES)
def test_a_new_project_passes_its_own_test(template, here, capsys):
    assert cli.main(["new", "my-project", "--template", template]) == 0
    printed = capsys.readouterr().out
    assert "  cd my-project\n" in printed
    assert f"  {new.TEMPLATES[template]}\n" in printed
    project = here / "my-project"
    assert os.listdir(here) == ["my-project"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(project.stat().st_mode) == 0o777 & ~mask
    assert {".gitignore", "README.md"} <= set(os.listdir(project))
    for path in project.iterdir():
        assert "PROJECT" not in path.read_text()
        if path.suffix == ".py":
            py_compile.compile(str(path), doraise=True, cfile=str(here / "compiled"))
    with group(here) as members:
        tests = [PYTHON, "-m", "pytest", "-q", str(project)]
        # The last templates have the tests of the first ones, which show how they run alone.
        members.start("test", tests + ["-k", "two"] * (template in ("imagenet", "recommender")))
        members.succeed(PROJECT_S)


def test_scripts_import_tfdist_before_what_imports_tensorflow(here):
    for template in new.TEMPLATES:
        new.create(here / template, template)
    scripts = list(here.glob("*/train.py"))
    assert scripts
    for script in scripts:
        text = script.read_text()
        assert text.index("import tfdist") < text.index("import keras"), script


def test_projects_are_as_the_formatter_wants_them(here):
    pytest.importorskip("ruff", reason="PyPI: ruff")
    for template in new.TEMPLATES:
        new.create(here / template, template)
    for action in (["format", "--check"], ["check", "--ignore", "D,I"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *action, "--config", ROOT / "pyproject.toml", "."],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: NAME"),
        (["a b"], "NAME: expected a name that begins with a letter or digit"),
        (["-x"], "-x: no such flag|required: NAME"),
        ([".."], "NAME: expected a name"),
        (["old"], "NAME: expected a directory that does not exist, received old, which does."),
        (["link"], "NAME: expected a directory that does not exist"),
        (["file/in"], "NAME: file/in cannot be made: Not a directory"),
        (["x", "--template", "lop"], "--template: received 'lop'. Did you mean loop?"),
    ],
)
def test_a_mistake_writes_nothing(words, message, here, capsys):
    (here / "old").mkdir()
    (here / "link").symlink_to("nowhere")
    (here / "file").write_text("")
    before = sorted(os.listdir(here))
    assert cli.main(["new", *words]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert sorted(os.listdir(here)) == before
    assert os.listdir(here / "old") == []


def test_a_failure_while_writing_leaves_nothing(here, monkeypatch):
    def rename(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.rename", rename)
    with pytest.raises(OSError, match="No space left"):
        new.create(here / "x", "script")
    assert os.listdir(here) == []


def test_it_loads_no_tensorflow(here):
    code = (
        "import sys; from tfdist import cli; cli.main(['new', 'x']); "
        "assert not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=60,
        stdout=subprocess.DEVNULL,
        env=environment(),
    )
