"""Gradient clipping by global norm, finiteness checks and loss scaling of sharded gradients.

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
from tfdist.parallel.collectives.group import FLOATS, Group
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
    own = [tf.reduce_sum(tf.square(tf.cast(g, tf.float32))) for g in grads]
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
def agreeing(
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
    stock: Callable = outer.check_finite
    outer.check_finite = lambda grads: true_on_all(
        group, stock([g for g in grads if g is not None]), "finite to the scale"
    )
    try:
        yield
    finally:
        del outer.check_finite


def scale(policy: Gradients, size: int) -> float:
    """Return the factor for a replica's gradient, applied before the sum.

    With an engine, each replica's gradient is already its term of the sum. In a process without an
    engine, it is the gradient of the mean over the process's own examples.

    Args:
        policy: Gradient policy whose `combine` is "mean" or "sum".
        size: Number of replicas.
    """
    alone = engine_of(tf.distribute.get_strategy()) is None and policy.combine == "mean"
    return 1.0 / size if alone else 1.0


def engine_in_step(strategy: tf.distribute.Strategy, who: str) -> Any:
    """Return the engine of a synchronous strategy whose replicas each hold the variables.

    Args:
        strategy: Any strategy.
        who: Name of the caller, for the error message.

    Raises:
        ValueError: The strategy has no engine, is not synchronous, or its replicas share one copy
            of the variables.
    """
    engine = engine_of(strategy)
    if engine is None:
        raise ValueError(
            f"{who}: expected to be called in the scope of a strategy of tfdist, or with "
            "strategy=; none is in charge here."
        )
    if isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy) or not hasattr(
        engine, "placement"
    ):
        raise ValueError(
            f"{who}: expected a strategy each of whose replicas has a copy of the variables, where "
            f"it keeps its part; received {type(strategy).__name__}, where all share one. Use the "
            "strategy mirrored or multi_worker_mirrored, or leave the state whole."
        )
    return engine


def checked_policy(given: Any, who: str, combine: Sequence[str], why: str) -> Gradients:
    """Return the policy if all replicas update one state with it; otherwise raise ValueError.

    Args:
        given: Policy or short name, as for `tfdist.sync.policy`.
        who: Name of the caller, for the error message.
        combine: Allowed values of the policy's `combine`.
        why: Reason why no other value is allowed, for the error message.

    Raises:
        ValueError: The policy is not a `tfdist.sync.Gradients`, its `combine` is not allowed, or
            it accumulates gradients over several steps.
    """
    found = policy(given)
    if not isinstance(found, Gradients) or found.combine not in combine:
        allowed = " or ".join(f'"{name}"' for name in combine)
        raise ValueError(
            f"{who}: sync: expected tfdist.sync.Gradients with combine={allowed}, as {why}; "
            f"received {given!r}."
        )
    if found.accumulate > 1:
        raise ValueError(
            f"{who}: sync.accumulate: one exchange for {found.accumulate} steps needs whole "
            "gradients on each replica meanwhile. Give the optimizer "
            f"gradient_accumulation_steps={found.accumulate} instead, which adds up each "
            "replica's part of the sum in each step."
        )
    return found


def check_variables(variables: Sequence[keras.Variable], who: str) -> None:
    """Raise ValueError if a variable's gradient cannot be summed over the replicas.

    Args:
        variables: Any variables.
        who: Name of the caller, for the error message.

    Raises:
        ValueError: A variable is overwritten by its gradient, or collectives cannot sum its dtype.
    """
    for v in variables:
        if getattr(v, "overwrite_with_gradient", False):
            raise ValueError(
                f"{who}: {v.path}: a variable that its gradient overwrites (float8 training) "
                "cannot be sharded."
            )
        if v.dtype not in FLOATS:
            raise ValueError(
                f"{who}: {v.path} has dtype {v.dtype}, expected one of {', '.join(FLOATS)}, which "
                "TensorFlow's collectives sum. Freeze it, or cast it."
            )


def check_clipping(policy: Gradients, optimizer: keras.optimizers.Optimizer, who: str) -> None:
    """Raise ValueError if both the policy and the optimizer clip gradients.

    Args:
        policy: Gradient policy.
        optimizer: Innermost optimizer.
        who: Name of the caller, for the error message.

    Raises:
        ValueError: The policy has a `clip_norm` and the optimizer clips too.
    """
    if policy.clip_norm and (
        optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue
    ):
        raise ValueError(
            f"{who}: sync.clip_norm and the optimizer's own clipping exclude each other; "
            "give one of them."
        )


def check_elementwise(optimizer: keras.optimizers.Optimizer, who: str = "zero") -> None:
    """Raise ValueError unless the optimizer updates each element independently.

    Args:
        optimizer: Any optimizer.
        who: Name of the caller, for the error message.

    Raises:
        ValueError: The optimizer is not elementwise, or this is not known because it is not one of
            Keras' own.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"{who}: a LossScaleOptimizer goes around it: "
            "keras.optimizers.LossScaleOptimizer(tfdist.parallel.zero(optimizer))."
        )
    kinds = (getattr(keras.optimizers, kind) for kind in ELEMENTWISE)
    if not any(
        isinstance(optimizer, kind) and type(optimizer).update_step is kind.update_step
        for kind in kinds
    ):
        raise ValueError(
            f"{who}: the optimizer {name} cannot be sharded: it looks at more than one element of "
            f"a variable, or is not Keras' own. Use one of {', '.join(ELEMENTWISE)}; or pass "
            f"{who}(..., elementwise=True) if {name}.update_step treats each element by itself."
        )
