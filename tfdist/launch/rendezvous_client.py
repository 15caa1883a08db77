"""One host's launcher and the rendezvous: what is decided there becomes orders here, and no order outlives the connection."""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from tfdist.cluster.addresses import free_ports
from tfdist.launch import json_channel
from tfdist.launch.messages import Cut, Finish, Order, Start, Stop
from tfdist.runtime.launch_protocol import CONFIGURATION_CODE, TRANSIENT_CODE

POLL_S = 0.05
RETRY_S = 0.5  # between two attempts to connect
CUT = 0.9  # of the silence after which this host counts as lost: its workers are to end before


class RendezvousClient:
    """A host's place in a launch: gives the launcher orders, and takes its reports.

    While nothing is heard from the rendezvous for as long as it would take to count this host as lost, or when the connection
    ends, the order is `Cut`, and a new attempt to join begins. All methods may be called by any thread, and none waits but
    `order` and `close`.

    Args:
        address: "host:port" of the rendezvous.
        token: What all launchers know; see `wire.check_token`.
        host: Address by which the other hosts reach this one.
        slots: How many workers it can run.
        command_digest: Of the command; a text that is equal on all hosts, and may be shown.
        name: For a person; default the machine's.
        join_timeout: Seconds for the rendezvous to appear, default 300.
        ports: Finds so many free ports; default `free_ports` on every interface.
        say: Takes lines for a person.
        clock: Seconds that only grow; default `time.monotonic`.

    Attributes:
        id: Names it in this launch.

    Raises:
        ValueError: An argument is wrong.
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
        join_timeout: float = 300.0,
        ports: Callable[[int], list[int]] | None = None,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        json_channel.check_token(token)
        if slots < 1:
            raise ValueError(f"slots: expected at least 1 worker, received {slots}")
        self.id = secrets.token_hex(8)
        self._address, self._token, self._join_timeout, self._say, self._clock = (
            address,
            token,
            join_timeout,
            say,
            clock,
        )
        self._ports = ports or (lambda count: free_ports(count, "::" if ":" in host else "0.0.0.0"))
        self._hello = {
            "do": "join",
            "id": self.id,
            "host": host,
            "name": socket.gethostname() if name is None else name,
            "slots": slots,
            "digest": command_digest,
        }
        self._lock = threading.Lock()  # of what follows
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._finish: Finish | None = None
        self._channel: json_channel.Channel | None = None
        self._generation: int | None = None  # of the last `Start` that the launcher took
        self._reported = False  # how it ended here
        self._closing = threading.Event()
        self._bye = ""  # why it closes
        self._beats: dict[int, float] = {}  # number -> when it was sent, of those without an answer
        self._proven = 0.0  # when the last beat was sent that was answered
        self._thread = threading.Thread(target=self._run, name="rendezvous-member", daemon=True)
        self._thread.start()

    def __enter__(self) -> RendezvousClient:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def order(self, timeout: float) -> Order | None:
        """The next order.

        Args:
            timeout: Seconds to wait for it.

        Returns:
            The order; None: none came. After a `Finish` there is no other.
        """
        try:
            order = self._orders.get(timeout=0 if self._finish else timeout)
        except queue.Empty:
            return self._finish
        if isinstance(order, Start):
            with self._lock:  # now, not when it came: the launcher may still report what was before
                self._generation, self._reported = order.generation, False
        return order

    def done(self) -> None:
        """All workers here did their work."""
        self._report("done")

    def failed(
        self, kind: str, text: str, counted: bool = True, signature: str = "", code: int = 1
    ) -> None:
        """A worker here failed, and all workers here have ended.

        Args:
            kind: Value of `failures.Kind`.
            text: What happened, for a person.
            counted: Whether it uses up a restart.
            signature: Equal for the same error at the same step; "": unknown.
            code: Exit code of the launch should this be its end.
        """
        self._report(
            "failed", kind=kind, text=text[:4000], counted=counted, signature=signature, code=code
        )

    def preempted(self, leaving: bool = False) -> None:
        """The workers here ended after a snapshot since somebody sent them SIGTERM.

        Args:
            leaving: Whether this host goes, too; its launcher then calls `close`.
        """
        self._report("preempted", leaving=leaving)

    def stopped(self) -> None:
        """All workers here have ended, as ordered."""
        self._report("stopped")

    def close(self, reason: str = "its launcher ended") -> None:
        """Leaves the launch, which counts as a loss where workers run here.

        Args:
            reason: For the others.
        """
        self._bye = reason
        self._closing.set()
        self._thread.join(json_channel.HANDSHAKE_S + RETRY_S)

    def _report(self, word: str, **facts: Any) -> None:
        """Tells how the generation ended here; the first report counts, and after a `Cut` none."""
        with self._lock:
            channel, generation, reported = self._channel, self._generation, self._reported
            self._reported = True
        if channel is not None and generation is not None and not reported:
            with contextlib.suppress(json_channel.WireError):  # the thread that receives notices it
                channel.send({"do": word, "generation": generation, **facts})

    def _run(self) -> None:
        try:
            limit, reason = self._clock() + self._join_timeout, "it does not listen yet"
            lost = f"no rendezvous at {self._address} after {self._join_timeout:g} s"
            while not self._closing.is_set():
                channel, problem = self._join()
                if channel is None:
                    reason = problem or reason
                    if self._finish or self._clock() >= limit:
                        return self._end(TRANSIENT_CODE, f"{lost}: {reason}")
                    self._closing.wait(RETRY_S)
                    continue
                reason = self._obey(channel)
                channel.close()
                if self._finish or self._closing.is_set():
                    return None
                self._cut(f"lost the rendezvous at {self._address}: {reason}")
                limit = self._clock() + self._window
                lost = f"lost the rendezvous at {self._address}, and did not find it again within {self._window:g} s"
        except Exception as error:  # a fault of ours: the launcher must not wait in vain
            self._end(1, f"the rendezvous' member failed: {type(error).__name__}: {error}")

    def _join(self) -> tuple[json_channel.Channel | None, str]:
        """A channel of which this host is a member, or none and why."""
        channel = None
        try:
            sent = self._clock()
            channel = json_channel.connect(self._address, self._token)
            channel.send(self._hello)
            welcome = channel.receive(json_channel.HANDSHAKE_S)
            if welcome is None:
                raise json_channel.TooSlow(
                    f"{self._address} did not answer this host's wish to join"
                )
            if welcome.get("do") == "finish":
                self._end(int(welcome["code"]), str(welcome["text"]))
                raise json_channel.Closed(str(welcome["text"]))
            self._silence, self._window, self._beat = (
                float(welcome[name]) for name in ("silence", "window", "beat")
            )
        except json_channel.WrongToken as error:
            self._end(CONFIGURATION_CODE, str(error))
            return None, str(error)
        except (OSError, LookupError, TypeError, ValueError) as error:
            if channel is not None:
                channel.close()
            return None, str(error)
        with self._lock:
            self._channel, self._generation, self._reported = channel, None, False
        self._beats, self._proven = {}, sent
        return channel, ""

    def _obey(self, channel: json_channel.Channel) -> str:
        """Turns messages into orders until the connection is of no more use; returns why."""
        number, due = 0, 0.0
        try:
            while not self._closing.is_set():
                now = self._clock()
                # From when a beat was sent: the rendezvous heard it later, and counts this host as lost later still.
                if now - self._proven >= CUT * self._silence:
                    return f"it did not answer for {CUT * self._silence:g} s"
                if now >= due:
                    number, due = number + 1, now + self._beat
                    self._beats[number] = now
                    channel.send({"do": "beat", "number": number})
                message = channel.receive(POLL_S)
                if message is not None:
                    self._follow(channel, message)
                    if self._finish:
                        return ""
            channel.send({"do": "bye", "reason": self._bye})
        except (json_channel.WireError, LookupError, TypeError, ValueError) as error:
            return str(error)
        return "this launcher ended"

    def _follow(self, channel: json_channel.Channel, message: dict[str, Any]) -> None:
        word = message.pop("do", None)
        if word == "ack":
            self._proven = max(self._proven, self._beats.get(message["number"], 0.0))
            self._beats = {
                number: sent for number, sent in self._beats.items() if number > message["number"]
            }
        elif word == "ports":
            try:
                facts: dict[str, Any] = {"ports": self._ports(message["count"])}
            except (OSError, ValueError) as error:
                facts = {"ports": [], "problem": str(error)}
            channel.send({"do": "ports", "generation": message["generation"], **facts})
        elif word == "start":
            self._orders.put(Start(**{**message, "addresses": tuple(message["addresses"])}))
        elif word == "stop":
            self._orders.put(Stop(**message))
        elif word == "finish":
            self._end(int(message["code"]), str(message["text"]))
        elif word == "note":
            self._say(str(message["text"]))

    def _cut(self, reason: str) -> None:
        with self._lock:
            self._channel, self._generation = None, None
        self._replace(Cut(reason))
        self._say(f"tfdist: {reason}")

    def _end(self, code: int, text: str) -> None:
        if self._finish is None:
            self._finish = Finish(code, text)
            self._replace(self._finish)

    def _replace(self, order: Order) -> None:
        """Nothing that was ordered before counts any longer."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._orders.get_nowait()
        self._orders.put(order)
