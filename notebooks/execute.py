"""Execute notebooks in new kernels and temporary directories, and save them with tidy outputs.

    python notebooks/execute.py                            # all of this directory, in place
    python notebooks/execute.py faults.ipynb --to /tmp     # one, saved elsewhere

The kernel is the Python that runs this file. A cell that fails is an error, and nothing is saved.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile
import time

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from tfdist.launch.terminal_text import printable
from tfdist.runtime.startup_lines import is_chatter

HERE = pathlib.Path(__file__).resolve().parent
# Variables of a launcher or scheduler around this process, and those that would make the launcher
# show TensorFlow's information lines.
LEFT_OUT = ("TF_CONFIG", "TF_CPP_", "TFDIST_", "SLURM_", "OMPI_")
CHATTER_GOES_ON = "To enable the following instructions: "


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "notebooks", nargs="*", type=pathlib.Path, help="files (all notebooks beside this program)"
    )
    parser.add_argument(
        "--to",
        type=pathlib.Path,
        metavar="DIR",
        help="where the executed notebooks go (over the given ones)",
    )
    parser.add_argument(
        "--timeout", type=int, default=600, metavar="S", help="seconds for one cell (600)"
    )
    flags = parser.parse_args()
    if flags.to and not flags.to.is_dir():
        parser.error(f"--to: expected a directory, received {flags.to}, which is none")
    for path in flags.notebooks or sorted(HERE.glob("*.ipynb")):
        try:
            notebook = nbformat.read(path, as_version=4)
        except (OSError, ValueError) as error:
            parser.error(f"expected a notebook, received {path}: {str(error)[:200]}")
        begin = time.monotonic()
        try:
            notebook = execute(notebook, flags.timeout)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print(f"{path.name}: {printable(str(error), colour=False)[-4000:]}", file=sys.stderr)
            return 1
        target = (flags.to or path.parent) / path.name
        nbformat.write(notebook, target)
        print(f"{path.name}: {time.monotonic() - begin:.0f} s", flush=True)
    return 0


def execute(notebook: nbformat.NotebookNode, timeout: int) -> nbformat.NotebookNode:
    """Return the notebook with the outputs of a run in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="tfdist-notebook-") as directory:
        client = NotebookClient(
            notebook,
            timeout=timeout,
            kernel_name="python3",
            record_timing=False,
            extra_arguments=["--IPKernelApp.log_level=ERROR"],  # it warns of TCP, on loopback
            resources={"metadata": {"path": directory}},
        )
        client.execute(env=environment(directory))
    return tidy(notebook)


def environment(directory: str) -> dict[str, str]:
    """Return this process' environment, with its Python's programs in PATH.

    Temporary files go to the directory.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
    programs = os.path.dirname(sys.executable)
    path = kept.get("PATH", os.defpath)
    if programs not in path.split(os.pathsep):
        path = f"{programs}{os.pathsep}{path}"
    return {**kept, "PATH": path, "TMPDIR": directory}


def tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Remove output that differs between machines and is of no use, in place.

    This is TensorFlow's information lines, versions and times.
    """
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = _tidy_outputs(cell.outputs)
    return notebook


def _tidy_outputs(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream":
            if kept and kept[-1].output_type == "stream" and kept[-1].name == output.name:
                kept[-1].text += output.text
                continue
        else:
            output.pop("metadata", None)
            if output.output_type != "error":
                output.metadata = {}
        kept.append(output)
    for output in kept:
        if output.output_type == "stream":
            lines = output.text.splitlines(keepends=True)
            output.text = "".join(
                line
                for line in lines
                if not is_chatter(line) and not line.startswith(CHATTER_GOES_ON)
            )
    return [output for output in kept if output.output_type != "stream" or output.text.strip()]


if __name__ == "__main__":
    # The kernel is this Python, even if somebody has registered another one as python3, and does
    # not use this user's settings and history.
    with tempfile.TemporaryDirectory(prefix="tfdist-jupyter-") as data:
        os.environ["JUPYTER_DATA_DIR"] = data
        os.environ["IPYTHONDIR"] = data
        os.environ.pop("JUPYTER_PATH", None)
        os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
        sys.exit(main())
