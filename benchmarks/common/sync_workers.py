"""Train one model under each policy of `tfdist.sync` in a worker, on orders.

Nothing is compared here.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from common.workers import CLASSES, LEARNING_RATE, SIDE, Job
from tfdist.sync import DiLoCo, Gradients, LocalSGD

EVERY = 8  # steps of local SGD and DiLoCo from one exchange to the next
SPLIT = 1437  # of the 1,797 digits to train on
# Of each variant the policy, and the stage of `tfdist.parallel.zero`.
VARIANTS = {
    "mean": (Gradients(), 0),
    "bfloat16": (Gradients(comm_dtype="bfloat16"), 0),
    "float16": (Gradients(comm_dtype="float16"), 0),
    "accumulate": (Gradients(accumulate=4), 0),
    "local": (LocalSGD(every=EVERY), 0),
    "diloco": (DiLoCo(every=EVERY), 0),
    "zero1": (Gradients(), 1),
    "zero2": (Gradients(), 2),
    "zero2 bfloat16": (Gradients(comm_dtype="bfloat16"), 2),
    "power": (None, 0),  # PowerSGD(RANK), made in the process
}
RANK = 4


def serve(job: Job) -> tuple[int, Callable[..., Any]]:
    """Return the model's parameter count, and a function that carries out an order.

    An order is "time", a variant and a number of steps, answered by seconds; "bytes" and a variant,
    answered by the bytes that this worker sends in a step; or "accuracy", a variant, a number of
    epochs of the digits and a seed, answered by the accuracy on the digits that were left out.
    """
    os.sched_setaffinity(0, {job.core})  # before any framework counts cores and makes threads
    return (_tf_keras if job.framework == "tf_keras" else _tfdist)(job)


def _tfdist(job: Job) -> tuple[int, Callable[..., Any]]:
    import keras

    import tfdist
    from common.power_sgd import PowerSGD

    strategy = tfdist.make_strategy(
        "multi_worker_mirrored", job.cluster, "cpu", start_timeout=job.timeout
    )
    engine = strategy.tfdist_engine

    def build(name: str, seed: int = 1):
        """Return a model, and the aggregation that carries out its policy."""
        policy, stage = VARIANTS[name]
        engine.use(policy or Gradients(combine=PowerSGD(RANK)))
        with strategy.scope():
            optimizer = keras.optimizers.Adam(LEARNING_RATE)
            return _model(
                keras, job, tfdist.parallel.zero(optimizer, stage) if stage else optimizer, seed
            ), engine.aggregation

    built = {name: build(name) for name in VARIANTS}

    def carry_out(what: str, name: str, count: int = 0, seed: int = 1) -> float:
        model, engine.aggregation = built[name]
        if what == "bytes":
            return engine.bytes_per_step(model)
        # The first training uses the model that is timed afterwards, which then need not be traced
        # twice.
        return (
            _accuracy(model if seed == 1 else build(name, seed)[0], job, count)
            if what == "accuracy"
            else _seconds(keras, model, job, count)
        )

    return built["mean"][0].count_params(), carry_out


def _tf_keras(job: Job) -> tuple[int, Callable[..., Any]]:
    import tensorflow as tf
    import tf_keras

    job.cluster.export()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def build(seed: int = 1):
        with strategy.scope():
            return _model(tf_keras, job, tf_keras.optimizers.Adam(LEARNING_RATE), seed)

    model = build()

    def carry_out(what: str, name: str, count: int = 0, seed: int = 1) -> float:
        return (
            _accuracy(model if seed == 1 else build(seed), job, count)
            if what == "accuracy"
            else _seconds(tf_keras, model, job, count)
        )

    return model.count_params(), carry_out


def _seconds(keras, model, job: Job, steps: int) -> float:
    """Return the seconds of one epoch of so many steps, after another one."""
    clock = _clock(keras)
    model.fit(
        _repeated(*_digits()[0], job), epochs=2, steps_per_epoch=steps, verbose=0, callbacks=[clock]
    )
    return clock.ends[1] - clock.ends[0]


def _accuracy(model, job: Job, epochs: int) -> float:
    """Return the accuracy of a new model after so many epochs, on the digits that were left out."""
    model.fit(
        _repeated(*_digits()[0], job),
        epochs=epochs,
        steps_per_epoch=SPLIT // (job.model.replica_batch * job.workers),
        verbose=0,
    )
    return model.evaluate(*_digits()[1], batch_size=120, verbose=0, return_dict=True)["accuracy"]


def _clock(keras):
    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.ends = []

        def on_epoch_end(self, epoch, logs=None):
            self.ends.append(time.perf_counter())

    return Clock()


def _model(keras, job: Job, optimizer, seed: int):
    layers = keras.layers
    keras.utils.set_random_seed(seed)
    filters = job.model.filters
    body = [layers.Conv2D(filters, 3, activation="relu"), layers.MaxPooling2D()] if filters else []
    dense = [layers.Dense(width, activation="relu") for width in job.model.widths]
    model = keras.Sequential(
        [keras.Input((SIDE, SIDE, 1)), *body, layers.Flatten(), *dense, layers.Dense(CLASSES)]
    )
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    optimizer.build(model.trainable_variables)
    return model


@functools.cache
def _digits() -> tuple:
    """Return the digits as images of `SIDE` pixels, for training, and those left out.

    Each pixel of a digit is repeated three times three.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    large = np.kron(digits.images.astype(np.float32) / 16, np.ones((3, 3), np.float32))
    images = np.pad(large, [(0, 0), (2, 2), (2, 2)])[..., None]
    return (images[:SPLIT], digits.target[:SPLIT]), (images[SPLIT:], digits.target[SPLIT:])


def _repeated(images, labels, job: Job):
    import tensorflow as tf

    batch = job.model.replica_batch * job.workers

    order = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(SPLIT, seed=1)
    return order.batch(batch, drop_remainder=True).repeat().prefetch(tf.data.AUTOTUNE)
