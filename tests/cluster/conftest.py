"""Provide the fixture that starts launches."""

import pytest

from tests.forkserver import PLAIN_GRAPHS
from tests.launches import Launch


@pytest.fixture(scope="session", autouse=True)
def plain_graphs():
    """Leave the graphs of forked processes as they are traced.

    An eighth of the CPU time of these small models goes into graphs that run a few times only. The
    graphs of `test_native.py`, of parity tests and of processes started by exec are optimized.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLAIN_GRAPHS, "1")
        yield


@pytest.fixture
def launch(tmp_path):
    """Start launches; check afterwards that no process is left."""
    started = Launch(tmp_path)
    yield started
    try:
        started.check_nobody_left()
    finally:
        started.finish()
