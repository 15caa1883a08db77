"""Error handling for examples that cannot be read or transformed.

Either the run ends with an error that says where the example is stored, or the example is left out:
its row gets sample weight 0, and it is listed in a report.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.data.batch_rows import plain
from tfdist.data.sources.source import Source

# Parts that TensorFlow adds to its error messages: the names of graph nodes.
_NOISE = (
    r"Error in user-defined function passed to .*? transformation with iterator: \S+: |"
    r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:.*?\]|\bname: *$"
)


class Errors:
    """Record of the examples that a data pipeline could not read or transform.

    Args:
        name: Name of the source.
        allowed: Number of examples that may be left out in this process; one more ends the run. 0:
            none may.

    Attributes:
        failed: Mapping from the number of each example left out to the place where it is stored.
    """

    def __init__(self, name: str, allowed: int):
        self.name = name
        self.allowed = allowed
        self.failed: dict[int, str] = {}
        self._lock = threading.Lock()

    def add(self, number: np.int64, location: bytes) -> np.int64:
        """Record an example; raise ValueError once there are more than allowed.

        Args:
            number: Number of the example.
            location: File and position where the example is stored.

        Returns:
            `number`, unchanged.

        Raises:
            ValueError: If more than `allowed` examples have been recorded.
        """
        with self._lock:
            if int(number) not in self.failed:
                self.failed[int(number)] = location.decode(errors="replace")
                logging.warning(
                    "%s: skipped example %d: %s", self.name, number, self.failed[int(number)]
                )
            if len(self.failed) > self.allowed:
                raise ValueError(
                    f"{self.name}: more than ignore_errors={self.allowed} examples cannot be read "
                    f"or transformed: {self.report()}"
                )
        return number

    def report(self) -> str:
        """Return the examples left out, one on each line."""
        return "\n".join(
            f"example {number}: {location}" for number, location in sorted(self.failed.items())
        )


def guarded(
    action: str, load: Callable[..., Any], example: Any, seed: Any, source: Source, errors: Errors
) -> tuple[Any, tf.Tensor]:
    """Load an example; if that fails, raise an error with its place or leave the example out.

    The example is left out only where `errors` allows it.

    Args:
        action: Verb for the error message that says what `load` does: "read".
        load: Function from `example` and `seed` to the example's data. TensorFlow writes the cause
            of its failure into the log.
        example: An Example.
        seed: Seed for `load`.
        source: Source of the example.
        errors: Record of failed examples, with the number allowed.

    Returns:
        The data, zeros if loading failed; and whether loading succeeded.
    """
    single = tf.data.Dataset.from_tensors((example, seed))
    loaded = single.map(plain(lambda *x: (load(*x), True)))

    def locate(example: Any) -> tf.Tensor:
        if source.describe is not None:
            return source.describe(example.number)
        return tf.strings.join(["example ", tf.strings.as_string(example.number)])

    @plain
    def fail(example, _):
        message = f"{source.name}: cannot be {action} (the log above has the cause):"
        with tf.control_dependencies([tf.debugging.Assert(False, [message, locate(example)])]):
            return tf.constant(False)

    @plain
    def leave_out(example, _):
        with tf.control_dependencies(
            [tf.numpy_function(errors.add, [example.number, locate(example)], tf.int64)]
        ):
            return tf.nest.map_structure(_empty, loaded.element_spec[0]), tf.constant(False)

    fallback = (
        single.map(leave_out)
        if errors.allowed
        else single.filter(fail).flat_map(plain(lambda *_: loaded))
    )
    data, good = (
        loaded.ignore_errors(log_warning=True).concatenate(fallback).take(1).get_single_element()
    )
    return data, good


def location_of(source: Source, number: int) -> str | None:
    """Return where an example is stored, such as "file X, byte 123".

    Args:
        source: Source of the example.
        number: Number of the example.

    Returns:
        The place; None if the source does not know it.
    """
    if source.describe is None:
        return None
    return source.describe(tf.constant(number, tf.int64)).numpy().decode(errors="replace")


def cause(error: Exception) -> str:
    r"""Return the message of a TensorFlow error without the names of graph nodes.

    Example:
        >>> text = "{{function_node f}} Truncated JPEG\n\t [[{{node x}}]] [Op:DecodeJpeg]"
        >>> cause(ValueError(text))
        'Truncated JPEG'
    """
    text = re.sub(_NOISE, "", getattr(error, "message", None) or str(error))
    return " ".join(text.split()) or type(error).__name__


def _empty(spec: Any) -> tf.Tensor:
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
        raise ValueError(
            f"ignore_errors: expected dense examples of a static shape, received {spec}. Set the "
            "shape in transform= with tf.ensure_shape."
        )
    return tf.zeros(spec.shape, spec.dtype)
