"""Flat shards of tensors, one of equal length for each replica, and buckets of tensors.

These functions are pure: `group` and `bucketing` have the collectives that exchange the shards.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import tensorflow as tf


def length(elements: int, replicas: int) -> int:
    """Return the number of elements of a replica's row; the last row is padded with zeros.

    Args:
        elements: Number of elements of the tensor.
        replicas: Number of rows.

    >>> length(10, 4)
    3
    """
    return -(-elements // replicas)


def elements(shape: Sequence[int | None]) -> int:
    """Return the number of elements of a tensor of this shape.

    Raises:
        ValueError: If a dimension is not known.

    >>> elements((2, 3)), elements(())
    (6, 1)
    """
    count = tf.TensorShape(shape).num_elements()
    if count is None:
        raise ValueError(f"expected a shape that is known, received {tuple(shape)}")
    return count


def to_rows(x: tf.Tensor, replicas: int) -> tf.Tensor:
    """Reshape a tensor into one row for each replica.

    Args:
        x: Tensor of any known shape.
        replicas: Number of rows.

    Returns:
        Tensor `[replicas, length]`, padded with zeros at the end.

    >>> to_rows(tf.constant([[1, 2], [3, 4], [5, 6]]), 4).numpy().tolist()
    [[1, 2], [3, 4], [5, 6], [0, 0]]
    """
    count = elements(x.shape)
    flat = tf.reshape(x, [-1])
    part = length(count, replicas)
    if missing := replicas * part - count:
        flat = tf.pad(flat, [[0, missing]])
    return tf.reshape(flat, [replicas, part])


def row(rows: tf.Tensor, number: int) -> tf.Tensor:
    """Return a copy of one row.

    A slice shares the memory of all rows, and would keep it alive. `tf.raw_ops.DeepCopy` would also
    wait for the stateful operations before it.

    Args:
        rows: Rows `[replicas, length]`, as from `to_rows`.
        number: Number of the row.

    >>> row(tf.constant([[1, 2], [3, 0]]), 1).numpy().tolist()
    [3, 0]
    """
    return tf.gather(rows, number)


def from_rows(rows: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Restore a tensor from its rows and drop their padding.

    Args:
        rows: Rows `[replicas, length]`, as from `to_rows`.
        shape: Shape of the tensor.

    >>> from_rows(tf.constant([[1, 2], [3, 0]]), (3,)).numpy().tolist()
    [1, 2, 3]
    """
    flat = tf.reshape(rows, [-1])
    count = elements(shape)
    return tf.reshape(flat if flat.shape[0] == count else flat[:count], tf.TensorShape(shape))


def buckets(sizes: Sequence[int], kinds: Sequence[Hashable], limit: int) -> list[list[int]]:
    """Group neighbouring tensors into buckets, from the last tensor to the first.

    A backward pass computes gradients in this order, so that the first buckets are complete first.

    Args:
        sizes: Size of each tensor in bytes.
        kinds: Key of each tensor that must be equal within a bucket, such as the dtype.
        limit: Maximum size of a bucket in bytes; a larger tensor has a bucket for itself.

    Returns:
        Buckets, each the indices of its tensors.

    >>> buckets([8, 2, 2, 9, 3], ["a", "a", "a", "a", "b"], 10)
    [[4], [3], [2, 1], [0]]
    """
    result: list[list[int]] = []
    filled = 0
    for i in reversed(range(len(sizes))):
        if result and kinds[result[-1][0]] == kinds[i] and filled + sizes[i] <= limit:
            result[-1].append(i)
            filled += sizes[i]
        else:
            result.append([i])
            filled = sizes[i]
    return result
