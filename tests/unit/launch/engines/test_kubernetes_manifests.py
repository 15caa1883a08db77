"""Test the manifests' failure contract; tests/engines checks them against Kubernetes' schemas."""

import dataclasses

import pytest

from tfdist.cluster.resolvers import from_kubernetes, job_of
from tfdist.launch.engines.kubernetes_manifests import KINDS, JobOptions

OPTIONS = JobOptions(
    name="digits",
    image="registry.example/tfdist:1",
    workers=2,
    command=["train.py", "--epochs", "9"],
    restarts=3,
    gpus=1,
    volumes={"snapshots": "/backup"},
    environ={"WORD": "a b"},
)


def of_kind(documents, kind):
    (document,) = (document for document in documents if document["kind"] == kind)
    return document["spec"]


def job_spec(kind):
    documents = KINDS[kind](OPTIONS)
    if kind == "job":
        return of_kind(documents, "Job")
    spec = (
        of_kind(documents, "JobSet")
        if kind == "jobset"
        else of_kind(documents, "TrainingRuntime")["template"]["spec"]
    )
    return spec["replicatedJobs"][0]["template"]["spec"]


@pytest.mark.parametrize("kind", KINDS)
def test_exit_codes_end_restart_or_count(kind):
    spec = job_spec(kind)
    rules = {
        (rule["onExitCodes"]["values"][0] if "onExitCodes" in rule else "evicted"): rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
    }
    preempted = "Ignore" if kind == "job" else "FailJob"  # a JobSet restarts all pods then
    assert rules == {78: "FailJob", 42: preempted, "evicted": preempted}
    if kind == "job":  # each failure ends both pods
        assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (3, 0)
    else:
        assert spec["backoffLimit"] == 0
    container = spec["template"]["spec"]["containers"][0]
    for rule in spec["podFailurePolicy"]["rules"]:
        name = rule.get("onExitCodes", {}).get("containerName", container["name"])
        assert name == container["name"]


def test_jobset_counts_no_preemption_and_ends_on_a_configuration_error():
    policy = of_kind(KINDS["jobset"](OPTIONS), "JobSet")["failurePolicy"]
    assert policy["maxRestarts"] == 3
    actions = {rule["onJobFailureMessagePatterns"][0]: rule["action"] for rule in policy["rules"]}
    assert actions == {
        "exit code 78 ": "FailJobSet",
        "exit code 42 ": "RestartJobSetAndIgnoreMaxRestarts",
    }


@pytest.mark.parametrize(("kind", "job"), [("job", "digits"), ("jobset", "digits-worker-0")])
def test_pods_find_each_other_and_know_their_start(kind, job):
    pod = job_spec(kind)["template"]["spec"]
    environ = {entry["name"]: entry.get("value", "2") for entry in pod["containers"][0]["env"]}
    environ |= {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": f"{job}-1"}  # which Kubernetes sets
    spec = from_kubernetes(environ)
    assert spec.jobs["worker"] == (f"{job}-0.digits:2222", f"{job}-1.digits:2222")
    assert str(spec.task) == "worker:1"
    assert environ["WORD"] == "a b"
    uid, start = job_of(environ)
    assert (uid, start) == ("kubernetes-2", 2 if kind == "jobset" else 0)


def test_pods_have_what_a_training_needs():
    pod = job_spec("jobset")["template"]["spec"]
    container = pod["containers"][0]
    assert container["command"][:3] == ["tfdist", "agent", "--grace=105"]
    assert container["command"][3:] == ["--", "train.py", "--epochs", "9"]
    assert pod["terminationGracePeriodSeconds"] == 120
    assert container["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": 1}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    claim = volumes[mounts["/backup"]]["persistentVolumeClaim"]
    assert claim == {"claimName": "snapshots"}


@pytest.mark.parametrize("kind", KINDS)
def test_only_pods_of_the_job_may_connect(kind):
    policy = of_kind(KINDS[kind](OPTIONS), "NetworkPolicy")
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    assert policy["policyTypes"] == ["Ingress"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "Digits"}, "--job-name: expected at most 40 lower-case letters"),
        ({"name": "d" * 41}, "--job-name"),
        ({"memory": "4 GB"}, "--memory: expected a quantity of Kubernetes"),
        ({"cpus": "two"}, "--cpus"),
        ({"volumes": {"snapshots": "backup"}}, "--volume: expected CLAIM:/PATH"),
    ],
)
def test_wrong_options_name_their_flag(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(OPTIONS, **change)
