"""Step of one replica: the model's `train_step` on its rows of the batch.

Keras gives each replica's mean loss the weight 1/replicas. That is right only for Keras' own
losses, and only where all replicas hold the same number of rows. Here a loss on a replica is the
plain mean over its rows, and gradients, metrics and logs get the replica's weight, its rows over
those of the global batch (see `replica_weight`). A replica without rows does not change metrics or
moving statistics. This module creates no variables and reads no batches.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.data.batch_rows import count_rows
from tfdist.keras_compat import (
    combined_weight,
    device_type,
    engine_of,
    is_compiled_by_xla,
    layer_state,
    local_component,
    metric_variables,
    python_of,
    scale_loss_for_distribution,
)
from tfdist.keras_compat.global_generator import SEED_STRIDE
from tfdist.keras_compat.table_lookups import tables_updated
from tfdist.parallel.placement import Placement
from tfdist.parallel.replica_weight import Weight, has_all_rows, step_weight, weighted_step
from tfdist.parallel.sharding.step_products import taking_gradients
from tfdist.train.synchronous.feed import Batch, replica_rows
from tfdist.train.synchronous.gathered_metrics import is_gathered

log = logging.getLogger("tfdist")

_traced = threading.local()  # compiled: whether XLA compiles the function that is traced


def run_replica(
    step: Callable,
    model: keras.Model,
    batch: Batch,
    placement: Placement,
    host: str,
    even: bool,
    combine: Any = "mean",
) -> Any:
    """Run `step` on this replica's rows; called in replica context.

    Args:
        step: `model.train_step`, `test_step` or `predict_step`.
        model: The model, for its metrics, seeds and moving statistics.
        batch: Batch of this worker.
        placement: Numbers of workers and replicas.
        host: CPU device name.
        even: Whether all replicas are known to have the same number of rows.
        combine: `combine` of the `tfdist.sync.Gradients` policy of the step.

    Returns:
        The result of `step`.

    Raises:
        ValueError: If replicas would meet in a branch or a loop of the step.
    """
    by_rows = engine_of(tf.distribute.get_strategy()).updates_rows(model)
    with tables_updated(by_rows):
        if placement.replicas == 1:
            return step(replica_rows(batch, 0, placement, host))
        with meetings_explained():
            return _run_replica(step, model, batch, placement, host, even, combine)


def _run_replica(
    step: Callable, model: keras.Model, batch: Batch, placement: Placement, host: str, even: bool,
    combine: Any,
) -> Any:  # fmt: skip
    context = tf.distribute.get_replica_context()
    replica = context.replica_id_in_sync_group
    local = local_replica(placement)
    data = replica_rows(batch, local, placement, host, even)
    if even:
        weight: Weight = 1.0 / placement.replicas
        with weighted_step(weight, combine), _own_seeds(model, replica, local):
            return step(data)
    rows = count_rows(data)
    total = context.all_reduce("SUM", rows) if batch.rows is None else batch.rows
    weight = tf.math.divide_no_nan(tf.cast(rows, tf.float64), tf.cast(total, tf.float64))
    with weighted_step(weight, combine), _own_seeds(model, replica, local):
        with _unchanged_if(tf.equal(rows, 0), model, local):
            return step(data)


def local_replica(placement: Placement) -> int:
    """Return the index, among this process' replicas, of the one in whose context this runs."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return int(tf.get_static_value(replica)) % placement.local_replicas


def call_function(tf_method: Callable, function: Any, *args, **kwargs) -> Any:
    """Call what `tf.function` returned; in a step, as a part of the step's own graph.

    In a graph of its own the replicas could not meet, as they do in `optimizer.apply`, and their
    weights would be those of the step in which the function was traced first. A function that XLA
    compiles keeps its own graph, see `check_not_compiled`.
    """
    if is_compiled_by_xla(function):
        before = getattr(_traced, "compiled", False)
        _traced.compiled = not tf.config.functions_run_eagerly()
        try:
            return tf_method(function, *args, **kwargs)
        finally:
            _traced.compiled = before
    if step_weight() is None:
        return tf_method(function, *args, **kwargs)
    return python_of(function)(*args, **kwargs)


def check_not_compiled(optimizer: keras.optimizers.Optimizer, placement: Placement) -> None:
    """Raise ValueError if XLA compiles an update of CPUs that the caller's own loop makes."""
    if (
        getattr(_traced, "compiled", False)
        and step_weight() is None
        and placement.replicas > 1
        and device_type(tf.distribute.get_strategy()) == "CPU"
    ):
        raise ValueError(
            f"{optimizer.name}.apply: expected a function without jit_compile=True, in which "
            f"{placement.replicas} replicas can sum their gradients, received one that XLA "
            "compiles. Compile the computation of the loss and the gradients alone, or call "
            "fit() of a model with compile(jit_compile=True)."
        )


def gradient(
    tf_method: Callable,
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return the gradients of a tape; warn if they may be those of a sum over rows.

    TensorFlow's gradient of a vector is that of its sum. A replica's sum over its own rows counts
    as a mean, and cannot be told from other vectors, whose gradients are right.
    """
    if (
        step_weight() is not None
        and output_gradients is None
        and any(hasattr(x, "handle") for x in tf.nest.flatten(sources))  # variables
    ):
        for x in tf.nest.flatten(target):
            if isinstance(x, tf.Tensor) and x.shape.rank and x.shape.num_elements() != 1:
                _warn_of_sum(str(x.shape))
    with taking_gradients():
        return tf_method(tape, target, sources, output_gradients, *args, **kwargs)


@functools.cache  # once for each shape
def _warn_of_sum(shape: str) -> None:
    log.warning(
        "train_step takes the gradient of a tensor of shape %s with respect to variables: that of "
        "the tensor's sum. If the tensor has a loss for each row, N replicas make the gradient too "
        "small by a factor of N. Take the gradient of tf.reduce_mean(tensor), which is that of one "
        "replica, times a constant if you need a sum.",
        shape,
    )


@contextlib.contextmanager
def meetings_explained() -> Iterator[None]:
    """Explain TensorFlow's error of replicas that meet in a graph within the graph of a step."""
    try:
        yield
    except RuntimeError as error:
        if "called while defining a new graph" not in str(error):
            raise
        raise ValueError(
            "train_step, or the function that strategy.run() calls, has optimizer.apply, or "
            "something else in which replicas exchange tensors, in tf.cond, tf.while_loop or a "
            "tf.function with jit_compile=True: expected it in the step itself. To update the "
            "weights only every few steps, use the optimizer's gradient_accumulation_steps, or "
            "sync.accumulate of tfdist.make_strategy(sync=...). To leave out an update, apply "
            "gradients of zeros."
        ) from error


# --- Losses and means of one replica --------------------------------------------------------------
def scale_loss(keras_function: Callable, value):
    """Return the loss as it is in a step; elsewhere scale it by 1/replicas, as Keras does."""
    return keras_function(value) if step_weight() is None else value


def unscale_loss(keras_function: Callable, value):
    """Invert `scale_loss`."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1 and value.shape.rank:
        raise ValueError(
            f"The loss has shape {value.shape}, expected a scalar: a loss with reduction=None has "
            f"no mean that {replicas} replicas "
            'could share. Use the default reduction "sum_over_batch_size".'
        )
    return scale_loss(keras_function, value)


def reduce_weighted_values(
    keras_function: Callable,
    values,
    sample_weight=None,
    mask=None,
    reduction="sum_over_batch_size",
    dtype=None,
):
    """Return a loss whose mean, weighted by rows, is the loss of the global batch.

    Keras' own mean over a replica's rows is such a loss. A mean whose divisor depends on the data
    (a mask, or "mean_with_sample_weight") needs the divisor of the whole batch: one scalar
    all-reduce, paid only by such losses. A sum is divided by the replica's weight.
    """
    loss = keras_function(values, sample_weight, mask, reduction, dtype)
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas == 1 or reduction in (None, "none") or has_all_rows():
        return loss
    if loss.shape == (0,):  # in a step that runs eagerly, Keras does not reduce the loss of no rows
        loss = tf.reduce_sum(loss)
    weight = step_weight()
    if reduction == "sum":
        return loss if weight is None else _divided(loss, weight)
    if tf.convert_to_tensor(values).shape.rank == 0:
        # The user's own function reduced the loss. Keras scales only what it reduces itself.
        return scale_loss_for_distribution(loss)
    masked = mask is not None and reduction in ("sum_over_batch_size", "mean")
    weighted = reduction == "mean_with_sample_weight" and (
        mask is not None or sample_weight is not None
    )
    if not (masked or weighted):
        return loss
    weights = mask if masked else combined_weight(sample_weight, mask, loss.dtype, reduction)
    own = tf.reduce_sum(tf.cast(weights, loss.dtype))
    total = tf.distribute.get_replica_context().all_reduce("SUM", own)
    # Keras divided by `own`, and outside of a step by the number of replicas too. The mean over all
    # replicas divides by `total`.
    part = loss * tf.math.divide_no_nan(own, total)
    return part * replicas if weight is None else _divided(part, weight)


def update_mean(keras_method: Callable, metric: keras.metrics.Mean, values, sample_weight=None):
    """Update a running mean by this replica's values; a scalar counts as the mean of its rows.

    On one replica a scalar without a weight counts once for each step. Here the weights of all
    replicas' scalars add up to one. A list of scalars is several of them.
    """
    weight = step_weight()
    if weight is not None and sample_weight is None:
        if _is_scalar(values):
            sample_weight = weight
        elif isinstance(values, list | tuple) and all(_is_scalar(x) for x in values):
            sample_weight = tf.fill([len(values)], weight)
    return keras_method(metric, values, sample_weight=sample_weight)


def _divided(value, weight):
    """Return the value over the weight; 0 for the weight 0."""
    return tf.math.divide_no_nan(value, tf.cast(weight, value.dtype))


def _is_scalar(value: Any) -> bool:
    return not tf.nest.is_nested(value) and tf.convert_to_tensor(value).shape.rank == 0


# --- Random seeds and state of one replica --------------------------------------------------------
def seed_states(model: keras.Model) -> list[keras.Variable]:
    """Return the states of the model's seed generators.

    These are the non-trainable variables that are neither weights nor metrics.
    """
    known = {id(v) for v in (*model.weights, *metric_variables(model))}
    return [
        v for v in model.non_trainable_variables if id(v) not in known and tuple(v.shape) == (2,)
    ]


def moving_state(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that a forward pass may change on each replica by itself.

    BatchNormalization's statistics are an example. Frozen weights are not included.
    """
    return [v for v in layer_state(model) if v.dtype.startswith(("float", "bfloat"))]


@contextlib.contextmanager
def _own_seeds(model: keras.Model, replica, local: int) -> Iterator[None]:
    """Shift the seeds by replica while a step runs.

    Dropout masks then differ between replicas. Outside of the step every replica holds the same
    state, so a snapshot serves any number of replicas.
    """
    states = [local_component(v, local) for v in seed_states(model)]
    shifts = [tf.cast(tf.stack([replica * SEED_STRIDE, 0]), v.dtype) for v in states]
    for state, shift in zip(states, shifts, strict=True):
        state.assign(state + shift)
    yield
    for state, shift in zip(states, shifts, strict=True):
        state.assign(state - shift)


@contextlib.contextmanager
def _unchanged_if(empty, model: keras.Model, local: int) -> Iterator[None]:
    """Restore metrics and non-finite statistics after a step on no rows.

    Statistics over no rows are NaN. Synchronized statistics are those of the whole batch, and stay.
    """
    of_metrics = metric_variables(model)
    metrics = [local_component(v, local) for v in of_metrics]
    moving = [local_component(v, local) for v in moving_state(model)]
    before = [tf.identity(v) for v in (*metrics, *moving)]
    yield

    def restore():
        for whole, v, old in zip(of_metrics, metrics, before, strict=False):
            if not is_gathered(whole):  # those were updated by the other replicas' rows
                v.assign(old)
        for v, old in zip(moving, before[len(metrics) :], strict=True):
            v.assign(tf.where(tf.math.is_finite(v), v, old))

    tf.cond(empty, restore, lambda: None)
