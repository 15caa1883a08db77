"""Ray engine: runs agents as children of actors, in a placement group."""

from __future__ import annotations

import collections
import contextlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.launch.engines.agent_protocol import bytes_of, decode, encode, text_of
from tfdist.launch.engines.fleet import Interrupted, NoRoom, Slot
from tfdist.runtime.guardian import kill_group
from tfdist.runtime.launch_protocol import THREAD_VARIABLES

CONNECT_S = 60.0
CLOSE_S = 10.0  # for an agent to end, and its actor
GIVE_BACK_S = 30.0
SAID_LINES = 3  # lines of Ray that are kept for error messages
DRIVER = (sys.executable, "-m", "tfdist.launch.engines.ray_driver")


class Ray:
    """The placement group of a launch; see `fleet.Engine`.

    Args:
        address: Address of the cluster; "auto" for the one that this machine belongs to.
        cpus_per_task: CPUs that Ray reserves for each task, and its number of threads.
        gpus_per_task: GPUs of each task; 0 to let each task see all GPUs of its node.
        strategy: Placement strategy, such as "PACK".
        python: Python of the agents; None for that of the cluster.
        queue_timeout: Seconds to wait for room.
        show_line: Function that shows a line to the user.
        interrupted: Function that returns whether the user has ended the launch.
        driver: Command of the driver.
    """

    def __init__(
        self,
        address: str = "auto",
        *,
        cpus_per_task: int = 1,
        gpus_per_task: int = 0,
        strategy: str = "PACK",
        python: str | None = None,
        queue_timeout: float = 300.0,
        show_line: Callable[[str], None] = print,
        interrupted: Callable[[], bool] = lambda: False,
        driver: Sequence[str] = DRIVER,
    ):
        self._address = address
        self._options = {
            "address": address,
            "cpus": cpus_per_task,
            "gpus": gpus_per_task,
            "strategy": strategy,
            "python": python,
        }
        self._environ = tuple((name, str(cpus_per_task)) for name in THREAD_VARIABLES)
        self._queue_timeout = queue_timeout
        self._show_line = show_line
        self._interrupted = interrupted
        self._command = driver
        self._driver: DriverProcess | None = None
        self._slots: list[Slot] = []
        self._bundles: dict[Slot, int] = {}
        self._starts = 0  # number of agents, which makes the key of each slot unique

    def allocate(self, count: int, lost: Sequence[Slot]) -> list[Slot]:
        """See `Engine`. The tasks of a lost node get room on other nodes."""
        if self._driver is not None and self._driver.ended:
            self._show_line(f"tfdist: {self._driver.ending()}: connecting again")
            self.close()
        if self._driver is None:
            self._driver = DriverProcess(self._command)
            try:
                self._driver.send("open", **self._options)
                self._wait("opened", CONNECT_S, f"Ray at {self._address}: no answer")
            except BaseException:  # while Ray tries to connect, its process obeys no order
                self._driver.close(0.0)
                self._driver = None
                raise
        self._driver.send("place", count=count)
        reply = self._wait("placed", self._queue_timeout, "Ray gave no room")
        former = dict(enumerate(self._slots))
        self._slots = []
        for bundle, place in enumerate(reply["bundles"]):
            slot = former.get(bundle)
            if slot is None or slot in lost or not slot.key.startswith(place["node"]):
                self._starts += 1
                key = f"{place['node']}/{self._starts}"
                slot = Slot(place["name"], place["address"], key, self._environ)
            self._slots.append(slot)
        self._bundles = {slot: bundle for bundle, slot in enumerate(self._slots)}
        return list(self._slots)

    def avoid(self, slot: Slot, count: int) -> bool:
        """See `Fleet.give_up`. Room on other nodes is reserved before the tasks end."""
        if self._driver is None or self._driver.ended:
            return False
        self._driver.send("avoid", node=slot.key.rpartition("/")[0])
        try:
            reply = self._wait("avoided", CONNECT_S, "Ray did not answer")
        except Interrupted:  # the launch ends anyhow
            return False
        if reply["text"]:
            raise NoRoom(reply["text"])
        return True

    def connect(self, slot: Slot) -> RayTransport:
        """See `Engine`."""
        assert self._driver is not None
        return self._driver.connect(self._bundles[slot])

    def close(self) -> None:
        """See `Engine`. The actors and the placement group end."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None
            self._slots = []

    def _wait(self, kind: str, seconds: float, problem: str) -> dict[str, Any]:
        """Wait for the driver's reply; show why it does not come."""
        assert self._driver is not None
        deadline = time.monotonic() + seconds
        shown = ""
        while True:
            if self._interrupted():
                raise Interrupted
            reply = self._driver.reply(0.2)
            if reply is not None and reply["type"] == kind:
                return reply
            if reply is not None and reply["type"] == "refused":
                raise NoRoom(f"Ray at {self._address}: {reply['text']}; see `ray status`")
            if reply is not None and reply["text"] != shown:
                shown = reply["text"]
                self._show_line(f"tfdist: waiting for room in Ray: {shown}")
            if self._driver.ended:
                raise NoRoom(f"Ray at {self._address}: {self._driver.ending()}")
            if time.monotonic() >= deadline:
                reason = shown or self._driver.said
                raise NoRoom(
                    f"{problem} within {seconds:g} s{': ' * bool(reason)}{reason}; see `ray "
                    "status`" + ("" if kind != "placed" else ", or wait longer by --queue-timeout")
                )


class DriverProcess:
    """The process of `ray_driver`, as the launcher sees it.

    Args:
        command: Command of the driver.
    """

    def __init__(self, command: Sequence[str]):
        self._replies: queue.Queue[dict[str, Any]] = queue.Queue()
        self._transports: dict[int, RayTransport] = {}
        self._said: collections.deque[str] = collections.deque(maxlen=SAID_LINES)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        # Without a guardian: the end of standard input makes it give everything back. If it is
        # killed too, Ray itself ends its actors and its placement group.
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only the launcher
        )
        threading.Thread(target=self._read, daemon=True, name="Ray driver").start()

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._ended.is_set()

    @property
    def said(self) -> str:
        """The last lines of Ray."""
        return "; ".join(self._said)

    def ending(self) -> str:
        """Return how the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._popen.wait(1.0)
            return f"its driver ended with {code}" + (f": {self.said}" if self._said else "")
        return "its driver closed the connection"

    def send(self, kind: str, **facts: Any) -> None:
        """Send an order; raise OSError if the process is gone."""
        assert self._popen.stdin is not None
        with self._lock:
            self._popen.stdin.write(encode({"type": kind, **facts}))
            self._popen.stdin.flush()

    def reply(self, seconds: float) -> dict[str, Any] | None:
        """Wait for a message about the placement; return None if there is none in time."""
        with contextlib.suppress(queue.Empty):
            return self._replies.get(timeout=seconds)
        return None

    def connect(self, bundle: int) -> RayTransport:
        """Start an agent in a bundle; return at once."""
        number = len(self._transports)
        transport = self._transports[number] = RayTransport(self, number)
        try:
            self.send("connect", id=number, bundle=bundle)
        except OSError:
            transport.end(self.ending())
        return transport

    def close(self, seconds: float = GIVE_BACK_S) -> None:
        """Give everything back; kill the process if it does not end in time."""
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):
            self._popen.stdin.close()
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            kill_group(self._popen.pid)
            self._popen.wait()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            message = decode(line)
            if message is None:
                self._said.append(line.decode("utf-8", "replace").strip()[:200])
            elif message["type"] == "data":
                self._transports[message["id"]].receive(bytes_of(message["text"]))
            elif message["type"] == "ended":
                self._transports[message["id"]].end(message["text"])
            else:
                self._replies.put(message)
        self._ended.set()
        for transport in list(self._transports.values()):
            transport.end(self.ending())


class RayTransport:
    """Lines to and from an agent whose parent is an actor; see `agent_connection.Transport`.

    Args:
        driver: Process that has the actor.
        number: Number of the agent.
    """

    def __init__(self, driver: DriverProcess, number: int):
        self._driver = driver
        self._number = number
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._part = b""  # of a line
        self._ended = threading.Event()
        self._reason = ""

    def write(self, line: bytes) -> None:
        """See `Transport`."""
        if self._ended.is_set():
            raise BrokenPipeError(self._reason)
        self._driver.send("write", id=self._number, text=text_of(line))

    def read(self) -> bytes:
        """See `Transport`."""
        return self._lines.get()

    def close(self) -> None:
        """See `Transport`."""
        if not self._ended.is_set():
            with contextlib.suppress(OSError):
                self._driver.send("close", id=self._number)
            self._ended.wait(CLOSE_S)

    def ending(self) -> str:
        """See `Transport`."""
        return self._reason

    def receive(self, data: bytes) -> None:
        """Take some output of the agent."""
        *lines, self._part = (self._part + data).split(b"\n")
        for line in lines:
            self._lines.put(line + b"\n")

    def end(self, reason: str) -> None:
        """Note the end of the agent or of its actor."""
        if not self._ended.is_set():
            self._reason = reason
            self._ended.set()
            if self._part:
                self._lines.put(self._part)
            self._lines.put(b"")
