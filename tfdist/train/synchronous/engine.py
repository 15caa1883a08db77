"""Synchronous training engine: Keras' `fit`, `evaluate` and `predict` over many replicas.

The hooks in `keras_compat.MODEL_HOOKS` call the methods of the same names.
`tfdist.train.synchronous.loop` runs the steps.
"""

from __future__ import annotations

import contextlib
import logging
import time
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_compat import (
    announce,
    announced,
    chose_jit_compile,
    copies,
    device_type,
    holder_of,
    leave_scope,
    local_component,
    metric_variables,
    metrics_of,
    model_supports_jit,
    note_jit_compile,
    ops_are_deterministic,
    outside_of_steps,
    unchanged_by_saving,
)
from tfdist.keras_compat.parallel import applies_as_keras
from tfdist.parallel.collectives.native.transport import Transport
from tfdist.parallel.placement import Placement
from tfdist.parallel.replica_weight import across_replicas
from tfdist.parallel.sharding import layouts
from tfdist.parallel.sharding.fsdp import FSDP, check_deferred, updates_rows
from tfdist.parallel.sharding.step_products import few_row_products
from tfdist.parallel.sharding.whole_model_files import as_plain, without_zero
from tfdist.runtime.launch_protocol import LOG_SAYS_WHY, STRAGGLERS, Launched
from tfdist.runtime.time_account import time_account
from tfdist.sync import Gradients, LocalSGD, Policy
from tfdist.train.callbacks.backup_and_restore import BackupAndRestore
from tfdist.train.callbacks.saving import backing, same_on_workers
from tfdist.train.data_position import DataPosition
from tfdist.train.health.heartbeat import Heartbeat, length, size
from tfdist.train.health.watchdog import Watchdog
from tfdist.train.hooks import (
    Hooks,
    MetricCopies,
    bind,
    check_optimizer,
    check_stateful,
    fewest,
)
from tfdist.train.metric_calls import plain_variables
from tfdist.train.synchronous import (
    assigned_weights,
    compiled_step,
    gathered_losses,
    gradient_sum,
    replica_step,
)
from tfdist.train.synchronous.feed import Feed, rows_of_batches
from tfdist.train.synchronous.gathered_metrics import is_gathered
from tfdist.train.synchronous.gradient_aggregation import GradientAggregation, check_totals
from tfdist.train.synchronous.local_sgd import LocalSteps
from tfdist.train.synchronous.loop import Runner
from tfdist.train.synchronous.predict import Predictor
from tfdist.train.synchronous.replica_state import ReplicaState, all_gather, check_same_on_workers
from tfdist.train.synchronous.step_monitoring import StepMonitoring
from tfdist.train.synchronous.worker_callbacks import (
    backups_last,
    is_progress_bar,
    make_directories,
    needs_single_steps,
    worker_callback,
)
from tfdist.train.timing.step_breakdown import Recorder, StepBreakdown

_POLL_S = 1.0  # seconds of a wait for the chief after which the bound is checked
log = logging.getLogger("tfdist")


class Engine(Hooks):
    """Engine that trains, evaluates and predicts with the models of one synchronous strategy.

    Args:
        strategy: The strategy. Its attribute `tfdist_engine` is set to this object.
        placement: Position of this process among the workers and replicas.
        host: Name of this process' CPU device.
        central: Whether the replicas share one copy of the variables (central storage).
        timeout: Seconds that a step may wait for other workers.
        sync: Synchronization policy of the replicas; default `tfdist.sync.Gradients()`.
        communication: Implementation of the collectives between workers: "auto", "ring", "nccl" or
            "native".

    Attributes:
        transport: Native collectives between the workers; None if TensorFlow's are used.
    """

    heartbeat: Heartbeat
    aggregation: GradientAggregation | LocalSteps
    transport: Transport | None = None
    # Called on each replica before the optimizer runs, with the gradients summed over the replicas,
    # and with their variables.
    watch_gradients: Callable[[Sequence[Any], Sequence[Any] | None], None] | None = None

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        placement: Placement,
        host: str,
        central: bool = False,
        timeout: float = 600.0,
        sync: Policy | None = None,
        communication: str = "auto",
    ):
        self._strategy = strategy
        self.host = host
        self._central = central
        self.placement = placement
        self.communication = communication
        self.use(sync or Gradients())
        self._replica_states: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        # Runners of the models whose last steps were calls of train_on_batch.
        self._on_batch_runners: weakref.WeakSet[Runner] = weakref.WeakSet()
        self._active: Runner | None = None
        # The Keras method that iterates over data: "fit", "evaluate" or "predict".
        self._kind: str | None = None
        self._watches: dict[str, StepMonitoring] = {}
        self._training_feed: Feed | None = None  # of the running fit
        self._examples: int | None = None  # of a replica's batch, at most; None if unknown
        self._steps_per_epoch: int | None = None  # None unless given
        self._steps_per_execution = 1
        self._steps_of_fit: range | None = None  # None unless the steps per epoch are given
        self._recorder: Recorder | None = None  # of the running fit, if its steps are measured
        self.heartbeat = Heartbeat(placement.is_chief)
        self.watchdog = Watchdog(timeout, placement)
        self._saves = 0  # calls of save, save_weights and export, which all workers make
        self._warned_of_paths = False
        strategy.tfdist_engine = self

    def use(self, policy: Policy) -> None:
        """Set the synchronization policy for steps that have not been traced yet."""
        if isinstance(policy, LocalSGD):
            self.aggregation = LocalSteps(policy, self._strategy, self.placement)
        else:
            self.aggregation = GradientAggregation(
                policy, self._strategy, self.placement, self._central
            )

    def use_transport(self, transport: Transport | None) -> None:
        """Exchange tensors by these collectives in steps that have not been traced yet.

        Args:
            transport: Native collectives; None for TensorFlow's.
        """
        self.transport = transport
        self.watchdog.transport = transport

    # --- fit, evaluate, predict -------------------------------------------------------------------
    def compile(self, model: keras.Model, keras_method: Callable, *args, **kwargs) -> None:
        """Run `keras.Model.compile` in the scope; shard the weights first if layouts say so."""
        with contextlib.nullcontext() if tf.distribute.has_strategy() else self._strategy.scope():
            layouts.shard(model)
        super().compile(model, keras_method, *args, **kwargs)
        note_jit_compile(model, bind(keras_method, model, args, kwargs)["jit_compile"])

    def asks_for_xla(self, model: keras.Model) -> bool:
        """Return whether XLA should compile a model's steps, if it can.

        Keras resolves `jit_compile="auto"` to False under any strategy. Here it means on GPUs what
        it means without one.
        """
        if model.run_eagerly:
            return False
        if model.jit_compile or chose_jit_compile(model):
            return model.jit_compile
        return (
            device_type(self._strategy) == "GPU"
            and not self._central
            and not isinstance(_holder(model), FSDP)
            and model_supports_jit(model)
        )

    def fit(self, model: keras.Model, keras_method: Callable, *args, **kwargs):
        """Run `keras.Model.fit`, each step on all replicas."""
        call = bind(keras_method, model, args, kwargs)
        self._check(model)
        if isinstance(call["x"], tf.data.Dataset):
            # Keras warns that its default True has no effect on a Dataset.
            call["kwargs"].setdefault("shuffle", False)
        callbacks = self._restrict_to_chief(call)
        data = call["validation_data"]
        with backing(callbacks, self.placement.is_chief, call["initial_epoch"], data):
            return self._fit(model, keras_method, call, callbacks)

    def _fit(self, model: keras.Model, keras_method: Callable, call: dict, callbacks: list):
        self._training_feed = None
        self._hide_lengths(call, "x", "validation_data")
        expected_equal = {
            "epochs": call["epochs"],
            "initial_epoch": call["initial_epoch"],
            "steps_per_epoch": call["steps_per_epoch"] or -1,
            "batch_size": call["batch_size"] or -1,
            "length of the training data": size(call["x"]),
            "length of the validation data": size(call["validation_data"]),
            **same_on_workers(callbacks),
        }
        expected_equal["number of tfdist.StepBreakdown callbacks"] = len(
            breakdowns := [c for c in callbacks if isinstance(c, StepBreakdown)]
        )
        deterministic = ops_are_deterministic()
        expected_equal["tf.config.experimental.enable_op_determinism()"] = deterministic
        measures = bool(Launched.from_environ().stragglers) and self.placement.workers > 1
        if measures and deterministic:
            measures = False
            log.warning(
                "no slow workers are found after tf.config.experimental.enable_op_determinism(), "
                "because no step may read the clock"
            )
        expected_equal[f"{STRAGGLERS}, which tfdist launch sets"] = measures
        expected_equal |= self._expect_batch(model, call)
        exact, exact_test, progress, saves = self._agree(
            model, expected_equal, callbacks, bool(call["progress"])
        )
        self._watches = {
            "fit": StepMonitoring(
                exact,
                progress,
                fewest(call["steps_per_epoch"], keras.config.max_steps_per_epoch()),
                saves,
            ),
            "evaluate": StepMonitoring(exact_test, False, call["validation_steps"], saves),
        }
        steps = self._watches["fit"].steps or 0
        self._steps_per_epoch = self._watches["fit"].steps
        self._steps_per_execution = model.steps_per_execution
        per_epoch = -(-steps // model.steps_per_execution) * model.steps_per_execution
        self._steps_of_fit = (
            range(call["initial_epoch"] * per_epoch, call["epochs"] * per_epoch) if steps else None
        )
        self.heartbeat.begin(call["initial_epoch"], call["steps_per_epoch"] or length(call["x"]))
        measured = [] if deterministic else breakdowns
        with self._during("fit"), self._recording(measured, measures):
            return keras_method(model, **call["kwargs"])

    def evaluate(self, model: keras.Model, keras_method: Callable, *args, **kwargs):
        """Run `keras.Model.evaluate`, each step on all replicas."""
        call = bind(keras_method, model, args, kwargs)
        self.heartbeat.expect_tracing(model.test_function)
        if isinstance(call["callbacks"], keras.callbacks.CallbackList):  # the validation of a fit
            with self._during("evaluate"):
                return keras_method(model, **call["kwargs"])
        self._check(model)
        self._replica_state(model).sync_replicas()
        callbacks = self._restrict_to_chief(call)
        self._hide_lengths(call, "x")
        expected_equal = {
            "steps": call["steps"] or -1,
            "batch_size": call["batch_size"] or -1,
            "length of the data": size(call["x"]),
            **self._expect_batch(model, call),
        }
        _, exact, progress, _ = self._agree(
            model, expected_equal, callbacks, bool(call["progress"])
        )
        self._watches = {"evaluate": StepMonitoring(exact, progress, call["steps"])}
        with self._during("evaluate"):
            return keras_method(model, **call["kwargs"])

    def predict(self, model: keras.Model, keras_method: Callable, *args, **kwargs):
        """Run `keras.Model.predict`, each step on all replicas."""
        self._check_shared_data("predict")
        call = bind(keras_method, model, args, kwargs)
        check_deferred(model)
        callbacks = self._restrict_to_chief(call)
        expected_equal = {
            "steps": call["steps"] or -1,
            "batch_size": call["batch_size"] or -1,
            "length of the data": size(call["x"]),
            **self._expect_batch(model, call),
        }
        self._agree(model, expected_equal, callbacks, False)
        self._replica_state(model).sync_replicas()
        self.heartbeat.expect_tracing(model.predict_function)
        with self._during("predict"):
            return keras_method(model, **call["kwargs"])

    def train_on_batch(self, model: keras.Model, keras_method: Callable, *args, **kwargs):
        """See `keras.Model.train_on_batch`; the batch is the global batch."""
        self._check(model)
        logs = self._on_batch(model, keras_method, *args, **kwargs)
        self._on_batch_runners.add(model.train_function)
        return logs

    def test_on_batch(self, model: keras.Model, keras_method: Callable, *args, **kwargs):
        """See `keras.Model.test_on_batch`; the batch is the global batch."""
        self._check(model)
        self._replica_state(model).gather()
        return self._on_batch(model, keras_method, *args, **kwargs)

    def predict_on_batch(self, model: keras.Model, keras_method: Callable, *args, **kwargs):
        """See `keras.Model.predict_on_batch`; the batch is the global batch."""
        self._check_shared_data(keras_method.__name__)
        self._replica_state(model).gather()
        return keras_method(model, *args, **kwargs)

    def _on_batch(self, model: keras.Model, keras_method: Callable, *args, **kwargs):
        self._check_shared_data(keras_method.__name__)
        self._watches = {}
        try:
            return keras_method(model, *args, **kwargs)
        finally:
            self._active = None
            self.heartbeat.end()

    # --- Train, test and predict functions --------------------------------------------------------
    def make_train_function(self, model: keras.Model, _, force: bool = False):
        """Create the model's `train_function`, a `Runner`, and start it."""
        if force or not isinstance(model.train_function, Runner):
            # Release the variables of an optimizer that the model was compiled with before.
            self._replica_state(model).forget()
            model.train_function = self._runner(model, model.train_step)
        self.prepare(model)
        self._begin(model.train_function, "fit", verify=True)
        model.train_function.epoch = self.heartbeat.epoch
        return model.train_function

    def make_test_function(self, model: keras.Model, _, force: bool = False):
        """Create the model's `test_function`, a `Runner`, and start it."""
        if force or not isinstance(model.test_function, Runner):
            model.test_function = self._runner(model, model.test_step)
        self._begin(model.test_function, "evaluate", verify="fit" not in self._watches)
        return model.test_function

    def make_predict_function(self, model: keras.Model, _, force: bool = False):
        """Create the model's `predict_function`, a `Predictor`."""
        check_deferred(model)  # predict_on_batch has not checked it
        layouts.check(model)
        check_stateful(model, self.placement.replicas, "replicas")
        if force or not isinstance(model.predict_function, Predictor):
            model.predict_function = Predictor(
                self._strategy, self.placement, self.host, model, self.watchdog, self.heartbeat
            )
        return model.predict_function

    def get_metrics_result(self, model: keras.Model, keras_method: Callable):
        """Return the metrics of all replicas at the end of an epoch, else those of this one.

        Keras calls this method eagerly at the end of each epoch. Only then are the metrics summed
        over the replicas.
        """
        runner = self._active
        if not outside_of_steps() or runner is None or runner.model is not model:
            return keras_method(model)
        if self._replica_state(model).reads_metrics:
            return keras_method(model)
        return runner.end_epoch()

    def reset_metrics(self, model: keras.Model, keras_method: Callable) -> None:
        """See `keras.Model.reset_metrics`, which `train_on_batch` calls before each step."""
        if outside_of_steps():
            self._replica_state(model).reset_metrics(keras_method)
        else:
            keras_method(model)

    def prepare(self, model: keras.Model) -> None:
        """Create the state of the synchronization policy before a compiled model's first step.

        A sharded optimizer or model has a policy of its own, so nothing is created for it here.
        """
        if (
            model.optimizer is not None
            and model.optimizer.built
            and self.exchange_of(model) is self.aggregation
        ):
            self.aggregation.prepare(model.optimizer, model.trainable_variables)

    def apply(self, optimizer, keras_apply: Callable, grads, variables):
        """Aggregate the gradients and update the variables; called in replica context."""
        grads = list(grads)
        if variables is not None:
            variables = list(variables)
        if compiled_step.postpone(optimizer, keras_apply, grads, variables):
            return None
        replica_step.check_not_compiled(optimizer, self.placement)
        holder = holder_of(optimizer, variables)
        with assigned_weights.noted_in(None), replica_step.meetings_explained():
            if holder is not None:
                return gradient_sum.apply_to_parts(
                    holder,
                    optimizer,
                    keras_apply,
                    grads,
                    variables,
                    replica_step.local_replica(self.placement),
                )
            return self.aggregation.apply(
                optimizer, keras_apply, grads, variables, self.watch_gradients
            )

    def scale_loss_for_distribution(self, keras_function: Callable, value):
        """See `replica_step.scale_loss`."""
        return replica_step.scale_loss(keras_function, value)

    def unscale_loss_for_distribution(self, keras_function: Callable, value):
        """See `replica_step.unscale_loss`."""
        return replica_step.unscale_loss(keras_function, value)

    def reduce_weighted_values(self, keras_function: Callable, *args, **kwargs):
        """See `replica_step.reduce_weighted_values`."""
        return replica_step.reduce_weighted_values(keras_function, *args, **kwargs)

    def call_loss(self, keras_method: Callable, loss, *args, **kwargs):
        """See `gathered_losses.call_loss`."""
        return gathered_losses.call_loss(keras_method, loss, *args, **kwargs)

    def update_mean(self, keras_method: Callable, metric, *args, **kwargs):
        """See `replica_step.update_mean`."""
        return replica_step.update_mean(keras_method, metric, *args, **kwargs)

    def assign(self, tf_method: Callable, variable: tf.Variable, *args, **kwargs):
        """Assign to a variable with copies, or add to it; note it if a step does so."""
        assigned_weights.note(variable)
        return tf_method(variable, *args, **kwargs)

    def all_reduce_in_replica(
        self, tf_method: Callable, context: Any, reduce_op, value, options=None
    ):
        """Reduce values over all replicas, with gradients as a step needs them."""
        compiled_step.check_collective("all_reduce")
        return across_replicas(lambda x: tf_method(context, reduce_op, x, options), value)

    def all_gather_in_replica(self, tf_method: Callable, context: Any, value, axis, options=None):
        """Concatenate values of all replicas, with gradients as a step needs them."""
        compiled_step.check_collective("all_gather")
        if any(getattr(x, "shape", [0])[axis] is None for x in tf.nest.flatten(value)):
            gradient_sum.leave_loop()
        return across_replicas(lambda x: tf_method(context, x, axis, options), value)

    def call_function(self, tf_method: Callable, function: Any, *args, **kwargs):
        """See `replica_step.call_function`."""
        return replica_step.call_function(tf_method, function, *args, **kwargs)

    def gradient(self, tf_method: Callable, tape: tf.GradientTape, *args, **kwargs):
        """See `replica_step.gradient`."""
        return replica_step.gradient(tf_method, tape, *args, **kwargs)

    @property
    def is_chief(self) -> bool:  # type: ignore[override]
        """Return whether this process is the chief, which writes checkpoints and logs."""
        return self.placement.is_chief

    @property
    def feeding(self) -> bool:  # type: ignore[override]
        """Return whether Keras is in `fit`, `evaluate` or `predict`."""
        return self._kind is not None

    def feed(self, dataset: tf.data.Dataset) -> Feed:
        """Return the `Feed` that Keras iterates over instead of `dataset`."""
        if self._kind != "fit" or self._training_feed is not None:
            return Feed(
                dataset,
                self.placement,
                self.host,
                ends_early=self._kind == "fit" and self._watches["evaluate"].steps is not None,
            )
        self._training_feed = Feed(
            dataset,
            self.placement,
            self.host,
            steps=self._steps_of_fit,
            position=DataPosition(dataset, self._steps_per_epoch, self._steps_per_execution),
            epoch=lambda: self.heartbeat.epoch,
            ends_early=self._steps_per_epoch is not None,
        )
        return self._training_feed

    # --- Hooks for BackupAndRestore ---------------------------------------------------------------
    def begins_within_epochs(self) -> bool:
        """Return whether the running `fit` can start in the middle of an epoch."""
        # There is no feed if TensorFlow or the user distributed the data. Only they can start
        # such data in the middle of an epoch.
        return self._training_feed is not None

    def data_position(self, epoch: int, step: int) -> list[int]:
        """Return the position in the data after a step; see `Hooks.data_position`."""
        return [] if self._training_feed is None else self._training_feed.position.at(epoch, step)

    def begin_at(
        self, model: keras.Model, epoch: int, step: int, position: Sequence[int] = ()
    ) -> bool:
        """Start the running `fit` at a step of an epoch; see `Hooks.begin_at`."""
        if self._training_feed is None:
            return False
        self._training_feed.begin_at(epoch, step, position)
        model.train_function.begin_at(epoch, step)
        return True

    def pause_at(self, step: int, caller: str = "backup") -> None:
        """Make the training function return to Python after this step; see `Hooks.pause_at`."""
        if self._active is not None:
            self._active.pauses[caller] = step

    def stopping(self) -> bool:
        """Return whether all workers agreed to stop at this point; see `Hooks.stopping`."""
        return (
            self._active is not None and self._active.stopping and self._active.all_calls_reported
        )

    def broadcast_from_chief(self, numbers: list[float]) -> list[float]:
        """Return the chief's numbers on every worker."""
        return self.all_gather(numbers)[0]

    def all_gather(self, numbers: list[float]) -> list[list[float]]:
        """Return the numbers of all workers, ordered by rank."""
        if self.placement.workers == 1:
            return [numbers]
        return all_gather(self._strategy, self.placement, np.array(numbers, np.float64)).tolist()

    def replicas(self) -> tuple[int, int]:
        """Return the number of replicas and the index of this process' first one."""
        return self.placement.replicas, self.placement.first_replica

    def gathered(
        self, model: keras.Model, exports: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the chief reads sharded variables whole; see `as_plain`."""
        return as_plain(model, self.placement.workers, self.placement.is_chief, exports)

    def values(
        self, model: keras.Model, variables: Sequence[keras.Variable | tf.Variable]
    ) -> list[tf.Tensor]:
        """Return the values of a model's variables, which later updates do not change."""
        return self._replica_state(model).values(variables)

    def synchronize(self, model: keras.Model) -> None:
        """Synchronize a model's state over the replicas, but for metrics."""
        self._replica_state(model).sync_replicas()

    def metric_totals(self, model: keras.Model) -> tuple[list, list]:
        """Return the values of the metrics' variables over all replicas, and of each replica."""
        return self._replica_state(model).parts(metric_variables(model))

    def own_metrics(self, model: keras.Model) -> list[keras.Variable]:
        """Return the variables of the metrics if there is one replica; see `Hooks.own_metrics`."""
        return [] if self.placement.replicas > 1 else metric_variables(model)

    def metric_copies(self, model: keras.Model) -> list[MetricCopies]:
        """Return the variables of the metrics on local replicas; see `Hooks.metric_copies`."""
        if self.placement.workers == 1:
            return []
        with self._strategy.scope():  # otherwise a copy would be the sum of all copies
            return [
                MetricCopies(
                    None if is_gathered(v) else v.aggregation,
                    [local_component(v, i) for i in range(self.placement.local_replicas)],
                )
                for v in metric_variables(model)
            ]

    def set_metric_totals(self, model: keras.Model, totals: list, parts: list) -> None:
        """Restore the values that `metric_totals` returned."""
        self._replica_state(model).set_totals(metric_variables(model), totals, parts)

    def sync_totals(self, model: keras.Model) -> list:
        """Return the state of the synchronization policy over all replicas."""
        variables = self.aggregation.variables(model.optimizer)
        if not variables:
            return []
        totals = self._replica_state(model).totals(variables)
        # This run and a run that restores these numbers then continue from the same state.
        self.set_sync_totals(model, totals)
        return totals

    def set_sync_totals(self, model: keras.Model, totals: list) -> None:
        """Restore the state that `sync_totals` returned."""
        self.prepare(model)
        variables = self.aggregation.variables(model.optimizer)
        check_totals(self.aggregation.policy, variables, totals)
        self._replica_state(model).set_totals(variables, totals)

    def exchange_of(self, model: keras.Model) -> Any:
        """Return the object that synchronizes a compiled model's replicas, by its `policy`.

        It is the model's sharded optimizer, the holder of its weight shards, or `aggregation`.
        """
        return holder_of(model.optimizer, model.trainable_variables) or self.aggregation

    def trains_locally(self, model: keras.Model) -> bool:
        """Return whether each replica changes weights of its own, as in local SGD."""
        return isinstance(self.exchange_of(model).policy, LocalSGD)

    def updates_rows(self, model: Any) -> bool | None:
        """Return whether a model's optimizer updates only those rows of a table that a batch uses.

        Args:
            model: Model, or what stands for it in a loop of the user's own.

        Returns:
            The answer; None if the model has no optimizer, or several in one.
        """
        optimizer = getattr(model, "optimizer", None)
        several = getattr(keras.optimizers, "MultiOptimizer", ())
        if optimizer is None or isinstance(optimizer, several):
            return None
        exchange = self.exchange_of(model)
        policy = exchange.policy
        if isinstance(policy, LocalSGD):
            return not policy.warmup and updates_rows(optimizer, Gradients())
        return (policy.plain or isinstance(exchange, FSDP)) and updates_rows(optimizer, policy)

    def bytes_per_step(self, model: keras.Model) -> float:
        """Return the bytes that a replica sends in a training step; see `Hooks.bytes_per_step`."""
        exchange = self.exchange_of(model)
        return (
            exchange.bytes_per_step(model.optimizer)
            if exchange is self.aggregation
            else exchange.bytes_per_step
        )

    # --- Files ------------------------------------------------------------------------------------
    def save(self, model: keras.Model, keras_method: Callable, *args, **kwargs):
        """Save the model on the chief; all workers must call this method.

        The other workers contribute their parts of sharded variables, and return when the chief has
        written the file, which they may read. Under local SGD the replicas are synchronized first.
        """
        with time_account().during("save"):
            return self._save(model, keras_method, *args, **kwargs)

    def _save(self, model: keras.Model, keras_method: Callable, *args, **kwargs):
        self._replica_state(model).gather()
        self._saves += 1
        saved = f"tfdist/saved/{self._saves}"
        path = str(args[0] if args else kwargs.get("filepath", ""))
        with self.gathered(model, exports=keras_method.__name__ == "export"):
            if self.placement.is_chief:
                ended = "failed"
                try:
                    # Nothing in it may wait for the other workers, or make this one differ.
                    with leave_scope(), unchanged_by_saving(model):
                        result = keras_method(model, *args, **kwargs)
                    ended = f"written {path}"
                    return result
                finally:
                    if self.placement.workers > 1:
                        announce(saved, ended)
        log.debug(
            "%s does not write in model.%s; the chief does",
            self.placement.task(self.placement.rank),
            keras_method.__name__,
        )
        begun = time.monotonic()
        while (end := announced(saved, _POLL_S)) is None:
            if time.monotonic() - begun > self.watchdog.seconds:
                raise TimeoutError(
                    f"{self.placement.task(self.placement.rank)} waited "
                    f"{self.watchdog.seconds:g} s for {self.placement.task(0)} to write in "
                    f"model.{keras_method.__name__}(), which all workers must call. If it takes "
                    "longer, pass a longer timeout to make_strategy()."
                )
        if end == "failed":
            raise RuntimeError(
                f"{self.placement.task(0)} failed in model.{keras_method.__name__}(); "
                f"{LOG_SAYS_WHY}."
            )
        written = end.removeprefix("written ")
        if written != path and not self._warned_of_paths:
            self._warned_of_paths = True
            log.warning(
                "%s has not written %r: in model.%s() only %s writes, and has written %r. To load "
                "the file in all workers, pass the same path in all of them (directories of "
                "tempfile differ).",
                self.placement.task(self.placement.rank),
                path,
                keras_method.__name__,
                self.placement.task(0),
                written,
            )
        return None

    save_weights = export = save

    def load_weights(self, model: keras.Model, keras_method: Callable, *args, **kwargs):
        """Load weights and the optimizer's state.

        Keras would warn that the file has no state of the optimizer inside of a `Zero`.
        """
        with without_zero(model):
            return keras_method(model, *args, **kwargs)

    # --- Helpers ----------------------------------------------------------------------------------
    def _check_copies(self, model: keras.Model) -> None:
        """Raise ValueError if replicas of this process would share a metric, and race for it."""
        replicas = self.placement.local_replicas
        for v in metric_variables(model) if replicas > 1 else ():
            if len(copies(v)) != replicas:
                raise ValueError(
                    f"expected metrics made in the scope of the strategy, received {v.path!r}, "
                    f"made outside of it: {replicas} replicas would share it. "
                    "Make metrics, and call compile(), inside `with strategy.scope():`."
                )
        for metric in metrics_of(model) if replicas > 1 else ():
            for variable in plain_variables(metric):
                if len(getattr(variable, "values", (variable,))) != replicas:
                    raise ValueError(
                        f"expected state of metrics that each replica has by itself, received the "
                        f"tf.Variable {variable.name!r} of the metric {metric.name!r}, which "
                        f"{replicas} replicas would share. Make it with the metric's "
                        "add_variable(), inside `with strategy.scope():`."
                    )

    def _runner(self, model, model_step) -> Runner:
        layouts.check(model)
        self._check_copies(model)
        trains = model_step == model.train_step
        return Runner(
            self._strategy,
            self.placement,
            self.host,
            model,
            model_step,
            self._replica_state(model),
            self.heartbeat,
            trains,
        )

    def _replica_state(self, model) -> ReplicaState:
        if model not in self._replica_states:
            self._replica_states[model] = ReplicaState(self._strategy, self.placement, model)
        return self._replica_states[model]

    def _begin(self, runner: Runner, kind: str, verify: bool) -> None:
        continues = self._kind is None and runner in self._on_batch_runners
        self._on_batch_runners.discard(runner)
        runner.begin(
            self._watches.get(kind, StepMonitoring()),
            verify,
            self._recorder if kind == "fit" else None,
            restart=not continues,
        )
        self._active = runner

    @contextlib.contextmanager
    def _recording(self, breakdowns: list[StepBreakdown], measures: bool):
        """Measure the steps of a fit for `StepBreakdown` callbacks, or to find stragglers."""
        if breakdowns or measures:
            self._recorder = Recorder(
                self._strategy,
                self.placement,
                [breakdown.directory for breakdown in breakdowns],
            )
        for breakdown in breakdowns:
            breakdown.recorder = self._recorder
        try:
            yield
        finally:
            if self._recorder is not None:
                self._recorder.close()
            self._recorder = None
            for breakdown in breakdowns:
                breakdown.recorder = None

    @contextlib.contextmanager
    def _during(self, kind: str):
        outer = self._kind
        active = self._active
        self._kind = kind
        try:
            yield
        finally:
            if outer is None:
                self.heartbeat.end()
            self._kind = outer
            # After the validation of a fit, the fit's runner is active again.
            self._active = active if outer else None

    def _restrict_to_chief(self, call: dict) -> list:
        """Restrict console output and files to the chief, and return all callbacks."""
        kwargs = call["kwargs"]
        callbacks = backups_last(kwargs)
        make_directories(callbacks)
        call["progress"] = call["verbose"] != 0 or any(is_progress_bar(c) for c in callbacks)
        if not self.placement.is_chief:
            kwargs["verbose"] = 0
            worker_callbacks = [worker_callback(c) for c in callbacks if not is_progress_bar(c)]
            if isinstance(call["callbacks"], keras.callbacks.CallbackList):
                kwargs["callbacks"].callbacks[:] = worker_callbacks
            else:
                kwargs["callbacks"] = worker_callbacks
        return callbacks

    @property
    def _own_batches(self) -> bool:
        """Return whether each worker has batches of its own."""
        return getattr(self._strategy, "own_batches", False)

    def _check_shared_data(self, caller: str) -> None:
        if self._own_batches:
            raise ValueError(
                f"{caller}: expected the same data in all processes, received "
                "auto_shard_dataset=False, by which each has its own. Call "
                "set_distribution(keras.distribution.DataParallel()) first, and pass whole batches."
            )

    def _hide_lengths(self, call: dict, *names: str) -> None:
        """Hide the lengths of data sets from Keras if each worker has one of its own.

        Training ends with the last worker's data, but Keras would end it with those of this worker.

        Args:
            call: Call of one of Keras' methods, which is changed.
            *names: Names of the arguments that may be data sets.

        Raises:
            ValueError: If one of them is a generator.
        """
        if not self._own_batches:
            return
        for name in names:
            if isinstance(call[name], types.GeneratorType):
                raise ValueError(
                    f"{name}: expected a tf.data.Dataset, a PyDataset or arrays, received a "
                    "generator: with auto_shard_dataset=False, batches of it would be lost. Pass "
                    "tf.data.Dataset.from_generator(...)."
                )
            if isinstance(call[name], tf.data.Dataset):
                call[name] = call["kwargs"][name] = call[name].filter(lambda *_: True)

    def _agree(
        self, model, expected_equal: dict[str, float], callbacks: list, progress: bool
    ) -> tuple[bool, ...]:
        """Check that all workers were called alike, and combine the needs of their callbacks.

        Returns:
            Whether the callbacks of any worker watch training batches, watch test batches, show
            progress, or save when a worker is asked to stop.
        """
        saves = any(isinstance(c, BackupAndRestore) for c in callbacks)
        # BackupAndRestore needs no single steps: it uses pause_at where it saves.
        callbacks = [c for c in callbacks if type(c) is not BackupAndRestore]
        requirements = (
            needs_single_steps(callbacks, "train"),
            needs_single_steps(callbacks, "test"),
            progress,
            saves,
        )
        if self.placement.workers == 1:
            return requirements
        expected_equal = {
            **expected_equal,
            "auto_shard_dataset": not self._own_batches,
            "steps_per_execution": model.steps_per_execution,
            "weights of the model": len(model.weights),
            "parameters of the model": sum(
                int(np.prod(v.shape)) for v in model.weights if v.shape.rank is not None
            ),
        }
        return check_same_on_workers(
            all_gather(
                self._strategy,
                self.placement,
                np.array([*expected_equal.values(), *requirements], np.float64),
            ),
            list(expected_equal),
            self.placement,
        )

    def _expect_batch(self, model: keras.Model, call: dict) -> dict[str, float]:
        """Note how many rows a batch of the data has, at most.

        Returns:
            What must be equal on all workers, whose graphs depend on it.
        """
        own = rows_of_batches(call["x"], call["batch_size"])
        others = None
        if (validation := call.get("validation_data")) is not None:
            others = rows_of_batches(
                validation, call["validation_batch_size"] or call["batch_size"]
            )
        if self._own_batches:
            own = others = None
        if isinstance(holder := _holder(model), FSDP):
            most = max(own or 0, others or 0) or None
            return {"batch_per_replica of fsdp": holder.expect_batch(most) or -1}
        if "epochs" in call:  # of `fit`: training depends on its own data only
            self._examples = -(-own // self.placement.replicas) if own else None
        return {"rows of a batch": self._examples or -1}

    def products_of_step(self, model: keras.Model) -> contextlib.AbstractContextManager:
        """Return a context in which to trace a training step; see `few_row_products`.

        Native collectives take tensors of any number of rows.
        """
        exchange = self.exchange_of(model)
        # FSDP computes its products itself.
        if device_type(self._strategy) != "CPU" or isinstance(exchange, FSDP):
            return contextlib.nullcontext()
        own_step = getattr(model.train_step, "__func__", None) is keras.Model.train_step
        known = self._examples is not None and own_step and applies_as_keras(model.optimizer)
        group = exchange.group_of_factors() if self.transport is not None and known else None
        return few_row_products(model, self._examples, group, exchange.policy)

    def _check(self, model: keras.Model) -> None:
        check_optimizer(model, self._strategy)
        check_deferred(model)
        check_stateful(model, self.placement.replicas, "replicas")
        holder = _holder(model)
        if isinstance(holder, FSDP):
            holder.check_xla(model)
        devices_differ = self.placement.replicas > 1 or device_type(self._strategy) == "GPU"
        if self._central and devices_differ and model.jit_compile:
            raise ValueError(
                "strategy central_storage: compile(jit_compile=True) is not supported, as XLA "
                "reads variables of its own device only. Pass jit_compile=False, or use the "
                "strategy mirrored."
            )


def _holder(model: keras.Model) -> Any:
    """Return what shards a model's weights or optimizer, or None."""
    return holder_of(getattr(model, "optimizer", None), model.trainable_variables)
