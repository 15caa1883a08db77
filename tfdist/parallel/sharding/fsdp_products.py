"""Tensor parallelism in FSDP: the rows of a layer's input travel, not its kernel.

Each replica holds rows of the kernel and multiplies the columns of all replicas' inputs that belong
to them (row parallelism; Shoeybi et al. 2019, arXiv:1909.08053, section 3). A reduce-scatter sums
the products, so that each replica gets the results for its own examples. Krizhevsky 2014,
arXiv:1404.5997, trained the large dense layers of convolutional networks in such a way.
"""

from __future__ import annotations

import math

import keras
import tensorflow as tf

from tfdist.keras_compat.parallel import (
    KernelPart,
    Sharded,
    freed_with_graph,
    objects_of,
    own_copy,
    sublayers,
)
from tfdist.keras_compat.sharded_products import plain_kernel
from tfdist.parallel.replica_weight import step_weight
from tfdist.parallel.sharding.all_gather import Gathering
from tfdist.parallel.sharding.product_costs import Product

MIN_VALUES = 2**18  # of a kernel; the collectives of a product are more than those of a gather


def products_of(
    layer: keras.layers.Layer, shape: tf.TensorShape, replicas: int
) -> dict[int, Product]:
    """Return the products in a layer that need no whole kernel, and have a large one.

    Args:
        layer: Layer, perhaps with layers inside it.
        shape: Shape of the layer's first input.
        replicas: Number of replicas.

    Returns:
        Products by the id of the kernel. The result is empty for layers that may multiply in a
        loop, where replicas cannot meet, for a single replica, and where the shape of an example is
        not known.
    """
    inside = sublayers(layer)
    if (
        replicas == 1
        or shape.rank is None
        or shape.rank < 2
        or None in shape[1:]
        or any(isinstance(x, keras.layers.Wrapper | keras.layers.RNN) for x in inside)
    ):
        return {}
    values = math.prod(shape[1:])
    found = {}
    for kernel, axes in filter(None, map(plain_kernel, inside)):
        inputs, outputs = math.prod(kernel.shape[:axes]), math.prod(kernel.shape[axes:])
        if inputs * outputs >= MIN_VALUES and inputs % replicas == 0:
            found[id(kernel)] = Product(
                inputs,
                outputs,
                # The input of a layer inside is taken to have as many rows as the layer's.
                values / (inputs if values % inputs == 0 else shape[-1]),
                tf.as_dtype(kernel.dtype).size,
                kernel.trainable,
            )
    return found


class ProductPart(KernelPart):
    """Part of a kernel for one call of a unit in a graph.

    Args:
        gathering: Collectives of the kernel.
        kernel: Sharded kernel.
        sent: Values that are expected to travel in a pass, for the count of bytes.
        name: Name that distinguishes this call's collectives from others.
    """

    def __init__(self, gathering: Gathering, kernel: Sharded, sent: float, name: str):
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
        inputs = math.prod(shape[:axes])
        part = own_copy(self._kernel)
        if self._gathering.gather_dtype is not None:
            part = tf.cast(part, self._gathering.gather_dtype)
        part = tf.cast(part, x.dtype)
        if not self._kernel.trainable:
            part = tf.stop_gradient(part)
        name = self._next_name()
        result = _product(
            self._gathering,
            tf.reshape(x, [-1, inputs]),
            tf.reshape(part, [inputs // self._gathering.forward_group.size, -1]),
            name,
        )
        backward_dtype = tf.as_dtype(self._gathering.grad_dtype or x.dtype)
        for way, dtype in (("forward", x.dtype), ("backward", backward_dtype)):
            self._gathering.forward_group.bytes[f"{name} {way}"] = int(self._sent * dtype.size)
        outer = tf.shape(x)[:-axes]
        return tf.ensure_shape(
            tf.reshape(result, tf.concat([outer, shape[axes:]], 0)),
            [*x.shape[:-axes], *shape[axes:]],
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
    most = rows
    if not isinstance(step_weight(), float):  # the replicas may have different numbers of rows
        most = tf.cast(forward.all_reduce(tf.cast(rows, tf.int64), f"{name} rows", "Max"), tf.int32)
        x = tf.pad(x, [[0, most - rows], [0, 0]])
    scale = gathering.scale()

    def to_parts(rows_of_inputs: tf.Tensor) -> tf.Tensor:
        """Return columns by the replica that holds their rows of the kernel."""
        divided = tf.reshape(rows_of_inputs, [most, replicas, width])
        return tf.ensure_shape(tf.transpose(divided, [1, 0, 2]), [replicas, None, width])

    @tf.custom_gradient
    def multiply(x: tf.Tensor, part: tf.Tensor):
        # Inputs of all replicas, `[replicas * most, width]`.
        inputs = tf.reshape(forward.all_to_all(to_parts(x), f"{name} inputs"), [-1, width])
        addends = tf.reshape(tf.matmul(inputs, part), [replicas, most * outputs])
        total = forward.reduce_scatter(addends, f"{name} outputs")

        def grad(upstream: tf.Tensor):
            sent = tf.reshape(upstream, [-1])
            received = backward.all_gather(
                tf.cast(sent, gathering.grad_dtype or sent.dtype), f"{name} gradients"
            )
            of_outputs = tf.cast(tf.reshape(received, [-1, outputs]), upstream.dtype)
            of_parts = tf.reshape(
                tf.matmul(of_outputs, part, transpose_b=True), [replicas, -1, width]
            )
            of_inputs = backward.all_to_all(of_parts, f"{name} gradients of inputs")
            of_x = tf.reshape(tf.transpose(of_inputs, [1, 0, 2]), tf.shape(x))
            if isinstance(scale, float):
                of_part = tf.matmul(inputs, of_outputs, transpose_a=True) * tf.cast(
                    scale, part.dtype
                )
            else:
                scales = _scales(gathering, scale)
                by_replica = tf.reshape(of_outputs, [replicas, -1])
                weighed = tf.math.multiply_no_nan(by_replica, tf.cast(scales, by_replica.dtype))
                of_part = tf.matmul(inputs, tf.reshape(weighed, [-1, outputs]), transpose_a=True)
            return of_x, of_part

        return tf.reshape(total, [most, outputs]), grad

    result = freed_with_graph([multiply(x, part)])[0]
    return result[:rows]


def _scales(gathering: Gathering, scale: tf.Tensor) -> tf.Tensor:
    """Return the scales of all replicas' gradients, `[replicas, 1]`, gathered once in a graph."""
    group = gathering.backward_group
    objects = objects_of(tf.compat.v1.get_default_graph())
    # Of this replica alone: names of its calls must be those of the others.
    gathered = objects.setdefault(("scales", group, group.local), {})
    if scale.ref() not in gathered:
        gathered[scale.ref()] = group.all_gather(
            tf.cast(scale, tf.float32)[None], f"scales {len(gathered)}"
        )
    return gathered[scale.ref()]
