"""Kubernetes manifests of a launch: a JobSet, an indexed Job or a Kubeflow TrainJob.

The manifests carry the failure contract of tfdist's exit codes: 78 (configuration) ends the job, 42
(preempted, saved) and an eviction restart it without counting, and everything else restarts it and
counts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.runtime.launch_protocol import CONFIGURATION_CODE, PREEMPTED_CODE, TASK_SECRET

PORT = 2222
CONTAINER = "worker"
TRAINER_CONTAINER = "node"  # the name that Kubeflow Trainer expects
# From SIGTERM to SIGKILL; the agent gives its task all but the last seconds of it.
GRACE_S = 120
REPORT_S = 15
GPU = "nvidia.com/gpu"
LABEL = ("app.kubernetes.io/managed-by", "tfdist")  # of all objects and pods
REPLICATED = ("worker", TRAINER_CONTAINER)  # names of the Jobs in a JobSet
# How long a pod stays on a node that does not answer. A synchronous training waits for it, so this
# is less than the five minutes that Kubernetes gives other pods.
LOST_NODE_S = 60

SECRET_KEY = "task-secret"  # of the job's own Secret

Manifest = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """Options of a job on Kubernetes.

    Attributes:
        name: Name of the job and of its Service.
        image: Container image, which has tfdist and the script.
        workers: Number of pods; each is one worker.
        command: COMMAND with its arguments.
        restarts: Number of restarts that count, default 0.
        namespace: Namespace; None for that of the user's context.
        cpus: CPUs that each pod requests, as Kubernetes writes them, default "1".
        memory: Memory that each pod requests and may use, default "4Gi".
        gpus: GPUs of each pod, default 0.
        shared_memory: Size of /dev/shm, which NCCL uses, default "1Gi".
        volumes: Path in the container by name of a PersistentVolumeClaim.
        environ: Variables of the containers.
        pull_secret: Name of the Secret for a private registry, or None.
        agent_flags: Flags of `tfdist agent`.
    """

    name: str
    image: str
    workers: int
    command: Sequence[str]
    restarts: int = 0
    namespace: str | None = None
    cpus: str = "1"
    memory: str = "4Gi"
    gpus: int = 0
    shared_memory: str = "1Gi"
    volumes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pull_secret: str | None = None
    agent_flags: Sequence[str] = ()

    def __post_init__(self):
        """Check what Kubernetes would refuse only later, or in words that name no flag.

        Raises:
            ValueError: If a value is wrong. The message names the flag.
        """
        # A pod's host name is NAME-worker-0-INDEX, and a DNS label has at most 63 characters.
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", self.name):
            raise ValueError(
                "--job-name: expected at most 40 lower-case letters, digits and '-', beginning "
                f"with a letter and not ending with '-'; received {self.name!r}"
            )
        for flag, quantity in (
            ("--cpus", self.cpus),
            ("--memory", self.memory),
            ("--shared-memory", self.shared_memory),
        ):
            if not re.fullmatch(r"\d+(\.\d+)?(m|[kMGT]|[KMGT]i)?", quantity):
                raise ValueError(
                    f"{flag}: expected a quantity of Kubernetes, such as 2, 500m or 4Gi; received "
                    f"{quantity!r}"
                )
        for claim, path in self.volumes.items():
            if not path.startswith("/"):
                raise ValueError(
                    "--volume: expected CLAIM:/PATH with an absolute path in the container, "
                    f"received {claim}:{path}"
                )


def jobset(options: JobOptions) -> list[Manifest]:
    """Return the manifests of a JobSet, which restarts all pods together.

    Source: https://jobset.sigs.k8s.io/docs/concepts/
    """
    return [
        _document("jobset.x-k8s.io/v1alpha2", "JobSet", options, _jobset_spec(options, CONTAINER)),
        network_policy(options, _jobset_labels(options)),
    ]


def job(options: JobOptions) -> list[Manifest]:
    """Return the manifests of a plain indexed Job and its headless Service.

    Kubernetes replaces each failed pod by itself. A failure ends every pod of a synchronous
    training, so each pod has a limit of its own. With one limit for all, their failures would add
    up, and the wait before a replacement doubles with each.

    Source: https://kubernetes.io/docs/tasks/job/pod-failure-policy/
    https://kubernetes.io/docs/concepts/workloads/controllers/job/#backoff-limit-per-index
    """
    labels = {"job-name": options.name}
    spec = _job_spec(
        options,
        CONTAINER,
        labels,
        limits={"backoffLimitPerIndex": options.restarts, "maxFailedIndexes": 0},
        # The Job controller starts a new pod for a pod whose failure it ignores.
        preempted="Ignore",
        identity={"TFDIST_K8S_JOB_UID": "metadata.labels['batch.kubernetes.io/controller-uid']"},
    )
    spec["template"]["spec"]["subdomain"] = options.name
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # pods find each other before they are ready
        "selector": labels,
        "ports": [{"port": PORT}],
    }
    return [
        _document("v1", "Service", options, service),
        _document("batch/v1", "Job", options, spec),
        network_policy(options, labels),
    ]


def trainjob(options: JobOptions) -> list[Manifest]:
    """Return a TrainingRuntime and a TrainJob for Kubeflow Trainer v2.

    Source: https://www.kubeflow.org/docs/components/trainer/
    """
    spec = _jobset_spec(options, TRAINER_CONTAINER)
    spec["replicatedJobs"][0]["name"] = TRAINER_CONTAINER
    spec["replicatedJobs"][0]["template"]["metadata"] = {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    runtime = _document(
        "trainer.kubeflow.org/v1alpha1",
        "TrainingRuntime",
        options,
        {"mlPolicy": {"numNodes": options.workers}, "template": {"spec": spec}},
    )
    runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] = "tensorflow"
    train = _document(
        "trainer.kubeflow.org/v1alpha1",
        "TrainJob",
        options,
        {
            "runtimeRef": {"name": options.name, "kind": "TrainingRuntime"},
            "trainer": {
                "image": options.image,
                "command": _command(options),
                "numNodes": options.workers,
            },
        },
    )
    return [
        runtime,
        train,
        network_policy(options, _jobset_labels(options)),
    ]


KINDS: dict[str, Callable[[JobOptions], list[Manifest]]] = {
    "jobset": jobset,
    "job": job,
    "trainjob": trainjob,
}


def network_policy(options: JobOptions, labels: Mapping[str, str]) -> Manifest:
    """Return a NetworkPolicy that lets only the pods of the job reach each other.

    TensorFlow's servers have no authentication. The cluster's network plugin must enforce policies.

    Args:
        options: Options of the job.
        labels: Labels of its pods.
    """
    pods = {"matchLabels": dict(labels)}
    return _document(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        options,
        {
            "podSelector": pods,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": pods}]}],
        },
    )


def secret_name(job: str) -> str:
    """Return the name of the Secret that a job has of its own.

    It is not the name of the job, so that `tfdist cancel` never deletes a Secret of the user's.
    """
    return f"{job}-{SECRET_KEY}"


def secret(job: str, value: str) -> Manifest:
    """Return the Secret by which the tasks of a job know each other.

    Args:
        job: Name of the job.
        value: Value of the variable TFDIST_TASK_SECRET in its pods.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": secret_name(job), "labels": dict([LABEL])},
        "stringData": {SECRET_KEY: value},
    }


def _jobset_labels(options: JobOptions) -> dict[str, str]:
    return {"jobset.sigs.k8s.io/jobset-name": options.name}


def _document(api: str, kind: str, options: JobOptions, spec: Manifest) -> Manifest:
    metadata: Manifest = {"name": options.name}
    if options.namespace:
        metadata["namespace"] = options.namespace
    metadata["labels"] = dict([LABEL])
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def _jobset_spec(options: JobOptions, container: str) -> Manifest:
    spec = _job_spec(
        options,
        container,
        _jobset_labels(options),
        limits={"backoffLimit": 0},
        preempted="FailJob",
        identity={
            "TFDIST_K8S_JOB_UID": "metadata.labels['jobset.sigs.k8s.io/jobset-uid']",
            "JOBSET_RESTART_ATTEMPT": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']",
        },
    )
    restart_rules = [
        {
            "name": "configuration",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [f"exit code {CONFIGURATION_CODE} "],
        },
        {
            "name": "preempted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [f"exit code {PREEMPTED_CODE} ", "DisruptionTarget"],
        },
    ]
    return {
        "network": {
            "enableDNSHostnames": True,
            "subdomain": options.name,
            "publishNotReadyAddresses": True,
        },
        "failurePolicy": {
            "maxRestarts": options.restarts,
            "restartStrategy": "BlockingRecreate",  # no pod of two attempts at the same time
            "rules": restart_rules,
        },
        "replicatedJobs": [{"name": "worker", "replicas": 1, "template": {"spec": spec}}],
    }


def _job_spec(
    options: JobOptions,
    container: str,
    labels: Mapping[str, str],
    *,
    limits: Mapping[str, int],
    preempted: str,
    identity: Mapping[str, str],
) -> Manifest:
    def on_code(action: str, code: int) -> Manifest:
        codes = {"containerName": container, "operator": "In", "values": [code]}
        return {"action": action, "onExitCodes": codes}

    rules = [
        on_code("FailJob", CONFIGURATION_CODE),
        on_code(preempted, PREEMPTED_CODE),
        {
            "action": preempted,
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
    ]
    return {
        "completionMode": "Indexed",
        "completions": options.workers,
        "parallelism": options.workers,
        **limits,
        "podFailurePolicy": {"rules": rules},
        "template": {
            "metadata": {"labels": dict([LABEL])},
            "spec": _pod_spec(options, container, labels, identity),
        },
    }


def _pod_spec(
    options: JobOptions, container: str, labels: Mapping[str, str], identity: Mapping[str, str]
) -> Manifest:
    environ: list[Manifest] = [
        {"name": "TFDIST_K8S_SERVICE", "value": options.name},
        {"name": "TFDIST_K8S_REPLICAS", "value": str(options.workers)},
        {"name": "TFDIST_PORT", "value": str(PORT)},
    ]
    environ += [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in identity.items()
    ]
    # Optional, so that pods of a manifest that the user applies start without the Secret.
    key = {"name": secret_name(options.name), "key": SECRET_KEY, "optional": True}
    environ.append({"name": TASK_SECRET, "valueFrom": {"secretKeyRef": key}})
    environ += [{"name": name, "value": value} for name, value in options.environ.items()]
    requests: Manifest = {"cpu": options.cpus, "memory": options.memory}
    limits: Manifest = {"memory": options.memory}
    if options.gpus:
        requests[GPU] = limits[GPU] = options.gpus
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[Manifest] = [
        {
            "name": "shared-memory",
            "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory},
        }
    ]
    for number, (claim, path) in enumerate(options.volumes.items()):
        mounts.append({"name": f"volume-{number}", "mountPath": path})
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
    # Spread the pods over nodes where that is possible.
    spread = {
        "weight": 100,
        "podAffinityTerm": {
            "labelSelector": {"matchLabels": dict(labels)},
            "topologyKey": "kubernetes.io/hostname",
        },
    }
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "affinity": {
            "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [spread]}
        },
        "tolerations": [
            {
                "key": f"node.kubernetes.io/{state}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": LOST_NODE_S,
            }
            for state in ("not-ready", "unreachable")
        ],
        "containers": [
            {
                "name": container,
                "image": options.image,
                "command": _command(options),
                "ports": [{"containerPort": PORT}],
                "env": environ,
                "resources": {"requests": requests, "limits": limits},
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    if options.pull_secret:
        spec["imagePullSecrets"] = [{"name": options.pull_secret}]
    return spec


def _command(options: JobOptions) -> list[str]:
    grace = f"--grace={GRACE_S - REPORT_S}"
    return ["tfdist", "agent", grace, *options.agent_flags, "--", *options.command]
