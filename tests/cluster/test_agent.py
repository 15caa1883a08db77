"""Test `tfdist agent`, which supervises one task of a scheduler, without TensorFlow."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.launches import PRELUDE, Launch
from tests.processes import ROOT, lean

SCRIPT = (
    PRELUDE
    + """
from tfdist.runtime.launch_protocol import Launched, Phase, Progress
launched = Launched.from_environ()
progress = Progress(launched.progress_file)
print(me, launched.launch, launched.attempt, os.environ.get("TF_CONFIG"), flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
progress.beat(Phase.RUNNING, 0, 3, 3)
if sys.argv[1] != "preempted": open(sys.argv[1] + ".ready", "w").close()
match sys.argv[1]:
    case "error": raise ValueError("a mistake")
    case "lost": lose_peers()
    case "hung": time.sleep(60)
    case "configuration": sys.exit(78)
    case "preempted":
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(42)))
        open("preempted.ready", "w").close()
        time.sleep(60)
    case "killed": time.sleep(60)
"""
)


class Agents(Launch):
    """Start `tfdist agent` with the environment of a scheduler's task."""

    def agent(self, case, environ, *flags):
        (self.directory / "task.py").write_text(SCRIPT)
        name, _, value = self.mark.partition("=")
        return subprocess.Popen(
            [sys.executable, "-m", "tfdist", "agent", *flags, "--", "task.py", case],
            cwd=self.directory,
            env=lean({**os.environ, "PYTHONPATH": str(ROOT), name: value, **environ}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


@pytest.fixture
def agents(tmp_path):
    agents = Agents(tmp_path)
    yield agents
    for pid in agents.living():
        os.kill(pid, signal.SIGKILL)


def slurm(rank, restarts=0):
    return {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_PROCID": str(rank), "SLURM_NODEID": "0", "SLURM_LOCALID": str(rank),
        "SLURM_RESTART_COUNT": str(restarts),
    }  # fmt: skip


def test_exit_code_says_whether_another_start_helps(agents):
    codes = {
        "well": 0, "error": 1, "lost": 75, "hung": 75, "configuration": 78, "preempted": 42,
    }  # fmt: skip
    processes = {
        case: agents.agent(case, slurm(rank % 2, rank), "--hang-timeout=1")
        for rank, case in enumerate(codes)
    }
    agents.wait_for("preempted.ready")
    for _ in range(2):  # Slurm signals every process of a step, and srun passes signals on
        processes["preempted"].send_signal(signal.SIGTERM)
        time.sleep(0.2)
    texts = {}
    for case, process in processes.items():
        out, err = process.communicate(timeout=agents.bound)
        texts[case] = out + err
        assert process.returncode == codes[case], (case, out, err)
    assert '"index": 1}' in texts["error"]
    assert "worker:1 slurm-7.1 1 {" in texts["error"]  # the same job, its second start
    assert "ROOT CAUSE: worker:1 failed with exit code 1: ValueError: a mistake" in texts["error"]
    assert "made no step for" in texts["hung"]
    assert 'File "task.py"' in texts["hung"]  # its stacks
    failures = {
        json.loads(path.read_text())["kind"]: path.parent.parent.name
        for path in agents.directory.rglob("failure.json")
    }
    for path in agents.directory.rglob("failure.json"):  # a message may contain a secret
        assert path.stat().st_mode & 0o777 == 0o600
    assert failures == {
        "error": "start-1", "lost peers": "start-2", "unresponsive": "start-3",
        "configuration": "start-4",
    }  # fmt: skip
    assert not agents.wait_for_nobody()


def test_killed_agent_takes_its_task_with_it_and_a_task_without_a_cluster_runs(agents):
    killed = agents.agent("killed", slurm(0))
    agents.wait_for("killed.ready")
    killed.kill()
    killed.communicate(timeout=agents.bound)
    assert not agents.wait_for_nobody()
    alone = agents.agent("well", {})
    out, err = alone.communicate(timeout=agents.bound)
    assert (alone.returncode, "worker:0  0 None\n" in out) == (0, True), err
