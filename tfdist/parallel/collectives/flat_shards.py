"""Tensors become rows of equal length, one for each replica, and back; buckets say which tensors travel together. No collectives here."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import tensorflow as tf


def length(elements: int, replicas: int) -> int:
    """Elements of a replica's part, the last ones padded with zeros.

    >>> length(10, 4)
    3
    """
    return -(-elements // replicas)


def elements(shape: Sequence[int | None]) -> int:
    """Elements of a tensor.

    Raises:
        ValueError: A dimension is not known.

    >>> elements((2, 3)), elements(())
    (6, 1)
    """
    count = tf.TensorShape(shape).num_elements()
    if count is None:
        raise ValueError(f"expected a shape that is known, received {tuple(shape)}")
    return count


def to_rows(x: tf.Tensor, replicas: int) -> tf.Tensor:
    """A tensor as one row for each replica.

    Args:
        x: Any shape that is known.
        replicas: Rows.

    Returns:
        `[replicas, length]`, padded with zeros at the end.

    >>> to_rows(tf.constant([[1, 2], [3, 4], [5, 6]]), 4).numpy().tolist()
    [[1, 2], [3, 4], [5, 6], [0, 0]]
    """
    count = elements(x.shape)
    flat, part = tf.reshape(x, [-1]), length(count, replicas)
    if missing := replicas * part - count:
        flat = tf.pad(flat, [[0, missing]])
    return tf.reshape(flat, [replicas, part])


def from_rows(rows: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """The tensor whose rows these are.

    Args:
        rows: `[replicas, length]`, as of `to_rows`.
        shape: Of the tensor.

    >>> from_rows(tf.constant([[1, 2], [3, 0]]), (3,)).numpy().tolist()
    [1, 2, 3]
    """
    flat, count = tf.reshape(rows, [-1]), elements(shape)
    return tf.reshape(flat if flat.shape[0] == count else flat[:count], tf.TensorShape(shape))


def buckets(sizes: Sequence[int], kinds: Sequence[Hashable], limit: int) -> list[list[int]]:
    """Which tensors travel together: neighbours, from the last to the first, as backward computes them.

    Args:
        sizes: Bytes of each tensor.
        kinds: What must be equal in a bucket, such as the dtype.
        limit: Bytes of a bucket; a larger tensor has one for itself.

    Returns:
        Indices of the tensors of each bucket.

    >>> buckets([8, 2, 2, 9, 3], ["a", "a", "a", "a", "b"], 10)
    [[4], [3], [2, 1], [0]]
    """
    found: list[list[int]] = []
    filled = 0
    for place in reversed(range(len(sizes))):
        if found and kinds[found[-1][0]] == kinds[place] and filled + sizes[place] <= limit:
            found[-1].append(place)
            filled += sizes[place]
        else:
            found.append([place])
            filled = sizes[place]
    return found
