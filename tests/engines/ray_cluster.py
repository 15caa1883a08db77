"""Start a real Ray cluster of several nodes on this machine, in a process of its own.

Run as a program, this file is that process: it obeys the lines of its standard input. Ray need not
be in the environment of the tests: `PYTHONPATH` may name another directory that has it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import site
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.processes import ROOT, lean

BOUND_S = 120
OBJECTS_BYTES = 80 << 20
NODES = ("n0", "n1", "n2")  # each with one CPU and one GPU that does not exist
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_memory_usage_threshold": "0.95",
}


def missing() -> str | None:
    """Return why no Ray can be started here, or None."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed (pip install 'ray[train]')"
    if own_address().startswith("127."):
        return "a Ray node needs an address that is not loopback, and this machine has none"
    return None


def own_address() -> str:
    """Return this machine's address for others; a loopback one if it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.254", 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def environment() -> dict[str, str]:
    """Return the variables of processes that use Ray."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    packages = pathlib.Path(spec.origin).parents[1]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("TFDIST_")}
    path = str(ROOT) if str(packages) in site.getsitepackages() else f"{ROOT}:{packages}"
    return lean({**environ, **QUIET, "PYTHONPATH": path})


class RayCluster:
    """A cluster of a head without CPUs and of `NODES`."""

    def __init__(self) -> None:
        self.environ = environment()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.ray_cluster"],
            cwd=ROOT,
            env=self.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self._answer()["address"]
        self.nodes: dict[str, int] = {}  # process id of the raylet of each node
        for name in NODES:
            self.add_node(name)

    def add_node(self, name: str, environ: dict[str, str] | None = None, **options: int) -> None:
        """Add a node, by default with one CPU.

        `environ` holds settings of Ray that differ from `QUIET` for this node.
        """
        self.nodes[name] = self._ask("add", name, options, environ or {})["raylet"]

    def lose_node(self, name: str) -> None:
        """Kill the processes of Ray on a node."""
        self._ask("lose", name)
        del self.nodes[name]

    def node_of(self, pid: int) -> str:
        """Return the node that runs a process."""
        names = {raylet: name for name, raylet in self.nodes.items()}
        while pid not in names:
            assert pid > 1
            pid = parent(pid)
        return names[pid]

    def id_of(self, name: str) -> str:
        """Return Ray's id of a node."""
        return self._ask("id", name)["id"]

    def holdings(self) -> list[str]:
        """Return the actors that live, and the placement groups that exist."""
        return self._ask("holdings")["holdings"]

    def wait_until_idle(self, seconds: float = 20.0) -> list[str]:
        """Wait for the end of all actors and placement groups; return those that are left."""
        end = time.monotonic() + seconds
        while (left := self.holdings()) and time.monotonic() < end:
            time.sleep(0.1)
        return left

    def close(self) -> None:
        """End all nodes."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(BOUND_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def _ask(self, *order: object) -> dict:
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        assert line, f"the cluster ended with {self._process.wait(10)}"
        return json.loads(line)


def parent(pid: int) -> int:
    """Return the parent of a process."""
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


@contextlib.contextmanager
def running() -> Iterator[RayCluster]:
    """Yield a cluster; skip the tests if there can be none."""
    import pytest

    if problem := missing():
        pytest.skip(problem)
    cluster = RayCluster()
    try:
        yield cluster
    finally:
        cluster.close()


def _serve() -> None:
    import ray
    from ray.cluster_utils import Cluster

    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C of pytest, which closes our input
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints too
    address = own_address()
    common = {"object_store_memory": OBJECTS_BYTES, "node_ip_address": address}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **common}
    )
    nodes = {}

    def answer(**facts: object) -> None:
        print(json.dumps(facts), file=output, flush=True)

    answer(address=cluster.address)
    connected = False
    for line in sys.stdin:
        order, *words = json.loads(line)
        if order == "add":
            name, options, environ = words
            os.environ.update(environ)
            nodes[name] = cluster.add_node(
                node_name=name, **{"num_cpus": 1, "num_gpus": 1, **common, **options}
            )
            os.environ.update(QUIET)
            answer(raylet=nodes[name].all_processes["raylet"][0].process.pid)
        elif order == "lose":
            cluster.remove_node(nodes.pop(words[0]), allow_graceful=False)
            answer()
        elif order == "id":
            answer(id=nodes[words[0]].node_id)
        elif order == "holdings":
            if not connected:
                connected = True
                ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
            actors = ray._private.state.actors().values()
            groups = ray.util.placement_group_table().values()
            answer(
                holdings=[
                    *(f"actor {a['ActorClassName']}" for a in actors if a["State"] != "DEAD"),
                    *(f"group {g['name']}" for g in groups if g["state"] != "REMOVED"),
                ]
            )
    if connected:
        ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    _serve()
