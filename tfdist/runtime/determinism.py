"""Deterministic sums of segments by TensorFlow's kernels on GPUs."""

from __future__ import annotations

import os

# TensorFlow reads it when it first sums segments.
DETERMINISTIC_SEGMENT_REDUCTIONS = "TF_USE_DETERMINISTIC_SEGMENT_REDUCTIONS"


def enable_deterministic_segment_reductions() -> None:
    """Let each GPU sum the rows of a sparse gradient in the same order, unless the user chose.

    Otherwise each GPU has an order of its own, and the copies of the weights differ by rounding.
    """
    os.environ.setdefault(DETERMINISTIC_SEGMENT_REDUCTIONS, "1")
