"""Measure steps and first steps of `fit` on one device in a process of one core, on orders.

Nothing is compared here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

from common.workers import EXAMPLES, Model, built, dataset, examples

FRAMEWORKS = "tfdist", "keras", "tf_keras"
INPUTS = "arrays", "tf.data", "generator"
# Steps one by one, whose results Python reads: by a callback of `fit`, and from `train_on_batch`.
ON_BATCHES = "callback", "train_on_batch"


@dataclasses.dataclass(frozen=True)
class Job:
    """Describe a process: framework of `FRAMEWORKS`, model, and core."""

    framework: str
    model: Model
    core: int


def serve(job: Job) -> tuple[int, Callable[..., tuple[float, float]]]:
    """Return the model's parameter count, and a function that measures steps of `fit`.

    An order is one of `INPUTS` or `ON_BATCHES`, and a number of steps; the answer is the CPU
    seconds and the seconds per step.
    """
    keras, scope = _framework(job)
    model = _compiled(keras, scope, job)

    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.ends = []

        def on_epoch_end(self, epoch, logs=None):
            self.ends.append((time.process_time(), time.perf_counter()))

    class Reader(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.loss = float(logs["loss"])

    def measure(kind: str, steps: int) -> tuple[float, float]:
        clock = Clock()
        if kind == "train_on_batch":
            return single_steps(clock, steps)
        callbacks = [clock, Reader()] if kind == "callback" else [clock]
        data, per_epoch = _data(
            "tf.data" if kind == "callback" else kind, job.model.replica_batch, steps
        )
        epochs = 1 + max(1, steps // per_epoch)  # the first one warms up
        model.fit(**data, epochs=epochs, verbose=0, callbacks=callbacks)
        return per_step(clock, (epochs - 1) * per_epoch)

    def single_steps(clock: Clock, steps: int) -> tuple[float, float]:
        x, y = examples()
        batch = job.model.replica_batch
        clock.on_train_begin()
        for number in range(-10, steps):  # the first ones warm up
            if number == 0:
                clock.on_epoch_end(0)
            begin = (number * batch) % (EXAMPLES - batch + 1)
            logs = model.train_on_batch(
                x[begin : begin + batch], y[begin : begin + batch], return_dict=True
            )
            float(logs["loss"])
        clock.on_epoch_end(1)
        return per_step(clock, steps)

    def per_step(clock: Clock, steps: int) -> tuple[float, float]:
        cpu, wall = ((b - a) / steps for a, b in zip(clock.ends[0], clock.ends[-1], strict=True))
        return cpu, wall

    return model.count_params(), measure


def first_step(job: Job) -> tuple[float, Callable[..., float]]:
    """Return the CPU seconds of `compile` and the first step, and a function that measures both.

    The function is called with an input of `INPUTS`, and does so for another model.
    """
    keras, scope = _framework(job)

    def measure(kind: str) -> float:
        data, _ = _data(kind, job.model.replica_batch, 1)
        began = time.process_time()
        _compiled(keras, scope, job).fit(**data, epochs=1, verbose=0)
        return time.process_time() - began

    return measure("tf.data"), measure


def _framework(job: Job) -> tuple[Any, Callable[[], contextlib.AbstractContextManager]]:
    """Return a module of Keras, and a function that makes the context to build models in."""
    os.sched_setaffinity(0, {job.core})  # before TensorFlow counts cores and makes threads
    if job.framework == "tf_keras":
        import tf_keras

        return tf_keras, contextlib.nullcontext
    import keras

    if job.framework == "keras":
        return keras, contextlib.nullcontext
    import tfdist

    return keras, tfdist.make_strategy("one_device", devices="cpu").scope


def _compiled(keras, scope: Callable[[], contextlib.AbstractContextManager], job: Job):
    with scope():
        model, optimizer = built(keras, job.model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def _data(kind: str, batch: int, steps: int) -> tuple[dict[str, Any], int]:
    """Return arguments of `fit`, and the number of steps of an epoch."""
    x, y = examples()
    if kind == "arrays":
        per_epoch = min(steps, EXAMPLES // batch)
        rows = per_epoch * batch
        return {"x": x[:rows], "y": y[:rows], "batch_size": batch}, per_epoch
    if kind == "tf.data":
        return {"x": dataset((x, y), batch), "steps_per_epoch": steps}, steps
    starts = itertools.cycle(range(0, EXAMPLES - batch + 1, batch))
    batches = ((x[i : i + batch], y[i : i + batch]) for i in starts)
    return {"x": batches, "steps_per_epoch": steps}, steps
