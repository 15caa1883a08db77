"""Address utilities: resolve and check `host:port`, find free ports, probe gRPC servers.

A probe tells whether a gRPC server answers, not which service it offers.
"""

import errno
import ipaddress
import random
import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.runtime.launch_protocol import TRANSIENT_CODE

Lookup = Callable[..., list]  # of the form of socket.getaddrinfo

# Below Linux's range for outgoing connections (32768 to 60999), so that no connection takes a port
# between our choice and TensorFlow's start; also below Kubernetes' node ports (30000 to 32767).
# Above the ports that resolvers.py derives from the number of a job, which must be free then.
_LOCAL_PORTS = range(22400, 30000)

PROBE_S = 3.0  # timeout of a probe; a server that has CPU time answers in a millisecond

# HTTP/2 (RFC 9113, 3.4): a client sends its preface and its settings. A frame's header is the
# length of its payload (3 bytes), its type, its flags and its stream (4 bytes), which is 0 for the
# connection itself.
_CLIENT_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = 4
_EMPTY_SETTINGS = bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])


class PortTaken(ValueError):
    """Error for a port that another process uses.

    Another port, or another start later, may help.
    """

    exit_code = TRANSIENT_CODE


class UnresolvedAddress(ValueError):
    """Error for host names without an address on this machine.

    A later attempt may succeed: a pod's name appears in DNS when the pod does.

    Args:
        message: Message for the user.
        reasons: Mapping from each task to the reason why its host has no address.
    """

    def __init__(self, message: str, reasons: Mapping[str, str]):
        super().__init__(message)
        self.reasons = reasons


def address_problem(address: Any) -> str | None:
    """Return what is wrong with an address, as the rest of a sentence, or None.

    Example:
        >>> address_problem("10.0.0.1:99999")
        'has the invalid port 99999; use 1 to 65535'
    """
    match = isinstance(address, str) and re.fullmatch(
        r"(\[[\da-fA-F:.%\w]+\]|[^\[\]:/\s]+):(\d+)", address
    )
    if not match:
        return "is not host:port; write it as 10.0.0.1:2222, name:2222 or [fd00::1]:2222"
    if not 0 < int(match[2]) < 65536:
        return f"has the invalid port {match[2]}; use 1 to 65535"
    if match[1] in ("0.0.0.0", "[::]"):
        return "means every interface, to which no task can connect; write the machine's address"
    return None


def split_address(address: str) -> tuple[str, int]:
    """Split an address into host and port; an IPv6 host loses its brackets.

    Example:
        >>> split_address("[::1]:2222")
        ('::1', 2222)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Join host and port to an address; the inverse of `split_address`.

    Example:
        >>> join_address("fd00::1", 2222)
        '[fd00::1]:2222'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve_address(
    address: str, lookup: Lookup = socket.getaddrinfo
) -> tuple[socket.AddressFamily, tuple]:
    """Return the family and socket address of an address on this machine, IPv4 first.

    Raises:
        OSError: If the address does not resolve.

    Example:
        >>> resolve_address("127.0.0.1:2222")[1]
        ('127.0.0.1', 2222)
    """
    results = lookup(*split_address(address), type=socket.SOCK_STREAM)
    family, _, _, _, sockaddr = min(results, key=lambda entry: entry[0] != socket.AF_INET)
    return family, sockaddr


def check_addresses(
    addresses: Mapping[str, str], own: str | None, source: str, lookup: Lookup = socket.getaddrinfo
) -> None:
    """Check the addresses of several tasks as far as one machine alone can.

    Args:
        addresses: Mapping from task to address.
        own: Task that listens on this machine, or None.
        source: Origin of the addresses, for messages.
        lookup: Function that resolves a name, default `socket.getaddrinfo`.

    Raises:
        ValueError: If `own` cannot listen at its address, if two tasks have the same machine and
            port, or if some addresses are loopback and others are not.
        UnresolvedAddress: If hosts have no address. It is a ValueError that names their tasks.

    Example:
        >>> addresses = {"worker:0": "127.0.0.1:2222", "worker:1": "127.0.0.1:2223"}
        >>> check_addresses(addresses, None, "example")
    """
    resolved: dict[str, tuple] = {}
    reasons: dict[str, str] = {}
    for task, address in addresses.items():
        try:
            family, resolved[task] = resolve_address(address, lookup)
        except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot even be encoded
            reasons[task] = f"{address} does not resolve: {error}"
            continue
        if task == own:
            _check_own(task, address, family, resolved[task], source)
    if reasons:
        raise UnresolvedAddress(
            f"{source}: on this machine, "
            f"{'; '.join(f'{task} at {reason}' for task, reason in reasons.items())}. Correct the "
            "name, add it to DNS or /etc/hosts, or write the IP address",
            reasons,
        )
    _check_distinct(addresses, resolved, source)


def bind_problem(task: str, address: str, error: OSError) -> str:
    """Return what a failed bind to a task's address means and how to fix it.

    Example:
        >>> bind_problem("worker:0", "a:80", OSError(errno.EACCES, "Permission denied"))
        'this process is worker:0: the port of a:80 needs privileges; choose one above 1023'
    """
    if error.errno == errno.EADDRINUSE:
        fault = (
            f"the port of {address} is already in use on this machine, by a left-over process, "
            f"another cluster or a second process started as {task}; end that process, or choose "
            "another port"
        )
    elif error.errno == errno.EACCES:
        fault = f"the port of {address} needs privileges; choose one above 1023"
    else:
        fault = (
            f"{address} is not an address of this machine ({socket.gethostname()}: "
            f"{error.strerror}); check the task's index and the order of the hosts"
        )
    return f"this process is {task}: {fault}"


def is_here(address: str) -> bool:
    """Return whether `host:port` belongs to this host: a socket can bind to its IP address.

    Example:
        >>> is_here("127.0.0.1:1"), is_here("192.0.2.1:1")  # the second is for documentation
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
    """Return the error message for a cluster file without a task on this host.

    Example:
        >>> nobody_here("c.yaml", {"worker:0": "a:80"}).partition(";")[0]
        '--cluster c.yaml: expected a task with an address of this host, received worker:0 a:80'
    """
    listing = ", ".join(f"{task} {address}" for task, address in addresses.items())
    return (
        f"--cluster {file}: expected a task with an address of this host, received {listing}; "
        f"run it there, or say which task this is: --task {next(iter(addresses))}"
    )


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return `count` free ports, chosen at random.

    The random choice makes it unlikely that clusters that start together choose the same ports.

    Example:
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
    """Return whether a gRPC server, such as TensorFlow's, answers at an address.

    A stopped process does not answer: Linux accepts the connection in its name, but no data
    arrives.

    Args:
        address: Address as `host:port`.
        timeout: Seconds for the connection and the answer together. Name resolution may take
            additional time before that.

    Returns:
        False if nothing listens, if the name does not resolve, or if the answer is late or does
        not come from a gRPC server.

    Example:
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
    # The first frame of a server is its settings, which it must send to every client.
    return greeting[3:5] == bytes([_SETTINGS, 0]) and not any(greeting[5:])


class Presence:
    """A repeated probe of a gRPC server that measures how long the server is absent.

    Args:
        address: Address as `host:port`.
        probe: Probe that takes an address and a timeout in seconds, default `answers`.
        clock: Monotonic clock in seconds, default `time.monotonic`.

    Attributes:
        seen: Whether the server has ever answered.

    Example:
        >>> presence = Presence("a:80", probe=lambda address, timeout: True)
        >>> presence.absent_seconds(), presence.seen
        (None, True)
    """

    def __init__(
        self,
        address: str,
        probe: Callable[[str, float], bool] = answers,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.address = address
        self._probe = probe
        self._clock = clock
        self.seen = False
        self._since: float | None = clock()

    def absent_seconds(self) -> float | None:
        """Probe the server now and return for how many seconds it is absent.

        Returns:
            None if the server answers; else the seconds since the first failed probe, or since the
            construction of this object if the server has never answered.
        """
        if self._probe(self.address, PROBE_S):
            self.seen = True
            self._since = None
            return None
        if self._since is None:
            self._since = self._clock()
        return self._clock() - self._since


def _check_own(
    task: str, address: str, family: socket.AddressFamily, sockaddr: tuple, source: str
) -> None:
    any_address = "::" if family == socket.AF_INET6 else "0.0.0.0"
    # Check the port on every interface, because TensorFlow listens there whatever the address says.
    # The socket is bound but does not listen.
    for host, port in ((sockaddr[0], 0), (any_address, sockaddr[1])):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                kind = PortTaken if error.errno == errno.EADDRINUSE else ValueError
                raise kind(f"{source}: {bind_problem(task, address, error)}") from error


def _check_distinct(
    addresses: Mapping[str, str], resolved: Mapping[str, tuple], source: str
) -> None:
    loopback = [
        task for task, sockaddr in resolved.items() if ipaddress.ip_address(sockaddr[0]).is_loopback
    ]
    if loopback and len(loopback) < len(resolved):
        names = ", ".join(f"{task} at {addresses[task]} ({resolved[task][0]})" for task in loopback)
        raise ValueError(
            f"{source}: {names} is a loopback address, but other tasks have other addresses: "
            "other machines cannot connect to it; write the machine's address, or remove the name "
            "from the 127.* lines of /etc/hosts"
        )
    owners: dict[tuple, str] = {}
    for task, sockaddr in resolved.items():
        # TensorFlow listens on all interfaces, so 127.0.0.1 and 127.0.0.2 are one machine with one
        # set of ports.
        other = owners.setdefault(("loopback" if loopback else sockaddr[0], sockaddr[1]), task)
        if other != task:
            raise ValueError(
                f"{source}: {other} at {addresses[other]} and {task} at {addresses[task]} are the "
                f"same machine and port ({sockaddr[0]}:{sockaddr[1]}); give each task its own port"
            )
