"""Time training steps of one framework in this process, pinned to one core.

Nothing is compared here.

Every framework trains the same layers on the same examples with Adam; frameworks are imported only
in the process that uses them.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist import ClusterSpec

SIDE = 28
CLASSES = 10
EXAMPLES = 4096
LEARNING_RATE = 1e-3
# Of a worker that has one core.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1"
)


@dataclasses.dataclass(frozen=True)
class Model:
    """Describe a model and how it is measured.

    Args:
        title: Title in the report.
        filters: Filters of a 3 x 3 convolution with pooling in front of the dense layers; 0: none.
        widths: Units of the dense layers before the classes.
        replica_batch: Examples per worker and step.
        steps: Steps that are timed at once; as many go before them as warm-up.
    """

    title: str
    filters: int
    widths: tuple[int, ...]
    replica_batch: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Job:
    """Describe a worker process: framework of `FRAMEWORKS`, model, cluster, core and directory."""

    framework: str
    model: Model
    cluster: ClusterSpec
    core: int
    timeout: float
    directory: str | None = None

    @property
    def workers(self) -> int:
        return len(self.cluster.training_tasks)


def serve(job: Job) -> tuple[int, Callable[[str, int], float]]:
    """Return the model's parameter count, and a function that times steps of a measure."""
    os.sched_setaffinity(0, {job.core})  # before any framework counts cores and makes threads
    parameters, measures = FRAMEWORKS[job.framework](job)
    return parameters, lambda name, steps: measures[name](steps)


Measures = dict[str, Callable[[int], float]]


def tfdist_fit(job: Job, sharded: bool = False) -> tuple[int, Measures]:
    """Train by Keras 3 `fit` under a strategy of tfdist, with whole or sharded weights."""
    import tfdist

    alone = job.workers == 1
    strategy = tfdist.make_strategy(
        "one_device" if alone else "multi_worker_mirrored",
        job.cluster,
        "cpu",
        start_timeout=job.timeout,
    )
    import keras

    runs = tempfile.mkdtemp(prefix="step_breakdown-", dir=job.directory)
    watched = {"step_breakdown": lambda: [tfdist.StepBreakdown(runs)]}
    return _fit(keras, strategy, job, watched, tfdist.parallel.fsdp if sharded else None)


def tfdist_fsdp(job: Job) -> tuple[int, Measures]:
    """Train by Keras 3 `fit` under a strategy of tfdist, with weights sharded by `fsdp`."""
    return tfdist_fit(job, sharded=True)


def tfdist_independent(job: Job) -> tuple[int, Measures]:
    """Train as one worker alone, while the others do the same."""
    return tfdist_fit(dataclasses.replace(job, cluster=ClusterSpec.local(1).for_task("worker", 0)))


def tf_keras_fit(job: Job) -> tuple[int, Measures]:
    """Train by Keras 2 `fit` under TensorFlow's own strategy."""
    strategy = _stock_strategy(job)
    import tf_keras

    return _fit(tf_keras, strategy, job)


def hand_loop(job: Job) -> tuple[int, Measures]:
    """Train the Keras 3 model and optimizer in a loop under TensorFlow's own strategy.

    Also time the parts of its step, alone.
    """
    strategy = _stock_strategy(job)
    import keras
    import tensorflow as tf

    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    own = [array[job.cluster.rank :: job.workers] for array in examples()]
    with strategy.scope():
        model, optimizer = built(keras, job.model)
    lone_model, lone_optimizer = built(
        keras, job.model
    )  # outside of the scope: what one worker does by itself
    batches = iter(
        strategy.distribute_datasets_from_function(lambda _: dataset(own, job.model.replica_batch))
    )
    lone_batches = iter(dataset(own, job.model.replica_batch))

    def gradients_of(model, batch):
        images, labels = batch
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True)) / job.workers
        return tape.gradient(loss, model.trainable_variables), loss

    @tf.function
    def step(batches):
        def on_replica(batch):
            gradients, loss = gradients_of(model, batch)
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        return strategy.run(on_replica, args=(next(batches),))

    @tf.function
    def gradient(batches):
        return gradients_of(lone_model, next(batches))

    @tf.function
    def local(batches):
        gradients, loss = gradients_of(lone_model, next(batches))
        lone_optimizer.apply(gradients, lone_model.trainable_variables)
        return loss

    values = [tf.zeros(v.shape) for v in lone_model.trainable_variables]

    @tf.function
    def all_reduce():
        return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", values))

    return model.count_params(), {
        "step": lambda steps: _timed(lambda: step(batches), steps),
        "gradient": lambda steps: _timed(lambda: gradient(lone_batches), steps),
        "local": lambda steps: _timed(lambda: local(lone_batches), steps),
        "all_reduce": lambda steps: _timed(all_reduce, steps),
    }


def ddp(job: Job) -> tuple[int, Measures]:
    """Train by PyTorch's DistributedDataParallel over gloo."""
    import torch
    from torch import distributed, nn
    from torch.utils import data

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{job.cluster.training_tasks[0].address}",
        rank=job.cluster.rank,
        world_size=job.workers,
        timeout=datetime.timedelta(seconds=job.timeout),
    )
    model = torch_network(job.model)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    loss_of = nn.CrossEntropyLoss()

    images, labels = (
        torch.from_numpy(array[job.cluster.rank :: job.workers]) for array in examples()
    )
    rows = data.TensorDataset(images.reshape(-1, 1, SIDE, SIDE), labels)
    # Whole batches are indexed at once: much faster than the loader's default of one row at a time.
    sampler = data.BatchSampler(
        data.SequentialSampler(rows), job.model.replica_batch, drop_last=True
    )
    batches = itertools.chain.from_iterable(
        itertools.repeat(data.DataLoader(rows, sampler=sampler, batch_size=None))
    )

    def step():
        images, labels = next(batches)
        optimizer.zero_grad()
        loss_of(parallel(images), labels).backward()
        optimizer.step()

    return sum(p.numel() for p in model.parameters()), {"step": lambda steps: _timed(step, steps)}


FRAMEWORKS = {
    "tfdist": tfdist_fit,
    "tfdist_fsdp": tfdist_fsdp,
    "tfdist_independent": tfdist_independent,
    "tf_keras": tf_keras_fit,
    "hand_loop": hand_loop,
    "ddp": ddp,
}


def _stock_strategy(job: Job):
    import tensorflow as tf

    if job.workers == 1:
        return tf.distribute.get_strategy()
    job.cluster.export()
    return tf.distribute.MultiWorkerMirroredStrategy()


def _fit(
    keras,
    strategy,
    job: Job,
    watched: dict[str, Callable[[], list]] | None = None,
    shard: Callable[[Any], object] | None = None,
) -> tuple[int, Measures]:
    """Train by `fit` of either Keras, with and without progress bar, or with callbacks.

    One epoch is the warm-up, the next one is timed.
    """
    with strategy.scope():
        model, optimizer = built(keras, job.model, shard)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    batches = dataset(examples(), job.model.replica_batch * job.workers)

    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.ends = []

        def on_epoch_end(self, epoch, logs=None):
            self.ends.append(time.perf_counter())

    def measure(steps: int, verbose: int, callbacks: Callable[[], list] = list) -> float:
        clock = Clock()
        model.fit(
            batches,
            epochs=2,
            steps_per_epoch=steps,
            verbose=verbose,
            callbacks=[*callbacks(), clock],
        )
        return clock.ends[1] - clock.ends[0]

    with_callbacks = {
        name: lambda steps, make=make: measure(steps, 0, make)
        for name, make in (watched or {}).items()
    }
    return model.count_params(), {
        "quiet": lambda steps: measure(steps, 0),
        "progress": lambda steps: measure(steps, 1),
        **with_callbacks,
    }


def torch_network(model: Model) -> Any:
    """Return the layers that `built` makes, in PyTorch."""
    from torch import nn

    filters = model.filters
    body = [nn.Conv2d(1, filters, 3), nn.ReLU(), nn.MaxPool2d(2)] if filters else []
    sizes = [filters * ((SIDE - 2) // 2) ** 2 or SIDE**2, *model.widths]
    dense = [
        layer for sides in itertools.pairwise(sizes) for layer in (nn.Linear(*sides), nn.ReLU())
    ]
    return nn.Sequential(*body, nn.Flatten(), *dense, nn.Linear(sizes[-1], CLASSES))


def built(keras, described: Model, shard: Callable[[Any], object] | None = None):
    """Return the model, sharded if there is a function for that, and its optimizer."""
    layers = keras.layers
    filters = described.filters
    body = [layers.Conv2D(filters, 3, activation="relu"), layers.MaxPooling2D()] if filters else []
    dense = [layers.Dense(width, activation="relu") for width in described.widths]
    model = keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 1)),
            *body,
            layers.Flatten(),
            *dense,
            layers.Dense(CLASSES, dtype="float32"),
        ]
    )
    if shard:
        shard(model)
    optimizer = keras.optimizers.Adam(LEARNING_RATE)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def examples() -> tuple[np.ndarray, np.ndarray]:
    """Return images `[EXAMPLES, SIDE, SIDE, 1]` and labels `[EXAMPLES]`, equal in every process."""
    random = np.random.default_rng(0)
    return random.random((EXAMPLES, SIDE, SIDE, 1), np.float32), random.integers(
        0, CLASSES, EXAMPLES
    )


def dataset(arrays, batch: int):
    import tensorflow as tf

    return (
        tf.data.Dataset.from_tensor_slices(tuple(arrays))
        .batch(batch, drop_remainder=True)
        .repeat()
        .prefetch(tf.data.AUTOTUNE)
    )


def _timed(step: Callable[[], object], steps: int) -> float:
    for _ in range(steps):
        step()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - start
