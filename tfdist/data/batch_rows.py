"""Row operations on batches: count, slice and pad a nest of tensors along its first axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

# For functions that tf.data traces: these functions need no conversion, and AutoGraph is slow.
plain = tf.autograph.experimental.do_not_convert


def count_rows(batch: Any) -> tf.Tensor:
    """Return the number of rows of a batch, int64 scalar.

    Args:
        batch: A nest of tensors `[rows, ...]`, dense, ragged or sparse. None and Optionals are
            ignored.

    Returns:
        The number of rows, int64 scalar.

    Raises:
        ValueError: If the batch holds no tensor.
    """
    for x in tf.nest.flatten(batch):
        if isinstance(x, tf.RaggedTensor):
            return tf.cast(x.nrows(), tf.int64)
        if isinstance(x, tf.SparseTensor):
            return x.dense_shape[0]
        if not _absent(x):
            if tf.executing_eagerly() and isinstance(x, tf.Tensor):
                return tf.constant(np.int64(x.shape[0]))  # a ninth of the time
            return tf.shape(x, out_type=tf.int64)[0]
    raise ValueError("The batch holds no tensor; expected x, (x, y) or (x, y, sample_weight).")


def cut(batch: Any, begin, end) -> Any:
    """Return the rows of a batch from `begin` to `end`, `end` excluded.

    Args:
        batch: A nest of tensors `[rows, ...]`.
        begin: First row, int64 scalar.
        end: Row after the last, int64 scalar.

    Returns:
        The same nest, `[end - begin, ...]`.
    """

    def of(x):
        if _absent(x):
            return x
        if isinstance(x, tf.SparseTensor):
            size = tf.concat([[end - begin], x.dense_shape[1:]], 0)
            return tf.sparse.slice(
                x, tf.concat([[begin], tf.zeros_like(x.dense_shape[1:])], 0), size
            )
        return x[begin:end]

    return tf.nest.map_structure(of, batch)


def fill(batch: Any, rows: int) -> Any:
    """Pad a batch with rows of zeros up to `rows`.

    Args:
        batch: A nest of dense tensors `[at most rows, ...]`.
        rows: Number of rows of the result.

    Returns:
        The same nest, `[rows, ...]`, of static shape.
    """

    def of(x):
        missing = rows - tf.shape(x)[0]
        padded = tf.pad(x, tf.concat([[[0, missing]], tf.zeros([tf.rank(x) - 1, 2], tf.int32)], 0))
        return tf.ensure_shape(padded, [rows, *x.shape[1:]])

    return tf.nest.map_structure(of, batch)


def _absent(x: Any) -> bool:
    return x is None or isinstance(x, tf.experimental.Optional)
