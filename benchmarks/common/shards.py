"""Train a model with whole or sharded state, and measure the memory of this process."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist import ClusterSpec

CLASSES = 5


@dataclasses.dataclass(frozen=True)
class Job:
    """Describe one worker process.

    Args:
        way: "data parallel", "zero 1", "zero 2", "fsdp", or, with kernels gathered,
            "fsdp, gathered" or "fsdp, kept".
        width: Width of the model; a block has 8 times its square weights.
        blocks: Number of the model's blocks.
        batch: Examples of all workers per step.
        cluster: Cluster, with the task of this process.
        core: The one core that the process may use.
        timeout: Seconds that it waits for the others.
    """

    way: str
    width: int
    blocks: int
    batch: int
    cluster: ClusterSpec
    core: int
    timeout: float


def serve(job: Job) -> tuple[int, Callable[[int], dict[str, Any]]]:
    """Return the bytes of the model's weights, and a function that trains so many steps."""
    os.sched_setaffinity(0, {job.core})  # before TensorFlow counts cores and makes threads
    import keras
    import tensorflow as tf

    import tfdist
    from tfdist.parallel import deferred, fsdp, zero

    strategy = tfdist.make_strategy(
        "multi_worker_mirrored", job.cluster, "cpu", start_timeout=job.timeout
    )
    keras.utils.set_random_seed(3)
    with strategy.scope():
        optimizer = keras.optimizers.Adam(1e-4)
        if job.way.startswith("fsdp"):
            with deferred():
                model = _model(keras, job)
            fsdp(model, reshard_after_forward=job.way != "fsdp, kept")
        else:
            model = _model(keras, job)
            optimizer = (
                zero(optimizer, stage=int(job.way[-1])) if job.way.startswith("zero") else optimizer
            )
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    class StepRecorder(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                self.resident = min(_held(tf) for _ in range(10))
                tf.config.experimental.reset_memory_stats("CPU:0")
            self.begun = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            self.seconds = [*getattr(self, "seconds", []), time.perf_counter() - self.begun]

    def train(steps: int) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(job.batch * (steps + 1), job.width)).astype("float32")
        y = rng.integers(0, CLASSES, len(x))
        recorder = StepRecorder()
        data: dict[str, Any] = {"x": x, "y": y, "batch_size": job.batch, "shuffle": False}
        if job.way.startswith("fsdp, "):  # kernels are gathered where the batch is unknown
            data = {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(job.batch)}
        losses = model.fit(**data, verbose=0, callbacks=[recorder]).history["loss"]
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        return {
            "resident": recorder.resident,
            "peak": peak,
            "seconds": min(recorder.seconds[1:]),
            "loss": losses[-1],
        }

    return 4 * model.count_params(), train


def _held(tf) -> int:
    """Return the bytes of tensors after a while.

    Threads that send release the last tensors of a step only after its end.
    """
    time.sleep(0.1)
    return tf.config.experimental.get_memory_info("CPU:0")["current"]


def _model(keras, job: Job):
    class Block(keras.layers.Layer):
        def build(self, shape):
            self.norm = keras.layers.LayerNormalization()
            self.wide = keras.layers.Dense(4 * shape[-1], "relu")
            self.narrow = keras.layers.Dense(shape[-1])
            self.norm.build(shape)
            self.wide.build(shape)
            self.narrow.build((*shape[:-1], 4 * shape[-1]))
            self.built = True

        def call(self, x):
            return x + self.narrow(self.wide(self.norm(x)))

    layers = [
        keras.Input([job.width]),
        *[Block() for _ in range(job.blocks)],
        keras.layers.Dense(CLASSES),
    ]
    return keras.Sequential(layers)
