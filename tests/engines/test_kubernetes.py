"""Test `tfdist submit --on kubernetes` on a real control plane, whose pods are processes."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

from tests.engines import kubernetes_cluster
from tests.engines.kubernetes_cluster import IMAGE
from tests.engines.test_slurm import BEAT, SAVE
from tests.forkserver import environ_of
from tests.launches import PRELUDE, Launch
from tests.processes import PYTHON, ROOT
from tests.processes import run as run_process
from tfdist.runtime.launch_protocol import THREAD_VARIABLES

CRDS = "TFDIST_KUBERNETES_CRDS"  # directory of *_crd.yaml.gz of JobSet and Kubeflow Trainer
BOUND_S = 90
# `first` is whether this is the first pod of a worker.
START = """
mark = os.path.join(os.environ["SHARED"], me.replace(":", "-"))
first = not os.path.exists(mark)
open(mark, "a").close()
"""


@pytest.fixture(scope="module")
def cluster():
    with kubernetes_cluster.running() as started:
        yield started


class Jobs(Launch):
    """Jobs of a test, and their processes."""

    def __init__(self, directory, cluster):
        super().__init__(directory, bound=BOUND_S)
        self.cluster = cluster
        self.environ = dict(cluster.environ)

    def tfdist(self, *words, timeout=BOUND_S):
        """Run a command of tfdist; return exit code, output and errors."""
        result = run_process(
            [sys.executable, "-m", "tfdist", words[0], "--on", "kubernetes", *words[1:]],
            cwd=self.directory,
            env=self.environ,
            timeout=timeout,
        )
        return result.returncode, result.stdout, result.stderr

    def words(self, *flags, script="pass", command=("task.py",), kind="job", name="digits"):
        """Return the arguments of `tfdist submit`, and write the script to the image."""
        (self.cluster.image / "task.py").write_text(PRELUDE + START + script)
        return (
            *("submit", f"--kind={kind}", f"--job-name={name}", "--image", IMAGE),
            *(f"--env={self.mark}", f"--env=SHARED={self.directory}", *flags, "--", *command),
        )

    def submit(self, *flags, **options):
        code, out, err = self.tfdist(*self.words(*flags, **options))
        assert code == 0, err
        return out.strip()

    def manifests(self, *flags, **options):
        """Return the printed manifests."""
        code, out, err = self.tfdist(*self.words("--dry-run", *flags, **options))
        assert code == 0, err
        return list(yaml.safe_load_all(out))

    def pod(self, index=0, name="digits", begun=1):
        """Wait until a worker has begun some times; return its last pod."""
        end = time.monotonic() + BOUND_S
        while True:
            pods = [
                pod
                for pod in self.cluster.pods_of(name)
                if pod.manifest["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]
                == str(index)
            ]
            if len(pods) >= begun:
                return pods[-1]
            assert time.monotonic() < end, f"worker {index} began {len(pods)} times{self.state()}"
            time.sleep(0.1)

    def wait_for_output(self, words, index=0, seconds=BOUND_S, **options):
        """Wait until a worker's newest pod has written something; return that pod."""
        end = time.monotonic() + seconds
        while words not in (pod := self.pod(index, **options)).output():
            assert time.monotonic() < end, f"no {words!r} in {pod.output()}{self.state()}"
            time.sleep(0.1)
        return pod

    def task(self, pod):
        """Wait until a pod has started its task; return the process id."""
        host = pod.manifest["spec"]["hostname"]
        end = time.monotonic() + BOUND_S
        while True:
            for pid in self.living(tasks=True):
                if environ_of(pid).get("HOSTNAME") == host:
                    return pid
            assert time.monotonic() < end, f"no task in {host}{self.state()}"
            time.sleep(0.1)

    def finish_job(self, name="digits", seconds=BOUND_S):
        """Wait for the end of a job; return its last condition and its status."""
        end = time.monotonic() + seconds
        while True:
            status = self.cluster.get("job", name)["status"]
            for condition in status.get("conditions", ()):
                if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
                    return condition, status
            assert time.monotonic() < end, f"{status}{self.state()}"
            time.sleep(0.2)

    def state(self):
        """Return the pods and the ends of their logs."""
        pods = self.cluster.try_kubectl("get", "pods", "--all-namespaces", "--output=wide").stdout
        logs = (pod.output()[-2000:] for pod in self.cluster.kubelet.pods.values())
        return f"\n{pods}\n" + "\n---\n".join(logs)

    def evict(self, pod, reason="eviction"):
        """End a pod as users and administrators do, or the scheduler."""
        kubectl = self.cluster.kubectl
        metadata = pod.manifest["metadata"]
        name = metadata["name"]
        node = pod.manifest["spec"]["nodeName"]
        if reason == "delete":
            kubectl("delete", "pod", name, "--wait=false")
        elif reason == "eviction":
            eviction = {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": {"name": name, "namespace": metadata["namespace"]},
            }
            path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{name}/eviction"
            kubectl("create", "--raw", path, "--filename=-", text=json.dumps(eviction))
        elif reason == "drain":
            kubectl("drain", node, "--delete-emptydir-data", "--timeout=60s")
            kubectl("uncordon", node)
        else:
            assert reason == "preemption"
            urgent = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "urgent"},
                "spec": {
                    "priorityClassName": "urgent",
                    "restartPolicy": "Never",
                    "nodeSelector": {"kubernetes.io/hostname": node},
                    "containers": [
                        {
                            "name": "urgent",
                            "image": IMAGE,
                            "command": ["true"],
                            "resources": {"requests": {"cpu": "2"}},
                        }
                    ],
                },
            }
            self.cluster.create(urgent)
            self.cluster.wait_for("Succeeded", "get", "pod", "urgent", "--output=yaml")
            kubectl("delete", "pod", "urgent")
        end = time.monotonic() + BOUND_S
        while pod.process.poll() is None:
            assert time.monotonic() < end, f"{reason} did not end {name}{self.state()}"
            time.sleep(0.1)


@pytest.fixture
def jobs(cluster, tmp_path):
    """Yield what submits jobs; check afterwards that `tfdist cancel` leaves no pod or process."""
    jobs = Jobs(tmp_path, cluster)
    yield jobs
    for item in cluster.get("jobs", "--all-namespaces")["items"]:
        metadata = item["metadata"]
        code, _, err = jobs.tfdist("cancel", f"{metadata['namespace']}/job/{metadata['name']}")
        assert code == 0, err
    kinds = "pods,jobs,networkpolicies,services"
    ours = ("--all-namespaces", "--selector=app.kubernetes.io/managed-by=tfdist")
    end = time.monotonic() + BOUND_S
    while (left := cluster.get(kinds, *ours)["items"]) and time.monotonic() < end:
        time.sleep(0.2)
    for item in left:
        names = (item["kind"], item["metadata"]["name"], f"-n={item['metadata']['namespace']}")
        cluster.try_kubectl("delete", *names, "--wait=false")
    cluster.kubelet.pods.clear()
    assert not left, f"left behind: {left}"
    jobs.check_nobody_left(15.0)


@pytest.fixture(scope="module")
def snapshots(cluster):
    """Make a claim `snapshots`; return the directory of its volume."""
    directory = cluster.home / "volume"
    directory.mkdir()
    names = {"apiVersion": "v1", "metadata": {"name": "snapshots"}}
    size = {"storage": "1Gi"}
    access = {"accessModes": ["ReadWriteMany"]}
    volume = {**access, "capacity": size, "hostPath": {"path": str(directory)}}
    claim = {**access, "resources": {"requests": size}}
    cluster.create({**names, "kind": "PersistentVolume", "spec": volume})
    text = json.dumps({**names, "kind": "PersistentVolumeClaim", "spec": claim})
    cluster.kubectl("apply", "--filename=-", text=text)
    return directory


@pytest.fixture(scope="module")
def urgent(cluster):
    """Make the priority class `urgent`."""
    priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000}
    cluster.create({**priority, "metadata": {"name": "urgent"}})


def test_pods_meet_and_have_what_they_asked_for(jobs, snapshots):
    path = jobs.directory / "mounted"
    script = (
        BEAT
        + """
from tfdist.cluster import preflight, resolvers
preflight.check(resolvers.resolve(), timeout=60)
print("cluster", json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
print("word", os.environ["WORD"], os.getcwd())
print("secret", os.environ["TFDIST_TASK_SECRET"])
print("shared memory", os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize)
open(os.path.join(sys.argv[1], os.environ["HOSTNAME"]), "w").close()
"""
    )
    job = jobs.submit(
        *("--workers=2", "--env=WORD=a b", "--shared-memory=32Mi", f"--volume=snapshots:{path}"),
        script=script,
        command=("task.py", str(path)),
    )
    condition, status = jobs.finish_job()
    assert condition["type"] == "Complete", jobs.state()
    assert status["succeeded"] == 2
    code, out, err = jobs.tfdist("logs", job)
    assert code == 0, err
    assert len(re.findall(r"^\[pod/digits-[01]-\w+/worker\] word a b /", out, re.MULTILINE)) == 2
    assert out.count("cluster ['digits-0.digits:2222', 'digits-1.digits:2222']") == 2
    assert out.count(f"shared memory {32 << 20}") == 2
    assert len(secrets := re.findall(r"\bsecret (\w{64})$", out, re.MULTILINE)) == 2
    assert len(set(secrets)) == 1
    assert sorted(os.listdir(snapshots)) == ["digits-0", "digits-1"]
    assert len({jobs.pod(index).manifest["spec"]["nodeName"] for index in (0, 1)}) == 2
    assert "digits" not in jobs.tfdist("jobs")[1]  # it is over


def test_job_is_listed_followed_and_cancelled(jobs, cluster):
    script = BEAT + SAVE + "print('hello from', me, flush=True)\ntrain(60)\n"
    job = jobs.submit("--workers=2", script=script)
    assert job == "job/digits"
    for index in (0, 1):
        jobs.wait_for_output("hello from", index)
    cluster.wait_for("2", "get", "job", "digits", "--output=jsonpath={.status.ready}")
    code, out, err = jobs.tfdist("jobs")
    assert code == 0, err
    nodes = ", ".join(sorted(jobs.pod(index).manifest["spec"]["nodeName"] for index in (0, 1)))
    assert re.search(rf"^default/job/digits +Running +digits +0:\d\d:\d\d +{nodes}$", out, re.M)
    follower = subprocess.Popen(
        [PYTHON, "-m", "tfdist", "logs", "--on=kubernetes", job, "--follow"],
        env=jobs.environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert "hello from worker:" in follower.stdout.readline()
    code, _, err = jobs.tfdist("cancel", job)
    assert code == 0, err
    out, _ = follower.communicate(timeout=BOUND_S)
    assert follower.returncode == 0
    assert "the training is saved" in out  # `readline` may have taken all before it
    assert [jobs.pod(index).process.wait(BOUND_S) for index in (0, 1)] == [42, 42]
    cluster.wait_for("[]", "get", "pods,jobs,secrets", "--output=jsonpath={.items}")
    assert "digits" not in jobs.tfdist("jobs")[1]
    code, _, err = jobs.tfdist("cancel", job)
    assert code == 2
    assert 'jobs.batch "digits" not found; `tfdist jobs` lists' in err
    assert jobs.tfdist("logs", job)[0] == 2


def test_killed_worker_is_replaced_and_counted(jobs):
    """The output of all pods is followed, also of those that begin later."""
    script = (
        BEAT
        + """
print("begun", me, first, flush=True)
if me == "worker:1" and first: train(60)
if me == "worker:0" and first:
    while not os.path.exists(mark + ".lost"): time.sleep(0.05)
    lose_peers()
"""
    )
    job = jobs.submit("--workers=2", "--restarts=1", script=script)
    follower = subprocess.Popen(
        [PYTHON, "-m", "tfdist", "logs", "--on=kubernetes", job, "--follow"],
        env=jobs.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pods = [jobs.wait_for_output("begun", index) for index in (0, 1)]
    os.kill(jobs.task(pods[1]), signal.SIGKILL)
    assert pods[1].process.wait(BOUND_S) == 128 + signal.SIGKILL
    (jobs.directory / "worker-0.lost").touch()
    assert pods[0].process.wait(BOUND_S) == 75
    condition, status = jobs.finish_job()
    assert condition["type"] == "Complete", jobs.state()
    assert (status["succeeded"], status["failed"]) == (2, 2)
    out, err = follower.communicate(timeout=BOUND_S)
    assert follower.returncode == 0, err
    for begun in ("worker:0 True", "worker:1 True", "worker:0 False", "worker:1 False"):
        assert f"begun {begun}\n" in out
    assert "ROOT CAUSE: worker:1 was killed by SIGKILL" in out


def test_crash_in_each_start_ends_the_job_after_its_restarts(jobs):
    script = BEAT + "train(60) if me == 'worker:0' else sys.exit(3)\n"
    job = jobs.submit("--workers=2", "--restarts=2", script=script)
    condition, status = jobs.finish_job()
    assert (condition["type"], status["failed"]) == ("Failed", 4)  # three, and the peer
    assert condition["reason"] == "MaxFailedIndexesExceeded"
    jobs.pod(1, begun=3)
    code, _, err = jobs.tfdist("logs", job)
    assert code == 0
    assert f"job {job} failed: MaxFailedIndexesExceeded" in err


@pytest.mark.parametrize("reason", ["delete", "eviction", "preemption", "drain"])
def test_disruption_is_not_counted(jobs, urgent, reason):
    """A deleted pod must have saved; what Kubernetes itself ends is not counted in any case."""
    script = BEAT + (SAVE if reason == "delete" else "") + "if first:\n    ready()\n    train(60)\n"
    script = script.replace("ready()", "print('ready', flush=True)")
    jobs.submit("--workers=1", "--restarts=0", script=script)
    pod = jobs.wait_for_output("ready")
    jobs.evict(pod, reason)
    assert pod.process.returncode == (42 if reason == "delete" else 128 + signal.SIGTERM)
    condition, status = jobs.finish_job()
    assert condition["type"] == "Complete", jobs.state()
    assert "failed" not in status
    jobs.pod(begun=2)


def test_pod_of_a_lost_node_is_replaced(jobs, cluster):
    """Once an administrator, or the cloud, has said that the node does not come back."""
    script = BEAT + "if first:\n    print('ready', flush=True)\n    train(60)\n"
    manifests = jobs.manifests("--workers=1", "--restarts=0", script=script)
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    assert text.count('"tolerationSeconds": 60') == 2
    text = text.replace('"tolerationSeconds": 60', '"tolerationSeconds": 1')
    cluster.kubectl("create", "--filename=-", text=text)
    pod = jobs.wait_for_output("ready")
    node = pod.manifest["spec"]["nodeName"]
    cluster.kubelet.lose_node(node)
    try:
        cluster.wait_for("DeletionByTaintManager", "get", "pods", "--output=yaml")
        taint = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
        cluster.kubectl("taint", "node", node, taint)
        replacement = jobs.pod(begun=2)
        condition, status = jobs.finish_job()
    finally:
        cluster.kubectl("delete", "node", node)
        cluster.kubelet.start_node(node)
    assert replacement.manifest["spec"]["nodeName"] != node
    assert condition["type"] == "Complete", jobs.state()
    assert "failed" not in status


def test_hung_worker_is_named_with_its_stacks(jobs, cluster):
    script = (
        BEAT
        + """
def wait_for_ever(): time.sleep(600)
train(0.5)
if me == "worker:1": wait_for_ever()
train(60)
"""
    )
    job = jobs.submit("--workers=2", "--restarts=0", "--hang-timeout=3", script=script)
    condition, _ = jobs.finish_job()
    assert condition["type"] == "Failed"
    assert jobs.pod(1).process.wait(BOUND_S) == 75
    code, out, err = jobs.tfdist("logs", job)
    assert code == 0, err
    assert re.search(r"ROOT CAUSE: worker:1 made no step for \d+ s after step 10", out)
    assert re.search(r'File ".*task.py", line \d+ in wait_for_ever', out)
    name = jobs.pod(1).manifest["metadata"]["name"]
    described = cluster.kubectl("describe", "pod", name)
    assert re.search(r"Message: +worker:1 made no step for", described), described


def test_configuration_error_ends_the_job_at_once(jobs):
    script = BEAT + "if me == 'worker:1': sys.exit(78)\ntrain(60)\n"
    job = jobs.submit("--workers=2", "--restarts=3", script=script)
    condition, _ = jobs.finish_job()
    assert (condition["type"], condition["reason"]) == ("Failed", "PodFailurePolicy")
    assert jobs.pod(0).process.wait(BOUND_S) == 128 + signal.SIGTERM
    assert len(jobs.cluster.pods_of("digits")) == 2
    code, _, err = jobs.tfdist("logs", job)
    assert code == 0
    assert re.search(rf"job {job} failed: PodFailurePolicy: .* failed with exit code 78", err)


@pytest.mark.parametrize(
    ("code", "action"),
    [
        (78, "FailJobSet"),
        (42, "RestartJobSetAndIgnoreMaxRestarts"),
        ("evicted", "RestartJobSetAndIgnoreMaxRestarts"),
        (75, None),  # restarts, and counts
    ],
)
def test_rules_of_a_jobset_fit_the_messages_of_its_job(jobs, cluster, code, action):
    """The Job of a JobSet fails as the rules expect; no JobSet controller runs here."""
    script = (
        BEAT + "print('attempt', attempt, flush=True)\ncode = sys.argv[1]\n"
        "train(60) if code == 'evicted' else sys.exit(int(code))\n"
    )
    command = ("task.py", str(code))
    jobset, _ = jobs.manifests(script=script, command=command, kind="jobset")
    job = jobset["spec"]["replicatedJobs"][0]["template"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    labels |= {f"jobset.sigs.k8s.io/{name}": "2" for name in ("jobset-uid", "restart-attempt")}
    kind = {"apiVersion": "batch/v1", "kind": "Job"}
    cluster.create({**kind, "metadata": {"name": "digits-worker-0"}, **job})
    if code == "evicted":
        jobs.evict(jobs.wait_for_output("attempt 2", name="digits-worker-0"))
    condition, _ = jobs.finish_job("digits-worker-0")
    assert "attempt 2" in jobs.pod(name="digits-worker-0").output()
    assert condition["type"] == "Failed"
    found = [
        rule["action"]
        for rule in jobset["spec"]["failurePolicy"]["rules"]
        if condition["reason"] in rule["onJobFailureReasons"]
        and any(
            re.search(each, condition["message"]) for each in rule["onJobFailureMessagePatterns"]
        )
    ]
    assert found == ([action] if action else []), condition


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--image=registry.example/missing:1"],
            r"pod digits-0-\w+ and 1 other: cannot start: ImagePullBackOff: .*; check --image",
        ),
        (
            ["--cpus=9"],
            r"pod digits-0-\w+ and 1 other: waits for a node: 0/3 nodes are available: 3 "
            r"Insufficient cpu; ask for less \(--cpus",
        ),
        (
            ["--volume=absent:/absent"],
            r'waits for a node: .*persistentvolumeclaim "absent" not found; check --volume',
        ),
        (
            ["--namespace=small"],
            r'job small/job/digits has no pods: pods "digits-[01]-\w+" is forbidden: exceeded '
            "quota: none, .*; the namespace has no quota left; ask for less",
        ),
    ],
    ids=["image", "nodes", "volume", "quota"],
)
def test_pods_that_cannot_start_say_why(jobs, cluster, flags, message):
    if "--namespace=small" in flags:
        cluster.kubectl("create", "namespace", "small")
        cluster.kubectl("create", "quota", "none", "--hard=pods=0", "--namespace=small")
        cluster.wait_for("pods: 0/0", "get", "quota", "none", "--namespace=small")
    job = jobs.submit("--workers=2", *flags)
    end = time.monotonic() + BOUND_S
    while True:
        code, out, err = jobs.tfdist("logs", job)
        assert (code, out) == (75, ""), err
        if re.search(message, err):
            break
        assert time.monotonic() < end, err
    assert len(err.splitlines()) == 1, err
    if "--namespace=small" in flags:
        cluster.kubectl("config", "set-context", "--current", "--namespace=small")
    try:
        listed = jobs.tfdist("jobs")[1]
    finally:
        cluster.kubectl("config", "set-context", "--current", "--namespace=default")
    assert re.search(rf"job/digits +Pending +digits .*{message}", listed), listed


def test_nothing_is_left_of_a_job_that_is_refused(jobs, cluster):
    def refused(*flags, **options):
        code, out, err = jobs.tfdist(*jobs.words(*flags, **options))
        assert (code, out) == (2, ""), err
        return err

    assert "take --kind job, which every cluster has" in refused(kind="jobset")
    assert 'namespaces "absent" not found; make the namespace' in refused("--namespace=absent")
    jobs.submit(name="digits")
    assert "already exists; name the job otherwise by --job-name" in refused()
    for kind in ("jobs", "services", "networkpolicies"):
        found = cluster.get(kind)["items"]
        assert [item["metadata"]["name"] for item in found].count("digits") == 1
    (secret,) = cluster.get("secrets")["items"]
    assert secret["metadata"]["name"] == "digits-task-secret"
    jobs.environ["KUBECONFIG"] = str(cluster.home / "guest.json")
    for found in (refused(name="other"), jobs.tfdist("jobs")[2]):
        assert "your account may not do this in the namespace; ask its administrator" in found
    jobs.environ["KUBECONFIG"] = cluster.environ["KUBECONFIG"]


def test_cluster_that_does_not_answer_is_named(jobs, cluster, tmp_path):
    config = json.loads((cluster.home / "guest.json").read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    (tmp_path / "config").write_text(json.dumps(config))
    environ = jobs.environ
    jobs.environ = {**environ, "KUBECONFIG": str(tmp_path / "config")}
    for words in (("jobs",), ("logs", "job/digits"), jobs.words()):
        code, _, err = jobs.tfdist(*words)
        assert code == 75, err
        assert "look at `kubectl cluster-info`" in err
    jobs.environ = environ


@pytest.fixture
def definitions(cluster):
    """Give the cluster the kinds of JobSet and Kubeflow Trainer, without their controllers."""
    directory = os.environ.get(CRDS)
    files = sorted(pathlib.Path(directory or "/absent").glob("*_crd.yaml.gz"))
    if not files:
        pytest.skip(f"{CRDS} names no directory of *_crd.yaml.gz of JobSet and Kubeflow Trainer")
    documents = [
        document
        for file in files
        for document in yaml.safe_load_all(gzip.decompress(file.read_bytes()))
        if document
    ]
    cluster.create(*documents)
    names = [f"crd/{document['metadata']['name']}" for document in documents]
    cluster.kubectl("wait", "--for=condition=Established", *names, "--timeout=60s")
    yield
    cluster.kubectl("delete", *names)


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_kinds_with_a_controller_are_accepted(jobs, cluster, definitions, kind):
    flags = ("--workers=2", "--gpus-per-task=1", "--pull-secret=s", "--volume=snapshots:/backup")
    manifests = jobs.manifests(*flags, kind=kind)
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    cluster.kubectl("create", "--dry-run=server", "--validate=strict", "--filename=-", text=text)
    job = jobs.submit(*flags, kind=kind)
    assert job == f"{kind}/digits"
    assert re.search(rf"default/{job} +Pending +digits .* has no pods", jobs.tfdist("jobs")[1])
    code, _, err = jobs.tfdist("logs", job)
    assert (code, len(err.splitlines())) == (75, 1)
    code, _, err = jobs.tfdist("cancel", job)
    assert code == 0, err
    assert "digits" not in jobs.tfdist("jobs")[1]


@pytest.mark.timeout(600)
def test_page_can_be_followed(jobs, cluster, snapshots, digits_dir):
    """The commands of docs/kubernetes.md train the digits, one after the other."""
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    claim = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1]
    assert "unchanged" in cluster.kubectl("apply", "--dry-run=server", "--filename=-", text=claim)
    (cluster.image / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "digits.py", cluster.image / "examples")
    pattern = r"^(tfdist (?:submit|jobs|logs|cancel) (?:.*\\\n)*.*)$"
    texts = re.findall(pattern, page, re.MULTILINE)
    commands = [shlex.split(text.replace("\\\n", " "))[1:] for text in texts]
    assert [each[0] for each in commands] == ["submit", "submit", "jobs", "logs", "cancel"]
    environ = [f"--env={jobs.mark}", f"--env=TFDS_DATA_DIR={digits_dir}"]
    outputs = []
    for command in commands:
        words = [word.replace("/snapshots", str(jobs.directory / "mounted")) for word in command]
        if words[0] == "submit":
            words[1:1] = environ
        result = run_process(
            [PYTHON, "-m", "tfdist", *words], cwd=ROOT, env=jobs.environ, timeout=300
        )
        assert result.returncode == 0, result.stderr + jobs.state()
        outputs.append(result.stdout)
    assert "kind: NetworkPolicy" in outputs[0]
    assert outputs[1] == "job/digits\n"
    assert re.search(r"default/job/digits +(Pending|Running) +digits ", outputs[2])
    assert "Epoch 8/8" in outputs[3]


@pytest.mark.timeout(900)
def test_digits_end_as_undisturbed_after_five_preemptions(jobs, urgent, snapshots, digits_dir):
    """Before the first step, and within epochs; weights and history are those of a plain launch."""
    path = jobs.directory / "mounted"
    script = [str(ROOT / "examples" / "digits.py"), "--epochs=8", "--global_batch=16"]
    threads = dict.fromkeys(THREAD_VARIABLES, "1")  # else sums are rounded in another way
    jobs.submit(
        *("--workers=2", "--restarts=0", f"--volume=snapshots:{path}", "--env=TFDIST_CHAOS=none"),
        *(f"--env={name}={value}" for name, value in threads.items()),
        f"--env=TFDS_DATA_DIR={digits_dir}",
        command=(*script, f"--backup_dir={path}"),
    )
    disruptions = [
        (0, None, "eviction"),
        (1, 1, "delete"),
        (0, 3, "preemption"),
        (1, 4, "drain"),
        (0, 6, "eviction"),
    ]
    for index, epoch, reason in disruptions:
        if epoch:
            jobs.wait_for_output(f"Epoch {epoch}/8", seconds=180)
        pod = jobs.pod(index)
        jobs.task(pod)  # before that, a container's first process ignores SIGTERM
        jobs.evict(pod, reason)
    condition, status = jobs.finish_job(seconds=240)
    assert condition["type"] == "Complete", jobs.state()
    assert "failed" not in status
    jobs.pod(0, begun=6)
    (found,) = jobs.pod(0).home.glob("work/runs/agents/*/start-0/task-0")
    calm = ("--workers=2", "--chaos=none", "--log-dir=calm")
    environ = {"TFDS_DATA_DIR": str(digits_dir), "CUDA_VISIBLE_DEVICES": "-1", **threads}
    command = (*script, f"--backup_dir={jobs.directory / 'calm-backup'}")
    code, out, err = jobs.run(*calm, command=command, environ=environ)
    assert code == 0, out + err
    compare = (
        "import sys; from tfdist.backup import result; "
        "print(result.compare(*map(result.read, sys.argv[1:])))"
    )
    compared = run_process([PYTHON, "-c", compare, str(found), str(jobs.directory / "calm")])
    assert "same=True" in compared.stdout, compared.stdout + compared.stderr
