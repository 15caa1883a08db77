"""Test that ZeRO stages 1, 2 and 3 give the numbers of plain training on the same replicas."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parity.setups import runs
from tests.parity.sharded_cases import CASES, FEATURES, OF_PROCESSES, compare

SETUPS = {  # name: strategy, devices, processes, cases
    "mirrored-2": ("mirrored", "2", 1, *CASES),
    "features": ("mirrored", "2", 1, *FEATURES, "derivatives", "wide derivatives"),
    "mirrored-4": ("mirrored", "4", 1, "cnn rmsprop", "transformer adamw"),
    "workers-2": (
        "multi_worker_mirrored",
        "-",
        2,
        "mlp sgd",
        "transformer adamw",
        "recommender lazy adam",
        "outlier",
        "wide sgd",
        "derivatives",
        "wide derivatives",
        "left alone",
    ),
    "workers-4": ("multi_worker_mirrored", "-", 4, "cnn rmsprop", "lstm adam of four", "wide sgd"),
}
PAIRS = (("mirrored-2", "features"),)  # two processes at a time, each on one core
ROUNDING = 1e-8
TIMEOUT_S = 1000  # for one setup: 60 on an idle machine of 2 cores, 360 on a slow, busy one


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Return the results of a setup's processes: a list of {(case, way): numbers}."""
    return runs(tmp_path_factory, "sharded_cases.py", SETUPS, PAIRS, TIMEOUT_S)


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(
    ("setup", "case"),
    [
        (setup, case)
        for setup, facts in SETUPS.items()
        for case in facts[3:]
        if case != "left alone"
    ],
)
def test_equals_plain_training(run, setup, case):
    facts = {**CASES, **FEATURES, **OF_PROCESSES}[case]
    for process in run(setup):
        plain = process[case, "plain"]
        assert not isinstance(plain, str), plain
        for way in facts.ways:
            numbers = process[case, way]
            assert not isinstance(numbers, str), numbers
            compare(plain, numbers, facts.tolerance, ROUNDING, f"{case}, {way}")


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(
    ("setup", "case", "replicas"), [("mirrored-2", "lstm adam", 2), ("workers-4", "cnn rmsprop", 4)]
)
def test_each_replica_holds_its_part(run, setup, case, replicas):
    for process in run(setup):
        weights, state = (process[case, "plain"][f"held {kind}"] for kind in ("weights", "state"))
        for way in CASES[case].ways:
            numbers = process[case, way]
            np.testing.assert_array_equal(
                numbers["held weights"],
                weights if way.startswith("zero") else -(-weights // replicas),
                err_msg=way,
            )
            np.testing.assert_array_equal(numbers["held state"], -(-state // replicas), err_msg=way)


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_workers_without_a_scope_refuse_operations_that_need_one_and_name_a_missing_peer(run):
    chief, other = (process["left alone"] for process in run("workers-2"))
    assert (
        "zero: XLA cannot compile the collectives of 2 replicas (keras #18716). Pass "
        "compile(jit_compile=False)"
    ) in chief["of XLA"]
    assert "worker:0 waited too long for worker:1: no step for 3 s" in chief["of others"]
    assert list(other) == ["of a backup", "of XLA"]
    for messages in (chief, other):
        assert "sharded over 2 processes without a strategy" in messages["of a backup"]
