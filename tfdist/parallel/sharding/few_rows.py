"""Products of large kernels and few rows on CPUs: faster gradients of the inputs.

For these gradients TensorFlow reads a kernel against its order. With 32 rows, the transposed
product took 0.36 to 0.86 of the time with oneDNN, and 0.15 to 0.44 without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.keras_compat.parallel import KernelPart
from tfdist.parallel.sharding.product_costs import Product

MAX_ROWS = 256  # of an input; with more, neither product is notably faster


def are_few(product: Product, examples: int | None) -> bool | None:
    """Return whether a replica multiplies few rows by a kernel; None if only a step tells.

    Args:
        product: Product with the kernel.
        examples: Number of examples of a replica, at most; None if it is unknown.

    Example:
        >>> sequence = Product(512, 512, rows_per_example=64)
        >>> are_few(sequence, 4), are_few(sequence, 8), are_few(sequence, None)
        (True, False, None)
    """
    if product.rows_per_example * (examples or 1) > MAX_ROWS:
        return False
    return True if examples else None


def gradient_of_inputs(dy: tf.Tensor, kernel: tf.Tensor, few: bool | None) -> tf.Tensor:
    """Return `dy @ transpose(kernel)`, for few rows by reading the kernel in its order.

    Args:
        dy: Gradients of results, `[rows, outputs]`.
        kernel: Kernel, `[inputs, outputs]`.
        few: Whether there are few rows; None if only a step tells.

    Returns:
        Tensor `[rows, inputs]`.
    """

    def in_its_order() -> tf.Tensor:
        return tf.transpose(tf.matmul(kernel, dy, transpose_b=True))

    def against_it() -> tf.Tensor:
        return tf.matmul(dy, kernel, transpose_b=True)

    if few is None:
        return tf.cond(tf.shape(dy)[0] <= MAX_ROWS, in_its_order, against_it)
    return in_its_order() if few else against_it()


def multiply(
    x: tf.Tensor,
    kernel: tf.Tensor,
    few: bool | None,
    exchange: Callable[[tf.Tensor, tf.Tensor], Sequence[tf.Tensor] | None] = lambda x, dy: None,
) -> tf.Tensor:
    """Return `x @ kernel`, whose gradient of `x` is `gradient_of_inputs`.

    Args:
        x: Input, `[rows, inputs]`.
        kernel: Kernel, `[inputs, outputs]`.
        few: Whether there are few rows, as for `gradient_of_inputs`.
        exchange: Function of `x` and the gradients of the results that may take care of the
            kernel's gradient. It returns tensors to compute before the gradient of `x`; None if it
            leaves the kernel's gradient to the product.

    Returns:
        Tensor `[rows, outputs]`.
    """

    @tf.custom_gradient
    def product(x: tf.Tensor, kernel: tf.Tensor):
        def grad(dy: tf.Tensor):
            received = exchange(x, dy)
            of_kernel = tf.matmul(x, dy, transpose_a=True) if received is None else None
            # Without this order a replica may compute the gradients of all inputs first, while
            # another one waits for it in the exchange.
            with tf.control_dependencies(received or []):
                return gradient_of_inputs(dy, kernel, few), of_kernel

        return tf.matmul(x, kernel), grad

    return product(x, kernel)


def multiply_in_rows(
    x: tf.Tensor, shape: Sequence[int], axes: int, product: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    """Return the product of an input and a kernel, by a product of matrices.

    Args:
        x: Input, `[..., *contracted]`.
        shape: Shape of the kernel.
        axes: Number of contracted axes, the first of the kernel.
        product: Function that returns the product, `[rows, outputs]`, for the input,
            `[rows, inputs]`.

    Returns:
        Tensor `[..., *others]`, with the other axes of the kernel.
    """
    result = product(tf.reshape(x, [-1, math.prod(shape[:axes])]))
    outer = tf.shape(x)[:-axes]
    return tf.ensure_shape(
        tf.reshape(result, tf.concat([outer, shape[axes:]], 0)), [*x.shape[:-axes], *shape[axes:]]
    )


class WholeKernel(KernelPart):
    """Gathered kernel for one call of a layer.

    Args:
        kernel: Whole kernel.
    """

    def __init__(self, kernel: tf.Tensor):
        self._kernel = kernel

    def whole(self) -> tf.Tensor:
        """See `KernelPart`."""
        return self._kernel

    def product(self, x: tf.Tensor, axes: int) -> tf.Tensor | None:
        """See `KernelPart`."""
        shape = tuple(self._kernel.shape)
        kernel = tf.reshape(tf.cast(self._kernel, x.dtype), [math.prod(shape[:axes]), -1])
        return multiply_in_rows(x, shape, axes, lambda rows: multiply(rows, kernel, None))
