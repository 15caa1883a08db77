"""Measure steps of `fit`, and of a loop of PyTorch, on a GPU in a process, on orders.

Nothing is compared here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

CLASSES = 10
LEARNING_RATE = 1e-3
BATCHES = 4  # different ones, in the memory of the host


@dataclasses.dataclass(frozen=True)
class Model:
    """Describe a model and how it is measured.

    Args:
        title: Title in the report.
        shape: Shape of one example.
        batch: Examples per step.
        steps: Steps that are timed at once.
    """

    title: str
    shape: tuple[int, ...]
    batch: int
    steps: int


MODELS = {
    "mlp": Model("MLP", (28, 28, 1), batch=64, steps=300),
    "cnn": Model("CNN", (28, 28, 1), batch=64, steps=300),
    "mlp50": Model("MLP of 50 MB", (28, 28, 1), batch=1024, steps=100),
    "resnet34": Model("ResNet-34", (224, 224, 3), batch=128, steps=10),
}
WIDTHS = {"mlp": (128, 128), "cnn": (128,), "mlp50": (2304, 2304, 2304)}
FILTERS = {"cnn": 32}


@dataclasses.dataclass(frozen=True)
class Job:
    """Describe a process: framework, and whether XLA compiles steps.

    Args:
        framework: "tfdist", "keras" or "torch".
        xla: Argument `jit_compile` of Keras: True, False or "auto"; True stands for
            `torch.compile`.
    """

    framework: str
    xla: bool | str


def serve(job: Job) -> tuple[Job, Callable[[str, bool, int], tuple[int, float]]]:
    """Return the job, and a function that measures a model.

    An order is a name of `MODELS`, whether to compute in bfloat16, with weights in float32
    (otherwise in float32, with products of matrices in TensorFloat-32), and a number of steps. The
    answer is the parameter count and the seconds per step. A model that differs from that of the
    order before is made anew, and its first steps compile.
    """
    make = _torch if job.framework == "torch" else _Keras(job).make
    current: dict = {}

    def measure(model: str, bfloat16: bool, steps: int) -> tuple[int, float]:
        if current.get("model") != (model, bfloat16):
            current.clear()  # frees the former one's memory
            current.update(model=(model, bfloat16), made=make(model, bfloat16, job.xla))
        parameters, run = current["made"]
        return parameters, run(steps)

    return job, measure


def _examples(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Return images from 0 to 1 `[rows, *shape]`, float32, and labels `[rows]`."""
    random = np.random.default_rng(0)
    rows = BATCHES * model.batch
    return random.random((rows, *model.shape), np.float32), random.integers(0, CLASSES, rows)


class _Keras:
    """Train by `fit`; an epoch's end waits for the GPU, as it reads the metrics."""

    def __init__(self, job: Job):
        self.scope: Any = contextlib.nullcontext
        if job.framework == "tfdist":
            import tfdist

            self.scope = tfdist.make_strategy("one_device", devices="gpu:0").scope

    def make(
        self, name: str, bfloat16: bool, xla: bool | str
    ) -> tuple[int, Callable[[int], float]]:
        import keras
        import tensorflow as tf

        import tfdist.models

        keras.backend.clear_session()
        keras.config.set_dtype_policy("mixed_bfloat16" if bfloat16 else "float32")
        model = MODELS[name]
        layers = keras.layers
        with self.scope():
            if name in WIDTHS:
                filters = FILTERS.get(name)
                body = [layers.Conv2D(filters, 3, activation="relu"), layers.MaxPooling2D()]
                dense = [layers.Dense(width, activation="relu") for width in WIDTHS[name]]
                network = keras.Sequential(
                    [
                        keras.Input(model.shape),
                        *(body if filters else []),
                        layers.Flatten(),
                        *dense,
                        layers.Dense(CLASSES, activation="softmax", dtype="float32"),
                    ]
                )
            else:
                network = tfdist.models.build(
                    name, input_shape=model.shape, classes=CLASSES, scale=1.0
                )
            network.compile(
                keras.optimizers.Adam(LEARNING_RATE),
                "sparse_categorical_crossentropy",
                metrics=["accuracy"],
                jit_compile=xla,
            )
        batches = (
            tf.data.Dataset.from_tensor_slices(_examples(model))
            .batch(model.batch, drop_remainder=True)
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


def _torch(name: str, bfloat16: bool, xla: bool | str) -> tuple[int, Callable[[int], float]]:
    """Train by a loop with the loss and the accuracy summed on the GPU, as `fit` does."""
    import torch
    from torch import nn

    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    model = MODELS[name]
    if name in WIDTHS:
        filters = FILTERS.get(name, 0)
        body = [nn.Conv2d(1, filters, 3), nn.ReLU(), nn.MaxPool2d(2)] if filters else []
        side = model.shape[0]
        sizes = [filters * ((side - 2) // 2) ** 2 or side**2, *WIDTHS[name]]
        dense = [
            layer for sides in itertools.pairwise(sizes) for layer in (nn.Linear(*sides), nn.ReLU())
        ]
        network = nn.Sequential(*body, nn.Flatten(), *dense, nn.Linear(sizes[-1], CLASSES))
    else:
        import torchvision

        network = getattr(torchvision.models, name)(num_classes=CLASSES)
    network = network.cuda().to(memory_format=torch.channels_last)
    parameters = sum(p.numel() for p in network.parameters())
    called = torch.compile(network) if xla is True else network
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE, fused=True)
    loss_of = nn.CrossEntropyLoss()
    images, labels = (torch.from_numpy(array) for array in _examples(model))
    images = images.permute(0, 3, 1, 2)
    pinned = [
        (x.contiguous(memory_format=torch.channels_last).pin_memory(), y.pin_memory())
        for x, y in zip(images.split(model.batch), labels.split(model.batch), strict=True)
    ]
    batches = itertools.cycle(pinned)
    sums = torch.zeros(2, device="cuda")

    def step() -> None:
        x, y = (t.cuda(non_blocking=True) for t in next(batches))
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=bfloat16):
            scores = called(x)
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
