"""Test `tfdist launch --on ssh` on a real OpenSSH server, with two addresses of this machine."""

import getpass
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from tests.launches import Launch
from tests.networks import listens
from tests.processes import ROOT, lean
from tfdist.cluster.addresses import free_ports

HOSTS = ("127.0.1.2", "127.0.1.3")
CONFIG = """
Port {port}
ListenAddress 127.0.1.2
ListenAddress 127.0.1.3
HostKey {home}/host
AuthorizedKeysFile {home}/user.pub
PasswordAuthentication no
UsePAM no
StrictModes no
PidFile none
"""
BOUND_S = 30


@pytest.fixture(scope="module")
def ssh():
    """Start a server as our child; yield the ssh command for it, and the Python of its hosts."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if server is None or shutil.which("ssh") is None:
        pytest.skip("OpenSSH is not installed (apt-get install openssh-server openssh-client)")
    if os.geteuid() == 0:
        pathlib.Path("/run/sshd").mkdir(exist_ok=True)  # a root's server insists on it
    home = pathlib.Path(tempfile.mkdtemp(prefix="sshd", dir="/tmp"))
    home.chmod(0o755)
    port = free_ports(1)[0]
    for key in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / key)], check=True
        )
    (home / "config").write_text(CONFIG.format(port=port, home=home))
    # A login over ssh does not have the variables of this process.
    python = home / "python"
    environ = lean({"PYTHONPATH": str(ROOT)})
    variables = " ".join(f"{name}='{value}'" for name, value in environ.items())
    python.write_text(f'#!/bin/sh\n{variables} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with open(home / "log", "w") as log:
        daemon = subprocess.Popen([server, "-D", "-e", "-f", str(home / "config")], stderr=log)
    try:
        deadline = time.monotonic() + BOUND_S
        while not listens(port):
            assert time.monotonic() < deadline, (home / "log").read_text()
            time.sleep(0.05)
        command = (
            f"ssh -p {port} -l {getpass.getuser()} -i {home}/user -oStrictHostKeyChecking=no "
            f"-oUserKnownHostsFile={home}/known -oLogLevel=ERROR"
        )
        yield command, str(python)
    finally:
        daemon.terminate()
        daemon.wait(BOUND_S)
        shutil.rmtree(home)


@pytest.fixture
def launch(ssh, tmp_path):
    launch = Launch(tmp_path, bound=240)
    command, python = ssh
    launch.flags = (
        "--on", "ssh", "--hosts", ",".join(HOSTS), "--ssh-command", command, "--remote-python",
        python, f"--env={launch.mark}",
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
