"""What strategies with parameter servers need of private names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator as _cluster_coordinator
from tensorflow.python.distribute.coordinator import coordinator_context as _coordinator_context
from tensorflow.python.eager import cancellation as _cancellation
from tensorflow.python.eager import context as _context


def connected() -> bool:
    """Whether this process has connected to a cluster of TensorFlow servers."""
    return _context.get_server_def() is not None


def keep_metrics_here(strategy: tf.distribute.ParameterServerStrategy, device: str) -> None:
    """Puts the state of metrics on one device, whose process is its only writer.

    On parameter servers workers add to it at the same time, and lose each other's updates.
    """
    extended = strategy.extended
    stock = extended._create_variable

    def create(next_creator, **kwargs):
        late = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        if not late or kwargs.get("aggregation") != tf.VariableAggregation.SUM:
            return stock(next_creator, **kwargs)
        with tf.device(device):
            return next_creator(**kwargs)

    extended._create_variable = create


def update_in_place(strategy: tf.distribute.ParameterServerStrategy) -> None:
    """Lets a strategy with one replica per worker update variables without merge_call, which fails in a `tf.cond` (keras #20582)."""
    extended = strategy.extended
    extended._use_merge_call = lambda: False
    extended._replica_ctx_all_reduce = lambda reduce_op, value, options=None: value

    def update(var, fn, args=(), kwargs=None, group=True):
        return extended._update(var, fn, args, kwargs or {}, group)

    extended._replica_ctx_update = update


def trace_anywhere(strategy: tf.distribute.ParameterServerStrategy) -> None:
    """Keeps TensorFlow from warning that a step is traced, though not run, outside of `ClusterCoordinator.schedule`."""
    strategy.extended._allow_run_without_coordinator = True


def schedule(
    coordinator: tf.distribute.coordinator.ClusterCoordinator, function: Callable[[], None]
) -> None:
    """Runs a Python function in the thread of some worker; the public method takes a `tf.function` only."""
    coordinator._cluster.schedule(function, args=(), kwargs={})


def current_worker() -> int:
    """Index of the worker in whose thread this is; the public function tells it inside of a `tf.function` only."""
    return _coordinator_context.get_current_dispatch_context().worker_index


def is_worker_failure(error: BaseException) -> bool:
    """Whether TensorFlow takes an error as the loss of a worker, for whose return it waits."""
    return _cluster_coordinator._is_worker_failure(error)


def is_server_failure(error: BaseException) -> bool:
    """Whether TensorFlow takes an error as the loss of a parameter server."""
    return _cluster_coordinator._is_ps_failure(error)


def cancelable(function: Any) -> tuple[Callable, Callable[[], None]]:
    """A concrete function as one that can be cancelled from another thread, and what cancels it."""
    manager = _cancellation.CancellationManager()
    return manager.get_cancelable_function(function), manager.start_cancel
