"""Weights that a step sets without an optimizer, which must stay equal on all replicas.

A replica's gradients are those of its own rows. `optimizer.apply` sums them over the replicas. If a
step assigns them to a weight itself, each replica's copy of the weight gets another value, and
TensorFlow says nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_compat import layer_state
from tfdist.parallel.placement import Placement

_thread = threading.local()

# Relative difference of copies that rounding cannot explain.
_TOLERANCE = 1e-6


@contextlib.contextmanager
def noted_in(variables: dict[int, tf.Variable] | None) -> Iterator[None]:
    """Note in `variables`, by id, what this thread assigns to; None notes nothing.

    Variables with copies are noted. In a graph, they are noted when it is traced.
    """
    before = getattr(_thread, "variables", None)
    _thread.variables = variables
    try:
        yield
    finally:
        _thread.variables = before


def note(variable: tf.Variable) -> None:
    """Note that a variable is assigned to."""
    variables = getattr(_thread, "variables", None)
    if variables is not None:
        variables[id(variable)] = variable


def weights_among(variables: dict[int, tf.Variable], model: keras.Model) -> list[keras.Variable]:
    """Return those of the noted variables that are weights of a model, trainable or frozen.

    State of layers may differ between replicas, as moving statistics do, and sharded weights do.
    """
    state = {id(v) for v in layer_state(model)}
    return [
        v
        for v in model.weights
        if not hasattr(v, "tfdist_shape") and id(v.value) in variables and id(v) not in state
    ]


def check_equal(
    variables: list[keras.Variable], sums: np.ndarray, sizes: np.ndarray, placement: Placement
) -> None:
    """Raise ValueError where a variable has another value on a replica than on the first one.

    Args:
        variables: The variables.
        sums: A number that stands for each copy, `[replicas, variables]`.
        sizes: Bounds of the absolute values of these numbers, `[replicas, variables]`.
        placement: Numbers of workers and replicas.
    """
    for replica in range(1, len(sums)):
        differ = ~np.isclose(
            sums[replica], sums[0], rtol=0.0, atol=_TOLERANCE * sizes.max(0), equal_nan=True
        )
        if differ.any():
            worker = placement.task(replica // placement.local_replicas)
            raise ValueError(
                f"train_step set the weight {variables[int(differ.argmax())].path!r} to another "
                f"value on replica {replica} (of {worker}) than on replica 0. A replica's "
                "gradients are those of its own rows. Update weights with "
                "optimizer.apply(gradients, weights), which sums them over the replicas. For a "
                "state that may be averaged, use add_weight(trainable=False) of a layer."
            )
