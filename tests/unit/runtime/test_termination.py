"""Test that processes that are asked to end also end their own children."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from tests.processes import group
from tfdist.runtime.termination import deferred_signals, ending


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_block_as_an_exception_and_is_given_back(number):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as info, ending():
        signal.raise_signal(number)
    assert info.value.code == 128 + number
    assert signal.getsignal(number) is before


def test_ignored_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_child_that_starts_while_signals_are_deferred_can_be_ended():
    with ending():
        with deferred_signals():
            child = subprocess.Popen(["sleep", "60"])
        child.terminate()
    assert child.wait(60) == -signal.SIGTERM


def test_benchmark_whose_terminal_is_closed_leaves_no_files(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = ["bench", "allreduce", "--strategies", "mirrored", "--out", str(tmp_path / "out")]
    with group(tmp_path) as members:
        process = members.start(
            "bench", [sys.executable, "-m", "tfdist", *words], TMPDIR=str(temporary)
        )
        end = time.monotonic() + 60
        while not list(temporary.glob("tfdist-bench-*/*/log")):
            assert time.monotonic() < end, members.logs()
            assert process.poll() is None, members.logs()
            time.sleep(0.02)
        process.send_signal(signal.SIGHUP)
        assert members.wait(60) == {"bench": 128 + signal.SIGHUP}
    assert list(temporary.iterdir()) == []
