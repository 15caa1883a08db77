"""Test that the files of two workers, one of them slowed, show which one waits."""

import pytest
import tensorflow as tf

from tests.cluster.scripts.measured import BATCH, DELAY_S, EPOCHS, STEPS
from tests.processes import PYTHON, ROOT, group, workers
from tests.windows import typical
from tfdist.telemetry.step_records import PARTS, read

SCRIPT = str(ROOT / "tests" / "cluster" / "scripts" / "measured.py")
TIMEOUT_S = 200  # some ten on an idle machine


def run(directory, *words):
    with group(directory) as members:
        workers(
            members, 2, [PYTHON, SCRIPT, "{index}", str(directory), *words], PYTHONPATH=str(ROOT)
        )
        members.succeed(TIMEOUT_S)
    return read(directory)


def test_the_fast_worker_waits_for_the_slow_one(tmp_path):
    windows = run(tmp_path)
    fast = typical(windows[0])
    slow = typical(windows[1])
    assert max(fast, key=fast.get) == "wait"
    assert max(slow, key=slow.get) == "forward_backward"
    for window in windows[1]:  # also those of a single step, whose clock is read first of all
        assert window.parts["forward_backward"] > window.steps * DELAY_S / 2
    assert slow["wait"] < fast["wait"] / 2
    assert slow["gradient_sync"] == pytest.approx(fast["gradient_sync"], rel=0.5)  # the same sums
    for rank, of_worker in windows.items():
        assert of_worker[-1].step == sum(window.steps for window in of_worker) == STEPS * EPOCHS
        assert sum(window.examples for window in of_worker) == STEPS * EPOCHS * BATCH
        assert {window.bytes for window in of_worker} == {4 * (6 * 8 + 8 + 8 + 1)}
        for window in of_worker:
            assert window.worker == rank
            assert sum(window.parts.values()) == pytest.approx(window.seconds, abs=1e-4)
        (file,) = (tmp_path / f"worker-{rank}").glob("events.*")
        tags = {
            value.tag
            for event in tf.compat.v1.train.summary_iterator(str(file))
            for value in event.summary.value
        }
        assert {f"step_breakdown/{part}_milliseconds" for part in PARTS} < tags


def test_a_worker_without_the_callback_is_named(tmp_path):
    assert run(tmp_path, "0", "0") == {}
    for index in range(2):
        error = (tmp_path / f"error-{index}").read_text()
        assert (
            "worker:1 differs from worker:0 in number of tfdist.StepBreakdown callbacks: 0 "
            "against 1"
        ) in error
