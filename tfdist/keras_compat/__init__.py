"""Keras and private TensorFlow names become hooks that hand control to a strategy's engine; no training logic lives here.

A strategy made by tfdist carries an *engine* in its attribute `tfdist_engine`. The public methods of `keras.Model` and
`keras.optimizers.Optimizer` listed in `MODEL_HOOKS` ask the strategy in charge for its engine, and fall through to Keras where
there is none: models outside tfdist's strategies are untouched. Everything here was seen to work on Keras 3.10 to 3.15 and is
held by `tests/unit/test_keras_compat.py`, which fails when an upgrade moves a name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import (
    loss as _loss,
)  # scale_loss_for_distribution has no public name, keras #18624
from tensorflow.python.distribute import distribute_utils as _distribute_utils
from tensorflow.python.eager import context as _context

# Public methods of the public class keras.Model; the engine has a method of the same name, called with
# (model, keras_method, *args, **kwargs).
MODEL_HOOKS = (
    *(
        "fit",
        "evaluate",
        "predict",
        "train_on_batch",
        "test_on_batch",
        "predict_on_batch",
        "save",
        "save_weights",
        "export",
    ),
    *("make_train_function", "make_test_function", "make_predict_function", "get_metrics_result"),
)

# Functions of Keras' module of losses, and methods of the engine as well.
LOSS_HOOKS = (
    "scale_loss_for_distribution",
    "unscale_loss_for_distribution",
    "reduce_weighted_values",
)

# What makes the functions that run steps, and where Keras keeps each.
_FUNCTIONS = {
    "make_train_function": "train_function",
    "make_test_function": "test_function",
    "make_predict_function": "predict_function",
}

# What writes files.
_FILES = ("save", "save_weights", "export")

# What Keras' callbacks count steps in.
STEP_COUNTERS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (keras.callbacks.ModelCheckpoint, ("_batches_seen_since_last_saving", "_last_batch_seen")),
    (keras.callbacks.TensorBoard, ("_global_train_batch", "_global_test_batch")),
)

_state = threading.local()


def engine_of(strategy: tf.distribute.Strategy) -> Any:
    """The engine of a strategy made by tfdist, else None."""
    return getattr(strategy, "tfdist_engine", None)


def install() -> None:
    """Hooks Keras; calling it again does nothing."""
    if hasattr(keras.Model, "_tfdist_hooks"):
        return
    keras.Model._tfdist_hooks = MODEL_HOOKS
    for name in MODEL_HOOKS:
        _hook_model(name)
    _hook_symbolic_build()
    for optimizer in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        _hook_apply(optimizer)
    for name in LOSS_HOOKS:
        _hook_loss(name)
    importlib.import_module("tfdist.keras_compat.parallel").hook_optimizers()


def runtime_initialized() -> bool:
    """Whether TensorFlow has made its devices, after which they, and the cluster, can no longer be configured."""
    return _context.context()._initialized


def global_seed() -> int | None:
    """TensorFlow's random seed, where the user has set it, as `keras.utils.set_random_seed` does."""
    return _context.global_seed()


def abort_collectives(message: str) -> None:
    """Ends every wait for other workers in this process, now and later, with a `tf.errors.DeadlineExceededError`."""
    _context.context().abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, message)


def unordered(op: tf.Operation) -> None:
    """Lets a stateful operation of a function run as soon as it can: TensorFlow runs them one after the other, as the program has them."""
    op.graph.experimental_acd_manager.run_independently(op)


def hide_length(dataset: Any) -> Any:
    """Makes the length of a distributed data set unknown, as Keras would leave an epoch by a worker's own part; returns anything else as it is."""
    if isinstance(dataset, tf.distribute.DistributedDataset):
        dataset._cardinality = tf.data.UNKNOWN_CARDINALITY
    return dataset


def profiles(callback: keras.callbacks.TensorBoard) -> bool:
    """Whether Keras' TensorBoard callback was asked to profile some batches."""
    return callback._should_trace


def log_writers(callback: keras.callbacks.TensorBoard) -> dict[str, Any]:
    """The writers that Keras' TensorBoard callback has made, by name; it makes those that are missing when it needs them."""
    return callback._writers


def leave_summaries(callback: keras.callbacks.TensorBoard) -> None:
    """Leaves the contexts that Keras' TensorBoard is in while it trains: an error in `fit` would keep later summaries in them."""
    while callback._prev_summary_state:
        callback._pop_writer()


def _hook_model(name: str) -> None:
    keras_method = getattr(keras.Model, name)

    @functools.wraps(keras_method)
    def method(self, *args, **kwargs):
        engine = engine_of(self.distribute_strategy)
        if engine is not None:
            return getattr(engine, name)(self, keras_method, *args, **kwargs)
        if (
            name in _FILES
            and (holder := holder_of(getattr(self, "optimizer", None), self.trainable_weights))
            is not None
        ):
            return holder.save_beside(self, keras_method, *args, **kwargs)
        result = keras_method(self, *args, **kwargs)
        if name in _FUNCTIONS:
            _join(self, _FUNCTIONS[name])
        return result

    setattr(keras.Model, name, method)


def _join(model: keras.Model, name: str) -> None:
    """Lets a model's function be run beside other processes, where it shares its state with them without a strategy's scope."""
    function = getattr(model, name)
    holder = holder_of(getattr(model, "optimizer", None), model.trainable_weights)
    if holder is not None and not hasattr(function, "tfdist_joined"):
        joined = holder.beside(model, function, name == "train_function")
        joined.tfdist_joined = True
        setattr(model, name, joined)


def holder_of(optimizer: Any, variables: Any) -> Any:
    """What holds the state that an optimizer, or some variables, share with other replicas: a `Zero` or an `FSDP`; None for others.

    It has the methods `update(optimizer, keras_apply, grads, variables)`, `beside(model, function, trains)`, and `save_beside(model, keras_method, ...)`.
    """
    each = innermost = optimizer
    while each is not None:
        if hasattr(each, "tfdist_kind"):
            return each
        innermost, each = each, getattr(each, "inner_optimizer", None)
    known = variables if variables is not None else getattr(innermost, "_trainable_variables", ())
    return (
        next((v.tfdist_store for v in known if hasattr(v, "tfdist_store")), None)
        if isinstance(known, list | tuple)
        else None
    )  # an iterator stays as it is


def _hook_symbolic_build() -> None:
    keras_method = keras.Model._maybe_symbolic_build

    @functools.wraps(keras_method)
    def method(self, iterator=None, data_batch=None):
        if iterator is not None and getattr(iterator._get_iterator(), "symbolic_first", False):
            # Keras would begin an epoch to learn shapes, in which a PyDataset's own threads read batches ahead that then count twice.
            iterator, data_batch = None, next(iter(iterator._get_iterator()))
        _state.building = True
        try:
            return keras_method(self, iterator, data_batch)
        finally:
            _state.building = False

    keras.Model._maybe_symbolic_build = method


def building() -> bool:
    """Whether Keras is reading a batch just to learn its shapes."""
    return getattr(_state, "building", False)


def _hook_apply(cls: Any) -> None:
    keras_apply = cls.apply

    @functools.wraps(keras_apply)
    def apply(self, grads, trainable_variables=None):
        engine = engine_of(tf.distribute.get_strategy())
        if engine is None and engine_of(strategy_of(self)) is not None:
            raise ValueError(
                f"The model was made outside of the scope of the strategy in which its optimizer {self.name} was made. Make the model, and "
                "call compile(), inside `with strategy.scope():`."
            )
        alone = (
            None
            if engine is not None or in_local_update()
            else holder_of(self, trainable_variables)
        )
        if alone is not None:  # a process without a scope, beside others
            return alone.update(self, keras_apply, list(grads), trainable_variables)
        if engine is None or tf.distribute.in_cross_replica_context() or in_local_update():
            return keras_apply(self, grads, trainable_variables)
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


def scale_loss_for_distribution(value):
    """A replica's share of a mean loss, as hooked."""
    return _loss.scale_loss_for_distribution(value)


def layer_state(model: keras.Model) -> list[keras.Variable]:
    """The variables that layers made as state, not as weights; frozen weights are none (`non_trainable_weights` has both)."""
    layers = model._flatten_layers()
    return list({id(v): v for layer in layers for v in layer._non_trainable_variables}.values())


def strategy_of(optimizer: keras.optimizers.Optimizer) -> tf.distribute.Strategy:
    """The strategy in whose scope an optimizer was made."""
    return optimizer._distribution_strategy


def set_first_epoch(model: keras.Model, epoch: int) -> None:
    """Lets the `fit` that begins start at this epoch, from 0; as Keras' own BackupAndRestore does."""
    model._initial_epoch = epoch


def combined_weight(sample_weight, mask, dtype, reduction: str):
    """The weight of each loss value once Keras has merged sample weights and mask."""
    return _loss.apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction)


# --- Optimizer updates without merge_call -----------------------------------------------------------------------------
def allow_local_updates(strategy: tf.distribute.Strategy) -> None:
    """Lets `local_update` switch this strategy's merge_call off.

    TensorFlow itself drops merge_call only for XLA on GPUs (`_use_merge_call`), though it is needless wherever every replica
    computes the same update. With it, a `tf.cond` around an update, as in Keras' gradient accumulation, EMA overwriting and
    loss scaling, fails: "merge_call called while defining a new graph" (keras #20582).
    """
    extended = strategy.extended
    stock = extended._use_merge_call
    extended._use_merge_call = lambda: False if in_local_update() else stock()


def separate_collectives(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Gives the next strategy of a class keys of its own: those of two in one process would take each other's tensors (tensorflow #62790)."""
    strategy_class._collective_key_base += 100_000


def keep_state_per_replica(strategy: tf.distribute.Strategy) -> None:
    """Gives each replica of a central-storage strategy its own copy of metrics, moving statistics and seeds.

    TensorFlow keeps one copy of every variable there. Of what the replicas then assign, metrics add the copies up instead of
    the changes, so that all results are wrong, and statistics and seeds raise. Weights and optimizer slots (which Keras
    colocates with their weight) stay central.
    """
    extended = strategy.extended
    stock = extended._create_variable

    def create(next_creator, **kwargs):
        synchronized_late = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        state = (
            not kwargs.get("trainable", True)
            and kwargs.get("aggregation") == tf.VariableAggregation.NONE
        )
        if not synchronized_late and (not state or "colocate_with" in kwargs):
            return stock(next_creator, **kwargs)

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


def in_local_update() -> bool:
    """Whether this thread is inside `local_update`."""
    return getattr(_state, "local_update", False)


@contextlib.contextmanager
def local_update(
    optimizer: keras.optimizers.Optimizer, local_replica: int | None
) -> Iterator[None]:
    """Inside, the optimizer takes gradients as already reduced, and updates the variables of this replica only.

    Args:
        optimizer: The optimizer, whose inner optimizers are treated likewise.
        local_replica: Index of this replica among those of this process; None in cross-replica context.
    """
    chain = []
    while optimizer is not None:
        chain.append(optimizer)
        optimizer = getattr(optimizer, "inner_optimizer", None)
    _state.local_update = True
    for each in chain:
        each._all_reduce_sum_gradients = lambda grads_and_vars: grads_and_vars
        if local_replica is not None:
            # Aggregation "only_first_replica" broadcasts through merge_call; every replica counts the same steps anyway.
            each._iterations.assign_add = functools.partial(
                _assign_add_local, each._iterations, local_replica
            )
    try:
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
    """The copy of a variable that belongs to one local replica."""
    value = variable._value  # `.value` would autocast under mixed precision
    copies = tf.distribute.get_strategy().experimental_local_results(value)
    return copies[local_replica] if len(copies) > 1 else copies[0]


def held_bytes(dataset: tf.data.Dataset) -> int:
    """Bytes of the tensors that a data set holds, as one made of arrays does."""
    total, left = 0, [dataset]
    while left:
        each = left.pop()
        left.extend(each._inputs())
        captured = [x for f in each._functions() for x in f.function.captured_inputs]
        for x in [*getattr(each, "_tensors", ()), *captured]:
            total += (x.shape.num_elements() or 0) * x.dtype.size
    return total


@contextlib.contextmanager
def replaced_values(variables: list[keras.Variable], values: list[Any]) -> Iterator[None]:
    """Inside, Keras variables read and assign these objects instead of their `tf.Variable`."""
    before = [v._value for v in variables]
    for variable, value in zip(variables, values, strict=True):
        variable._value = value
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable._value = value


def step_counter(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """What an optimizer counts its calls in; with accumulation, `iterations` is a fraction of it."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return optimizer._iterations


@contextlib.contextmanager
def accumulating(
    optimizer: keras.optimizers.Optimizer, stand_in: Callable[[tf.Variable], Any]
) -> Iterator[None]:
    """Inside, an optimizer that sums gradients up between updates does so in stand-ins for its variables, by their method `add`."""
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
