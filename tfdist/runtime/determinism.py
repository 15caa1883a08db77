"""Variables that make TensorFlow's kernels on GPUs deterministic."""

from __future__ import annotations

import os

# TensorFlow reads it when it first sums segments.
SEGMENTS = "TF_USE_DETERMINISTIC_SEGMENT_REDUCTIONS"


def sum_rows_in_order() -> None:
    """Let each GPU sum the rows of a sparse gradient in the same order, unless the user chose.

    Otherwise each GPU has an order of its own, and the copies of the weights differ by rounding.
    """
    os.environ.setdefault(SEGMENTS, "1")
