"""Bound on connections whose peers have not proved yet that they belong to the launch."""

from __future__ import annotations

import collections
import contextlib
import socket
import threading


class PendingConnections:
    """Connections of unknown peers; when they are too many, one ends to make room.

    It is the oldest connection of the address that has the most. So whoever opens connections and
    keeps them takes room only from itself, and a peer, which needs its connection for milliseconds,
    is served. Any thread may call any method.

    Args:
        limit: Maximum number of connections.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._hosts: dict[socket.socket, str] = {}  # in the order of arrival
        self._lock = threading.Lock()

    def add(self, connection: socket.socket, host: str) -> None:
        """Add an accepted connection from a host, and shut another one down if there is no room."""
        with self._lock:
            self._hosts[connection] = host
            if len(self._hosts) <= self._limit:
                return
            ((worst, _),) = collections.Counter(self._hosts.values()).most_common(1)
            oldest = next(other for other, host in self._hosts.items() if host == worst)
            del self._hosts[oldest]
            with contextlib.suppress(OSError):  # it has ended meanwhile
                oldest.shutdown(socket.SHUT_RDWR)

    def remove(self, connection: socket.socket) -> None:
        """Remove a connection that has ended, or whose peer is known; again has no effect."""
        with self._lock:
            self._hosts.pop(connection, None)
