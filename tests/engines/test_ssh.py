"""Test `tfdist launch --on ssh` on a real OpenSSH server, with two addresses of this machine."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.engines import ssh_server
from tests.engines.ssh_server import HOSTS
from tests.engines.task_scripts import SLOW
from tests.launches import Launch
from tests.processes import ROOT


@pytest.fixture(scope="module")
def ssh():
    with ssh_server.running() as started:
        yield started


@pytest.fixture
def launch(ssh, tmp_path):
    launch = Launch(tmp_path, bound=240)
    launch.flags = (
        "--on", "ssh", "--hosts", ",".join(HOSTS), "--ssh-command", ssh.command,
        "--remote-python", ssh.python, f"--env={launch.mark}",
    )  # fmt: skip
    yield launch
    for pid in launch.living():
        os.kill(pid, signal.SIGKILL)


def test_digits_resume_after_a_host_is_lost(launch, digits_dir):
    """The weights of the disturbed run are those of one without a fault."""
    for name, chaos in (("calm", "none"), ("wild", "kill worker:1@step=9")):
        code, out, err = launch.run(
            *launch.flags,
            f"--env=TFDS_DATA_DIR={digits_dir}",
            "--restarts=2",
            f"--chaos={chaos}",
            f"--log-dir={name}",
            command=(
                str(ROOT / "examples" / "digits.py"),
                "--epochs=2",
                f"--backup_dir={launch.directory / name}-backup",
            ),
        )
        assert code == 0, out + err
    assert "ROOT CAUSE: worker:1 was killed by SIGKILL" in err
    report = subprocess.run(
        [sys.executable, "-m", "tfdist", "chaos", "report", "wild", "--against", "calm"],
        cwd=launch.directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert report.returncode == 0, report.stdout + report.stderr
    assert not launch.wait_for_nobody()


def test_hosts_come_from_a_config_file(launch, ssh):
    options = {
        "on": "ssh",
        "hosts": ",".join(HOSTS),
        "ssh_command": ssh.command,
        "remote_python": ssh.python,
        "env": dict([launch.mark.split("=")]),
    }
    config = launch.directory / "hosts.py"
    config.write_text(f"def get_config(): return {{'launch': {options}}}\n")
    code, out, err = launch.run("--config=hosts.py", script="print('hello from', me)")
    assert code == 0, err
    assert "[worker:1] hello from worker:1" in out
    assert "on 127.0.1.2, 127.0.1.3 by ssh" in err


def test_straggler_leaves_its_host_while_the_others_have_room(launch):
    code, out, err = launch.run(
        *(launch.flags[0], launch.flags[1], "--hosts", ",".join(f"{host}:2" for host in HOSTS)),
        *launch.flags[4:],
        *("--workers=2", "--replace-stragglers=2"),
        script=SLOW,
    )
    assert code == 0, err
    slow = "is slower than the median of the other workers by 150 %"
    assert f"worker:1 on {HOSTS[0]} {slow}: saving, to start it anew (replacement 1 of 2)" in err
    for worker in (0, 1):
        for attempt in (0, 1):
            assert f"[worker:{worker}] attempt {attempt} at {HOSTS[attempt]}" in out
    room = f"there is no room for the tasks without {HOSTS[1]}"
    assert f"worker:1 on {HOSTS[1]} {slow}; it stays, as {room}" in err


def test_cut_connection_ends_the_task_of_that_host(launch):
    script = """
import pathlib
pathlib.Path(f"{me}.{os.environ['TFDIST_ATTEMPT']}").write_text(str(os.getpid()))
if os.environ["TFDIST_ATTEMPT"] == "0": time.sleep(60)
"""
    launch.start(
        *launch.flags,
        "--restarts=1",
        script=script,
    )
    launch.wait_for("worker:0.0", "worker:1.0")
    client = next(
        pid
        for pid in launch.living()
        if pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ssh\0")
        and HOSTS[1].encode() in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(client, signal.SIGKILL)
    code, _out, err = launch.finish()
    assert code == 0, err
    assert f"worker:1 was lost with its host {HOSTS[1]}: ssh ended with -9" in err
    assert not launch.wait_for_nobody(15.0)
