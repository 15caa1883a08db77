"""A real Slurm on loopback: munged, slurmctld and three slurmd of this machine, for tests."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator

import pytest

from tests.processes import ROOT, lean
from tfdist.cluster.addresses import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "sinfo")
# Names that are addresses, so that they resolve; sorted as text, 10 would come before 2.
NODES = ("127.0.1.2", "127.0.1.3", "127.0.1.10")
BOUND_S = 60
GPUS = 2  # character devices that stand for GPUs

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
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=1
MpiDefault=none
MpiParams=ports={first}-{middle}
SrunPortRange={after}-{last}
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=6
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=30 State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=30 State=UP PriorityTier=10 PreemptMode=OFF
"""
GPU_CONFIG = "GresTypes=gpu\n"


class SlurmCluster:
    """A running Slurm.

    Attributes:
        environ: Environment for Slurm's commands.
    """

    def __init__(self, home: pathlib.Path):
        self.home = home
        self.has_gpus = False
        self.environ = {
            name: value
            for name, value in lean(dict(os.environ)).items()
            if not name.startswith(("SLURM_", "TF_CONFIG"))
        }
        self.environ |= {
            "SLURM_CONF": str(home / "slurm.conf"),
            "PYTHONPATH": str(ROOT),
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
        }
        self._daemons: dict[str, subprocess.Popen] = {}

    def start(self) -> None:
        for name, mode in {"munge": 0o700, "state": 0o700}.items():
            (self.home / name).mkdir(mode=mode)
        key = self.home / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        ports = free_ports(1 + len(NODES))
        with contextlib.suppress(PermissionError):
            for number in range(GPUS):
                os.mknod(self.home / f"gpu{number}", 0o600 | 0o020000, os.makedev(1, 3))
            self.has_gpus = True
        gpus = f" Gres=gpu:{GPUS}" if self.has_gpus else ""
        if self.has_gpus:
            (self.home / "gres.conf").write_text(f"Name=gpu File={self.home}/gpu[0-{GPUS - 1}]\n")
        lines = [
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2 "
            f"RealMemory=500{gpus}"
            for node, port in zip(NODES, ports[1:], strict=True)
        ]
        # Two clusters must not share ports; up to 30000 are those of tfdist.
        first = random.randrange(30_000, 32_600, 200)
        config = CONFIG.format(
            home=self.home,
            ports=ports,
            first=first,
            middle=first + 99,
            after=first + 100,
            last=first + 199,
        )
        config += GPU_CONFIG * self.has_gpus + "\n".join(lines) + "\n"
        (self.home / "slurm.conf").write_text(config)
        munge = [
            f"--{name}-file={self.home}/munge/{name}" for name in ("key", "pid", "log", "seed")
        ]
        socket = f"--socket={self.home}/munge/socket"
        conf = str(self.home / "slurm.conf")
        self._start("munged", ["munged", "--foreground", "--force", socket, *munge])
        self._start("slurmctld", ["slurmctld", "-D", "-f", conf])
        for node in NODES:
            self.start_node(node)
        self.wait_until_idle()

    def start_node(self, node: str) -> None:
        self._start(node, ["slurmd", "-D", "-N", node, "-f", str(self.home / "slurm.conf")])

    def return_node(self, node: str) -> None:
        """Start a lost node again, and make Slurm forget what ran there."""
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
        self.start_node(node)
        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def lose_node(self, node: str) -> None:
        """Kill what runs on a node, as a loss of power does."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        conf = f"SLURM_CONF={self.environ['SLURM_CONF']}"
        for pid in self._having(conf, f"SLURMD_NODENAME={node}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _having(self, *variables: str) -> list[int]:
        """Return the processes that were started with some variables."""
        pids = []
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environ = (entry / "environ").read_bytes().decode("utf-8", "replace").split("\0")
                if all(variable in environ for variable in variables):
                    pids.append(int(entry.name))
        return pids

    def stop(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()
        # The daemon of a step outlives the others if its step had not ended.
        for pid in self._having(f"SLURM_CONF={self.environ['SLURM_CONF']}"):
            with contextlib.suppress(OSError):
                if pathlib.Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd"):
                    os.kill(pid, signal.SIGKILL)

    def run(self, *command: str, **options) -> str:
        """Run a command that must succeed; return its output."""
        result = subprocess.run(
            command,
            env=self.environ,
            cwd=self.home,  # where sbatch puts the output of its jobs
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            **options,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout.strip()

    def jobs(self) -> list[str]:
        """Return the jobs that wait, run or end."""
        return self.run("squeue", "-h", "-o", "%i %j %T %r").splitlines()

    def wait_for(self, words: str, *command: str, seconds: float = BOUND_S) -> str:
        """Wait until the output of a command has some words; return it."""
        end = time.monotonic() + seconds
        while words not in (text := self.run(*command)):
            assert time.monotonic() < end, f"waited for {words!r}:\n{text}\n{self.log()}"
            time.sleep(0.2)
        return text

    def wait_until_idle(self) -> None:
        """Wait until no job is left and all nodes are idle."""
        end = time.monotonic() + BOUND_S
        while True:
            states = subprocess.run(
                ["sinfo", "-h", "-N", "-p", "main", "-o", "%T"],
                env=self.environ,
                capture_output=True,
                text=True,
                timeout=BOUND_S,
            )
            if states.stdout.split() == ["idle"] * len(NODES) and not self.jobs():
                return
            if time.monotonic() > end:
                pytest.fail(f"Slurm's nodes are not idle: {states}\n{self.log()}")
            time.sleep(0.1)

    def log(self) -> str:
        return (self.home / "daemons.log").read_text()[-4000:]

    def _start(self, name: str, command: list[str]) -> None:
        with open(self.home / "daemons.log", "a") as log:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environ, stdout=log, stderr=log
            )


def missing() -> str | None:
    """Return why Slurm cannot be started here; None if it can."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    absent = [program for program in PROGRAMS if not shutil.which(program, path=path)]
    if absent:
        return (
            f"Slurm is not installed: {', '.join(absent)} missing (apt-get install slurmctld "
            "slurmd slurm-client munge)"
        )
    return None if os.geteuid() == 0 else "slurmd and munged must be started by root"


@contextlib.contextmanager
def running() -> Iterator[SlurmCluster]:
    """Start Slurm's daemons as our children, and end them afterwards."""
    if reason := missing():
        pytest.skip(reason)
    home = pathlib.Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))  # a socket's path is short
    home.chmod(0o755)
    cluster = SlurmCluster(home)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(home, ignore_errors=True)
