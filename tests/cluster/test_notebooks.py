"""Test that notebooks run on real processes, and are committed with the outputs of a run."""

import json
import os
import pathlib
import re
import uuid

import nbformat
import pytest

from tests.forkserver import environ_of, write_programs
from tests.processes import PYTHON, ROOT, group

DIRECTORY = ROOT / "notebooks"
NOTEBOOKS = sorted(DIRECTORY.glob("*.ipynb"))
TIMEOUT_S = 540  # for one notebook: 20 to 60 on an idle machine of 2 cores
LARGEST = 300_000  # bytes: outputs must not make the repository grow
# Paths and addresses of the machine that made the outputs; what a command was told, such as a
# relative path, may be there.
MACHINES = re.compile(
    r"(?<![\w.~])/(?:tmp|home|root|work|usr|var|opt|private|Users)/\S*|"
    r"\b(?!127\.0\.0\.1:)\d+\.\d+\.\d+\.\d+:\d+"
)
CHATTER = re.compile(
    r"[IWE]\d{4} \d\d:|oneDNN|cuInit|absl::InitializeLog|rebuild TensorFlow|Warning:"
)


def names(paths):
    return [path.stem for path in paths]


@pytest.fixture(params=NOTEBOOKS, ids=names(NOTEBOOKS))
def path(request):
    return request.param


def outputs(path):
    """Return (cell, output) for all outputs of a notebook."""
    return [
        (cell, output)
        for cell in nbformat.read(path, 4).cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]


def texts(output):
    if output.output_type == "stream":
        return [output.text]
    return [text for kind, text in output.get("data", {}).items() if kind.startswith("text/")]


def living(mark):
    """Return the ids of the processes of a notebook's run that are still alive."""
    return [
        entry.name
        for entry in pathlib.Path("/proc").glob("[0-9]*")
        if environ_of(entry.name).get("NOTEBOOK_TEST_MARK") == mark
    ]


def test_all_notebooks_exist():
    assert names(NOTEBOOKS) == ["etl", "faults", "quickstart", "scaling", "strategies"]


def test_notebook_runs_and_leaves_no_process(path, tmp_path):
    mark = str(uuid.uuid4())
    before = sorted(os.listdir(DIRECTORY))
    for name in ("to", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "programs").mkdir()
    path_of_programs = (
        f"{write_programs(tmp_path / 'programs')}:{pathlib.Path(PYTHON).parent}:"
        f"{os.environ['PATH']}"
    )
    environ = {
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path / "tmp"),
        "NOTEBOOK_TEST_MARK": mark,
        "PATH": path_of_programs,
    }
    with group(tmp_path) as members:
        members.start(
            "execute",
            [PYTHON, str(DIRECTORY / "execute.py"), str(path), "--to", str(tmp_path / "to")],
            **environ,
        )
        members.succeed(TIMEOUT_S)
    assert all(
        cell.outputs
        for cell in nbformat.read(tmp_path / "to" / path.name, 4).cells
        if cell.source.startswith("%%bash")
    )
    assert not living(mark)
    assert not os.listdir(tmp_path / "tmp")
    assert sorted(os.listdir(DIRECTORY)) == before


def test_a_failing_command_is_an_error(tmp_path):
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("%%bash\ntfdist train --config=missing.py 2>&1")]
    )
    nbformat.write(notebook, tmp_path / "failing.ipynb")
    before = (tmp_path / "failing.ipynb").read_bytes()
    with group(tmp_path) as members:
        members.start(
            "execute",
            [PYTHON, str(DIRECTORY / "execute.py"), str(tmp_path / "failing.ipynb")],
            PYTHONPATH=str(ROOT),
        )
        assert members.wait(120) == {"execute": 1}
        assert "no such file" in members.log("execute")
    assert (tmp_path / "failing.ipynb").read_bytes() == before


def test_committed_notebook_was_run_from_top_to_bottom(path):
    notebook = nbformat.read(path, 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    silent = [cell.source for cell in code if not cell.outputs]
    # What defines and imports says nothing.
    assert all(
        "print(" not in source and "plt.show()" not in source and not source.startswith("%%")
        for source in silent
    ), silent
    assert not [output for _, output in outputs(path) if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for _, output in outputs(path))


def test_committed_notebook_names_no_machine(path):
    for cell, output in outputs(path):
        for text in texts(output):
            assert not MACHINES.search(text), (cell.source, MACHINES.search(text)[0])
            assert not CHATTER.search(text), (cell.source, CHATTER.search(text)[0])
    assert os.path.getsize(path) < LARGEST
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert set(stored["metadata"]) == {"kernelspec", "language_info"}
    assert not any(cell["metadata"] for cell in stored["cells"])
