"""Provide the fixture that starts launches."""

import pytest

from tests.launches import Launch


@pytest.fixture
def launch(tmp_path):
    """Start launches; check afterwards that no process is left."""
    started = Launch(tmp_path)
    yield started
    try:
        started.check_nobody_left()
    finally:
        started.finish()
