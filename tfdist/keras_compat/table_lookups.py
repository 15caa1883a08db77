"""Lookups of rows in a variable: a step reads the rows of the batch, not the whole table.

`keras.ops.take(table, ids, axis=0)`, which `keras.layers.Embedding` calls, reads the variable and
takes rows of what it has read. TensorFlow copies a variable at each read if its rows are updated
one by one, so that a step would cost as much as the table is large. A dtype policy such as
"mixed_bfloat16" casts all of it, and makes its gradient dense. And a parameter server sends all of
it to the worker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import numpy as _keras_numpy
from tensorflow.python.distribute import values as _distribute_values

from tfdist.keras_compat.parallel import Sharded, has_value, have_values


def hook_lookups(in_strategy: Callable[[], bool]) -> None:
    """Make Keras take rows from the variable itself.

    Args:
        in_strategy: Function that tells whether the current strategy is one of tfdist.
    """
    original = _keras_numpy.take

    @functools.wraps(original)
    def take(x: Any, indices: Any, axis: int | None = None) -> Any:
        if not (isinstance(x, keras.Variable) and axis == 0 and in_strategy() and _is_read(x)):
            return original(x, indices, axis=axis)
        if isinstance(indices, tf.SparseTensor):
            indices = tf.sparse.to_dense(indices)  # Keras, too, takes row 0 for absent indices
        return tf.ragged.map_flat_values(functools.partial(_take, x), indices)

    _keras_numpy.take = take


def rows(table: keras.Variable, ids: tf.Tensor) -> tf.Tensor:
    """Return rows of a table, and read no others.

    Args:
        table: Table `[rows, width]`.
        ids: Ids from 0 to `rows - 1`, int32 or int64 of any shape.

    Returns:
        Rows `[..., width]`, in the dtype in which the current layer reads the table.
    """
    if not _is_read(table):
        return tf.gather(table.value, ids)
    if isinstance(table, Sharded):
        found = table.tfdist_store.look_up(table, ids)
    else:
        value = table._value
        if isinstance(value, _distribute_values.DistributedVariable):
            value = value._get()  # the replica's: of several copies tf.gather reads a whole one
        found = tf.gather(value, ids)
    return table._maybe_autocast(found)


def _is_read(table: keras.Variable) -> bool:
    """Return whether a table's rows can be read without the rest of it."""
    if have_values([table]):
        return False
    if isinstance(table, Sharded):
        return table.tfdist_store.looks_up(table)
    return has_value(table) and not (
        isinstance(table._value, _distribute_values.DistributedVariable)
        and tf.distribute.in_cross_replica_context()
    )


def _take(table: keras.Variable, indices: Any) -> tf.Tensor:
    """Return rows of a table at indices, of which negative ones count from its end."""
    indices = _keras_numpy.convert_to_tensor(indices)
    size = tf.cast(table.shape[0], indices.dtype)
    ids = tf.where(indices < 0, indices + size, indices)
    # `tf.gather` checks its indices itself.
    checks = [_check(table, ids)] if isinstance(table, Sharded) else []
    with tf.control_dependencies(checks):
        return rows(table, ids)


def _check(table: keras.Variable, ids: tf.Tensor) -> tf.Operation:
    lowest, highest = tf.reduce_min(ids), tf.reduce_max(ids)
    message = f"{table.path}: expected ids of its {table.shape[0]} rows; received these extremes:"
    return tf.debugging.Assert(
        (lowest >= 0) & (highest < tf.cast(table.shape[0], ids.dtype)), [message, lowest, highest]
    )
