"""Measure CPU time of optimizer updates and first steps in a process of one core, on orders.

Nothing is compared here.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from common.workers import CLASSES, LEARNING_RATE, SIDE, Model

# Optimizers by their titles: class and arguments.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam": ("Adam", {}),
    "AdamW": ("AdamW", {}),
    "SGD": ("SGD", {}),
    "SGD, momentum": ("SGD", {"momentum": 0.9}),
    "SGD, Nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "RMSprop, momentum": ("RMSprop", {"momentum": 0.9}),
    "Adagrad": ("Adagrad", {}),
}
UPDATES = "tfdist", "Keras"


@dataclasses.dataclass(frozen=True)
class Job:
    """Describe a process: the model it trains, or the network it builds, and its core."""

    model: Model | None
    core: int
    network: str = ""
    update: str = "tfdist"


def serve(job: Job) -> tuple[int, Callable[..., float]]:
    """Return a model's parameter count, and a function that measures updates or steps.

    An order is "update" or "fit", a title of `OPTIMIZERS`, one of `UPDATES`, and a number of
    steps; the answer is the CPU seconds per step.
    """
    assert job.model is not None
    os.sched_setaffinity(0, {job.core})  # before TensorFlow counts cores and makes threads
    import keras
    import tensorflow as tf

    import tfdist

    strategy = tfdist.make_strategy("one_device", devices="cpu")
    layers = keras.layers
    filters = job.model.filters
    random = np.random.default_rng(0)
    rows = 8 * job.model.replica_batch
    examples = random.random((rows, SIDE, SIDE, 1), np.float32), random.integers(0, CLASSES, rows)
    batches = (
        tf.data.Dataset.from_tensor_slices(examples)
        .batch(job.model.replica_batch, drop_remainder=True)
        .repeat()
    )
    built: dict[tuple[str, str], Any] = {}
    traced: dict[tuple[str, str], Any] = {}

    def build(title: str, update: str):
        if (title, update) not in built:
            body = (
                [layers.Conv2D(filters, 3, activation="relu"), layers.MaxPooling2D()]
                if filters
                else []
            )
            dense = [layers.Dense(width, activation="relu") for width in job.model.widths]
            with strategy.scope():
                model = keras.Sequential(
                    [keras.Input((SIDE, SIDE, 1)), *body, layers.Flatten(), *dense]
                    + [layers.Dense(CLASSES)]
                )
                name, arguments = OPTIMIZERS[title]
                optimizer = _class(keras, name, update)(LEARNING_RATE, **arguments)
                optimizer.build(model.trainable_variables)
                model.compile(
                    optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                )
            built[title, update] = model
        return built[title, update]

    def updates(title: str, update: str):
        """Return a function that updates a model so many times in a graph."""
        if (title, update) not in traced:
            model = build(title, update)
            grads = [tf.fill(v.shape, 1e-3) for v in model.trainable_variables]

            def step(number):
                strategy.run(lambda: model.optimizer.apply(grads, model.trainable_variables))
                return number + 1

            traced[title, update] = tf.function(
                lambda steps: tf.while_loop(
                    lambda number: number < steps, step, [0], parallel_iterations=1
                ),
                autograph=False,
            )
            traced[title, update](tf.constant(2))
        return traced[title, update]

    def carry_out(what: str, title: str, update: str, steps: int) -> float:
        if what == "update":
            run = updates(title, update)
            start = time.process_time()
            run(tf.constant(steps))
            return (time.process_time() - start) / steps
        clock = _clock(keras)
        build(title, update).fit(
            batches, epochs=2, steps_per_epoch=steps, verbose=0, callbacks=[clock]
        )
        return (clock.ends[1] - clock.ends[0]) / steps

    return build("Adam", "tfdist").count_params(), carry_out


def first_step(job: Job) -> tuple[float, Callable[..., float]]:
    """Return the CPU seconds of a network's first step, and a function that raises."""
    os.sched_setaffinity(0, {job.core})
    import keras
    import tensorflow as tf

    import tfdist

    strategy = tfdist.make_strategy("one_device", devices="cpu")
    with strategy.scope():
        model = NETWORKS[job.network](keras)
        optimizer = _class(keras, "AdamW", job.update)(LEARNING_RATE)
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    inputs = tf.zeros((4, *model.input_shape[1:]), model.inputs[0].dtype)
    batch = tf.data.Dataset.from_tensors((inputs, tf.zeros(4, tf.int32)))
    start = time.process_time()
    model.fit(batch, verbose=0)
    return time.process_time() - start, _refuse


def _refuse(*_) -> float:
    raise ValueError("a process measures one first step")


def _resnet(keras):
    return keras.applications.ResNet50(
        weights=None, input_shape=(64, 64, 3), classes=CLASSES, classifier_activation=None
    )


def _transformer(keras):
    layers = keras.layers
    tokens = keras.Input((32,), dtype="int32")
    x = layers.Embedding(1000, 64)(tokens)
    for _ in range(12):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 16)(y, y)])
        y = layers.Dense(128, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(64)(y)])
    return keras.Model(tokens, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


NETWORKS = {"ResNet-50": _resnet, "transformer of 12 layers": _transformer}


def _class(keras, name: str, update: str):
    """Return an optimizer's class, whose update is fused or Keras' own."""
    cls = getattr(keras.optimizers, name)
    if update == "tfdist":
        return cls

    class Unfused(cls):
        def update_step(self, *args):
            super().update_step(*args)

    return Unfused


def _clock(keras):
    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.ends = []

        def on_epoch_end(self, epoch, logs=None):
            self.ends.append(time.process_time())

    return Clock()
