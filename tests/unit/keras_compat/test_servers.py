"""Test the names that parameter servers need, on servers in one process.

Each does what `keras_compat` says of it.
"""

from __future__ import annotations

import json

import pytest

CODE = """
import json, queue, threading
import keras
import tensorflow as tf
from tfdist import ClusterSpec, keras_compat
from tfdist.keras_compat import fused_updates, servers as server_compat

keras_compat.install()

CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"
spec = ClusterSpec.local(workers=2, ps=1, chief=True)
jobs = tf.train.ClusterSpec({job: list(tasks) for job, tasks in spec.jobs.items()})
config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=8)
servers = [
    tf.distribute.Server(jobs, job_name=t.type, task_index=t.index, protocol="grpc", config=config) for t in spec.tasks if t.type != "chief"
]
results = {"connected": [server_compat.connected()]}
strategy = tf.distribute.ParameterServerStrategy(
    tf.distribute.cluster_resolver.SimpleClusterResolver(jobs, task_type="chief", task_id=0, rpc_layer="grpc")
)
results["connected"].append(server_compat.connected())
server_compat.keep_metrics_on(strategy, CHIEF)
server_compat.trace_anywhere(strategy)
server_compat.update_in_place(strategy)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

workers, meet = queue.Queue(), threading.Barrier(2)
def turn():
    meet.wait(30)
    workers.put(server_compat.current_worker())
for _ in range(2):
    server_compat.schedule(coordinator, turn)
results["workers"] = sorted(workers.get(timeout=30) for _ in range(2))

with strategy.scope():
    metric = keras.metrics.Mean()
    weight = keras.Variable([1.0, 2.0], name="weight")
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer.build([weight])
results["devices"] = [tf.DeviceSpec.from_string(v.value.device).job for v in (metric.total, weight, keras_compat.step_counter(optimizer))]

step = tf.function(lambda: strategy.run(lambda: optimizer.apply([tf.ones([2])], [weight])), autograph=False).get_concrete_function()
for _ in range(4):
    step()
results["updated"] = weight.numpy().tolist()
results["counted"] = int(keras_compat.step_counter(optimizer).numpy())

with strategy.scope():
    table = keras.Variable(tf.zeros([3, 1]), name="table")
    optimizer = keras.optimizers.Adagrad(1.0)
    optimizer.build([table])
def update_a_row():
    with fused_updates.fused():
        optimizer.apply([tf.IndexedSlices(tf.ones([1, 1]), tf.constant([1]), tf.constant([3, 1]))], [table])
step = tf.function(lambda: strategy.run(update_a_row), autograph=False).get_concrete_function()
step()
results["rows"] = [round(float(v), 4) for v in table.numpy()[:, 0]]
results["kernels"] = [op.type for op in step.graph.get_operations() if "Adagrad" in op.type]

endless = tf.function(lambda: tf.while_loop(lambda i: i >= 0, lambda i: [i * 0], [0]), autograph=False).get_concrete_function()
run, cancel = server_compat.cancelable(endless)
threading.Timer(0.5, cancel).start()
try:
    with tf.device("/job:worker/replica:0/task:1"):
        run()
except tf.errors.CancelledError:
    results["cancelled"] = True

with keras_compat.replaced_values([weight], [tf.constant([5.0, 5.0])]):
    results["replaced"] = keras.ops.convert_to_numpy(weight + 0.0).tolist()
results["restored"] = weight.numpy().tolist()

def lost(job):
    return tf.errors.UnavailableError(None, None, f"x\\nAdditional GRPC error information from remote target /job:{job}/replica:0/task:0:")
results["failures"] = [[f(lost(job)) for job in ("worker", "ps")] for f in (server_compat.is_worker_failure, server_compat.is_server_failure)]
results["no failure"] = [
    f(tf.errors.InvalidArgumentError(None, None, "assertion failed")) for f in (server_compat.is_worker_failure, server_compat.is_server_failure)
]
print("FOUND" + json.dumps(results), flush=True)
import os
os._exit(0)  # servers have no end of their own
"""  # noqa: E501


@pytest.fixture(scope="module")
def results(run_python):
    done = run_python(CODE)
    assert "FOUND" in done.stdout, done.stderr
    return json.loads(done.stdout.partition("FOUND")[2])


@pytest.mark.parametrize(
    ("what", "expected"),
    {
        "connected": [False, True],
        "workers": [0, 1],
        "devices": ["chief", "ps", "ps"],
        "updated": [-1.0, 0.0],  # two updates by the mean of two gradients of 1
        "counted": 4,
        "rows": [0.0, -0.9535, 0.0],
        # Between several operations, another worker would find slots that do not fit.
        "kernels": ["ResourceSparseApplyAdagradV2"],
        "cancelled": True,
        "replaced": [5.0, 5.0],
        "restored": [-1.0, 0.0],
        "failures": [[True, False], [False, True]],
        "no failure": [False, False],
    }.items(),
)
def test_private_names_work_on_servers(results, what, expected):
    assert results.get(what) == expected
