"""Lookups of rows in a variable: a step reads the rows of the batch, not the whole table.

`keras.ops.take(table, ids, axis=0)`, which `keras.layers.Embedding` calls, reads the variable and
takes rows of what it has read. A parameter server would send all of it to the worker. And
TensorFlow copies a variable at each read if single rows of it are updated, so that a step would
cost as much as the table is large. A gather from the variable copies nothing then. But after one,
TensorFlow copies the variable at each update as a whole, as those of Adam. So Keras' way is right
for these optimizers.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import values as _distribute_values

from tfdist.keras_compat.backend_modules import numpy as _keras_numpy
from tfdist.keras_compat.fused_updates import on_servers
from tfdist.keras_compat.parallel import Sharded, has_value, have_values

_state = threading.local()


def hook_lookups(in_strategy: Callable[[], bool]) -> None:
    """Make Keras take rows from the variable itself, where that is faster.

    Args:
        in_strategy: Function that tells whether the current strategy is one of tfdist.
    """
    original = _keras_numpy.take

    @functools.wraps(original)
    def take(x: Any, indices: Any, axis: int | None = None) -> Any:
        if not (isinstance(x, keras.Variable) and axis == 0 and in_strategy() and _by_rows(x)):
            return original(x, indices, axis=axis)
        indices = _keras_numpy.convert_to_tensor(indices, sparse=False)  # row 0 for absent ones
        return tf.ragged.map_flat_values(functools.partial(_take, x), indices)

    _keras_numpy.take = take


@contextlib.contextmanager
def tables_updated(by_rows: bool | None) -> Iterator[None]:
    """Tell how the tables are updated that are looked up in this context, in this thread.

    Args:
        by_rows: Whether an update computes on the rows of a batch, and not on the whole table; None
            if that is unknown.
    """
    before = getattr(_state, "by_rows", None)
    _state.by_rows = by_rows
    try:
        yield
    finally:
        _state.by_rows = before


def source(table: tf.Variable) -> tf.Variable | tf.Tensor:
    """Return what rows of a variable are gathered from: itself or its value.

    It is the value in a context `tables_updated(False)`.
    """
    return tf.convert_to_tensor(table) if getattr(_state, "by_rows", None) is False else table


def rows(table: keras.Variable, ids: tf.Tensor) -> tf.Tensor:
    """Return rows of a table.

    Args:
        table: Table `[rows, width]`.
        ids: Ids from 0 to `rows - 1`, int32 or int64 of any shape.

    Returns:
        Rows `[..., width]`, in the dtype in which the current layer reads the table.
    """
    return _gathered(table, ids) if _can_gather(table) else tf.gather(table.value, ids)


def check_range(ids: tf.Tensor, count: int, expected: str) -> tf.Operation:
    """Assert that ids are from 0 to `count - 1`.

    Args:
        ids: Ids of any shape and integer type.
        count: Number of rows.
        expected: Beginning of the message, which the lowest and the highest id follow.
    """
    lowest, highest = tf.reduce_min(ids), tf.reduce_max(ids)
    return tf.debugging.Assert(
        (lowest >= 0) & (highest < tf.cast(count, ids.dtype)), [expected, lowest, highest]
    )


def _by_rows(table: keras.Variable) -> bool:
    """Return whether Keras shall take rows from the variable, and not from its value."""
    return _can_gather(table) and (
        isinstance(table, Sharded)
        or on_servers()
        or (
            getattr(_state, "by_rows", None) is True
            and tf.as_dtype(table.dtype).is_floating  # GPUs gather from no variables of int8
            and table.regularizer is None  # which reads the whole table
        )
    )


def _can_gather(table: keras.Variable) -> bool:
    """Return whether rows of a table can be read without the rest of it."""
    if have_values([table]):
        return False
    if isinstance(table, Sharded):
        return table.tfdist_store.looks_up(table)
    return has_value(table) and not (
        isinstance(table._value, _distribute_values.DistributedVariable)
        and tf.distribute.in_cross_replica_context()
    )


def _take(table: keras.Variable, indices: tf.Tensor) -> tf.Tensor:
    """Return rows of a table at indices, of which negative ones count from its end."""
    if indices.dtype.is_integer and indices.dtype not in (tf.int32, tf.int64):
        indices = tf.cast(indices, tf.int64)  # a gather from a variable takes no others
    size = tf.cast(table.shape[0], indices.dtype)
    ids = tf.where(indices < 0, indices + size, indices)
    checks = []
    if isinstance(table, Sharded):  # else `tf.gather` checks its indices itself
        expected = (
            f"{table.path}: expected ids of its {table.shape[0]} rows; received these extremes:"
        )
        checks = [check_range(ids, table.shape[0], expected)]
    with tf.control_dependencies(checks):
        return _gathered(table, ids)


def _gathered(table: keras.Variable, ids: tf.Tensor) -> tf.Tensor:
    """Return rows of a table for which `_can_gather` is true."""
    if isinstance(table, Sharded):
        found = table.tfdist_store.look_up(table, ids)
    else:
        value = table._value
        if isinstance(value, _distribute_values.DistributedVariable):
            value = value._get()  # the replica's: of several copies tf.gather reads a whole one
        found = tf.gather(source(value), ids)
    return table._maybe_autocast(found)
