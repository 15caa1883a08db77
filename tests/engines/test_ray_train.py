"""Test tfdist in the workers of Ray Train, on a real Ray cluster of several nodes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.engines import ray_cluster
from tests.processes import PYTHON, ROOT, group

BOUND_S = 240
EPOCHS = 12


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster.running() as started:
        yield started


@pytest.fixture(scope="module")
def start(cluster, digits_dir, tmp_path_factory):
    """Return a function that starts the example; it returns the group of its one process."""
    with contextlib.ExitStack() as stack:

        def start(name, *flags):
            directory = tmp_path_factory.mktemp(name)
            members = stack.enter_context(group(directory))
            members.start(
                "driver",
                [
                    PYTHON, str(ROOT / "examples" / "ray_digits.py"), f"--epochs={EPOCHS}",
                    f"--address={cluster.address}", f"--backup_dir={directory / 'backup'}",
                    f"--results={directory}", f"--data_dir={digits_dir}", *flags,
                ],
                PYTHONPATH=cluster.environ["PYTHONPATH"],
            )  # fmt: skip
            return members

        yield start


@pytest.fixture(scope="module")
def calm(start):
    """Return the weights of a training without a fault."""
    members = start("calm")
    members.succeed(BOUND_S)
    assert_resumed(members)
    return weights(members)


def weights(members):
    import keras

    return keras.models.load_model(members.directory / "digits.keras").get_weights()


def assert_equal(members, calm):
    for actual, expected in zip(weights(members), calm, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def assert_resumed(members):
    """Check that no epoch was trained again from the first one on."""
    epochs = [int(number) for number in re.findall(r"epoch (\d+) of", members.log("driver"))]
    changes = [epoch for i, epoch in enumerate(epochs) if i == 0 or epoch != epochs[i - 1]]
    assert changes.count(1) == 1, epochs  # Ray may show a line twice
    assert changes[-1] == EPOCHS


def workers(cluster):
    """Return the process ids of the workers of Ray Train."""
    pids = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError, AssertionError):
            if b"RayTrainWorker" in path.read_bytes():
                cluster.node_of(int(path.parent.name))
                pids.append(int(path.parent.name))
    return sorted(pids)


def wait_for_epoch(members, epoch):
    members.says("driver", rf"epoch {epoch} of", BOUND_S)


def test_killed_worker_leads_to_an_equal_result(cluster, start, calm):
    members = start("killed")
    wait_for_epoch(members, 3)
    os.kill(workers(cluster)[1], signal.SIGKILL)
    members.succeed(BOUND_S)
    assert_resumed(members)
    assert_equal(members, calm)


def test_loss_of_a_node_leads_to_fewer_workers_and_an_equal_result(cluster, start, calm):
    cluster.lose_node("n2")
    try:
        members = start("elastic", "--min_workers=1")
        wait_for_epoch(members, 3)
        cluster.lose_node("n1")
        members.succeed(BOUND_S)
    finally:
        for name in ("n1", "n2"):
            if name not in cluster.nodes:
                cluster.add_node(name)
    assert "on 2 workers" in members.log("driver")
    assert "on 1 workers" in members.log("driver")
    assert_resumed(members)
    assert_equal(members, calm)


def test_node_that_drains_leads_to_a_snapshot_and_an_equal_result(cluster, start, calm):
    """No other snapshot is made within the run."""
    members = start("drained", "--save_freq=100000")
    wait_for_epoch(members, 3)
    name = cluster.node_of(workers(cluster)[0])
    subprocess.run(
        [
            sys.executable, "-m", "ray.scripts.scripts", "drain-node",
            f"--address={cluster.address}", f"--node-id={cluster.id_of(name)}",
            "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot",
            "--deadline-remaining-seconds=15",
        ],
        env=cluster.environ, check=True, timeout=60,
    )  # fmt: skip
    time.sleep(15)
    cluster.lose_node(name)
    try:
        members.succeed(BOUND_S)
    finally:
        cluster.add_node(name)
    assert_resumed(members)
    assert_equal(members, calm)
