"""Validation and evaluation of loss functions that users pass to `tfdist.loops`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

EXPECTED = (
    "a function loss(model, x, y) or loss(model, batch) that returns a scalar, or (a scalar, "
    "{name: scalar})"
)


def check_loss(loss: Any) -> None:
    """Raise ValueError if an object cannot be called as a loss function.

    Args:
        loss: Object that the user passed.

    Raises:
        ValueError: If it is not a function of a model and a batch.
    """
    keras_remedy = (
        "For a loss of Keras, pass lambda model, x, y: keras.losses.get(NAME)(y, model(x))."
    )
    if isinstance(loss, str | type) or not callable(loss):
        raise ValueError(f"loss: expected {EXPECTED}; received {loss!r}. {keras_remedy}")
    try:
        positional = _positional(loss)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    if "y_true" in inspect.signature(loss).parameters:
        raise ValueError(f"loss: expected {EXPECTED}; {_name(loss)} takes no model. {keras_remedy}")
    if positional < 2:
        raise ValueError(
            f"loss: expected {EXPECTED}; {_name(loss)}{inspect.signature(loss)} takes no batch "
            "beside the model."
        )


def value_of(
    loss: Callable, model: Any, batch: Any, training: bool
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Return the loss and the metrics for one replica's rows.

    Within the call, Keras' own losses are means over these rows.

    Args:
        loss: Loss function, see `EXPECTED`. If it has several arguments after the model, it gets
            the parts of a batch that is a tuple. If it has an argument `training`, it gets that
            too.
        model: First argument of the loss function.
        batch: Rows of this replica, `[replica_rows, ...]`.
        training: Whether the model trains on them.

    Returns:
        The loss, a scalar, and the metrics by name.

    Raises:
        ValueError: If the loss function takes or returns something else.
    """
    result = loss(
        model, *_parts(loss, batch), **({"training": training} if _takes_training(loss) else {})
    )
    value, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if (
        not isinstance(metrics, dict)
        or "loss" in metrics
        or not all(isinstance(name, str) for name in metrics)
    ):
        raise ValueError(
            f'loss: expected {EXPECTED}, no metric named "loss"; {_name(loss)} returned {result!r}.'
        )
    value = _scalar(loss, "the loss", value)
    if not value.dtype.is_floating:
        raise ValueError(
            f"loss: expected a scalar of a floating dtype; {_name(loss)} returned "
            f"{value.dtype.name}."
        )
    return value, {
        name: tf.cast(_scalar(loss, f"the metric {name}", x), tf.float32)
        for name, x in metrics.items()
    }


def _scalar(loss: Callable, name: str, value: Any) -> tf.Tensor:
    try:
        value = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"loss: expected {EXPECTED}; {_name(loss)} returned {value!r} as {name}."
        ) from error
    if value.shape.rank != 0:
        raise ValueError(
            f"loss: {_name(loss)} returned {name} of shape {value.shape}; expected a scalar, the "
            "mean over its rows: tf.reduce_mean(...)."
        )
    return value


def _parts(loss: Callable, batch: Any) -> tuple:
    """Return a batch as the arguments that the loss function takes after the model."""
    try:
        positional = _positional(loss)
        required = _positional(loss, required=True)
    except (TypeError, ValueError):
        return (batch,)
    if positional <= 2:
        return (batch,)
    if not isinstance(batch, tuple):
        raise ValueError(
            f"loss: {_name(loss)} takes {positional - 1} arguments after the model; expected a "
            f"batch that is a tuple, received {tf.nest.map_structure(_shape, batch)}."
        )
    if not required - 1 <= len(batch) <= positional - 1:
        raise ValueError(
            f"loss: {_name(loss)} takes {positional - 1} arguments after the model, but a batch "
            f"has {len(batch)} parts. Define loss(model, batch), or take as many arguments as "
            "there are parts."
        )
    return batch


def _positional(loss: Callable, required: bool = False) -> float:
    """Return the number of positional arguments of a loss function, including the model."""
    kinds = inspect.Parameter
    parameters = [p for p in inspect.signature(loss).parameters.values() if p.name != "training"]
    if not required and any(p.kind is kinds.VAR_POSITIONAL for p in parameters):
        return float("inf")
    return sum(
        p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        and not (required and p.default is not kinds.empty)
        for p in parameters
    )


def _takes_training(loss: Callable) -> bool:
    try:
        return "training" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return False


def _name(loss: Callable) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _shape(x: Any) -> Any:
    return getattr(x, "shape", x)
