"""Dispatch of training and evaluation steps to the workers of a parameter-server cluster.

Keras' `train_function` and `test_function` are replaced: the coordinator hands out work items
and runs no step itself. A work item is a number of steps on numbered batches. It returns one vector
with what the steps added to the metrics, so that the coordinator can count every step once.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.batch_rows import count_rows
from tfdist.keras_compat import metric_variables, metrics_of, step_counter
from tfdist.runtime.time_account import time_account
from tfdist.train.metric_calls import Results, check_adds, observed
from tfdist.train.parameter_server import metric_deltas
from tfdist.train.parameter_server.batch_stream import Pass, dataset_variant
from tfdist.train.parameter_server.worker_pool import Pool
from tfdist.train.parameter_server.worker_step import WorkerStep
from tfdist.train.synchronous.feed import any_rows, tensors, without_optionals
from tfdist.train.synchronous.step_monitoring import Stats, StepMonitoring
from tfdist.train.timing.graph_timestamps import clock

REFRESH_S = 0.1  # between metric updates, if no callback needs the logs of single steps
GROUP_S = 0.1  # of work that a worker takes at once in that case
MAX_GROUP = 64  # items
MAX_GROUP_WITH_BATCHES = 8  # items, if their batches are sent with them
# Numbers before the metrics in a result: steps, rows, seconds waited for batches, updates.
HEADER_SIZE = 4


@dataclasses.dataclass(eq=False)
class WorkItem:
    """Unit of work for a worker: some steps on consecutive batches.

    Attributes:
        first: Number of the first batch.
        steps: Number of steps.
        batches: The batches themselves if the coordinator reads the data; None if workers do.
        graph: Traced graph that runs the item.
        done: Number of steps that were run, which is smaller than `steps` if the data ended; None
            until the item is done.
    """

    first: int
    steps: int
    batches: list | None = None
    graph: Any = None
    done: int | None = None


class RemoteRunner:
    """Callable that replaces a model's `train_function` or `test_function`.

    Args:
        pool: Pool of workers.
        strategy: Parameter-server strategy.
        model: Model.
        step: `model.train_step` or `model.test_step`.
        results: Function that returns the model's metrics from its variables.
        apply: Function that applies gradients: `Coordinator.apply`.
        on_call: Function that is called after each call, with the number of steps of the epoch that
            were given out.
        host: Device of the coordinator.
    """

    def __init__(
        self,
        pool: Pool,
        strategy,
        model: keras.Model,
        step: Callable,
        results: Callable[[], dict],
        apply: Callable,
        on_call: Callable[[int], None],
        host: str,
    ):
        self._pool = pool
        self._strategy = strategy
        self._on_call = on_call
        self._host = host
        self.model = model
        self._step = step
        self._category = "validation" if step == model.test_step else "training"
        self._results = results
        name = "train_step" if self._category == "training" else "test_step"
        self._worker_step = WorkerStep(self._observed_step, name, model, host, apply)
        self._graphs: dict = {}
        self._keys: list[str] = []  # names of the step's logs
        # For each log: the index of a metric and the position in its result, or None.
        self._sources: list[tuple[int, int] | None] = []
        self.stats = Stats()
        self._group = 1
        self.begin(StepMonitoring())

    def begin(self, watch: StepMonitoring) -> None:
        """Reset the state at the start of a `fit` or `evaluate`."""
        self.watch = watch
        self._iterators: dict[int, tuple[Pass, Any, int]] = {}
        self._pass: Pass | None = None
        self._first_batch = 0  # number of the first batch taken
        self._end: int | None = None  # `optimizer.iterations` at the end of the last epoch
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.logs: dict[str, Any] = {}
        # Items given out before Keras asked for them, if the length of the data is unknown.
        self._items: list[WorkItem] = []
        self._pending = 0  # items that are not done
        self._calls = 0
        self._total: np.ndarray | None = None  # sum of the results since the last `_update_logs`
        self._steps = 0
        self._updates = 0
        self._last: tuple[int, np.ndarray] | None = None
        self._batch_count: int | None = None  # number of all batches, once a worker has found it
        self._logs_updated = time.monotonic()
        self._started = self._logs_updated

    # --- In the main thread -----------------------------------------------------------------------
    def __call__(self, iterator) -> dict[str, Any]:
        """Dispatch the steps of one call of Keras, and return the newest logs."""
        with time_account().running(self._category):
            return self._call(iterator)

    def _call(self, iterator) -> dict[str, Any]:
        if not self._calls:
            self._seeds = metric_deltas.seeds(self.model)
            self._base = self._count_updates()
            self._started = time.monotonic()
        if isinstance(iterator, Pass):
            self._dispatch_call(iterator)
        else:
            for data in iterator:  # train_on_batch
                self._submit(WorkItem(self._calls, 1, [tensors(data)]))
            self.join()
        self._calls += 1
        if (
            not self.logs
            or self.watch.exact
            or time.monotonic() - self._logs_updated > REFRESH_S
            or not isinstance(iterator, Pass)
        ):
            self._pool.wait(lambda: self._last is not None)
            self._update_logs()
        self._on_call(self._calls * self.model.steps_per_execution)
        return self.logs

    def _dispatch_call(self, batches: Pass) -> None:
        steps = self.model.steps_per_execution
        if self.watch.steps is not None:
            steps = min(steps, self.watch.steps - self._calls * steps)
        if batches is not self._pass:
            self._pass = batches
            self._first_batch = batches.position
            batches.prepare()
        window = 2 * len(self._pool.workers) * self._group
        if not batches.stream.by_workers:
            self._feed(batches, steps)
        elif batches.length is None and not self.watch.steps:
            self._dispatch_until_end(batches, steps, window)
            return
        else:
            steps = (
                steps if batches.length is None else min(steps, batches.length - batches.position)
            )
            if steps <= 0 or self._batch_count is not None:
                raise StopIteration
            self._submit_steps(batches, steps)
        self._pool.wait(lambda: self._pending < window)

    def _feed(self, batches: Pass, steps: int) -> None:
        first = batches.position
        started = time.perf_counter()
        read: list = []
        with contextlib.suppress(StopIteration):
            while len(read) < steps:
                read.append(batches.batch())
        self.stats.input_seconds += time.perf_counter() - started
        if not read:
            raise StopIteration
        self._submit(WorkItem(first, len(read), read))

    def _dispatch_until_end(self, batches: Pass, per_call: int, window: int) -> None:
        """Dispatch items ahead of Keras' calls when the length of the data is unknown.

        Keras then never counts a step for which there was no batch.
        """
        while self._batch_count is None and len(self._items) < window:
            self._items.append(self._submit_steps(batches, per_call))
        item = self._items.pop(0) if self._items else None
        self._pool.wait(lambda: item is None or item.done is not None)
        if item is None or not item.done:
            raise StopIteration

    def _submit_steps(self, batches: Pass, steps: int) -> WorkItem:
        batches.position += steps
        return self._submit(WorkItem(batches.position - steps, steps))

    def _submit(self, item: WorkItem) -> WorkItem:
        # Traced here, so that errors of the user's step raise here.
        item.graph = self._graph(item)
        with self._pool.changed:
            self._pending += 1
        self._pool.submit(self, item)
        return item

    def join(self) -> None:
        """Wait until all items are done."""
        self._pool.wait(lambda: not self._pending)

    def end_epoch(self) -> dict[str, Any]:
        """Wait for all items, and return the metrics of the whole epoch.

        This also sets the final values of the last step in `logs`.
        """
        with time_account().during(self._category):
            self.join()
        results = self._update_logs()
        counter = self._counter()
        if counter is not None and self._updates:
            self._end = self._base + self._updates
            if int(counter.numpy()) != self._end:  # a step ran twice, after its worker was lost
                counter.assign(self._end)
        if len(self._seeds):
            metric_deltas.next_seeds(self.model, self._steps)
        self.stats.seconds += time.monotonic() - self._started
        self._begin_epoch()
        return results

    def _update_logs(self) -> dict[str, Any]:
        """Add the received results to the metrics, and update `logs`."""
        self._logs_updated = time.monotonic()
        with self._pool.changed:
            total = self._total
            self._total = None
            last = self._last
        if total is not None:
            position = 0
            for variable in metric_variables(self.model):
                size = int(np.prod(variable.shape))
                part = tf.cast(
                    tf.reshape(total[position : position + size], variable.shape), variable.dtype
                )
                variable.assign(variable + part)
                position += size
        results = self._results()
        if last is not None:
            metrics = metrics_of(self.model)
            known: dict[int, list] = {}
            for key, value, source in zip(self._keys, last[1].tolist(), self._sources, strict=True):
                if source is not None:
                    index, position = source
                    if index not in known:
                        known[index] = keras.tree.flatten(metrics[index].result())
                    value = tf.convert_to_tensor(known[index][position])
                self.logs[key] = value
        return results

    def _count_updates(self) -> int:
        """Return `optimizer.iterations` at the start of an epoch.

        Late steps of lost workers are not counted. They may end after `end_epoch`.
        """
        counter = self._counter()
        count = 0 if counter is None else int(counter.numpy())
        late = self._pool.requeued * self.model.steps_per_execution
        if counter is None or self._end is None or not self._end < count <= self._end + late:
            return count
        counter.assign(self._end)
        return self._end

    def _counter(self) -> keras.Variable | None:
        return None if self.model.optimizer is None else step_counter(self.model.optimizer)

    # --- In the workers' threads ------------------------------------------------------------------
    def take(self, items: collections.deque, worker: int) -> list[WorkItem]:
        """Remove the next consecutive items for a worker from the queue, and return them.

        Items before the position of the worker's iterator are taken only if no others are left.
        """
        position = self._iterators[worker][2] if worker in self._iterators else 0
        start = next(
            (i for i, p in enumerate(items) if p.batches is not None or p.first >= position), 0
        )
        has_batches = items[start].batches is not None
        limit = min(
            -(-len(items) // len(self._pool.workers)),
            MAX_GROUP_WITH_BATCHES if has_batches else MAX_GROUP,
            self._group,
        )
        taken = [items[start]]
        del items[start]
        while (
            len(taken) < limit
            and start < len(items)
            and items[start].first == taken[-1].first + taken[-1].steps
        ):
            taken.append(items[start])
            del items[start]
        return taken

    def execute(
        self, worker: int, items: list[WorkItem], call: Callable
    ) -> tuple[np.ndarray, float]:
        """Run consecutive items on a worker, and return their result and seconds."""
        started = time.monotonic()
        graph = items[0].graph
        index = items[0].first - self._first_batch
        if items[0].batches is None:
            return self._execute_from_iterator(
                worker, items, graph, self._on_coordinator(index), call
            ), time.monotonic() - started
        batches = [b for item in items for b in item.batches or []]
        parts = []
        for run in _group_by_shape(batches) if graph.stacks else [[b] for b in batches]:
            with tf.device(self._host):  # for the reason given in `_on_coordinator`
                data = (
                    tf.nest.map_structure(lambda *x: None if x[0] is None else tf.stack(x), *run)
                    if graph.stacks
                    else run[0]
                )
            parts.append(
                call(graph.function, data, self._on_coordinator(index), self._seeds).numpy()
            )
            index += len(run)
        size = self._size()
        total = np.concatenate([np.sum([part[:size] for part in parts], 0), parts[-1][size:]])
        return total, time.monotonic() - started

    def _execute_from_iterator(
        self, worker: int, items: list[WorkItem], graph, index, call: Callable
    ) -> np.ndarray:
        batches = self._pass
        assert batches is not None
        owner, iterator, position = self._iterators.pop(worker, (None, None, 0))
        if owner is not batches or position > items[0].first:
            iterator = call(graph.opener, self._on_coordinator(batches.graph))
            position = 0
        steps = self._on_coordinator(sum(item.steps for item in items))
        skip = self._on_coordinator(items[0].first - position)
        result = call(graph.function, iterator, skip, steps, index, self._seeds).numpy()
        self._iterators[worker] = batches, iterator, items[0].first + int(result[0])
        return result

    def _on_coordinator(self, value: int | bytes) -> tf.Tensor:
        """Return a tensor on the coordinator, which is sent along with the call that uses it.

        `tf.constant` on a worker that is stopped would block, and with it all Python threads.
        """
        with tf.device(self._host):
            return tf.constant(value, tf.string if isinstance(value, bytes) else tf.int64)

    def forget(self, worker: int) -> None:
        """Drop a worker's iterator."""
        self._iterators.pop(worker, None)

    def done(self, items: list[WorkItem], result: tuple[np.ndarray, float]) -> None:
        """Accumulate a result. The pool's lock is held."""
        numbers, seconds = result
        steps, rows, waited, updates = numbers[:HEADER_SIZE]
        left = int(steps)
        for item in items:
            item.done = min(item.steps, left)
            item.batches = None
            self._pending -= 1
            left -= item.done
        if steps < sum(item.steps for item in items):
            end = items[0].first + int(steps)
            self._batch_count = end if self._batch_count is None else min(end, self._batch_count)
        self._steps += int(steps)
        self._updates += int(updates)
        self.stats.steps += int(steps)
        self.stats.examples += int(rows)
        self.stats.input_seconds += waited / len(self._pool.workers)
        sums = numbers[HEADER_SIZE : self._size()]
        logs = numbers[self._size() :]
        self._total = sums if self._total is None else self._total + sums
        if steps and (self._last is None or items[-1].first >= self._last[0]):
            self._last = items[-1].first, logs
        if not self.watch.exact and steps:
            affordable = max(1, int(GROUP_S * len(items) / max(seconds, 1e-4)))
            self._group = min(MAX_GROUP, affordable, 4 * self._group)

    # --- Graphs -----------------------------------------------------------------------------------
    def _graph(self, item: WorkItem) -> _Graph:
        kind = "there" if item.batches is None else repr(any_rows(item.batches[0]))
        if kind not in self._graphs:
            with time_account().during("compile"):
                self._graphs[kind] = self._trace(item)
        return self._graphs[kind]

    def _trace(self, item: WorkItem) -> _Graph:
        number = tf.TensorSpec([], tf.int64)
        seeds = tf.TensorSpec(self._seeds.shape, self._seeds.dtype)
        spec = self._specs(item)
        self._worker_step.prepare(without_optionals(spec))
        if item.batches is None:

            def open_iterator(graph):
                return iter(tf.data.experimental.from_variant(dataset_variant(graph), spec))

            opener = function_of(open_iterator).get_concrete_function(tf.TensorSpec([], tf.string))
            concrete = function_of(self._run_from_iterator).get_concrete_function(
                tf.data.IteratorSpec(spec), number, number, number, seeds
            )
            return _Graph(concrete, opener=opener)
        can_stack = all(x is None or isinstance(x, tf.TensorSpec) for x in tf.nest.flatten(spec))
        if not can_stack:
            return _Graph(function_of(self._run_step).get_concrete_function(spec, number, seeds))
        stacked = tf.nest.map_structure(
            lambda s: None if s is None else tf.TensorSpec([None, *s.shape], s.dtype), spec
        )
        return _Graph(
            function_of(self._run_stacked).get_concrete_function(stacked, number, seeds),
            stacks=True,
        )

    def _specs(self, item: WorkItem) -> Any:
        """Return the types of an item's batches, of any number of rows."""
        if item.batches is not None:
            return any_rows(item.batches[0])
        assert self._pass is not None
        return self._pass.stream.element_spec

    def _run_from_iterator(self, iterator, skip, steps, index, seeds):
        """Skip batches, then run steps on the next ones, fewer if the data ends."""
        tf.while_loop(
            lambda i, more: (i < skip) & more,
            lambda i, more: (i + 1, iterator.get_next_as_optional().has_value()),
            [tf.zeros_like(skip), True],
            parallel_iterations=1,
        )

        def read(result):
            started = clock([result])
            with tf.control_dependencies([started]):
                following = iterator.get_next_as_optional()
            waited = clock([following.has_value()]) - started
            return following, result + tf.one_hot(
                2, tf.size(result), waited, tf.zeros([], tf.float64)
            )

        def body(i, result, following):
            result = self._add(result, self._run_step(following.get_value(), index + i, seeds))
            return i + 1, *tf.cond(
                i + 1 < steps, lambda: read(result), lambda: (following, result)
            )[::-1]

        following, result = read(tf.zeros([self._size()], tf.float64))
        return self._loop(
            lambda i, result, following: (i < steps) & following.has_value(),
            body,
            result,
            following,
        )

    def _run_stacked(self, stacked, index, seeds):
        """Run one step on each of several stacked batches, `[batches, rows, ...]`."""
        count = next(
            tf.shape(x, out_type=tf.int64)[0] for x in tf.nest.flatten(stacked) if x is not None
        )

        def body(i, result):
            data = tf.nest.map_structure(lambda x: None if x is None else x[i], stacked)
            return i + 1, self._add(result, self._run_step(data, index + i, seeds))

        return self._loop(lambda i, result: i < count, body, tf.zeros([self._size()], tf.float64))

    def _loop(self, condition, body, result, *more):
        specs = [
            tf.TensorSpec([], tf.int64),
            tf.TensorSpec([None], tf.float64),
            *(tf.type_spec_from_value(x) for x in more),
        ]
        start = [tf.zeros([], tf.int64), result, *more]
        return tf.while_loop(condition, body, start, shape_invariants=specs, parallel_iterations=1)[
            1
        ]

    def _run_step(self, data, index, seeds):
        """Run one step and return its result vector, float64.

        It is `[steps, rows, waited, updates, metric deltas ..., logs ...]`.
        """
        data = without_optionals(data)
        with metric_deltas.collected(self.model, seeds, index) as added:
            logs = self._strategy.run(self._worker_step, args=(data,))
        *sums, updates = added
        if not isinstance(logs, dict):
            raise TypeError(
                f"{self._step.__qualname__} returned {type(logs).__name__}; expected a dict of "
                "names and numbers."
            )
        logs = _flat(logs)
        self._keys = list(logs)
        means = [tf.reduce_mean(tf.cast(value, tf.float64)) for value in logs.values()]
        header = [
            tf.ones([], tf.float64),
            tf.cast(count_rows(data), tf.float64),
            tf.zeros([], tf.float64),
            tf.cast(updates, tf.float64),
        ]
        return tf.concat(
            [
                header,
                *(tf.reshape(tf.cast(s, tf.float64), [-1]) for s in sums),
                tf.reshape(means, [-1]),
            ],
            0,
        )

    def _observed_step(self, data):
        results = Results(self.model)
        with observed(self.model, _update_sum, results.record):
            logs = self._step(data)
        if isinstance(logs, dict):
            self._sources = [results.source_of(x) for x in _flat(logs).values()]
        return logs

    def _add(self, result, added):
        """Add two result vectors, but keep the logs of the last step."""
        size = self._size()
        return tf.ensure_shape(tf.concat([result[:size] + added[:size], added[size:]], 0), [None])

    def _size(self) -> int:
        return HEADER_SIZE + sum(int(np.prod(v.shape)) for v in metric_variables(self.model))


@dataclasses.dataclass(frozen=True)
class _Graph:
    """Traced loop over steps.

    Attributes:
        function: Function that runs steps.
        opener: Function that makes the iterator that `function` reads from; None if batches are
            passed in.
        stacks: Whether batches are stacked for the function.
    """

    function: Any
    opener: Any = None
    stacks: bool = False


def _flat(logs: dict) -> dict:
    """Return logs in which metrics with several results are flattened, as Keras shows them.

    `compile_metrics` is such a metric.
    """
    return dict(
        pair
        for name, value in logs.items()
        for pair in (_flat(value) if isinstance(value, dict) else {name: value}).items()
    )


def function_of(body: Callable):
    """Return a `tf.function` of a body, without AutoGraph."""
    return tf.function(body, autograph=False)


def _group_by_shape(batches: list) -> list[list]:
    """Group consecutive batches of equal shapes."""
    runs: list[list] = []
    shapes = None
    for batch in batches:
        own = [None if x is None else x.shape for x in tf.nest.flatten(batch)]
        if own != shapes:
            runs.append([])
            shapes = own
        runs[-1].append(batch)
    return runs


def _update_sum(metric: keras.Metric, keras_method: Callable, args: tuple, kwargs: dict) -> None:
    """Update a metric, whose state must be the sum of what steps on several workers add."""
    check_adds(metric, args, kwargs)
    keras_method(*args, **kwargs)
