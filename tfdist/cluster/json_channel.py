"""Authenticated channel of JSON messages between two peers that share a token.

The channel provides integrity and authenticity, but no encryption. An eavesdropper on the network
can read all messages, but cannot forge, change, repeat or reorder them. It can also guess tokens
offline, so a token must be random and not a word. Received data is never executed.

    server: tfdist-wire 1 NONCE
    client: NONCE HMAC(token, "client" + both nonces)
    server: HMAC(token, "server" + both nonces)
    then, in each direction: HMAC(session key, direction, number, message) NUMBER MESSAGE
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
import secrets
import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.addresses import join_address, split_address

HANDSHAKE_S = 5.0  # timeout of the whole handshake
SEND_S = 2.0  # for the kernel to accept a message, immediate as long as the peer reads
LINE_BYTES = 1 << 20
GREETING_BYTES = 256  # maximum length of a handshake line
TOKEN_BYTES = 16

_NONCE_BYTES = 32
_GREETING = b"tfdist-wire 1 "
_REFUSED = b"wrong token"
_LINE = re.compile(rb"([0-9a-f]{64}) (\d{1,19}) (.*)", re.DOTALL)


class WireError(ConnectionError):
    """Error for a connection that cannot be used; the message names the peer."""


class WrongToken(WireError):
    """Error for a peer that does not know the token."""


class Tampered(WireError):
    """Error for a line that the peer did not write in this session and direction."""


class Replayed(WireError):
    """Error for a line that the peer has sent before, or that came too early."""


class Garbage(WireError):
    """Error for data that does not follow the protocol."""


class TooLong(WireError):
    """Error for a line longer than the limit."""


class TooSlow(WireError):
    """Error for a peer that did not send or read data in time."""


class Closed(WireError):
    """Error for a connection that has ended."""


class Channel:
    """One side of an authenticated connection; created by `connect` and `accept`.

    Any thread may send; only one thread receives. An error closes the channel.

    Args:
        lines: Connection.
        key: Session key.
        own_label: Label of the messages that this side sends.
        peer_label: Label of the messages that the peer sends.

    Attributes:
        peer: Address of the peer.
    """

    def __init__(self, lines: _Lines, key: bytes, own_label: bytes, peer_label: bytes):
        self.peer = lines.peer
        self._lines = lines
        self._key = key
        self._own_label = own_label
        self._peer_label = peer_label
        self._lock = threading.Lock()
        self._sent = 0
        self._received = 0

    def send(self, message: Mapping[str, Any], timeout: float = SEND_S) -> None:
        """Send a message.

        Args:
            message: JSON-serializable message.
            timeout: Seconds for the kernel to accept it, default 2.

        Raises:
            WireError: If the message was not sent completely.
        """
        body = json.dumps(message, separators=(",", ":")).encode()
        with self._lock:
            number = b"%d" % self._sent
            line = b" ".join((_mac(self._key, self._own_label, number, body), number, body)) + b"\n"
            if len(line) > LINE_BYTES:
                raise TooLong(
                    f"{self.peer}: a message of {len(line)} bytes is longer than {LINE_BYTES}; it "
                    "was not sent"
                )
            self._sent += 1
            try:
                self._lines.write(line, time.monotonic() + timeout)
            except WireError:
                self.close()  # the peer may have received part of a line
                raise

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """Receive the next message.

        Args:
            timeout: Seconds to wait for the message.

        Returns:
            The message, or None if it has not arrived completely.

        Raises:
            WireError: If no further message will arrive. Its class and message name the reason.
        """
        try:
            line = self._lines.read(time.monotonic() + timeout, LINE_BYTES)
            return None if line is None else self._open(line)
        except WireError:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection; a second call has no effect."""
        self._lines.close()

    def detach(self) -> socket.socket:
        """Return the connection for data of another kind; the channel must not be used after that.

        What the peer has sent after the last message that was received here is not lost.
        """
        return self._lines.detach()

    def _open(self, line: bytes) -> dict[str, Any]:
        match = _LINE.fullmatch(line)
        if not match:
            raise Garbage(f"{self.peer} sent a line that is no message: {line[:40]!r}")
        mac, number, body = match.groups()
        if not hmac.compare_digest(mac, _mac(self._key, self._peer_label, number, body)):
            raise Tampered(
                f"{self.peer}: line {self._received} was changed in transit, or belongs to another "
                "session"
            )
        if int(number) != self._received:
            raise Replayed(
                f"{self.peer}: expected line {self._received}, received line {int(number)}"
            )
        self._received += 1
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Garbage(f"{self.peer} sent a message that is no JSON: {body[:40]!r}") from error
        if not isinstance(message, dict):
            raise Garbage(f"{self.peer} sent JSON that is no object: {body[:40]!r}")
        return message


def connect(address: str, token: bytes, timeout: float = HANDSHAKE_S) -> Channel:
    """Connect as a client.

    Args:
        address: Address of the server as `host:port`.
        token: Secret of both sides; see `check_token`.
        timeout: Seconds for connection and handshake, default 5.

    Raises:
        WireError: If the server is another program, or does not know the token.
        OSError: If nothing listens there, or the name has no address.

    Example:
        >>> token = secrets.token_bytes(32)
        >>> with socket.create_server(("127.0.0.1", 0)) as server:
        ...     there = []
        ...     thread = threading.Thread(
        ...         target=lambda: there.append(accept(server.accept()[0], token))
        ...     )
        ...     thread.start()
        ...     here = connect("127.0.0.1:%d" % server.getsockname()[1], token)
        ...     thread.join()
        >>> here.send({"hello": "world"})
        >>> there[0].receive(timeout=1)
        {'hello': 'world'}
        >>> here.close(), there[0].close()
        (None, None)
    """
    check_token(token)
    limit = time.monotonic() + timeout
    connection = socket.create_connection(split_address(address), timeout=timeout)
    return authenticate(connection, address, token, limit - time.monotonic())


def authenticate(
    connection: socket.socket, address: str, token: bytes, timeout: float = HANDSHAKE_S
) -> Channel:
    """Create a channel from a connection that a client has made; close it on error.

    Args:
        connection: Connection to the server.
        address: Name of the server in messages.
        token: Secret of both sides; see `check_token`.
        timeout: Seconds for the handshake, default 5.

    Raises:
        WireError: If the server is another program, or does not know the token.
    """
    limit = time.monotonic() + timeout
    lines = _Lines(connection, address)
    try:
        greeting = _read_expected(lines, limit, "its greeting")
        if not re.fullmatch(re.escape(_GREETING) + rb"[0-9a-f]{64}", greeting):
            raise Garbage(
                f"{address}: the process that listens there is no tfdist process of this version: "
                f"it sent {greeting[:40]!r}"
            )
        nonce = secrets.token_bytes(_NONCE_BYTES)
        nonces = bytes.fromhex(greeting[len(_GREETING) :].decode()) + nonce
        lines.write(nonce.hex().encode() + b" " + _mac(token, b"client" + nonces) + b"\n", limit)
        proof = _read_expected(lines, limit, "its proof that it knows the token")
        if proof == _REFUSED:
            raise WrongToken(
                f"{address} does not accept this host's token; use the same token on all hosts"
            )
        if not hmac.compare_digest(proof, _mac(token, b"server" + nonces)):
            raise WrongToken(
                f"{address} does not know this host's token; use the same token on all hosts"
            )
        return Channel(lines, _session(token, nonces), b"client", b"server")
    except BaseException:
        lines.close()
        raise


def accept(connection: socket.socket, token: bytes, timeout: float = HANDSHAKE_S) -> Channel:
    """Create a channel from a connection that a server accepted; close it on error.

    Args:
        connection: Accepted connection.
        token: Secret of both sides; see `check_token`.
        timeout: Seconds for the handshake, default 5.

    Raises:
        WireError: If the client is another program, does not know the token, or was too slow.
    """
    limit = time.monotonic() + timeout
    lines = _Lines(connection, _peer(connection))
    try:
        check_token(token)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        lines.write(_GREETING + nonce.hex().encode() + b"\n", limit)
        answer = _read_expected(lines, limit, "its answer")
        if not re.fullmatch(rb"[0-9a-f]{64} [0-9a-f]{64}", answer):
            raise Garbage(
                f"{lines.peer} is no tfdist process of this version: it sent {answer[:40]!r}"
            )
        peer_nonce, proof = answer.split(b" ")
        nonces = nonce + bytes.fromhex(peer_nonce.decode())
        if not hmac.compare_digest(proof, _mac(token, b"client" + nonces)):
            lines.write(_REFUSED + b"\n", limit)
            raise WrongToken(f"{lines.peer} does not know the token")
        lines.write(_mac(token, b"server" + nonces) + b"\n", limit)
        return Channel(lines, _session(token, nonces), b"server", b"client")
    except BaseException:
        lines.close()
        raise


def check_token(token: bytes) -> None:
    """Raise ValueError if a token is too short.

    Args:
        token: Secret of at least 16 random bytes: an eavesdropper on the network can test guesses.

    Raises:
        ValueError: If the token is shorter.
    """
    if len(token) < TOKEN_BYTES:
        raise ValueError(
            f"token: expected at least {TOKEN_BYTES} random bytes, received {len(token)}; make "
            "one with: python -c 'import secrets; print(secrets.token_hex(32))'"
        )


class _Lines:
    """Lines of bounded length over a socket; reads and writes have separate deadlines.

    A read takes nothing after its line from the kernel: other data may follow the last line.
    """

    def __init__(self, connection: socket.socket, peer: str):
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # a socket pair has no such option
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self._socket = connection
        self._buffer = bytearray()  # the beginning of a line

    def read(self, limit: float, longest: int) -> bytes | None:
        """Return the next line without its newline, or None if it is incomplete at `limit`."""
        while self._ready(select.POLLIN, limit):
            with self._closing():
                waiting = self._socket.recv(1 << 16, socket.MSG_PEEK)
                if not waiting:
                    raise Closed(f"{self.peer} closed the connection")
                self._buffer += self._socket.recv(waiting.find(b"\n") + 1 or len(waiting))
            if len(self._buffer) - self._buffer.endswith(b"\n") >= longest:
                raise TooLong(f"{self.peer} sent a line of more than {longest} bytes")
            if self._buffer.endswith(b"\n"):
                line = bytes(self._buffer[:-1])
                self._buffer.clear()
                return line
        return None

    def write(self, data: bytes, limit: float) -> None:
        """Pass all of the data to the kernel before `limit`."""
        unsent = memoryview(data)
        while unsent:
            with self._closing():
                unsent = unsent[self._socket.send(unsent) :]
            if unsent and not self._ready(select.POLLOUT, limit):
                raise TooSlow(f"{self.peer} does not read its messages")

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
        self._socket.close()

    def detach(self) -> socket.socket:
        """Return the socket, which this object then no longer uses."""
        assert not self._buffer, "the last line is not complete"
        return self._socket

    def _ready(self, event: int, limit: float) -> bool:
        number = self._socket.fileno()
        if number < 0:
            raise Closed(f"{self.peer}: the connection was closed here")
        poll = select.poll()  # select() supports descriptors below 1024 only
        poll.register(number, event)
        return bool(poll.poll(max(0.0, limit - time.monotonic()) * 1000))

    @contextlib.contextmanager
    def _closing(self):
        try:
            yield
        except (BlockingIOError, InterruptedError):
            pass  # no longer ready; the caller retries
        except WireError:
            raise
        except OSError as error:
            raise Closed(
                f"{self.peer}: the connection was lost: {error.strerror or error}"
            ) from error


def _read_expected(lines: _Lines, limit: float, what: str) -> bytes:
    line = lines.read(limit, GREETING_BYTES)
    if line is None:
        raise TooSlow(f"{lines.peer} did not send {what} in time")
    return line


def _session(token: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, b"session" + nonces, hashlib.sha256)


def _mac(key: bytes, *parts: bytes) -> bytes:
    # Only the last part may contain a space, so different sequences of parts give different texts;
    # nonces have a fixed length.
    return hmac.digest(key, b" ".join(parts), hashlib.sha256).hex().encode()


def _peer(connection: socket.socket) -> str:
    if connection.family == socket.AF_UNIX:
        return "a process of this host"
    try:
        return join_address(*connection.getpeername()[:2])
    except (OSError, ValueError):
        return "a peer that is gone"
