"""Test the package's imports and names against the plan in docs/architecture.md.

The files are read, not run.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import pathlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator

import pytest

import tfdist
from tfdist import cli

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tfdist"
# A package imports packages of lower levels, and no others.
LEVELS = (
    ({"storage"},),
    ({"runtime"}, {"sync"}, {"telemetry"}, {"keras_compat"}, {"config"}, {"flags"}),
    ({"cluster"}, {"app"}, {"backup"}, {"models"}, {"layers"}, {"optimizers"}),
    ({"data"}, {"parallel"}),
    ({"train"},),
    ({"strategies"},),
    ({"loops"},),
    ({"run"},),
    ({"tools"},),
)
LAUNCH_SEES = {"runtime", "cluster"}
ENTRY_POINTS = {"__init__", "__main__", "cli"}  # they name packages, and load what is asked for
WITHOUT_FRAMEWORKS = {"runtime", "cluster", "config", "flags", "app", "launch", *ENTRY_POINTS}
SEES_ENVIRON = {"runtime", "cluster", "launch"}
SEES_PRIVATE_NAMES = {"keras_compat"}
FRAMEWORKS = {"tensorflow", "tensorflow_datasets", "tf_keras", "keras", "jax", "torch"}
OUTSIDE = {"tests", "configs", "examples", "benchmarks"}


def files(*packages: str, without: Iterable[str] = ()) -> list[pathlib.Path]:
    """Return the package's files: of these packages, if any are named, and not of those."""
    paths = sorted(PACKAGE.rglob("*.py"))
    assert paths
    return [
        path
        for path in paths
        if package(path) not in without and (not packages or package(path) in packages)
    ]


def package(path: pathlib.Path) -> str:
    """Return the first part of a file's name below the package.

    This is "train" for tfdist/train/synchronous/loop.py.
    """
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def nodes(path: pathlib.Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))))


def location(path: pathlib.Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def none(hits: Iterable[str]) -> None:
    """Fail with all the places where a rule is broken."""
    hits = sorted(set(hits))
    assert not hits, "\n" + "\n".join(hits)


def imports(path: pathlib.Path) -> Iterator[tuple[ast.AST, str]]:
    """Return every import anywhere in a file as a full name.

    Examples are "tfdist.train.synchronous.loop.Runner" and "tensorflow".
    """
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{location(path, node)}: a relative import; write it out"
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def names(path: pathlib.Path) -> Iterator[tuple[ast.AST, str]]:
    """Return every import, and every name with its attributes: "tf.distribute.Strategy"."""
    yield from imports(path)
    yield from ((node, dotted(node)) for node in nodes(path) if isinstance(node, ast.Attribute))


def dotted(node: ast.AST) -> str:
    """Return a name with its attributes as text; "" for other expressions."""
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return head and f"{head}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def packages_used(path: pathlib.Path) -> Iterator[tuple[ast.AST, str]]:
    """Return packages that a file imports, or reaches by lazy names like `tfdist.TensorBoard`."""
    for node, name in names(path):
        first = f"{name}.".split(".")[1]
        if name.startswith("tfdist.") and not first.startswith("__"):
            yield node, tfdist._HOMES.get(first, name).split(".")[1]


def allowed(own: str) -> set[str]:
    """Return the packages that a package may import."""
    if own == "launch":
        return {own, *LAUNCH_SEES}
    if own == "__main__":
        return {"cli"}
    if own == "cli":  # it imports a command when that is asked for
        return {"runtime"}
    below: set[str] = set()
    for level in LEVELS:
        for members in level:
            if own in members:
                return below | members
        below = below.union(*level)
    return set()


def test_every_package_has_a_level():
    planned = set().union(*(members for level in LEVELS for members in level))
    assert {package(path) for path in files()} == planned | ENTRY_POINTS | {"launch"}


def test_every_directory_is_a_package():
    """Otherwise `pip install .` would leave it out."""
    none(
        str(path.parent.relative_to(ROOT))
        for path in files()
        if not (path.parent / "__init__.py").exists()
    )


def test_unit_tests_mirror_the_package():
    """Each directory of tests/unit is a package of tfdist; files outside of them test a module."""
    unit = ROOT / "tests" / "unit"
    for path in sorted(unit.rglob("test_*.py")):
        assert (path.parent / "__init__.py").exists(), f"{path.parent}: lacks __init__.py"
        directory = path.parent.relative_to(unit)
        module = "__init__.py" if directory.parts else path.name.removeprefix("test_")
        tested = PACKAGE / directory / module
        assert tested.exists(), f"{path.relative_to(ROOT)} tests {tested}, which does not exist"


def test_a_package_imports_only_lower_levels():
    none(
        f"{location(path, node)}: {package(path)} imports {name}"
        for path in files(without={"__init__"})  # it lists the public names for type checkers
        for node, name in packages_used(path)
        if name not in allowed(package(path))
    )


def test_commands_and_public_names_exist():
    commands = [command.target.partition(":")[0] for command in cli.COMMANDS.values()]
    for module in [*commands, *tfdist._HOMES.values()]:
        assert importlib.util.find_spec(module), module
    assert set(tfdist.__all__) == {*tfdist._HOMES, "__version__"}


def test_frameworks_stay_in_their_packages():
    none(
        f"{location(path, node)}: imports {name}"
        for path in files(*WITHOUT_FRAMEWORKS)
        for node, name in imports(path)
        if name.split(".")[0] in FRAMEWORKS
    )


@pytest.mark.parametrize(
    "code",
    [
        "import tfdist",
        "from tfdist import cli; cli.main(['--help'])",
        "import tfdist.app, tfdist.cluster.resolvers, tfdist.cluster.preflight",
        "import tfdist.tools.plan",
    ],
)
def test_entry_points_load_no_framework(code):
    check = f"import sys; found = {FRAMEWORKS!r} & set(sys.modules); assert not found, found"
    subprocess.run(
        [sys.executable, "-c", f"{code}\n{check}"],
        check=True,
        cwd=ROOT,
        timeout=60,
        stdout=subprocess.DEVNULL,
    )


def test_the_environment_is_read_where_clusters_are_found():
    banned = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
    none(
        f"{location(path, node)}: {name}"
        for path in files(without=SEES_ENVIRON)
        for node, name in names(path)
        if name in banned
    )


def test_private_names_of_frameworks_are_hooks():
    none(
        f"{location(path, node)}: {name}"
        for path in files(without=SEES_PRIVATE_NAMES)
        for node, name in names(path)
        if _private(name)
    )


def test_private_attributes_are_our_own():
    """An attribute with a leading underscore that nothing in its file defines is foreign."""
    none(
        f"{location(path, node)}: .{node.attr}"
        for path in files(without=SEES_PRIVATE_NAMES)
        for own in [set(_defined(path))]
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and _hidden(node.attr) and node.attr not in own
    )


def _private(name: str) -> bool:
    head, *rest = name.split(".")
    internal = (
        rest[:1] in (["python"], ["src"]) or "__internal__" in rest or any(map(_hidden, rest))
    )
    return head in {*FRAMEWORKS, "tf", "tfds"} and internal


def _hidden(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(path: pathlib.Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and dotted(node.value) == "self"
        ):
            yield node.attr


def test_data_and_backup_import_no_strategy():
    none(
        f"{location(path, node)}: {name}"
        for path in files("data", "backup")
        for node, name in names(path)
        if "tf.distribute" in name
    )


def test_the_package_stands_alone():
    none(
        f"{location(path, node)}: {name}"
        for path in files()
        for node, name in imports(path)
        if name.split(".")[0] in OUTSIDE
    )


def first_line(path: pathlib.Path) -> str:
    """Return the first line of a file's docstring; "" if it has none."""
    return (ast.get_docstring(nodes(path)[0]) or "").partition("\n")[0]


def test_every_file_begins_with_a_sentence():
    for path in files():
        header = first_line(path)
        assert header.endswith(".") or not path.read_text(encoding="utf-8"), (
            f"{path.relative_to(ROOT)}: its first line says in a sentence what it does"
        )


def docstrings(path: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    """Return the place and the lines of each docstring of a file."""
    for node in nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                name = getattr(node, "name", "")
                yield f"{path.relative_to(ROOT)}: {name}", text.splitlines()


def entries(lines: list[str], *sections: str) -> Iterator[str]:
    """Return the first lines of the entries in some sections of a docstring."""
    section = ""
    for line in lines:
        if line and not line.startswith(" "):
            section = line
        elif section in sections and re.match(r"    [\w*][\w.*, ]*: ", line):
            yield line.strip()


def test_summaries_are_short():
    none(
        f"{where}: {lines[0]}"
        for path in files()
        for where, lines in docstrings(path)
        if len(lines[0]) > 88
    )


def test_arguments_are_described_by_nouns():
    none(
        f"{where}: {entry}"
        for path in files()
        for where, lines in docstrings(path)
        for entry in entries(lines, "Args:", "Attributes:")
        if re.match(r"[\w*, ]+: (What|Where|For|As|By|How) ", entry)
    )


def test_errors_are_described_by_their_conditions():
    """SystemExit is described by its codes instead."""
    none(
        f"{where}: {entry}"
        for path in files()
        for where, lines in docstrings(path)
        for entry in entries(lines, "Raises:")
        if not entry.startswith("SystemExit: ") and ": If " not in entry
    )


# A newcomer finds the module of a term in the first line of its docstring.
TERMS = (
    ("heartbeat", ("train/health/heartbeat.py",)),
    ("barrier", ("cluster/preflight.py",)),
    ("straggler", ("train/timing/step_breakdown.py",)),
    ("watchdog", ("train/health/watchdog.py",)),
    ("all-gather", ("parallel/collectives/group.py", "parallel/sharding/all_gather.py")),
    ("gradient clipping", ("train/synchronous/gradient_aggregation.py",)),
    ("shuffling", ("data/order.py",)),
    ("metric reduction", ("train/synchronous/replica_state.py",)),
    ("checkpoint", ("backup/snapshot.py",)),
    ("snapshot format", ("backup/snapshot.py",)),
    ("restart backoff", ("launch/policy.py",)),
    ("elastic membership", ("launch/membership.py",)),
    ("TF_CONFIG", ("cluster/spec.py",)),
    ("Ctrl-C", ("runtime/command.py",)),
    ("bucket", ("parallel/collectives/bucketing.py",)),
)


@pytest.mark.parametrize(("term", "homes"), TERMS, ids=[term for term, _ in TERMS])
def test_a_term_leads_to_its_module(term, homes):
    """Test that the right module is among the first two whose first line has the term."""
    having = [
        path.relative_to(PACKAGE).as_posix()
        for path in files()
        if term.lower() in first_line(path).lower()
    ]
    assert set(homes) & set(having[:2]), having


# Modules of one name do the same job in their packages.
SAME_JOB = {"flags", "main", "predict", "processes", "rendering", "settings"}


def test_a_name_of_several_modules_stands_for_one_job():
    stems = [path.stem for path in files() if path.stem != "__init__"]
    assert {stem for stem in stems if stems.count(stem) > 1} == SAME_JOB


def module(path: pathlib.Path) -> str:
    """Return the dotted name of a file: "tfdist.train.evaluator"."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_modules_import_each_other_in_a_cycle():
    """Imports within functions count, those for type checkers alone do not."""
    modules = {module(path): path for path in files()}
    edges = {name: set(_imported(path, modules)) for name, path in modules.items()}
    # Modules that import nothing of what is left cannot be in a cycle.
    while leaves := {name for name, targets in edges.items() if not targets & edges.keys()}:
        edges = {name: targets for name, targets in edges.items() if name not in leaves}
    none(f"{name} imports {target}" for name in edges for target in edges[name] & edges.keys())


def _imported(path: pathlib.Path, modules: Collection[str]) -> Iterator[str]:
    for_checkers = {
        id(child)
        for node in nodes(path)
        if isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node, name in imports(path):
        if id(node) not in for_checkers:
            imported = name if name in modules else name.rpartition(".")[0]
            if imported in modules and imported != module(path):
                yield imported


def test_every_module_is_on_the_architecture_page():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    none(
        f"docs/architecture.md lacks the line: {line}"
        for path in files()
        if path.name not in ("__init__.py", "__main__.py")
        for line in [f"| `{path.relative_to(PACKAGE).as_posix()}` | {first_line(path)} |"]
        if line not in page
    )
