"""Test that stages on a cluster's workers train as one process, and end with the chief."""

import json
import os
import signal
import socket
import time

import numpy as np
import pytest

from tests.processes import PYTHON, ROOT, group
from tfdist.cluster.addresses import split_address
from tfdist.cluster.spec import ClusterSpec

SCRIPT = str(ROOT / "tests" / "cluster" / "scripts" / "staged.py")
pytestmark = pytest.mark.timeout(300)


def test_two_groups_of_stages_on_workers(launch):
    """Test that a launch with a process killed in the third epoch begins again from a snapshot.

    Its result is that of one process that nobody disturbs.
    """
    out = launch.directory / "result.json"
    command = (SCRIPT, str(out), "3", "snapshots")
    code, printed, errors = launch.run(
        "--chief",
        "--workers",
        "4",
        "--restarts",
        "1",
        command=command,
        environ={"CUDA_VISIBLE_DEVICES": "-1"},
    )
    assert code == 0, printed + errors
    assert "worker:1 was killed by SIGKILL" in errors
    first = launch.log("chief-0")
    second = launch.log("attempt-1/chief-0")
    assert "_pipeline epoch 2\n" in first
    assert "_pipeline epoch 3\n" not in first
    assert "_pipeline epoch 1\n" not in second
    assert "_pipeline epoch 3\n" in second
    result = json.loads(out.read_text())
    assert list(result["staged"]) == list(result["alone"])
    for name, values in result["alone"].items():
        np.testing.assert_allclose(
            result["staged"][name], values, rtol=1e-5, atol=1e-6, err_msg=name
        )
    assert result["weights"] < 1e-6
    # The first group holds the variables.
    assert result["places"] == [f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(2)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_stage_ends_the_job(launch, how):
    launch.start(
        "--chief",
        "--workers",
        "2",
        command=(SCRIPT, "result.json", "1000000"),
        environ={"CUDA_VISIBLE_DEVICES": "-1"},
    )
    end = time.monotonic() + 120
    while (
        not (log := launch.directory / "runs" / "latest" / "chief-0.log").exists()
        or "epoch 2\n" not in log.read_text()
    ):
        assert time.monotonic() < end
        time.sleep(0.2)
    os.kill(launch.pid_of("worker:1"), how)
    code, out, errors = launch.finish()
    assert code, out + errors
    assert "worker:1" in errors
    if how == signal.SIGSTOP:
        assert "which runs a stage of pipeline parallelism, did not answer for 15 s" in launch.log(
            "chief-0"
        )


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        (
            {"workers": 2},
            (
                "expected a chief, which runs the program, and a worker for each stage; .* lists "
                "the jobs worker"
            ),
        ),
        ({"workers": 1, "ps": 1, "chief": True}, "lists the jobs chief, worker, ps"),
    ],
)
def test_a_cluster_that_has_no_stages(jobs, message):
    import tfdist

    with pytest.raises(ValueError, match=f"^pipeline_devices: .*{message}"):
        tfdist.pipeline_devices(ClusterSpec.local(**jobs).for_task("worker", 0))


def test_a_worker_that_stops_before_the_chief_connects(tmp_path):
    """Test a server that has answered, as one of gRPC does, and then stops.

    Like a stopped process, it accepts connections and says nothing.
    """
    config = ClusterSpec.local(workers=1, chief=True).for_task("chief", 0)
    code = "import tfdist; tfdist.pipeline_devices(timeout=2)"
    with (
        socket.create_server(split_address(config.jobs["worker"][0])) as server,
        group(tmp_path) as members,
    ):
        members.start(
            "chief", [PYTHON, "-c", code], TF_CONFIG=config.to_tf_config(), PYTHONPATH=str(ROOT)
        )
        server.settimeout(60)
        with server.accept()[0] as connection:
            connection.sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))  # its settings: RFC 9113, 3.4
            assert members.wait(60) == {"chief": 75}
        assert "error: worker:0 at 127.0.0.1" in members.log("chief"), members.logs()
        assert "did not answer for 2 s" in members.log("chief"), members.logs()


def test_workers_that_never_start_are_named(tmp_path):
    code = "import tfdist; tfdist.pipeline_devices(start_timeout=1)"
    config = ClusterSpec.local(workers=2, chief=True).for_task("chief", 0).to_tf_config()
    with group(tmp_path) as members:
        members.start("chief", [PYTHON, "-c", code], TF_CONFIG=config, PYTHONPATH=str(ROOT))
        assert members.wait(60) == {"chief": 1}
        assert "worker:0 at 127.0.0.1" in members.log("chief"), members.logs()
        assert "worker:1 at 127.0.0.1" in members.log("chief"), members.logs()
