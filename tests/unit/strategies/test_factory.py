"""Test that a name, a cluster and devices give the strategy that fits, or one clear error."""

import json
import logging

import pytest
import tensorflow as tf

import tfdist
from tfdist.cluster.spec import ClusterSpec
from tfdist.strategies import devices, factory
from tfdist.strategies.factory import is_chief, make_strategy
from tfdist.strategies.multi_worker import check_native


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    """Remove the variables of this machine's own cluster, if it has one."""
    for name in ("TF_CONFIG", "SLURM_JOB_ID", "OMPI_COMM_WORLD_SIZE", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


def task(kind="worker", index=0, **jobs):
    return ClusterSpec.local(**jobs).for_task(kind, index)


# --- Names ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "given", "kind", "replicas"),
    [
        ("one_device", "cpu", tf.distribute.OneDeviceStrategy, 1),
        ("one_device", "cpu:1", tf.distribute.OneDeviceStrategy, 1),
        ("mirrored", "cpu:0,cpu:1,cpu:2", tf.distribute.MirroredStrategy, 3),
        (
            "central_storage",
            ["cpu:0", "cpu:1"],
            tf.distribute.experimental.CentralStorageStrategy,
            2,
        ),
        ("auto", "cpu", tf.distribute.OneDeviceStrategy, 1),
        ("auto", "cpu:0,cpu:2", tf.distribute.MirroredStrategy, 2),
        (None, "cpu", tf.distribute.OneDeviceStrategy, 1),
    ],
)
def test_a_name_makes_a_strategy_of_tensorflow(name, given, kind, replicas, caplog):
    with caplog.at_level(logging.INFO, "tfdist"):
        strategy = make_strategy(name, devices=given)
    assert isinstance(strategy, kind)
    assert isinstance(strategy, tf.distribute.Strategy)
    assert strategy.num_replicas_in_sync == replicas
    assert is_chief(strategy)
    assert len([r for r in caplog.records if "strategy" in r.message]) == 1
    assert ("as asked" in caplog.text) == (name not in (None, "auto"))


@pytest.mark.parametrize("cross_device", ["hierarchical_copy", "one_device"])
def test_sums_over_devices_can_be_chosen(cross_device):
    strategy = make_strategy("mirrored", devices="cpu:0,cpu:1", cross_device=cross_device)
    sums = strategy.run(
        lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0))
    )
    assert [float(s) for s in strategy.experimental_local_results(sums)] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("cluster", "names", "chosen", "why"),
    [
        (None, ["/cpu:0"], "one_device", "one process with one device"),
        (None, ["/gpu:0", "/gpu:1"], "mirrored", "one process with 2 devices"),
        (task(workers=2), ["/gpu:0", "/gpu:1"], "multi_worker_mirrored", "2 training tasks"),
        (task(workers=1, chief=True), ["/cpu:0"], "multi_worker_mirrored", "2 training tasks"),
        (task(workers=1), ["/cpu:0"], "one_device", "one process"),
        (task(workers=1), ["/gpu:0", "/gpu:1"], "mirrored", "one process"),
    ],
)
def test_auto_follows_cluster_and_devices(cluster, names, chosen, why):
    name, reason = factory._choose(cluster, names)
    assert name == chosen
    assert why in reason


@pytest.mark.parametrize(
    ("devices", "token", "message"),
    [
        (["/gpu:0"], "0" * 32, "native sums on one CPU device a worker, received /gpu:0; use auto"),
        (["/cpu:0", "/cpu:1"], "0" * 32, "received /cpu:0, /cpu:1"),
        (["/cpu:0"], "", "needs a secret.* the same value of the variable TFDIST_TASK_SECRET"),
        (["/cpu:0"], "short", "at least 16 random bytes, received 5"),
    ],
)
def test_native_communication_says_what_it_lacks(devices, token, message, monkeypatch):
    monkeypatch.setenv("TFDIST_TASK_SECRET", token)
    with pytest.raises(ValueError, match=f"communication: .*{message}"):
        check_native(devices)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "miror"},
            r"strategy: expected one of auto.*received 'miror', did you mean 'mirrored'\?",
        ),
        ({"name": "xyz"}, r"received 'xyz'$"),
        (
            {"name": "one_device", "communication": "nkcl"},
            r"communication: expected one of .*did you mean 'nccl'\?",
        ),
        (
            {"name": "mirrored", "cross_device": "hierarchical"},
            r"cross_device: .*did you mean 'hierarchical_copy'\?",
        ),
        ({"threads": 0}, "threads: expected a positive number, received 0"),
        ({"devices": "gpu:64"}, "devices: received 'gpu:64', but TensorFlow sees"),
        ({"devices": "cpu:0,cpu:5"}, "make_strategy was called too late: 6 CPU devices"),
        ({"name": "multi_worker_mirrored"}, "make_strategy was called too late: a cluster"),
        ({"threads": 3}, "make_strategy was called too late: threads"),
        ({"cluster": "nowhere.yaml"}, "nowhere.yaml"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    tf.constant(0)  # TensorFlow has started
    with pytest.raises(ValueError, match=message):
        make_strategy(**arguments)


def test_tpu_without_a_tpu():
    with pytest.raises(
        ValueError, match=r"tpu needs a TPU, but this machine has none .*use the strategy auto"
    ):
        make_strategy("tpu", devices="cpu")


@pytest.mark.parametrize("name", ["one_device", "mirrored", "central_storage", "tpu"])
def test_a_strategy_of_one_process_refuses_a_cluster_of_several(name):
    with pytest.raises(
        ValueError,
        match=f"strategy: {name} trains in one process, but .* 2 training tasks; use "
        "multi_worker_mirrored or auto",
    ):
        make_strategy(name, task(workers=2), devices="cpu")


def test_an_evaluator_stands_beside_the_training():
    strategy = make_strategy("auto", task("evaluator", 0, workers=2, evaluator=True), devices="cpu")
    assert isinstance(strategy, tf.distribute.OneDeviceStrategy)


def test_a_strategy_of_tensorflow_itself_is_its_own_chief():
    assert is_chief(tf.distribute.get_strategy())


# --- Devices --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "gpus", "names"),
    [
        (None, 0, ["/cpu:0"]),
        (None, 2, ["/gpu:0", "/gpu:1"]),
        (1, 0, ["/cpu:0"]),
        ("2", 0, ["/cpu:0", "/cpu:1"]),
        (2, 4, ["/gpu:0", "/gpu:1"]),
        ("cpu", 4, ["/cpu:0"]),
        ("GPU", 1, ["/gpu:0"]),
        ("gpu:1, gpu:0", 2, ["/gpu:1", "/gpu:0"]),
        (("/GPU:1", "device:cpu:0"), 2, ["/gpu:1", "/cpu:0"]),
    ],
)
def test_devices_are_read(given, gpus, names):
    assert devices.parse(given, gpus) == names


@pytest.mark.parametrize(
    ("given", "gpus", "message"),
    [
        (0, 0, "expected at least 1, received 0"),
        (3, 2, "expected at most the 2 GPUs of this process, received 3"),
        ("gpu", 0, 'received "gpu", but TensorFlow sees no GPU'),
        ("gpu:2", 2, "received 'gpu:2', but TensorFlow sees 2 GPUs"),
        ("gpu:0,gpu:0", 2, "expected distinct names"),
        ((), 2, "expected distinct names"),
        ("tpu:0", 2, 'expected a number, "cpu", "gpu" or names'),
        ("-1", 2, 'expected a number, "cpu", "gpu" or names'),
    ],
)
def test_invalid_devices_are_refused(given, gpus, message):
    with pytest.raises(ValueError, match=f"^devices: .*{message}"):
        devices.parse(given, gpus)


# --- Processes of their own: what must come before TensorFlow's start -----------------------------
def test_a_cluster_of_one_and_its_devices_and_threads_and_what_comes_too_late(run_python):
    """Make multi_worker_mirrored without other workers, and check its errors."""
    config = json.dumps(
        {"cluster": {"worker": ["localhost:1"]}, "task": {"type": "worker", "index": 0}}
    )
    code = f"""
import os, tfdist, tensorflow as tf
try:
    tfdist.make_strategy("multi_worker_mirrored", devices=2)
except ValueError as error:
    print(error)
os.environ["TF_CONFIG"] = {config!r}
print(type(tfdist.make_strategy("auto", devices="cpu", threads=1)).__name__)
del os.environ["TF_CONFIG"]
tf.constant(1)
try:
    tfdist.make_strategy(devices=3)
except ValueError as error:
    print(error)
"""
    done = run_python(code)
    assert (
        "multi_worker_mirrored uses one CPU device a worker, received 2; start more workers"
        in done.stdout
    ), done.stderr
    assert done.stdout.splitlines()[1] == "OneDeviceStrategy", done.stderr
    assert (
        "make_strategy was called too late: 3 CPU devices cannot be set up once TensorFlow "
        "has started"
    ) in done.stdout, done.stderr


def test_multi_worker_mirrored_without_a_cluster_trains(run_python):
    code = """
import tfdist
strategy = tfdist.make_strategy("multi_worker_mirrored", devices="cpu", threads=1)
import keras, numpy as np, tensorflow as tf
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
print(len(model.fit(np.ones((5, 2)), np.ones(5), batch_size=2, epochs=2, verbose=0).history["loss"]))
print(isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy), tf.config.threading.get_intra_op_parallelism_threads())
"""  # noqa: E501
    done = run_python(code)
    assert done.stdout.split() == ["2", "True", "1"], done.stderr


def test_make_strategy_is_exported():
    assert tfdist.make_strategy is make_strategy


def test_number_in_place_of_a_cluster_is_refused():
    with pytest.raises(ValueError, match="did you mean devices=2"):
        make_strategy("mirrored", 2)


@pytest.mark.parametrize("name", ["timeout", "start_timeout"])
@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_invalid_timeout_is_refused(name, seconds):
    with pytest.raises(ValueError, match=f"^{name}: expected seconds above 0, received {seconds}"):
        make_strategy(**{name: seconds})
