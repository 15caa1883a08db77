"""Arrays of Python in a dataset, over whose rows TensorFlow would write.

TensorFlow does not copy an array that a generator, a `PyDataset` or `tf.numpy_function` returns,
and never writes over it. But it writes over rows sliced from the array, because their buffer does
not tell that Python owns the memory: an elementwise operation, such as a rescaling, puts its result
there, and the next pass trains on these numbers. Slices of such batches are therefore copied.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.keras_compat import with_inputs

_WITHOUT_ROWS = (tf.variant, tf.resource)


def runs_python(dataset: tf.data.Dataset) -> bool:
    """Return whether Python may make parts of a dataset, as a generator does.

    Datasets and iterators that a function of the dataset uses may be of any origin.
    """
    for each in with_inputs(dataset):
        if type(each).__name__ == "_VariantDataset":
            return True
        for f in each._functions():
            uses = {x.dtype for x in f.function.captured_inputs}
            if tf.variant in uses or calls_python(getattr(f.function, "graph", None)):
                return True
    return False


def calls_python(graph: tf.Graph | None) -> bool:
    """Return whether Python may make values of a graph, or of a function that it calls.

    Args:
        graph: The graph. None: that of a function which TensorFlow does not tell.
    """
    return (
        graph is None
        or any(
            "PyFunc" in op.type or op.type.startswith("IteratorGetNext")
            for op in graph.get_operations()
        )
        or any(calls_python(getattr(f, "graph", None)) for f in graph._functions.values())
    )


def copy_rows(batch: Any) -> Any:
    """Copy the rows of a batch to memory that TensorFlow owns.

    Args:
        batch: Nest of tensors `[rows, ...]`, dense, ragged or sparse. Scalars, and whatever else
            TensorFlow gathers no rows of, stay as they are.

    Returns:
        The same nest.
    """

    def copy(x: Any) -> Any:
        if not isinstance(x, tf.Tensor) or x.shape.rank == 0 or x.dtype in _WITHOUT_ROWS:
            return x
        rows = tf.shape(x)[0] if x.shape[0] is None else x.shape[0]
        return tf.gather(x, tf.range(rows))  # x[:] and tf.identity would share the memory

    return tf.nest.map_structure(copy, batch, expand_composites=True)
