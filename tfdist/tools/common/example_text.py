"""Formatting of examples, tensors and their specs as short text for display."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf


def parts(nest: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the named parts of an example or of its spec.

    A top-level tuple of at most three parts is read as `x`, `y` and `sample_weight`. Parts of other
    tuples and lists are named by their index.

    Args:
        nest: Nested dicts, tuples and lists of tensors or of their specs.
        prefix: Name of the whole nest; the names of its parts begin with it. Default: no name.

    Yields:
        The name of a part, and the part.

    Example:
        >>> [name for name, _ in parts(({"a": 1, "b": 2}, 3))]
        ['x.a', 'x.b', 'y']
    """
    if isinstance(nest, dict):
        for key, part in nest.items():
            yield from parts(part, f"{prefix}.{key}".strip("."))
    elif isinstance(nest, tuple | list):
        names = (
            ("x", "y", "sample_weight")
            if not prefix and len(nest) <= 3
            else map(str, range(len(nest)))
        )
        for key, part in zip(names, nest, strict=False):
            yield from parts(part, f"{prefix}.{key}".strip("."))
    else:
        yield prefix or "x", nest


def label_name(element_spec: Any) -> str | None:
    """Return the name of the part of an example that holds its class label.

    The label is a part called `y` or `label` that is a single integer.

    Args:
        element_spec: Spec of an example.

    Returns:
        "y" or "label"; None if the example has no such part.
    """
    for name, spec in parts(element_spec):
        scalar = isinstance(spec, tf.TensorSpec) and spec.shape.rank == 0
        if name in ("y", "label") and scalar and spec.dtype.is_integer:
            return name
    return None


def kind(leaf: Any) -> str:
    """Return the dtype and shape of a tensor or its spec, including ragged and sparse ones.

    Example:
        >>> kind(tf.TensorSpec([None, 3], tf.uint8))
        'uint8 [?, 3]'
    """
    sparse = isinstance(leaf, tf.SparseTensor | tf.SparseTensorSpec)
    ragged = isinstance(leaf, tf.RaggedTensor | tf.RaggedTensorSpec)
    sizes = (
        "..."
        if leaf.shape.rank is None
        else ", ".join("?" if size is None else str(size) for size in leaf.shape)
    )
    return f"{'sparse ' if sparse else 'ragged ' if ragged else ''}{leaf.dtype.name} [{sizes}]"


def value(leaf: Any, names: tuple[str, ...] | None = None) -> str:
    """Summarize the values of a tensor in a few words.

    Args:
        leaf: Tensor of any shape; ragged and sparse tensors are accepted.
        names: Names of the classes, if the tensor is a label.

    Example:
        >>> value(tf.constant([[0, 5], [255, 0]] * 4, tf.uint8))
        '0 to 255, mean 65'
        >>> value(tf.constant(1), ("cat", "dog"))
        '1 (dog)'
    """
    array = np.ravel(np.asarray(_flat(leaf)))
    if array.size == 0:
        return "empty"
    if leaf.dtype == tf.string:
        return ", ".join(map(_text, array[:4])) + (", ..." if array.size > 4 else "")
    if leaf.dtype in (tf.bool, tf.complex64, tf.complex128):
        return ", ".join(map(str, array[:8])) + (", ..." if array.size > 8 else "")
    if leaf.shape.rank == 0 and leaf.dtype.is_integer:
        return f"{array[0]}{named(array[0], names)}"
    numbers: np.ndarray = array.astype(np.float64)
    if array.size <= 8:
        return ", ".join(f"{x:.6g}" for x in numbers)
    nan = int(np.isnan(numbers).sum())
    if nan == array.size:
        return "all NaN"
    worst = f", {nan} NaN" if nan else ""
    return (
        f"{np.nanmin(numbers):.6g} to {np.nanmax(numbers):.6g}, "
        f"mean {np.nanmean(numbers):.6g}{worst}"
    )


def byte_size(leaf: Any) -> int:
    """Return the size of a tensor's values in bytes."""
    flat = _flat(leaf)
    if flat.dtype == tf.string:
        return int(tf.reduce_sum(tf.strings.length(flat)))
    return int(tf.size(flat)) * flat.dtype.size


def named(number: Any, names: tuple[str, ...] | None) -> str:
    """Return the name of a class in brackets, or "" if the class has no useful name.

    A name that only repeats the number of the class is not useful.
    """
    known = (
        names is not None and 0 <= int(number) < len(names) and names[int(number)] != str(number)
    )
    return f" ({names[int(number)]})" if known else ""  # type: ignore[index]


def _flat(leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.flat_values
    return leaf.values if isinstance(leaf, tf.SparseTensor) else leaf


def _text(item: Any) -> str:
    text = item.decode(errors="backslashreplace") if isinstance(item, bytes) else str(item)
    return repr(text) if len(text) <= 60 else f"{text[:57]!r}... ({len(item):,} bytes)"
