"""Probes of a training step: row fingerprints, gradient norms, and switched-off dropout.

The probes also work in compiled steps.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_MIX = (
    -0x61C8864680B583EB,
    -0x40A7B892E31B1A47,
    -0x6B2FB644ECCEEE15,
)  # constants of splitmix64, as int64


class Probe:
    """Rows and gradient norms that one process observed in the last step.

    Args:
        first_replica: Index of the first replica of this process. Only its gradients are kept,
            because all replicas have the same sums.
    """

    def __init__(self, first_replica: int):
        self._first = first_replica
        self._lock = threading.Lock()  # each replica runs in a thread of its own
        self._rows: dict[int, np.ndarray] = {}
        self._gradients: dict[int, float] = {}

    def see_rows(self, data: Any) -> None:
        """Record a fingerprint of each row that a replica received.

        Call it in replica context, while a step is traced or run eagerly.

        Args:
            data: Batch of the replica, a nest of tensors `[rows, ...]`.
        """

        def keep(replica, rows):
            with self._lock:
                self._rows[int(replica)] = rows

        with tf.device("/cpu:0"):
            tf.numpy_function(keep, [_replica(), fingerprints(data)], [])

    def see_gradients(
        self, gradients: Sequence[Any], variables: Sequence[keras.Variable] | None
    ) -> None:
        """Record the norms of the gradients, summed over the replicas, before clipping.

        Args:
            gradients: Summed gradients; None for variables without one.
            variables: Variables of the gradients. None: norms are recorded by index.
        """
        known = [
            (index if variables is None else id(variables[index]), g)
            for index, g in enumerate(gradients)
            if g is not None
        ]
        names = [name for name, _ in known]

        def keep(replica, norms):
            if int(replica) == self._first:
                with self._lock:
                    self._gradients.update(zip(names, norms.tolist(), strict=True))

        if known:
            norms = [
                tf.norm(tf.cast(g.values if isinstance(g, tf.IndexedSlices) else g, tf.float64))
                for _, g in known
            ]
            with tf.device("/cpu:0"):
                tf.numpy_function(keep, [_replica(), tf.stack(norms)], [])

    def take(self) -> tuple[np.ndarray, dict[int, float]]:
        """Return and clear what was recorded.

        Returns:
            The fingerprints of this process's rows in the order of its replicas, and the gradient
            norms by the id, or the index, of their variable.
        """
        with self._lock:
            rows = [self._rows[replica] for replica in sorted(self._rows)]
            recorded = np.concatenate(rows) if rows else np.zeros(0, np.int64), self._gradients
            self._rows = {}
            self._gradients = {}
        return recorded


def fingerprints(data: Any) -> tf.Tensor:
    """Return a hash of each row of a batch. Different rows very likely differ in it.

    Args:
        data: Nest of tensors `[rows, ...]`, including ragged and sparse ones.

    Returns:
        Hashes, int64 `[rows]`. The hash of a row does not depend on the other rows. Empty if the
        batch has no such tensors.

    Example:
        >>> a, b, c = fingerprints(
        ...     (tf.constant([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]]), tf.constant(["x", "y", "x"]))
        ... ).numpy()
        >>> bool(a == c), bool(a == b)
        (True, False)
    """
    hashes = [
        _of_rows(x, index) for index, x in enumerate(tf.nest.flatten(data), start=1) if _has_rows(x)
    ]
    return tf.add_n(hashes) if hashes else tf.zeros([0], tf.int64)


def _has_rows(x: Any) -> bool:
    return isinstance(x, tf.RaggedTensor | tf.SparseTensor) or (
        isinstance(x, tf.Tensor) and x.shape.rank != 0
    )


def _of_rows(x: Any, index: int) -> tf.Tensor:
    """Return a hash of each row of a tensor; `index` is the tensor's index in its batch."""
    if isinstance(x, tf.RaggedTensor):
        rows = x.value_rowids()
        numbers = _of_rows(x.values, index)
        columns = tf.range(tf.size(rows, rows.dtype), dtype=rows.dtype) - tf.gather(
            x.row_starts(), rows
        )
        return tf.math.unsorted_segment_sum(
            _mixed(numbers + _mixed(tf.cast(columns, tf.int64) + index * 2**40)), rows, x.nrows()
        )
    if isinstance(x, tf.SparseTensor):
        rows = x.indices[:, 0]
        axes = tf.range(1, tf.shape(x.indices, tf.int64)[1], dtype=tf.int64)
        columns = tf.reduce_sum(_mixed(x.indices[:, 1:] + axes * 2**40), axis=1)
        return tf.math.unsorted_segment_sum(
            _mixed(_integers(x.values) + _mixed(columns + index * 2**40)), rows, x.dense_shape[0]
        )
    shape = tf.shape(x)
    numbers = tf.reshape(_integers(x), [shape[0], tf.reduce_prod(shape[1:])])
    columns = tf.range(tf.shape(numbers, tf.int64)[1], dtype=tf.int64)
    return tf.reduce_sum(_mixed(numbers + _mixed(columns + index * 2**40)), axis=1)


def _integers(x: tf.Tensor) -> tf.Tensor:
    if x.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(x, 2**62)
    if x.dtype.is_floating:
        return tf.bitcast(tf.cast(x, tf.float64), tf.int64)
    return tf.cast(x, tf.int64)


def _mixed(x: tf.Tensor) -> tf.Tensor:
    """Map neighbouring integers to distant ones, as splitmix64 does."""
    x = x + _MIX[0]
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
        x = (
            tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(shift, tf.int64)))
            * factor
        )
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(31, tf.int64)))


def _replica() -> Any:
    context = tf.distribute.get_replica_context()
    return tf.constant(0) if context is None else context.replica_id_in_sync_group


def reverse(data: Any) -> Any:
    """Reverse the rows of a batch.

    If a part of the batch cannot be reversed, the whole batch is returned unchanged. Inputs paired
    with the labels of other rows would be a different training.
    """
    if not all(
        isinstance(x, tf.Tensor | tf.RaggedTensor | tf.SparseTensor) for x in tf.nest.flatten(data)
    ):
        return data
    return tf.nest.map_structure(_reversed, data)


def _reversed(x: Any) -> Any:
    if isinstance(x, tf.SparseTensor):
        rows = x.dense_shape[0] - 1 - x.indices[:, :1]
        other = tf.sparse.reorder(
            tf.SparseTensor(tf.concat([rows, x.indices[:, 1:]], axis=1), x.values, x.dense_shape)
        )
        other.set_shape(x.shape)
        return other
    return x[::-1] if _has_rows(x) else x


def first_rows(data: Any, count: int) -> Any:
    """Return the first rows of a batch.

    Args:
        data: Nest of tensors `[rows, ...]`, including ragged and sparse ones. A scalar stays.
        count: Number of rows.

    Example:
        >>> first_rows((tf.constant([1, 2, 3]), tf.constant(7)), 2)[0].numpy().tolist()
        [1, 2]
    """

    def of(x):
        if isinstance(x, tf.SparseTensor):
            shape = tf.concat([[tf.cast(count, tf.int64)], x.dense_shape[1:]], 0)
            return tf.sparse.slice(x, tf.zeros_like(shape), shape)
        return x[:count] if _has_rows(x) else x

    return tf.nest.map_structure(of, data)


def disable_dropout_and_noise(model: keras.Model) -> list[str]:
    """Switch off dropout and noise in all layers of a model, including nested ones.

    Returns:
        The names of the layers that were changed. Layers whose dropout or noise was already 0 are
        not among them.
    """
    changed = []
    for layer in layers_of(model):
        dropout = any(
            "Dropout" in kind.__name__ or "GaussianNoise" in kind.__name__
            for kind in type(layer).__mro__
        )
        for name in ("dropout", "recurrent_dropout", *(("rate", "stddev") if dropout else ())):
            if (
                isinstance(layer, keras.Model)
                or not isinstance(getattr(layer, name, None), int | float)
                or not getattr(layer, name)
            ):
                continue
            try:
                setattr(layer, name, 0.0)
            except AttributeError:  # a read-only property that mirrors an inner layer
                continue
            changed.append(layer.name)
    return list(dict.fromkeys(changed))


def layers_of(layer: keras.Layer) -> list[keras.Layer]:
    """Return a layer and all layers within it at any depth, each once."""
    layers: list[keras.Layer] = []
    left: list[Any] = [layer]
    known: set[int] = set()
    while left:
        each = left.pop(0)
        if id(each) in known:
            continue
        if isinstance(each, keras.Layer):
            layers.append(each)
            left.extend(vars(each).values())
        elif isinstance(each, list | tuple | set):
            left.extend(each)
        elif isinstance(each, dict):
            left.extend(each.values())
        else:
            continue
        known.add(id(each))  # the owner keeps the object alive, so its id is not reused
    return layers
