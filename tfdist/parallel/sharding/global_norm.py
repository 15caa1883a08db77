"""Gradients of which each replica holds a part are clipped, checked and scaled as one replica would that held all of them."""

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

# Their update of each element depends on that element's gradient and state alone.
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
    """Clips as an optimizer does, by norms over all replicas' parts.

    Args:
        group: The replicas.
        optimizer: The innermost optimizer.
        grads: This replica's parts.
        clip_norm: Of a `tfdist.sync` policy.
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
    """Whether something is true on all replicas."""
    return group.all_reduce(tf.cast(truth, tf.float32), name, "Min") > 0.5


def finite_on_all(group: Group, grads: list) -> tf.Tensor:
    """Whether all parts of all gradients are numbers."""
    return true_on_all(
        group, tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in grads]), "finite"
    )


@contextlib.contextmanager
def agreeing(
    group: Group, outer: keras.optimizers.Optimizer, inner: keras.optimizers.Optimizer
) -> Iterator[None]:
    """Inside, an optimizer around another that scales the loss skips an update on all replicas or on none.

    Args:
        group: The replicas.
        outer: A LossScaleOptimizer, or `inner`.
        inner: The optimizer that takes parts.
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
    """What a replica's gradient is multiplied with before the sum.

    Under an engine each replica's gradient is its part of the sum; in a process without, that of its own examples' mean.

    Args:
        policy: Whose `combine` is "mean" or "sum".
        size: Number of replicas.
    """
    alone = engine_of(tf.distribute.get_strategy()) is None and policy.combine == "mean"
    return 1.0 / size if alone else 1.0


def engine_in_step(strategy: tf.distribute.Strategy, who: str) -> Any:
    """The engine of a strategy each of whose replicas has variables of its own, and makes each step with the others.

    Args:
        strategy: Any.
        who: For the message.

    Raises:
        ValueError: It is another one.
    """
    engine = engine_of(strategy)
    if engine is None:
        raise ValueError(
            f"{who}: expected to be called in the scope of a strategy of tfdist, or with strategy=; none is in charge here."
        )
    if isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy) or not hasattr(
        engine, "placement"
    ):
        raise ValueError(
            f"{who}: expected a strategy each of whose replicas has a copy of the variables, where it keeps its part; received {type(strategy).__name__}, "
            "where all share one. Use the strategy mirrored or multi_worker_mirrored, or leave the state whole."
        )
    return engine


def checked_policy(given: Any, who: str, combine: Sequence[str], why: str) -> Gradients:
    """Makes sure that a policy is one by which all replicas update one state.

    Args:
        given: As for `tfdist.sync.policy`.
        who: For the message.
        combine: What its `combine` may be.
        why: And nothing else.

    Raises:
        ValueError: It is not, or it is none.
    """
    found = policy(given)
    if not isinstance(found, Gradients) or found.combine not in combine:
        allowed = " or ".join(f'"{name}"' for name in combine)
        raise ValueError(
            f"{who}: sync: expected tfdist.sync.Gradients with combine={allowed}, as {why}; received {given!r}."
        )
    if found.accumulate > 1:
        raise ValueError(
            f"{who}: sync.accumulate: one exchange for {found.accumulate} steps needs whole gradients on each replica meanwhile. Give the optimizer "
            f"gradient_accumulation_steps={found.accumulate} instead, which adds up each replica's part of the sum in each step."
        )
    return found


def check_variables(variables: Sequence[keras.Variable], who: str) -> None:
    """Makes sure that variables' gradients can be summed over the replicas.

    Args:
        variables: Any.
        who: For the message.

    Raises:
        ValueError: Those of one cannot.
    """
    for v in variables:
        if getattr(v, "overwrite_with_gradient", False):
            raise ValueError(
                f"{who}: {v.path}: a variable that its gradient overwrites (float8 training) cannot be sharded."
            )
        if v.dtype not in FLOATS:
            raise ValueError(
                f"{who}: {v.path} has dtype {v.dtype}, expected one of {', '.join(FLOATS)}, which TensorFlow's collectives sum. Freeze it, or cast it."
            )


def check_clipping(policy: Gradients, optimizer: keras.optimizers.Optimizer, who: str) -> None:
    """Makes sure that gradients are clipped by one rule.

    Args:
        policy: The policy.
        optimizer: The innermost optimizer.
        who: For the message.
    """
    if policy.clip_norm and (
        optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue
    ):
        raise ValueError(
            f"{who}: sync.clip_norm and the optimizer's own clipping exclude each other; give one of them."
        )


def check_elementwise(optimizer: keras.optimizers.Optimizer, who: str = "zero") -> None:
    """Makes sure that an optimizer treats each element of a variable by itself.

    Args:
        optimizer: Any.
        who: For the message.

    Raises:
        ValueError: It does not, or nobody knows.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"{who}: a LossScaleOptimizer goes around it: keras.optimizers.LossScaleOptimizer(tfdist.parallel.zero(optimizer))."
        )
    kinds = (getattr(keras.optimizers, kind) for kind in ELEMENTWISE)
    if not any(
        isinstance(optimizer, kind) and type(optimizer).update_step is kind.update_step
        for kind in kinds
    ):
        raise ValueError(
            f"{who}: the optimizer {name} cannot be sharded: it looks at more than one element of a variable, or is not Keras' own. Use one of "
            f"{', '.join(ELEMENTWISE)}; or pass {who}(..., elementwise=True) if {name}.update_step treats each element by itself."
        )
