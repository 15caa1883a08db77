"""Rendezvous server: the launchers of all hosts connect to it and form one launch.

It runs inside the launcher of the first host, and speaks `json_channel`. One thread owns a
`Membership`, processes all received messages and makes all decisions. Each host's launcher,
including the first one, is a `rendezvous_client.RendezvousClient`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import socket
import threading
import time
from collections.abc import Callable

from tfdist.cluster import json_channel
from tfdist.cluster.addresses import bind_problem, join_address, resolve_address
from tfdist.cluster.pending_connections import PendingConnections
from tfdist.launch.membership import Membership
from tfdist.launch.messages import Decide, Finish, Terms
from tfdist.runtime.launch_protocol import TRANSIENT_CODE

TICK_S = 0.1
FAREWELL_S = 3.0  # time to send the outcome to the members
HANDSHAKES = 64  # maximum at the same time
MAX_REJECTIONS = 100  # maximum number of lines about rejected connections

_Event = Callable[[Membership], None]


class Rendezvous:
    """A server at which the launchers agree on who runs which workers and learn of failures.

    Args:
        address: Address of this host as "host:port", the only one where the server listens; port 0
            for any free port.
        token: Secret of all launchers; see `json_channel.check_token`.
        terms: Number of workers and all timeouts.
        decide: Restart policy.
        show_line: Function that shows a line to the user.
        clock: Monotonic clock in seconds, default `time.monotonic`.

    Attributes:
        address: Address where the server listens.

    Raises:
        OSError: If the server cannot listen there: the address belongs to another host
            (`errno.EADDRNOTAVAIL`), or the port is in use (`errno.EADDRINUSE`), perhaps by another
            launcher of this host.

    Example:
        >>> from tfdist.launch.messages import Decision
        >>> terms = Terms(1, 4, timeout=0.2)
        >>> with Rendezvous(  # doctest: +NORMALIZE_WHITESPACE
        ...     "127.0.0.1:0", b"0123456789abcdef", terms,
        ...     decide=lambda outcome: Decision(False), show_line=print,
        ... ) as rendezvous:
        ...     print(rendezvous.wait(10).code)
        tfdist: after 0.2 s, 0 of at least 1 workers can run. Present: no host.
        Missing: hosts that never joined. Start the same command on the missing hosts, or lower
        the minimum
        75
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        terms: Terms,
        *,
        decide: Decide,
        show_line: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        json_channel.check_token(token)
        self._token = token
        self._show_line = show_line
        self._clock = clock
        self._socket = _listen(address)
        host = address.rpartition(":")[0].strip("[]")
        port = self._socket.getsockname()[1]
        self.address = join_address(host, port)
        ip = self._socket.getsockname()[0]
        if ipaddress.ip_address(ip).is_loopback and host not in (ip, "localhost"):
            show_line(
                f"tfdist: {host} is {ip} on this machine, to which no other host can connect; "
                "pass this host's IP address instead"
            )
        self._membership = Membership(terms, decide, show_line, clock())
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._channels: dict[int, json_channel.Channel] = {}
        self._lock = threading.Lock()  # guards the channels and the complaints
        self._rejections: set[tuple[str, type]] = set()
        self._handshakes = PendingConnections(HANDSHAKES)
        self._finished = threading.Event()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"rendezvous-{name}", daemon=True)
            for name, run in (("listen", self._accept), ("decide", self._decide_all))
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def wait(self, timeout: float) -> Finish | None:
        """Return the outcome of the launch, or None if it still runs after `timeout` seconds."""
        self._finished.wait(timeout)
        return self._membership.finish

    def close(
        self, code: int = TRANSIENT_CODE, text: str = "the first host's launcher ended"
    ) -> None:
        """End the launch if it has not ended, and wait until all members know it.

        The wait takes a few seconds at most.

        Args:
            code: Exit code for the launchers of all hosts, default 75.
            text: Reason, for the user.
        """
        self._events.put(lambda membership: membership.end(code, text))
        limit = time.monotonic() + FAREWELL_S
        while time.monotonic() < limit and not (self._finished.is_set() and not self._connected()):
            time.sleep(0.02)
        self._closing.set()
        self._socket.close()
        for channel in self._connected():
            channel.close()
        for thread in self._threads:
            thread.join(FAREWELL_S)

    def _connected(self) -> list[json_channel.Channel]:
        with self._lock:
            return list(self._channels.values())

    def _accept(self) -> None:
        key = 0
        self._socket.settimeout(TICK_S)
        while not self._closing.is_set():
            try:
                connection, peer = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:  # closed, or out of descriptors: avoid a busy loop
                time.sleep(TICK_S)
                continue
            self._handshakes.add(connection, peer[0])
            key += 1
            threading.Thread(
                target=self._serve,
                args=(key, connection, peer[0]),
                name=f"rendezvous-{key}",
                daemon=True,
            ).start()

    def _serve(self, key: int, connection: socket.socket, host: str) -> None:
        """Serve one connection, from the handshake to its end."""
        try:
            channel = json_channel.accept(connection, self._token)
            hello = channel.receive(json_channel.HANDSHAKE_S)
            if hello is None:
                channel.close()
                raise json_channel.TooSlow(
                    f"{channel.peer} knows the token but did not send a request to join"
                )
        except (OSError, ValueError) as error:
            self._handshakes.remove(connection)
            connection.close()
            return self._report_rejection(host, error)
        self._handshakes.remove(connection)
        with self._lock:
            self._channels[key] = channel
        now = self._clock()
        self._events.put(lambda membership: membership.joined(key, hello, now))
        reason = "the rendezvous ended"
        try:
            while not self._closing.is_set():
                message = channel.receive(TICK_S)
                if message is not None:
                    self._put_message(key, message)
        except json_channel.WireError as error:
            reason = str(error)
        channel.close()
        with self._lock:
            self._channels.pop(key, None)
        gone = self._clock()
        self._events.put(lambda membership: membership.gone(key, reason, gone))

    def _put_message(self, key: int, message: dict) -> None:
        now = self._clock()  # time of arrival, not of processing
        self._events.put(lambda membership: membership.receive(key, message, now))

    def _report_rejection(self, host: str, error: Exception) -> None:
        """Show a rejected connection, once per client and error.

        A port scan must not fill the terminal.
        """
        with self._lock:
            reported = (host, type(error)) in self._rejections or len(
                self._rejections
            ) >= MAX_REJECTIONS
            if not reported:
                self._rejections.add((host, type(error)))
        if not reported and not self._closing.is_set():
            self._show_line(f"tfdist: the rendezvous rejected a connection: {error}")

    def _decide_all(self) -> None:
        """Run the thread that owns the membership.

        It passes received messages to the membership and sends the messages in its outbox.
        """
        membership = self._membership
        while not self._closing.is_set():
            try:
                for event in self._due():
                    event(membership)
                membership.tick(self._clock())
            except Exception as error:  # a bug here or in the policy must not block the members
                membership.end(1, f"the rendezvous failed: {type(error).__name__}: {error}")
            while membership.outbox:
                outbox = membership.outbox
                membership.outbox = []
                for key, message in outbox:
                    self._send(key, message)
            if membership.finish:
                self._finished.set()

    def _due(self) -> list[_Event]:
        """Return the events received since the last call, after a short wait if there are none."""
        events = []
        with contextlib.suppress(queue.Empty):
            events.append(self._events.get(timeout=TICK_S))
            while len(events) < 1000:
                events.append(self._events.get_nowait())
        return events

    def _send(self, key: int, message: dict | None) -> None:
        with self._lock:
            channel = self._channels.get(key)
        if channel is None:
            return
        if message is None:
            channel.close()
            return
        try:
            channel.send(message)
        except json_channel.WireError as error:
            self._membership.gone(key, str(error), self._clock())


def _listen(address: str) -> socket.socket:
    listener = None
    try:
        family, sockaddr = resolve_address(address)
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(sockaddr)
        listener.listen(128)
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        raise type(error)(error.errno, bind_problem("the rendezvous", address, error)) from error
