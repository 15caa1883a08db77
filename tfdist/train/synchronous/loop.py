"""Training loop: Keras' `train_function` and `test_function` on many replicas.

The only collectives in a step are those of the gradients. Where no callback watches single steps,
no step waits for Python. One call then runs as many steps as fit in a fifth of a second, and Keras'
next calls find their steps done. Metrics are summed over the replicas only when they are read: at
every step for callbacks that watch batches, at agreed steps for a progress bar, and at the end of
the epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.batch_rows import count_rows
from tfdist.keras_compat import chose_jit_compile, device_type, local_component, metric_variables
from tfdist.keras_compat.flat_calls import FlatFunction, flat_call
from tfdist.parallel.placement import Placement
from tfdist.runtime.launch_protocol import Phase
from tfdist.runtime.time_account import time_account
from tfdist.train.health import preemption
from tfdist.train.health.heartbeat import Heartbeat
from tfdist.train.synchronous.assigned_weights import noted_in
from tfdist.train.synchronous.compiled_step import BatchShapes, can_compile, compiled
from tfdist.train.synchronous.feed import Batch, FeedIterator, any_rows, batch_of, replica_rows
from tfdist.train.synchronous.gathered_metrics import is_gathered
from tfdist.train.synchronous.gradient_sum import NotInLoop, in_loop
from tfdist.train.synchronous.replica_state import ReplicaState, all_gather, compare
from tfdist.train.synchronous.replica_step import local_replica, run_replica
from tfdist.train.synchronous.step_logs import StepLogs
from tfdist.train.synchronous.step_monitoring import Stats, StepMonitoring
from tfdist.train.timing.graph_timestamps import PER_REPLICA, GraphTimestamps, clock, measuring
from tfdist.train.timing.graph_timestamps import end as end_of_step
from tfdist.train.timing.step_breakdown import Recorder, compute_times

# Duration of one call, in seconds. It bounds the delay of Ctrl-C and heartbeats.
AHEAD_S = 0.2
MAX_AHEAD = 256
# Seconds from one synchronization of the metrics for a progress bar to the next.
SHOWN_S = 1.0


class Runner:
    """A `train_function` or `test_function` that runs steps on all replicas.

    Args:
        strategy: Synchronous strategy.
        placement: Numbers of workers and replicas.
        host: CPU device name.
        model: The model.
        step: `model.train_step` or `model.test_step`.
        sync: Collectives of the model between steps.
        heartbeat: Heartbeat that is updated at each call.
        trains: Whether the steps are training steps.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        placement: Placement,
        host: str,
        model: keras.Model,
        step: Callable,
        sync: ReplicaState,
        heartbeat: Heartbeat,
        trains: bool,
    ):
        self._heartbeat = heartbeat
        self._trains = trains
        self._category = "training" if trains else "validation"  # of the time account
        self._traced = False  # whether the running call has traced or compiled
        self._counted = 0.0  # seconds of the category before that call
        self._strategy = strategy
        self._placement = placement
        self._host = host
        self.model = model
        self._step_logs = StepLogs(model, step)
        self._replica_state = sync
        # Whether steps run one by one, because the model cannot use a loop.
        self._one_by_one = False
        self._graphs: dict = {}
        self._compiles: bool | None = None  # whether XLA compiles the steps; None until known
        self._shapes: BatchShapes | None = None  # of batches, if it does
        self._assigned: dict[int, tf.Variable] = {}  # by id, what steps assign to themselves
        # Keras' calls to run at once; equal on all workers, see _check_workers.
        self._calls_ahead = 1
        self._calls_ahead_settled = False
        # Keras' calls from one synchronization of the metrics to the next; equal on all workers.
        self._calls_per_check = 1
        self._loop_of: tuple | None = None  # an iterator, a graph, and its trace for the iterator
        self._batch_of: tuple | None = None  # a graph, and the function that calls its traces
        # Variables of metrics, facts of them, and graphs that read them after a step.
        self._readers: tuple[list, tuple, dict] = [], (), {}
        self._bound = strategy.tfdist_engine.watchdog.bound
        self._aggregation = strategy.tfdist_engine.aggregation
        self._remote = device_type(strategy) != "CPU"
        self._readings_per_step = 1 + PER_REPLICA * placement.local_replicas
        self.recorder: Recorder | None = None
        self._fetched: tuple | None = None  # an iterator and the next batch from it
        self._calls_per_second = 0.0  # on this worker; 0 until known
        self.stats = Stats()
        self.epoch = 0
        # Steps in the optimizer's state before the running call.
        self._base_steps: int | None = None
        self.begin(StepMonitoring())

    # --- Epochs -----------------------------------------------------------------------------------
    def begin(
        self,
        watch: StepMonitoring,
        verify: bool = True,
        recorder: Recorder | None = None,
        restart: bool = True,
    ) -> None:
        """Start a `fit` or `evaluate`.

        Args:
            watch: Requirements of the callbacks.
            verify: Whether the workers compare data and weights after the first step.
            recorder: Recorder of the step breakdown; None to measure nothing.
            restart: False to continue after the previous steps, with the same count of steps.
        """
        self.watch = watch
        self.recorder = recorder
        self._verified = not verify
        self._weights = 0.0
        self.stopping = False  # whether some worker was asked to end
        if restart:
            self._base_steps = None
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.logs: dict[str, Any] = {}
        self._calls_done = 0  # Keras' calls of this epoch whose steps have run
        self._calls_served = 0
        self.steps_done = 0
        self._checksum = 0.0
        self._next_check = self._calls_ahead
        self._next_stop_check = self._next_check
        # Each replica's other logs of the last step that ran outside of a loop, see StepLogs.
        self._last: Any = None
        self._read: tuple[dict, dict] | None = None  # results of metrics that a graph has read
        # Steps of this epoch at which a call must end, by the name of the caller of pause_at.
        self.pauses: dict[str, int] = {}

    def begin_at(self, epoch: int, step: int) -> None:
        """Count the first `step` steps of the epoch as done; Keras' calls for them run nothing."""
        self.epoch = epoch
        self.steps_done = step
        self._heartbeat.epoch = epoch
        self._heartbeat.step = step
        self._calls_done = -(-step // self.model.steps_per_execution)
        self._next_check = self._calls_done + self._calls_ahead
        self._next_stop_check = self._next_check

    def end_epoch(self) -> dict[str, np.ndarray]:
        """Return the metrics of all replicas for the whole epoch.

        The logs that Keras' last call of the epoch returned are updated in place. They get these
        metrics, or the mean over the replicas of what the last step returned, if a step returns
        other values.
        """
        step_times = self.recorder.end_steps(self.epoch) if self.recorder else None
        with time_account().during(self._category):
            if self._trains:
                self._replica_state.sync_replicas()
                self._replica_state.check_equal(self._assigned)
            else:
                self._replica_state.sync_statistics()
            results = self._check_workers(step_times)
        self._begin_epoch()
        self.epoch += 1
        if self._trains:
            self._heartbeat.epoch = self.epoch
            self._heartbeat.step = 0
        return results

    @property
    def all_calls_reported(self) -> bool:
        """Return whether Keras has been told of all steps that have run."""
        return self._calls_served == self._calls_done

    # --- Keras calls this once every `steps_per_execution` steps ----------------------------------
    def __call__(self, iterator) -> dict[str, Any]:
        """Return the logs of Keras' next call, and run steps if none are left to report."""
        if self._calls_served == self._calls_done:
            self._run(iterator)
        self._calls_served += 1
        return self.logs

    def _run(self, iterator) -> None:
        self._traced = False
        self._counted = time_account().counted(self._category)
        with time_account().running(self._category):
            try:
                self._run_calls(iterator)
            except Exception:
                self._account_for(self.stats)
                raise

    def _run_calls(self, iterator) -> None:
        per_call = self.model.steps_per_execution
        calls = self._calls_to_run(per_call)
        if not self.stats.steps:
            self._heartbeat.beat(Phase.TRACING)
        if restart := self._base_steps is None:
            self._skips_updates = self._may_skip_updates()
        if self._base_steps is None or self._skips_updates:
            self._base_steps = self._optimizer_steps()
        if self._trains:
            with self._bound():
                self._aggregation.begin(self.model.optimizer, restart)
            if self._aggregation.local and not self._verified:  # after steps the weights differ
                self._weights = self._replica_state.fingerprint()
        before = dataclasses.replace(self.stats)
        if self.recorder:
            self.recorder.begin(self._base_steps)
        start = time.perf_counter()
        try:
            steps = self._run_steps(iterator, calls * per_call)
        except (tf.errors.OpError, TimeoutError):
            if self._trains:  # the heartbeat tells the step that failed
                self._heartbeat.step = self.steps_done + self._optimizer_steps() - self._base_steps
            raise
        self._base_steps += steps
        seconds = time.perf_counter() - start
        if not steps:
            self._account_for(before)
            self._report_call(before)
            raise StopIteration
        self.stats.steps += steps
        self.stats.seconds += seconds
        self.steps_done += steps
        self._calls_done += -(-steps // per_call)
        if self.stats.steps > steps:  # the first call of all has compiled
            self._calls_per_second = steps / max(seconds, 1e-6) / per_call
        should_check = self.watch.progress or not self._calls_ahead_settled
        if (
            self.watch.exact
            or not self._verified
            or (should_check and self._calls_done >= self._next_check)
        ):
            if self.watch.exact:
                self._replica_state.sync_statistics()
            if not self._verified and not self._aggregation.local:
                self._replica_state.check_equal(self._assigned)
            self._check_workers()
        elif self.watch.saves and self._calls_done >= self._next_stop_check:
            self.stopping = self.stopping or self._any_worker_stops()
            self._next_stop_check = self._calls_done + self._calls_ahead
        if self._shapes is not None:
            self._shapes.report()
        self._account_for(before)
        self._report_call(before)
        if self._trains:
            self._heartbeat.at(self.epoch, self.steps_done, steps)
        else:
            self._heartbeat.beat(Phase.RUNNING)

    def _account_for(self, before: Stats) -> None:
        """Move what of a call was no step to its own category of the time account."""
        account = time_account()
        seconds = account.state().seconds[self._category] - self._counted
        if self._traced:
            account.move(self._category, "compile", seconds)
        elif self._trains:
            waited = self.stats.input_seconds - before.input_seconds
            account.move(self._category, "input", min(waited, seconds))

    def _report_call(self, before: Stats) -> None:
        """Report a call to the recorder."""
        if self.recorder:
            stats = self.stats
            steps = stats.steps - before.steps
            waited = stats.input_seconds - before.input_seconds
            examples = stats.examples - before.examples
            short = self._calls_ahead if self.watch.exact else 1
            self.recorder.end_call(self.epoch, steps, examples, waited, short)

    def _record(self, steps: int, started: Any, readings: Any) -> float:
        """Report steps to the recorder, and return the seconds that they waited for batches."""
        assert self.recorder is not None
        times = compute_times(float(started), readings.numpy()[:steps])
        self.recorder.bytes = self._last_timestamps.bytes
        self.recorder.add(times)
        return times.input

    def _optimizer_steps(self) -> int:
        """Return the number of steps in the optimizer's state, accumulated ones included."""
        optimizer = getattr(self.model, "optimizer", None)
        return 0 if optimizer is None else self._aggregation.steps(optimizer)

    def _may_skip_updates(self) -> bool:
        """Return whether updates that are not finite are skipped and do not count.

        Reading the count at each call costs a third of a millisecond, so it is done only where this
        is true.
        """
        policy = (
            self._strategy.tfdist_engine.exchange_of(self.model).policy if self._trains else None
        )
        return getattr(policy, "skip_nonfinite", False) or (
            self._trains and isinstance(self.model.optimizer, keras.optimizers.LossScaleOptimizer)
        )

    def _any_worker_stops(self) -> bool:
        if self._placement.workers == 1:
            return preemption.requested()
        return bool(
            all_gather(
                self._strategy, self._placement, np.array([preemption.requested()], np.float64)
            ).any()
        )

    def _calls_to_run(self, per_call: int) -> int:
        """Return how many of Keras' calls to run at once.

        The number is the same on every worker. Otherwise the collectives of their loops would not
        match.
        """
        if self.watch.exact or self._one_by_one or not self._verified or self.model.run_eagerly:
            return 1
        calls = self._calls_ahead
        if self.watch.steps:
            calls = min(calls, -(-self.watch.steps // per_call) - self._calls_done)
        for pause in (
            *self.pauses.values(),
            self._heartbeat.next_pause(self.epoch, self.steps_done) if self._trains else None,
        ):
            if pause is not None and pause > self.steps_done:
                calls = min(calls, -(-(pause - self.steps_done) // per_call))
        return max(1, calls)

    def _check_workers(self, timing_summary: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Sum the metrics over the replicas into `logs`, and agree on the pace.

        Values that must be equal on all workers are compared too. The chief's pace counts. It grows
        at most fourfold from one synchronization of the metrics to the next.

        Args:
            timing_summary: Numbers that the recorder sends to the other workers' recorders, at
                the end of an epoch.
        """
        first = not self._verified
        self._verified = True
        weights = (
            0.0
            if not first
            else self._weights
            if self._aggregation.local
            else self._replica_state.fingerprint()
        )
        own_note = np.array(
            [
                self.steps_done,
                self._checksum,
                weights,
                self._calls_per_second,
                preemption.requested(),
            ]
        )
        note = own_note if timing_summary is None else np.concatenate([own_note, timing_summary])
        if self._read is None:
            results, in_logs, notes = self._replica_state.metrics(note, self._step_logs.metrics)
        else:
            results, in_logs = self._read
            self._read = None
            notes = note[None]
        compare(notes, self._placement)
        if timing_summary is not None and self.recorder:
            self.recorder.receive(notes[:, len(own_note) :])
        self.stopping = self.stopping or (self.watch.saves and bool(notes[:, 4].any()))
        if pace := notes[0, 3]:
            calls = min(MAX_AHEAD, 4 * self._calls_ahead, max(1, int(pace * AHEAD_S)))
            self._calls_ahead_settled = calls < 4 * self._calls_ahead or calls == MAX_AHEAD
            self._calls_ahead = calls
            self._calls_per_check = (
                max(calls, int(pace * SHOWN_S)) if self._calls_ahead_settled else calls
            )
        self._next_check = self._calls_done + self._calls_per_check
        self._next_stop_check = self._calls_done + self._calls_ahead
        if self._step_logs.known:
            others = self._replica_state.sums(self._last) if self._step_logs.has_others else []
            self.logs.update(self._step_logs.fill(in_logs, others))
        else:  # all steps of the epoch were done before a restart
            self.logs.update(results)
        return results

    # --- Graphs -----------------------------------------------------------------------------------
    def _run_steps(self, iterator, steps: int) -> int:
        self._read = None
        feed = iterator.feed if isinstance(iterator, FeedIterator) else None
        even = feed is not None and feed.even
        if feed is None and not isinstance(iterator, tf.distribute.DistributedIterator):
            return self._run_arrays(iterator, steps)
        source = iterator.iterator if feed is not None else iterator
        one_by_one = self.model.run_eagerly or self._one_by_one
        if feed is not None and feed.reads_ahead and not one_by_one:
            try:
                return self._run_graph(source, steps, even)
            except NotInLoop:
                self._one_by_one = True
        done = 0
        for _ in range(steps):
            try:
                start = time.perf_counter()
                # The iterator of a distributed data set asks all workers whether they have a batch.
                with self._bound() if feed is None else contextlib.nullcontext():
                    batch = self._as_batch(self._next(source))
                self.stats.input_seconds += time.perf_counter() - start
            except (StopIteration, tf.errors.OutOfRangeError):
                break
            self._run_batch(batch, even, reads=self.watch.exact and self._can_read)
            self.stats.examples += int(self._global_rows(batch))
            if batch.checksum is not None:
                self._checksum += float(batch.checksum) * (1 + (self.steps_done + done) % 127)
            done += 1
        return done

    def _run_graph(self, source, steps: int, even: bool) -> int:
        if self._fetched is None or self._fetched[0] is not source:
            start = time.perf_counter()
            self._fetched = source, source.get_next_as_optional()
            self.stats.input_seconds += time.perf_counter() - start
        if self._compiles is None and self._fetched[1].has_value():
            self._decide_on_xla(self._fetched[1].get_value(), even)
        arguments = (
            source,
            self._fetched[1],
            tf.constant(np.int64(steps)),  # TensorFlow caches Python's numbers for ever (#68196)
            tf.constant(np.int64(self.steps_done)),
        )
        reads = self.watch.exact and self._can_read
        graph = self._graph_that_reads("loop", even) if reads else self._graph("loop", even)
        if self._loop_of is None or self._loop_of[:2] != (source, graph):
            self._loop_of = source, graph, graph.get_concrete_function(*arguments)
        with self._bound(self._progress_values):
            outputs = flat_call(self._loop_of[2], *arguments)
        done, examples, waited, checksum, following, *readings = self._outputs(outputs, reads)
        self._fetched = source, following
        self.stats.examples += int(examples)
        self.stats.input_seconds += (
            float(waited) if self.recorder is None else self._record(int(done), *readings)
        )
        self._checksum += float(checksum)
        return int(done)

    def _progress_values(self) -> list:
        """Return values that change with each step.

        They are read from this process alone, and may be read in any thread.
        """
        with self._strategy.scope():  # otherwise metrics would be summed over the workers
            return [
                self._optimizer_steps(),
                *(local_component(v, 0).numpy().tobytes() for v in metric_variables(self.model)),
            ]

    def _next(self, source):
        """Return the next batch, which the loop may have fetched already."""
        if self._fetched is None or self._fetched[0] is not source:
            return next(source)
        following = self._fetched[1]
        self._fetched = None
        if not following.has_value():
            raise StopIteration
        return following.get_value()

    def _run_arrays(self, batches, steps: int) -> int:
        done = 0
        for data in batches:
            batch = batch_of(data, self._placement)
            self._run_batch(batch, False, reads=self._can_read)
            self.stats.examples += int(self._global_rows(batch))
            done += 1
            if done == steps:
                break
        return done

    def _run_batch(self, batch: Batch, even: bool, reads: bool) -> None:
        if self._compiles is None:
            self._decide_on_xla(batch, even)
        if self.model.run_eagerly:
            function: Any = functools.partial(
                self._measured if self.recorder else self._replicas, even=even
            )
        else:
            graph = self._graph_that_reads("batch", even) if reads else self._graph("batch", even)
            if self._batch_of is None or self._batch_of[0] is not graph:
                # Replicas must trace alike, whatever their rows. A single one knows them, as Keras.
                differ = self._placement.replicas > 1 and not even
                specs = (lambda batch: (any_rows(batch),)) if differ else None
                self._batch_of = graph, FlatFunction(graph, specs)
            function = self._batch_of[1]
        started = time.time()
        with self._bound():
            result = self._outputs(function(batch), reads)
        if self.recorder:
            result, row = result
            self._record(1, started, row[None])
        self._last, _ = result

    def _decide_on_xla(self, batch: Batch, even: bool) -> None:
        """Decide whether XLA compiles the steps; log why it does not, if it should."""
        self._compiles = self._strategy.tfdist_engine.asks_for_xla(self.model)
        if self._compiles and (self._placement.replicas > 1 or not chose_jit_compile(self.model)):
            rows = replica_rows(batch, 0, self._placement, self._host, even)
            name = "train_step" if self._trains else "test_step"
            self._compiles = can_compile(
                self._step_logs, name, rows, self._strategy, self._placement
            )
        if self._compiles and self._placement.is_chief:
            self._shapes = BatchShapes(self._host)

    def _graph(self, kind: str, even: bool):
        key = kind, even, self.recorder is not None
        if key not in self._graphs:
            batch = self._measured if self.recorder else self._replicas
            body: Any = self._loop if kind == "loop" else batch

            def traced(*args):
                self._traced = True
                if self.recorder:
                    self.recorder.mark_compiled()
                return body(*args, even)

            self._graphs[key] = tf.function(traced, autograph=False, reduce_retracing=True)
        return self._graphs[key]

    @property
    def _can_read(self) -> bool:
        """Return whether a graph can read the metrics after its step.

        It saves 0.4 ms a step, but only a single worker needs no other values at that time.
        """
        return self._placement.workers == 1 and self._step_logs.known and not self.model.run_eagerly

    def _graph_that_reads(self, kind: str, even: bool):
        """Return a graph like that of `_graph`, which then reads the metrics; it returns both."""
        variables = metric_variables(self.model)
        indices = self._step_logs.metrics
        facts = indices, [is_gathered(v) for v in variables]
        known, of_facts, graphs = self._readers
        if facts != of_facts or list(map(id, known)) != list(map(id, variables)):
            graphs = {}
            self._readers = variables, facts, graphs
        graph = self._graph(kind, even)
        if graph not in graphs:

            def traced(*args):
                self._traced = True
                outputs = graph(*args)
                return outputs, self._replica_state.results(indices)

            graphs[graph] = tf.function(traced, autograph=False, reduce_retracing=True)
        return graphs[graph]

    def _outputs(self, outputs: Any, reads: bool) -> Any:
        """Return the outputs of a graph, after it has kept what the graph read of the metrics."""
        if not reads:
            return outputs
        outputs, self._read = outputs
        self._read = tf.nest.map_structure(lambda x: x.numpy(), self._read)
        return outputs

    def _replicas(self, batch: Batch, even: bool):
        """Run one step on all replicas, and return what `StepLogs` returns on each."""
        engine = self._strategy.tfdist_engine
        policy = engine.exchange_of(self.model).policy
        combine = getattr(policy, "combine", "sum")  # local SGD: each replica's own mean

        if self._shapes is not None:
            self._shapes.note(batch.data)

        def on_replica(batch):
            step: Callable = self._step_logs
            if self._compiles and self._placement.replicas > 1:
                step = compiled(step, engine.apply)
            elif self._compiles:
                step = tf.function(step, jit_compile=True, autograph=False)
            products = (
                engine.products_of_step(self.model)
                if self._trains and not self._compiles
                else contextlib.nullcontext()
            )
            with noted_in(self._assigned if self._trains else None), products:
                others, logs = run_replica(
                    step, self.model, batch, self._placement, self._host, even, combine
                )
            end_of_step(local_replica(self._placement), logs)
            return others, logs

        return self._strategy.run(on_replica, args=(batch,))

    def _global_rows(self, batch: Batch):
        """Return the rows of the global batch.

        Where the data came distributed, these are this worker's own rows.
        """
        if batch.rows is not None:
            return batch.rows
        parts = batch.data if self._placement.local_replicas > 1 else [batch.data]
        return tf.add_n([count_rows(part) for part in parts])

    def _as_batch(self, element) -> Batch:
        # The element comes from the feed, or from the iterator of a distributed data set.
        if isinstance(element, Batch):
            return element
        count = self._placement.local_replicas
        local = self._strategy.experimental_local_results
        parts = [tf.nest.map_structure(lambda x, i=i: local(x)[i], element) for i in range(count)]
        return Batch(parts if count > 1 else parts[0])

    def _loop(self, iterator, following, steps, before, even: bool) -> tuple:
        """Run up to `steps` steps in a graph loop; fewer where the data ends.

        The batch of a step is fetched while the step before it runs. (A `tf.cond` around the step
        instead of a batch in advance costs a tenth of its time.)

        Args:
            iterator: Iterator that gives batches.
            following: Next batch, a `tf.experimental.Optional`, empty where the data has ended.
            steps: Maximum number of steps, int64 scalar.
            before: Number of steps of this epoch that have run, int64 scalar.
            even: Whether every batch gives each replica the same number of rows.

        Returns:
            Number of steps run, number of rows of their global batches, seconds waited for batches,
            checksum of the batches, the next batch. With a recorder the seconds are 0, and two more
            values follow: the time when the loop began, and the clock readings of each step
            `[steps, readings]`. The first reading of a step is the time when the batch after it was
            available.
        """
        records = self.recorder is not None

        def body(done, examples, waited, checksum, following, *written: Any):
            batch = following.get_value()
            measured = self._timestamps() if records else None
            with in_loop(), measuring(measured):
                _, logs = self._replicas(batch, even)
                if self._step_logs.has_others:
                    raise NotInLoop  # they must be averaged after each step
            if batch.checksum is not None:
                checksum += batch.checksum * tf.cast(1 + (before + done) % 127, tf.float64)
            following = iterator.get_next_as_optional()
            fetched = clock([following.has_value()])
            if measured is None:
                local = self._strategy.experimental_local_results
                finished = [x for log in logs for x in local(log)]
                waited += tf.maximum(fetched - clock(finished), 0.0)
            else:
                written = (written[0].write(tf.cast(done, tf.int32), measured.row(fetched)),)
            rows = self._global_rows(batch)
            return done + 1, examples + rows, waited, checksum, following, *written

        started = clock([]) if records else None
        # Without this dependency, the clock may be read after the loop.
        with tf.control_dependencies([started] if records else None):
            zero = tf.identity(tf.constant(0.0, tf.float64))
            no_steps = tf.identity(tf.constant(0, tf.int64))
        values = [no_steps, no_steps, zero, zero, following]
        if records:
            shape = [self._readings_per_step]
            values.append(tf.TensorArray(tf.float64, tf.cast(steps, tf.int32), element_shape=shape))
        run = tf.while_loop(
            lambda done, *rest: (done < steps) & rest[3].has_value(),
            body,
            values,
            parallel_iterations=1,
        )
        return (*run[:5], started, run[5].stack()) if records else tuple(run)

    def _measured(self, batch: Batch, even: bool):
        """Run one step by itself, and return its logs and clock readings.

        No batch is fetched after it.
        """
        timestamps = self._timestamps()
        with measuring(timestamps):
            logs = self._replicas(batch, even)
        return logs, timestamps.row(tf.zeros([], tf.float64))

    def _timestamps(self) -> GraphTimestamps:
        self._last_timestamps = GraphTimestamps(self._placement, self._host, self._remote)
        return self._last_timestamps
