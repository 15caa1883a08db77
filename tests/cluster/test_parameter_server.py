"""Test Keras' features with workers that train by themselves on parameter servers.

Every step, and every example, counts once.
"""

import json

import pytest

from tests.cluster.scripts.ps_features import FEATURES, GUIDES
from tests.processes import PYTHON, ROOT, group, tasks
from tfdist.cluster.spec import ClusterSpec
from tfdist.strategies.factory import make_strategy

TIMEOUT_S = 600  # for one cluster: about 70 on an idle machine of 2 cores
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


def results_of(directory, workers, ps, *features):
    """Run features in a cluster of their own, and return the error of each."""
    spec = ClusterSpec.local(workers=workers, ps=ps, chief=True)
    out = directory / "results.json"
    command = [PYTHON, "-m", "tests.cluster.scripts.ps_features", str(out), *features]
    with group(directory) as members:
        tasks(members, spec, command, PYTHONPATH=str(ROOT))
        members.succeed(TIMEOUT_S)
    return json.loads(out.read_text())


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    return results_of(tmp_path_factory.mktemp("features"), 2, 2)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_of_keras(results, feature):
    assert results[feature] is None, results[feature]


@pytest.fixture(scope="session")
def of_one_worker(tmp_path_factory):
    directory = tmp_path_factory.mktemp("one-worker")
    return results_of(directory, 1, 3, "data_set", "arrays", "predict", *GUIDES)


def test_parameter_servers_may_outnumber_workers(of_one_worker):
    assert {of_one_worker[name] for name in ("data_set", "arrays", "predict")} == {None}


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_of_keras_gives_the_numbers_of_one_device(of_one_worker, guide):
    assert of_one_worker[guide] is None, of_one_worker[guide]


def test_workers_may_outnumber_parameter_servers(tmp_path):
    results = results_of(tmp_path, 3, 1, "data_set", "arrays", "predict")
    assert set(results.values()) == {None}, results


# --- Mistakes before there is a strategy ----------------------------------------------------------
@pytest.mark.parametrize(
    ("jobs", "missing"),
    [
        ({"workers": 1, "chief": True}, "ps"),
        ({"workers": 0, "ps": 1, "chief": True}, "worker"),
        ({"workers": 1, "ps": 1}, "chief"),
    ],
)
def test_a_cluster_without_a_job_that_is_needed(jobs, missing):
    cluster = ClusterSpec.local(**jobs)
    with pytest.raises(
        ValueError,
        match=f"lists no {missing}. On one machine, use `tfdist launch --chief --workers 2 --ps 1",
    ):
        make_strategy("parameter_server", cluster.for_task(*cluster.tasks[0][:2]))


def test_a_variable_partitioner():
    cluster = ClusterSpec.local(workers=1, ps=1, chief=True).for_task("chief", 0)
    with pytest.raises(
        ValueError, match=r"variable_partitioner: .*tfdist\.layers.ShardedEmbedding"
    ):
        make_strategy("parameter_server", cluster, variable_partitioner=lambda shape, dtype: [2, 1])


def test_strategy_made_after_tensors_is_refused(tmp_path):
    code = "import tensorflow as tf, tfdist; tf.zeros([]); tfdist.make_strategy()"
    config = ClusterSpec.local(workers=1, ps=1, chief=True).for_task("chief", 0).to_tf_config()
    with group(tmp_path) as members:
        members.start("chief", [PYTHON, "-c", code], TF_CONFIG=config, PYTHONPATH=str(ROOT))
        assert members.wait(60) == {"chief": 1}
        assert (
            "ValueError: make_strategy was called too late: a cluster cannot be set up"
            in members.log("chief")
        ), members.logs()


# --- A table on several parameter servers ---------------------------------------------------------
def test_a_sharded_table_is_never_pulled_and_saved_as_one(tmp_path):
    """Run in a network namespace of its own, where the loopback interface counts this job alone."""
    out = tmp_path / "report.json"
    module = "tests.cluster.scripts.embedding"
    launch = [
        PYTHON,
        "-m",
        "tfdist",
        "launch",
        "--chief",
        "--workers",
        "2",
        "--ps",
        "2",
        "--log-dir",
        str(tmp_path / "logs"),
    ]
    with group(tmp_path) as members:
        members.start(
            "launch",
            [*launch, "--", "-m", module, str(out), "sharded", "adam"],
            PYTHONPATH=str(ROOT),
        )
        members.succeed(TIMEOUT_S)
    report = json.loads(out.read_text())
    assert report["devices"] == ["ps:0", "ps:1"]
    assert report["shards"] == [[100_000, 16], [100_000, 16]]
    assert report["bytes_per_step"] < report["table_bytes"] / 50
    assert report["iterations"] == 180
    assert report["untouched"]
    assert report["trained"] == 1.0
    assert report["losses"][-1] < report["losses"][0]
    assert report["saved_shape"] == [200_000, 16]
    assert report["saved_equal"]
    assert report["lazy_losses"][-1] < report["lazy_losses"][0] < report["losses"][0]
    assert report["lazy_untouched"]
