"""Train a model with a large embedding table as one of several workers, and measure it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist import ClusterSpec
from tfdist.run.plan.step_memory import reserve

WIDTH = 16
IDS = 20  # of an example


@dataclasses.dataclass(frozen=True)
class Job:
    """Describe one worker process.

    Args:
        way: "Embedding", "Embedding read whole" (as Keras reads it by itself) or
            "ShardedEmbedding", with ", FSDP" for sharded weights and ", Adagrad", ", Adam" or
            ", LazyAdam" for the optimizer.
        rows: Number of rows of the table.
        batch: Examples of all workers per step, each with `IDS` ids.
        communication: Implementation of the collectives; "ring" sends through the network alone.
        cluster: Cluster, with the task of this process.
        core: The one core that the process may use.
        timeout: Seconds that it waits for the others.
    """

    way: str
    rows: int
    batch: int
    communication: str
    cluster: ClusterSpec
    core: int
    timeout: float


def serve(job: Job) -> tuple[int, Callable[[int], dict[str, Any]]]:
    """Return the bytes of the model's weights, and a function that trains so many steps."""
    os.sched_setaffinity(0, {job.core})  # before TensorFlow counts cores and makes threads
    import keras
    import tensorflow as tf

    import tfdist

    strategy = tfdist.make_strategy(
        "multi_worker_mirrored",
        job.cluster,
        "cpu",
        communication=job.communication,
        start_timeout=job.timeout,
    )

    class ReadWhole(keras.layers.Embedding):
        """Read the table and take rows of it, as Keras does without tfdist."""

        def call(self, inputs):
            whole = tf.convert_to_tensor(self.embeddings)
            return keras.ops.take(whole, inputs, axis=0)

    layers = {
        "Embedding": keras.layers.Embedding,
        "Embedding read whole": ReadWhole,
        "ShardedEmbedding": tfdist.layers.ShardedEmbedding,
    }
    layer = layers[job.way.partition(",")[0]]
    keras.utils.set_random_seed(3)
    reserve()
    before = _resident()
    with strategy.scope(), contextlib.ExitStack() as context:
        if "FSDP" in job.way:
            context.enter_context(tfdist.parallel.deferred())
        ids = keras.Input([IDS], dtype="int64")
        x = layer(job.rows, WIDTH, embeddings_initializer="zeros")(ids)
        outputs = keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(x))
        model = keras.Model(ids, outputs)
        context.close()
        if "FSDP" in job.way:
            tfdist.parallel.fsdp(model)
        optimizers = {
            "Adagrad": keras.optimizers.Adagrad,
            "Adam": keras.optimizers.Adam,
            "LazyAdam": tfdist.optimizers.LazyAdam,
        }
        model.compile(optimizers[job.way.rpartition(" ")[2]](0.1), "mse")

    class Recorder(keras.callbacks.Callback):
        """Note times and memory of all steps but the first, which traces."""

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                time.sleep(0.5)  # threads that send release the last tensors late
                self.resident = _resident() - before
                self.held = tf.config.experimental.get_memory_info("CPU:0")["current"]
                tf.config.experimental.reset_memory_stats("CPU:0")
                self.sent = _sent()
                self.begun = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            self.seconds = time.perf_counter() - self.begun if batch else 0.0

    def train(steps: int) -> dict[str, Any]:
        random = np.random.default_rng(0)
        x = random.integers(0, job.rows, (job.batch * (steps + 1), IDS))
        y = random.normal(size=(len(x), 1)).astype("float32")
        recorder = Recorder()
        losses = model.fit(
            x, y, batch_size=job.batch, shuffle=False, verbose=0, callbacks=[recorder]
        ).history["loss"]
        return {
            "resident": recorder.resident,
            "held": recorder.held,
            "peak": tf.config.experimental.get_memory_info("CPU:0")["peak"],
            "seconds": recorder.seconds / steps,
            "sent": (_sent() - recorder.sent) / steps,
            "loss": losses[-1],
        }

    return 4 * model.count_params(), train


def _resident() -> int:
    """Return the bytes of this process that are in memory."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _sent() -> int:
    """Return the bytes that all processes of this machine have sent through loopback."""
    for line in pathlib.Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return 0
