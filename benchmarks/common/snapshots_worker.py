"""Time `fit` with snapshots in memory, on the disk and without, in a process that stays alive."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

from tfdist import ClusterSpec
from tfdist.runtime.launch_protocol import LAUNCH, SNAPSHOT_SERVER

NEVER = 10**9  # steps
WIDTH = 512  # of a layer: 1 MB of weights, and 2 MB of Adam's moments
BATCH = 64


@dataclasses.dataclass(frozen=True)
class Job:
    """Describe a worker that times `fit`.

    Attributes:
        cluster: Cluster and place of the worker there.
        cores: Cores that it may use.
        server: Name of the snapshot server of all workers.
        host_server: Name of that of a host which has this worker only.
        directory: Directory that all workers share.
        megabytes: Size of a snapshot, or 0 for the CNN of configs/digits.py.
        steps: Steps of an epoch.
        timeout: Seconds to wait for the other workers.
    """

    cluster: ClusterSpec
    cores: list[int]
    server: str
    host_server: str
    directory: str
    megabytes: int
    steps: int
    timeout: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of a `fit`, by epoch.

    Attributes:
        seconds: Wall time.
        cpu: CPU seconds of the process.
        stall: Seconds in which training waited for saves.
        blocking: CPU seconds of the main thread in saves.
    """

    seconds: float
    cpu: float
    stall: float
    blocking: float


def serve(job: Job) -> tuple[int, Callable[[str, int, int], Cost]]:
    """Return the parameter count, and a function that measures a kind of saves.

    The function takes the kind ("none", "pause", "disk", "memory", "copied" or "both"), the
    interval in steps, and a number of epochs.
    """
    os.sched_setaffinity(0, job.cores)  # before any framework counts cores and makes threads
    os.environ[LAUNCH] = "benchmark"
    import keras

    import tfdist
    from tfdist.runtime.time_account import time_account

    alone = len(job.cluster.training_tasks) == 1
    strategy = tfdist.make_strategy(
        "one_device" if alone else "multi_worker_mirrored",
        job.cluster,
        "cpu",
        start_timeout=job.timeout,
    )
    model, batches = _model(strategy, job)
    fits = 0
    blocking = 0.0

    save = tfdist.BackupAndRestore._save
    pauses_only = False

    def timed(self, *args, **kwargs):
        nonlocal blocking
        if pauses_only and kwargs.get("in_memory"):
            return
        begin = time.thread_time()
        save(self, *args, **kwargs)
        blocking += time.thread_time() - begin

    tfdist.BackupAndRestore._save = timed  # a subclass would make Keras' steps single ones

    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.ends = []

        def on_epoch_end(self, epoch, logs=None):
            self.ends.append(
                (
                    time.perf_counter(),
                    time.process_time(),
                    time_account().state().seconds["save"],
                    blocking,
                )
            )

    def measure(kind: str, interval: int, epochs: int) -> Cost:
        nonlocal fits, pauses_only
        fits += 1
        pauses_only = kind == "pause"
        os.environ[SNAPSHOT_SERVER] = job.host_server if kind == "copied" else job.server
        clock = Clock()
        where = os.path.join(job.directory, f"backup-{fits}")
        options = {
            "disk": {"save_freq": interval},
            "pause": {"save_freq": NEVER, "memory_freq": interval},
            "memory": {"save_freq": NEVER, "memory_freq": interval},
            "copied": {"save_freq": NEVER, "memory_freq": interval},
            "both": {"save_freq": 10 * interval, "memory_freq": interval},
        }
        backups = [tfdist.BackupAndRestore(where, **options[kind])] if kind in options else []
        model.fit(
            batches,
            epochs=epochs + 1,
            steps_per_epoch=job.steps if job.megabytes else None,
            verbose=0,
            callbacks=[clock, *backups],
        )
        return Cost(*((b - a) / epochs for a, b in zip(clock.ends[0], clock.ends[-1], strict=True)))

    return model.count_params(), measure


def _model(strategy, job: Job):
    """Return a model whose snapshot has the size that was asked for, and data for it."""
    import keras
    import numpy as np

    from common.recovery_worker import _built
    from tfdist import data

    if not job.megabytes:
        return _built(strategy)
    rng = np.random.default_rng(0)
    rows = job.steps * BATCH
    x = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    with strategy.scope():
        layers = [
            keras.layers.Dense(WIDTH, "relu") for _ in range(max(1, round(job.megabytes / 3.15)))
        ]
        model = keras.Sequential([keras.Input([WIDTH]), *layers, keras.layers.Dense(10)])
        model.compile(keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(True))
    return model, data.pipeline((x, rng.integers(0, 10, rows)), BATCH, seed=1)
