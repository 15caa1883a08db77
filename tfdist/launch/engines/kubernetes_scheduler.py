"""Kubernetes as a scheduler: manifests for `tfdist submit`, and the submitted jobs."""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from tfdist.launch.engines.fleet import NoRoom
from tfdist.launch.engines.kubernetes_manifests import KINDS, JobOptions
from tfdist.launch.engines.launch_on import task_environ
from tfdist.launch.engines.schedulers import JobLine

LABEL = "app.kubernetes.io/managed-by=tfdist"
COMMAND_S = 60.0  # for kubectl to answer
# Resources of a job, in the order in which they are removed.
RESOURCES = {
    "jobset": ("jobset", "networkpolicy"),
    "job": ("job", "service", "networkpolicy"),
    "trainjob": ("trainjob", "trainingruntime", "networkpolicy"),
}
REMEDIES = {
    "no matches for kind": "the cluster lacks the controller of this kind; take --kind job, which "
    "every cluster has",
    "doesn't have a resource type": "the cluster lacks the controller of this kind",
    "forbidden": "your account may not do this in the namespace; ask its administrator",
    "exceeded quota": "the namespace has no quota left; ask for less, or end other jobs",
    "namespaces": "make the namespace, or name another one by --namespace",
    "already exists": "name the job otherwise by --job-name, or `tfdist cancel` the former one",
    "field is immutable": "a job of this name exists; `tfdist cancel` it, or take another "
    "--job-name",
}
NO_ANSWER = ("connection refused", "unable to connect", "i/o timeout", "no such host")
# Why a container waits, and what to do.
WAITING = {
    "ImagePullBackOff": "check --image, and --pull-secret for a private registry",
    "ErrImagePull": "check --image, and --pull-secret for a private registry",
    "InvalidImageName": "check --image",
    "CreateContainerConfigError": "check the names of --volume and --pull-secret",
    "CreateContainerError": "the image must have the `tfdist` command in PATH",
}


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
    """See `Scheduler.submit`. The id is KIND/NAME, with the namespace as in `tfdist jobs`."""
    _kubectl("create", "--filename=-", text=manifest)
    job = f"{flags.kind or 'jobset'}/{flags.job_name}"
    return f"{flags.namespace}/{job}" if flags.namespace else job


def jobs() -> list[JobLine]:
    """See `Scheduler.jobs`."""
    lines = []
    for kind in KINDS:
        try:
            text = _kubectl("get", kind, f"--selector={LABEL}", "--output=json")
        except ValueError as error:
            if "resource type" in str(error):  # without its controller there are no such jobs
                continue
            raise
        for item in json.loads(text)["items"]:
            state = _state(item)
            if state not in ("Complete", "Completed", "Failed"):
                lines.append(_line(kind, item, state))
    return lines


def logs(job: str, follow: bool, show: Callable[[str], Any], tell: Callable[[str], Any]) -> None:
    """See `Scheduler.logs`. Each line begins with its pod."""
    namespace, kind, name = _parse(job)
    words = [*namespace, "logs", f"--selector={_pods_of(kind, name)}", "--prefix", "--tail=-1"]
    pods = json.loads(
        _kubectl(*namespace, "get", "pods", f"--selector={_pods_of(kind, name)}", "--output=json")
    )["items"]
    if not pods:
        raise NoRoom(f"job {job} has no pods: it waits for its controller, or it is over")
    for line in waiting_pods(pods):
        tell(line)
    if not follow:
        show(_kubectl(*words))
        return
    count = max(len(pods), 5)  # kubectl follows five pods by default
    with subprocess.Popen(
        ["kubectl", *words, "--follow", f"--max-log-requests={count}"],
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                show(line)
        finally:
            process.terminate()


def cancel(job: str) -> None:
    """See `Scheduler.cancel`. Pods get SIGTERM, and the time to save."""
    namespace, kind, name = _parse(job)
    _kubectl(*namespace, "delete", kind, name, "--wait=false")
    for resource in RESOURCES[kind][1:]:
        _kubectl(*namespace, "delete", resource, name, "--ignore-not-found", "--wait=false")


def waiting_pods(pods: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each pod that cannot start, with the reason and the remedy.

    Args:
        pods: Pods, as the API returns them.
    """
    lines = []
    for pod in pods:
        name = pod["metadata"]["name"]
        status = pod.get("status", {})
        for condition in status.get("conditions", ()):
            if condition.get("reason") == "Unschedulable":
                lines.append(
                    f"pod {name} waits for a node: {condition.get('message', '')}; ask for less "
                    "(--cpus, --memory, --gpus-per-task), or wait"
                )
        for container in status.get("containerStatuses", ()):
            waiting = container.get("state", {}).get("waiting", {})
            if waiting.get("reason") in WAITING:
                reason = waiting["reason"]
                lines.append(
                    f"pod {name} cannot start: {reason}: {waiting.get('message', '')}; "
                    f"{WAITING[reason]}"
                )
    return lines


def refusal(words: str, text: str) -> ValueError | NoRoom:
    """Return the error for what kubectl has written.

    Args:
        words: The command, for the message.
        text: Its output.

    Example:
        >>> refusal("create", 'Error from server (AlreadyExists): jobs "a" already exists')
        ... # doctest: +ELLIPSIS
        ValueError('Kubernetes: create: jobs "a" already exists; name the job otherwise ...
    """
    lines = [line for line in text.strip().splitlines() if line.strip()]
    sentence = lines[-1] if lines else "ended without a message"
    message = f"Kubernetes: {words}: {sentence.removeprefix('error: ')}"
    if sentence.startswith("Error from server"):
        message = f"Kubernetes: {words}: {sentence.partition(': ')[2]}"
    lower = text.lower()
    if any(part in lower for part in NO_ANSWER):
        return NoRoom(f"{message}; look at `kubectl cluster-info`")
    remedy = next((remedy for part, remedy in REMEDIES.items() if part in lower), "")
    return ValueError(f"{message}; {remedy}" if remedy else message)


def _kubectl(*words: str, text: str | None = None) -> str:
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
        raise refusal(verb, result.stderr or result.stdout)
    return result.stdout


def _parse(job: str) -> tuple[list[str], str, str]:
    """Return the namespace flag, the kind and the name of a job."""
    parts = job.split("/")
    if len(parts) not in (2, 3) or parts[-2] not in KINDS or not all(parts):
        raise ValueError(
            f"JOB: expected KIND/NAME or NAMESPACE/KIND/NAME such as jobset/digits, received "
            f"{job!r}; `tfdist jobs` lists your jobs"
        )
    return [f"--namespace={parts[0]}"] if len(parts) == 3 else [], parts[-2], parts[-1]


def _pods_of(kind: str, name: str) -> str:
    return f"job-name={name}" if kind == "job" else f"jobset.sigs.k8s.io/jobset-name={name}"


def _state(item: dict[str, Any]) -> str:
    conditions = item.get("status", {}).get("conditions", ())
    return next(
        (each["type"] for each in reversed(conditions) if each.get("status") == "True"), "Running"
    )


def _line(kind: str, item: dict[str, Any], state: str) -> JobLine:
    metadata = item["metadata"]
    begin = datetime.datetime.fromisoformat(metadata["creationTimestamp"].replace("Z", "+00:00"))
    seconds = int((datetime.datetime.now(datetime.timezone.utc) - begin).total_seconds())
    return JobLine(
        f"{metadata['namespace']}/{kind}/{metadata['name']}",
        state,
        metadata["name"],
        str(datetime.timedelta(seconds=max(0, seconds))),
        metadata["namespace"],
    )
