"""Provide the fixture that starts launches."""

import pytest

from tests.forkserver import NO_GRAPPLER
from tests.launches import Launch


@pytest.fixture(scope="session", autouse=True)
def no_grappler():
    """Turn TensorFlow's graph optimizer off in forked processes.

    An eighth of the CPU time of these small models goes into graphs that run a few times only. The
    graphs of `test_native.py`, of parity tests and of processes started by exec are optimized.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NO_GRAPPLER, "1")
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
