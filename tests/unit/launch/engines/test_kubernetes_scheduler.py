"""Test submitted jobs with a program that stands for kubectl."""

import json

import pytest
import yaml

from tfdist.launch import job_commands, submit
from tfdist.launch.engines import kubernetes_pods, kubernetes_scheduler

KUBECTL = """#!/bin/sh
echo "$@" >> "$0.calls"
case "$*" in
  create*)
    cat > "$0.manifest"
    if [ -e "$0.refusal" ]; then echo service/digits; cat "$0.refusal" >&2; exit 1; fi ;;
  *"get jobset "*) echo "error: the server doesn't have a resource type jobset" >&2; exit 1 ;;
  *"get trainjob "*) echo '{"items": []}' ;;
  *"get job digits "*) [ ! -e "$0.job" ] || cat "$0.job" ;;
  *"get job "*) cat "$0.jobs" ;;
  *"get pods "*) cat "$0.pods" ;;
  *"logs digits-0 --prefix"*) echo "[pod/digits-0/worker] Epoch 1" ;;
  *"delete job "*) echo 'Error from server (NotFound): jobs.batch "digits" not found' >&2; exit 1 ;;
esac
"""
FLAGS = ["--on", "kubernetes", "--image", "registry.example/t:1", "--job-name", "digits"]


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return program


def calls(kubectl):
    return kubectl.with_name("kubectl.calls").read_text().splitlines()


def test_submitted_manifest_is_the_printed_one(kubectl, capsys):
    words = [*FLAGS, "--workers", "3", "--kind=job", "--namespace", "ml", "--env", "A=b c"]
    assert submit.main([*words, "--dry-run", "--", "train.py"]) == 0
    printed = capsys.readouterr().out
    assert "&id" not in printed  # no aliases of YAML
    assert not kubectl.with_name("kubectl.calls").exists()
    assert submit.main([*words, "--", "train.py"]) == 0
    assert capsys.readouterr().out == "ml/job/digits\n"
    sent = kubectl.with_name("kubectl.manifest").read_text()
    secret, _, rest = sent.partition("---\n")
    assert rest == printed
    ((key, value),) = yaml.safe_load(secret)["stringData"].items()
    assert len(value) == 64
    assert value not in "".join(calls(kubectl))  # which all users of the machine may see
    job = next(each for each in yaml.safe_load_all(printed) if each["kind"] == "Job")
    assert job["spec"]["completions"] == 3
    assert job["spec"]["backoffLimitPerIndex"] == submit.RESTARTS
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "A", "value": "b c"} in container["env"]
    (reference,) = (
        each["valueFrom"]["secretKeyRef"]
        for each in container["env"]
        if each["name"] == "TFDIST_TASK_SECRET"
    )
    assert reference["name"] == yaml.safe_load(secret)["metadata"]["name"] != "digits"
    assert (reference["key"], reference["optional"]) == (key, True)
    assert container["command"][-2:] == ["--", "train.py"]


def pod(name, **status):
    labels = {"job-name": "digits"}
    metadata = {"name": name, "uid": name, "labels": labels, "creationTimestamp": name}
    return {"metadata": metadata, "spec": {"nodeName": f"node-of-{name}"}, "status": status}


def container(kind, **state):
    return [{"state": {kind: state}}]


def test_jobs_that_are_not_over_are_listed_with_their_nodes(kubectl, capsys):
    metadata = {"name": "digits", "namespace": "ml", "creationTimestamp": "2026-01-02T03:04:05Z"}
    over = {"conditions": [{"type": "Complete", "status": "True"}]}
    items = [{"metadata": metadata}, {"metadata": {**metadata, "name": "old"}, "status": over}]
    kubectl.with_name("kubectl.jobs").write_text(json.dumps({"items": items}))
    pods = [pod("p", phase="Running"), pod("q", phase="Failed", reason="Evicted", message="disk")]
    kubectl.with_name("kubectl.pods").write_text(json.dumps({"items": pods}))
    assert job_commands.jobs(["--on", "kubernetes"]) == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.split()[:3] == ["ml/job/digits", "Running", "digits"]
    assert line.endswith("  node-of-p; pod q: evicted: disk")


def test_output_is_followed_until_the_job_is_over(kubectl, capsys, monkeypatch):
    monkeypatch.setattr(kubernetes_pods, "POLL_S", 0.05)
    image = container("waiting", reason="ImagePullBackOff", message="not found")
    ended = container("terminated", reason="OOMKilled", exitCode=137)
    taint = {"reason": "Unschedulable", "message": "0/3 nodes had taints. no new claims"}
    pods = [
        pod("p", phase="Pending", containerStatuses=image),
        pod("q", phase="Pending", conditions=[taint]),
        pod("digits-0", phase="Failed", containerStatuses=ended),
    ]
    kubectl.with_name("kubectl.pods").write_text(json.dumps({"items": pods}))
    failed = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "78"}
    job = {"status": {"conditions": [failed]}}
    kubectl.with_name("kubectl.job").write_text(json.dumps(job))
    for flags in (["--follow"], []):
        assert job_commands.logs(["ml/job/digits", "--on", "kubernetes", *flags]) == 0
        out, err = capsys.readouterr()
        assert out == "[pod/digits-0/worker] Epoch 1\n"
        assert "pod p: cannot start: ImagePullBackOff: not found; check --image" in err
        assert "pod q: waits for a node: 0/3 nodes had taints; the nodes are not ready" in err
        assert "pod digits-0: ended: OOMKilled; ask for more --memory" in err
        assert "job ml/job/digits failed: PodFailurePolicy: 78" in err


def test_cancel_removes_the_rest_of_a_job_that_is_gone(kubectl, capsys):
    assert job_commands.cancel(["ml/job/digits", "--on", "kubernetes"]) == 2
    assert 'jobs.batch "digits" not found; `tfdist jobs` lists' in capsys.readouterr().err
    deleted = [line.split()[2:4] for line in calls(kubectl) if " delete " in line]
    assert deleted == [
        ["job", "digits"],
        ["service", "digits"],
        ["networkpolicy", "digits"],
        ["secret", "digits-task-secret"],
    ]


@pytest.mark.parametrize(
    ("refusal", "code", "message"),
    [
        ('error: no matches for kind "JobSet"\nensure CRDs are installed', 2, "take --kind job"),
        ("Error from server (Forbidden): jobs is forbidden", 2, "ask its administrator"),
        ("Error from server (Forbidden): exceeded quota: q", 2, "no quota left; ask for less"),
        ('Error from server (NotFound): namespaces "x" not found', 2, "--namespace"),
        ("Unable to connect to the server: dial tcp: i/o timeout", 75, "kubectl cluster-info"),
    ],
)
def test_refusals_of_the_cluster_have_a_remedy(kubectl, capsys, refusal, code, message):
    kubectl.with_name("kubectl.refusal").write_text(refusal)
    try:
        received = submit.main([*FLAGS, "--", "train.py"])
    except SystemExit as stop:
        received = stop.code
    assert received == code
    assert message in capsys.readouterr().err
    if code == 2:  # what was created before is removed again
        assert calls(kubectl)[-1] == "delete --ignore-not-found --wait=false service/digits"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "kubernetes", "--", "x"], "--image: expected a container image"),
        ([*FLAGS, "--partition", "p", "--", "x"], "--partition: expected together with --on slurm"),
        ([*FLAGS, "--ps", "1", "--chief", "--", "x"], "--chief: expected without --on kubernetes"),
        ([*FLAGS, "--volume", "a", "--", "x"], "--volume: expected CLAIM:/PATH"),
        ([*FLAGS, "--env", "NOT_SET", "--", "x"], "--env NOT_SET: expected NAME=VALUE"),
    ],
)
def test_wrong_flags_are_named(kubectl, capsys, words, message):
    assert submit.main(words) == 2
    assert message in capsys.readouterr().err


def test_a_machine_without_kubectl_and_a_malformed_job_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="expected `kubectl` in PATH"):
        kubernetes_scheduler.cancel("job/digits")
    with pytest.raises(ValueError, match="expected KIND/NAME"):
        kubernetes_scheduler.cancel("digits")
