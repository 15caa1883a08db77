"""Test that segments are summed deterministically on GPUs unless the user chose otherwise."""

import os

from tfdist.runtime.determinism import (
    DETERMINISTIC_SEGMENT_REDUCTIONS,
    enable_deterministic_segment_reductions,
)


def test_the_users_choice_stays(monkeypatch):
    monkeypatch.setenv(DETERMINISTIC_SEGMENT_REDUCTIONS, "0")
    enable_deterministic_segment_reductions()
    assert os.environ[DETERMINISTIC_SEGMENT_REDUCTIONS] == "0"
    monkeypatch.delenv(DETERMINISTIC_SEGMENT_REDUCTIONS)
    enable_deterministic_segment_reductions()
    assert os.environ[DETERMINISTIC_SEGMENT_REDUCTIONS] == "1"
