"""Test plain steps of a real Slurm: their tasks find and meet each other, and are supervised."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.engines import slurm_cluster
from tests.engines.slurm_cluster import BOUND_S, NODES
from tests.processes import ROOT

TASK = """
import json, os
from tfdist.cluster import preflight, resolvers
spec = resolvers.resolve()
if spec:
    preflight.check(spec, timeout=40)
print(json.dumps({
    "jobs": spec and spec.jobs, "rank": spec and spec.rank, "address": spec and spec.task.address,
    "procid": int(os.environ.get("SLURM_PROCID", -1)), "node": os.environ.get("SLURMD_NODENAME"),
}))
"""


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster.running() as started:
        yield started


@pytest.fixture
def slurm(cluster):
    """Yield the environment for commands of an idle Slurm."""
    cluster.wait_until_idle()
    return cluster.environ


def tasks_of(environ, *command):
    """Run `resolve` and the preflight in a step; return what each task printed, by rank."""
    result = subprocess.run(
        [*command, sys.executable, "-c", TASK],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert result.returncode == 0, result.stderr
    return sorted(
        (json.loads(line) for line in result.stdout.splitlines()), key=lambda task: task["procid"]
    )


@pytest.mark.parametrize("ports", ["--resv-ports=5", "--resv-ports=0"])
@pytest.mark.parametrize(
    "options",
    [
        "-N3 -n3",
        "-N2 -n4",
        "-N3 -n4",  # uneven: 2, 1, 1
        "-N2 -n4 -m cyclic",
        "-N3 -n5 -m cyclic",  # uneven: 2, 2, 1
        "-N3 -n5 -m plane=2",
        "-N1 -n2",
    ],
)
def test_tasks_of_a_step_form_one_cluster(slurm, options, ports):
    tasks = tasks_of(slurm, "srun", *options.split(), ports)
    assert len(tasks) == int(options.split("-n")[1][0])
    for rank, task in enumerate(tasks):
        assert task["procid"] == task["rank"] == rank
        assert task["jobs"] == tasks[0]["jobs"]
        assert task["address"].startswith(f"{task['node']}:")  # where Slurm really put this rank


@pytest.mark.parametrize("command", ["srun -N1 -n1", "salloc -N2 -n2"])
def test_steps_that_are_no_cluster_are_refused(slurm, command):
    assert [task["jobs"] for task in tasks_of(slurm, *command.split())] == [None]


def test_arbitrary_distribution_follows_the_hostfile(slurm, tmp_path):
    order = [NODES[2], NODES[0], NODES[2], NODES[1]]
    (tmp_path / "hosts").write_text("\n".join(order) + "\n")
    environ = {**slurm, "SLURM_HOSTFILE": str(tmp_path / "hosts")}
    tasks = tasks_of(environ, "srun", "-n4", "-N3", "--resv-ports=0", "--distribution=arbitrary")
    assert [task["node"] for task in tasks] == order
    assert [task["rank"] for task in tasks] == [0, 1, 2, 3]


def test_agents_of_an_arbitrary_distribution_are_the_workers_of_the_hostfile(slurm, tmp_path):
    order = [NODES[1], NODES[2], NODES[0], NODES[2]]
    (tmp_path / "hosts").write_text("\n".join(order) + "\n")
    (tmp_path / "task.py").write_text(
        "import json, os\n"
        "config = json.loads(os.environ['TF_CONFIG'])\n"
        "hosts = [address.rpartition(':')[0] for address in config['cluster']['worker']]\n"
        "facts = [config['task']['index'], int(os.environ['SLURM_PROCID']), hosts]\n"
        "print(json.dumps([*facts, os.environ['SLURMD_NODENAME']]), flush=True)\n"
    )
    result = subprocess.run(
        ["srun", "-n4", "-N3", "--distribution=arbitrary", "--kill-on-bad-exit=0", "--wait=60",
         sys.executable, "-m", "tfdist", "agent", "--", "task.py"],
        env={**slurm, "SLURM_HOSTFILE": str(tmp_path / "hosts")}, cwd=tmp_path,
        capture_output=True, text=True, timeout=BOUND_S,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    tasks = sorted(map(json.loads, result.stdout.splitlines()))
    assert tasks == [[rank, rank, order, node] for rank, node in enumerate(order)]


@pytest.mark.parametrize("components", ["-N1 -n2 : -N2 -n2", "-N1 -n1 : -N2 -n4"])
def test_step_over_components_of_a_heterogeneous_job_is_one_cluster(slurm, components):
    salloc = ["salloc", "--quiet", *components.split()]
    tasks = tasks_of(slurm, *salloc, "srun", "--het-group=0,1", "--resv-ports=0")
    assert len(tasks) == 4 + (components.count("n4"))
    for rank, task in enumerate(tasks):
        assert task["procid"] == task["rank"] == rank
        assert task["jobs"] == tasks[0]["jobs"]
        assert task["address"].startswith(f"{task['node']}:")


def test_hung_task_of_a_plain_step_ends_it_within_its_bound(slurm, tmp_path):
    """The recipe of docs/slurm.md: `srun ... tfdist agent`, without a launcher."""
    script = tmp_path / "hang.py"
    script.write_text(
        "import os, time\n"
        "from tfdist.runtime.launch_protocol import Phase, progress\n"
        "for step in range(20):\n"
        "    progress().beat(Phase.RUNNING, 0, step + 1, step + 1)\n"
        "    time.sleep(0.05)\n"
        "if os.environ['SLURM_PROCID'] == '1': time.sleep(600)\n"
    )
    result = subprocess.run(
        ["srun", "-N2", "-n2", "--kill-on-bad-exit=0", "--wait=60", sys.executable, "-m", "tfdist",
         "agent", "--hang-timeout=3", "--", str(script)],
        env=slurm, cwd=tmp_path, capture_output=True, text=True, timeout=BOUND_S,
    )  # fmt: skip
    assert result.returncode == 75, result.stderr
    assert re.search(r"ROOT CAUSE: worker:1 made no step for \d+ s", result.stderr)
    assert os.listdir(tmp_path / "runs" / "agents")
