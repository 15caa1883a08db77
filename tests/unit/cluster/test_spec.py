"""Test ClusterSpec and its addresses: reading, writing, derived facts and errors."""

import json
import pathlib
import socket

import pytest

from tfdist.cluster.addresses import UnresolvedAddress
from tfdist.cluster.spec import ClusterSpec, parse_task

FULL = {"chief": ["c:1"], "worker": ["w:1", "w:2"], "ps": ["p:1"], "evaluator": ["e:1"]}
PAIR = {"worker": ["a:1", "b:1"]}


def config(cluster, task_type="worker", index=0, **more):
    return json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}, **more})


def lookup(**hosts):
    """Return a stand-in for socket.getaddrinfo that knows these hosts."""

    def resolve(host, port, type):
        if host not in hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, type, 6, "", (hosts[host], port))]

    return resolve


def test_tasks_have_an_order_ranks_and_one_chief():
    spec = ClusterSpec(dict(reversed(FULL.items())))
    assert [str(task) for task in spec.tasks] == [
        "chief:0",
        "worker:0",
        "worker:1",
        "ps:0",
        "evaluator:0",
    ]
    seen = [spec.for_task(task.type, task.index) for task in spec.tasks]
    assert [s.rank for s in seen[:3]] == [0, 1, 2]
    assert [s.is_chief for s in seen] == [True, False, False, False, False]
    assert [str(task) for task in spec.training_tasks] == ["chief:0", "worker:0", "worker:1"]
    with pytest.raises(ValueError, match="ps:0 has no rank"):
        _ = seen[3].rank
    assert ClusterSpec(PAIR, "worker", 0).is_chief


def test_a_process_outside_the_cluster():
    spec = ClusterSpec(PAIR)
    assert spec.task is None
    assert not spec.is_chief
    with pytest.raises(ValueError, match="has no rank"):
        _ = spec.rank
    with pytest.raises(ValueError, match="for_task"):
        spec.to_tf_config()


@pytest.mark.parametrize("jobs", [FULL, PAIR])
def test_tf_config_round_trip(jobs):
    spec = ClusterSpec(jobs)
    for task in spec.tasks:
        environ = {}
        spec.for_task(task.type, task.index).export(environ)
        assert ClusterSpec.from_environ(environ) == spec.for_task(task.type, task.index)
        # TensorFlow's parameter-server strategy would wait for an evaluator in "cluster".
        assert "evaluator" not in json.loads(environ["TF_CONFIG"])["cluster"]


def test_evaluator_may_be_in_the_cluster_beside_it_or_nowhere():
    inside = ClusterSpec.from_tf_config(config({**PAIR, "evaluator": ["e:1"]}, "evaluator"))
    beside = ClusterSpec.from_tf_config(config(PAIR, "evaluator", evaluator=["e:1"]))
    nowhere = ClusterSpec.from_tf_config(config(PAIR, "evaluator"))
    assert inside == beside
    assert inside.task.address == "e:1"
    assert str(nowhere.task) == "evaluator:0"
    assert nowhere.task.address == ""
    assert ClusterSpec.from_tf_config(nowhere.to_tf_config()) == nowhere


@pytest.mark.parametrize(
    ("more", "more_of_task"),
    [
        ({"environment": "cloud"}, {}),  # Kubeflow's TFJob
        ({"environment": "cloud", "job": '{"region": "r"}'}, {"cloud": "c", "trial": "1"}),
    ],
)
def test_further_fields_of_platforms_are_ignored(more, more_of_task):
    facts = json.loads(config(FULL, "ps"))
    spec = ClusterSpec.from_tf_config(json.dumps(facts))
    facts["task"] |= more_of_task
    assert ClusterSpec.from_tf_config(json.dumps({**facts, **more})) == spec


@pytest.mark.parametrize(
    "text", ["", "{}", '{"cluster": {}}', '{"task": {"type": "worker", "index": 0}}']
)
def test_tf_config_without_a_cluster_means_alone(text):
    assert ClusterSpec.from_environ({"TF_CONFIG": text}) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain.yaml", "worker:\n  - a:1\n  - '[::1]:2'\n"),
        ("nested.yaml", "cluster:\n  worker: ['a:1', '[::1]:2']\ntask: {type: worker, index: 1}\n"),
        ("plain.json", '{"worker": ["a:1",\n\t"[::1]:2"]}'),
        ("nested.json", config({"worker": ["a:1", "[::1]:2"]}, index="1")),
    ],
)
def test_files(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    spec = ClusterSpec.from_file(tmp_path / name)
    assert spec.jobs == {"worker": ("a:1", "[::1]:2")}
    assert (spec.task and str(spec.task)) == ("worker:1" if "nested" in name else None)
    assert ClusterSpec.from_file(tmp_path / name, task="worker:0").is_chief
    assert name in spec.source


def test_the_example_file():
    path = pathlib.Path(__file__).parents[3] / "configs" / "clusters" / "two-hosts.yaml"
    assert len(ClusterSpec.from_file(path, "worker:1").tasks) == 2


def test_local_clusters_have_free_distinct_ports():
    spec = ClusterSpec.local(workers=3, ps=1, chief=True, evaluator=True)
    assert [str(task) for task in spec.tasks][0::5] == ["chief:0", "evaluator:0"]
    assert len({task.address for task in spec.tasks}) == 6
    for task in spec.tasks:
        spec.for_task(task.type, task.index).check_host()


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        ({}, "expected a chief or worker"),
        ({"ps": ["a:1"]}, "expected a chief or worker"),
        ({"worker": []}, "'worker': addresses are missing"),
        ({"worker": None}, "expected a list"),
        ({"worker": "a:1"}, "expected a list"),
        ({"worker": {"0": "a:1"}}, "sparse"),
        ({"master": ["a:1"]}, "rename it to 'chief'"),
        ({"wroker": ["a:1"]}, "'wroker': unknown; jobs are chief, worker"),
        ({"chief": ["a:1", "b:1"]}, "'chief': has 2 tasks, at most one"),
        ({"worker": ["a:1"], "evaluator": ["b:1", "c:1"]}, "'evaluator': has 2 tasks"),
        ({"worker": ["a:1", "b:1", "A:1"]}, "worker:2 has the duplicate address A:1 of worker:0"),
        ({"worker": ["a:1"], "ps": ["a:1"]}, "ps:0 has the duplicate address a:1 of worker:0"),
        *(
            ({"worker": ["a:1", bad]}, "worker:1: address .* is not host:port")
            for bad in ("", "a", ":1", 7, "::1:2")
        ),
        *(({"worker": [f"a:{port}"]}, "invalid port") for port in ("0", "65536", "99999")),
        ({"worker": ["0.0.0.0:1"]}, "every interface"),
    ],
)
def test_wrong_jobs(jobs, words):
    with pytest.raises(ValueError, match=f"^TF_CONFIG: .*{words}"):
        ClusterSpec(jobs, source="TF_CONFIG")


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ((None, 0), "type is missing"),
        (("ps", 0), "unknown task type; the cluster has the jobs worker"),
        (("master", 0), "use 'chief'"),
        (("worker", 2), "out of range; job 'worker' has 2 tasks, 0 to 1"),
        (("worker", -1), "out of range"),
        (("evaluator", 1), "out of range"),
        (("worker", None), "index is missing"),
        (("worker", "one"), "not an integer"),
        (("worker", True), "not an integer"),
    ],
)
def test_wrong_tasks(task, words):
    with pytest.raises(ValueError, match=f"^TF_CONFIG: task .*{words}"):
        ClusterSpec.from_tf_config(config(PAIR, *task))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be parsed"),
        ("[" * 100_000, "cannot be parsed"),
        ("[]", "expected a mapping"),
        ("{}", "expected 'cluster' with jobs"),
        (json.dumps({"cluster": PAIR}), "'task' with type and index"),
        (json.dumps({"cluster": [1], "task": {"type": "worker", "index": 0}}), "must be mappings"),
        ('{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}}', "'worker' appears twice"),
    ],
)
def test_wrong_tf_config(text, words):
    with pytest.raises(ValueError, match=f"^TF_CONFIG: .*{words}"):
        ClusterSpec.from_tf_config(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        (b"worker: ['\xff:1']", "cannot be read"),
        ("worker: [a:1", "cannot be parsed"),
        ("[worker]: [a:1]", "cannot be parsed: .*unhashable key"),
        ("{a: b}: [a:1]", "cannot be parsed: .*unhashable key"),
        ("[" * 5000, "cannot be parsed: the document is nested too deeply"),
        ("a: " + "[" * 5000 + "]" * 5000, "cannot be parsed: the document is nested too deeply"),
        ("", "expected a mapping"),
        ("worker: [a:1]\nworker: [b:1]", "'worker' appears twice"),
        ("workers: [a:1]", "'workers': unknown"),
    ],
)
def test_wrong_files(tmp_path, text, words):
    path = tmp_path / "cluster.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=rf"(?s)file .*cluster.yaml: .*{words}"):
        ClusterSpec.from_file(path)


@pytest.mark.parametrize("text", ["worker", "worker:", "worker:-1", "worker-1", "1"])
def test_wrong_task_names(text):
    with pytest.raises(ValueError, match="expected TYPE:INDEX"):
        parse_task(text)


def test_unresolved_names_are_all_named():
    spec = ClusterSpec({"worker": ["here:1", "nowhere:1", "lost:1"]})
    with pytest.raises(
        UnresolvedAddress, match=r"worker:1 at nowhere:1 .*worker:2 at lost:1 .*/etc/hosts"
    ) as caught:
        spec.check_host(lookup(here="127.0.0.1"))
    assert set(caught.value.reasons) == {"worker:1", "worker:2"}


@pytest.mark.parametrize(
    ("jobs", "hosts", "words"),
    [
        (
            ["a:1", "b:1"],
            {"a": "10.0.0.1", "b": "10.0.0.1"},
            "worker:0 .* worker:1 .* same machine and port",
        ),
        (["a:1", "b:1"], {"a": "127.0.0.1", "b": "127.0.0.2"}, "same machine and port"),
        (
            ["a:1", "b:1"],
            {"a": "127.0.1.1", "b": "10.0.0.2"},
            "worker:0 at a:1 .127.0.1.1. is a loopback",
        ),
    ],
)
def test_hosts_that_do_not_fit_together(jobs, hosts, words):
    with pytest.raises(ValueError, match=words):
        ClusterSpec({"worker": jobs}).check_host(lookup(**hosts))


def test_own_address_of_another_machine():
    spec = ClusterSpec({"worker": ["a:2222", "b:2222"]}, "worker", 1)
    with pytest.raises(
        ValueError, match=r"this process is worker:1: b:2222 is not an address of this machine"
    ):
        spec.check_host(
            lookup(a="203.0.113.1", b="203.0.113.2")
        )  # addresses for documentation, nobody's own


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.2"]
)  # the second: TensorFlow listens on all interfaces
def test_own_port_in_use(host):
    with socket.create_server((host, 0)) as taken:
        spec = ClusterSpec({"worker": [f"127.0.0.1:{taken.getsockname()[1]}"]}, "worker", 0)
        with pytest.raises(
            ValueError, match=r"the port of 127.0.0.1.* is already in use .* choose another port"
        ):
            spec.check_host()
    # Not the same port, which another process may have taken since.
    ClusterSpec.local(workers=1).for_task("worker", 0).check_host()


def test_the_evaluator_needs_no_address():
    spec = ClusterSpec({"worker": ["a:1"], "evaluator": ["nowhere:1"]}, "evaluator", 0)
    spec.check_host(lookup(a="10.0.0.1"))
