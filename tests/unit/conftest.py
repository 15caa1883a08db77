"""Fixtures that several unit tests share."""

import subprocess
import sys

import pytest

from tests.processes import ROOT, environment


@pytest.fixture
def run_python():
    """Runs Python code in a process of its own, with these command-line words."""

    def run(code, *words):
        return subprocess.run(
            [sys.executable, "-c", code, *words],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=ROOT,
            env=environment(),
        )

    return run


@pytest.fixture(scope="session")
def digits_dir(tmp_path_factory):
    """A TFDS data_dir with the digits prepared."""
    from tfdist import data

    directory = tmp_path_factory.mktemp("tfds")
    data.load("tfdist_digits", "test", directory)
    return directory
