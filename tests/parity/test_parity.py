"""N replicas on the same global batches give the numbers of one: every case of `cases.py` under every strategy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parity.cases import CASES
from tests.parity.setups import runs

SETUPS = {  # name: strategy, devices, processes
    "one": ("one_device", "-", 1),
    "mirrored-2": ("mirrored", "2", 1),
    "mirrored-3": ("mirrored", "3", 1),
    "central-2": ("central_storage", "2", 1),
    "workers-2": ("multi_worker_mirrored", "-", 2),
    "workers-3": ("multi_worker_mirrored", "-", 3),
}
# Setups of one process, two at a time: each spends its time in Python, on one core.
PAIRS = (("one", "mirrored-2"), ("mirrored-3", "central-2"))
# Keras applies a LossScaleOptimizer in a replica only; central storage refuses it.
REFUSED = {("central-2", "loss_scaling"), ("central-2", "mixed_float16")}
SECONDS = 500  # for one setup: about 60 on an idle machine of 2 cores


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Results of a setup's processes, a list of {case: numbers}; each setup runs once."""
    return runs(tmp_path_factory, "runner.py", SETUPS, PAIRS, SECONDS)


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("setup", [setup for setup in SETUPS if setup != "one"])
@pytest.mark.parametrize("case", CASES)
def test_equals_one_replica(run, setup, case):
    one = run("one")[0][case]
    assert not isinstance(one, str), one
    for numbers in (process[case] for process in run(setup)):
        if (setup, case) in REFUSED:
            assert "central_storage: a LossScaleOptimizer" in numbers
            continue
        assert not isinstance(numbers, str), numbers
        assert set(numbers) == set(one)
        for name, expected in one.items():
            tolerance = CASES[case].tolerance
            np.testing.assert_allclose(numbers[name], expected, rtol=tolerance, atol=tolerance, err_msg=f"{case}: {name}")


@pytest.mark.parametrize("setup", [s for s in SETUPS if s.startswith("workers")])
@pytest.mark.parametrize("case", CASES)
def test_workers_report_the_same_history(run, setup, case):
    chief, *others = (process[case] for process in run(setup))
    assert not isinstance(chief, str), chief
    for other in others:
        for name in (n for n in chief if n.startswith("history/")):
            np.testing.assert_array_equal(other[name], chief[name], err_msg=f"{case}: {name}")
