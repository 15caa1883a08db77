"""An address `host:port` becomes a socket address, a named fault, or whether a gRPC server answers there.

What such a server serves is not known here.
"""

import errno
import ipaddress
import random
import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

Lookup = Callable[..., list]  # of the form of socket.getaddrinfo

# Below Linux's range for outgoing connections (32768 to 60999), so that no connection takes a port between
# our choice and TensorFlow's start; below Kubernetes' node ports (30000 to 32767) too.
_LOCAL_PORTS = range(20000, 30000)

LOOK_S = 3.0  # for a server to answer, which takes it a millisecond where it is not starved

# HTTP/2 (RFC 9113, 3.4): a client says who it is and how it wants it; a frame's header is the length of its payload (3 bytes), its
# type, its flags and its stream (4 bytes), which is 0 for the connection itself.
_CLIENT_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = 4
_EMPTY_SETTINGS = bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])


class PortTaken(ValueError):
    """Somebody else has the port; with another one, or later, starting again may help."""

    exit_code = 75  # `contract.TRANSIENT_CODE`


class UnresolvedAddress(ValueError):
    """Host names without an address on this machine (yet: a pod's name appears when the pod does).

    Args:
      message: what a user reads.
      reasons: task -> why its host has no address.
    """

    def __init__(self, message: str, reasons: Mapping[str, str]):
        super().__init__(message)
        self.reasons = reasons


def address_problem(address: Any) -> str | None:
    """What is wrong with an address, as the rest of a sentence; None if nothing is.

    >>> address_problem("10.0.0.1:99999")
    'has the bad port 99999; use 1 to 65535'
    """
    match = isinstance(address, str) and re.fullmatch(
        r"(\[[\da-fA-F:.%\w]+\]|[^\[\]:/\s]+):(\d+)", address
    )
    if not match:
        return "is not host:port; write 10.0.0.1:2222, name:2222 or [fd00::1]:2222"
    if not 0 < int(match[2]) < 65536:
        return f"has the bad port {match[2]}; use 1 to 65535"
    if match[1] in ("0.0.0.0", "[::]"):
        return "means every interface, which nobody can connect to; write the machine's own address"
    return None


def split_address(address: str) -> tuple[str, int]:
    """Host and port; IPv6 hosts lose their brackets.

    >>> split_address("[::1]:2222")
    ('::1', 2222)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`.

    >>> join_address("fd00::1", 2222)
    '[fd00::1]:2222'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve_address(
    address: str, lookup: Lookup = socket.getaddrinfo
) -> tuple[socket.AddressFamily, tuple]:
    """The family and socket address that an address has on this machine, IPv4 first; OSError if it has none.

    >>> resolve_address("127.0.0.1:2222")[1]
    ('127.0.0.1', 2222)
    """
    found = lookup(*split_address(address), type=socket.SOCK_STREAM)
    family, _, _, _, sockaddr = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, sockaddr


def check_addresses(
    addresses: Mapping[str, str], own: str | None, source: str, lookup: Lookup = socket.getaddrinfo
) -> None:
    """Checks what one machine alone can know of the addresses of several tasks.

    Args:
      addresses: task -> address.
      own: the task that is to listen on this machine; None if none is.
      source: where the addresses came from, for messages.
      lookup: finds a name's address; default `socket.getaddrinfo`.

    Raises:
      ValueError: `own` cannot listen at its address, two tasks have one machine and port, or some addresses
        are loopback and others are not.
      UnresolvedAddress: a ValueError that names the tasks whose host has no address.

    >>> check_addresses({"worker:0": "127.0.0.1:2222", "worker:1": "127.0.0.1:2223"}, None, "example")
    """
    where: dict[str, tuple] = {}
    reasons: dict[str, str] = {}
    for task, address in addresses.items():
        try:
            family, where[task] = resolve_address(address, lookup)
        except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot even be encoded
            reasons[task] = f"{address} does not resolve: {error}"
            continue
        if task == own:
            _check_own(task, address, family, where[task], source)
    if reasons:
        raise UnresolvedAddress(
            f"{source}: on this machine, {'; '.join(f'{task} at {why}' for task, why in reasons.items())}. "
            "Correct the name, add it to DNS or /etc/hosts, or write the IP address",
            reasons,
        )
    _check_apart(addresses, where, source)


def bind_problem(task: str, address: str, error: OSError) -> str:
    """What a failed bind to a task's address means and what to do about it.

    >>> bind_problem("worker:0", "a:80", OSError(errno.EACCES, "Permission denied"))
    'this process is worker:0: the port of a:80 needs privileges; choose one above 1023'
    """
    if error.errno == errno.EADDRINUSE:
        fault = (
            f"the port of {address} is already in use on this machine, by a left-over process, another "
            "cluster "
            f"or a second process started as {task}; end that one, or choose another port"
        )
    elif error.errno == errno.EACCES:
        fault = f"the port of {address} needs privileges; choose one above 1023"
    else:
        fault = (
            f"{address} is not an address of this machine ({socket.gethostname()}: {error.strerror}); "
            "check the task's index and the order of the hosts"
        )
    return f"this process is {task}: {fault}"


def is_here(address: str) -> bool:
    """Whether host:port is of this host: whether a socket can be bound to one of its IP addresses.

    >>> is_here("127.0.0.1:1"), is_here("192.0.2.1:1")  # the second is reserved for documentation
    (True, False)
    """
    try:
        family, sockaddr = resolve_address(address)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((sockaddr[0], 0))
        return True
    except (OSError, UnicodeError):
        return False


def nobody_here(file: str, addresses: Mapping[str, str]) -> str:
    """What is wrong where no task of a cluster file has an address of this host.

    >>> nobody_here("c.yaml", {"worker:0": "a:80"}).partition(";")[0]
    '--cluster c.yaml: expected a task with an address of this host, received worker:0 a:80'
    """
    listing = ", ".join(f"{task} {address}" for task, address in addresses.items())
    return (
        f"--cluster {file}: expected a task with an address of this host, received {listing}; "
        f"run it there, or say which task this is: --task {next(iter(addresses))}"
    )


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that can be bound now, at random, so that clusters that start together rarely choose the same.

    >>> len(set(free_ports(3)))
    3
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports: list[int] = []
    for port in random.SystemRandom().sample(_LOCAL_PORTS, len(_LOCAL_PORTS)):
        if len(ports) == count:
            return ports
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise ValueError(
                    f"host {host!r}: {error.strerror}; give an IP address of this machine"
                ) from error
        ports.append(port)
    raise ValueError(
        f"host {host!r}: fewer than {count} free ports from {_LOCAL_PORTS[0]} to {_LOCAL_PORTS[-1]}"
    )


def answers(address: str, timeout: float) -> bool:
    """Whether a gRPC server, such as TensorFlow's, answers at an address.

    A stopped process does not: Linux accepts the connection in its name, but nobody speaks.

    Args:
      address: `host:port`.
      timeout: seconds for the connection and the answer together; a name server may take its own time before.

    Returns:
      False where nobody listens, the name has no address, or the answer is none of a gRPC server or too late.

    >>> answers(f"127.0.0.1:{free_ports(1)[0]}", timeout=1)
    False
    """
    greeting = b""
    try:
        family, sockaddr = resolve_address(address)
        limit = time.monotonic() + timeout
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(sockaddr)
            connection.sendall(_CLIENT_PREFACE + _EMPTY_SETTINGS)
            while len(greeting) < len(_EMPTY_SETTINGS):
                connection.settimeout(max(limit - time.monotonic(), 0.001))
                piece = connection.recv(len(_EMPTY_SETTINGS) - len(greeting))
                if not piece:
                    return False
                greeting += piece
    except OSError:
        return False
    # A server speaks first of its settings, which it owes to every client.
    return greeting[3:5] == bytes([_SETTINGS, 0]) and not any(greeting[5:])


class Presence:
    """How long a gRPC server, looked at again and again, has been away.

    Args:
      address: `host:port`.
      look: whether a server answers at an address within so many seconds; default `answers`.
      clock: seconds that only grow; default `time.monotonic`.

    Attributes:
      seen: whether it ever answered.

    >>> presence = Presence("a:80", look=lambda address, timeout: True)
    >>> presence.away(), presence.seen
    (None, True)
    """

    def __init__(
        self,
        address: str,
        look: Callable[[str, float], bool] = answers,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.address, self._look, self._clock = address, look, clock
        self.seen = False
        self._since: float | None = clock()

    def away(self) -> float | None:
        """Looks now; None where it answers, else the seconds since the first look in vain, or since all began where it never did."""
        if self._look(self.address, LOOK_S):
            self.seen, self._since = True, None
            return None
        if self._since is None:
            self._since = self._clock()
        return self._clock() - self._since


def _check_own(
    task: str, address: str, family: socket.AddressFamily, sockaddr: tuple, source: str
) -> None:
    everywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
    # The port on every interface, for there TensorFlow listens, whatever the address says. Bound, not
    # listened on.
    for host, port in ((sockaddr[0], 0), (everywhere, sockaddr[1])):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                kind = PortTaken if error.errno == errno.EADDRINUSE else ValueError
                raise kind(f"{source}: {bind_problem(task, address, error)}") from error


def _check_apart(addresses: Mapping[str, str], where: Mapping[str, tuple], source: str) -> None:
    loopback = [
        task for task, sockaddr in where.items() if ipaddress.ip_address(sockaddr[0]).is_loopback
    ]
    if loopback and len(loopback) < len(where):
        names = ", ".join(f"{task} at {addresses[task]} ({where[task][0]})" for task in loopback)
        raise ValueError(
            f"{source}: {names} is loopback, other tasks are not: machines elsewhere cannot connect to it; "
            "write a real address, or remove the name from the 127.* lines of /etc/hosts"
        )
    owners: dict[tuple, str] = {}
    for task, sockaddr in where.items():
        # TensorFlow listens on all interfaces, so 127.0.0.1 and 127.0.0.2 are one machine with one set of
        # ports.
        other = owners.setdefault(("loopback" if loopback else sockaddr[0], sockaddr[1]), task)
        if other != task:
            raise ValueError(
                f"{source}: {other} at {addresses[other]} and {task} at {addresses[task]} are the same "
                "machine "
                f"and port ({sockaddr[0]}:{sockaddr[1]}); give each task its own port"
            )
