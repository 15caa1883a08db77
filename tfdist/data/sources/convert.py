"""Conversion of data that you pass, such as arrays or a TFDS name, to a `Source`."""

from __future__ import annotations

from typing import Any

from tfdist.data.sources.source import Source
from tfdist.data.sources.tfds import load


def as_source(data: Any) -> Source:
    """Return the Source of a TFDS name, a `tf.data.Dataset` or arrays.

    Args:
        data: Name of a TFDS dataset, for its split "train", or data that `Source.of` accepts.

    Returns:
        The Source.

    Raises:
        ValueError: If `data` is something else.

    Example:
        >>> import numpy as np
        >>> as_source((np.zeros([5, 2]), np.arange(5))).cardinality
        5
    """
    return load(data, "train") if isinstance(data, str) else Source.of(data)
