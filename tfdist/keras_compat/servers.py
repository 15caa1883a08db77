"""Private TensorFlow names that the parameter-server strategy needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator as _cluster_coordinator
from tensorflow.python.distribute.coordinator import coordinator_context as _coordinator_context
from tensorflow.python.eager import cancellation as _cancellation
from tensorflow.python.eager import context as _context


def connected() -> bool:
    """Return whether this process has connected to a cluster of TensorFlow servers."""
    return _context.get_server_def() is not None


def keep_metrics_on(strategy: tf.distribute.ParameterServerStrategy, device: str) -> None:
    """Place the state of metrics on one device, whose process is its only writer.

    On parameter servers, workers would add to it concurrently and lose each other's updates.
    """
    extended = strategy.extended
    original = extended._create_variable

    def create(next_creator, **kwargs):
        on_read = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        if not on_read or kwargs.get("aggregation") != tf.VariableAggregation.SUM:
            return original(next_creator, **kwargs)
        with tf.device(device):
            return next_creator(**kwargs)

    extended._create_variable = create


def update_in_place(strategy: tf.distribute.ParameterServerStrategy) -> None:
    """Let a strategy with one replica per worker update variables without merge_call.

    merge_call fails in a `tf.cond` (keras #20582).
    """
    extended = strategy.extended
    extended._use_merge_call = lambda: False
    extended._replica_ctx_all_reduce = lambda reduce_op, value, options=None: value

    def update(var, fn, args=(), kwargs=None, group=True):
        return extended._update(var, fn, args, kwargs or {}, group)

    extended._replica_ctx_update = update


def trace_anywhere(strategy: tf.distribute.ParameterServerStrategy) -> None:
    """Suppress TensorFlow's warning about steps traced outside `ClusterCoordinator.schedule`.

    tfdist traces such a step there, but does not run it there.
    """
    strategy.extended._allow_run_without_coordinator = True


def schedule(
    coordinator: tf.distribute.coordinator.ClusterCoordinator, function: Callable[[], None]
) -> None:
    """Run a Python function in the thread of some worker.

    The public method takes only a `tf.function`.
    """
    coordinator._cluster.schedule(function, args=(), kwargs={})


def current_worker() -> int:
    """Return the index of the worker that this thread belongs to.

    The public function returns it only inside a `tf.function`.
    """
    return _coordinator_context.get_current_dispatch_context().worker_index


def is_worker_failure(error: BaseException) -> bool:
    """Return whether TensorFlow treats an error as a lost worker, whose return it waits for."""
    return _cluster_coordinator._is_worker_failure(error)


def is_server_failure(error: BaseException) -> bool:
    """Return whether TensorFlow treats an error as a lost parameter server."""
    return _cluster_coordinator._is_ps_failure(error)


def cancelable(function: Any) -> tuple[Callable, Callable[[], None]]:
    """Return a cancelable version of a concrete function, and the function that cancels it.

    Another thread may cancel it.
    """
    manager = _cancellation.CancellationManager()
    return manager.get_cancelable_function(function), manager.start_cancel
