"""Carry out a measurement in the chief of a parameter-server cluster, for each order.

Workers and parameter servers only serve.

Keras 3 under tfdist and tf_keras under TensorFlow's own strategy get the same models, data and
orders. Frameworks are imported only in the process that uses them.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist import ClusterSpec

SIDE = 8
CLASSES = 4
ROWS = 200_000
LENGTH = 10
WIDTH = 16
EXAMPLES = 2048
BATCH = 32
WIDE = 6250  # values of an example, of which 4,000 are 100 MB
CLOCK_TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # seconds, of /proc/PID/stat


@dataclasses.dataclass(frozen=True)
class Job:
    """Describe a process: a framework of `FRAMEWORKS`, and its task of a cluster (None: alone)."""

    framework: str
    cluster: ClusterSpec | None
    timeout: float


def serve(job: Job):
    """Serve as a worker or parameter server; never return."""
    if job.framework == "tfdist":
        tfdist_strategy(job)
    import tensorflow as tf

    cluster = job.cluster
    task = job.cluster.task
    # As TensorFlow's tutorial has it: with fewer threads than tasks a server can wait for itself.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=max(len(cluster.tasks), 2))
    jobs = {name: list(addresses) for name, addresses in cluster.jobs.items()}
    tf.distribute.Server(tf.train.ClusterSpec(jobs), task.type, task.index, "grpc", config).join()


def chief(job: Job) -> tuple[None, Callable[..., Any]]:
    """Return a function of an order: the name of a method of `Trainer`, and its arguments."""
    keras, strategy = FRAMEWORKS[job.framework](job)
    trainer = Trainer(keras, strategy)
    return None, lambda name, *args: getattr(trainer, name)(*args)


def tfdist_strategy(job: Job):
    """Return Keras 3, and tfdist's strategy."""
    import tfdist

    if job.cluster is None:
        strategy = tfdist.make_strategy("one_device", devices="cpu")
    else:
        strategy = tfdist.make_strategy(
            "parameter_server", job.cluster, timeout=job.timeout, start_timeout=job.timeout
        )
    import keras

    return keras, strategy


def stock_strategy(job: Job):
    """Return Keras 2, and TensorFlow's strategy."""
    import tensorflow as tf

    job.cluster.export()
    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver()
    )
    import tf_keras

    return tf_keras, strategy


FRAMEWORKS = {"tfdist": tfdist_strategy, "tf_keras": stock_strategy}


class Trainer:
    """Measure speed, time to the first batch, and accuracy.

    Args:
        keras: Keras 3 or tf_keras.
        strategy: The strategy to train under.
    """

    def __init__(self, keras, strategy):
        self._keras = keras
        self._strategy = strategy
        self._models: dict = {}

    def speed(
        self, kind: str, optimizer: str, steps_per_execution: int, steps: int, pids: dict[str, int]
    ) -> dict[str, Any]:
        """Train an epoch to warm up, and measure the next one.

        Args:
            kind: A key of `LAYERS`.
            optimizer: Keras optimizer.
            steps_per_execution: Argument of `compile`.
            steps: Steps of an epoch.
            pids: Processes of this cluster.

        Returns:
            "seconds": its time; "cpu": CPU seconds of each process; "bytes": through the loopback
                interface.
        """
        key = kind, optimizer, steps_per_execution
        if key not in self._models:
            self._models[key] = self._compiled(
                lambda: LAYERS[kind](self._keras), optimizer, steps_per_execution
            )

        class Clock(self._keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                self.ends = []

            def on_epoch_end(self, epoch, logs=None):
                cpu = {name: _cpu_seconds(pid) for name, pid in pids.items()}
                self.ends.append((time.perf_counter(), cpu, _loopback_bytes()))

        clock = Clock()
        data = self._dataset(_images if kind == "cnn" else _ids)
        self._models[key].fit(data, epochs=2, steps_per_epoch=steps, verbose=0, callbacks=[clock])
        (begin, cpu, sent), (end, cpu_after, sent_after) = clock.ends
        return {
            "seconds": end - begin,
            "cpu": {n: cpu_after[n] - cpu[n] for n in pids},
            "bytes": sent_after - sent,
        }

    def first_batch(self, how: str, megabytes: float) -> float:
        """Return the seconds from calling `fit` of a built model to the end of its first step.

        Args:
            how: `arrays`, `from_tensor_slices`, or `DatasetCreator`, which makes the same slices on
                each worker.
            megabytes: Size of the examples in memory.
        """
        rows = max(BATCH, int(megabytes * 1e6 / 4 / WIDE))
        x = np.random.default_rng(0).random((rows, WIDE), np.float32)
        y = np.zeros(rows, np.int32)
        layers = self._keras.layers
        model = self._compiled(
            lambda: [self._keras.Input((WIDE,)), layers.Dense(CLASSES)], "sgd", 1
        )
        data = (
            {"x": x, "y": y, "batch_size": BATCH}
            if how == "arrays"
            else {"x": self._dataset(lambda: (x, y))}
        )
        began = time.perf_counter()
        model.fit(**data, epochs=1, steps_per_epoch=1, verbose=0)
        return time.perf_counter() - began

    def accuracy(self, seed: int, epochs: int, data_dir: str) -> float:
        """Return the test accuracy of configs/digits_ps.py with another seed or epoch count."""
        from ml_collections import ConfigDict

        from tfdist import data, models

        config: ConfigDict = _config("digits_ps.py")
        keras = self._keras
        batch = config.data.global_batch
        train = data.pipeline(
            data.load(config.data.name, "train", data_dir), batch, seed=seed, cache=True
        )
        test = data.pipeline(
            data.load(config.data.name, "test", data_dir), batch, shuffle=False, cache=True
        )
        keras.utils.set_random_seed(seed)
        with self._strategy.scope():
            model = models.build(
                config.model.name, input_shape=(8, 8, 1), classes=10, **config.model.options
            )
            rate = keras.optimizers.schedules.CosineDecay(
                config.train.learning_rate, int(train.cardinality()) * epochs
            )
            model.compile(
                keras.optimizers.Adam(rate),
                "sparse_categorical_crossentropy",
                metrics=["accuracy"],
                steps_per_execution=config.train.steps_per_execution,
            )
        model.fit(train, epochs=epochs, shuffle=False, verbose=0)
        return float(model.evaluate(test, verbose=0, return_dict=True)["accuracy"])

    def _compiled(self, layers: Callable[[], list], optimizer: str, steps_per_execution: int):
        keras = self._keras
        kinds = {
            "sgd": lambda: keras.optimizers.SGD(0.1),
            "adam": lambda: keras.optimizers.Adam(1e-3),
        }
        with self._strategy.scope():
            model = keras.Sequential(layers())
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(
                kinds[optimizer](),
                loss,
                metrics=["accuracy"],
                steps_per_execution=steps_per_execution,
            )
        return model

    def _dataset(self, arrays: Callable[[], tuple]):
        import tensorflow as tf

        def batches(context=None):
            return (
                tf.data.Dataset.from_tensor_slices(arrays())
                .repeat()
                .batch(BATCH)
                .prefetch(tf.data.AUTOTUNE)
            )

        creator = (
            getattr(self._keras.utils.experimental, "DatasetCreator", None)
            if _is_keras_2(self._keras)
            else None
        )
        return batches() if creator is None else creator(batches)


def _cnn(keras) -> list:
    layers = keras.layers
    return [
        keras.Input((SIDE, SIDE, 1)),
        layers.Conv2D(8, 3, activation="relu"),
        layers.BatchNormalization(),
        layers.Conv2D(16, 3, activation="relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dropout(0.1),
        layers.Dense(32, activation="relu"),
        layers.Dense(CLASSES),
    ]


def _embedding(keras, layer) -> list:
    return [
        keras.Input((LENGTH,), dtype="int32"),
        layer,
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(CLASSES),
    ]


def _sharded_embedding(keras) -> list:
    from tfdist.layers import ShardedEmbedding

    return _embedding(keras, ShardedEmbedding(ROWS, WIDTH))


LAYERS: dict[str, Callable] = {
    "cnn": _cnn,
    "sharded": _sharded_embedding,
    "embedding": lambda keras: _embedding(keras, keras.layers.Embedding(ROWS, WIDTH)),
}


def _images() -> tuple[np.ndarray, np.ndarray]:
    """Return images `[EXAMPLES, SIDE, SIDE, 1]` and labels `[EXAMPLES]`."""
    random = np.random.default_rng(0)
    return random.random((EXAMPLES, SIDE, SIDE, 1), np.float32), random.integers(
        0, CLASSES, EXAMPLES, np.int32
    )


def _ids() -> tuple[np.ndarray, np.ndarray]:
    """Return rows of the table `[EXAMPLES, LENGTH]` and labels `[EXAMPLES]`."""
    random = np.random.default_rng(0)
    return random.integers(0, ROWS, (EXAMPLES, LENGTH), np.int32), random.integers(
        0, CLASSES, EXAMPLES, np.int32
    )


def _config(name: str):
    import runpy

    return runpy.run_path(str(pathlib.Path(__file__).parents[2] / "configs" / name))["get_config"]()


def _is_keras_2(keras) -> bool:
    return keras.__name__ == "tf_keras"


def _cpu_seconds(pid: int) -> float:
    """Return a process's user and system time (proc(5): fields 14 and 15, behind the name)."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * CLOCK_TICK_S


def _loopback_bytes() -> int:
    """Return the bytes that the loopback interface of this network namespace has received."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    return next(
        int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:")
    )
