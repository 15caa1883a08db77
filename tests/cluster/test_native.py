"""Test that two workers train with native collectives as they do with TensorFlow's."""

import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.cluster.scripts.native import CASES, EQUAL, KINDS
from tests.forkserver import NO_GRAPPLER
from tests.networks import network
from tests.processes import PYTHON, ROOT, environment, group, workers
from tests.unit.parallel.collectives.native.peers import require
from tfdist import ClusterSpec
from tfdist.parallel.collectives.native import library

TIMEOUT_S = 600  # about 40 on an idle machine of 2 cores, 210 on one that is slow
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the results of both workers of a launch, of which one is killed and all restarted."""
    directory = tmp_path_factory.mktemp("native")
    launch = subprocess.run(
        [sys.executable, "-m", "tfdist", "launch", "--workers", "2", "--restarts", "1"]
        + ["--log-dir", str(directory / "logs"), "--", PYTHON]
        + ["-m", "tests.cluster.scripts.native", str(directory)],
        env=environment(PYTHONPATH=str(ROOT), **{NO_GRAPPLER: ""}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    output = launch.stdout + launch.stderr
    assert launch.returncode == 0, output
    assert "worker:1 was killed" in output, output
    return [pickle.loads((directory / f"result-{i}.pickle").read_bytes()) for i in range(2)]


def test_tensors_travel_natively_but_for_sparse_ones(results):
    for result in results:
        assert result["kinds"]["sockets"] == ("sockets" if library.load() else "sockets, in Python")
        names = {name.partition(":")[0].split()[0] for _, name in result["traced"]}
        assert names >= {"gradients", "zero", "fsdp", "factors"}
        assert {kind for kind, _ in result["traced"]} == {*result["kinds"].values()}


def test_factors_of_gradients_travel_where_they_are_fewer_bytes(results):
    for result in results:
        factors = {
            (kind, name.split(":")[0].split()[0])
            for kind, name in result["traced"]
            if name.endswith("gradients of results")
        }
        sockets, memory = result["kinds"]["sockets"], result["kinds"]["native"]
        assert factors >= {(sockets, "factors"), (memory, "zero")}
        assert ("shared memory", "factors") not in factors  # sums in memory cost no more


def test_auto_is_native_only_if_all_workers_can_connect(results):
    for result in results:
        assert result["attempts"] == [library.load() is not None, False, False]


@pytest.mark.parametrize("kind", ["tensorflow", "native", "sockets", "python"])
def test_variables_begin_with_the_values_of_the_chief(results, kind):
    drawn, *_ = results[0]["first", kind]
    for result in results:
        _, values, narrow = result["first", kind]
        for value, expected in zip(values, drawn, strict=True):
            assert value.dtype == expected.dtype
            np.testing.assert_array_equal(value, expected)
        for value, expected in zip(narrow, drawn, strict=False):
            np.testing.assert_allclose(value, expected, rtol=1e-2)
    assert any((a != b).any() for a, b in zip(drawn, results[1]["first", kind][0], strict=True))


@pytest.mark.parametrize("case", CASES)
def test_training_equals_that_with_tensorflows_collectives(results, case):
    for result in results:
        history, weights = result[EQUAL.get(case, case), "tensorflow"]
        for kind in [kind for kind in KINDS if kind != "tensorflow" and case in KINDS[kind]]:
            other_history, others = result[case, kind]
            for name in history:
                np.testing.assert_allclose(other_history[name], history[name], rtol=1e-5)
            for a, b in zip(weights, others, strict=True):
                np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5, err_msg=kind)


def test_weights_are_equal_bit_for_bit_on_both_workers(results):
    chief, other = results
    for key in (key for key in chief if isinstance(key, tuple) and key[0] != "first"):
        assert chief[key][0] == other[key][0], key
        for a, b in zip(chief[key][1], other[key][1], strict=True):
            np.testing.assert_array_equal(a, b, err_msg=str(key))


def test_killed_workers_resume_as_if_nothing_had_happened(results):
    for result in results:
        history, weights = result["whole", "native"]
        resumed_history, resumed = result["resumed", "native"]
        assert resumed_history["loss"][-1:] == history["loss"][-1:]
        for a, b in zip(weights, resumed, strict=True):
            np.testing.assert_array_equal(a, b)


def test_two_workers_on_each_of_two_hosts_train_as_with_tensorflows_collectives(tmp_path):
    require("shared memory")
    with network(2) as hosts, group(tmp_path) as members:
        cluster = ClusterSpec(
            {"worker": [f"{hosts.address(1 + rank // 2)}:{20001 + rank}" for rank in range(4)]}
        )
        for rank in range(4):
            command = ["-m", "tests.cluster.scripts.native_hosts", str(tmp_path / f"{rank}.pickle")]
            members.start(
                f"worker-{rank}",
                [*hosts.prefix(1 + rank // 2), PYTHON, *command],
                TF_CONFIG=cluster.for_task("worker", rank).to_tf_config(),
                TFDIST_TASK_SECRET="0123456789abcdef0123456789abcdef",
                PYTHONPATH=str(ROOT),
            )
        members.succeed(TIMEOUT_S)
    first, *others = [pickle.loads((tmp_path / f"{i}.pickle").read_bytes()) for i in range(4)]
    assert first["kind"] == "shared memory on each host, sockets between hosts"
    for case in first.keys() - {"kind", "tensorflow", "tensorflow, few rows"}:
        history, weights = first["tensorflow, few rows" if case == "few rows" else "tensorflow"]
        np.testing.assert_allclose(first[case][0]["loss"], history["loss"], rtol=1e-5)
        for index, expected in enumerate(weights):
            np.testing.assert_allclose(first[case][1][index], expected, rtol=1e-4, atol=1e-5)
            for other in others:
                np.testing.assert_array_equal(other[case][1][index], first[case][1][index])


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_worker_is_named_within_seconds(tmp_path, frozen):
    require("shared memory")
    other = f"worker-{1 - frozen}"
    with group(tmp_path) as members:
        script = str(ROOT / "tests" / "cluster" / "scripts" / "frozen.py")
        workers(members, 2, [PYTHON, script], TFDIST_TASK_SECRET="0123456789abcdef0123456789abcdef")
        for index in range(2):
            members.says(f"worker-{index}", "trains", TIMEOUT_S)
        time.sleep(1)  # until both are within the epoch, of some 100,000 steps
        os.kill(members.processes[f"worker-{frozen}"].pid, signal.SIGSTOP)
        said = f"worker:{1 - frozen} waits for worker:{frozen}, which does not answer"
        members.says(other, said, 60)
