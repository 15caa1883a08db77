"""An example that cannot be read becomes an error that says where it lies, or a row without weight and a line in a report."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.data.batch_rows import plain
from tfdist.data.sources.base import Source

# What TensorFlow adds to its messages: the names of its graph's nodes.
_NOISE = (
    r"Error in user-defined function passed to .*? transformation with iterator: \S+: |"
    r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:.*?\]|\bname: *$"
)


class Errors:
    """What a pipeline met of examples that cannot be read or transformed.

    Args:
        name: Of the source.
        allowed: How many may be left out, in this process; the next one ends the run. 0: none.

    Attributes:
        found: Number of each example left out, with the place where it lies.
    """

    def __init__(self, name: str, allowed: int):
        self.name = name
        self.allowed = allowed
        self.found: dict[int, str] = {}
        self._lock = threading.Lock()

    def add(self, number: np.int64, place: bytes) -> np.int64:
        """Notes an example; raises ValueError once there are more than allowed."""
        with self._lock:
            if int(number) not in self.found:
                self.found[int(number)] = place.decode(errors="replace")
                logging.warning(
                    "%s: example %d left out: %s", self.name, number, self.found[int(number)]
                )
            if len(self.found) > self.allowed:
                raise ValueError(
                    f"{self.name}: more than ignore_errors={self.allowed} examples cannot be read or transformed: {self.report()}"
                )
        return number

    def report(self) -> str:
        """The examples left out, one a line."""
        return "\n".join(
            f"example {number}: {place}" for number, place in sorted(self.found.items())
        )


def guarded(
    what: str, load: Callable[..., Any], example: Any, seed: Any, source: Source, errors: Errors
) -> tuple[Any, tf.Tensor]:
    """Loads an example; if that fails, names its place and fails, or leaves it out where errors are allowed.

    Args:
        what: That `load` does, for the message: "read".
        load: `example` and `seed` to its data; TensorFlow writes the cause of its failure into the log.
        example: An Example.
        seed: For `load`.
        source: Where it is from.
        errors: How many may fail, and where they are noted.

    Returns:
        The data, zeros where it failed; and whether it did not.
    """
    one = tf.data.Dataset.from_tensors((example, seed))
    loaded = one.map(plain(lambda *x: (load(*x), True)))

    def where(example: Any) -> tf.Tensor:
        if source.describe is not None:
            return source.describe(example.number)
        return tf.strings.join(["example ", tf.strings.as_string(example.number)])

    @plain
    def fail(example, _):
        message = f"{source.name}: cannot be {what} (a line further up in the log has the cause):"
        with tf.control_dependencies([tf.debugging.Assert(False, [message, where(example)])]):
            return tf.constant(False)

    @plain
    def leave_out(example, _):
        with tf.control_dependencies(
            [tf.numpy_function(errors.add, [example.number, where(example)], tf.int64)]
        ):
            return tf.nest.map_structure(_empty, loaded.element_spec[0]), tf.constant(False)

    otherwise = (
        one.map(leave_out)
        if errors.allowed
        else one.filter(fail).flat_map(plain(lambda *_: loaded))
    )
    data, good = (
        loaded.ignore_errors(log_warning=True).concatenate(otherwise).take(1).get_single_element()
    )
    return data, good


def place(source: Source, number: int) -> str | None:
    """Where an example lies, such as "file X, byte 123"; None where the source does not know."""
    if source.describe is None:
        return None
    return source.describe(tf.constant(number, tf.int64)).numpy().decode(errors="replace")


def cause(error: Exception) -> str:
    """What TensorFlow has to say, without the names of its graph's nodes.

    Example:
        >>> cause(ValueError("{{function_node f}} Truncated JPEG\\n\\t [[{{node x}}]] [Op:DecodeJpeg]"))
        'Truncated JPEG'
    """
    text = re.sub(_NOISE, "", getattr(error, "message", None) or str(error))
    return " ".join(text.split()) or type(error).__name__


def _empty(spec: Any) -> tf.Tensor:
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
        raise ValueError(
            f"ignore_errors: expected dense examples whose shape is known beforehand, received {spec}. Make them so in transform=, with tf.ensure_shape."
        )
    return tf.zeros(spec.shape, spec.dtype)
