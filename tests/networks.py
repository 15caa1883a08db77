"""Simulate hosts, and strangers who hold connections to a server.

Hosts are network namespaces that a bridge joins, in a user namespace of their own: the machine's
own network stays as it is. Strangers are connections from another loopback address.
"""

from __future__ import annotations

import contextlib
import pathlib
import select
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from tfdist.cluster.addresses import split_address

PROGRAMS = ("unshare", "nsenter", "ip")
TIMEOUT_S = 20  # seconds for a command, which takes some milliseconds


class Network:
    """Make hosts 1, 2, ... with the addresses 10.77.0.1, 10.77.0.2, ...

    Each ends with the process that made it.

    Args:
        count: Number of hosts.

    Raises:
        OSError: A step was refused; says which and why.
    """

    def __init__(self, count: int):
        self._holders: list[subprocess.Popen] = []
        try:
            self._hold("unshare", "--user", "--map-root-user", "--net")
            self._ip("link", "add", "bridge", "type", "bridge")
            self._ip("link", "set", "bridge", "up")
            for host in range(1, count + 1):
                self._hold(*self._enter(0), "unshare", "--net")
                self._ip(
                    "link",
                    "add",
                    f"veth{host}",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    str(self._holders[host].pid),
                )
                self.join(host)
                self._ip("link", "set", f"veth{host}", "up")
                self._ip("addr", "add", f"{self.address(host)}/24", "dev", "eth0", host=host)
                self._ip("link", "set", "eth0", "up", host=host)
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        return f"10.77.0.{host}"

    def prefix(self, host: int) -> list[str]:
        """Return the arguments that precede a command to run it on a host."""
        return self._enter(host)

    def cut(self, host: int) -> float:
        """Cut a host off without closing its connections; return the time."""
        self._ip("link", "set", f"veth{host}", "nomaster")
        return time.time()

    def join(self, host: int) -> None:
        self._ip("link", "set", f"veth{host}", "master", "bridge")

    def listens(self, host: int, port: int) -> bool:
        """Return whether a process on a host listens at the port."""
        return listens(port, self._holders[host].pid)

    def close(self) -> None:
        for holder in reversed(self._holders):
            try:
                holder.communicate(timeout=TIMEOUT_S)  # it ends with its input
            except subprocess.TimeoutExpired:
                holder.kill()
                holder.communicate(timeout=TIMEOUT_S)

    def _enter(self, host: int) -> list[str]:
        return [
            "nsenter",
            "--target",
            str(self._holders[host].pid),
            "--user",
            "--net",
            "--preserve-credentials",
            "--",
        ]

    def _hold(self, *words: str) -> None:
        """Start a process that holds namespaces as long as this one lives."""
        command = [*words, "sh", "-c", "ip link set lo up && echo ready && exec cat"]
        holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            raise OSError(f"{' '.join(words)}: {holder.communicate()[1].strip()}")

    def _ip(self, *words: str, host: int = 0) -> None:
        done = subprocess.run(
            [*self._enter(host), "ip", *words], capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if done.returncode:
            raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def listens(port: int, pid: int | str = "self") -> bool:
    """Return whether a process in the network of `pid` listens at the port, without connecting."""
    rows = pathlib.Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    return any(row.split()[1].endswith(f":{port:04X}") and row.split()[3] == "0A" for row in rows)


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    """Make a network for the block; if it cannot be made, skip the test and say why."""
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    if missing:
        pytest.skip(f"hosts as network namespaces need the programs {', '.join(missing)}")
    try:
        made = Network(count)
    except OSError as error:
        pytest.skip(f"hosts as network namespaces are refused here: {error}")
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def crowd(address, count):
    """Keep `count` silent connections from 127.0.0.2 open, and replace those that end."""

    def come():
        return socket.create_connection(split_address(address), source_address=("127.0.0.2", 0))

    def stay():
        while not over.is_set():
            for one in select.select(connections, [], [], 0.05)[0]:
                with contextlib.suppress(ConnectionError):
                    if one.recv(4096):
                        continue
                connections.remove(one)
                one.close()
                connections.append(come())

    connections = [come() for _ in range(count)]
    over = threading.Event()
    thread = threading.Thread(target=stay)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(TIMEOUT_S)
        for connection in connections:
            connection.close()
