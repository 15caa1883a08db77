"""Train models by `fit`, or by a loop of PyTorch, on a GPU, and time the steps."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from common.workers import CLASSES, LEARNING_RATE, SIDE, Model, built, torch_network

BATCHES = 4  # different ones, in the memory of the host
MODELS = {
    "mlp": Model("MLP", 0, (128, 128), replica_batch=64, steps=300),
    "cnn": Model("CNN", 32, (128,), replica_batch=64, steps=300),
    "mlp50": Model("MLP of 50 MB", 0, (2304, 2304, 2304), replica_batch=1024, steps=100),
    "resnet34": Model("ResNet-34", 0, (), replica_batch=128, steps=10),
}
SHAPES = {"resnet34": (224, 224, 3)}  # of an example; others: an image of one channel


@dataclasses.dataclass(frozen=True)
class Job:
    """Describe a process.

    Args:
        framework: "tfdist", "keras" or "torch".
        jit_compile: Argument of Keras' `compile`.
    """

    framework: str
    jit_compile: bool | str


def serve(job: Job) -> tuple[Job, Callable[[str, bool, int], tuple[int, float]]]:
    """Return the job, and a function that measures a model.

    An order is a name of `MODELS`, whether to compute in bfloat16, with weights in float32
    (otherwise in float32, with products of matrices in TensorFloat-32), and a number of steps. The
    answer is the parameter count and the seconds per step. A model that differs from that of the
    order before is made anew, and its first steps compile.
    """
    make = _torch if job.framework == "torch" else _Keras(job)
    current: dict = {}

    def measure(model: str, bfloat16: bool, steps: int) -> tuple[int, float]:
        if current.get("model") != (model, bfloat16):
            current.clear()  # frees the former one's memory
            current.update(model=(model, bfloat16), made=make(model, bfloat16))
        parameters, run = current["made"]
        return parameters, run(steps)

    return job, measure


def _examples(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images from 0 to 1 `[rows, *shape]`, float32, and labels `[rows]`."""
    random = np.random.default_rng(0)
    rows = BATCHES * MODELS[name].replica_batch
    shape = SHAPES.get(name, (SIDE, SIDE, 1))
    return random.random((rows, *shape), np.float32), random.integers(0, CLASSES, rows)


class _Keras:
    """Train by `fit`; an epoch's end waits for the GPU, as it reads the metrics."""

    def __init__(self, job: Job):
        self.jit_compile = job.jit_compile
        self.scope: Any = contextlib.nullcontext
        if job.framework == "tfdist":
            import tfdist

            self.scope = tfdist.make_strategy("one_device", devices="gpu:0").scope

    def __call__(self, name: str, bfloat16: bool) -> tuple[int, Callable[[int], float]]:
        import keras
        import tensorflow as tf

        import tfdist.models

        keras.backend.clear_session()
        keras.config.set_dtype_policy("mixed_bfloat16" if bfloat16 else "float32")
        with self.scope():
            if name in SHAPES:
                network = tfdist.models.build(
                    name, input_shape=SHAPES[name], classes=CLASSES, scale=1.0
                )
                optimizer = keras.optimizers.Adam(LEARNING_RATE)
            else:
                network, optimizer = built(keras, MODELS[name])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=name not in SHAPES)
            network.compile(optimizer, loss, metrics=["accuracy"], jit_compile=self.jit_compile)
        batches = (
            tf.data.Dataset.from_tensor_slices(_examples(name))
            .batch(MODELS[name].replica_batch, drop_remainder=True)
            .cache()
            .repeat()
            .prefetch(tf.data.AUTOTUNE)
        )

        class Clock(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                self.ends = []

            def on_epoch_end(self, epoch, logs=None):
                self.ends.append(time.perf_counter())

        def run(steps: int) -> float:
            clock = Clock()
            network.fit(batches, epochs=2, steps_per_epoch=steps, verbose=0, callbacks=[clock])
            return (clock.ends[1] - clock.ends[0]) / steps

        return network.count_params(), run


def _torch(name: str, bfloat16: bool) -> tuple[int, Callable[[int], float]]:
    """Train by a loop with the loss and the accuracy summed on the GPU, as `fit` does."""
    import torch
    from torch import nn

    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    if name in SHAPES:
        import torchvision

        network = getattr(torchvision.models, name)(num_classes=CLASSES)
    else:
        network = torch_network(MODELS[name])
    network = network.cuda().to(memory_format=torch.channels_last)
    parameters = sum(p.numel() for p in network.parameters())
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE, fused=True)
    loss_of = nn.CrossEntropyLoss()
    images, labels = (torch.from_numpy(array) for array in _examples(name))
    images = images.permute(0, 3, 1, 2)
    rows = MODELS[name].replica_batch
    pinned = [
        (x.contiguous(memory_format=torch.channels_last).pin_memory(), y.pin_memory())
        for x, y in zip(images.split(rows), labels.split(rows), strict=True)
    ]
    batches = itertools.cycle(pinned)
    sums = torch.zeros(2, device="cuda")

    def step() -> None:
        x, y = (t.cuda(non_blocking=True) for t in next(batches))
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=bfloat16):
            scores = network(x)
            loss = loss_of(scores, y)
        loss.backward()
        optimizer.step()
        sums.add_(torch.stack([loss.detach(), (scores.argmax(1) == y).float().mean()]))

    def run(steps: int) -> float:
        for number in range(2 * steps):
            if number == steps:
                torch.cuda.synchronize()
                begun = time.perf_counter()
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / steps

    return parameters, run
