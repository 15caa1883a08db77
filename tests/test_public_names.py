"""Test that docs/api/index.md lists the public names, and that docs and examples use no others.

The files are read, not run.
"""

from __future__ import annotations

import ast
import json
import pathlib
import re
from collections.abc import Iterator

import pytest

import tfdist

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tfdist"
PAGE = ROOT / "docs" / "api" / "index.md"
# Pages for developers of tfdist, who use all of its modules.
FOR_DEVELOPERS = {"CONTRIBUTING.md", "architecture.md", "CHANGELOG.md"}
# Modules that the docs run as programs.
PROGRAMS = {"tfdist.data.service"}
FENCE = re.compile(r"^```python\b.*\n((?:.*\n)*?)```$", re.MULTILINE)


def exports(path: pathlib.Path) -> list[str] | None:
    """Return `__all__` of a module, or None."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return None


def exported() -> dict[str, list[str]]:
    """Return the names that each module with `__all__` exports."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        names = exports(path)
        if names is not None:
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = names
    return found


def listed() -> dict[str, list[str]]:
    """Return the names in the table of the page, by their modules."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## Public names\n")[2]
    rows = re.findall(r"^\| `(tfdist[\w.]*)` \| (.*) \|$", section, re.MULTILINE)
    return {module: re.findall(r"`(\w+)`", names) for module, names in rows}


PUBLIC = exported()


def test_page_lists_the_public_names():
    assert listed() == PUBLIC


def test_public_names_are_sorted_and_defined():
    for module, names in PUBLIC.items():
        assert names == sorted(set(names)), module
        directory = ROOT.joinpath(*module.split("."))
        path = directory / "__init__.py" if directory.is_dir() else directory.with_suffix(".py")
        defined = set(definitions(path))
        assert set(names) <= defined, f"{module}: {set(names) - defined}"


def definitions(path: pathlib.Path) -> Iterator[str]:
    """Yield the names that a module defines or imports; in `if TYPE_CHECKING:`, too."""
    body = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while body:
        node = body.pop()
        if isinstance(node, ast.If):
            body += node.body
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def private(name: str) -> bool:
    """Return whether a dotted name of tfdist goes through something that is not public.

    What follows a public object, such as a method, is public if Python calls it so.
    """
    if name in PUBLIC or name in PROGRAMS or any(key.startswith(f"{name}.") for key in PUBLIC):
        return False
    module = name
    while module not in PUBLIC:
        module = module.rpartition(".")[0]
    rest = name.removeprefix(f"{module}.").split(".")
    return rest[0] not in PUBLIC[module] or any(re.match(r"_(?!_)", part) for part in rest)


def used(code: str) -> Iterator[str]:
    """Yield the dotted names of tfdist that a piece of Python imports or uses."""
    tree = ast.parse(code)
    homes = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "tfdist":
                    yield alias.name
                    homes[alias.asname or "tfdist"] = alias.name if alias.asname else "tfdist"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tfdist":
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                homes[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    homes.setdefault("tfdist", "tfdist")  # of an earlier block of the page
    inner = set()
    for node in ast.walk(tree):  # from the outside in: only the longest of a.b.c
        if isinstance(node, ast.Attribute) and node not in inner:
            name, attributes = node, []
            while isinstance(name, ast.Attribute):
                attributes.insert(0, name.attr)
                name = name.value
                inner.add(name)
            if isinstance(name, ast.Name) and name.id in homes:
                yield ".".join([homes[name.id], *attributes])


def python_of_cell(source: list[str]) -> str:
    """Return the Python of a cell of a notebook, without lines and cells for a shell."""
    if source and re.match(r"%%(?!writefile \S+\.py$)", source[0].strip()):
        return ""
    return "".join("\n" if line.lstrip().startswith(("%", "!")) else line for line in source)


def python_of(path: pathlib.Path) -> list[str]:
    """Return the pieces of Python in a page, notebook, script or template."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return [python_of_cell(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    if path.suffix == ".md":
        return FENCE.findall(path.read_text(encoding="utf-8"))
    return [path.read_text(encoding="utf-8")]


FILES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*.py")),
    *sorted((ROOT / "configs").glob("*.py")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
    *sorted((PACKAGE / "tools" / "templates").rglob("*.py.template")),
]


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.name not in FOR_DEVELOPERS],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_docs_and_examples_use_public_names_only(path):
    names = {name for code in python_of(path) for name in used(code)}
    if path.suffix == ".md":  # prose: `tfdist.data.pipeline`, `import tfdist.run.warm_up`
        text = path.read_text(encoding="utf-8")
        names |= set(re.findall(r"`(?:import )?(tfdist(?:\.[A-Za-z]\w*)+)\b", text))
    assert not sorted(name for name in names if private(name))


def test_private_names_would_be_found():
    assert private("tfdist.launch.main")
    assert private("tfdist.models.is_own")
    assert private("tfdist.BackupAndRestore._saver")
    assert not private("tfdist.ClusterSpec.from_tf_config")
    code = "import tfdist.data as d\nfrom tfdist import sync\nd.order.permute(1)\nsync.Gradients()"
    assert set(used(code)) == {
        "tfdist.data",
        "tfdist.sync",
        "tfdist.data.order.permute",
        "tfdist.sync.Gradients",
    }
    assert private("tfdist.data.order.permute")


def test_citation_has_the_version_of_the_package():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {tfdist.__version__}\n" in text
