"""Test that kernels on GPUs are made deterministic unless the user chose otherwise."""

import os

from tfdist.runtime.determinism import SEGMENTS, sum_rows_in_order


def test_the_users_choice_stays(monkeypatch):
    monkeypatch.setenv(SEGMENTS, "0")
    sum_rows_in_order()
    assert os.environ[SEGMENTS] == "0"
    monkeypatch.delenv(SEGMENTS)
    sum_rows_in_order()
    assert os.environ[SEGMENTS] == "1"
