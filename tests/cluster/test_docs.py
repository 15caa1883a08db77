"""Run commands of README and docs: each block marked `bash run`, in a copy of what a reader has.

The word after `bash` says how a block is treated: `run`; `run mpirun` where that program is
installed; `tested test_NAME` where those tests run the same command, with more to look at;
`elsewhere` for what needs several machines, a network or minutes. A block `python NAME.py` is a
file for the page's commands.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil

import pytest

from tests.forkserver import write_programs
from tests.processes import PYTHON, ROOT, group
from tfdist.cluster import addresses

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+) ?(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
TIMEOUT_S = 180  # for one block; each takes some ten


def blocks(page: pathlib.Path, language: str) -> list[tuple[str, str]]:
    """Return (text after the language, text) of a page's blocks of code."""
    return [
        (words, text)
        for block_language, words, text in FENCE.findall(page.read_text(encoding="utf-8"))
        if block_language == language
    ]


def runnable() -> list:
    return [
        pytest.param(page, words.split()[1:], text, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, (words, text) in enumerate(blocks(page, "bash"))
        if words.startswith("run")
    ]


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    """Return the commands' environment: this Python's programs first, and an own data directory."""
    programs = write_programs(tmp_path_factory.mktemp("programs"))
    return {
        "PATH": f"{programs}:{pathlib.Path(PYTHON).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TFDS_DATA_DIR": str(tmp_path_factory.mktemp("tfds")),
        # In a container one is root, and has fewer cores than processes.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }


@pytest.fixture
def project(tmp_path):
    """Copy examples and configs; put the cluster of two workers on ports that are free now."""
    directory = tmp_path / "project"
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name, directory / name)
    cluster = directory / "configs" / "clusters" / "local-two.yaml"
    text = cluster.read_text()
    for example, port in zip(("2222", "2223"), addresses.free_ports(2), strict=True):
        text = text.replace(f":{example}", f":{port}")
    cluster.write_text(text)
    return directory


@pytest.mark.parametrize(("page", "programs", "text"), runnable())
def test_a_command_of_the_docs(page, programs, text, project, environ, tmp_path):
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    for name, code in (*blocks(page, "python"), *blocks(page, "yaml")):
        if name:
            (project / name).write_text(code)
    with group(tmp_path) as members:
        members.start(
            "block", ["bash", "-euo", "pipefail", "-c", f"cd '{project}'\n{text}"], **environ
        )
        members.succeed(TIMEOUT_S)


def test_every_command_is_marked():
    for page in PAGES:
        for words, text in blocks(page, "bash"):
            assert re.fullmatch(r"run( \w+)?|tested test_\w+|elsewhere", words), (
                f"{page.name}: {words!r} of\n{text}"
            )
            if words.startswith("tested"):
                assert (ROOT / "tests" / "cluster" / f"{words.split()[1]}.py").is_file(), (
                    f"{page.name}: {words!r}"
                )


def test_links_have_targets():
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
