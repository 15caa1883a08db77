"""Gradient clipping by global norm, finiteness checks, loss scaling of sharded gradients.

The results are the same as on one replica that holds all gradients. The module also checks
arguments for `zero` and `fsdp`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import engine_of
from tfdist.keras_compat.parallel import clip_elementwise
from tfdist.optimizers import LazyAdam
from tfdist.parallel.collectives.group import FLOATS, Group
from tfdist.parallel.replica_weight import Weight, gradient_factor
from tfdist.sync import Gradients, policy

# Optimizers whose update of an element depends only on the gradient and state of that element.
ELEMENTWISE = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lion",
    "Nadam",
    "RMSprop",
    "SGD",
)


def clip(
    group: Group, optimizer: keras.optimizers.Optimizer, grads: list, clip_norm: float | None = None
) -> list:
    """Clip gradients as the optimizer does, by norms over the parts of all replicas.

    Args:
        group: Group of all replicas.
        optimizer: Innermost optimizer.
        grads: This replica's parts of the gradients.
        clip_norm: Global norm limit of a `tfdist.sync` policy. None: the optimizer's
            `global_clipnorm`.
    """
    limit = clip_norm or optimizer.global_clipnorm
    if limit:
        norm = tf.sqrt(tf.reduce_sum(_squares(group, grads, "global norm")))
        grads = [g * tf.cast(limit / tf.maximum(norm, limit), g.dtype) for g in grads]
    if optimizer.clipnorm:
        norms = tf.sqrt(_squares(group, grads, "norms"))
        return [
            g * tf.cast(optimizer.clipnorm / tf.maximum(norms[i], optimizer.clipnorm), g.dtype)
            for i, g in enumerate(grads)
        ]
    return clip_elementwise(optimizer, grads) if optimizer.clipvalue else grads


def _squares(group: Group, grads: list, name: str) -> tf.Tensor:
    """Return the sum of squares of each gradient; float64 if a gradient is, else float32."""
    dtype = tf.float64 if any(g.dtype == tf.float64 for g in grads) else tf.float32
    own = [tf.reduce_sum(tf.square(tf.cast(g, dtype))) for g in grads]
    return group.all_reduce(tf.stack(own), name)


def true_on_all(group: Group, truth: tf.Tensor, name: str) -> tf.Tensor:
    """Return whether a condition is true on all replicas."""
    return group.all_reduce(tf.cast(truth, tf.float32), name, "Min") > 0.5


def finite_on_all(group: Group, grads: list) -> tf.Tensor:
    """Return whether all gradients are finite on all replicas."""
    return true_on_all(
        group, tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in grads]), "finite"
    )


@contextlib.contextmanager
def agree_on_finite(
    group: Group, outer: keras.optimizers.Optimizer, inner: keras.optimizers.Optimizer
) -> Iterator[None]:
    """Make a LossScaleOptimizer skip an update on all replicas or on none in this context.

    Args:
        group: Group of all replicas.
        outer: A LossScaleOptimizer, or `inner` itself.
        inner: Optimizer that takes parts of gradients.
    """
    if outer is inner:
        yield
        return
    original: Callable = outer.check_finite
    outer.check_finite = lambda grads: true_on_all(
        group, original([g for g in grads if g is not None]), "finite to the scale"
    )
    try:
        yield
    finally:
        del outer.check_finite


def scale(policy: Gradients, size: int) -> Weight:
    """Return the factor of a replica's gradients, which their sum over the replicas needs.

    In a process without an engine, the gradient is that of the mean over the process's own
    examples, and each process counts the same.

    Args:
        policy: Gradient policy whose `combine` is "mean" or "sum".
        size: Number of replicas.
    """
    if engine_of(tf.distribute.get_strategy()) is None:
        return 1.0 / size if policy.combine == "mean" else 1.0
    return gradient_factor(policy.combine, size)


def synchronous_engine(strategy: tf.distribute.Strategy, caller: str) -> Any:
    """Return the engine of a synchronous strategy whose replicas each hold the variables.

    Args:
        strategy: Any strategy.
        caller: Name of the caller, for the error message.

    Raises:
        ValueError: If the strategy has no engine, is not synchronous, or its replicas share one
            copy of the variables.
    """
    engine = engine_of(strategy)
    if engine is None:
        raise ValueError(
            f"{caller}: expected a strategy of tfdist, received none. Call it inside "
            "`with strategy.scope():`, or pass strategy=."
        )
    if isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy) or not hasattr(
        engine, "placement"
    ):
        raise ValueError(
            f"{caller}: expected a strategy whose replicas each have a copy of the variables, "
            f"received {type(strategy).__name__}, whose replicas share one. Use the strategy "
            f"mirrored or multi_worker_mirrored, or do not use {caller}."
        )
    return engine


def check_policy(given: Any, caller: str, combine: Sequence[str], reason: str) -> Gradients:
    """Return the policy if all replicas update one state with it; otherwise raise ValueError.

    Args:
        given: Policy or short name, as for `tfdist.sync.policy`.
        caller: Name of the caller, for the error message.
        combine: Allowed values of the policy's `combine`.
        reason: Reason why no other value is allowed, for the error message.

    Raises:
        ValueError: If the policy is not a `tfdist.sync.Gradients`, its `combine` is not allowed, or
            it accumulates gradients over several steps.
    """
    checked = policy(given)
    if not isinstance(checked, Gradients) or checked.combine not in combine:
        allowed = " or ".join(f'"{name}"' for name in combine)
        raise ValueError(
            f"{caller}: sync: expected tfdist.sync.Gradients with combine={allowed}, as {reason}; "
            f"received {given!r}."
        )
    if checked.accumulate > 1:
        raise ValueError(
            f"{caller}: sync.accumulate: expected 1, received {checked.accumulate}, which would "
            "keep whole gradients on each replica. Pass the optimizer "
            f"gradient_accumulation_steps={checked.accumulate} instead, which accumulates only "
            "each replica's part."
        )
    return checked


def check_variables(variables: Sequence[keras.Variable], caller: str) -> None:
    """Raise ValueError if a variable's gradient cannot be summed over the replicas.

    Args:
        variables: Any variables.
        caller: Name of the caller, for the error message.

    Raises:
        ValueError: If a variable is overwritten by its gradient, or collectives cannot sum its
            dtype.
    """
    for v in variables:
        if getattr(v, "overwrite_with_gradient", False):
            raise ValueError(
                f"{caller}: {v.path}: a variable that its gradient overwrites (float8 training) "
                "cannot be sharded."
            )
        if v.dtype not in FLOATS:
            raise ValueError(
                f"{caller}: {v.path}: expected one of the dtypes {', '.join(FLOATS)}, which "
                f"TensorFlow's collectives sum; received {v.dtype}. Freeze the variable, or cast "
                "it."
            )


def check_clipping(policy: Gradients, optimizer: keras.optimizers.Optimizer, caller: str) -> None:
    """Raise ValueError if both the policy and the optimizer clip gradients.

    Args:
        policy: Gradient policy.
        optimizer: Innermost optimizer.
        caller: Name of the caller, for the error message.

    Raises:
        ValueError: If the policy has a `clip_norm` and the optimizer clips too.
    """
    if policy.clip_norm and (
        optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue
    ):
        raise ValueError(
            f"{caller}: expected either sync.clip_norm or the optimizer's own clipping, received "
            "both. Remove one of them."
        )


def check_elementwise(optimizer: keras.optimizers.Optimizer, caller: str = "zero") -> None:
    """Raise ValueError unless the optimizer updates each element independently.

    Args:
        optimizer: Any optimizer.
        caller: Name of the caller, for the error message.

    Raises:
        ValueError: If the optimizer is not elementwise, or this is not known because it is not one
            of Keras' own.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"{caller}: expected an optimizer inside the LossScaleOptimizer. Write "
            "keras.optimizers.LossScaleOptimizer(tfdist.parallel.zero(optimizer))."
        )
    kinds = (LazyAdam, *(getattr(keras.optimizers, kind) for kind in ELEMENTWISE))
    if not any(
        isinstance(optimizer, kind) and type(optimizer).update_step is kind.update_step
        for kind in kinds
    ):
        raise ValueError(
            f"{caller}: the optimizer {name} cannot be sharded: it uses more than one element of a "
            f"variable, or is not one of Keras. Use one of {', '.join(ELEMENTWISE)}, or pass "
            f"{caller}(..., elementwise=True) if {name}.update_step updates each element "
            "independently."
        )
