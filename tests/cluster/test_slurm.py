"""Test a real Slurm on loopback: three nodes on this machine, and our tasks in its steps."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import pytest

from tfdist.cluster.addresses import free_ports

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sinfo")
# Names that are addresses, so that they resolve; sorted as text, 10 would come before 2.
NODES = ("127.0.1.2", "127.0.1.3", "127.0.1.10")
BOUND_S = 60

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

CONFIG = """
ClusterName=tfdist
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge/socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool.%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
MpiDefault=none
MpiParams=ports=30200-30299
SrunPortRange=30300-30399
SlurmdParameters=config_overrides
ReturnToService=2
PartitionName=main Nodes=ALL Default=YES MaxTime=5 State=UP
"""


def slurm_config(home):
    ports = free_ports(1 + len(NODES))
    lines = [
        (
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2 "
            "RealMemory=500"
        )
        for node, port in zip(NODES, ports[1:], strict=True)
    ]
    return CONFIG.format(home=home, ports=ports) + "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def slurm():
    """Start Slurm's daemons as our children; yield the environment for its commands."""
    missing = [
        program
        for program in PROGRAMS
        if not shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
    ]
    if missing:
        pytest.skip(
            f"Slurm is not installed: {', '.join(missing)} missing (apt-get install slurmctld "
            "slurmd munge)"
        )
    if os.geteuid() != 0:
        pytest.skip("slurmd and munged must be started by root")
    home = pathlib.Path(
        tempfile.mkdtemp(prefix="slurm", dir="/tmp")
    )  # a Unix socket's path must be short
    home.chmod(0o755)
    for name, mode in {"munge": 0o700, "state": 0o700}.items():
        (home / name).mkdir(mode=mode)
    key = home / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    config = home / "slurm.conf"
    config.write_text(slurm_config(home))
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "TF_CONFIG"))
    }
    environ |= {
        "SLURM_CONF": str(config),
        "PYTHONPATH": str(ROOT),
        "PATH": f"{os.environ['PATH']}:/usr/sbin",
    }
    munge = {name: f"--{name}-file={home}/munge/{name}" for name in ("key", "pid", "log", "seed")}
    commands = [
        ["munged", "--foreground", "--force", f"--socket={home}/munge/socket", *munge.values()],
        ["slurmctld", "-D", "-f", str(config)],
        *(["slurmd", "-D", "-N", node, "-f", str(config)] for node in NODES),
    ]
    daemons = []
    try:
        for command in commands:
            with open(home / "daemons.log", "a") as log:
                daemons.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
        wait_until_idle(environ, home)
        yield environ
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(home)


def wait_until_idle(environ, home):
    command = ["sinfo", "-h", "-N", "-o", "%T"]
    limit = time.monotonic() + BOUND_S
    while time.monotonic() < limit:
        states = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=BOUND_S
        )
        if states.stdout.split() == ["idle"] * len(NODES):
            return
        time.sleep(0.2)
    log = (home / "daemons.log").read_text()[-4000:]
    pytest.fail(f"Slurm's nodes are not idle after {BOUND_S} s: {states}\n{log}")


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
