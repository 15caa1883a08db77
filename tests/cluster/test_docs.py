"""Run commands of README and docs: each block marked `bash run`, in a copy of what a reader has.

The word after `bash` says how a block is treated: `run`; `run mpirun` where that program is
installed; `tested test_NAME` where those tests run the same command, with more to look at;
`elsewhere` for what needs several machines, a network or minutes. A block `python NAME.py` is a
file for the page's commands.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pathlib
import re
import shlex
import shutil

import pytest

import tfdist
from tests.forkserver import write_programs
from tests.processes import PYTHON, ROOT, group
from tfdist import cli
from tfdist.cluster import addresses

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+) ?(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
TIMEOUT_S = 180  # for one block; each takes some ten
SCRIPT_S = 300  # for one script that other tests run


def blocks(page: pathlib.Path, language: str) -> list[tuple[str, str]]:
    """Return (text after the language, text) of a page's blocks of code."""
    return [
        (words, text)
        for block_language, words, text in FENCE.findall(page.read_text(encoding="utf-8"))
        if block_language == language
    ]


def output_of_script(directory, script: str, name: str, *launch: str, strategy: str = "") -> str:
    """Run a page's script with this strategy, and return its output.

    Args:
        directory: Where the script is written, as NAME.py, and run.
        script: Text of the script.
        name: Name of the script and of its log.
        launch: Words before the script, such as those of `tfdist launch`.
        strategy: Arguments of `make_strategy`.
    """
    text = script.replace("make_strategy()", f"make_strategy({strategy})")
    (directory / f"{name}.py").write_text(text)
    command = f"cd '{directory}' && exec '{PYTHON}' \"$@\""
    with group(directory) as members:
        words = [*launch, f"{name}.py"]
        members.start(name, ["bash", "-c", command, "bash", *words], PYTHONPATH=str(ROOT))
        members.succeed(SCRIPT_S)
        return members.log(name)


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


# --- docs/coming_from.md: what takes the place of a line of another tool --------------------------
def replacements() -> list[str]:
    """Return the code in the right-hand cells of the page's tables."""
    page = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert all(len(row) == 2 for row in rows), [row for row in rows if len(row) != 2]
    return [code for _, right in rows for code in re.findall(r"`([^`]+)`", right)]


def test_commands_that_replace_others_can_be_parsed():
    launch = command_of("launch")
    commands = [code for code in replacements() if "tfdist " in code]
    assert len(commands) >= 8
    for code in commands:
        words = shlex.split(code[code.index("tfdist ") :])
        if "--" not in words:
            words += ["--", "train.py"]
        command_of(words[1]).parse(words[2:])
    flags = [code.partition(" ")[0] for code in replacements() if code.startswith("--")]
    assert len(flags) >= 8
    assert not set(flags) - set(launch.parser().flags)


def command_of(name: str):
    module, _, attribute = cli.COMMANDS[name].target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def test_python_that_replaces_others_fits_its_signatures():
    """A class or function is called with these arguments, or, if that has effects, could be."""
    calls = [code for code in replacements() if re.match(r"(\w+ = )?tfdist\.\S+\(", code)]
    assert len(calls) >= 20
    for code in calls:
        tree = ast.parse(code.partition(" = ")[2] or code, mode="eval")
        node = tree.body
        while isinstance(node, ast.Attribute):  # such as .is_chief of what a call returns
            node = node.value
        assert isinstance(node, ast.Call), code
        function = node.func
        if isinstance(function.value, ast.Call):  # a method of what another call returns
            assert ast.unparse(function.value) == "tfdist.parallel.replicas()", code
            function = getattr(tfdist.parallel.Group, function.attr)
            arguments = [None, *node.args]
        else:
            function = eval(ast.unparse(function), {"tfdist": tfdist})
            arguments = node.args
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        inspect.signature(function).bind(*arguments, **keywords)
        for value in keywords.values():  # policies check their own values
            if "tfdist.sync" in ast.unparse(value):
                eval(ast.unparse(value), {"tfdist": tfdist})
        if "sync" in keywords and isinstance(keywords["sync"], ast.Constant):
            tfdist.sync.policy(keywords["sync"].value)


def test_links_have_targets():
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
