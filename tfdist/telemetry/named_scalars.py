"""Named scalars: losses and metrics as one number for each name.

The result of a metric may be a vector or a dict. Files, curves and tables hold single numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def named_scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return losses and metrics as numbers, each with a name of its own.

    The name of an entry of an array or a dict is the name of the whole, a slash, and the entry's
    index or key.

    Args:
        values: Numbers, arrays or tensors of any shape, and dicts of these, by name.

    Example:
        >>> named_scalars({"loss": 0.5, "f1": [0.25, 1], "share": {"low": 0.75}})
        {'loss': 0.5, 'f1/0': 0.25, 'f1/1': 1.0, 'share/low': 0.75}
    """
    scalars: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            scalars |= named_scalars({f"{name}/{key}": entry for key, entry in value.items()})
            continue
        array = np.asarray(value)
        for index in np.ndindex(array.shape):
            scalars["/".join([name, *map(str, index)])] = float(array[index])
    return scalars
