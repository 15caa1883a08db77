"""Serialization of `tf.data` datasets, and a check that another process can run the graph."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# Epoch of a graph that stands for any epoch, see `with_epoch`. No data hold it by accident.
ANY_EPOCH = 6_151_813_482_013_664_571

# Ops whose resource a process creates for itself if the resource of the graph's origin is missing,
# with the index of the input that holds the resource.
_OWN_RESOURCES = {
    "ShuffleDatasetV3": 4,
    "ShuffleAndRepeatDatasetV2": 5,
    "CacheDatasetV2": 2,
    "RandomDatasetV2": 2,
}


def graph_of(dataset: tf.data.Dataset) -> bytes:
    """Serialize a dataset as a GraphDef.

    Args:
        dataset: The dataset.

    Returns:
        The serialized GraphDef.

    Raises:
        tf.errors.OpError: If an operation of the dataset cannot be serialized.
    """
    variant = tf.data.experimental.to_variant(dataset)
    return tf.raw_ops.DatasetToGraphV2(
        input_dataset=variant, external_state_policy=1, strip_device_assignment=True
    ).numpy()


def bound_to_process(graph: bytes) -> str | None:
    """Return which part of a dataset's graph works only in this process, in words.

    Args:
        graph: A serialized GraphDef.

    Returns:
        The reason why other processes cannot run the graph; None if they can.

    Example:
        >>> bound_to_process(graph_of(tf.data.Dataset.range(3).map(lambda x: x + 1))) is None
        True
    """
    # Lookup tables, including the ones of Keras layers, are serialized with their contents.
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
        # The other process would get the present value of a variable, and no later one.
        if node.op == "VarHandleOp" or (handle and node.name not in own):
            return "uses a tf.Variable or another resource of this process"
    return None


def with_epoch(graph: bytes, epoch: int) -> bytes:
    """Return the graph of one epoch of a data pipeline, without tracing it again.

    Args:
        graph: Serialized GraphDef of the epoch `ANY_EPOCH`.
        epoch: The epoch.

    Returns:
        A serialized GraphDef.

    Example:
        >>> any_epoch = graph_of(tf.data.Dataset.from_tensors(tf.constant(ANY_EPOCH, tf.int64)))
        >>> third = tf.raw_ops.DatasetFromGraph(graph_def=with_epoch(any_epoch, 3))
        >>> spec = tf.TensorSpec([], tf.int64)
        >>> [int(epoch) for epoch in tf.data.experimental.from_variant(third, spec)]
        [3]
    """
    definition = tf.compat.v1.GraphDef.FromString(graph)
    tensors = [node.attr["value"].tensor for node in definition.node if node.op == "Const"]
    places = [tensor for tensor in tensors if tensor == _scalar(ANY_EPOCH)]
    assert places, "the graph of a single epoch"
    for tensor in places:
        tensor.CopyFrom(_scalar(epoch))
    return definition.SerializeToString()


def _scalar(value: int) -> Any:
    return tf.make_tensor_proto(value, tf.int64)


def nodes(definition: Any) -> list:
    """Return all nodes of a GraphDef, including the nodes of its functions."""
    return [
        *definition.node,
        *(node for function in definition.library.function for node in function.node_def),
    ]
