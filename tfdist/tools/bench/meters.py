"""Timed workloads of `tfdist bench`: training, inference and all-reduce."""

from __future__ import annotations

import os
import time
from typing import Any

import keras
import tensorflow as tf

import tfdist
from tfdist import config
from tfdist.keras_compat import device_type
from tfdist.run import build, input_pipeline, train_command
from tfdist.telemetry import step_records
from tfdist.tools.bench.jobs import Case, Job

TRACED = 3  # steps that are run to trace and compile the functions


class Training:
    """Timer of `model.fit` on the batches of a config.

    Args:
        job: Job to measure.
        rank: Rank of this process.
    """

    def __init__(self, job: Job, rank: int):
        self._job = job
        self._rank = rank
        self._epoch = 0  # counted over all calls of fit
        self._settings = train_command.parse(job.words)
        self._strategy = _strategy(job, rank, self._settings)
        batches = [_with_batch(self._settings, case) for case in job.cases]
        self._model = build.make_model(self._settings, self._strategy, batches[0])
        self._batches = [_without_end(each) for each in batches]

    def ready(self) -> dict[str, Any]:
        """Compile the steps of all cases, and return facts about the model."""
        for number in range(len(self._batches)):
            self._fit(number, _whole(TRACED, self._settings.train.steps_per_execution), 1)
        return _facts(self._strategy, self._model)

    def measure(self, number: int) -> dict[str, Any]:
        """Time one epoch of `steps` steps, after warm-up epochs.

        The warm-up is rounded up to whole epochs. The input continues from one epoch to the next
        without a break.

        Args:
            number: Index of the case.

        Returns:
            Measurements of the last epoch: "steps", "examples", "seconds", "step_breakdown"
            (seconds of each part of a mean step on this worker), and "bytes" (bytes of gradients
            that each replica contributes to the all-reduce).
        """
        steps = self._job.steps
        clock = self._fit(number, steps, 1 + -(-self._job.warmup // steps))
        windows = [
            window
            for window in step_records.read(self._run(number)).get(self._rank, [])
            if window.epoch == self._epoch - 1
        ]
        largest_bytes = max((window.bytes for window in windows), default=0)
        return {
            "steps": steps,
            "examples": clock.examples,
            "seconds": clock.seconds,
            "step_breakdown": step_records.per_step(windows),
            "bytes": largest_bytes,
        }

    def _fit(self, number: int, steps: int, epochs: int) -> _Clock:
        clock = _Clock()
        first = self._epoch
        self._epoch += epochs
        callbacks = [clock, tfdist.StepBreakdown(self._run(number))]
        self._model.fit(
            self._batches[number],
            steps_per_epoch=steps,
            initial_epoch=first,
            epochs=self._epoch,
            verbose=0,
            callbacks=callbacks,
        )
        return clock

    def _run(self, number: int) -> str:
        """Return the directory of a case, which looks like the directory of a run."""
        return os.path.join(self._job.directory, f"case-{number}")


class _Clock(keras.callbacks.Callback):
    """Timer and example counter of the last epoch.

    It has no batch methods, because each step would then have to wait for Python.
    """

    seconds = 0.0
    examples = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._examples = self.model.train_function.stats.examples
        self._begin = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # Keras has read the metrics, so all steps are done.
        self.seconds = time.perf_counter() - self._begin
        self.examples = self.model.train_function.stats.examples - self._examples


class Prediction:
    """Timer of `model.predict` on batches in memory.

    Args:
        job: Job to measure. Each case predicts the same number of examples: `steps` batches of the
            largest case.
        rank: Rank of this process.
    """

    def __init__(self, job: Job, rank: int):
        settings = train_command.parse(job.words)
        self._strategy = _strategy(job, rank, settings)
        batches = input_pipeline.pipeline(settings)
        self._model = build.make_model(settings, self._strategy, batches)
        self._examples = job.steps * max(case.global_batch for case in job.cases)
        self._warmup = job.warmup
        self._cases = [
            (case.global_batch, _one_batch(batches, case.global_batch)) for case in job.cases
        ]

    def ready(self) -> dict[str, Any]:
        """Compile the steps of all cases, and return facts about the model."""
        for _, batches in self._cases:
            self._model.predict(batches, steps=TRACED, verbose=0)
        return _facts(self._strategy, self._model)

    def measure(self, number: int) -> dict[str, Any]:
        """Time one call of `predict`, after a warm-up call.

        Args:
            number: Index of the case.

        Returns:
            Measurements: "steps", "examples" and "seconds".
        """
        rows, batches = self._cases[number]
        steps = max(1, self._examples // rows)
        if self._warmup:
            self._model.predict(batches, steps=self._warmup, verbose=0)
        begin = time.perf_counter()
        outputs = self._model.predict(batches, steps=steps, verbose=0)
        seconds = time.perf_counter() - begin
        assert len(keras.tree.flatten(outputs)[0]) == steps * rows
        return {"steps": steps, "examples": steps * rows, "seconds": seconds}


class AllReduce:
    """Timer of all-reduces of float32 numbers, run in sequence within one graph as in a step.

    Args:
        job: Job to measure.
        rank: Rank of this process.
    """

    def __init__(self, job: Job, rank: int):
        self._job = job
        self._strategy = _strategy(job, rank, None)
        self._values = [self._numbers(case) for case in job.cases]
        self._function = tf.function(self._sums, autograph=False)

    def ready(self) -> dict[str, Any]:
        """Compile the all-reduces, and check that their results are right."""
        replicas = self._strategy.num_replicas_in_sync
        for values in self._values:
            total = float(self._function(values, tf.constant(2)))
            assert total == 2 * replicas * (replicas + 1) / 2, (
                f"the sum over {replicas} replicas is {total}"
            )
        return _facts(self._strategy, None)

    def measure(self, number: int) -> dict[str, Any]:
        """Time `steps` all-reduces, after the warm-up ones.

        Args:
            number: Index of the case.

        Returns:
            Measurements: "steps", "examples" (0) and "seconds".
        """
        values = self._values[number]
        # The warm-up also lets all workers begin together.
        float(self._function(values, tf.constant(max(1, self._job.warmup))))
        begin = time.perf_counter()
        float(self._function(values, tf.constant(self._job.steps)))
        return {"steps": self._job.steps, "examples": 0, "seconds": time.perf_counter() - begin}

    def _numbers(self, case: Case) -> Any:
        """Return a vector on each replica that is filled with the replica's number, from 1."""
        count = max(1, case.bytes // 4)
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: tf.fill([count], float(context.replica_id_in_sync_group + 1))
        )

    def _sums(self, values: Any, times: tf.Tensor) -> tf.Tensor:
        def on_replica(replica_values):
            # A captured tensor has no device, but workers need one to place the sum. The identity
            # has a device, and copies nothing.
            return tf.distribute.get_replica_context().all_reduce(
                "SUM", tf.identity(replica_values)
            )[0]

        def body(done, total):
            first_values = self._strategy.experimental_local_results(
                self._strategy.run(on_replica, args=(values,))
            )
            return done + 1, total + tf.add_n(list(first_values)) / len(first_values)

        # In sequence, as in training: the time that counts is how long the next step must wait.
        return tf.while_loop(
            lambda done, total: done < times,
            body,
            [tf.constant(0), tf.constant(0.0)],
            parallel_iterations=1,
        )[1]


def _strategy(job: Job, rank: int, settings: config.Run | None) -> tf.distribute.Strategy:
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:  # several groups of processes share the GPUs
        tf.config.experimental.set_memory_growth(gpu, True)
    configured = settings.strategy.devices if settings else None
    cpu = not gpus or (configured or "").lstrip("/").startswith("cpu")
    if not cpu and len(gpus) < job.replicas:
        raise ValueError(
            f"--workers: expected at most the {len(gpus)} GPUs of this machine, received "
            f'{job.replicas}; strategy.devices="cpu" takes CPUs'
        )
    kind = "cpu" if cpu else "gpu"
    first = 0
    count = job.replicas
    if job.workers > 1:
        first = 0 if cpu else rank
        count = 1
    names = ",".join(f"{kind}:{number}" for number in range(first, first + count))
    # The launcher has already set the threads of workers.
    threads = None if job.threads is None or job.workers > 1 else job.threads * job.replicas
    sync = build.policy(settings.sync) if settings else None
    return tfdist.make_strategy(
        job.strategy,
        devices=names,
        communication=job.communication,
        timeout=job.timeout,
        threads=threads,
        sync=sync,
    )


def _with_batch(settings: config.Run, case: Case) -> tf.data.Dataset:
    values = settings.to_dict()
    values["data"]["global_batch"] = case.global_batch
    batches = input_pipeline.pipeline(config.Run.from_dict(values))
    rows = {
        spec.shape[0]
        for spec in tf.nest.flatten(batches.element_spec)
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank
    }
    if rows - {None, case.global_batch}:
        raise ValueError(
            f"data.name={settings.data.name}: expected batches of "
            f"data.global_batch={case.global_batch}, which a benchmark changes, received "
            f"{max(rows - {None})} rows. Let the function take it from the data section that it "
            "is given."
        )
    return batches


def _without_end(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Repeat the batches forever. Each replica still reads only its own rows."""
    result = batches.repeat()
    if input_pipeline.is_pipeline(batches):
        result.replica_rows = lambda *args, **kwargs: batches.replica_rows(*args, **kwargs).repeat()
    return result


def _one_batch(batches: tf.data.Dataset, rows: int) -> tf.data.Dataset:
    """Return the inputs of the first examples as one batch in memory, repeated forever.

    Reading such a batch costs nothing.
    """
    first = batches.unbatch().repeat().batch(rows).take(1).get_single_element()
    return tf.data.Dataset.from_tensors(first[0] if isinstance(first, tuple) else first).repeat()


def _facts(strategy: tf.distribute.Strategy, model: keras.Model | None) -> dict[str, Any]:
    """Return what a report says about the model and the devices.

    GPUs are listed only if replicas compute on them.
    """
    on_gpus = device_type(strategy) == "GPU"
    gpus = tf.config.list_physical_devices("GPU") if on_gpus else []
    names = [
        tf.config.experimental.get_device_details(gpu).get("device_name", "GPU") for gpu in gpus
    ]
    return {"parameters": model.count_params() if model else 0, "gpus": names}


def _whole(steps: int, per_call: int) -> int:
    """Round a number of steps up to a multiple of the steps per call."""
    return -(-steps // per_call) * per_call
