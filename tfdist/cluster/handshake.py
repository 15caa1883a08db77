"""Handshake between two tasks: messages and the comparison of clusters and versions.

Each task sends one JSON line over a socket. See `preflight` for the wait for all tasks.
"""

import hashlib
import hmac
import json
import platform
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfdist.cluster.spec import ClusterSpec
from tfdist.runtime.formatting import printable
from tfdist.runtime.installed_packages import version_of
from tfdist.runtime.launch_protocol import CONFIGURATION_CODE, TASK_SECRET, TRANSIENT_CODE

LINE_BYTES = 8192
MAX_NAMED = 16  # maximum number of task names in one message
REASON_CHARACTERS = 200  # maximum length of a reason that is passed on to another task
SIGNATURE = "signature"
PACKAGES = ("tensorflow", "keras", "tfdist")


class ConfigurationError(ValueError):
    """Error for tasks whose configurations contradict each other; a restart cannot help."""

    exit_code = CONFIGURATION_CODE


class Unsigned(ValueError):
    """Error for a message of a process that does not have the secret of this launch."""


class PeersAbsent(TimeoutError):
    """Error for tasks that did not appear in time; a restart may help."""

    exit_code = TRANSIENT_CODE


def installed_versions() -> str:
    """Return the versions that must be equal on all tasks, from the packages' metadata.

    Example:
        >>> "python 3." in installed_versions()
        True
    """
    python = ".".join(platform.python_version_tuple()[:2])
    packages = (f"{package} {version_of(package) or 'not installed'}" for package in PACKAGES)
    return ", ".join([f"python {python}", *packages])


def hello_message(
    spec: ClusterSpec, task: str, versions: str, attempt: str, nonce: str
) -> dict[str, Any]:
    """Return the message with which a process identifies itself.

    Args:
        spec: Cluster of the process.
        task: Name of its task, such as "worker:1".
        versions: Versions as `installed_versions` returns them.
        attempt: Number of the start of the cluster.
        nonce: Word that is unique to this process.
    """
    return {
        "tfdist": 1,
        "task": task,
        "cluster": fingerprint(spec),
        "versions": versions,
        "attempt": attempt,
        "nonce": nonce,
    }


def fingerprint(spec: ClusterSpec) -> str:
    """Return a text that is equal for equal clusters only.

    It has the number of listening tasks and a hash of their names and addresses.

    Example:
        >>> one = fingerprint(ClusterSpec({"worker": ("a:1", "b:1")}))
        >>> one == fingerprint(ClusterSpec({"worker": ("b:1", "a:1")}))
        False
    """
    tasks = [[str(task), task.address] for task in spec.listening_tasks]
    return f"{len(tasks)} tasks, {hashlib.sha256(json.dumps(tasks).encode()).hexdigest()[:12]}"


def compare(theirs: Mapping[str, Any], peer: str, own: Mapping[str, Any], source: str) -> None:
    """Raise ConfigurationError if another process has a different cluster or other versions.

    Args:
        theirs: Hello message of the other process.
        peer: Name of the other process in messages, such as "worker:1 at 10.0.0.2:2222".
        own: Hello message of this process.
        source: Origin of this process's cluster, for messages.

    Raises:
        ConfigurationError: If the hello messages differ.
    """
    if theirs.get("cluster") != own["cluster"]:
        raise ConfigurationError(
            f"{peer} has a different cluster spec: {short(theirs.get('cluster'))}; {own['task']} "
            f"has {own['cluster']} from {source}; use the same file in all tasks"
        )
    if theirs.get("versions") != own["versions"]:
        raise ConfigurationError(
            f"{peer} has different versions: {short(theirs.get('versions'))}; {own['task']} has "
            f"{own['versions']}; install the same versions on all machines"
        )


def claimed_twice(task: Any, this_task: str, peer: str) -> ConfigurationError:
    """Return the error for two processes that claim one task; `peer` is one of them."""
    return ConfigurationError(
        f"two processes claim to be {short(task)}, {this_task} saw one as {peer}; start each task "
        "once, and after a failure start all of them again"
    )


def another_task(received: Any, this_task: str, peer: str) -> ConfigurationError:
    r"""Return the error for an address at which another task than expected listens.

    Example:
        >>> print(another_task("worker:2\x1b[2J", "worker:0", "worker:1 at b:1"))
        ... # doctest: +ELLIPSIS
        worker:0 expected worker:1 at b:1 and found worker:2?[2J: the address belongs ...
    """
    return ConfigurationError(
        f"{this_task} expected {peer} and found {short(received)}: the address belongs to another "
        "machine; check the hosts' names and addresses"
    )


def absent(missing: Mapping[str, str], spec: ClusterSpec) -> str:
    """Return a list of the absent tasks by name, each with its address and the reason.

    Example:
        >>> absent({"worker:1": "refused"}, ClusterSpec({"worker": ("a:1", "b:1")}))
        'worker:1 at b:1 (refused)'
    """
    tasks = {str(task): task.address for task in spec.listening_tasks}
    return "; ".join(f"{name} at {tasks[name]} ({missing[name]})" for name in some(missing))


def absent_too_long(
    missing: Mapping[str, str], spec: ClusterSpec, seconds: float, count: int = 0
) -> str:
    """Return the end of the error message, after a colon, for tasks absent until a timeout.

    Args:
        missing: Reasons by task.
        spec: Cluster of the tasks.
        seconds: The timeout.
        count: Number of absent tasks, if it is larger than that of the reasons.
    """
    tasks = len(spec.listening_tasks)
    return (
        f"after {seconds:g} s, {max(len(missing), count)} of {tasks} tasks are absent: "
        f"{absent(missing, spec)}. Start them with this cluster, and let this machine connect to "
        "them"
    )


def some(names: Iterable[str]) -> Sequence[str]:
    """Return the first `MAX_NAMED` names in sorted order."""
    return sorted(names)[:MAX_NAMED]


def short(value: Any) -> str:
    r"""Return a value received from the network as text of bounded length for a terminal.

    Example:
        >>> short("worker:1\x1b[2J")
        'worker:1?[2J'
    """
    return printable(str(value)[:300])


def excerpt(missing: Mapping[str, str]) -> dict[str, str]:
    """Return as many of the reasons, by task, as fit in a message beside its other fields.

    Example:
        >>> excerpt({"worker:1": "refused"}), len(excerpt({f"worker:{i}": "" for i in range(99)}))
        ({'worker:1': 'refused'}, 16)
    """
    chosen: dict[str, str] = {}
    for name in some(missing):
        chosen[name] = missing[name][:REASON_CHARACTERS]
        if len(json.dumps(chosen)) > LINE_BYTES // 2:
            del chosen[name]
            break
    return chosen


def send(connection: socket.socket, message: Mapping[str, Any], secret: bytes = b"") -> None:
    """Send a message as one line, signed if there is a secret."""
    signed = {**message, SIGNATURE: signature(message, secret)} if secret else message
    connection.sendall(json.dumps(signed).encode() + b"\n")


def signature(message: Mapping[str, Any], secret: bytes) -> str:
    """Return the message authentication code of a message.

    Example:
        >>> signature({"a": 1, "b": 2}, b"key") == signature({"b": 2, "a": 1}, b"key")
        True
    """
    text = json.dumps(message, sort_keys=True)
    return hmac.digest(secret, text.encode(), hashlib.sha256).hex()


def check_signature(message: dict[str, Any], secret: bytes) -> None:
    """Remove the signature of a message.

    Args:
        message: Message as it was received.
        secret: Secret of this side; b"" if it has none.

    Raises:
        Unsigned: If the other side does not have the same secret.
    """
    received = message.pop(SIGNATURE, None)
    if received is None and not secret:
        return
    if (
        not secret
        or not isinstance(received, str)
        or not hmac.compare_digest(received.encode(), signature(message, secret).encode())
    ):
        raise Unsigned(
            f"a task listens there, but it does not have the {TASK_SECRET} of this one: it belongs "
            "to another launch, or its launcher has another TFDIST_TOKEN"
        )


def receive(
    connection: socket.socket, limit: float, max_bytes: int = LINE_BYTES, service: str = "preflight"
) -> dict[str, Any]:
    """Receive one JSON line from a tfdist process before a deadline.

    Args:
        connection: Socket to read from.
        limit: Deadline on the clock of `time.monotonic()`.
        max_bytes: Maximum size of the line in bytes.
        service: Name of the expected service, for the message.

    Raises:
        ValueError: If the line is late, too long, or from another program.
        OSError: If the connection ended.
    """
    line = b""
    try:
        while not line.endswith(b"\n"):
            connection.settimeout(max(limit - time.monotonic(), 0.001))
            piece = connection.recv(min(max_bytes, 65536))
            line += piece
            if not piece or len(line) > max_bytes:
                raise ValueError("closed" if not piece else "too long a line")
            # Not JSON: probably TensorFlow of a task that has passed the preflight already. Do not
            # wait for the end of its line.
            if not line.startswith(b"{"):
                raise ValueError("not of tfdist")
        message = json.loads(line)
        if not isinstance(message, dict) or message.get("tfdist") != 1:
            raise ValueError("not of tfdist")
    except (TimeoutError, ValueError, RecursionError) as error:
        raise ValueError(
            f"a process listens there, but is no tfdist {service}: it sent {line[:40]!r} ({error})"
        ) from error
    return message
