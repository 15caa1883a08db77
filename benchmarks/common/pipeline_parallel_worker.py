"""Measure a pipeline-parallel model once, in a process of its own.

`pipeline_parallel_worker.py '{"kind": ...}'` prints its figures as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf

from tfdist.parallel import pipeline

# Of the model whose memory is measured.
LAYERS = 16
WIDTH = 256
ROWS = 256  # of a micro-batch


@keras.saving.register_keras_serializable("tfdist_benchmarks")
class Sleeping(keras.layers.Layer):
    """Sleep in the forward pass, and twice as long in the backward pass."""

    def __init__(self, seconds: float, **kwargs):
        super().__init__(**kwargs)
        self.seconds = seconds

    def call(self, inputs):
        @tf.custom_gradient
        def slow(x):
            return _after(x, self.seconds), lambda upstream: _after(upstream, 2 * self.seconds)

        return slow(inputs)


def _after(x: tf.Tensor, seconds: float) -> tf.Tensor:
    def sleep(value):
        time.sleep(seconds)
        return value

    y = tf.numpy_function(
        sleep, [x], x.dtype, stateful=False
    )  # TensorFlow would run stateful ones one after the other
    return tf.ensure_shape(y, x.shape)


def sleeping(stages: int, seconds: float) -> tuple[keras.Model, list[str]]:
    """Return a model of equal stages, each of which sleeps, and where they end."""
    inputs = keras.Input((4,))
    x = inputs
    ends = []
    for i in range(stages):
        x = Sleeping(seconds, name=f"sleep_{i}")(keras.layers.Dense(4, name=f"dense_{i}")(x))
        ends.append(f"sleep_{i}")
    return keras.Model(inputs, x), ends[:-1]


def step_seconds(
    schedule: str, stages: int, microbatches: int, seconds: float, steps: int
) -> list[float]:
    """Return the seconds of each step, with a device for each stage."""
    devices = [tf.config.LogicalDeviceConfiguration()] * stages
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    model, ends = sleeping(stages, seconds)
    staged = pipeline(model, cut_at=ends, microbatches=microbatches, schedule=schedule)
    staged.compile("sgd", "mse")
    x = np.zeros((2 * microbatches, 4), "float32")
    staged.train_on_batch(x, x)  # traces
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        staged.train_on_batch(x, x)
        times.append(time.perf_counter() - begin)
    return times


def peak_bytes(
    schedule: str,
    stages: int,
    microbatches: int,
    recompute: bool,
    steps: int,
    layers: int = LAYERS,
    beyond: bool = False,
) -> list[int]:
    """Return the peak bytes of tensors in each step, with all stages on one device.

    Weights and batch are included; with `beyond`, what was there before the step is not.
    """
    inputs = keras.Input((WIDTH,))
    x = inputs
    for _ in range(layers):
        x = keras.layers.Dense(WIDTH, activation="relu")(x)
    staged = pipeline(
        keras.Model(inputs, x),
        stages,
        microbatches=microbatches,
        schedule=schedule,
        recompute=recompute,
        devices=["cpu:0"] * stages,
    )
    staged.compile("sgd", "mse")
    rows = tf.zeros((ROWS * microbatches, WIDTH))
    staged.train_on_batch(rows, rows)
    peaks = []
    for _ in range(steps):
        before = tf.config.experimental.get_memory_info("CPU:0")["current"] if beyond else 0
        tf.config.experimental.reset_memory_stats("CPU:0")
        staged.train_on_batch(rows, rows)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)
    return peaks


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    print(json.dumps({"sleep": step_seconds, "memory": peak_bytes}[order.pop("kind")](**order)))
