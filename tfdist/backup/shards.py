"""Resharding: rebuild rows of sharded variables for any number of replicas.

A whole variable is a flat array of `elements` numbers, padded with zeros to equal rows, one for
each replica. Row r begins at r * length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import keras
import numpy as np


class Flat(Protocol):
    """Flat array, or an object that returns slices of one."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray: ...


Piece = tuple[int, Flat]  # offset in the flat whole variable, and the numbers from there on


def whole_shape(variable: keras.Variable) -> tuple[int, ...]:
    """Return the shape of the whole variable, also if replicas hold rows of it."""
    return tuple(getattr(variable, "tfdist_shape", variable.shape))


def is_sharded(variable: keras.Variable) -> bool:
    """Return whether each replica holds a row of a variable."""
    return hasattr(variable, "tfdist_shape")


def rows(
    pieces: Iterable[Piece],
    shape: Sequence[int],
    dtype: np.dtype,
    replicas: int,
    first: int,
    count: int,
) -> np.ndarray:
    """Return the rows of some replicas, assembled from pieces of a variable.

    Args:
        pieces: Pieces that cover the whole variable. Numbers beyond its elements are padding.
        shape: Shape of the whole variable.
        dtype: Data type of the variable.
        replicas: Number of rows that the variable is split into.
        first: Index of the first row to return.
        count: Number of rows to return.

    Returns:
        An array `[count, length]`.

    Raises:
        ValueError: If the pieces leave a gap.

    Example:
        >>> rows(
        ...     [(0, np.array([1.0, 2.0, 3.0])), (3, np.array([4.0, 5.0, 0.0]))],
        ...     (5,), np.float64, replicas=3, first=1, count=2
        ... )
        array([[3., 4.],
               [5., 0.]])
    """
    elements = math.prod(shape)
    length = -(-elements // replicas)
    begin = first * length
    end = min((first + count) * length, elements)
    result = np.zeros(count * length, dtype)
    filled = 0
    for offset, numbers in pieces:
        low = max(begin, offset)
        high = min(end, offset + len(numbers))
        if low < high:
            result[low - begin : high - begin] = numbers[low - offset : high - offset]
            filled += high - low
    if filled != max(0, end - begin):
        raise ValueError(
            f"expected {end - begin} numbers of a variable of shape {tuple(shape)}, found {filled}."
        )
    return result.reshape(count, length)
