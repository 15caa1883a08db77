"""A job becomes a model, or buffers, under its strategy, and each of its cases a time; no order is waited for here."""

from __future__ import annotations

import os
import time
from typing import Any

import keras
import tensorflow as tf

import tfdist
from tfdist import config
from tfdist.run import build, input_pipeline, train_command
from tfdist.telemetry import step_records
from tfdist.tools.bench.jobs import Case, Job

TRACED = 3  # steps of the run in which functions are compiled


class Training:
    """Times `model.fit` on the batches of a config.

    Args:
        job: What to measure.
        rank: Of this process.
    """

    def __init__(self, job: Job, rank: int):
        self._job, self._rank = job, rank
        self._epoch = 0  # of all fits together
        self._settings = train_command.parse(job.words)
        self._strategy = _strategy(job, rank, self._settings)
        batches = [_with_batch(self._settings, case) for case in job.cases]
        self._model = build.make_model(self._settings, self._strategy, batches[0])
        self._batches = [_without_end(each) for each in batches]

    def ready(self) -> dict[str, Any]:
        """Compiles the steps of all cases; returns facts of the model."""
        for number in range(len(self._batches)):
            self._fit(number, _whole(TRACED, self._settings.train.steps_per_execution), 1)
        return _facts(self._strategy, self._model)

    def measure(self, number: int) -> dict[str, Any]:
        """One epoch of `steps`, after as many whole ones as the steps to warm up take; the input goes on without a break.

        Args:
            number: Of the case.

        Returns:
            Of the last epoch: "steps", "examples", "seconds", "step_breakdown" (this worker's seconds of each part of a mean step), and "bytes"
            that each replica gave into the sum of gradients.
        """
        steps = self._job.steps
        clock = self._fit(number, steps, 1 + -(-self._job.warmup // steps))
        windows = [
            window
            for window in step_records.read(self._run(number)).get(self._rank, [])
            if window.epoch == self._epoch - 1
        ]
        given = max((window.bytes for window in windows), default=0)
        return {
            "steps": steps,
            "examples": clock.examples,
            "seconds": clock.seconds,
            "step_breakdown": step_records.per_step(windows),
            "bytes": given,
        }

    def _fit(self, number: int, steps: int, epochs: int) -> _Clock:
        clock = _Clock()
        first, self._epoch = self._epoch, self._epoch + epochs
        watching = [clock, tfdist.StepBreakdown(self._run(number))]
        self._model.fit(
            self._batches[number],
            steps_per_epoch=steps,
            initial_epoch=first,
            epochs=self._epoch,
            verbose=0,
            callbacks=watching,
        )
        return clock

    def _run(self, number: int) -> str:
        """The directory of a case, as if it were a run."""
        return os.path.join(self._job.directory, f"case-{number}")


class _Clock(keras.callbacks.Callback):
    """Time and examples of the last epoch. It watches no batch: that would let each step wait for Python."""

    seconds = 0.0
    examples = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._examples, self._begin = self.model.train_function.stats.examples, time.perf_counter()

    def on_epoch_end(
        self, epoch: int, logs: Any = None
    ) -> None:  # Keras has read the metrics: the steps are done
        self.seconds = time.perf_counter() - self._begin
        self.examples = self.model.train_function.stats.examples - self._examples


class Prediction:
    """Times `model.predict` on batches that lie in memory.

    Args:
        job: What to measure; each case predicts the same number of examples: `steps` batches of the largest case.
        rank: Of this process.
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
        """Compiles the steps of all cases; returns facts of the model."""
        for _, batches in self._cases:
            self._model.predict(batches, steps=TRACED, verbose=0)
        return _facts(self._strategy, self._model)

    def measure(self, number: int) -> dict[str, Any]:
        """One call of `predict`, after one of the steps to warm up.

        Args:
            number: Of the case.
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
    """Times sums of float32 numbers over the replicas, one after another within one graph, as in a step.

    Args:
        job: What to measure.
        rank: Of this process.
    """

    def __init__(self, job: Job, rank: int):
        self._job = job
        self._strategy = _strategy(job, rank, None)
        self._values = [self._numbers(case) for case in job.cases]
        self._function = tf.function(self._sums, autograph=False)

    def ready(self) -> dict[str, Any]:
        """Compiles the sums, and makes sure that they are right."""
        replicas = self._strategy.num_replicas_in_sync
        for values in self._values:
            found = float(self._function(values, tf.constant(2)))
            assert found == 2 * replicas * (replicas + 1) / 2, (
                f"the sum over {replicas} replicas is {found}"
            )
        return _facts(self._strategy, None)

    def measure(self, number: int) -> dict[str, Any]:
        """`steps` sums, after those to warm up.

        Args:
            number: Of the case.
        """
        values = self._values[number]
        float(
            self._function(values, tf.constant(max(1, self._job.warmup)))
        )  # they also let all workers begin together
        begin = time.perf_counter()
        float(self._function(values, tf.constant(self._job.steps)))
        return {"steps": self._job.steps, "examples": 0, "seconds": time.perf_counter() - begin}

    def _numbers(self, case: Case) -> Any:
        """On each replica its number, from 1, over and over."""
        count = max(1, case.bytes // 4)
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: tf.fill([count], float(context.replica_id_in_sync_group + 1))
        )

    def _sums(self, values: Any, times: tf.Tensor) -> tf.Tensor:
        def on_replica(mine):
            # What is captured has no device, by which workers know where the sum goes; the identity has, and copies nothing.
            return tf.distribute.get_replica_context().all_reduce("SUM", tf.identity(mine))[0]

        def body(done, total):
            firsts = self._strategy.experimental_local_results(
                self._strategy.run(on_replica, args=(values,))
            )
            return done + 1, total + tf.add_n(list(firsts)) / len(firsts)

        # One after another, as the steps of a training: what counts is how long the next one has to wait.
        return tf.while_loop(
            lambda done, total: done < times,
            body,
            [tf.constant(0), tf.constant(0.0)],
            parallel_iterations=1,
        )[1]


def _strategy(job: Job, rank: int, settings: config.Run | None) -> tf.distribute.Strategy:
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:  # the groups of processes share them
        tf.config.experimental.set_memory_growth(gpu, True)
    asked = settings.strategy.devices if settings else None
    cpu = not gpus or (asked or "").lstrip("/").startswith("cpu")
    if not cpu and len(gpus) < job.replicas:
        raise ValueError(
            f'--workers: expected at most the {len(gpus)} GPUs of this machine, received {job.replicas}; strategy.devices="cpu" takes CPUs'
        )
    kind, first, count = "cpu" if cpu else "gpu", 0, job.replicas
    if job.workers > 1:
        first, count = (0 if cpu else rank), 1
    names = ",".join(f"{kind}:{number}" for number in range(first, first + count))
    threads = (
        None if job.threads is None or job.workers > 1 else job.threads * job.replicas
    )  # the launcher has told those of workers
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
            f"data.name={settings.data.name}: expected batches of data.global_batch={case.global_batch}, which a benchmark changes, received "
            f"{max(rows - {None})} rows. Let the function take it from the data section that it is given."
        )
    return batches


def _without_end(batches: tf.data.Dataset) -> tf.data.Dataset:
    """The same batches, epoch after epoch; each replica still reads only its own rows."""
    result = batches.repeat()
    if input_pipeline.is_pipeline(batches):
        result.replica_rows = lambda *args, **kwargs: batches.replica_rows(*args, **kwargs).repeat()
    return result


def _one_batch(batches: tf.data.Dataset, rows: int) -> tf.data.Dataset:
    """The first examples' inputs as one batch in memory, over and over: to read it costs nothing."""
    first = batches.unbatch().repeat().batch(rows).take(1).get_single_element()
    return tf.data.Dataset.from_tensors(first[0] if isinstance(first, tuple) else first).repeat()


def _facts(strategy: tf.distribute.Strategy, model: keras.Model | None) -> dict[str, Any]:
    """What a report says of the model and the devices; GPUs only where replicas compute on them."""
    on_cpu = "CPU" in strategy.extended.worker_devices[0].upper()
    gpus = [] if on_cpu else tf.config.list_physical_devices("GPU")
    names = [
        tf.config.experimental.get_device_details(gpu).get("device_name", "GPU") for gpu in gpus
    ]
    return {"parameters": model.count_params() if model else 0, "gpus": names}


def _whole(steps: int, per_call: int) -> int:
    """The next multiple of the steps of a call."""
    return -(-steps // per_call) * per_call
