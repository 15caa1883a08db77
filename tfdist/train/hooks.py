"""Base class of engines: default implementations of the hooks in `keras_compat`.

Each method here leaves Keras' behavior unchanged. Engines override some of them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.backup import state
from tfdist.keras_compat import stateful_layers, strategy_of
from tfdist.train.health import preemption
from tfdist.train.health.heartbeat import Heartbeat
from tfdist.train.health.watchdog import Watchdog


class MetricCopies(NamedTuple):
    """Copies of a metric's variable on the replicas of this process.

    Attributes:
        aggregation: Keras' name of the way in which the values of the replicas give the total: the
            first one counts if it is neither "sum" nor "mean". None if each replica has the total.
        copies: The variable of each local replica.
    """

    aggregation: str | None
    copies: Sequence[tf.Variable]


def _as_keras(self, model: keras.Model, keras_method: Callable, *args, **kwargs) -> Any:
    return keras_method(model, *args, **kwargs)


class Hooks:
    """Hooks that Keras' methods call, under a strategy of tfdist.

    The hooks named in `keras_compat.MODEL_HOOKS` are called with the model, Keras' own method and
    its arguments.

    Attributes:
        is_chief: Whether this process writes checkpoints, logs and console output.
        heartbeat: Heartbeat of this process' fits; None to send none.
        watchdog: Bound on the time that this process waits for other workers.
        feeding: Whether Keras is in `fit`, `evaluate` or `predict`, and gets its data from the
            method `feed`.
    """

    is_chief = True
    feeding = False
    heartbeat: Heartbeat | None = None
    watchdog = Watchdog()

    def compile(self, model: keras.Model, keras_method: Callable, *args, **kwargs) -> None:
        """Run `keras.Model.compile` in the scope of the model's strategy.

        There it makes the optimizer that a name stands for, and the trackers of losses.
        """
        if tf.distribute.has_strategy():
            keras_method(model, *args, **kwargs)
        else:
            with model.distribute_strategy.scope():
                keras_method(model, *args, **kwargs)

    fit = _as_keras
    evaluate = _as_keras
    predict = _as_keras
    train_on_batch = _as_keras
    test_on_batch = _as_keras
    predict_on_batch = _as_keras
    make_train_function = _as_keras
    make_test_function = _as_keras
    make_predict_function = _as_keras
    get_metrics_result = _as_keras
    reset_metrics = _as_keras
    save = _as_keras
    save_weights = _as_keras
    load_weights = _as_keras
    export = _as_keras

    def feed(self, dataset):
        """Return the iterable that Keras uses instead of a `tf.data.Dataset`."""
        raise NotImplementedError

    def apply(self, optimizer: keras.optimizers.Optimizer, keras_apply: Callable, grads, variables):
        """Run `optimizer.apply` in replica context."""
        return keras_apply(optimizer, grads, variables)

    # --- Hooks for BackupAndRestore ---------------------------------------------------------------
    def begin(self, model: keras.Model) -> None:
        """Prepare a model's steps, after Keras has made its `train_function` for a `fit`."""

    def begins_within_epochs(self) -> bool:
        """Return whether `begin_at` is possible with the data of the running `fit`."""
        return False

    def data_position(self, epoch: int, step: int) -> list[int]:
        """Return the position in the data of the running `fit` after a step of an epoch.

        See `DataPosition.at`. The list is empty if it is unknown.
        """
        return []

    def begin_at(
        self, model: keras.Model, epoch: int, step: int, position: Sequence[int] = ()
    ) -> bool:
        """Start the data of the beginning `fit` at a step, and count the steps before as done.

        Args:
            model: Model that is trained.
            epoch: Epoch in which `fit` continues, from 0.
            step: Number of steps of that epoch that are done.
            position: Result of `data_position` for that step.

        Returns:
            Whether it is possible.
        """
        return False

    def pause_at(self, step: int, caller: str = "backup") -> None:
        """End calls of the train function at this step of the epoch.

        Python then sees the state after that step. All workers must ask for the same step. For each
        `caller`, the last request counts.
        """

    def stopping(self) -> bool:
        """Return whether training must stop now because a worker was asked to end.

        All workers have agreed on this moment, and Keras knows of all steps that have run.
        """
        return preemption.requested()

    def moment(self, name: str) -> None:
        """Inject the faults of a chaos plan for a moment; see `Heartbeat.moment` for the names."""
        if self.heartbeat is not None:
            self.heartbeat.moment(name)

    def broadcast_from_chief(self, numbers: list[float]) -> list[float]:
        """Return the chief's numbers on every worker."""
        return numbers

    def all_gather(self, numbers: list[float]) -> list[list[float]]:
        """Return the numbers of all workers by rank.

        No worker continues before all have given their numbers.
        """
        return [numbers]

    def replicas(self) -> tuple[int, int]:
        """Return the number of replicas and the index of this process' first one."""
        return 1, 0

    def values(
        self, model: keras.Model, variables: Sequence[keras.Variable | tf.Variable]
    ) -> list[Any]:
        """Return the values of a model's variables, arrays or tensors that no update changes."""
        return state.each_value(variables)

    def gathered(self, model: keras.Model) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the chief reads sharded variables whole.

        All workers must enter it.
        """
        return contextlib.nullcontext()

    def synchronize(self, model: keras.Model) -> None:
        """Synchronize a model's state over the replicas, but for metrics, before it is read."""

    def metric_totals(self, model: keras.Model) -> tuple[list, list]:
        """Return the values of `model.metrics_variables` over all replicas.

        Returns:
            The totals, and the values of each replica `[replicas, ...]`. The second list is empty,
            or has an empty array for each variable without such values.
        """
        return [], []

    def own_metrics(self, model: keras.Model) -> list[keras.Variable]:
        """Return the variables whose values are the result of `metric_totals`.

        The list is empty if the result takes more than reading them, as with several replicas.
        """
        return []

    def metric_copies(self, model: keras.Model) -> list[MetricCopies]:
        """Return the variables of the metrics on the replicas of this process.

        The list is empty if `metric_totals` needs no other process.
        """
        return []

    def set_metric_totals(self, model: keras.Model, totals: list, parts: list) -> None:
        """Restore the values that `metric_totals` returned."""

    def sync_totals(self, model: keras.Model) -> list:
        """Return the state of `tfdist.sync`'s policy over all replicas.

        Accumulated gradients are an example. Afterwards the replicas have this state.
        """
        return []

    def set_sync_totals(self, model: keras.Model, totals: list) -> None:
        """Restore the state that `sync_totals` returned."""

    def bytes_per_step(self, model: keras.Model) -> float:
        """Return the bytes that a replica sends to others in a training step, on average.

        The value is 0 before a step was traced, and NaN where it is unknown.
        """
        return 0.0

    # --- Hooks for losses and metrics -------------------------------------------------------------
    def scale_loss_for_distribution(self, keras_function: Callable, value):
        """Return a replica's share of a mean loss."""
        return keras_function(value)

    def unscale_loss_for_distribution(self, keras_function: Callable, value):
        """Invert `scale_loss_for_distribution`."""
        return keras_function(value)

    def reduce_weighted_values(self, keras_function: Callable, *args, **kwargs):
        """Return the mean of loss values."""
        return keras_function(*args, **kwargs)

    def call_loss(self, keras_method: Callable, loss: keras.Loss, *args, **kwargs):
        """Return the value of a `keras.Loss`."""
        return keras_method(loss, *args, **kwargs)

    def update_mean(self, keras_method: Callable, metric: keras.metrics.Mean, *args, **kwargs):
        """Update a `keras.metrics.Mean`."""
        return keras_method(metric, *args, **kwargs)

    def assign(self, tf_method: Callable, variable: tf.Variable, *args, **kwargs):
        """Assign to a variable with copies, or add to it."""
        return tf_method(variable, *args, **kwargs)

    def all_reduce_in_replica(
        self, tf_method: Callable, context: Any, reduce_op, value, options=None
    ):
        """Reduce values over all replicas."""
        return tf_method(context, reduce_op, value, options)

    def all_gather_in_replica(self, tf_method: Callable, context: Any, value, axis, options=None):
        """Concatenate values of all replicas."""
        return tf_method(context, value, axis, options)

    def call_function(self, tf_method: Callable, function: Any, *args, **kwargs):
        """Call what `tf.function` returned."""
        return tf_method(function, *args, **kwargs)

    def gradient(self, tf_method: Callable, tape: Any, *args, **kwargs):
        """Return the gradients of a tape."""
        return tf_method(tape, *args, **kwargs)


def bind(keras_method: Callable, model, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return the arguments of a Keras method by name, with defaults.

    The entry `kwargs` holds the arguments to call the method with.
    """
    bound = inspect.signature(keras_method).bind(model, *args, **kwargs)
    passed = dict(bound.arguments)
    bound.apply_defaults()
    call = dict(bound.arguments)
    extra = passed.pop("kwargs", {})
    passed.pop(next(iter(bound.signature.parameters)))
    return {**call, **extra, "kwargs": {**passed, **extra}}


def fewest(*steps: int | None) -> int | None:
    """Return the smallest of the given numbers of steps; None if none is given."""
    return min((s for s in steps if s), default=None)


def check_optimizer(model: keras.Model, strategy) -> None:
    """Raise ValueError unless a model was compiled in its strategy's scope."""
    optimizer = getattr(model, "optimizer", None)  # a model that only predicts need not be compiled
    while optimizer is not None:
        if strategy_of(optimizer) is not strategy:
            raise ValueError(
                f"The optimizer {optimizer.name} was made outside of the strategy's scope. Make "
                "it, and call compile(), inside `with strategy.scope():`, where the model is made."
            )
        optimizer = getattr(optimizer, "inner_optimizer", None)


def check_stateful(model: keras.Model, count: int, kind: str) -> None:
    """Raise ValueError if recurrent layers keep a state that a batch's parts cannot share.

    Args:
        model: Any model.
        count: Number of processes or devices that compute parts of the data.
        kind: Name of the processes or devices: "replicas" or "workers".
    """
    if count > 1 and (names := stateful_layers(model)):
        raise ValueError(
            f"stateful=True in {', '.join(names)}, under {count} {kind}: the layer continues with "
            "the state of the same rows in the batch before, expected one device that computes "
            "all rows of all batches. Pass stateful=False, or train on one device, as with "
            'make_strategy("one_device").'
        )
