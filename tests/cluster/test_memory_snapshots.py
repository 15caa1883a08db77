"""Test training that resumes from the memory of its host, with real processes that are killed.

It ends as if nothing had happened, and leaves no process and no shared memory.
"""

import contextlib
import functools
import os
import pathlib
import pickle
import signal
import time

import numpy as np
import pytest

from tests.cluster.scripts.chaotic import EPOCHS, EXAMPLES, STEPS
from tests.cluster.test_faults import points, random_plan
from tests.cluster.test_launch_on_ssh import SSH
from tests.forkserver import environ_of
from tests.launches import ROOT, Launch
from tests.networks import listens
from tfdist.cluster.addresses import free_ports
from tfdist.runtime.fault_plan import EVENT
from tfdist.runtime.launch_protocol import read_journal
from tfdist.runtime.snapshot_protocol import is_supported

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
    assert points(directory) == points(whole)
    assert (directory / "log.csv").read_text() == (whole / "log.csv").read_text()


def check_resumed(journal, attempts=()):
    """Check that each fault cost the steps of an interval, as tasks resumed from memory.

    Args:
        journal: Lines of the journals of all hosts.
        attempts: Attempts in which both tasks resumed, each after a fault; () for any.
    """
    restored = [line for line in journal if line["event"] == "restored"]
    assert {line["path"] for line in restored} == {"memory"}
    if attempts:
        assert sorted(line["attempt"] for line in restored) == sorted([*attempts, *attempts])
        assert len([line for line in journal if line["event"] == EVENT]) == len(attempts)
    for fault in [line for line in journal if line["event"] == EVENT and line["total"]]:
        later = [line["total"] for line in restored if line["attempt"] == fault["attempt"] + 1]
        assert all(fault["total"] - 2 * FREQ <= total <= fault["total"] for total in later)


def has_stopped(path):
    """Return whether the second fault of a launch, a stop, was injected.

    Args:
        path: Log directory of the launch.
    """
    return len([line for line in read_journal(path) if line["event"] == EVENT]) == 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function that returns the directory of a training without faults."""

    @functools.cache
    def known(strategy):
        whole = Launch(tmp_path_factory.mktemp("undisturbed"), TIMEOUT_S)
        train(whole, strategy)
        return whole.directory

    return known


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_killed_workers_resume_from_memory_with_equal_results(strategy, launch, undisturbed):
    whole = undisturbed(strategy)
    plan = "kill chief@step=7; kill worker:1@step=14; kill worker:1@restoring; kill chief@step=29"
    journal = train(launch, strategy, "--chaos", plan)
    check_equal(launch.directory, whole)
    assert len([line for line in journal if line["event"] == EVENT]) == 4
    # No snapshot went to the disk in between, and no fault cost more than the steps of an interval.
    assert {line["total"] for line in journal if line["event"] == "saved"} == {0, EPOCHS * STEPS}
    check_resumed(journal)


def test_training_on_several_hosts_survives_the_loss_of_one(tmp_path, undisturbed):
    """A killed worker costs the steps of an interval, and so does a host with half of the rows."""
    (tmp_path / "token").write_text("0123456789abcdef0123")
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "shared").mkdir()
    address = f"127.0.0.1:{free_ports(1)[0]}"
    hosts = {}

    def start(name, *flags):
        (tmp_path / name).mkdir()
        hosts[name] = Launch(tmp_path / name, TIMEOUT_S)
        hosts[name].start(
            "--rendezvous",
            address,
            *("--max-workers", "2", "--min-workers", "2", "--restarts", "9"),
            *("--token-file", str(tmp_path / "token"), "--host-timeout", "30"),
            *("--host", f"127.0.1.{ord(name)}"),
            *flags,
            command=(SCRIPT, str(tmp_path / "shared"), "100000", "fsdp"),
            environ=QUIET,
        )

    def journal(name):
        return read_journal(str(tmp_path / name / "runs" / "latest"))

    before = shared_memory()
    chaos = ("--chaos", "kill chief@step=7; stop worker:1@step=14")
    start("a", *chaos)
    wait(lambda: listens(int(address.rpartition(":")[2])))
    start("b", *chaos)
    wait(lambda: any(line["event"] == "restored" for line in journal("b")))
    start("c")  # a spare host
    wait(lambda: any(line["event"] == EVENT for line in journal("b")))
    wait(lambda: servers(hosts["c"]))
    hosts["b"]._process.kill()
    for name in "ac":
        code, _, err = hosts[name].finish()
        assert code == 0, err[-6000:]
    check_equal(tmp_path / "shared", undisturbed("fsdp"))
    assert not hosts["b"].wait_for_nobody(30.0)
    assert shared_memory() <= before
    hosts["b"].finish()
    check_resumed([line for name in "abc" for line in journal(name)], attempts=(1, 2))


def start_on_hosts(launch, plan, save_freq):
    """Start a launch on two hosts, each with an agent that holds the snapshots of its task."""
    launch.bound = TIMEOUT_S
    (launch.directory / "ssh").write_text(SSH)
    (launch.directory / "ssh").chmod(0o755)
    launch.start(
        *("--on", "ssh", "--ssh-command", str(launch.directory / "ssh")),
        *("--hosts=127.0.1.1,127.0.1.2", "--restarts", "9", "--hang-timeout", "120"),
        *("--chaos", plan),
        command=(SCRIPT, ".", save_freq, "zero"),
        environ=QUIET,
    )


def test_a_task_on_a_host_of_ssh_resumes_from_the_copy_of_its_rows(launch, undisturbed):
    """Each agent holds the snapshots of its task, and ends with its host."""
    start_on_hosts(launch, "kill chief@step=7; stop worker:1@step=14", "100000")
    path = str(launch.directory / "runs" / "latest")
    wait(lambda: has_stopped(path))
    (agent,) = [
        pid
        for pid in launch.living()
        if environ_of(pid).get("SSH_TEST_HOST") == "127.0.1.2"
        and b"agent_process" in command_line(pid)
    ]
    os.kill(agent, signal.SIGKILL)
    code, _, err = launch.finish()
    assert code == 0, err[-6000:]
    check_equal(launch.directory, undisturbed("zero"))
    check_resumed(read_journal(path), attempts=(1, 2))
    assert not launch.wait_for_nobody(30.0)


def test_the_disk_is_used_if_all_memory_is_lost(launch, undisturbed):
    """A worker dies with the servers of both hosts, and so with the copies of all parts."""
    before = shared_memory()
    start_on_hosts(launch, "stop worker:1@step=17", "6")
    path = str(launch.directory / "runs" / "latest")

    def lines(event):
        return [line for line in read_journal(path) if line["event"] == event]

    wait(lambda: lines(EVENT) and any(line["total"] == 12 for line in lines("saved")))
    # Step 14 is in memory: the save of step 16 waited for that.
    lost = servers(launch)
    assert len(lost) == 2
    assert all(map(holds, lost))
    for pid in (*lost, launch.pid_of("worker:1")):
        os.kill(pid, signal.SIGKILL)
    code, _, err = launch.finish()
    assert code == 0, err[-6000:]
    check_equal(launch.directory, undisturbed("zero"))
    restored = lines("restored")
    assert [(line["attempt"], line["total"]) for line in restored] == [(1, 12)] * 2
    (saved,) = [line for line in lines("saved") if line["total"] == 12 and line["attempt"] == 0]
    assert {line["path"] for line in restored} == {saved["path"]}
    assert not launch.wait_for_nobody(30.0)
    assert shared_memory() <= before


def test_killed_server_costs_the_snapshot_in_memory_only(launch):
    """Training continues with the next server, from whose snapshot it also resumes."""
    launch.bound = TIMEOUT_S
    launch.start(
        *("--workers", "2", "--restarts", "9", "--chaos", "kill worker:1@step=25"),
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
    assert "memory_freq" not in launch.log("worker-0")
    restored = [line for line in read_journal(journal) if line["event"] == "restored"]
    assert {(line["path"], line["attempt"]) for line in restored} == {("memory", 1)}
    for name in ("worker-0.pickle", "worker-1.pickle"):
        end = pickle.loads((launch.directory / name).read_bytes())
        assert end["iterations"] == EPOCHS * STEPS
        assert end["history"]["seen"] == [SEEN] * EPOCHS


@pytest.mark.parametrize("seed", range(int(os.environ.get("TFDIST_CHAOS_ROUNDS", "0"))))
def test_random_kills_cost_nothing_but_time(seed, launch, undisturbed):
    """Kill workers, and the server between two of these kills; `make chaos` runs this."""
    launch.bound = TIMEOUT_S
    launch.start(
        *("--workers", "2", "--restarts", "99", "--chaos", random_plan(seed)),
        command=(SCRIPT, ".", "100000", "fsdp" if seed % 2 else "auto"),
        environ=QUIET,
    )
    path = str(launch.directory / "runs" / "latest")
    for kills in (2, 5):
        wait(
            lambda kills=kills: len([x for x in read_journal(path) if x["event"] == EVENT]) > kills
        )
        os.kill(servers(launch)[0], signal.SIGKILL)
    code, _, err = launch.finish()
    assert code == 0, err[-6000:]
    check_equal(launch.directory, undisturbed("fsdp" if seed % 2 else "auto"))
    assert not launch.wait_for_nobody(30.0)


def test_killed_launcher_leaves_neither_server_nor_shared_memory(launch):
    before = shared_memory()
    launch.start(
        *("--workers", "2", "--restarts", "1"),
        command=(SCRIPT, ".", "100000"),
        environ={**QUIET, "CHAOTIC_PACE": "0.3"},
    )
    wait(lambda: any(holds(server) for server in servers(launch)))
    launch._process.kill()
    assert not launch.wait_for_nobody(30.0)
    assert shared_memory() <= before


def servers(launch):
    return [pid for pid in launch.living() if b"snapshot_process" in command_line(pid)]


def holds(pid):
    """Return whether a process holds a snapshot."""
    for path in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "tfdist-snapshot" in os.readlink(path):
                return True
    return False


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
