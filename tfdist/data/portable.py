"""A data set becomes a graph that other processes can run, or the reason why none can; nothing is sent anywhere here."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# Resources that a process makes for itself where it does not find the one of the graph's origin: the op's input that names it.
_OWN_RESOURCES = {
    "ShuffleDatasetV3": 4,
    "ShuffleAndRepeatDatasetV2": 5,
    "CacheDatasetV2": 2,
    "RandomDatasetV2": 2,
}


def graph_of(dataset: tf.data.Dataset) -> bytes:
    """A data set as a serialized GraphDef.

    Raises:
        tf.errors.OpError: An operation in it cannot be written down.
    """
    variant = tf.data.experimental.to_variant(dataset)
    return tf.raw_ops.DatasetToGraphV2(
        input_dataset=variant, external_state_policy=1, strip_device_assignment=True
    ).numpy()


def bound_to_process(graph: bytes) -> str | None:
    """What in a data set's graph has no meaning outside of this process, in words; None: nothing has.

    Args:
        graph: A serialized GraphDef.

    Example:
        >>> bound_to_process(graph_of(tf.data.Dataset.range(3).map(lambda x: x + 1))) is None
        True
    """
    # Lookup tables, those of Keras' layers too, are written down with what they hold.
    definition = tf.compat.v1.GraphDef.FromString(graph)
    own = {
        node.input[_OWN_RESOURCES[node.op]].partition(":")[0]
        for node in definition.node
        if node.op in _OWN_RESOURCES and len(node.input) > _OWN_RESOURCES[node.op]
    }
    for node in nodes(definition):
        if "PyFunc" in node.op:
            return "runs Python code (a generator, tf.py_function or tf.numpy_function)"
        handle = node.op == "Const" and node.attr["dtype"].type in (
            tf.resource.as_datatype_enum,
            tf.variant.as_datatype_enum,
        )
        # A variable would stay as it is now.
        if node.op == "VarHandleOp" or (handle and node.name not in own):
            return "uses a tf.Variable or another resource of this process"
    return None


def nodes(definition: Any) -> list:
    """All nodes of a GraphDef, those of its functions too."""
    return [
        *definition.node,
        *(node for function in definition.library.function for node in function.node_def),
    ]
