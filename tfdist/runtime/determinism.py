"""Deterministic operations of TensorFlow."""

from __future__ import annotations

import os

# TensorFlow reads it when it first sums segments.
DETERMINISTIC_SEGMENT_REDUCTIONS = "TF_USE_DETERMINISTIC_SEGMENT_REDUCTIONS"


def enable_deterministic_segment_reductions() -> None:
    """Let each GPU sum the rows of a sparse gradient in the same order, unless the user chose.

    Otherwise each GPU has an order of its own, and the copies of the weights differ by rounding.
    """
    os.environ.setdefault(DETERMINISTIC_SEGMENT_REDUCTIONS, "1")


def ops_are_deterministic() -> bool:
    """Return whether `tf.config.experimental.enable_op_determinism` was called.

    If so, no operation reads the clock, and no dataset can return the elements that become ready
    first.
    """
    import tensorflow as tf

    try:
        with tf.Graph().as_default():
            tf.random.uniform([])
    except RuntimeError:  # it refuses random numbers without a seed
        return True
    return False
