"""Test training that resumes from the memory of its host, with real processes that are killed.

It ends as if nothing had happened, and leaves no process and no shared memory.
"""

import os
import pathlib
import pickle
import signal
import time

import numpy as np
import pytest

from tests.cluster.scripts.chaotic import EPOCHS, EXAMPLES, STEPS
from tests.launches import ROOT, Launch
from tfdist.runtime.fault_plan import EVENT
from tfdist.runtime.launch_protocol import read_journal
from tfdist.runtime.snapshot_server import is_supported

SCRIPT = str(ROOT / "tests" / "cluster" / "scripts" / "chaotic.py")
TIMEOUT_S = 400
FREQ = 2  # steps
SEEN = EXAMPLES * (EXAMPLES + 1) * (2 * EXAMPLES + 1) / 6  # each example once an epoch
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "CHAOTIC_MEMORY": str(FREQ)}
pytestmark = [
    pytest.mark.timeout(2 * TIMEOUT_S + 60),
    pytest.mark.skipif(not is_supported(), reason="no memfd_create: Linux has it"),
]


def shared_memory():
    return {path.name for path in pathlib.Path("/dev/shm").iterdir()}


def train(launch, strategy="auto", *flags):
    """Train with saves in memory, and on the disk only at the beginning and the end."""
    launch.bound = TIMEOUT_S
    before = shared_memory()
    code, _, err = launch.run(
        "--workers",
        "2",
        "--restarts",
        "9",
        *flags,
        command=(SCRIPT, ".", "100000", strategy),
        environ=QUIET,
    )
    assert code == 0, err[-6000:]
    assert shared_memory() <= before
    return read_journal(str(launch.directory / "runs" / "latest"))


def check_equal(directory, whole):
    for name in ("worker-0.pickle", "worker-1.pickle"):
        end, expected = (pickle.loads((each / name).read_bytes()) for each in (directory, whole))
        assert end["iterations"] == EPOCHS * STEPS
        assert end["history"]["seen"] == [SEEN] * EPOCHS
        assert end["history"].keys() == expected["history"].keys()
        for key, values in expected["history"].items():
            np.testing.assert_array_equal(end["history"][key], values, err_msg=key)
        for a, b in zip(end["weights"], expected["weights"], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_killed_workers_resume_from_memory_with_equal_results(strategy, launch, tmp_path_factory):
    whole = Launch(tmp_path_factory.mktemp("undisturbed"), TIMEOUT_S)
    train(whole, strategy)
    plan = "kill chief@step=7; kill worker:1@step=14; kill worker:1@restoring; kill chief@step=29"
    journal = train(launch, strategy, "--chaos", plan)
    check_equal(launch.directory, whole.directory)
    assert len([line for line in journal if line["event"] == EVENT]) == 4
    restored = [line for line in journal if line["event"] == "restored"]
    assert {line["path"] for line in restored} == {"memory"}
    # No snapshot went to the disk in between, and no fault cost more than the steps of an interval.
    assert {line["total"] for line in journal if line["event"] == "saved"} == {0, EPOCHS * STEPS}
    for fault in [line for line in journal if line["event"] == EVENT and line["total"]]:
        later = [line["total"] for line in restored if line["attempt"] == fault["attempt"] + 1]
        assert all(fault["total"] - 2 * FREQ <= total <= fault["total"] for total in later)


def test_killed_server_costs_the_snapshot_in_memory_only(launch):
    """Training continues with the next server, and a kill before resumes from the disk."""
    launch.bound = TIMEOUT_S
    launch.start(
        "--workers",
        "2",
        "--restarts",
        "9",
        command=(SCRIPT, ".", "5"),
        environ={**QUIET, "CHAOTIC_PACE": "0.3"},
    )
    journal = str(launch.directory / "runs" / "latest")
    wait(lambda: any(line["event"] == "saved" and line["total"] for line in read_journal(journal)))
    (server,) = servers(launch)
    os.kill(server, signal.SIGKILL)
    wait(lambda: servers(launch) not in ([], [server]))
    (launch.directory / "hurry").touch()
    code, _, err = launch.finish()
    assert code == 0, err[-6000:]
    assert not servers(launch)
    assert "the snapshot server does not answer" in launch.log("worker-0")
    assert len([line for line in read_journal(journal) if line["event"] == "attempt"]) == 1


def test_killed_launcher_leaves_neither_server_nor_shared_memory(launch):
    before = shared_memory()
    launch.start("--restarts", "1", script="ready()\ntime.sleep(600)")
    launch.wait_for("worker:0.ready")
    wait(lambda: servers(launch))
    launch._process.kill()
    assert not launch.wait_for_nobody(30.0)
    assert shared_memory() <= before


def servers(launch):
    return [pid for pid in launch.living() if b"snapshot_server" in command_line(pid)]


def command_line(pid):
    """Return the command line of a process; nothing if it has ended meanwhile."""
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
