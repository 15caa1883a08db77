"""Subset of a source: the examples of some classes, with renumbered labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.config.checks import nearest, words_of
from tfdist.data.sources.source import Source

MOST_LISTED = 20  # names of classes in a message; ImageNet has a thousand


def of_classes(source: Source, classes: str) -> Source:
    """Return the examples of some classes.

    Args:
        source: Source of `(x, label)` or `(x, label, weight)` with known labels.
        classes: Numbers, ranges and names with commas: "0:100,217,n02099601". A range ends before
            its second number.

    Returns:
        A Source with the labels 0, 1, 2 ... for the chosen classes, in the order of their former
        numbers.

    Raises:
        ValueError: If the labels are not known without reading the examples, a class does not
            exist, or a class has no examples.

    Example:
        >>> from tfdist.data.sources.source import of_arrays
        >>> whole = of_arrays((np.arange(6), np.array([0, 1, 2, 3, 2, 1])), classes=4)
        >>> [(int(x), int(y)) for x, y in of_classes(whole, "1:3").dataset()]
        [(1, 0), (2, 1), (4, 1), (5, 0)]
    """
    if source.labels is None or source.classes is None or source.scan or source.walk:
        raise ValueError(
            f"data.classes: expected a data set whose labels are known before its examples are "
            f"read, such as one of image files or arrays; received {source.name}. Leave it out."
        )
    chosen = _numbers(classes, source.classes, source.class_names)
    old_labels = np.asarray(source.labels())
    examples = np.flatnonzero(np.isin(old_labels, chosen))
    labels = np.searchsorted(chosen, old_labels[examples]).astype(old_labels.dtype)
    if missing := set(range(len(chosen))).difference(labels.tolist()):
        raise ValueError(
            f"data.classes: expected examples of each class; {source.name} has none of class "
            f"{chosen[min(missing)]}."
        )
    with tf.device("CPU"):
        number_table = tf.constant(examples, tf.int64)
        label_table = tf.constant(labels)

    def renumbered(function: Callable[..., Any] | None, labelled: bool = True) -> Any:
        """Return a function of the new numbers, whose result has the new label."""
        if function is None:
            return None

        def read(numbers: tf.Tensor, *stored: tf.Tensor) -> Any:
            result = function(tf.gather(number_table, numbers), *stored)
            if not labelled:
                return result
            x, _, *weight = result
            return (x, tf.gather(label_table, numbers), *weight)

        return read

    names = source.class_names
    return dataclasses.replace(
        source,
        cardinality=len(examples),
        classes=len(chosen),
        class_names=None if names is None else tuple(names[number] for number in chosen),
        gather=renumbered(source.gather),
        read=renumbered(source.read),
        assemble=renumbered(source.assemble),
        raw=renumbered(source.raw, labelled=False),
        describe=renumbered(source.describe, labelled=False),
        labels=lambda: labels,
    )


def _numbers(text: str, count: int, names: tuple[str, ...] | None) -> list[int]:
    """Return the numbers of the classes in a text, in ascending order."""
    chosen: set[int] = set()
    for word in words_of(text):
        first, colon, end = word.partition(":")
        if names is not None and word in names:
            chosen.add(names.index(word))
            continue
        if not first.isdecimal() or (colon and not end.isdecimal()):
            hint = f" {nearest(word, names)}" if names and len(names) <= MOST_LISTED else ""
            raise ValueError(
                f"data.classes: expected numbers such as 7, ranges such as 0:100, or names of "
                f"classes, received {word!r}.{hint}"
            )
        wanted = range(int(first), int(end) if colon else int(first) + 1)
        if not wanted or wanted[-1] >= count:
            raise ValueError(
                f"data.classes: expected classes of the {count} from 0 to {count - 1}, received "
                f"{word!r}."
            )
        chosen.update(wanted)
    if not chosen:
        raise ValueError(f"data.classes: expected at least one class, received {text!r}.")
    return sorted(chosen)
