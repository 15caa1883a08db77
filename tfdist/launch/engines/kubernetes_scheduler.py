"""Kubernetes as a scheduler: manifests for `tfdist submit`, and the submitted jobs."""

from __future__ import annotations

import argparse
import datetime
import json
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from tfdist.launch.engines import kubectl, kubernetes_pods
from tfdist.launch.engines.fleet import NoRoom
from tfdist.launch.engines.kubernetes_manifests import (
    KINDS,
    LABEL,
    REPLICATED,
    JobOptions,
    secret,
    secret_name,
)
from tfdist.launch.engines.launch_on import task_environ
from tfdist.launch.engines.schedulers import JobLine

SELECTOR = "=".join(LABEL)
# Resources of a job, in the order in which they are removed.
RESOURCES = {
    "jobset": ("jobset", "networkpolicy"),
    "job": ("job", "service", "networkpolicy"),
    "trainjob": ("trainjob", "trainingruntime", "networkpolicy"),
}
# The label of the pods that has the name of their job.
POD_LABELS = {
    "jobset": "jobset.sigs.k8s.io/jobset-name",
    "job": "job-name",
    "trainjob": "jobset.sigs.k8s.io/jobset-name",
}
# Without the controller of a kind there are no such jobs. kubectl may remember a former one.
NO_KIND = ("doesn't have a resource type", "could not find the requested resource")
OVER = ("Complete", "Completed", "Failed")


def is_installed() -> bool:
    """See `Scheduler.is_installed`."""
    return shutil.which("kubectl") is not None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a job on Kubernetes."""
    group = parser.add_argument_group("Kubernetes")
    group.add_argument("--image", help="container image with tfdist and the script")
    group.add_argument(
        "--kind",
        choices=tuple(KINDS),
        help="jobset (the default) needs the JobSet controller, trainjob Kubeflow Trainer; job "
        "needs nothing",
    )
    group.add_argument("--namespace", metavar="N", help="namespace (that of kubectl's context)")
    group.add_argument("--cpus", metavar="Q", help="CPUs of each pod (1)")
    group.add_argument("--memory", metavar="Q", help="memory of each pod (4Gi)")
    group.add_argument("--shared-memory", metavar="Q", help="size of /dev/shm (1Gi)")
    group.add_argument(
        "--volume",
        action="append",
        metavar="CLAIM:/PATH",
        help="PersistentVolumeClaim and its path in the pods; repeatable",
    )
    group.add_argument("--pull-secret", metavar="S", help="Secret for a private registry")


# Flags of `tfdist submit` that Kubernetes takes, beside those of the agent.
FLAGS = (
    "image",
    "kind",
    "namespace",
    "cpus",
    "memory",
    "shared_memory",
    "volume",
    "pull_secret",
)


# Flags of `tfdist launch` that mean the same in pods.
OF_LAUNCH = (
    "--workers",
    "--restarts",
    "--hang-timeout",
    "--start-timeout",
    "--gpus-per-task",
    "--env",
)


def options_of(flags: argparse.Namespace, words: Sequence[str]) -> JobOptions:
    """Return the options of a job.

    Args:
        flags: Flags of `tfdist submit`.
        words: COMMAND.

    Raises:
        ValueError: If a flag is missing or wrong. The message names it.
    """
    if not flags.image:
        raise ValueError(
            "--image: expected a container image with tfdist and the script, received none; "
            "docs/kubernetes.md says how to build one"
        )
    volumes: dict[str, str] = {}
    for entry in flags.volume or ():
        claim, _, path = entry.partition(":")
        if not claim or not path or claim in volumes:
            raise ValueError(f"--volume: expected CLAIM:/PATH, each once, received {entry!r}")
        volumes[claim] = path
    given = {
        name: getattr(flags, name)
        for name in ("namespace", "cpus", "memory", "shared_memory", "pull_secret")
        if getattr(flags, name)
    }
    return JobOptions(
        name=flags.job_name,
        image=flags.image,
        workers=flags.workers or 1,
        command=list(words),
        restarts=flags.restarts,
        gpus=flags.gpus_per_task or 0,
        volumes=volumes,
        environ=task_environ(flags),
        agent_flags=[
            f"--hang-timeout={flags.hang_timeout:g}",
            f"--start-timeout={flags.start_timeout:g}",
        ],
        **given,
    )


def manifest(flags: argparse.Namespace, launch_words: Sequence[str], command: Sequence[str]) -> str:
    """See `Scheduler.manifest`. The pods run `tfdist agent`, which takes few of the flags."""
    given = {word.partition("=")[0] for word in launch_words if word.startswith("--")}
    for flag in sorted(given - set(OF_LAUNCH)):
        raise ValueError(
            f"{flag}: expected without --on kubernetes, whose pods are workers that take only "
            f"{', '.join(OF_LAUNCH)} and the flags of Kubernetes; received both"
        )
    documents = KINDS[flags.kind or "jobset"](options_of(flags, command))
    # Without the aliases that YAML has for parts that two documents share.
    plain = [json.loads(json.dumps(document)) for document in documents]
    return yaml.safe_dump_all(plain, sort_keys=False)


def submit(flags: argparse.Namespace, manifest: str) -> str:
    """See `Scheduler.submit`. The id is KIND/NAME, with the namespace as in `tfdist jobs`.

    The job gets a Secret, which the printed manifest only names. It comes first, before the pods.
    """
    own = yaml.safe_dump(secret(flags.job_name, secrets.token_hex(32)), sort_keys=False)
    kubectl.create(
        f"{own}---\n{manifest}", *([f"--namespace={flags.namespace}"] if flags.namespace else [])
    )
    job = f"{flags.kind or 'jobset'}/{flags.job_name}"
    return f"{flags.namespace}/{job}" if flags.namespace else job


def jobs() -> list[JobLine]:
    """See `Scheduler.jobs`. These are the jobs of the namespace of kubectl's context."""
    lines = []
    pods = kubectl.get("pods", f"--selector={SELECTOR}")["items"]
    for kind in KINDS:
        try:
            found = kubectl.get(kind, f"--selector={SELECTOR}")["items"]
        except kubectl.KubectlError as error:
            if any(part in str(error) for part in NO_KIND):
                continue
            raise
        for item in found:
            if _condition(item).get("type") not in OVER:
                name = item["metadata"]["name"]
                own = [
                    pod for pod in pods if pod["metadata"]["labels"].get(POD_LABELS[kind]) == name
                ]
                lines.append(_line(kind, item, own))
    return lines


def logs(job: str, follow: bool, show: Callable[[str], Any], tell: Callable[[str], Any]) -> None:
    """See `Scheduler.logs`. Each line begins with its pod."""
    namespace, kind, name = _parse(job)
    state = _condition(kubectl.get(kind, name, namespace=namespace))

    def pods() -> list[dict[str, Any]]:
        selector = f"--selector={POD_LABELS[kind]}={name}"
        found = kubectl.get("pods", selector, namespace=namespace)["items"]
        return sorted(found, key=lambda pod: pod["metadata"]["creationTimestamp"])

    def over() -> bool:
        nonlocal state
        item = kubectl.get(kind, name, "--ignore-not-found", namespace=namespace)
        state = _condition(item)
        return not item or state.get("type") in OVER

    if follow:
        kubernetes_pods.follow(pods, over, namespace, show, tell)
    else:
        _show_output(job, pods(), namespace, show, tell)
    if state.get("type") == "Failed":
        tell(f"job {job} failed: {state.get('reason')}: {state.get('message')}")


def _show_output(
    job: str,
    pods: Sequence[dict[str, Any]],
    namespace: Sequence[str],
    show: Callable[[str], Any],
    tell: Callable[[str], Any],
) -> None:
    """Show what the pods of a job have written so far.

    Raises:
        NoRoom: If no pod has begun. The message says why.
    """
    if not pods:
        raise NoRoom(_why_no_pods(namespace, job))
    lines = kubernetes_pods.problems(pods)
    begun = [pod["metadata"]["name"] for pod in pods if kubernetes_pods.has_begun(pod)]
    if not begun:
        raise NoRoom("\n".join(lines) or f"the pods of job {job} have not begun")
    for line in lines:
        tell(line)
    for name in begun:
        try:
            show(kubectl.run(*namespace, "logs", name, "--prefix"))
        except (kubectl.KubectlError, NoRoom) as error:  # its node is lost, for example
            tell(f"pod {name}: {error}")


def cancel(job: str) -> None:
    """See `Scheduler.cancel`. Pods get SIGTERM, and the time to save."""
    namespace, kind, name = _parse(job)
    try:
        kubectl.run(*namespace, "delete", kind, name, "--wait=false")
    finally:  # if the job was deleted by other means, too
        rest = [(resource, name) for resource in RESOURCES[kind][1:]]
        for resource in (*rest, ("secret", secret_name(name))):
            kubectl.run(*namespace, "delete", *resource, "--ignore-not-found", "--wait=false")


def _parse(job: str) -> tuple[list[str], str, str]:
    """Return the namespace flag, the kind and the name of a job."""
    parts = job.split("/")
    if len(parts) not in (2, 3) or parts[-2] not in KINDS or not all(parts):
        raise ValueError(
            f"JOB: expected KIND/NAME or NAMESPACE/KIND/NAME such as jobset/digits, received "
            f"{job!r}; `tfdist jobs` lists your jobs"
        )
    return [f"--namespace={parts[0]}"] if len(parts) == 3 else [], parts[-2], parts[-1]


def _why_no_pods(namespace: Sequence[str], job: str) -> str:
    name = job.rpartition("/")[2]
    names = [name, *(f"{name}-{part}-0" for part in REPLICATED)]
    selector = "--field-selector=type=Warning"
    warnings = kubectl.get("events", selector, namespace=namespace)["items"]
    why = kubernetes_pods.why_none(names, warnings)
    return f"job {job} has no pods: {why or 'it waits for its controller, or it is over'}"


def _condition(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the last condition of a job that holds, or {}."""
    conditions = item.get("status", {}).get("conditions", ())
    return next((each for each in reversed(conditions) if each.get("status") == "True"), {})


def _line(kind: str, item: Mapping[str, Any], pods: Sequence[dict[str, Any]]) -> JobLine:
    metadata = item["metadata"]
    begin = datetime.datetime.fromisoformat(metadata["creationTimestamp"].replace("Z", "+00:00"))
    seconds = int((datetime.datetime.now(datetime.timezone.utc) - begin).total_seconds())
    job = f"{metadata['namespace']}/{kind}/{metadata['name']}"
    where = [", ".join(kubernetes_pods.nodes_of(pods)), *kubernetes_pods.problems(pods)]
    if not pods:
        where.append(_why_no_pods([f"--namespace={metadata['namespace']}"], job))
    runs = any(pod["status"].get("phase") == "Running" for pod in pods)
    return JobLine(
        job,
        _condition(item).get("type") or ("Running" if runs else "Pending"),
        metadata["name"],
        str(datetime.timedelta(seconds=max(0, seconds))),
        "; ".join(filter(None, where)),
    )
