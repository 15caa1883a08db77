"""Two tasks' badges, each one JSON line on a socket, become agreement or a named fault; nobody waits for absent tasks here."""

import hashlib
import importlib.metadata
import json
import platform
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfdist.cluster.spec import ClusterSpec
from tfdist.runtime.launch_protocol import CONFIGURATION_CODE, TRANSIENT_CODE

LINE_BYTES = 8192
NAMED = 16  # names of tasks in one message at most
PACKAGES = ("tensorflow", "keras", "tfdist")


class ConfigurationError(ValueError):
    """The tasks do not fit together, and starting them again will not help."""

    exit_code = CONFIGURATION_CODE


class PeersAbsent(TimeoutError):
    """Some tasks did not come in time; starting again may help."""

    exit_code = TRANSIENT_CODE


def installed_versions() -> str:
    """The versions that must be equal on all tasks, from the packages' metadata.

    >>> "python 3." in installed_versions()
    True
    """
    found = [f"python {'.'.join(platform.python_version_tuple()[:2])}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def badge(spec: ClusterSpec, task: str, versions: str, attempt: str, nonce: str) -> dict[str, Any]:
    """What a process says of itself.

    Args:
      spec: its cluster.
      task: which of its tasks it is, "worker:1".
      versions: as `installed_versions`.
      attempt: which start of the cluster this is.
      nonce: a word that no other process has.
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
    """What is equal for equal clusters only: the number of tasks that listen, and a hash of their names and addresses.

    >>> fingerprint(ClusterSpec({"worker": ("a:1", "b:1")})) == fingerprint(ClusterSpec({"worker": ("b:1", "a:1")}))
    False
    """
    tasks = [[str(task), task.address] for task in spec.listening_tasks]
    return f"{len(tasks)} tasks, {hashlib.sha256(json.dumps(tasks).encode()).hexdigest()[:12]}"


def compare(theirs: Mapping[str, Any], who: str, own: Mapping[str, Any], source: str) -> None:
    """Makes sure that another process has our cluster and our versions.

    Args:
      theirs: its badge.
      who: what to call it, "worker:1 at 10.0.0.2:2222".
      own: our badge.
      source: where our cluster came from.

    Raises:
      ConfigurationError: they differ.
    """
    if theirs.get("cluster") != own["cluster"]:
        raise ConfigurationError(
            f"{who} has a different cluster spec: {short(theirs.get('cluster'))}; {own['task']} has "
            f"{own['cluster']} from {source}; give all of them the same file"
        )
    if theirs.get("versions") != own["versions"]:
        raise ConfigurationError(
            f"{who} has different versions: {short(theirs.get('versions'))}; {own['task']} has "
            f"{own['versions']}; install the same on all machines"
        )


def claimed_twice(task: Any, me: str, who: str) -> ConfigurationError:
    """The error where two processes say that they are one task; `me` saw one of them as `who`."""
    return ConfigurationError(
        f"two processes claim to be {task}, {me} saw one as {who}; start each "
        "task once, and after a failure all of them again"
    )


def another_task(found: Any, me: str, who: str) -> ConfigurationError:
    """The error where the task at an address is not the one that the cluster has there."""
    return ConfigurationError(
        f"{me} expected {who} and found {found}: the address leads to another "
        "machine; check the hosts' names and addresses"
    )


def absent(missing: Mapping[str, str], spec: ClusterSpec) -> str:
    """The tasks that did not come, each with its address and the reason, by name.

    >>> absent({"worker:1": "refused"}, ClusterSpec({"worker": ("a:1", "b:1")}))
    'worker:1 at b:1 (refused)'
    """
    tasks = {str(task): task.address for task in spec.listening_tasks}
    return "; ".join(f"{name} at {tasks[name]} ({missing[name]})" for name in some(missing))


def absent_too_long(missing: Mapping[str, str], spec: ClusterSpec, seconds: float) -> str:
    """The sentence for tasks that did not come within a bound, to follow a colon."""
    return (
        f"after {seconds:g} s, {len(missing)} of {len(spec.listening_tasks)} tasks "
        f"are absent: {absent(missing, spec)}. Start them with this cluster, and let this machine connect to them"
    )


def some(names: Iterable[str]) -> Sequence[str]:
    """The first few names, in order."""
    return sorted(names)[:NAMED]


def short(value: Any) -> str:
    """What the network sent, as text of a bounded length."""
    return str(value)[:300]


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Sends a message as one line."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(
    connection: socket.socket, limit: float, most: int = LINE_BYTES, what: str = "preflight"
) -> dict[str, Any]:
    """One JSON line of a tfdist process, complete before `limit` on the monotonic clock.

    Args:
      connection: where from.
      limit: `time.monotonic()` at which it must be here.
      most: bytes of the line.
      what: what was expected to listen there, for the message.

    Raises:
      ValueError: it is too late, too long, or of another program.
      OSError: the connection ended.
    """
    line = b""
    try:
        while not line.endswith(b"\n"):
            connection.settimeout(max(limit - time.monotonic(), 0.001))
            piece = connection.recv(min(most, 65536))
            line += piece
            if not piece or len(line) > most:
                raise ValueError("closed" if not piece else "too long a line")
            if not line.startswith(
                b"{"
            ):  # TensorFlow of a task that may go already; closing would wait for the end of its line
                raise ValueError("not of tfdist")
        message = json.loads(line)
        if not isinstance(message, dict) or message.get("tfdist") != 1:
            raise ValueError("not of tfdist")
    except (TimeoutError, ValueError, RecursionError) as error:
        raise ValueError(
            f"a process listens there, but is no tfdist {what}: it sent {line[:40]!r} ({error})"
        ) from error
    return message
