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


def even_part(batch: Any, index: Any, count: int) -> Any:
    """Return one of several parts of a batch, with equally many rows of each tensor.

    Args:
        batch: A nest of dense tensors `[rows, ...]`. Their numbers of rows may differ, and are
            multiples of `count`. None and Optionals stay as they are.
        index: Index of the part; a number keeps static numbers of rows static.
        count: Number of parts.

    Returns:
        The same nest, `[rows / count, ...]`.

    Example:
        >>> x, y = even_part((tf.range(4), tf.range(2)), 1, 2)
        >>> x.numpy().tolist(), y.numpy().tolist()
        ([2, 3], [1])
    """

    def of(x):
        if _absent(x):
            return x
        rows = (x.shape[0] or count_rows(x)) // count
        return x[index * rows : (index + 1) * rows]

    return tf.nest.map_structure(of, batch)


def check_equal_rows(batch: Any, replicas: int) -> None:
    """Raise an error if the tensors of a batch differ in their numbers of rows.

    In a graph whose static shapes do not tell, the error comes when it runs.

    Args:
        batch: A nest of tensors `[rows, ...]`, dense, ragged or sparse. None, Optionals and scalars
            are ignored.
        replicas: Number of replicas, for the message.

    Raises:
        ValueError: If numbers of rows differ.
        tf.errors.InvalidArgumentError: If they differ, in a graph.
    """
    tensors = [x for x in tf.nest.flatten(batch) if not _absent(x) and x.shape.rank != 0]
    static = {x.shape[0] if x.shape.rank else None for x in tensors}
    expected = "expected a batch whose tensors have the same number of rows, received"
    remedy = (
        "In a data set for fit or evaluate they may differ if each is static, as with "
        f"batch(drop_remainder=True), and a multiple of the {replicas} replicas."
    )
    if len(static - {None}) > 1:
        shapes = ", ".join(str(x.shape) for x in tensors)
        raise ValueError(f"{expected} shapes {shapes}. {remedy}")
    if None in static and not tf.executing_eagerly():
        rows = [count_rows(x) for x in tensors]
        for other in rows[1:]:
            tf.debugging.Assert(tf.equal(rows[0], other), [expected, *rows, remedy])


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
