"""Client of the doctor protocol: questions to other doctors, with time limits.

Each exchange has its own connection. The asker sends its hello message and a question as one JSON
line, and the doctor answers with another line. For the question `stream`, bytes follow on the same
connection. The asker closes first, so that no port of a task is left in TIME_WAIT.
"""

from __future__ import annotations

import dataclasses
import socket
import statistics
import time
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.handshake import receive, send
from tfdist.cluster.meeting import connect

ATTEMPT = "doctor"  # no preflight of a training accepts a doctor as one of its own
EXCHANGE_S = 5.0  # seconds for a question and its answer
MEASURE_S = 20.0  # seconds for a question that makes the other side measure
LINE_BYTES = 64 << 10
STREAM_BYTES = 16 << 20  # maximum bytes sent to measure a link
STREAM_S = 1.5  # maximum seconds for sending them
PINGS = 10
_PIECE = bytes(64 << 10)


class Refused(ValueError):
    """Error for a doctor that answers, and refuses the question."""


@dataclasses.dataclass(frozen=True)
class Link:
    """Measurement of the network from one task's host to another's.

    Attributes:
        source: Task of the host that sent.
        target: Task of the host that received.
        latency: Seconds of a round trip of one byte.
        rate: Bytes per second.
        error: Reason why there is no measurement; "" if there is one.
    """

    source: str
    target: str
    latency: float = 0.0
    rate: float = 0.0
    error: str = ""

    def better(self, other: Link) -> Link:
        """Combine the best figures of two measurements of the same link.

        Args:
            other: Second measurement; ignored if it failed.
        """
        return (
            self
            if other.error
            else dataclasses.replace(
                self, latency=min(self.latency, other.latency), rate=max(self.rate, other.rate)
            )
        )


def ask(
    address: str, hello: Mapping[str, Any], question: str, timeout: float = EXCHANGE_S, **facts: Any
) -> dict[str, Any]:
    """Ask a doctor a question.

    Args:
        address: Address of a task that the doctor serves.
        hello: Hello message of this process.
        question: One of "hello", "token", "measure" and "done".
        timeout: Seconds for the whole exchange, default 5.
        **facts: Further fields of the question.

    Returns:
        The answer, with the times "sent" and "came" in seconds since the epoch.

    Raises:
        OSError: If no process answers.
        ValueError: If another program answers, or the doctor refuses (`Refused`).
    """
    limit = time.monotonic() + timeout
    with connect(address, min(timeout, EXCHANGE_S)) as connection:
        sent = time.time()
        send(connection, {**hello, "ask": question, **facts})
        answer = receive(connection, limit, LINE_BYTES, "doctor")
    if answer.get("attempt") != ATTEMPT:
        raise ValueError(
            "a training's preflight listens there, no tfdist doctor; wait for its end, or end it"
        )
    if "refused" in answer:
        raise Refused(str(answer["refused"])[:300])
    return {**answer, "sent": sent, "came": time.time()}


def measure(source: str, target: str, address: str, hello: Mapping[str, Any]) -> Link:
    """Measure the round trip and the rate of the network to the host of a task.

    Args:
        source: Task of this host.
        target: Task of the other host.
        address: Address of the other task.
        hello: Hello message of this process.

    Returns:
        The measurement, with an `error` if it failed.
    """
    limit = time.monotonic() + EXCHANGE_S + STREAM_S
    try:
        with connect(address, EXCHANGE_S) as connection:
            send(connection, {**hello, "ask": "stream"})
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
            begun = time.perf_counter()
            left = STREAM_BYTES
            while left > 0 and time.perf_counter() - begun < STREAM_S:
                connection.sendall(_PIECE)
                left -= len(_PIECE)
            connection.shutdown(socket.SHUT_WR)
            received = float(receive(connection, limit, LINE_BYTES, "doctor").get("received", 0))
            seconds = time.perf_counter() - begun
    except (
        OSError,
        ValueError,
        TypeError,
        OverflowError,
    ) as error:  # the other side may send anything
        return Link(source, target, error=str(error))
    latency = statistics.median(ways)
    return Link(source, target, latency, received / max(seconds - latency, 1e-6))
