"""Layouts of `keras.distribution.ModelParallel`, honoured by sharding with `fsdp`."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from tfdist.keras_compat.parallel import Sharded
from tfdist.parallel.sharding.fsdp import fsdp
from tfdist.parallel.sharding.fsdp_unit import weights_of


def request(variable: keras.Variable, axes: Sequence[str | None]) -> None:
    """Note that a layout splits a variable; `shard` splits it if it is a model's weight.

    Args:
        variable: Variable that was made just now.
        axes: Axis of the mesh, or None, for each axis of the variable; not all None.
    """
    variable.tfdist_layout = tuple(axes)


def shard(model: keras.Model) -> None:
    """Shard the weights of a model if layouts split some of them; call it before `compile`.

    All weights are sharded over all replicas, whichever axes the layouts name, and before another
    `compile` those that layers got since, as by `enable_lora`.

    Raises:
        ValueError: If a layout has another number of axes than its weight, or splits state, which
            `fsdp` leaves whole.
    """
    asked = _asked(model)
    if not asked:
        return
    weights = {id(v) for v in weights_of(model)}
    for v in asked:
        if len(v.tfdist_layout) != len(v.shape):
            raise ValueError(
                f"layout of the variable {v.path!r}: expected {len(v.shape)} axes, as its shape "
                f"{tuple(v.shape)} has, received {v.tfdist_layout}."
            )
        if id(v) not in weights:
            raise ValueError(
                f"layout of the variable {v.path!r}: expected None for all axes, received "
                f"{v.tfdist_layout}: on TensorFlow, each device holds state and integers whole. "
                "Take it out of the LayoutMap."
            )
    store = next((v.tfdist_store for v in model.weights if isinstance(v, Sharded)), None)
    if store is None:
        fsdp(model)
    else:
        store.shard_added_weights()


def check(model: keras.Model) -> None:
    """Raise ValueError if layouts split weights of a model that `shard` has not seen."""
    if late := [v for v in _asked(model) if not isinstance(v, Sharded)]:
        raise ValueError(
            f"layout of the variable {late[0].path!r}: the model {model.name!r} had no such weight "
            "when compile() was called, and each device would hold it whole. Begin the model with "
            "keras.Input, or call model.build(input_shape), and then compile()."
        )


def _asked(model: keras.Model) -> list[keras.Variable]:
    return [v for v in model.weights if hasattr(v, "tfdist_layout")]
