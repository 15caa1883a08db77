"""The CNN of configs/digits.py becomes a worker's training, which notes when it has come how far, or that is timed with saves and without.

    tfdist launch --workers 2 -- benchmarks/_recovery_worker.py DIRECTORY SAVE_FREQ EPOCHS
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Callable

from tfdist import ClusterSpec
from tfdist.contract import Launched, note

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "digits.py"


@dataclasses.dataclass(frozen=True)
class Job:
    """A worker process that times `fit`: its cluster, its place there, its cores, a directory that all share."""

    cluster: ClusterSpec
    rank: int
    cores: list[int]
    directory: str
    timeout: float


def serve(job: Job) -> tuple[int, Callable[[str, int], tuple[float, float]]]:
    """Gives the model's parameter count, and what measures an epoch with backups of a `save_freq`, or "none": seconds, and those of CPU."""
    os.sched_setaffinity(0, job.cores)  # before any framework counts cores and makes threads
    import keras

    import tfdist

    alone = len(job.cluster.training_tasks) == 1
    strategy = tfdist.make_strategy("one_device" if alone else "multi_worker_mirrored", job.cluster, "cpu", start_timeout=job.timeout)
    model, batches = _built(strategy)
    fits = 0

    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.ends = []

        def on_epoch_end(self, epoch, logs=None):
            self.ends.append((time.perf_counter(), time.process_time()))

    def measure(save_freq: str, epochs: int) -> tuple[float, float]:
        nonlocal fits
        clock, fits = Clock(), fits + 1
        where = os.path.join(job.directory, f"backup-{fits}")
        backups = [] if save_freq == "none" else [tfdist.BackupAndRestore(where, int(save_freq) if save_freq.isdecimal() else save_freq)]
        model.fit(batches, epochs=epochs + 1, verbose=0, callbacks=[clock, *backups])
        (begin, cpu_before), (end, cpu) = clock.ends[0], clock.ends[-1]
        return (end - begin) / epochs, (cpu - cpu_before) / epochs

    return model.count_params(), measure


def main(directory: str, save_freq: str, epochs: str) -> None:
    """Trains as a task of a launch, whose journal gets a note at each stage."""
    told = Launched.from_environ()

    def reached(stage: str) -> None:
        note(told.log_dir, stage, task=told.task, attempt=told.attempt)

    reached("started")
    import keras  # noqa: F401
    import tensorflow as tf  # noqa: F401

    reached("imported")
    import tfdist
    from tfdist import preflight

    check = preflight.check

    def met(*args, **kwargs) -> None:
        check(*args, **kwargs)
        reached("met")

    preflight.check = met
    strategy = tfdist.make_strategy("auto")
    reached("joined")
    model, batches = _built(strategy)
    reached("built")
    model.fit(batches, epochs=int(epochs), verbose=0, callbacks=[tfdist.BackupAndRestore(os.path.join(directory, "backup"), int(save_freq))])


def _built(strategy):
    """The model and the pipeline that the config file describes."""
    import keras

    from tfdist import inputs, models, run

    settings = run.parse([f"--config={CONFIG}"])
    keras.utils.set_random_seed(settings.train.seed)
    batches = inputs.pipeline(settings, "train")
    shape, classes = inputs.shapes(batches)
    with strategy.scope():
        model = models.build(settings.model.name, **{"input_shape": shape, "classes": classes, **settings.model.options})
        model.compile(keras.optimizers.Adam(settings.train.learning_rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model, batches


if __name__ == "__main__":
    main(*sys.argv[1:])
