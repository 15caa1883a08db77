"""Snapshot server: runs the process that holds snapshots in memory."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.cluster.addresses import resolve_address

MAX_RESTARTS = 10  # of a server that was killed
PIPE_BYTES = 1 << 20  # of messages that a stopped server has not read
F_SETPIPE_SZ = 1031  # linux/fcntl.h; Python has it since 3.10
BACKLOG = 128
_PROGRAM = Path(__file__).with_name("snapshot_process.py")


class SnapshotServer:
    """Process that holds snapshots in memory, which ends with the launcher.

    A server that is killed is replaced by one that holds nothing yet.

    Args:
        host: Address of this host at which the servers of other hosts reach this one; "" (default)
            if there are no other hosts.
        secret: Secret that the servers of all hosts share; b"" (default) without other hosts.

    Attributes:
        name: Name by which clients find it.
        port: Port for the servers of other hosts; 0 without other hosts.

    Raises:
        OSError: If it cannot listen at the address.
    """

    def __init__(self, host: str = "", secret: bytes = b""):
        self.name = f"tfdist-{secrets.token_hex(16)}"
        self._listener: socket.socket | None = None
        self.port = 0
        if host:
            family, sockaddr = resolve_address(f"[{host}]:0" if ":" in host else f"{host}:0")
            address = sockaddr[0]
            if ipaddress.ip_address(address).is_loopback and host not in (address, "localhost"):
                # On some systems a machine's own name is a loopback address.
                address = "::" if family == socket.AF_INET6 else "0.0.0.0"
            self._listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
            self.port = self._listener.getsockname()[1]
        self._closed = False
        self._lines: list[dict[str, Any]] = [{"secret": secret.hex()}]  # for each process
        self._lock = threading.Lock()
        try:
            self._process = self._start()
        except OSError:
            self._stop_listening()
            raise
        self._thread = threading.Thread(target=self._replace, name="snapshot-server", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    def meet(
        self, peers: Sequence[tuple[str, str]], own: int, generation: int, launch: str = ""
    ) -> None:
        """Tell the server where all servers are, from this generation on.

        Args:
            peers: All servers of the generation: name of the host, and address as "host:port".
            own: Index of this server.
            generation: Number of the generation; the number of the attempt if there are no
                generations.
            launch: Name of the launch; another one than before releases all snapshots.
        """
        message = {
            "peers": list(peers),
            "own": own,
            "generation": generation,
            "launch": launch,
        }
        with self._lock:
            self._lines[1:] = [message]
            self._tell(self._process, message)

    def close(self) -> None:
        """End the server, which releases what it holds."""
        self._closed = True
        self._process.kill()
        with self._lock:
            self._process.kill()  # the successor, if one was being started
        self._thread.join()
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _start(self) -> subprocess.Popen:
        descriptors = () if self._listener is None else (self._listener.fileno(),)
        # -I -S: without site-packages it starts quickly and does not depend on user code.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM), self.name, *map(str, descriptors)],
            stdin=subprocess.PIPE,  # its end tells the server that the launcher is gone
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=descriptors,
            bufsize=0,
            start_new_session=True,  # out of reach of Ctrl-C and of a kill of the launcher's group
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        with contextlib.suppress(OSError):  # the system's limit is lower
            fcntl.fcntl(process.stdin, F_SETPIPE_SZ, PIPE_BYTES)
        for message in self._lines:
            self._tell(process, message)
        return process

    @staticmethod
    def _tell(process: subprocess.Popen, message: dict[str, Any]) -> None:
        """Send a message, or kill a process that does not read; its successor is told."""
        assert process.stdin is not None
        line = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError, ValueError):  # killed; a closed pipe raises ValueError
            if process.stdin.write(line) != len(line):
                process.kill()

    def _replace(self) -> None:
        for _ in range(MAX_RESTARTS):
            process = self._process
            process.wait()
            with self._lock:
                assert process.stdin is not None
                with contextlib.suppress(OSError):
                    process.stdin.close()
                if self._closed:
                    return
                try:
                    self._process = self._start()
                except OSError:  # no process, no memory: training goes on without it
                    break
        else:
            self._process.wait()
        self._stop_listening()  # or the servers of other hosts would wait for answers
