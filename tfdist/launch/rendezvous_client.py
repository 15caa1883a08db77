"""Rendezvous client: connects a host's launcher to the rendezvous and relays its orders.

Orders of a connection are void after its end.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from tfdist.cluster import json_channel
from tfdist.cluster.addresses import free_ports
from tfdist.launch.messages import Cut, Finish, Order, Start, Stop
from tfdist.runtime.launch_protocol import CONFIGURATION_CODE, TRANSIENT_CODE

POLL_S = 0.05
RETRY_S = 0.5  # between two attempts to connect
CUT_FRACTION = 0.9  # fraction of the host timeout after which its workers must end


class RendezvousClient:
    """A host's membership in a launch: receives orders and sends reports.

    If the rendezvous is silent for as long as it would take to count this host as lost, or if the
    connection ends, the order is `Cut`, and the client tries to join again: for `join_timeout`, but
    only for the restart window if the first host answers that nothing listens there. Any thread may
    call any method. Only `order` and `close` block.

    Args:
        address: Address of the rendezvous as "host:port".
        token: Secret of all launchers; see `json_channel.check_token`.
        host: Address by which the other hosts reach this one.
        slots: Number of workers that this host can run.
        command_digest: Digest of the command; a text that is equal on all hosts and may be shown.
        name: Name of the host for the user, default the machine's name.
        snapshot_port: Port of this host's snapshot server, default 0 for none.
        join_timeout: Seconds for the rendezvous to appear, or to be reached again, default 300.
        ports: Function that finds that many free ports, default `free_ports` on every interface.
        show_line: Function that shows a line to the user.
        clock: Monotonic clock in seconds, default `time.monotonic`.

    Attributes:
        id: Unique name of the host in this launch.

    Raises:
        ValueError: If an argument is wrong.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        host: str,
        slots: int,
        command_digest: str,
        *,
        name: str | None = None,
        snapshot_port: int = 0,
        join_timeout: float = 300.0,
        ports: Callable[[int], list[int]] | None = None,
        show_line: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        json_channel.check_token(token)
        if slots < 1:
            raise ValueError(f"slots: expected at least 1 worker, received {slots}")
        self.id = secrets.token_hex(8)
        self._address = address
        self._token = token
        self._join_timeout = join_timeout
        self._show_line = show_line
        self._clock = clock
        self._ports = ports or (lambda count: free_ports(count, "::" if ":" in host else "0.0.0.0"))
        self._hello = {
            "do": "join",
            "id": self.id,
            "host": host,
            "name": socket.gethostname() if name is None else name,
            "slots": slots,
            "digest": command_digest,
            "snapshot_port": snapshot_port,
        }
        self._lock = threading.Lock()  # guards the attributes below
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._finish: Finish | None = None
        self._channel: json_channel.Channel | None = None
        self._generation: int | None = None  # number in the last `Start` that the launcher received
        self._reported = False  # whether the outcome here was reported
        self._closing = threading.Event()
        self._close_reason = ""  # reason for closing
        # heartbeats without an answer: number -> time of sending
        self._beats: dict[int, float] = {}
        self._last_answered = 0.0  # time of sending of the last answered heartbeat
        self._thread = threading.Thread(target=self._run, name="rendezvous-member", daemon=True)
        self._thread.start()

    def __enter__(self) -> RendezvousClient:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def order(self, timeout: float) -> Order | None:
        """Return the next order.

        Args:
            timeout: Seconds to wait for the order.

        Returns:
            The order, or None if there is none. After a `Finish` there are no others.
        """
        try:
            order = self._orders.get(timeout=0 if self._finish else timeout)
        except queue.Empty:
            return self._finish
        if isinstance(order, Start):
            # Not on arrival: until now the launcher may still report the previous generation.
            with self._lock:
                self._generation = order.generation
                self._reported = False
        return order

    def done(self) -> None:
        """Report that all workers here have finished their work."""
        self._report("done")

    def failed(
        self, kind: str, text: str, counted: bool = True, signature: str = "", code: int = 1
    ) -> None:
        """Report that a worker here failed, and that all workers here have ended.

        Args:
            kind: Value of `failures.Kind`.
            text: Description for the user.
            counted: Whether the failure uses up a restart, default True.
            signature: Text that is equal for the same error at the same step; "" (default) if
                unknown.
            code: Exit code of the launch if this report ends it, default 1.
        """
        self._report(
            "failed", kind=kind, text=text[:4000], counted=counted, signature=signature, code=code
        )

    def preempted(self, leaving: bool = False) -> None:
        """Report that the workers here were sent SIGTERM and ended after a snapshot.

        Args:
            leaving: Whether this host leaves the launch, default False; its launcher then calls
                `close`.
        """
        self._report("preempted", leaving=leaving)

    def stopped(self) -> None:
        """Report that all workers here have ended, as ordered."""
        self._report("stopped")

    def close(self, reason: str = "its launcher ended") -> None:
        """Leave the launch, which counts as a loss if workers run here.

        Args:
            reason: Reason, for the other hosts.
        """
        self._close_reason = reason
        self._closing.set()
        self._thread.join(json_channel.HANDSHAKE_S + RETRY_S)

    def _report(self, message_kind: str, **facts: Any) -> None:
        """Send the outcome of the generation on this host.

        Only the first report is sent, and none after a `Cut`.
        """
        with self._lock:
            channel = self._channel
            generation = self._generation
            reported = self._reported
            self._reported = True
        if channel is not None and generation is not None and not reported:
            with contextlib.suppress(json_channel.WireError):  # the receiving thread notices it
                channel.send({"do": message_kind, "generation": generation, **facts})

    def _run(self) -> None:
        try:
            since = self._clock()
            was_member = False
            while not self._closing.is_set():
                channel, reason, refused = self._join()
                if channel is None:
                    # A host that the network hides may come back and find the job running. If the
                    # first host answers, but nothing listens, its launcher is gone.
                    seconds = self._window if was_member and refused else self._join_timeout
                    if self._finish or self._clock() - since >= seconds:
                        lost = (
                            f"lost the rendezvous at {self._address}, and could not connect again "
                            f"within {seconds:g} s"
                            if was_member
                            else f"no rendezvous at {self._address} after {seconds:g} s"
                        )
                        return self._end(TRANSIENT_CODE, f"{lost}: {reason}")
                    self._closing.wait(RETRY_S)
                    continue
                reason = self._receive_orders(channel)
                channel.close()
                if self._finish or self._closing.is_set():
                    return None
                self._cut(f"lost the rendezvous at {self._address}: {reason}")
                since = self._clock()
                was_member = True
        except Exception as error:  # a bug here must not block the launcher
            self._end(1, f"the rendezvous client failed: {type(error).__name__}: {error}")

    def _join(self) -> tuple[json_channel.Channel | None, str, bool]:
        """Join the launch.

        Returns:
            The channel, "" and False; or None, the reason for the failure, and whether nothing
            listens at the address.
        """
        channel = None
        try:
            sent = self._clock()
            channel = json_channel.connect(self._address, self._token)
            channel.send(self._hello)
            welcome = channel.receive(json_channel.HANDSHAKE_S)
            if welcome is None:
                raise json_channel.TooSlow(
                    f"{self._address} did not answer this host's request to join"
                )
            if welcome.get("do") == "finish":
                self._end(int(welcome["code"]), str(welcome["text"]))
                raise json_channel.Closed(str(welcome["text"]))
            self._host_timeout, self._window, self._beat = (
                float(welcome[name]) for name in ("host_timeout", "window", "beat")
            )
        except json_channel.WrongToken as error:
            self._end(CONFIGURATION_CODE, str(error))
            return None, str(error), False
        except (OSError, LookupError, TypeError, ValueError) as error:
            if channel is not None:
                channel.close()
            return None, str(error), isinstance(error, ConnectionRefusedError)
        with self._lock:
            self._channel = channel
            self._generation = None
            self._reported = False
        self._beats = {}
        self._last_answered = sent
        return channel, "", False

    def _receive_orders(self, channel: json_channel.Channel) -> str:
        """Convert messages into orders until the connection is unusable; return the reason."""
        number = 0
        due = 0.0
        try:
            while not self._closing.is_set():
                now = self._clock()
                # Count from the sending of a heartbeat: the rendezvous received it later, so it
                # counts this host as lost later, too.
                if now - self._last_answered >= CUT_FRACTION * self._host_timeout:
                    return f"it did not answer for {CUT_FRACTION * self._host_timeout:g} s"
                if now >= due:
                    number += 1
                    due = now + self._beat
                    self._beats[number] = now
                    channel.send({"do": "beat", "number": number})
                message = channel.receive(POLL_S)
                if message is not None:
                    self._handle(channel, message)
                    if self._finish:
                        return ""
            channel.send({"do": "bye", "reason": self._close_reason})
        except (json_channel.WireError, LookupError, TypeError, ValueError) as error:
            return str(error)
        return "this launcher ended"

    def _handle(self, channel: json_channel.Channel, message: dict[str, Any]) -> None:
        kind = message.pop("do", None)
        if kind == "ack":
            self._last_answered = max(self._last_answered, self._beats.get(message["number"], 0.0))
            self._beats = {
                number: sent for number, sent in self._beats.items() if number > message["number"]
            }
        elif kind == "ports":
            try:
                facts: dict[str, Any] = {"ports": self._ports(message["count"])}
            except (OSError, ValueError) as error:
                facts = {"ports": [], "problem": str(error)}
            channel.send({"do": "ports", "generation": message["generation"], **facts})
        elif kind == "start":
            lists = {name: tuple(message[name]) for name in ("addresses", "snapshot_servers")}
            self._orders.put(Start(**{**message, **lists}))
        elif kind == "stop":
            self._orders.put(Stop(**message))
        elif kind == "finish":
            self._end(int(message["code"]), str(message["text"]))
        elif kind == "note":
            self._show_line(str(message["text"]))

    def _cut(self, reason: str) -> None:
        with self._lock:
            self._channel = None
            self._generation = None
        self._replace(Cut(reason))
        self._show_line(f"tfdist: {reason}")

    def _end(self, code: int, text: str) -> None:
        if self._finish is None:
            self._finish = Finish(code, text)
            self._replace(self._finish)

    def _replace(self, order: Order) -> None:
        """Discard all pending orders and queue this one."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._orders.get_nowait()
        self._orders.put(order)
