"""kubectl: runs one command within a bound, and turns its errors into one sentence."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from tfdist.launch.engines.fleet import NoRoom

COMMAND_S = 60.0  # for kubectl to answer
# Remedies by words of kubectl's errors; the first that fits is taken.
REMEDIES = {
    "no matches for kind": "the cluster lacks the controller of this kind; take --kind job, which "
    "every cluster has",
    "doesn't have a resource type": "the cluster lacks the controller of this kind",
    "exceeded quota": "the namespace has no quota left; ask for less, or end other jobs",
    "forbidden": "your account may not do this in the namespace; ask its administrator",
    "unauthorized": "log in to the cluster again",
    "namespaces": "make the namespace, or name another one by --namespace",
    "already exists": "name the job otherwise by --job-name, or `tfdist cancel` the former one",
    "field is immutable": "a job of this name exists; `tfdist cancel` it, or take another "
    "--job-name",
    "not found": "`tfdist jobs` lists the jobs that are not over",
}
NO_ANSWER = ("connection refused", "unable to connect", "i/o timeout", "no such host")
FIRST_WORDS = ("Error from server", "error:", "Unable to connect", "The connection to")


class KubectlError(ValueError):
    """kubectl has refused a command.

    Args:
        message: Words of kubectl, and the remedy.
        output: Standard output of kubectl, default "".
    """

    def __init__(self, message: str, output: str = ""):
        super().__init__(message)
        self.output = output


def run(*words: str, text: str | None = None) -> str:
    """Run kubectl; return its output.

    Args:
        *words: Its arguments.
        text: Its input, or None.

    Raises:
        ValueError: If it is not installed.
        KubectlError: If it refuses the command.
        NoRoom: If the cluster does not answer.
    """
    try:
        result = subprocess.run(
            ["kubectl", *words],
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_S,
        )
    except FileNotFoundError as error:
        raise ValueError(
            "--on kubernetes: expected `kubectl` in PATH, found none; install it, and give it a "
            "context of the cluster"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NoRoom(
            f"Kubernetes: kubectl did not answer within {COMMAND_S:g} s; look at `kubectl "
            "cluster-info`"
        ) from error
    if result.returncode:
        verb = next((word for word in words if not word.startswith("--")), "")
        refused = refusal(verb, result.stderr or result.stdout)
        if isinstance(refused, KubectlError):
            refused.output = result.stdout
        raise refused
    return result.stdout


def get(*words: str, namespace: Sequence[str] = ()) -> Any:
    """Return the object that `kubectl get` finds; see `run`.

    Args:
        *words: Arguments after `get`.
        namespace: Flags that name the namespace, default that of the context.

    Returns:
        The object; {} if there is none and the arguments allow that.
    """
    return json.loads(run(*namespace, "get", *words, "--output=json") or "{}")


def create(manifest: str, *flags: str) -> None:
    """Create all objects of a manifest, or none; see `run`.

    Args:
        manifest: Documents in YAML.
        *flags: Flags that name the namespace.
    """
    try:
        run("create", *flags, "--filename=-", "--output=name", text=manifest)
    except KubectlError as error:
        if made := error.output.split():
            run("delete", *flags, "--ignore-not-found", "--wait=false", *made)
        raise


def refusal(words: str, text: str) -> KubectlError | NoRoom:
    """Return the error for what kubectl has written.

    Args:
        words: The command, for the message.
        text: Its output.

    Example:
        >>> refusal("create", 'Error from server (AlreadyExists): jobs "a" already exists')
        ... # doctest: +ELLIPSIS
        KubectlError('Kubernetes: create: jobs "a" already exists; name the job otherwise ...
    """
    lines = [line for line in text.strip().splitlines() if line.strip()]
    sentence = next((line for line in lines if line.startswith(FIRST_WORDS)), "\n".join(lines[-1:]))
    remedy = next((remedy for part, remedy in REMEDIES.items() if part in sentence.lower()), "")
    if sentence.startswith("Error from server"):
        sentence = sentence.partition(": ")[2]
    sentence = sentence.removeprefix("error: ").removeprefix('error when creating "STDIN": ')
    message = f"Kubernetes: {words}: {sentence or 'ended without a message'}"
    if any(part in text.lower() for part in NO_ANSWER):
        return NoRoom(f"{message}; look at `kubectl cluster-info`")
    return KubectlError(f"{message}; {remedy}" if remedy else message)
