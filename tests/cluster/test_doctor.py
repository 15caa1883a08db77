"""Test doctors of several hosts, and `tfdist launch --check` before its tasks.

Hosts are real processes on loopback, and network namespaces.
"""

import json
import os
import time

import pytest

from tests.networks import listens, network
from tests.processes import PYTHON, ROOT, group
from tfdist import ClusterSpec

TIMEOUT_S = 60  # for a command, which takes one or two
PORT = 2222


@pytest.fixture
def members(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with group(tmp_path) as started:
        yield started


def write(path, spec):
    """Write a cluster file, and return its path."""
    path.write_text(
        json.dumps({"cluster": {job: list(addresses) for job, addresses in spec.jobs.items()}})
    )
    return str(path)


def doctor(members, name, *words, prefix=(), **environ):
    command = [*prefix, PYTHON, "-m", "tfdist", "doctor", "--quick", *words]
    return members.start(name, command, **{"PYTHONPATH": str(ROOT), "COLUMNS": "500", **environ})


def serve(members, file, task, *words, **options):
    """Start a doctor that serves, and wait until it is ready."""
    doctor(
        members,
        task,
        "--cluster",
        file,
        "--task",
        task,
        "--serve",
        "--timeout",
        str(TIMEOUT_S),
        *words,
        **options,
    )
    members.says(task, "serves worker", TIMEOUT_S)


def ask(members, file, task, *words, timeout=20, name="asker", **options):
    """Return the exit code, and the checks of the cluster that do not pass, by name.

    A warning of the network is the test machine's own.
    """
    process = doctor(
        members,
        name,
        "--json",
        "--cluster",
        file,
        "--task",
        task,
        "--timeout",
        str(timeout),
        *words,
        **options,
    )
    code = process.wait(TIMEOUT_S)
    said = json.loads(members.log(name)[members.log(name).index("{") :])
    assert code == (said["status"] == "fail")
    bad = [
        check
        for check in said["checks"]
        if check["status"] != "pass" and (check["name"], check["status"]) != ("network", "warn")
    ]
    return code, {check["name"]: f"{check['found']}; {check['remedy']}" for check in bad}


def test_two_hosts_that_fit(members, tmp_path):
    file = write(tmp_path / "c.yaml", ClusterSpec.local(workers=2))
    shared = str(tmp_path / "shared")
    serve(members, file, "worker:1", "--directory", shared)
    assert ask(members, file, "worker:0", "--directory", shared) == (0, {})
    assert ask(members, file, "worker:0", "--directory", shared, name="again") == (
        0,
        {},
    )  # a server stays
    assert not os.path.exists(shared)
    members.processes["worker:1"].terminate()
    assert members.processes["worker:1"].wait(TIMEOUT_S) == 143


def test_absent_host_is_named(members, tmp_path):
    file = write(tmp_path / "c.yaml", ClusterSpec.local(workers=3))
    serve(members, file, "worker:1")
    code, faults = ask(members, file, "worker:0", timeout=1)
    assert code == 1
    assert "s, 1 of 3 tasks are absent: worker:2 at 127.0.0.1:" in faults["reach"]
    assert "worker:1" not in faults["reach"]


def test_hosts_with_faults_of_their_own(members, tmp_path):
    """Test four hosts with another order, another Keras, another directory, and a server fault."""
    spec = ClusterSpec.local(workers=4)
    first, second, *others = spec.jobs["worker"]
    file = write(tmp_path / "c.yaml", spec)
    swapped = write(tmp_path / "swapped.yaml", ClusterSpec({"worker": (second, first, *others)}))
    metadata = tmp_path / "packages" / "keras-9.9.9.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: keras\nVersion: 9.9.9\n")
    (tmp_path / "in the way").write_text("")
    mine = ["--directory", str(tmp_path / "mine")]
    serve(members, swapped, "worker:0", *mine)  # at the address of worker:1
    serve(members, file, "worker:2", *mine, PYTHONPATH=f"{metadata.parent}:{ROOT}")
    serve(
        members,
        file,
        "worker:3",
        "--directory",
        str(tmp_path / "theirs"),
        str(tmp_path / "in the way"),
    )
    code, faults = ask(members, file, "worker:0", *mine)
    assert code == 1
    assert f"another order: worker:0 is {first} here and {second} there" in faults["spec"]
    assert "has different versions: python" in faults["versions"]
    assert "keras 9.9.9" in faults["versions"]
    assert "is not seen by worker:3" in faults["shared directory"]
    assert "worker:1" not in faults["shared directory"]
    assert "the doctor of worker:3 found: directory: " in faults["other hosts"]


def test_hosts_that_check_together_agree_on_the_verdict(members, tmp_path):
    """All hosts fail when one of them has a fault."""
    file = write(tmp_path / "c.yaml", ClusterSpec.local(workers=3))
    (tmp_path / "in the way").write_text("")
    for name, directories in (
        ("good", ["shared"] * 3),
        ("bad", ["shared", "shared", "in the way"]),
    ):
        for index, directory in enumerate(directories):
            words = [
                "--cluster",
                file,
                "--task",
                f"worker:{index}",
                "--together",
                "--timeout",
                str(TIMEOUT_S),
                "--directory",
                directory,
            ]
            doctor(members, f"{name} {index}", *words)
        codes = members.wait(TIMEOUT_S)
        assert [codes[f"{name} {index}"] for index in range(3)] == [int(name == "bad")] * 3, (
            members.logs()
        )
    assert "the doctor of worker:2 found: directory: in the way" in members.log("bad 0")
    assert "network" in members.log("good 0")  # one of them measures
    assert "network" not in members.log("good 1")


def test_a_task_that_is_started_twice(members, tmp_path):
    """Test that a second process that is refused the port tells the first.

    The first tells those who come later: none of the three starts.
    """
    file = write(tmp_path / "c.yaml", ClusterSpec.local(workers=2))
    words = ["--cluster", file, "--together", "--timeout", str(TIMEOUT_S), "--directory", "shared"]
    doctor(members, "first", *words, "--task", "worker:0")
    port = int(
        json.loads((tmp_path / "c.yaml").read_text())["cluster"]["worker"][0].rpartition(":")[2]
    )
    end = time.monotonic() + TIMEOUT_S
    while not listens(port):
        assert time.monotonic() < end, members.logs()
        time.sleep(0.05)
    assert doctor(members, "second", *words, "--task", "worker:0").wait(TIMEOUT_S) == 1, (
        members.logs()
    )
    doctor(members, "other", *words, "--task", "worker:1")
    assert members.wait(TIMEOUT_S) == {"first": 1, "second": 1, "other": 1}, members.logs()
    assert "is already in use on this machine" in members.log("second")
    for name in ("first", "other"):
        assert "the doctor of worker:0 found: ports: " in members.log(name)


def test_hosts_of_a_network(members, tmp_path):
    with network(2) as hosts:
        file = write(
            tmp_path / "c.yaml",
            ClusterSpec({"worker": tuple(f"{hosts.address(host)}:{PORT}" for host in (1, 2))}),
        )
        doctor(
            members,
            "server",
            "--cluster",
            file,
            "--serve",
            "--timeout",
            str(TIMEOUT_S),
            "--directory",
            "here",
            prefix=hosts.prefix(2),
        )
        members.says("server", "serves worker:1 at 10.77.0.2:2222", TIMEOUT_S)
        words = ["--json", "--cluster", file, "--timeout", "1", "--directory", "here"]
        assert doctor(members, "whole", *words, prefix=hosts.prefix(1)).wait(TIMEOUT_S) == 0, (
            members.logs()
        )
        process = doctor(members, "mistaken", *words, "--task", "worker:1", prefix=hosts.prefix(1))
        assert process.wait(TIMEOUT_S) == 1
        assert "10.77.0.2:2222 is not an address of this machine" in members.log("mistaken")
        hosts.cut(2)
        assert doctor(members, "cut", *words, prefix=hosts.prefix(1)).wait(TIMEOUT_S) == 1
        assert "worker:1 at 10.77.0.2:2222 (" in members.log("cut")


def test_launch_checks_first(launch, tmp_path):
    script = "open('ran', 'w').close()\n"
    (tmp_path / "bad.py").write_text(
        "import tfdist\ndef get_config():\n    config = tfdist.config.default()\n    "
        "config.train.epohs = 3\n    return config\n"
    )
    code, out, err = launch.run(
        "--workers", "2", "--check", command=("tfdist", "train", "--config=bad.py")
    )
    assert (code, "no task was started" in err) == (1, True), out + err
    assert "train.epohs: no such key" in out
    assert not (tmp_path / "runs").exists()
    code, out, err = launch.run("--workers", "2", "--check", "--log-dir", "logs", script=script)
    assert code == 0, out + err
    assert "0 failures" in out
    assert "tfdist: worker:0, worker:1 on this host" in out + err
    assert (tmp_path / "ran").exists()


def test_a_check_ends_with_its_launch(launch, tmp_path):
    """Test that the process that imports TensorFlow ends too.

    The fixture looks for processes that are left.
    """
    (tmp_path / "tensorflow.py").write_text(
        "import time; open('imported', 'w').close(); time.sleep(100)"
    )
    process = launch.start("--check", script="", environ={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    launch.wait_for("imported")
    process.terminate()
    assert launch.finish()[0] == 143


@pytest.mark.parametrize("flags", [("--cluster", "none.yaml"), ("--workers", "x")])
def test_wrong_arguments_are_named_before_any_check(launch, flags):
    code, out, err = launch.run(*flags, "--check", script="")
    assert (code, out) == (2, "")
    assert err.startswith("tfdist launch: error: ")
