"""Test `tfdist launch --on ray` on a real Ray cluster of several nodes on this machine."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.cluster.test_memory_snapshots import (
    QUIET,
    SCRIPT,
    check_equal,
    check_resumed,
    command_line,
    has_stopped,
    train,
    wait,
)
from tests.engines import ray_cluster
from tests.engines.ray_cluster import parent
from tests.engines.task_scripts import BEAT, SAVE, SLOW
from tests.forkserver import environ_of
from tests.launches import Launch
from tests.processes import ROOT, is_gone
from tfdist.runtime.launch_protocol import read_journal

ONCE = """
print("agent", os.getppid(), flush=True)
open(f"{me}.{attempt}", "w").close()
if attempt == "0": train(60)
"""
BOUND_S = 240


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster.running() as started:
        yield started


class RayLaunch(Launch):
    """Launches of a test."""

    def __init__(self, directory, cluster):
        super().__init__(directory, bound=BOUND_S)
        self.cluster = cluster

    def start(self, *flags, script=None, command=("task.py",), environ=None):
        given = {"RAY_ADDRESS": self.cluster.address, **(environ or {})}
        return super().start(
            "--on", "ray", f"--env={self.mark}", *flags, script=script, command=command,
            environ={**self.cluster.environ, **given},
        )  # fmt: skip

    def actor_of(self, task):
        """Return the process id of the actor of a task."""
        return parent(parent(self.pid_of(task)))

    def wait_until_stopped(self, task):
        """Wait until a fault has stopped a task."""
        end = time.monotonic() + self.bound
        while time.monotonic() < end:
            with contextlib.suppress(StopIteration, FileNotFoundError):
                stat = pathlib.Path(f"/proc/{self.pid_of(task)}/stat").read_text()
                if stat.rpartition(")")[2].split()[0] == "T":
                    time.sleep(1.0)  # until the launcher knows that the fault was injected
                    return
            time.sleep(0.1)
        raise AssertionError(f"{task} was not stopped")


@pytest.fixture
def launch(cluster, tmp_path):
    launch = RayLaunch(tmp_path, cluster)
    yield launch
    launch.check_nobody_left(20.0)
    assert not cluster.wait_until_idle()


def test_tasks_get_nodes_threads_and_gpus(launch, cluster):
    script = (
        BEAT
        + """
cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
print("hosts", [host.rpartition(":")[0] for host in cluster])
print("threads", os.environ["OMP_NUM_THREADS"], "gpus", os.environ.get("CUDA_VISIBLE_DEVICES"))
print("env", os.environ["WORD"], os.environ["PASSED_ON"], os.getcwd())
"""
    )
    code, out, err = launch.run(
        "--workers=3",
        "--gpus-per-task=1",
        "--placement-strategy=STRICT_SPREAD",
        "--env=WORD=a b=c",
        "--env=PASSED_ON",
        script=script,
        environ={"PASSED_ON": "yes"},
    )
    assert code == 0, err
    host = cluster.address.rpartition(":")[0]
    assert out.count(f"hosts {[host] * 3}\n") == 3
    assert out.count("threads 1 gpus 0\n") == 3
    assert out.count(f"env a b=c yes {launch.directory}\n") == 3
    assert "worker:0, worker:1, worker:2 on nodes of Ray; logs in" in err
    assert "without having met" not in err  # the journals of the nodes arrive here


def test_failed_and_hung_workers_are_named_and_restarted(launch):
    script = (
        BEAT
        + """
train(0.5)
if me == "worker:1" and attempt == "0": raise ValueError("a mistake of the script")
if me == "worker:1" and attempt == "1": time.sleep(60)
if me == "worker:0" and attempt < "2": train(60)
"""
    )
    code, _out, err = launch.run("--workers=2", "--hang-timeout=3", "--restarts=2", script=script)
    assert code == 0, err
    causes = re.findall(r"ROOT CAUSE: (.*)", err)
    assert causes[0] == "worker:1 failed with exit code 1: ValueError: a mistake of the script"
    assert re.fullmatch(
        r"worker:1 made no step for \d+ s after step 10 .* killed as hung", causes[1]
    )
    assert 'File "task.py"' in err or "time.sleep(60)" in err  # the stack of the hung task


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nobody_stays_behind_when_the_launcher_ends(launch, cluster, number):
    process = launch.start(
        "--workers=2",
        script=BEAT + SAVE + "ready()\ntrain(60)\n",
    )
    launch.wait_for("worker:0.ready", "worker:1.ready")
    assert cluster.holdings() == ["actor AgentHost", "actor AgentHost", "group tfdist"]
    os.kill(process.pid, number)
    code, _, err = launch.finish()
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 42, signal.SIGKILL: -9}[number], err
    assert not launch.wait_for_nobody(20.0)
    assert not cluster.wait_until_idle()


def test_nobody_stays_behind_when_launcher_and_driver_are_killed(launch, cluster):
    process = launch.start("--workers=2", script=BEAT + "ready()\ntrain(60)\n")
    launch.wait_for("worker:0.ready", "worker:1.ready")
    driver = next(
        pid
        for pid in launch.living()
        if b"ray_driver" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(process.pid, signal.SIGKILL)
    os.kill(driver, signal.SIGKILL)
    launch.finish()
    assert not launch.wait_for_nobody(20.0)
    assert not cluster.wait_until_idle()


def test_killed_driver_is_started_again(launch):
    launch.start("--workers=2", "--restarts=1", script=BEAT + ONCE)
    launch.wait_for("worker:0.0", "worker:1.0")
    driver = next(
        pid
        for pid in launch.living()
        if b"ray_driver" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(driver, signal.SIGKILL)
    code, _, err = launch.finish()
    assert code == 0, err
    assert "its driver ended with -9" in err


def test_killed_actor_is_replaced_and_ends_its_task(launch):
    launch.start("--workers=2", "--restarts=1", script=BEAT + ONCE)
    launch.wait_for("worker:0.0", "worker:1.0")
    task, actor = launch.pid_of("worker:1"), launch.actor_of("worker:1")
    os.kill(actor, signal.SIGKILL)
    end = time.monotonic() + 10
    while not is_gone(task) and time.monotonic() < end:
        time.sleep(0.05)
    assert is_gone(task)
    code, out, err = launch.finish()
    assert code == 0, err
    cause = re.search(r"ROOT CAUSE: (.*)", err)[1]
    assert re.match(r"worker:1 was lost with its host n\d: ActorDiedError: The actor ", cause)
    agents = re.findall(r"\[(worker:\d)\] agent (\d+)", out)
    by_task = {task: [pid for name, pid in agents if name == task] for task, _ in agents}
    assert len(set(by_task["worker:0"])) == 1  # kept
    assert len(set(by_task["worker:1"])) == 2


def test_spare_node_takes_the_place_of_a_lost_one(launch, cluster):
    launch.start("--workers=2", "--restarts=1", script=BEAT + ONCE)
    launch.wait_for("worker:0.0", "worker:1.0")
    lost = cluster.node_of(launch.pid_of("worker:1"))
    cluster.lose_node(lost)
    try:
        code, _out, err = launch.finish()
    finally:
        cluster.add_node(lost)
    assert code == 0, err
    assert f"worker:1 was lost with its host {lost}: Actor" in err
    assert not launch.wait_for_nobody(20.0)


def test_straggler_leaves_its_node_while_the_others_have_room(launch, cluster):
    """Of three nodes, the second attempt uses the two on which no task was slow."""
    launch.start("--workers=2", "--replace-stragglers=2", script=SLOW)
    nodes = []
    for attempt in ("0", "1"):
        launch.wait_for(f"worker:0.{attempt}", f"worker:1.{attempt}")
        nodes.append([cluster.node_of(launch.pid_of(f"worker:{number}")) for number in (0, 1)])
    code, _out, err = launch.finish()
    assert code == 0, err
    (kept, slow), after = nodes
    assert sorted({kept, slow, *after}) == ["n0", "n1", "n2"]
    assert after[0] == kept
    assert after[1] not in (kept, slow)
    assert "worker:1 was slow: restart that does not count" in err
    room = f"there may be no room for the tasks without {after[1]}: Ray gave none within 5 s"
    assert f"; it stays, as {room}" in err


def test_launch_waits_for_a_node_that_joins_after_a_loss(launch, cluster):
    launch.start("--workers=3", "--restarts=1", script=BEAT + ONCE)
    launch.wait_for("worker:0.0", "worker:1.0", "worker:2.0")
    lost = cluster.node_of(launch.pid_of("worker:1"))
    cluster.lose_node(lost)
    time.sleep(1.0)
    cluster.add_node(lost)
    code, _out, err = launch.finish()
    assert code == 0, err
    assert f"worker:1 was lost with its host {lost}: Actor" in err


def test_lack_of_room_is_explained_and_bounded(launch):
    code, _, err = launch.run("--workers=4", "--queue-timeout=3", script="pass")
    assert code == 75
    assert (
        "tfdist: waiting for room in Ray: 4 tasks ask for 1 CPU each (PACK); the cluster has 3 CPU "
        "(3 free) on 4 nodes" in err
    )
    assert "error: Ray gave no room within 3 s: 4 tasks ask for 1 CPU each" in err
    code, _, err = launch.run("--cpus-per-task=9", "--queue-timeout=3", script="pass")
    assert code == 75
    assert "1 task asks for 9 CPU (PACK); the cluster has 3 CPU (3 free)" in err


def test_interrupt_ends_the_wait_for_room(launch):
    process = launch.start("--workers=4", script="pass")
    end = time.monotonic() + BOUND_S
    while "group tfdist" not in launch.cluster.holdings() and time.monotonic() < end:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    code, _, err = launch.finish()
    assert code == 130, err


def test_configuration_error_ends_the_launch_and_preemption_does_not_count(launch):
    code, _, err = launch.run("--workers=1", "--restarts=3", script="sys.exit(78)")
    assert code == 78
    assert err.count("ROOT CAUSE") == 1
    script = BEAT + "train(0.5)\nsys.exit(42 if attempt < '2' else 0)"
    code, _, err = launch.run("--workers=1", "--restarts=1", script=script)
    assert code == 0, err


def test_actor_that_the_memory_monitor_kills_is_named(launch, cluster):
    """Any use of memory is too much for Ray on this node."""
    cluster.add_node(
        "full",
        {"RAY_memory_monitor_refresh_ms": "250", "RAY_memory_usage_threshold": "0.001"},
        num_cpus=2,
    )
    try:
        code, _, err = launch.run("--cpus-per-task=2", script=BEAT + "train(60)")
    finally:
        cluster.lose_node("full")
    assert code != 0
    assert re.search(r"full: OutOfMemoryError: .* running low on memory", err), err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--address=127.0.0.1:1", 75, "error: Ray at 127.0.0.1:1: "),
        ("--address=nowhere", 2, "--address: 'nowhere' "),
        ("--address=ray://a:1", 2, "--address: 'ray://a:1' "),
        ("--hosts=a", 2, "--hosts: expected together with --on ssh, received --on ray"),
        ("--partition=p", 2, "--partition: expected together with --on slurm, received --on ray"),
        ("--cpus-per-task=0", 2, "--cpus-per-task"),
        ("--remote-python=/no/python", 75, "name the Python by --remote-python"),
        ("--directory=/no/directory", 2, "directory /no/directory: No such file or directory"),
    ],
)
def test_wrong_options_are_refused_in_one_line(launch, words, code, message):
    found = launch.run(*words.split(), script="pass")
    assert found[0] == code, found[2]
    assert message in found[2]


def test_digits_resume_after_a_killed_task_actor_and_node(launch, cluster, digits_dir):
    """The weights of the disturbed run are those of one without a fault."""

    def start(name, chaos):
        launch.start(
            "--workers=2", "--restarts=3", f"--env=TFDS_DATA_DIR={digits_dir}",
            f"--chaos={chaos}", f"--log-dir={name}",
            command=(
                str(ROOT / "examples" / "digits.py"),
                "--epochs=3",
                f"--backup_dir={launch.directory / name}-backup",
            ),
        )  # fmt: skip

    start("calm", "none")
    code, out, err = launch.finish()
    assert code == 0, out + err
    start("wild", "kill worker:1@step=5; stop worker:1@step=30; stop worker:0@step=60")
    launch.wait_until_stopped("worker:1")
    os.kill(launch.actor_of("worker:1"), signal.SIGKILL)
    launch.wait_until_stopped("worker:0")
    lost = cluster.node_of(launch.pid_of("worker:0"))
    cluster.lose_node(lost)
    try:
        code, out, err = launch.finish()
    finally:
        cluster.add_node(lost)
    assert code == 0, out + err
    causes = re.findall(r"ROOT CAUSE: (.*)", err)
    assert causes[0].startswith("worker:1 was killed by SIGKILL")
    assert causes[1].startswith("worker:1 was lost with its host")
    assert causes[2].startswith(f"worker:0 was lost with its host {lost}")
    report = subprocess.run(
        [sys.executable, "-m", "tfdist", "chaos", "report", "wild", "--against", "calm"],
        cwd=launch.directory,
        env=cluster.environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert report.returncode == 0, report.stdout + report.stderr


@pytest.mark.timeout(900)  # four starts of TensorFlow in two processes each
def test_training_resumes_from_the_memory_of_its_nodes(launch, cluster, tmp_path_factory):
    """A killed worker resumes from memory, and then a lost node's rows come from the other one."""
    whole = Launch(tmp_path_factory.mktemp("undisturbed"))
    train(whole, "zero")
    launch.start(
        *("--workers=2", "--placement-strategy=STRICT_SPREAD", "--restarts=2"),
        *("--hang-timeout=120", "--chaos=kill worker:1@step=7; stop worker:0@step=14"),
        *(f"--env={name}={value}" for name, value in QUIET.items()),
        command=(SCRIPT, ".", "100000", "zero"),
    )
    logs = str(launch.directory / "runs" / "latest")
    wait(lambda: has_stopped(logs))
    raylets = set(map(str, cluster.nodes.values()))
    assert len(snapshot_servers(raylets)) == 2
    lost = cluster.node_of(launch.pid_of("worker:0"))
    cluster.lose_node(lost)
    try:
        code, out, err = launch.finish()
    finally:
        cluster.add_node(lost)
    assert code == 0, out + err
    check_equal(launch.directory, whole.directory)
    check_resumed(read_journal(logs), attempts=(1, 2))
    wait(lambda: not snapshot_servers(raylets))


def snapshot_servers(raylets):
    """Return the processes of some nodes of Ray that hold snapshots.

    Args:
        raylets: Process ids of the raylets of the nodes.
    """
    return [
        pid
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
        if b"snapshot_process" in command_line(pid)
        and environ_of(pid).get("RAY_RAYLET_PID") in raylets
    ]
