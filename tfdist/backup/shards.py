"""Variables of which each replica holds a row become pieces of files, and rows for another number of replicas; nothing is read here.

A whole variable is a flat array of `elements` numbers, padded with zeros to equal rows, one a replica: row r begins at r * length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import keras
import numpy as np


class Flat(Protocol):
    """A flat array, or what gives slices of one."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray: ...


Piece = tuple[int, Flat]  # where it begins in the flat whole, and its numbers


def whole_shape(variable: keras.Variable) -> tuple[int, ...]:
    """The shape of a variable, of the whole one if replicas hold rows of it."""
    return tuple(getattr(variable, "tfdist_shape", variable.shape))


def is_sharded(variable: keras.Variable) -> bool:
    """Whether each replica holds a row of it."""
    return hasattr(variable, "tfdist_shape")


def rows(
    pieces: Iterable[Piece],
    shape: Sequence[int],
    dtype: np.dtype,
    replicas: int,
    first: int,
    count: int,
) -> np.ndarray:
    """Some replicas' rows of a variable, put together from pieces.

    Args:
        pieces: They cover all of it; what is beyond its elements is padding.
        shape: Of the whole.
        dtype: Of its numbers.
        replicas: Rows that it is cut into.
        first: The first row that is asked for.
        count: Rows from there on.

    Returns:
        `[count, length]`.

    Raises:
        ValueError: The pieces leave a gap.

    Example:
        >>> rows([(0, np.array([1.0, 2.0, 3.0])), (3, np.array([4.0, 5.0, 0.0]))], (5,), np.float64, replicas=3, first=1, count=2)
        array([[3., 4.],
               [5., 0.]])
    """
    elements = math.prod(shape)
    length = -(-elements // replicas)
    begin, end = first * length, min((first + count) * length, elements)
    found, known = np.zeros(count * length, dtype), 0
    for offset, numbers in pieces:
        low, high = max(begin, offset), min(end, offset + len(numbers))
        if low < high:
            found[low - begin : high - begin] = numbers[low - offset : high - offset]
            known += high - low
    if known != max(0, end - begin):
        raise ValueError(
            f"expected {end - begin} numbers of a variable of shape {tuple(shape)}, found {known}."
        )
    return found.reshape(count, length)
