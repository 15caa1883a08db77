"""A real OpenSSH server with two addresses of this machine, for tests."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import pytest

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


@dataclasses.dataclass(frozen=True)
class SshServer:
    """A running server: the ssh command for it, and the Python of its hosts."""

    command: str
    python: str


def missing() -> str | None:
    """Return why no server can be started here; None if one can."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if all(shutil.which(program, path=path) for program in ("sshd", "ssh", "ssh-keygen")):
        return None
    return "OpenSSH is not installed (apt-get install openssh-server openssh-client)"


@contextlib.contextmanager
def running() -> Iterator[SshServer]:
    """Start a server as our child, and end it afterwards."""
    if reason := missing():
        pytest.skip(reason)
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
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
        yield SshServer(command, str(python))
    finally:
        daemon.terminate()
        daemon.wait(BOUND_S)
        shutil.rmtree(home)
