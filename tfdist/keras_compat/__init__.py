"""Hooks into Keras and private TensorFlow names that hand control to a strategy's engine.

A strategy made by tfdist carries an *engine* in its attribute `tfdist_engine`. The hooks hand
control to that engine: the methods of `keras.Model` in `MODEL_HOOKS`, `apply` of Keras' optimizers,
the loss functions in `LOSS_HOOKS`, and `update_state` of Keras' running means. Without an engine
they call Keras, so models outside tfdist's strategies behave as usual. `tested_versions` lists the
versions that this was tested with. A test in `tests/unit/keras_compat` fails if an upgrade moves a
name.
"""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_compat.tested_versions import warn_if_untested

warn_if_untested(tf.__version__, keras.__version__)  # before the imports that a new version breaks

from keras.src.backend.common import global_state as _global_state
from keras.src.losses import (
    loss as _loss,
)  # scale_loss_for_distribution has no public name, keras #18624
from keras.src.trainers.trainer import model_supports_jit as model_supports_jit
from tensorflow.python.distribute import distribute_utils as _distribute_utils
from tensorflow.python.distribute import values as _distribute_values
from tensorflow.python.eager import context as _context
from tensorflow.python.eager import tape as _tape
from tensorflow.python.framework import config as _config

from tfdist.keras_compat import (
    fused_updates,
    global_generator,
    model_building,
    replica_losses,
    scopes,
)
from tfdist.keras_compat import parallel as sharding_hooks
from tfdist.keras_compat.collective_keys import hook_keys
from tfdist.keras_compat.device_iterators import hook_device_iterators
from tfdist.keras_compat.empty_batches import hook_operations
from tfdist.keras_compat.kernel_products import hook_products
from tfdist.keras_compat.object_stores import exporting, hook_files
from tfdist.keras_compat.operation_order import hook_order
from tfdist.keras_compat.operation_order import in_loop_of_replica as in_loop_of_replica
from tfdist.keras_compat.operation_order import order_by_replica as order_by_replica
from tfdist.keras_compat.operation_order import unordered as unordered
from tfdist.keras_compat.scopes import leave_scope as leave_scope
from tfdist.keras_compat.table_lookups import hook_lookups

# Public methods of keras.Model. The engine has methods of the same names, called with
# (model, keras_method, *args, **kwargs).
_RUNS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
MODEL_HOOKS = (
    *("compile", *_RUNS, "save", "save_weights", "load_weights", "export"),
    *("make_train_function", "make_test_function", "make_predict_function"),
    *("get_metrics_result", "reset_metrics"),
)

# Functions of Keras' module of losses. The engine has methods of the same names.
LOSS_HOOKS = (
    "scale_loss_for_distribution",
    "unscale_loss_for_distribution",
    "reduce_weighted_values",
)

# Methods that make the step functions, and the attributes where Keras keeps them.
_FUNCTIONS = {
    "make_train_function": "train_function",
    "make_test_function": "test_function",
    "make_predict_function": "predict_function",
}

# Methods that write files.
_FILES = ("save", "save_weights", "export")

# Private attributes in which Keras' callbacks count steps, or note what the model now holds.
CALLBACK_STATE: tuple[tuple[type, tuple[str, ...]], ...] = (
    (keras.callbacks.ModelCheckpoint, ("_batches_seen_since_last_saving", "_last_batch_seen")),
    (keras.callbacks.TensorBoard, ("_global_train_batch", "_global_test_batch")),
    (keras.callbacks.SwapEMAWeights, ("_ema_weights_in_model",)),
)

_state = threading.local()


def engine_of(strategy: tf.distribute.Strategy) -> Any:
    """Return the engine of a strategy made by tfdist, or None."""
    return getattr(strategy, "tfdist_engine", None)


def outside_of_steps() -> bool:
    """Return whether the caller runs neither in a graph nor in the context of a replica."""
    in_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    return tf.executing_eagerly() and not in_replica


def device_type(strategy: tf.distribute.Strategy) -> str:
    """Return the kind of device of a strategy's replicas, such as "CPU" or "GPU"."""
    return tf.DeviceSpec.from_string(strategy.extended.worker_devices[0]).device_type


def install() -> None:
    """Install the hooks in Keras; further calls do nothing."""
    if hasattr(keras.Model, "_tfdist_hooks"):
        return
    keras.Model._tfdist_hooks = MODEL_HOOKS
    for name in MODEL_HOOKS:
        _hook_model(name)
    _hook_symbolic_build()
    for optimizer in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        _hook_apply(optimizer)
    fused_updates.hook_updates()
    for name in LOSS_HOOKS:
        _hook_loss(name)
    for owner, name, hook in _replica_hooks():
        _hook_in_replicas(owner, name, hook)
    _hook_assignments()
    _hook_creation()
    replica_losses.install()
    global_generator.install()
    _add_conversions(_distribute_values.DistributedVariable)
    _explain_handles(_distribute_values.DistributedVariable)
    hook_operations(_device_of_several_replicas, _is_one_of_several_replicas)
    hook_files()
    parallel = importlib.import_module("tfdist.keras_compat.parallel")
    parallel.hook_optimizers()
    parallel.hook_swapped_averages()
    parallel.hook_gradients(_in_strategy)
    hook_lookups(_in_strategy)
    hook_order()
    hook_products()
    hook_keys()
    hook_device_iterators()
    scopes.keep_in_clear_session()


def _in_strategy() -> bool:
    """Return whether the current strategy is one of tfdist."""
    return engine_of(tf.distribute.get_strategy()) is not None


def _has_replicas() -> bool:
    """Return whether the current strategy is one of tfdist with several replicas."""
    strategy = tf.distribute.get_strategy()
    return engine_of(strategy) is not None and strategy.num_replicas_in_sync > 1


def _is_one_of_several_replicas() -> bool:
    """Return whether a replica of such a strategy calls this."""
    return _has_replicas() and not tf.distribute.in_cross_replica_context()


def _device_of_several_replicas() -> str | None:
    """Return the device type of a strategy of tfdist with several replicas, or None."""
    return device_type(tf.distribute.get_strategy()) if _has_replicas() else None


def _add_conversions(cls: Any) -> None:
    """Let `float`, `int` and NumPy read a variable with copies, as they read a `tf.Variable`.

    The copies' own conversions are found only by NumPy, and outside of a scope: within one it fails
    for scalars. So callbacks could not read `optimizer.learning_rate` or `iterations`.
    """

    def array(self, dtype=None, copy=None):
        return np.array(self.numpy(), dtype)

    cls.__array__ = array
    cls.__float__ = lambda self: float(self.numpy())
    cls.__int__ = lambda self: int(self.numpy())
    cls.__complex__ = lambda self: complex(self.numpy())


def _explain_handles(cls: Any) -> None:
    """Say what to do where a loop of the user's own computes gradients outside of a replica."""
    handle = cls.handle

    def explained(self):
        try:
            return handle.fget(self)
        except ValueError as error:
            if engine_of(self.distribute_strategy) is None:
                raise
            raise ValueError(
                f"{self.name}: expected gradients of a weight in a replica, as in fit() or in "
                "strategy.run(), received a call outside. In a training loop of your own, make the "
                "step the train_step of a model, and call fit(); or use tfdist.loops."
            ) from error

    cls.handle = property(explained)


def runtime_initialized() -> bool:
    """Return whether TensorFlow has created its devices.

    After that, devices and the cluster can no longer be configured.
    """
    return _context.context()._initialized


def global_seed() -> int | None:
    """Return TensorFlow's random seed if the user has set it, or None.

    `keras.utils.set_random_seed` sets it too.
    """
    return _context.global_seed()


def abort_collectives(message: str) -> None:
    """Abort all collectives of this process, now and later, with a DeadlineExceededError.

    The error is `tf.errors.DeadlineExceededError`.
    """
    _context.context().abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, message)


def check_peer(name: str, seconds: float) -> None:
    """Ask a task of a synchronous cluster whether it is alive.

    Args:
        name: Name of the task, such as "worker:1".
        seconds: Seconds to wait for its answer. Python's lock is held meanwhile.

    Raises:
        tf.errors.OpError: If it does not answer, or is another process than before.
    """
    job, _, index = name.partition(":")
    task = f"/job:{job}/replica:0/task:{index}"
    _context.context().check_collective_ops_peer_health(task, round(1000 * seconds))


def wait_at_barrier(name: str, seconds: float) -> None:
    """Wait until all tasks that make up a synchronous cluster are at a barrier.

    Args:
        name: Name of the barrier; each can be used once in a process.
        seconds: Seconds to wait for the other tasks.

    Raises:
        tf.errors.OpError: If they did not come, or a task is gone.
    """
    _context.context().wait_at_barrier(name, round(1000 * seconds))


def announce(key: str, text: str) -> None:
    """Tell all tasks of a synchronous cluster how something has ended.

    Args:
        key: Name of it, used once in the cluster.
        text: Description of its end.
    """
    _context.context().set_config_key_value(key, text)


def announced(key: str, seconds: float) -> str | None:
    """Return what a task has told by `announce`; None if none has after a wait.

    Args:
        key: Name that it passes.
        seconds: Seconds to wait.

    Raises:
        tf.errors.OpError: If the first worker, which keeps the names, is gone.
    """
    try:
        return _context.context().get_config_key_value(key, round(1000 * seconds))
    except tf.errors.DeadlineExceededError:
        return None


def ops_are_deterministic() -> bool:
    """Return whether `tf.config.experimental.enable_op_determinism` was called.

    If so, no operation reads the clock, and no dataset can return the elements that become ready
    first.
    """
    return _config.is_op_determinism_enabled()


def follow_chief(backup: keras.callbacks.BackupAndRestore) -> None:
    """Let a callback of Keras read the chief's backup, and take part when the chief writes it."""

    def save_weights():
        backup.model.save_weights(backup._weights_path, overwrite=True)

    backup._save_model = save_weights
    backup.on_train_end = lambda logs=None: None  # the chief removes the files


def hide_length(dataset: Any) -> Any:
    """Make the length of a distributed data set unknown; return anything else as it is.

    Otherwise Keras would end an epoch by the length of one worker's own part.
    """
    if isinstance(dataset, tf.distribute.DistributedDataset):
        dataset._cardinality = tf.data.UNKNOWN_CARDINALITY
    return dataset


def profiles(callback: keras.callbacks.TensorBoard) -> bool:
    """Return whether Keras' TensorBoard callback was asked to profile some batches."""
    return callback._should_trace


def log_writers(callback: keras.callbacks.TensorBoard) -> dict[str, Any]:
    """Return the writers that Keras' TensorBoard callback has made, by name.

    The callback makes the missing ones when it needs them.
    """
    return callback._writers


def leave_summaries(callback: keras.callbacks.TensorBoard) -> None:
    """Exit the summary contexts that Keras' TensorBoard callback enters while it trains.

    After an error in `fit`, these contexts would otherwise apply to later summaries.
    """
    while callback._prev_summary_state:
        callback._pop_writer()


def _hook_model(name: str) -> None:
    keras_method = getattr(keras.Model, name)
    if name == "export":
        keras_method = exporting(keras_method)

    @functools.wraps(keras_method)
    def method(self, *args, **kwargs):
        engine = engine_of(self.distribute_strategy)
        if engine is not None:
            if name in _RUNS:
                global_generator.share(self.distribute_strategy, self)
            with model_building.running(name):
                return getattr(engine, name)(self, keras_method, *args, **kwargs)
        if name == "fit" and (runner := _runner_of_fit(self, keras_method, args, kwargs)):
            return runner.run_fit(self, keras_method, *args, **kwargs)
        if (
            name in _FILES
            and (holder := holder_of(getattr(self, "optimizer", None), self.trainable_weights))
            is not None
        ):
            return holder.save_without_scope(self, keras_method, *args, **kwargs)
        result = keras_method(self, *args, **kwargs)
        if name in _FUNCTIONS:
            _wrap_step_function(self, _FUNCTIONS[name])
        return result

    owner: type = keras.Model
    if name == "compile":
        # Keras does not compile a loaded model whose class seems to override this method.
        owner = next(cls for cls in keras.Model.__mro__ if name in vars(cls))
    setattr(owner, name, method)


def _runner_of_fit(model: keras.Model, keras_fit: Callable, args: tuple, kwargs: dict) -> Any:
    """Return the first callback with a method `run_fit`, which runs a `fit` without an engine."""
    callbacks = inspect.signature(keras_fit).bind(model, *args, **kwargs).arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return next((c for c in keras.tree.flatten(callbacks or []) if hasattr(c, "run_fit")), None)


def has_strategy(model: keras.Model) -> bool:
    """Return whether a model's methods run under a strategy, TensorFlow's or tfdist's."""
    return tf.distribute.has_strategy() or (
        model.distribute_strategy is not tf.distribute.get_strategy()
    )


@contextlib.contextmanager
def fed_by(feed: Callable[[tf.data.Dataset], Any]) -> Iterator[None]:
    """Make Keras read `feed(dataset)` instead of each data set, within the context.

    This applies in this thread, to models that have no strategy.
    """
    _hook_default_strategy()
    before = getattr(_state, "feed", None)
    _state.feed = feed
    try:
        yield
    finally:
        _state.feed = before


def _hook_default_strategy() -> None:
    """Hook TensorFlow's default strategy, which Keras uses where there is no strategy.

    Keras asks every strategy for the data set to iterate over.
    """
    strategy = tf.distribute.get_strategy()
    if hasattr(strategy, "_tfdist_hooks"):
        return
    original = strategy.experimental_distribute_dataset

    @functools.wraps(original)
    def experimental_distribute_dataset(dataset, options=None):
        feed = getattr(_state, "feed", None)
        return original(dataset, options) if feed is None else feed(dataset)

    strategy.experimental_distribute_dataset = experimental_distribute_dataset
    strategy._tfdist_hooks = ("experimental_distribute_dataset",)


def _wrap_step_function(model: keras.Model, name: str) -> None:
    """Make a model's step function synchronize with other processes.

    This is for a model that shares its state with other processes without a strategy's scope.
    """
    function = getattr(model, name)
    holder = holder_of(getattr(model, "optimizer", None), model.trainable_weights)
    if holder is None and name == "train_function":
        scopes.check_training(model)
    if holder is not None and not hasattr(function, "tfdist_wrapped"):
        wrapped = holder.wrap_without_scope(model, function, name == "train_function")
        wrapped.tfdist_wrapped = True
        setattr(model, name, wrapped)


def holder_of(optimizer: Any, variables: Any) -> Any:
    """Return the object that holds state shared with other replicas, or None.

    Such state belongs to an optimizer or to some variables, and the object is a `Zero` or an
    `FSDP`. It has the methods `update(optimizer, keras_apply, grads, variables)`, `beside(model,
    function, trains)`, and `save_without_scope(model, keras_method, ...)`.
    """
    current = optimizer
    innermost = optimizer
    while current is not None:
        if hasattr(current, "tfdist_kind"):
            return current
        innermost = current
        current = getattr(current, "inner_optimizer", None)
    candidates = (
        variables if variables is not None else getattr(innermost, "_trainable_variables", ())
    )
    return (
        next((v.tfdist_store for v in candidates if hasattr(v, "tfdist_store")), None)
        if isinstance(candidates, list | tuple)
        else None
    )  # an iterator must not be consumed


def chose_jit_compile(model: keras.Model) -> bool:
    """Return whether a model was compiled with `jit_compile`; Keras' default is "auto"."""
    return getattr(model, "_tfdist_chose_jit_compile", False)


def note_jit_compile(model: keras.Model, value: bool | str) -> None:
    """Note the argument `jit_compile` of `compile`.

    Keras keeps what "auto" means here, also in what it saves; a copy may train elsewhere.
    """
    model._tfdist_chose_jit_compile = value != "auto"
    model._compile_config.config["jit_compile"] = value


def _hook_symbolic_build() -> None:
    keras_method = keras.Model._maybe_symbolic_build

    @functools.wraps(keras_method)
    def method(self, iterator=None, data_batch=None):
        feed = None if iterator is None else iterator._get_iterator()
        if feed is not None and hasattr(feed, "symbolic_batch"):
            # Keras would begin an epoch to learn shapes. A PyDataset's threads would prefetch
            # batches in it, and these would count twice.
            data_batch = feed.symbolic_batch()
            iterator = None
        if engine_of(self.distribute_strategy) is None:
            return keras_method(self, iterator, data_batch)
        if iterator is not None:
            # To learn the shapes, Keras averages a whole batch over the replicas (keras #20585).
            data_batch = _first_batch(self.distribute_strategy, iterator)
        return model_building.build(self, keras_method, data_batch)

    keras.Model._maybe_symbolic_build = method


def _first_batch(strategy: tf.distribute.Strategy, iterator: Any) -> Any:
    """Return the first replica's first batch from Keras' epoch iterator."""
    for *_, batches in iterator:  # after one number of a step; two in later versions of Keras
        return tf.nest.map_structure(
            lambda x: strategy.experimental_local_results(x)[0], next(batches)
        )
    return None


def _hook_apply(cls: Any) -> None:
    keras_apply = cls.apply

    @functools.wraps(keras_apply)
    def apply(self, grads, trainable_variables=None):
        if model_building.note_update(self, trainable_variables):
            return None
        engine = engine_of(tf.distribute.get_strategy())
        if engine is None and engine_of(strategy_of(self)) is not None:
            raise ValueError(
                "expected a model that was made in the scope of its optimizer's strategy; the "
                f"optimizer {self.name} was made in one, the model was not. Make the model, and "
                "call compile(), inside `with strategy.scope():`."
            )
        holder = (
            None
            if engine is not None or in_local_update()
            else holder_of(self, trainable_variables)
        )
        if holder is not None:  # no strategy scope, but state shared with other processes
            return holder.update(self, keras_apply, list(grads), trainable_variables)
        if engine is None or tf.distribute.in_cross_replica_context() or in_local_update():
            return keras_apply(self, grads, trainable_variables)
        scopes.check_weights(trainable_variables)
        return engine.apply(self, keras_apply, grads, trainable_variables)

    cls.apply = apply


def _hook_loss(name: str) -> None:
    keras_function = getattr(_loss, name)

    @functools.wraps(keras_function)
    def function(*args, **kwargs):
        engine = engine_of(tf.distribute.get_strategy())
        if engine is None or tf.distribute.in_cross_replica_context():
            return keras_function(*args, **kwargs)
        return getattr(engine, name)(keras_function, *args, **kwargs)

    setattr(_loss, name, function)


def _replica_hooks() -> tuple[tuple[type, str, str], ...]:
    """Return classes, the name of a public method, and that of the engine's method for it."""
    return (
        (keras.metrics.Mean, "update_state", "update_mean"),
        (keras.Loss, "__call__", "call_loss"),
        *(
            # Keras' own `assign` of a variable with copies calls these.
            (_distribute_values.DistributedVariable, name, "assign")
            for name in ("assign", "assign_add", "assign_sub")
        ),
        (tf.distribute.ReplicaContext, "all_reduce", "all_reduce_in_replica"),
        (tf.distribute.ReplicaContext, "all_gather", "all_gather_in_replica"),
        # The class of what `tf.function` returns.
        (type(tf.function(lambda: None)), "__call__", "call_function"),
        (tf.GradientTape, "gradient", "gradient"),
    )


def _hook_in_replicas(owner: Any, name: str, hook: str) -> None:
    """Let the engine do the work of a method where it is called in replica context."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        engine = engine_of(tf.distribute.get_strategy())
        if engine is None or tf.distribute.in_cross_replica_context():
            return original(self, *args, **kwargs)
        return getattr(engine, hook)(original, self, *args, **kwargs)

    setattr(owner, name, method)


def _hook_assignments() -> None:
    """Do not read a variable with copies after each assignment of Keras outside of functions.

    TensorFlow's `assign` returns the new value, such as the sum of the copies, and Keras drops it.
    Keras assigns so to each variable of a metric when an epoch begins, and in `train_on_batch`.
    """
    keras_assign = keras.Variable._direct_assign

    @functools.wraps(keras_assign)
    def direct_assign(self, value):
        variable = self._value
        if isinstance(variable, _distribute_values.DistributedVariable) and outside_of_steps():
            variable.assign(tf.cast(value, variable.dtype), read_value=False)
        else:
            keras_assign(self, value)

    keras.Variable._direct_assign = direct_assign


def _hook_creation() -> None:
    """Create variables before the function in which several replicas first use them.

    Layers without an input shape, and optimizers, create their variables when they are first
    called. In a loop without `fit`, this is in the function that runs the step of each replica.
    There the first value of a copy is that of another copy, in another function: "You must feed a
    value for placeholder tensor 'cond/...'".
    """
    keras_init = keras.Variable.__init__

    @functools.wraps(keras_init)
    def init(self, initializer, *args, **kwargs):
        if _creates_copies_in_a_function() and not tf.is_symbolic_tensor(initializer):
            with tf.init_scope():
                keras_init(self, initializer, *args, **kwargs)
        else:
            keras_init(self, initializer, *args, **kwargs)

    keras.Variable.__init__ = init


def _creates_copies_in_a_function() -> bool:
    strategy = tf.distribute.get_strategy()
    return (
        not tf.executing_eagerly()
        and engine_of(strategy) is not None
        and len(strategy.extended.worker_devices) > 1
    )


def is_compiled_by_xla(function: Any) -> bool:
    """Return whether what `tf.function` returned was asked for with `jit_compile=True`."""
    return bool(function._jit_compile)


def python_of(function: Any) -> Callable:
    """Return the Python function of a `tf.function`, converted by AutoGraph if that does so.

    Called in a graph, it becomes a part of this graph, without a function of its own.
    """
    python = function.python_function
    return tf.autograph.to_graph(python) if function._autograph else python


def scale_loss_for_distribution(value):
    """Return a replica's share of a mean loss, computed by Keras' function as hooked."""
    return _loss.scale_loss_for_distribution(value)


# What a subclass of a Keras metric may define without changing how the state is updated.
_NO_UPDATE = {"__init__", "result", "get_config", "from_config", *vars(type("_", (), {}))}

# Functions of Keras in which the rows of a batch depend on each other.
_MIXING_ROWS = {"dice", "tversky", "circle"}


def is_keras_metric(metric: keras.Metric) -> bool:
    """Return whether Keras' own code updates a metric, and adds up what each row gives."""
    kinds = [kind for kind in type(metric).__mro__ if kind is not object]
    of_keras = {name for kind in kinds if _is_keras(kind) for name in dir(kind)} - _NO_UPDATE
    if any(of_keras & vars(kind).keys() for kind in kinds if not _is_keras(kind)):
        return False
    if not isinstance(metric, keras.metrics.MeanMetricWrapper):
        return True
    function = wrapped_function(metric)
    return (
        isinstance(function, types.FunctionType)
        and _is_keras(function)
        and function.__name__ not in _MIXING_ROWS
        and metric._fn_kwargs.get("axis", -1) == -1
    )


def mixes_rows(loss: keras.Loss, rank: int) -> bool:
    """Return whether a loss is one of Keras' whose rows depend on each other.

    Args:
        loss: The loss.
        rank: Number of axes of the targets.
    """
    function = getattr(loss, "fn", None)
    if (
        not isinstance(function, types.FunctionType)
        or not _is_keras(function)
        or not _is_keras(type(loss).call)
        or function.__name__ not in _MIXING_ROWS
    ):
        return False
    axis = loss._fn_kwargs.get("axis")
    axes = [axis] if isinstance(axis, int) else axis
    return axes is None or any(each % rank == 0 for each in axes)


def wrapped_function(metric: keras.Metric) -> Any:
    """Return the function that a metric takes the mean of, or None."""
    function = getattr(metric, "_fn", None)
    return getattr(function, "func", function)  # of a functools.partial


def _is_keras(of_module: Any) -> bool:
    return of_module.__module__.startswith("keras.")


def metrics_of(model: keras.Model) -> list[keras.Metric]:
    """Return a model's metrics: `model.metrics`, and those that it tracks but does not list.

    A model with a property `metrics` of its own may leave some out. Keras does not reset these.
    """
    metrics = list(model.metrics)
    known = {id(each) for each in each_metric(metrics)}
    for layer in model._flatten_layers():
        for metric in layer._metrics:
            if id(metric) not in known:
                known.add(id(metric))
                metrics.append(metric)
    return metrics


def each_metric(metrics: Iterable[keras.Metric]) -> list[keras.Metric]:
    """Return metrics, and those in the containers of Keras among them, as for `compile`."""
    return [
        each
        for metric in metrics
        for each in (metric, *(getattr(metric, "metrics", ()) if _is_keras(type(metric)) else ()))
    ]


def resets_variables(metric: keras.Metric) -> bool:
    """Return whether Keras' own code resets a metric, which is to assign its variables."""
    return _is_keras(metric.reset_state)


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of all metrics of `metrics_of`."""
    return [v for metric in metrics_of(model) for v in metric.variables]


def layer_state(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that layers created as state, not as weights.

    Frozen weights are not included (`non_trainable_weights` has both).
    """
    layers = model._flatten_layers()
    return list({id(v): v for layer in layers for v in layer._non_trainable_variables}.values())


def strategy_of(optimizer: keras.optimizers.Optimizer) -> tf.distribute.Strategy:
    """Return the strategy in whose scope an optimizer was created."""
    return optimizer._distribution_strategy


def set_first_epoch(model: keras.Model, epoch: int) -> None:
    """Make the `fit` that begins start at this epoch, from 0, as Keras' BackupAndRestore does."""
    model._initial_epoch = epoch


def combined_weight(sample_weight, mask, dtype, reduction: str):
    """Return the weight of each loss value, after Keras has merged sample weights and mask."""
    return _loss.apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction)


# --- Optimizer updates without merge_call ---------------------------------------------------------
def allow_local_updates(strategy: tf.distribute.Strategy) -> None:
    """Let `local_update` disable this strategy's merge_call.

    TensorFlow itself avoids merge_call only for XLA on GPUs (`_use_merge_call`), though it is
    needless wherever every replica computes the same update. With merge_call, a `tf.cond` around an
    update fails: "merge_call called while defining a new graph" (keras #20582). Keras uses such a
    `tf.cond` in gradient accumulation, EMA overwriting and loss scaling.
    """
    extended = strategy.extended
    original = extended._use_merge_call
    extended._use_merge_call = lambda: False if in_local_update() else original()


def separate_collectives(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Give the next strategy of a class its own collective keys.

    Without this, two strategies in one process take each other's tensors (tensorflow #62790).
    """
    strategy_class._collective_key_base += 100_000


def keep_state_per_replica(strategy: tf.distribute.Strategy) -> None:
    """Give each replica of a central-storage strategy its own metrics, statistics and seeds.

    TensorFlow keeps one copy of every variable there, and the replicas' assignments to it go wrong.
    Metrics add up the copies instead of the changes, so that all results are wrong; moving
    statistics and seeds raise errors. Weights and optimizer slots (which Keras colocates with their
    weight) stay central.
    """
    extended = strategy.extended
    original = extended._create_variable

    def create(next_creator, **kwargs):
        on_read = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        state = (
            not kwargs.get("trainable", True)
            and kwargs.get("aggregation") == tf.VariableAggregation.NONE
        )
        if not on_read and (not state or "colocate_with" in kwargs):
            return original(next_creator, **kwargs)

        def on_each_device(**kwargs):
            copies = []
            for device in extended.worker_devices:
                with tf.device(device):
                    copies.append(next_creator(**kwargs))
                kwargs["initial_value"] = copies[0].numpy()
            return copies

        return _distribute_utils.create_mirrored_variable(
            strategy,
            on_each_device,
            _distribute_utils.VARIABLE_CLASS_MAPPING,
            _distribute_utils.VARIABLE_POLICY_MAPPING,
            **kwargs,
        )

    extended._create_variable = create
    original_update = extended._update

    def update(var, fn, args, kwargs, group):
        if not isinstance(var, _distribute_values.DistributedVariable):
            return original_update(var, fn, args, kwargs, group)
        results = []
        for each in var.values:  # TensorFlow would look for a copy of a copy
            with tf.device(each.device):
                results.append(fn(each, *args, **kwargs))
        return tf.group(*results) if group else tuple(results)

    extended._update = update


def in_local_update() -> bool:
    """Return whether this thread is inside `local_update`."""
    return getattr(_state, "local_update", False)


@contextlib.contextmanager
def local_update(
    optimizer: keras.optimizers.Optimizer, local_replica: int | None
) -> Iterator[None]:
    """Make the optimizer take gradients as reduced and update only this replica's variables.

    This applies within the context.

    Args:
        optimizer: Optimizer to change, together with its inner optimizers.
        local_replica: Index of this replica among the replicas of this process; None in
            cross-replica context.
    """
    chain = []
    while optimizer is not None:
        chain.append(optimizer)
        optimizer = getattr(optimizer, "inner_optimizer", None)
    _state.local_update = True
    for each in chain:
        each._all_reduce_sum_gradients = lambda grads_and_vars: grads_and_vars
        if local_replica is not None:
            # Aggregation "only_first_replica" broadcasts through merge_call, but every replica
            # counts the same steps anyway.
            each._iterations.assign_add = functools.partial(
                _assign_add_local, each._iterations, local_replica
            )
    try:
        with fused_updates.fused():
            yield
    finally:
        _state.local_update = False
        for each in chain:
            del each._all_reduce_sum_gradients
            if local_replica is not None:
                del each._iterations.assign_add


def _assign_add_local(variable: keras.Variable, local_replica: int, value) -> None:
    component = local_component(variable, local_replica)
    component.assign_add(tf.cast(value, component.dtype))


def local_component(variable: keras.Variable, local_replica: int) -> tf.Variable:
    """Return the copy of a variable that belongs to one local replica."""
    value = variable._value  # not `.value`, which autocasts under mixed precision
    copies = tf.distribute.get_strategy().experimental_local_results(value)
    return copies[local_replica] if len(copies) > 1 else copies[0]


def copies(variable: keras.Variable) -> tuple[tf.Variable, ...]:
    """Return the copies of a variable in this process, one for each replica that has its own."""
    value = variable._value
    return tuple(getattr(value, "values", (value,)))


def held_bytes(dataset: tf.data.Dataset) -> int:
    """Return the bytes of the tensors that a data set holds, as one made of arrays does."""
    total = 0
    for each in with_inputs(dataset):
        captured = [x for f in each._functions() for x in f.function.captured_inputs]
        for x in [*getattr(each, "_tensors", ()), *captured]:
            total += (x.shape.num_elements() or 0) * x.dtype.size
    return total


def pass_counters(dataset: tf.data.Dataset) -> list[Any]:
    """Return the attributes `epochs` of a data set and of those it was made from.

    Data pipelines of `tfdist.data` have this attribute, a counter of their passes. Those that are
    read through a cache are left out: each pass reads what the first one has read.
    """
    counters = {}
    for each in with_inputs(dataset, until=_counts_or_caches):
        if (counter := getattr(each, "epochs", None)) is not None:
            counters[id(counter)] = counter
    return list(counters.values())


def _counts_or_caches(dataset: tf.data.Dataset) -> bool:
    return hasattr(dataset, "epochs") or "Cache" in type(dataset).__name__


def with_inputs(
    dataset: tf.data.Dataset, until: Callable[[tf.data.Dataset], bool] = lambda _: False
) -> Iterator[tf.data.Dataset]:
    """Yield a data set and those it was made from; of those where `until` holds, no inputs."""
    datasets = [dataset]
    while datasets:
        each = datasets.pop()
        yield each
        if not until(each):
            datasets.extend(each._inputs())


@contextlib.contextmanager
def replaced_values(variables: list[keras.Variable], values: list[Any]) -> Iterator[None]:
    """Make Keras variables read and assign other objects than their `tf.Variable`.

    This applies within the context.
    """
    before = [v._value for v in variables]
    for variable, value in zip(variables, values, strict=True):
        variable._value = value
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable._value = value


def watch_variable(stand_in: Any) -> None:
    """Make open gradient tapes watch a stand-in for a variable, as one that is read.

    Args:
        stand_in: Object with the attributes `handle`, of which `tape.gradient` returns the
            gradient for a Keras variable that has this value, and `trainable`.
    """
    _tape.variable_accessed(stand_in)


def step_counter(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Return the variable in which an optimizer counts its calls.

    With gradient accumulation, `iterations` is a fraction of it.
    """
    return sharding_hooks.innermost(optimizer)._iterations


@contextlib.contextmanager
def accumulating(
    optimizer: keras.optimizers.Optimizer, stand_in: Callable[[tf.Variable], Any]
) -> Iterator[None]:
    """Make an optimizer with gradient accumulation add up gradients in stand-ins.

    Within the context, a stand-in replaces each accumulator variable, and its method `add` takes
    the gradients.
    """
    sums = [v for v in getattr(optimizer, "_accumulated_gradients", []) if v is not None]

    def add(gradients, accumulators):
        for gradient, accumulator in zip(gradients, accumulators, strict=True):
            accumulator.value.add(gradient)

    optimizer._backend_increment_gradient_accumulators = add
    try:
        with replaced_values(sums, [stand_in(v.value) for v in sums]):
            yield
    finally:
        del optimizer._backend_increment_gradient_accumulators


# --- Scopes of strategies -------------------------------------------------------------------------
@contextlib.contextmanager
def unchanged_by_saving(model: keras.Model) -> Iterator[None]:
    """Undo what Keras changes besides files when it saves a model within the context.

    Only the chief saves, and the other workers must have the same state. The writer of HDF5 files
    removes the optimizer from the model's compile config, so that `clone_model` would compile the
    clone on the other workers only. All writers make objects, which count in the names of later
    ones.
    """
    compiled = getattr(model, "_compile_config", None)
    config = dict(compiled.config) if compiled is not None else {}
    names = _global_state.get_global_attribute("object_name_uids")
    counts = dict(names) if names is not None else {}
    try:
        yield
    finally:
        if compiled is not None:
            compiled.config.clear()
            compiled.config.update(config)
        names = _global_state.get_global_attribute("object_name_uids")
        if names is not None:
            names.clear()
            names.update(counts)


# Types that TensorFlow cannot broadcast between workers, and a type that holds their values.
_BROADCAST_AS = {
    tf.bfloat16: tf.float32,
    tf.int8: tf.int32,
    tf.uint8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
}


def broadcast_initial_values(
    strategy: tf.distribute.MultiWorkerMirroredStrategy,
    during: Callable[[], contextlib.AbstractContextManager[None]],
    broadcast: Callable[[tf.Tensor], tf.Tensor | None],
) -> None:
    """Let a strategy of several workers make variables of all types of numbers, and fast.

    The chief broadcasts the initial value of each variable. `CollectiveBcastSend` takes
    milliseconds for each, and does not take bfloat16 or small integers, such as the weights of
    `model.quantize("int8")`.

    Args:
        strategy: The strategy.
        during: Function that makes the context of each broadcast.
        broadcast: Function that all workers call with their own values, and that returns the
            chief's; None if TensorFlow must send it.
    """
    extended = strategy.extended
    original = extended._get_variable_creator_initial_value

    def initial_value(replica_id, device, primary_var, **kwargs):
        if replica_id != 0:
            return original(replica_id, device, primary_var, **kwargs)
        value = kwargs["initial_value"]
        dtype = kwargs.get("dtype")

        def own():
            with tf.device(device):
                return tf.convert_to_tensor(value() if callable(value) else value, dtype)

        def of_chief():
            mine = own()
            if mine.shape.num_elements() == 0:  # TensorFlow would wait for ever
                return mine
            with tf.device(device), during():
                received = broadcast(mine) if tf.executing_eagerly() else None
                if received is None:
                    wide = _BROADCAST_AS.get(mine.dtype, mine.dtype)
                    kwargs.update(initial_value=tf.cast(mine, wide), dtype=wide)
                    received = original(replica_id, device, primary_var, **kwargs)()
                return tf.cast(received, mine.dtype)

        return of_chief if sharding_hooks.broadcasts() else own

    extended._get_variable_creator_initial_value = initial_value


# --- Layers ---------------------------------------------------------------------------------------
def stateful_layers(model: keras.Model) -> list[str]:
    """Return the names of recurrent layers that keep their state from one batch to the next."""
    layers = model._flatten_layers()
    return [x.name for x in layers if isinstance(x, keras.layers.RNN) and x.stateful]
