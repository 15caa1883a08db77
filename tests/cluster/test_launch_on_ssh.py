"""Test `tfdist launch --on ssh` with a program that stands for ssh, and scripts without TensorFlow.

The same on a real OpenSSH server: tests/engines/test_ssh.py.
"""

import os
import re
import signal

import pytest

from tests.forkserver import environ_of
from tests.launches import Launch

# Runs the command here, as ssh does on its host: a shell gets the words behind the host.
SSH = """#!/bin/sh
while :; do case $1 in -o*) shift;; *) break;; esac; done
host=$1; shift
if [ "$host" = absent ]; then
  echo "ssh: connect to host absent port 22: Connection refused"; exit 255
fi
echo "Welcome to $host"
SSH_TEST_HOST=$host exec sh -c "$*"
"""
BEAT = """
from tfdist.runtime.launch_protocol import Launched, Phase, Progress, note
progress = Progress(Launched.from_environ().progress_file)
attempt = os.environ["TFDIST_ATTEMPT"]
def train(seconds):
    for step in range(int(seconds * 20)):
        progress.beat(Phase.RUNNING, 0, step + 1, step + 1)
        time.sleep(0.05)
"""


@pytest.fixture
def launch(tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    launch = Launch(tmp_path)
    launch.flags = ("--on", "ssh", "--ssh-command", str(ssh))
    yield launch
    for pid in launch.living():  # whatever a failed test left behind
        os.kill(pid, signal.SIGKILL)


def test_tasks_of_all_hosts_form_one_cluster(launch, tmp_path):
    script = (
        BEAT
        + """
cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
print("on", os.environ["SSH_TEST_HOST"], [host.rpartition(":")[0] for host in cluster])
print(os.environ["WORD"], os.environ["PASSED_ON"], os.environ["CUDA_VISIBLE_DEVICES"], os.getcwd())
print("caf\\u00e9", end="", flush=True)
note(os.environ["TFDIST_LOG_DIR"], "met", task=me, attempt=0)
"""
    )
    code, out, err = launch.run(
        *launch.flags,
        "--hosts=10.0.0.1:2,me@10.0.0.2",
        "--env=WORD=a b=c",
        "--env=PASSED_ON",
        "--gpus-per-task=2",
        script=script,
        environ={"PASSED_ON": "yes", "PYTHONIOENCODING": "utf-8"},
    )
    assert code == 0, err
    hosts = "['10.0.0.1', '10.0.0.1', '10.0.0.2']"
    for task, host, gpus in (
        (0, "10.0.0.1", "0,1"),
        (1, "10.0.0.1", "2,3"),
        (2, "me@10.0.0.2", "0,1"),
    ):
        assert f"[worker:{task}] on {host} {hosts}\n" in out
        assert f"[worker:{task}] a b=c yes {gpus} {tmp_path}\n" in out
        assert "café" in launch.log(f"worker-{task}")
    assert "worker:0, worker:1, worker:2 on 10.0.0.1, me@10.0.0.2 by ssh" in err
    assert "without having met" not in err  # the journals of the hosts arrive here
    assert not launch.wait_for_nobody()


def test_failed_hung_and_lost_workers_are_named_and_restarted(launch):
    script = (
        BEAT
        + """
print("attempt", attempt, os.environ["TF_CONFIG"], flush=True)
train(0.5)
if me == "worker:1" and attempt == "0": raise ValueError("a mistake of the script")
if me == "worker:1" and attempt == "1": time.sleep(60)
if me == "worker:1" and attempt == "2": open("lose", "w").close(); train(60)
if me == "worker:0" and attempt < "3": train(60)
"""
    )
    launch.start(
        *launch.flags, "--hosts=127.0.1.1,127.0.1.2", "--hang-timeout=3", "--restarts=3",
        script=script,
    )  # fmt: skip
    launch.wait_for("lose")
    agent = next(
        pid
        for pid in launch.living()
        if environ_of(pid).get("SSH_TEST_HOST") == "127.0.1.2"
        and b"agent_process" in open(f"/proc/{pid}/cmdline", "rb").read()  # noqa: SIM115
    )
    os.kill(agent, signal.SIGKILL)
    code, _out, err = launch.finish()
    assert code == 0, err
    causes = re.findall(r"ROOT CAUSE: (.*)", err)
    assert causes[0] == "worker:1 failed with exit code 1: ValueError: a mistake of the script"
    assert re.fullmatch(
        r"worker:1 made no step for \d s after step 10 .* killed as hung", causes[1]
    )
    assert causes[2].startswith("worker:1 was lost with its host 127.0.1.2: ssh ended with -9")
    assert "time.sleep(60)" in err or 'File "task.py"' in err  # the stack of the hung task
    ports = [re.findall(r"\d+\.\d+\.\d+\.\d+:(\d+)", line) for line in _attempts(launch)]
    assert len(ports) == 4
    assert len({port for pair in ports for port in pair}) > 4
    assert not launch.wait_for_nobody()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nobody_stays_behind_when_the_launcher_ends(launch, number):
    script = (
        BEAT
        + """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
ready()
train(60)
"""
    )
    process = launch.start(*launch.flags, "--hosts=a,b", script=script)
    launch.wait_for("worker:0.ready", "worker:1.ready")
    os.kill(process.pid, number)
    code, _, _ = launch.finish()
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 42, signal.SIGKILL: -9}[number]
    assert not launch.wait_for_nobody(15.0)


def test_hosts_that_cannot_run_the_command_are_named(launch, tmp_path):
    refused = launch.run(*launch.flags, "--hosts=a,b", command=("missing.py",))
    assert refused[0] == 2
    assert "host a: COMMAND: expected a Python file, received 'missing.py'" in refused[2]
    absent = launch.run(*launch.flags, "--hosts=a,absent", script="pass")
    assert absent[0] == 75
    assert "error: absent: ssh ended with 255: ssh: connect to host absent port 22" in absent[2]
    python = launch.run(*launch.flags, "--hosts=a", "--remote-python=/no/python", script="pass")
    assert python[0] == 75
    assert "/no/python: not found" in python[2]
    assert "--remote-python" in python[2]
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    late = launch.run(
        "--on", "ssh", "--ssh-command", str(silent), "--hosts=a", "--join-timeout=1", script="pass"
    )
    assert late[0] == 75
    assert "a: sent no 'hello' within 1 s" in late[2]
    assert not launch.wait_for_nobody(15.0)


def _attempts(launch):
    text = "".join(
        path.read_text()
        for path in sorted((launch.directory / "runs" / "latest").rglob("worker-0.log"))
    )
    return [line for line in text.splitlines() if line.startswith("attempt")]
