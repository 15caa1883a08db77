"""Test data workers as processes: their order, jobs without them, and their cleanup."""

import json
import os
import signal
import time

import pytest

from tests.cluster.scripts import audited, served
from tests.launches import Launch
from tests.processes import PYTHON, ROOT, group
from tfdist.cluster.addresses import free_ports

TIMEOUT_S = 240  # for any launch here: some 20 on an idle machine of 2 cores
SCRIPT = str(ROOT / "tests" / "cluster" / "scripts" / "served.py")
LENGTHS = [23, 5, 29]
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("served") / "records"
    audited.write_records(directory, LENGTHS)
    return str(directory)


@pytest.fixture(scope="module")
def data_workers(tmp_path_factory):
    """Start two data workers; yield their process ids by address."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    with group(tmp_path_factory.mktemp("data")) as members:
        pids = {
            a: members.start(f"data-{i}", [PYTHON, "-m", "tfdist.data.service", a]).pid
            for i, a in enumerate(addresses)
        }
        for i in range(len(addresses)):
            members.says(f"data-{i}", "serves at", TIMEOUT_S)
        yield pids


@pytest.fixture
def launch(tmp_path):
    started = Launch(tmp_path, TIMEOUT_S)
    yield started
    try:
        started.check_nobody_left(20)
    finally:
        started.finish()


# --- Order ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("workers", "count"), [(1, 1), (2, 2)])
def test_each_worker_gets_the_same_batches_as_without_data_workers(
    workers, count, directory, data_workers
):
    for worker in range(workers):
        plain = served.read(served.by_number(directory, None), worker, workers)
        assert (
            served.read(served.by_number(directory, list(data_workers)[:count]), worker, workers)
            == plain
        )


def test_a_launch_of_two_workers_and_two_data_workers(launch, directory):
    code, _, err = launch.run(
        "--workers", "2", "--data-workers", "2", command=(SCRIPT, "read", directory)
    )
    assert code == 0, err
    assert "worker:0, worker:1, data:0, data:1 on this host" in err
    for worker in range(2):
        batches = json.loads((launch.directory / f"worker:{worker}.json").read_text())
        assert batches == [
            served.read(kind(directory, None), worker, 2)
            for kind in (served.by_number, served.by_file)
        ]
        assert f"data:{worker}" not in launch.log(f"worker-{worker}")
        assert "serves at 127.0.0.1:" in launch.log(f"data-{worker}")


# --- Without them ---------------------------------------------------------------------------------
def test_a_data_worker_that_is_killed_is_named(launch, directory):
    launch.start("--workers", "2", "--data-workers", "2", command=(SCRIPT, "forever", directory))
    launch.wait_for("worker:0.ready", "worker:1.ready")
    os.kill(launch.pid_of("data:1"), signal.SIGKILL)
    code, _, err = launch.finish()
    assert code == 137
    assert "ROOT CAUSE: data:1 was killed by SIGKILL" in err
    assert "data-1.log" in err


def test_a_data_worker_that_freezes_is_named(launch, directory):
    launch.start("--data-workers", "2", command=(SCRIPT, "forever", directory))
    launch.wait_for("worker:0.ready")
    os.kill(launch.pid_of("data:1"), signal.SIGSTOP)
    code, _, err = launch.finish()
    assert code == 75
    assert "ROOT CAUSE: data:1 was stopped while its peers needed it" in err


def test_a_data_worker_that_cannot_start_is_named(launch, directory):
    # As where TensorFlow is broken on a host.
    (launch.directory / "sitecustomize.py").write_text(
        "import os, sys\nif os.environ.get('TFDIST_TASK') == 'data:0': sys.modules['tensorflow'] "
        "= None\n"
    )
    environ = {"PYTHONPATH": f"{launch.directory}:{ROOT}"}
    code, _, err = launch.run(
        "--data-workers", "1", command=(SCRIPT, "forever", directory), environ=environ
    )
    assert code == 1
    assert "ROOT CAUSE: data:0 failed with exit code 1: ModuleNotFoundError" in err


def test_error_with_a_cluster_file_names_the_remedy(launch):
    code, _, err = launch.run("--cluster", "cluster.yaml", "--data-workers", "1", script="")
    assert code == 2
    assert "--data-workers: expected without --cluster, received both" in err
    assert "python -m tfdist.data.service HOST:PORT" in err


# --- What they leave ------------------------------------------------------------------------------
def test_passes_leave_no_threads(directory, data_workers):
    def threads():
        return [len(os.listdir(f"/proc/{pid}/task")) for pid in data_workers.values()]

    batches = served.by_number(directory, list(data_workers))
    for _ in batches:
        pass
    before = threads()
    for _ in range(8):
        next(iter(batches.repeat().prefetch(2)))
    end = time.monotonic() + TIMEOUT_S
    while any(
        now > was + 8 for now, was in zip(threads(), before, strict=True)
    ):  # gRPC's come and go
        assert time.monotonic() < end, f"{threads()} threads, {before} before"
        time.sleep(0.2)


def test_a_data_worker_that_is_ended_leaves_no_files(tmp_path):
    (tmp_path / "temporary").mkdir()
    command = [PYTHON, "-m", "tfdist.data.service", f"127.0.0.1:{free_ports(1)[0]}"]
    with group(tmp_path) as members:
        process = members.start("data", command, TMPDIR=str(tmp_path / "temporary"))
        members.says("data", "serves at", TIMEOUT_S)
        assert os.listdir(tmp_path / "temporary")
        process.terminate()
        assert members.wait(TIMEOUT_S)["data"] == 143
    assert not os.listdir(tmp_path / "temporary")


def test_a_port_that_is_taken_is_named(tmp_path, data_workers):
    taken = next(iter(data_workers))
    with group(tmp_path) as members:
        members.start("data", [PYTHON, "-m", "tfdist.data.service", taken])
        assert members.wait(TIMEOUT_S)["data"] == 78
        assert f"the port of {taken} is already in use" in members.log("data")
