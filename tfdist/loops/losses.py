"""A user's loss function and a batch become a scalar and metrics, or an error that says what was expected."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.train.synchronous.replica_step import own_means

EXPECTED = "a function loss(model, x, y) or loss(model, batch) that returns a scalar, or (a scalar, {name: scalar})"


def check_loss(loss: Any) -> None:
    """Makes sure that something can be called as a loss.

    Raises:
        ValueError: It cannot.
    """
    of_keras = "Of a loss of Keras: lambda model, x, y: keras.losses.get(NAME)(y, model(x))."
    if isinstance(loss, str | type) or not callable(loss):
        raise ValueError(f"loss: expected {EXPECTED}; received {loss!r}. {of_keras}")
    try:
        positional = _positional(loss)
    except (
        TypeError,
        ValueError,
    ):  # its signature is not known, as that of some functions written in C
        return
    if "y_true" in inspect.signature(loss).parameters:
        raise ValueError(f"loss: expected {EXPECTED}; {_name(loss)} takes no model. {of_keras}")
    if positional < 2:
        raise ValueError(
            f"loss: expected {EXPECTED}; {_name(loss)}{inspect.signature(loss)} takes no batch beside the model."
        )


def value_of(
    loss: Callable, model: Any, batch: Any, training: bool
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """What a loss gives for one replica's rows; Keras' own losses are means over these rows in it.

    Args:
        loss: See `EXPECTED`. One with several arguments after the model gets the parts of a batch that is a tuple. One with an argument `training` is
            told whether it trains.
        model: Its first argument.
        batch: Rows, `[replica_rows, ...]`.
        training: Whether it trains.

    Returns:
        The loss, and metrics by name.

    Raises:
        ValueError: It takes or returns something else.
    """
    with own_means():
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
            f"loss: expected a scalar of a floating dtype; {_name(loss)} returned {value.dtype.name}."
        )
    return value, {
        name: tf.cast(_scalar(loss, f"the metric {name}", x), tf.float32)
        for name, x in metrics.items()
    }


def _scalar(loss: Callable, what: str, value: Any) -> tf.Tensor:
    try:
        value = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"loss: expected {EXPECTED}; {_name(loss)} returned {value!r} as {what}."
        ) from error
    if value.shape.rank != 0:
        raise ValueError(
            f"loss: {_name(loss)} returned {what} of shape {value.shape}; expected a scalar, the mean over the rows that it was given: tf.reduce_mean(...)."
        )
    return value


def _parts(loss: Callable, batch: Any) -> tuple:
    """A batch as arguments."""
    try:
        positional, wanted = _positional(loss), _positional(loss, required=True)
    except (TypeError, ValueError):
        return (batch,)
    if positional <= 2:
        return (batch,)
    if not isinstance(batch, tuple):
        raise ValueError(
            f"loss: {_name(loss)} takes {positional - 1} arguments after the model, but a batch is no tuple: {tf.nest.map_structure(_shape, batch)}."
        )
    if not wanted - 1 <= len(batch) <= positional - 1:
        raise ValueError(
            f"loss: {_name(loss)} takes {positional - 1} arguments after the model, but a batch has {len(batch)} parts. Take (model, batch), or as many."
        )
    return batch


def _positional(loss: Callable, required: bool = False) -> float:
    """How many positional arguments it takes, the model's among them."""
    kinds = inspect.Parameter
    found = [p for p in inspect.signature(loss).parameters.values() if p.name != "training"]
    if not required and any(p.kind is kinds.VAR_POSITIONAL for p in found):
        return float("inf")
    return sum(
        p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        and not (required and p.default is not kinds.empty)
        for p in found
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
