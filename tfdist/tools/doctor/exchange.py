"""A question to a doctor at another address becomes its answer, within a bound; nothing is judged here.

Each exchange is a connection of its own: the asker's badge with a question, as one JSON line, the answer, as another one, and for
`stream` bytes between them. The asker closes first, so that no port of a task is left in TIME_WAIT.
"""

from __future__ import annotations

import dataclasses
import socket
import statistics
import time
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.addresses import resolve_address
from tfdist.cluster.handshake import receive, send

ATTEMPT = "doctor"  # no training's preflight takes a doctor for one of its own
EXCHANGE_S = 5.0  # for a question and its answer
MEASURE_S = 20.0  # for one that makes the other side measure
LINE_BYTES = 64 << 10
STREAM_BYTES = 16 << 20  # sent at most to measure a link
STREAM_S = 1.5  # for which it is sent at most
PINGS = 10
_PIECE = bytes(64 << 10)


class Refused(ValueError):
    """The other side answers, and says no."""


@dataclasses.dataclass(frozen=True)
class Link:
    """The network from one task's host to another's.

    Attributes:
        source: A task of the host that sent.
        target: A task of the host that received.
        latency: Seconds for a byte to go and come back.
        rate: Bytes per second.
        error: Why there are none; "": there are.
    """

    source: str
    target: str
    latency: float = 0.0
    rate: float = 0.0
    error: str = ""

    def better(self, other: Link) -> Link:
        """The best of two measurements of the same link; this one where the other failed."""
        return (
            self
            if other.error
            else dataclasses.replace(
                self, latency=min(self.latency, other.latency), rate=max(self.rate, other.rate)
            )
        )


def connect(address: str, timeout: float) -> socket.socket:
    """A connection to a task's address; OSError where there is none."""
    family, sockaddr = resolve_address(address)
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(sockaddr)
        if connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError(
                "nobody listens"
            )  # Linux can connect a free port to itself
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        connection.close()
        raise
    return connection


def ask(
    address: str, badge: Mapping[str, Any], question: str, timeout: float = EXCHANGE_S, **facts: Any
) -> dict[str, Any]:
    """Asks a doctor.

    Args:
        address: Of a task that it serves.
        badge: Of this process.
        question: "hello", "token", "measure" or "done".
        timeout: Seconds for all of it.
        **facts: What belongs to the question.

    Raises:
        OSError: Nobody answers.
        ValueError: Another program does, or one that refuses (`Refused`).
    """
    limit = time.monotonic() + timeout
    with connect(address, min(timeout, EXCHANGE_S)) as connection:
        sent = time.time()
        send(connection, {**badge, "ask": question, **facts})
        answer = receive(connection, limit, LINE_BYTES, "doctor")
    if answer.get("attempt") != ATTEMPT:
        raise ValueError(
            "a training's preflight listens there, no tfdist doctor; wait for its end, or end it"
        )
    if "refused" in answer:
        raise Refused(str(answer["refused"])[:300])
    return {**answer, "sent": sent, "came": time.time()}


def measure(source: str, target: str, address: str, badge: Mapping[str, Any]) -> Link:
    """Measures the network to the host of a task: the way of a byte there and back, and how fast bytes go there.

    Args:
        source: A task of this host.
        target: The task.
        address: Its address.
        badge: Of this process.
    """
    limit = time.monotonic() + EXCHANGE_S + STREAM_S
    try:
        with connect(address, EXCHANGE_S) as connection:
            send(connection, {**badge, "ask": "stream"})
            answer = receive(connection, limit, LINE_BYTES, "doctor")
            if "refused" in answer:
                raise Refused(str(answer["refused"])[:300])
            ways = []
            for _ in range(PINGS):
                begun = time.perf_counter()
                connection.sendall(b"p")
                if connection.recv(1) != b"p":
                    raise OSError("the connection ended while it was measured")
                ways.append(time.perf_counter() - begun)
            begun, left = time.perf_counter(), STREAM_BYTES
            while left > 0 and time.perf_counter() - begun < STREAM_S:
                connection.sendall(_PIECE)
                left -= len(_PIECE)
            connection.shutdown(socket.SHUT_WR)
            received = float(receive(connection, limit, LINE_BYTES, "doctor").get("received", 0))
            seconds = time.perf_counter() - begun
    except (OSError, ValueError, TypeError, OverflowError) as error:  # whatever the other side sent
        return Link(source, target, error=str(error))
    latency = statistics.median(ways)
    return Link(source, target, latency, received / max(seconds - latency, 1e-6))
