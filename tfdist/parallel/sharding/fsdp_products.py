"""Tensor parallelism in FSDP: the rows of a layer's input travel, not its kernel.

Each replica holds rows of the kernel and multiplies the columns of all replicas' inputs that belong
to them (row parallelism; Shoeybi et al. 2019, arXiv:1909.08053, section 3). A reduce-scatter sums
the products, so that each replica gets the results for its own examples. Krizhevsky 2014,
arXiv:1404.5997, trained the large dense layers of convolutional networks in such a way.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tfdist.keras_compat.parallel import (
    KernelPart,
    Sharded,
    freed_with_graph,
    own_copy,
)
from tfdist.parallel.sharding.all_gather import Gathering
from tfdist.parallel.sharding.few_rows import gradient_of_inputs, multiply_in_rows


class ProductPart(KernelPart):
    """Part of a kernel for one call of a unit in a graph.

    Args:
        gathering: Collectives of the kernel.
        kernel: Sharded kernel.
        sent: Bytes that a replica is expected to send in a step for each use.
        name: Name that distinguishes this call's collectives from others.
    """

    def __init__(self, gathering: Gathering, kernel: Sharded, sent: int, name: str):
        self._gathering = gathering
        self._kernel = kernel
        self._sent = sent
        self._name = name
        self._uses = 0
        self._graph = tf.compat.v1.get_default_graph()

    def whole(self) -> tf.Tensor:
        """See `KernelPart`."""
        # In a branch or loop of the layer, perhaps not all replicas are in the same place. They
        # are in the graph in which the unit was called.
        with self._graph.as_default():
            return self._gathering.gather_with_gradient(
                [self._kernel], self._next_name(), [], self._kernel.dtype
            )[0]

    def product(self, x: tf.Tensor, axes: int) -> tf.Tensor | None:
        """See `KernelPart`."""
        if tf.compat.v1.get_default_graph() is not self._graph:
            return None
        shape = self._kernel.tfdist_shape
        part = own_copy(self._kernel)
        if not self._kernel.trainable:
            part = tf.stop_gradient(part)
        part = tf.reshape(part, [-1, math.prod(shape[axes:])])
        name = self._next_name()
        self._gathering.forward_group.bytes[name] = self._sent
        return multiply_in_rows(
            x, shape, axes, lambda rows: _product(self._gathering, rows, part, name)
        )

    def _next_name(self) -> str:
        self._uses += 1
        return f"{self._name} {self._uses}"


def _product(gathering: Gathering, x: tf.Tensor, part: tf.Tensor, name: str) -> tf.Tensor:
    """Return the product of this replica's rows and a kernel of which each replica holds rows.

    Args:
        gathering: Collectives of the kernel.
        x: Rows of this replica, `[rows, inputs]`; replicas may have different numbers of them.
        part: Rows of the kernel that this replica holds, `[inputs / replicas, outputs]`.
        name: Name of this call.

    Returns:
        Product, `[rows, outputs]`.
    """
    forward, backward = gathering.forward_group, gathering.backward_group
    replicas = forward.size
    width, outputs = part.shape
    rows = tf.shape(x)[0]
    # Rows may be chosen by their values, so that even batches do not tell how many there are.
    own_facts = tf.stack([tf.cast(rows, tf.float64), tf.cast(gathering.scale(), tf.float64)])
    facts = forward.all_gather(own_facts, f"{name} rows and scale")
    most = tf.maximum(tf.cast(tf.reduce_max(facts[:, 0]), tf.int32), 1)  # none: nothing to send
    scales = facts[:, 1:]

    @tf.custom_gradient
    def multiply(x: tf.Tensor, part: tf.Tensor):
        rounded = tf.cast(part, gathering.gather_dtype or part.dtype)
        kernel = tf.cast(rounded, x.dtype)
        by_part = tf.transpose(tf.reshape(x, [-1, replicas, width]), [1, 0, 2])
        # Inputs of all replicas, `[replicas * most, width]`.
        inputs = tf.reshape(forward.all_to_all(by_part, f"{name} inputs"), [-1, width])
        addends = tf.reshape(tf.matmul(inputs, kernel), [replicas, -1])
        sent_in = None
        if x.dtype.size <= 2:  # sent as they are, and summed in 32 bits
            addends, sent_in = tf.cast(addends, tf.float32), x.dtype.name
        total = forward.reduce_scatter(addends, f"{name} outputs", sent_in)

        def grad(upstream: tf.Tensor):
            sent = tf.reshape(upstream, [-1])
            of_outputs = tf.reshape(
                backward.all_gather(sent, f"{name} gradients"), [replicas, -1, outputs]
            )
            of_parts = tf.reshape(
                gradient_of_inputs(tf.reshape(of_outputs, [-1, outputs]), kernel, None),
                [replicas, -1, width],
            )
            of_inputs = backward.all_to_all(of_parts, f"{name} gradients of inputs")
            of_x = tf.reshape(tf.transpose(of_inputs, [1, 0, 2]), tf.shape(x))
            weighed = tf.math.multiply_no_nan(
                tf.cast(of_outputs, part.dtype), tf.cast(scales[..., None], part.dtype)
            )
            of_part = tf.matmul(
                inputs,
                tf.cast(tf.reshape(weighed, [-1, outputs]), inputs.dtype),
                transpose_a=True,
            )
            return of_x, tf.cast(of_part, part.dtype)

        return tf.reshape(tf.cast(total, x.dtype), [-1, outputs]), grad

    padded = tf.pad(x, [[0, most - rows], [0, 0]])
    result = freed_with_graph([multiply(padded, part)])[0]
    return result[:rows]
