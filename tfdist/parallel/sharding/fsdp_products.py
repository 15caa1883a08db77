"""Tensor parallelism in FSDP: the rows of a layer's input travel, not its kernel.

Each replica holds rows of the kernel and multiplies the columns of all replicas' inputs that belong
to them (row parallelism; Shoeybi et al. 2019, arXiv:1909.08053, section 3). A reduce-scatter sums
the products, so that each replica gets the results for its own examples. Krizhevsky 2014,
arXiv:1404.5997, trained the large dense layers of convolutional networks in such a way.
"""

from __future__ import annotations

import math
from collections.abc import Callable

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
            return self._gathering.gather(
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
    rows = tf.shape(x)[0]
    # Rows may be chosen by their values, so that even batches do not tell how many there are.
    own_facts = tf.stack([tf.cast(rows, tf.float64), tf.cast(gathering.scale(), tf.float64)])
    facts = gathering.forward_group.all_gather(own_facts, f"{name} rows and scale")
    most = tf.maximum(tf.cast(tf.reduce_max(facts[:, 0]), tf.int32), 1)  # none: nothing to send
    exchange = _Exchange(gathering, name, facts[:, 1:], *part.shape)
    padded = tf.pad(x, [[0, most - rows], [0, 0]])
    return exchange.sum_products(exchange.multiply(exchange.send_inputs(padded), part))[:rows]


class _Exchange:
    """Steps of one product; the gradient of each step is computed by the others.

    So a loss may contain gradients of any order. Gradients with respect to a replica's rows are
    those of its own loss. Gradients with respect to the kernel's part are those of the sum of all
    losses, each times its replica's scale.

    Args:
        gathering: Collectives of the kernel.
        name: Name of the product.
        scales: Scale of each replica's gradients, float64 `[replicas, 1]`.
        width: Number of a kernel's rows that each replica holds: `inputs / replicas`.
        outputs: Number of the kernel's columns.
    """

    def __init__(
        self, gathering: Gathering, name: str, scales: tf.Tensor, width: int, outputs: int
    ):
        self._gathering = gathering
        self._name = name
        self._scales = scales
        self._replicas = gathering.forward_group.size
        self._width = width
        self._outputs = outputs

    def send_inputs(self, x: tf.Tensor) -> tf.Tensor:
        """Return the inputs that belong to this replica's part, of the rows of all replicas.

        Args:
            x: Rows of this replica, `[most, inputs]`.

        Returns:
            Tensor `[replicas * most, width]`.
        """

        def send(x):
            by_part = tf.transpose(tf.reshape(x, [-1, self._replicas, self._width]), [1, 0, 2])
            received = self._gathering.forward_group.all_to_all(by_part, f"{self._name} inputs")
            return tf.reshape(received, [-1, self._width])

        return _with_gradients(send, self.return_inputs)(x)

    def return_inputs(self, by_part: tf.Tensor) -> tf.Tensor:
        """Return what `send_inputs` took apart, `[most, inputs]`."""

        def send_back(by_part):
            received = self._gathering.backward_group.all_to_all(
                tf.reshape(by_part, [self._replicas, -1, self._width]),
                f"{self._name} gradients of inputs",
            )
            return tf.reshape(tf.transpose(received, [1, 0, 2]), [-1, self._replicas * self._width])

        return _with_gradients(send_back, self.send_inputs)(by_part)

    def sum_products(self, addends: tf.Tensor) -> tf.Tensor:
        """Return this replica's rows of the sum of all parts' products.

        Args:
            addends: Products of a part, `[replicas * most, outputs]`.

        Returns:
            Tensor `[most, outputs]`.
        """

        def add(addends):
            x, sent_in = tf.reshape(addends, [self._replicas, -1]), None
            if x.dtype.size <= 2:  # sent as they are, and summed in 32 bits
                x, sent_in = tf.cast(x, tf.float32), x.dtype.name
            total = self._gathering.forward_group.reduce_scatter(
                x, f"{self._name} outputs", sent_in
            )
            return tf.reshape(tf.cast(total, addends.dtype), [-1, self._outputs])

        return _with_gradients(add, self.gather_rows)(addends)

    def gather_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Return the rows `[most, outputs]` of all replicas, `[replicas * most, outputs]`."""

        def gather(rows):
            received = self._gathering.backward_group.all_gather(
                tf.reshape(rows, [-1]), f"{self._name} gradients"
            )
            return tf.reshape(received, [-1, self._outputs])

        return _with_gradients(gather, self.sum_products)(rows)

    def multiply(self, inputs: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
        """Return `inputs @ part`."""

        def multiply(inputs, part):
            return tf.matmul(inputs, self._kernel(part, inputs.dtype))

        return _with_gradients(
            multiply,
            lambda upstream: self.multiply_transposed(upstream, part),
            lambda upstream: self.kernel_gradient(inputs, upstream, part.dtype),
        )(inputs, part)

    def multiply_transposed(self, of_outputs: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
        """Return `of_outputs @ transpose(part)`."""

        def multiply(of_outputs, part):
            return gradient_of_inputs(of_outputs, self._kernel(part, of_outputs.dtype), None)

        return _with_gradients(
            multiply,
            lambda upstream: self.multiply(upstream, part),
            lambda upstream: self.kernel_gradient(upstream, of_outputs, part.dtype),
        )(of_outputs, part)

    def kernel_gradient(
        self, inputs: tf.Tensor, of_outputs: tf.Tensor, dtype: tf.DType
    ) -> tf.Tensor:
        """Return `transpose(inputs) @ of_outputs`, with each replica's rows times its scale."""

        def multiply(inputs, of_outputs):
            weighed = tf.math.multiply_no_nan(
                tf.cast(tf.reshape(of_outputs, [self._replicas, -1, self._outputs]), dtype),
                tf.cast(self._scales[..., None], dtype),
            )
            weighed = tf.cast(tf.reshape(weighed, [-1, self._outputs]), inputs.dtype)
            return tf.cast(tf.matmul(inputs, weighed, transpose_a=True), dtype)

        return _with_gradients(
            multiply,
            lambda upstream: self.multiply_transposed(of_outputs, upstream),
            lambda upstream: self.multiply(inputs, upstream),
        )(inputs, of_outputs)

    def _kernel(self, part: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        rounded = tf.cast(part, self._gathering.gather_dtype or part.dtype)
        return tf.cast(rounded, dtype)


def _with_gradients(
    function: Callable[..., tf.Tensor], *gradients: Callable[[tf.Tensor], tf.Tensor]
) -> Callable[..., tf.Tensor]:
    """Return a function of tensors that has a gradient with respect to each of them.

    Args:
        function: Function of tensors.
        gradients: Function, for each tensor, from the gradient of the result to its own.
    """

    @tf.custom_gradient
    def computed(*tensors):
        return function(*tensors), lambda upstream: [each(upstream) for each in gradients]

    return lambda *tensors: freed_with_graph([computed(*tensors)])[0]
