"""Train small networks with and without XLA in one process, on orders.

Nothing is compared here.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from common.workers import CLASSES, LEARNING_RATE

SIDE = 28
WORDS = 1000
LENGTH = 32


@dataclasses.dataclass(frozen=True)
class Job:
    """Describe a process: network of `NETWORKS`, number of replicas, and examples of a replica."""

    network: str
    replicas: int
    replica_batch: int


def serve(job: Job) -> tuple[int, Callable[..., Any]]:
    """Return the network's parameter count, and a function that trains.

    An order is whether XLA compiles, and a number of steps; the answer is the CPU seconds and the
    wall seconds per step. The order "differences" returns the largest difference between the
    losses of both, and between their weights, after the steps so far.
    """
    import keras
    import tensorflow as tf

    import tfdist

    replicas = job.replicas
    strategy = (
        tfdist.make_strategy("mirrored", devices=[f"CPU:{i}" for i in range(replicas)])
        if replicas > 1
        else tfdist.make_strategy("one_device", devices="cpu")
    )
    models: dict[bool, Any] = {}
    losses: dict[bool, list[float]] = {False: [], True: []}
    for xla in (False, True):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            models[xla] = NETWORKS[job.network](keras)
            models[xla].compile(
                keras.optimizers.Adam(LEARNING_RATE),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
                jit_compile=xla,
            )
    rows = job.replica_batch * replicas
    batches = (
        tf.data.Dataset.from_tensor_slices(_examples(models[True], 8 * rows))
        .batch(rows, drop_remainder=True)
        .cache()
        .repeat()
    )

    def carry_out(what: bool | str, steps: int = 0) -> tuple[float, float]:
        if what == "differences":
            weights = zip(*(models[xla].get_weights() for xla in models), strict=True)
            return (
                float(np.abs(np.subtract(losses[True], losses[False])).max()),
                max(float(np.abs(a - b).max()) for a, b in weights),
            )
        assert isinstance(what, bool)
        cpu, wall = time.process_time(), time.perf_counter()
        history = models[what].fit(batches, steps_per_epoch=steps, verbose=0).history
        losses[what] += history["loss"]
        return (time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps

    return models[True].count_params(), carry_out


def _examples(model: Any, rows: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    shape = (rows, *model.input_shape[1:])
    words = model.inputs[0].dtype == "int32"
    x = random.integers(0, WORDS, shape, np.int32) if words else random.random(shape, np.float32)
    return x, random.integers(0, CLASSES, rows, np.int32)


def _mlp(keras):
    dense = [keras.layers.Dense(256, activation="gelu") for _ in range(3)]
    layers = [keras.layers.Flatten(), *dense, keras.layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input((SIDE, SIDE, 1)), *layers])


def _cnn(keras, pooling: str):
    layers = keras.layers
    pool = getattr(layers, pooling)
    blocks = [
        layer
        for filters in (16, 32)
        for layer in (
            layers.Conv2D(filters, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            pool(2),
        )
    ]
    return keras.Sequential(
        [keras.Input((16, 16, 3)), *blocks, layers.Flatten(), layers.Dense(CLASSES)]
    )


def _transformer(keras):
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 64)(tokens)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 16)(y, y)])
        y = layers.Dense(256, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(64)(y)])
    return keras.Model(tokens, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


NETWORKS: dict[str, Callable] = {
    "transformer": _transformer,
    "MLP": _mlp,
    "CNN, average pooling": lambda keras: _cnn(keras, "AveragePooling2D"),
    "CNN, max pooling": lambda keras: _cnn(keras, "MaxPooling2D"),
}
