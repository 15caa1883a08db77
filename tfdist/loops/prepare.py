"""Training setup: places a model, data and an optimizer on devices as a `State`."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.data.batch_rows import plain
from tfdist.data.pipeline import pipeline
from tfdist.keras_compat import engine_of, strategy_of
from tfdist.keras_compat.parallel import copy_weight_decay_exclusions
from tfdist.loops.learner import Learner
from tfdist.loops.training_state import State
from tfdist.strategies.factory import make_strategy
from tfdist.train.synchronous.engine import Engine


def prepare_training(
    model: Any,
    data: Any,
    devices: Any = None,
    optimizer: Any = "adam",
    *,
    global_batch: int | None = None,
    sync: Any = None,
    compiled: bool = True,
) -> State:
    """Put a model on devices, with everything that its training needs.

    `model`, `data` and `optimizer` may each be a function without arguments that makes the object.
    It is called after the strategy is made, which must happen first in a process of several devices
    or workers. Functions for the model and the optimizer are called in the strategy's scope.

    Args:
        model: Built Keras model, or a dict or list of models. A model that was made outside of the
            strategy's scope is copied, and the original stays unchanged.
        data: Data set (`tf.data.Dataset`) of global batches, preferably a `tfdist.data.pipeline`.
            All leaves of a batch must have equally many rows. With `global_batch`, anything that a
            data pipeline takes, such as arrays `(x, y)`.
        devices: Strategy of tfdist, or the value of `devices` for `tfdist.make_strategy`. None: the
            devices that `make_strategy` finds.
        optimizer: Keras optimizer or its name, or `lambda: tfdist.parallel.zero("adam")`; default
            "adam".
        global_batch: Examples per batch, over all replicas together, if `data` is not batched.
        sync: Synchronization policy as for `tfdist.make_strategy`, if that is called here.
        compiled: Whether steps run as graphs, default True. False runs steps eagerly, so that you
            can read and debug them; this is slow, and needs one replica per process.

    Returns:
        A `State`.

    Raises:
        ValueError: If an argument is wrong.

    Example:
        >>> import numpy as np
        >>> x, y = np.ones([8, 2], "float32"), np.zeros([8, 1], "float32")
        >>> def build():
        ...     return keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        >>> state = prepare_training(build, (x, y), "cpu", "sgd", global_batch=4)
        >>> state.replicas, len(state.variables)
        (1, 2)
    """
    strategy = _strategy(devices, sync)
    if not compiled and engine_of(strategy).placement.local_replicas > 1:
        raise ValueError(
            f"compiled: expected True with {engine_of(strategy).placement.local_replicas} "
            "replicas in a process, received False. In eager mode Python would run the replicas "
            'one after the other, and each would wait for the next. Pass devices="cpu" to debug a '
            "step, or start several workers."
        )
    with strategy.scope():
        user_model = _call_if_function(model, keras.layers.Layer)
        model = _model(user_model, strategy)
        user_optimizer = _optimizer(
            _call_if_function(optimizer, keras.optimizers.Optimizer),
            strategy,
            _weights(user_model),
            _weights(model),
        )
        learner = Learner(model, user_optimizer, eager=not compiled)
        if not learner.trainable_variables:
            raise ValueError(
                "model: expected a model with trainable variables; all of its variables are "
                "frozen, or it has none."
            )
        learner.optimizer.build(learner.trainable_variables)
    return State(
        strategy,
        model,
        learner.optimizer,
        _data(_call_if_function(data, tf.data.Dataset), global_batch),
        compiled,
        learner,
    )


def _call_if_function(value: Any, kind: type) -> Any:
    """Return the result of a function, or the object that was given instead."""
    return value() if callable(value) and not isinstance(value, kind) else value


def _strategy(devices: Any, sync: Any) -> tf.distribute.Strategy:
    if not isinstance(devices, tf.distribute.Strategy):
        strategy = make_strategy(devices=devices, sync=sync)
    elif sync is not None:
        raise ValueError(
            f"sync: expected None with a strategy, received {sync!r}. Pass it to "
            "tfdist.make_strategy(sync=...)."
        )
    else:
        strategy = devices
    if not isinstance(engine_of(strategy), Engine):
        raise ValueError(
            "devices: expected a synchronous strategy of tfdist.make_strategy, or devices; "
            f"received {type(strategy).__name__}. Under parameter_server, use model.fit."
        )
    return strategy


def _model(
    model: Any,
    strategy: tf.distribute.Strategy,
    name: str = "",
    owners: dict[int, tuple[str, bool]] | None = None,
) -> Any:
    """Return one model or several, made in the strategy's scope.

    Args:
        model: Model, or dict or list of models, that the user passed.
        strategy: Strategy of the training.
        name: Name of a model among several.
        owners: First model that has a variable, and whether it was made here, by the variable's id.
    """
    owners = {} if owners is None else owners
    if isinstance(model, dict):
        return {
            key: _model(part, strategy, f"{name}[{key!r}]", owners) for key, part in model.items()
        }
    if isinstance(model, list | tuple) and model:
        return [_model(part, strategy, f"{name}[{i}]", owners) for i, part in enumerate(model)]
    if not isinstance(model, keras.Model):
        raise ValueError(
            "model: expected a keras.Model, a dict or list of them, or a function that makes "
            f"one; received {model!r}."
        )
    if not model.built:
        raise ValueError(
            f"model: expected a built model; {model.name} has no variables yet. Add an Input "
            "layer, call model.build(shape), or call it once in the function that makes it."
        )
    in_scope = all(strategy.extended.variable_created_in_scope(v.value) for v in model.variables)
    for v in model.variables:
        other_name, other_in_scope = owners.setdefault(id(v), (name, in_scope))
        if other_name != name and not (in_scope and other_in_scope):
            raise ValueError(
                f"model: model{other_name} and model{name} share {v.path} and were made outside "
                "of the strategy's scope. Their copies in the scope would not share it. Pass the "
                "function that makes them."
            )
    return model if in_scope else _copy(model)


def _copy(model: keras.Model) -> keras.Model:
    """Return a copy of a model, made in the current scope."""
    try:
        copy = keras.models.clone_model(model)
        copy.set_weights(model.get_weights())
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"model: {model.name} was made outside of the strategy's scope, and cannot be copied: "
            f"{error} Pass the function that makes it."
        ) from error
    return copy


def _weights(models: Any) -> list[keras.Variable]:
    return [v for model in tf.nest.flatten(models) for v in model.trainable_variables]


def _optimizer(
    value: Any, strategy: tf.distribute.Strategy, variables: list, copies: list
) -> keras.optimizers.Optimizer:
    """Return the optimizer, made in the strategy's scope.

    Args:
        value: Optimizer or name that the user passed.
        strategy: Strategy of the training.
        variables: Trainable variables of the models that the user passed.
        copies: Variables of the models that are trained.
    """
    try:
        optimizer = keras.optimizers.get(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "optimizer: expected a Keras optimizer, its name, or a function that makes one; "
            f"received {value!r}."
        ) from error
    if optimizer is None:
        raise ValueError(
            "optimizer: expected a Keras optimizer, its name, or a function that makes one; "
            "received None."
        )
    if strategy_of(optimizer) is not strategy:
        if optimizer.built:
            raise ValueError(
                f"optimizer: {optimizer.name} was made outside of the strategy's scope and has "
                "trained another model. Pass a new one, or its name."
            )
        value = optimizer
        optimizer = type(optimizer).from_config(optimizer.get_config())
        copy_weight_decay_exclusions(
            getattr(value, "inner_optimizer", value),
            variables,
            getattr(optimizer, "inner_optimizer", optimizer),
            copies,
        )  # weight decay exclusions are not part of the config
    return optimizer


def _data(data: Any, global_batch: int | None) -> tf.data.Dataset:
    if global_batch is not None:
        return pipeline(data, global_batch)
    return check_batches(data, "data", " To batch examples or arrays, pass global_batch=.")


def check_batches(data: Any, name: str, remedy: str = "") -> tf.data.Dataset:
    """Return a data set whose batches can be split by rows.

    Args:
        data: Object that the user passed.
        name: Name of the argument, for messages.
        remedy: Further sentence for the message.

    Raises:
        ValueError: If it is not a `tf.data.Dataset`.
    """
    if not isinstance(data, tf.data.Dataset):
        raise ValueError(
            f"{name}: expected a tf.data.Dataset of global batches, such as tfdist.data.pipeline "
            f"makes; received {type(data).__name__}.{remedy}"
        )
    return data if hasattr(data, "replica_rows") else _even(data, name)


def _even(data: tf.data.Dataset, name: str) -> tf.data.Dataset:
    """Check in each batch that all leaves have equally many rows; replicas split by rows."""

    @plain
    def checked(*parts):
        leaves = [x for x in tf.nest.flatten(parts) if isinstance(x, tf.Tensor)]
        counts = [tf.shape(x)[0] for x in leaves if x.shape.rank != 0]
        if len(counts) < len(leaves):
            raise ValueError(
                f"{name}: expected batches of tensors [rows, ...]; one is a scalar. Call "
                "batch(global_batch) on a data set of examples."
            )
        message = (
            f"{name}: expected equally many rows in all parts of a batch. If a row has k "
            "examples, shape the part as [rows, k, ...]."
        )
        checks = [tf.debugging.assert_equal(count, counts[0], message) for count in counts[1:]]
        with tf.control_dependencies([c for c in checks if c is not None]):
            parts = tf.nest.map_structure(
                lambda x: tf.identity(x) if isinstance(x, tf.Tensor) else x, parts
            )
        return parts if len(parts) > 1 else parts[0]

    return data.map(checked)
