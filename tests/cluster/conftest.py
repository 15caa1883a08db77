"""Provide the fixture that starts launches."""

import os
import signal

import pytest

from tests.launches import Launch


@pytest.fixture
def launch(tmp_path):
    """Start launches; check afterwards that no process is left."""
    started = Launch(tmp_path)
    yield started
    left = started.wait_for_nobody()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    started.finish()
    assert not left, f"processes left behind: {left}"
