"""Sparse gradients, which have rows for some indices alone: without duplicates, or dense."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def merge_duplicates(grad: Any) -> Any:
    """Sum the rows of a sparse gradient that belong to the same index.

    Keras' Adam, RMSprop and Adagrad square each row by itself. Without this sum, the result is a
    sum of squares in place of the square of the sum, and depends on how rows are spread over
    replicas.

    Args:
        grad: Gradient; a dense one, or None, is returned unchanged.
    """
    if not isinstance(grad, tf.IndexedSlices) or hasattr(grad.indices, "tfdist_distinct"):
        return grad
    indices, position = tf.unique(grad.indices)
    values = tf.math.unsorted_segment_sum(grad.values, position, tf.size(indices))
    return tf.IndexedSlices(values, indices, grad.dense_shape)


def mark_distinct(indices: tf.Tensor) -> tf.Tensor:
    """Mark indices of a sparse gradient as distinct; return them.

    `merge_duplicates` does not search these for duplicates.

    Args:
        indices: Indices without duplicates, `[n]`.
    """
    indices.tfdist_distinct = True
    return indices


def to_dense(grad: Any, length: int) -> Any:
    """Return a gradient with a row for each index; rows of the same index are summed.

    Args:
        grad: Gradient; a dense one, or None, is returned unchanged.
        length: Number of rows.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return grad
    return tf.math.unsorted_segment_sum(grad.values, grad.indices, length)
