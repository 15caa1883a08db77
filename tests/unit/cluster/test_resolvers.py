"""Test that each environment's cluster is found in the documented order, or refused."""

import json

import pytest

from tfdist.cluster import resolvers
from tfdist.cluster.addresses import free_ports
from tfdist.cluster.spec import ClusterSpec

TF_CONFIG = json.dumps(
    {"cluster": {"worker": ["t:1", "t:2"]}, "task": {"type": "worker", "index": 0}}
)
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[2,10]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "2058944513",
    "TFDIST_HOSTS": "a:2,b",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "10",
    "HOSTNAME": "my-job-10",
    "TFDIST_K8S_SERVICE": "net",
    "TFDIST_K8S_REPLICAS": "11",
}


def hosts(spec):
    return [address.partition(":")[0] for address in spec.jobs["worker"]]


def ports(spec):
    return [int(address.partition(":")[2]) for address in spec.jobs["worker"]]


@pytest.mark.parametrize(
    ("cluster", "environ", "source"),
    [
        (ClusterSpec({"worker": ["x:1"]}), {"TF_CONFIG": TF_CONFIG}, "arguments"),
        (None, {"TF_CONFIG": TF_CONFIG, **MPI, **SLURM, **KUBERNETES}, "TF_CONFIG"),
        (None, {**MPI, **SLURM, **KUBERNETES}, "Open MPI"),
        (None, {**SLURM, **KUBERNETES}, "Slurm step 7.1"),
        (None, KUBERNETES, "Kubernetes job my-job"),
        (None, {"TF_CONFIG": "", **KUBERNETES}, "Kubernetes job my-job"),
        (None, {}, None),
        (None, {"TF_CONFIG": "{}", **SLURM}, None),
        (None, {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, None),
        (
            None,
            {name: value for name, value in SLURM.items() if "STEP" not in name},
            None,
        ),  # an sbatch script
        (None, {**MPI, "OMPI_COMM_WORLD_SIZE": "1"}, None),
        (None, {**KUBERNETES, "TFDIST_K8S_REPLICAS": "1"}, None),
    ],
)
def test_first_environment_found_is_used_and_named(cluster, environ, source, caplog):
    with caplog.at_level("INFO", logger="tfdist"):
        spec = resolvers.resolve(cluster, environ=environ)
    assert (spec and spec.source) == source
    assert len(caplog.messages) == 1
    assert (source or "this process runs alone") in caplog.messages[0]


def test_files_and_tasks(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("worker: ['a:1', 'b:1']")
    assert resolvers.resolve(path, environ={}).task is None
    assert resolvers.resolve(str(path), "worker:1", {"TF_CONFIG": TF_CONFIG}).task.address == "b:1"
    assert resolvers.resolve(None, "worker:1", {"TF_CONFIG": TF_CONFIG}).task.address == "t:2"
    with pytest.raises(ValueError, match="'worker:1': expected a cluster"):
        resolvers.resolve(task="worker:1", environ={})


@pytest.mark.parametrize(
    ("per_node", "distribution", "expected"),
    [
        ("2(x2)", {}, "n2 n2 n10 n10"),
        ("2(x2)", {"SLURM_DISTRIBUTION": "block:cyclic,nopack"}, "n2 n2 n10 n10"),
        ("2(x2)", {"SLURM_DISTRIBUTION": "cyclic"}, "n2 n10 n2 n10"),
        ("3,1", {}, "n2 n2 n2 n10"),
        ("1,3", {"SLURM_DISTRIBUTION": "cyclic:block"}, "n2 n10 n10 n10"),
        ("3,1", {"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "2"}, "n2 n2 n10 n2"),
    ],
)
def test_slurm_placements(per_node, distribution, expected):
    """Every rank computes the same addresses, and its own is on its own node."""
    hosts_by_rank = expected.split()
    specs = []
    for rank, host in enumerate(hosts_by_rank):
        own = {
            "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(["n2", "n10"].index(host)),
            "SLURM_LOCALID": str(hosts_by_rank[:rank].count(host)),
        }
        spec = resolvers.from_slurm(
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": per_node, **distribution, **own}
        )
        assert spec.rank == rank
        specs.append(spec.jobs)
    assert hosts(spec) == hosts_by_rank
    assert all(jobs == specs[0] for jobs in specs)


@pytest.mark.parametrize("distribution", ["block", "cyclic"])
def test_slurm_step_over_components_takes_block_whatever_one_component_has(distribution):
    """srun tells a task the distribution of its own component, or by a race of another."""
    environ = {
        **SLURM,
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_NODELIST": "n[1-3]",
        "SLURM_STEP_TASKS_PER_NODE": "1,2(x2)",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]",
        "SLURM_DISTRIBUTION": distribution,
        "SLURM_PROCID": "2",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "1",
    }
    hosts = [address.partition(":")[0] for address in resolvers.from_slurm(environ).jobs["worker"]]
    assert hosts == ["n1", "n2", "n2", "n3", "n3"]
    with pytest.raises(ValueError, match="puts it elsewhere; use srun --distribution=block"):
        resolvers.from_slurm({**environ, "SLURM_NODEID": "2", "SLURM_LOCALID": "0"})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, range(21600, 21604)),  # 20000 + 32 * (7 * 7 + 1)
        ({"TFDIST_PORT": "3000", "SLURM_STEP_RESV_PORTS": "400-409"}, range(3000, 3004)),
        ({"SLURM_STEP_RESV_PORTS": "400-402,500"}, [400, 401, 402, 500]),
        ({"SLURM_STEP_RESV_PORTS": "400-401"}, [400, 401, 400, 401]),
    ],
)
def test_slurm_ports(environ, expected):
    assert ports(resolvers.from_slurm({**SLURM, **environ})) == list(expected)


def many_tasks(count):
    """Return the environment of rank 0 of a step of one node."""
    return SLURM | {
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_TASKS_PER_NODE": str(count),
    }


def test_ports_of_jobs_are_apart_from_those_that_local_clusters_choose():
    derived = {
        port
        for job in range(300)
        for tasks in (4, 100)
        for port in ports(resolvers.from_slurm(many_tasks(tasks) | {"SLURM_JOB_ID": str(job)}))
    }
    assert derived.isdisjoint(free_ports(1000))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", "a"),
        ("a,b", "a b"),
        ("n[2,10]", "n2 n10"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("r[0-1]n[1-2]-ib,x", "r0n1-ib r0n2-ib r1n1-ib r1n2-ib x"),
        ("10.0.0.[9-10]", "10.0.0.9 10.0.0.10"),
    ],
)
def test_hostlists(text, expected):
    assert resolvers.expand_hostlist(text) == expected.split()


def test_open_mpi():
    assert hosts(resolvers.from_open_mpi(MPI)) == ["a", "a", "b"]
    local = {**MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    del local["TFDIST_HOSTS"]
    spec = resolvers.from_open_mpi(local)
    assert hosts(spec) == ["127.0.0.1"] * 3
    other_run = resolvers.from_open_mpi({**local, "PMIX_NAMESPACE": "2058944514"})
    assert not set(ports(spec)) & set(ports(other_run))


def test_kubernetes():
    spec = resolvers.from_kubernetes(
        {**KUBERNETES, "HOSTNAME": "my-job-10.net.default.svc.cluster.local"}
    )
    assert spec.task.address == "my-job-10.net:2222"
    assert ports(resolvers.from_kubernetes({**KUBERNETES, "TFDIST_PORT": "5"})) == [5] * 11


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {**SLURM, "SLURM_DISTRIBUTION": "strange"},
            "'strange' is not known; use srun --distribution=block",
        ),
        (
            {**SLURM, "SLURM_DISTRIBUTION": "arbitrary"},
            "arbitrary without SLURM_HOSTFILE .* or use --distribution=block",
        ),
        (
            {**SLURM, "SLURM_DISTRIBUTION": "arbitrary", "SLURM_HOSTFILE": "/nowhere"},
            "SLURM_HOSTFILE '/nowhere' cannot be read here",
        ),
        ({**SLURM, "SLURM_LOCALID": "1"}, "SLURM_PROCID 2 is task 1 of node 1"),
        ({**SLURM, "SLURM_PROCID": "9"}, "SLURM_PROCID 9"),
        (
            {**SLURM, "SLURM_STEP_RESV_PORTS": "400"},
            "1 ports for 2 tasks on a node; use srun --resv-ports=2",
        ),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2"}, "2 nodes in SLURM_STEP_NODELIST, 1 in"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "two"}, "expected counts such as"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[a-b]"}, "expected numbers and ranges"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is missing"),
        ({**SLURM, "TFDIST_PORT": "high"}, "TFDIST_PORT: expected a number"),
        ({**SLURM, "TFDIST_PORT": "65534"}, "Slurm step 7.1: worker:2: .*invalid port 65536"),
        ({k: v for k, v in MPI.items() if k != "TFDIST_HOSTS"}, "add -x TFDIST_HOSTS=HOST:SLOTS"),
        ({**MPI, "TFDIST_HOSTS": "a,b"}, "2 slots for 3 processes"),
        ({**MPI, "TFDIST_HOSTS": "a:2,b:x"}, "expected HOST:SLOTS"),
        ({**MPI, "TFDIST_HOSTS": "a:1,b:2"}, "rank 2 is process 0 of its host, .*--map-by slot"),
        ({**KUBERNETES, "HOSTNAME": "node7"}, "'node7' does not end in -10"),
        ({**KUBERNETES, "TFDIST_K8S_SERVICE": ""}, "TFDIST_K8S_SERVICE is missing; .*TF_CONFIG={}"),
        ({**KUBERNETES, "TFDIST_K8S_REPLICAS": ""}, "TFDIST_K8S_REPLICAS is missing"),
        (
            {**KUBERNETES, "TFDIST_K8S_REPLICAS": "10"},
            "Kubernetes job my-job: task worker:10: index out of range",
        ),
    ],
)
def test_wrong_environments(environ, words):
    with pytest.raises(ValueError, match=words):
        resolvers.resolve(environ=environ)
