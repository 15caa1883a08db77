"""Converts what a user passes as data to a `Source`."""

from __future__ import annotations

from typing import Any

from tfdist.data.sources.base import Source
from tfdist.data.sources.tfds import load


def as_source(data: Any) -> Source:
    """Return the Source behind what a user passes as data.

    Args:
        data: The name of a TFDS data set, for its split "train", or what `Source.of` takes.

    Raises:
        ValueError: For anything else.

    Example:
        >>> as_source(tf.data.Dataset.range(3)).cardinality
        3
    """
    return load(data, "train") if isinstance(data, str) else Source.of(data)
