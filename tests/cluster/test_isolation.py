"""Test that other hosts cannot reach the tasks of a local launch, unless it allows that.

Sockets and the TensorFlow server are real.
"""

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import tempfile
import time

import pytest

from tests.processes import PYTHON, ROOT, environment, group

TIMEOUT_S = 120  # for a launch: TensorFlow's start takes most of its five
NOBODY = 65534

# Worker 0 has a plain socket, worker 1 what TensorFlow makes of a cluster at 127.0.0.1. Each
# connects to both.
LISTENERS = """
import os, pathlib, socket, sys, time
from tfdist.cluster.spec import ClusterSpec
spec, here = ClusterSpec.from_environ(), pathlib.Path(sys.argv[1])
ports = [int(address.rpartition(":")[2]) for address in spec.jobs["worker"]]
if spec.task_index == 0:
    server = socket.create_server(("0.0.0.0", ports[0]))
else:
    import tensorflow as tf
    server = tf.distribute.Server({"worker": list(spec.jobs["worker"])}, job_name="worker", task_index=1)
end = time.monotonic() + 100
def until(done):
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)
def connects(port):
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
        return True
    except OSError:
        return False
for port in ports:  # a socket that accepts nothing has room for 128: stop at the first success
    until(lambda: connects(port))
(here / f"{spec.task_index}.ready").write_text(os.environ["TF_CONFIG"])
until((here / "done").exists)
os._exit(0)  # a tf.distribute.Server has no end
"""  # noqa: E501


@pytest.fixture(scope="module")
def private_network():
    """Skip the test where the kernel refuses a private network."""
    code = "from tfdist.launch.isolation import isolate; print(isolate() or '')"
    refusal = subprocess.check_output([PYTHON, "-c", code], cwd=ROOT, text=True, timeout=60).strip()
    if refusal:
        pytest.skip(f"the kernel refuses a private network: {refusal}")


@pytest.fixture
def members(tmp_path):
    with group(tmp_path) as members:
        yield members


def launch(members, *words, prefix=()):
    command = [
        *prefix,
        PYTHON,
        "-m",
        "tfdist",
        "launch",
        "--log-dir",
        str(members.directory / "logs"),
        *words,
    ]
    return members.start("launch", command, PYTHONPATH=str(ROOT))


def own_addresses():
    """Return this host's addresses, 127.0.0.1 among them."""
    ipv4 = re.findall(
        r"\|-- ([\d.]+)\n\s+/32 host LOCAL", pathlib.Path("/proc/net/fib_trie").read_text()
    )
    assert "127.0.0.1" in ipv4
    ipv6 = pathlib.Path("/proc/net/if_inet6")
    rows = [line.split() for line in ipv6.read_text().splitlines()] if ipv6.exists() else []
    hosts = [
        (socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])), int(row[1], 16)) for row in rows
    ]
    return sorted(set(ipv4)), [
        f"{host}%{scope}" if host.startswith("fe80") else host for host, scope in hosts
    ]


def outcome(host, port):
    """Return "connected", or the error of a connection from here."""
    try:
        socket.create_connection((host, port), timeout=5).close()
        return "connected"
    except OSError as error:
        return type(error).__name__


def listeners(members, *flags):
    """Start a launch whose two tasks listen, reach each other and wait; return their ports."""
    script = members.directory / "listen.py"
    script.write_text(LISTENERS)
    process = launch(members, "--workers", "2", *flags, "--", str(script), str(members.directory))
    ready = [members.directory / f"{index}.ready" for index in range(2)]
    end = time.monotonic() + TIMEOUT_S
    while not all(path.exists() and path.read_text() for path in ready):
        assert process.poll() is None, members.logs()
        assert time.monotonic() < end, members.logs()
        time.sleep(0.05)
    workers = json.loads(ready[0].read_text())["cluster"]["worker"]
    return [int(address.rpartition(":")[2]) for address in workers]


def finish(members):
    (members.directory / "done").touch()
    members.succeed(TIMEOUT_S)


def test_tasks_cannot_be_reached_from_outside(members, private_network):
    ports = listeners(members)
    ipv4, ipv6 = own_addresses()
    outcomes = {(host, port): outcome(host, port) for host in (*ipv4, *ipv6) for port in ports}
    assert set(outcomes.values()) == {"ConnectionRefusedError"}, outcomes
    finish(members)
    assert (
        "worker:0, worker:1 on this host, cut off from the network (--allow-remote lifts that)"
        in members.log("launch")
    )


def test_allow_remote_opens_all_interfaces(members):
    ports = listeners(members, "--allow-remote")
    ipv4, _ = own_addresses()
    outcomes = {(host, port): outcome(host, port) for host in ipv4 for port in ports}
    assert set(outcomes.values()) == {"connected"}, outcomes
    finish(members)
    assert "cut off" not in members.log("launch")


# Even alone: with TF_CONFIG, TensorFlow's strategy starts a server for a single worker, too.
ALONE = """
import tensorflow as tf
tf.distribute.MultiWorkerMirroredStrategy()
listening = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}") if " 0A " in line]
print("listens at", *(row[1] for row in listening))
"""  # noqa: E501


def test_single_task_is_isolated_as_it_may_run_a_server(members, private_network):
    (members.directory / "alone.py").write_text(ALONE)
    launch(members, "--", str(members.directory / "alone.py"))
    members.succeed(TIMEOUT_S)
    # /proc/net/tcp shows a whole namespace: nothing but this server listens in it.
    assert re.search(r"listens at (0{8}|0{32}):[0-9A-F]{4}\n", members.log("launch")), (
        members.logs()
    )


NAMESPACE = "import os; print(os.readlink('/proc/self/ns/net'))"


def test_tasks_of_a_cluster_file_are_never_isolated(members):
    from tfdist import ClusterSpec

    file = members.directory / "cluster.json"
    file.write_text(json.dumps(dict(ClusterSpec.local(workers=1).jobs)))
    launch(members, "--cluster", str(file), "--", PYTHON, "-c", NAMESPACE)
    members.succeed(TIMEOUT_S)
    assert f"[worker:0] {os.readlink('/proc/self/ns/net')}" in members.log("launch")


def test_task_without_network_gets_an_explanation(members, private_network):
    # This address is reserved for documentation.
    download = "import urllib.request; urllib.request.urlopen('http://192.0.2.1/')"
    launch(members, "--workers", "2", "--", PYTHON, "-c", download)
    assert members.wait(TIMEOUT_S) == {"launch": 1}
    assert re.search(
        r"ROOT CAUSE.*\n  that is: these tasks have no access to the network.*--allow-remote",
        members.log("launch"),
    )


def test_launch_warns_where_isolation_is_refused(members):
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("giving up the right to a private network needs root and setpriv")
    launch(members, "--", "echo", "hello", prefix=("setpriv", "--bounding-set", "-sys_admin"))
    members.succeed(TIMEOUT_S)
    assert "WARNING: other hosts may reach these tasks." in members.log("launch")
    assert "unshare(CLONE_NEWNET): Operation not permitted" in members.log("launch")
    assert "[worker:0] hello" in members.log("launch")


@pytest.fixture
def home():
    """Yield a directory of the user nobody, to whom pytest's own are closed."""
    with tempfile.TemporaryDirectory() as directory:
        shutil.chown(directory, NOBODY, NOBODY)
        yield pathlib.Path(directory)


def test_ordinary_user_is_isolated_and_keeps_the_files(request, members, private_network):
    """Run as the user nobody where the tests run as root; else the other tests cover this."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("becoming another user needs root and setpriv")
    prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    # By a shell: setpriv itself still has root's rights when it executes a program.
    can = [*prefix, "sh", "-c", 'exec "$0" -c "import tfdist.launch.main"', PYTHON]
    trial = subprocess.run(
        can, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=60
    )
    if trial.returncode:
        pytest.skip(
            f"the user nobody cannot run this Python: {trial.stderr.strip().splitlines()[-1:]}"
        )
    home = request.getfixturevalue("home")
    launch(
        members,
        "--log-dir",
        str(home),
        "--workers",
        "2",
        "--",
        PYTHON,
        "-c",
        NAMESPACE,
        prefix=prefix,
    )
    members.succeed(TIMEOUT_S)
    assert "cut off from the network" in members.log("launch")
    assert os.readlink("/proc/self/ns/net") not in members.log("launch")
    assert {path.stat().st_uid for path in home.iterdir()} == {NOBODY}
