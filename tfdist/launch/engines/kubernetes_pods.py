"""Pods of a job on Kubernetes: where they run, why they wait or fail, and their output."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.launch.engines import kubectl

POLL_S = 2.0
DRAIN_S = 10.0  # for the output of pods to end with their job
# Why a container waits, or has ended, and what to do.
CONTAINERS = {
    "ImagePullBackOff": "check --image, and --pull-secret for a private registry",
    "ErrImagePull": "check --image, and --pull-secret for a private registry",
    "InvalidImageName": "check --image",
    "CreateContainerConfigError": "check the names of --volume and --pull-secret",
    "CreateContainerError": "the image must have the `tfdist` command in PATH",
    "ContainerCannotRun": "the image must have the `tfdist` command in PATH",
    "StartError": "the image must have the `tfdist` command in PATH",
    "OOMKilled": "ask for more --memory",
}
# What the scheduler says about nodes, and what to do.
NODES = {
    "persistentvolumeclaim": "check --volume; `kubectl get pvc` lists the claims",
    "taint": "the nodes are not ready, or kept for others; ask for less, or ask the administrator",
}
NO_NODE = "ask for less (--cpus, --memory, --gpus-per-task), or wait"

Pod = dict[str, Any]


def nodes_of(pods: Sequence[Pod]) -> list[str]:
    """Return the nodes of the pods that have one and are not over.

    Args:
        pods: Pods, as the API returns them.
    """
    return sorted(
        {
            pod["spec"]["nodeName"]
            for pod in pods
            if "nodeName" in pod["spec"] and _phase(pod) not in ("Succeeded", "Failed")
        }
    )


def has_begun(pod: Pod) -> bool:
    """Return whether a pod has output."""
    states = [status.get("state", {}) for status in pod["status"].get("containerStatuses", ())]
    return any("running" in state or "terminated" in state for state in states)


def problems(pods: Sequence[Pod]) -> list[str]:
    """Return a line for each reason why pods cannot start or were ended, with the remedy.

    Args:
        pods: Pods, as the API returns them.
    """
    names: dict[str, list[str]] = {}
    for pod in pods:
        for problem in _problems_of(pod):
            names.setdefault(problem, []).append(pod["metadata"]["name"])
    lines = []
    for problem, found in names.items():
        others = f" and {len(found) - 1} other{'s' if len(found) > 2 else ''}"
        lines.append(f"pod {found[0]}{others if len(found) > 1 else ''}: {problem}")
    return lines


def why_none(names: Sequence[str], events: Sequence[dict[str, Any]]) -> str | None:
    """Return why a job has no pods, from its newest warning; None without one.

    Args:
        names: Names of the job and of the Jobs that its controller makes.
        events: Warnings of its namespace.
    """
    warnings = [event for event in events if event["involvedObject"]["name"] in names]
    if not warnings:
        return None
    message = warnings[-1]["message"].removeprefix("Error creating: ")
    remedy = next((text for part, text in kubectl.REMEDIES.items() if part in message), "")
    return f"{message}; {remedy}" if remedy else message


def follow(
    pods: Callable[[], Sequence[Pod]],
    over: Callable[[], bool],
    namespace: Sequence[str],
    show: Callable[[str], Any],
    tell: Callable[[str], Any],
) -> None:
    """Show the output of all pods, also of those that begin later, until their job is over.

    Args:
        pods: Function that returns the pods.
        over: Function that returns whether the job is over.
        namespace: Flags that name the namespace.
        show: Function that shows a line of output.
        tell: Function that tells the user a line about the job.
    """
    followers: dict[str, tuple[subprocess.Popen, threading.Thread]] = {}
    told: set[str] = set()
    try:
        while True:
            last = over()
            found = pods()
            for line in problems(found):
                if line not in told:
                    told.add(line)
                    tell(line)
            for pod in filter(has_begun, found):
                uid = pod["metadata"]["uid"]
                if uid not in followers:
                    followers[uid] = _follow_one(pod["metadata"]["name"], namespace, show)
            if last:
                end = time.monotonic() + DRAIN_S
                for _, thread in followers.values():
                    thread.join(max(0.0, end - time.monotonic()))
                return
            time.sleep(POLL_S)
    finally:
        for process, thread in followers.values():
            process.terminate()
            thread.join(DRAIN_S)


def _follow_one(
    name: str, namespace: Sequence[str], show: Callable[[str], Any]
) -> tuple[subprocess.Popen, threading.Thread]:
    process = subprocess.Popen(
        ["kubectl", *namespace, "logs", name, "--prefix", "--follow"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # of pods that are removed
        text=True,
        errors="replace",
    )

    def read() -> None:
        with contextlib.closing(process.stdout) as output:  # type: ignore[type-var]
            for line in output:  # type: ignore[union-attr]
                show(line)
        process.wait()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return process, thread


def _phase(pod: Pod) -> str:
    return pod["status"].get("phase", "")


def _problems_of(pod: Pod) -> list[str]:
    status = pod["status"]
    found = []
    for condition in status.get("conditions", ()):
        if condition.get("reason") == "Unschedulable" and _phase(pod) == "Pending":
            # The rest is about preemption.
            message = condition.get("message", "").partition(". ")[0]
            remedy = next((text for part, text in NODES.items() if part in message), NO_NODE)
            found.append(f"waits for a node: {message}; {remedy}")
    if status.get("reason") == "Evicted":
        found.append(f"evicted: {status.get('message', '')}")
    for container in status.get("containerStatuses", ()):
        for state in container.get("state", {}).values():
            if (reason := state.get("reason")) in CONTAINERS:
                message = f": {state['message']}" if state.get("message") else ""
                verb = "ended" if "exitCode" in state else "cannot start"
                found.append(f"{verb}: {reason}{message}; {CONTAINERS[reason]}")
    return found
