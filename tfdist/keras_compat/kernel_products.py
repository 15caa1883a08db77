"""Products with a kernel that are computed by what holds it, not by its layer.

`keras.ops.matmul(x, kernel)` and `keras.ops.einsum(equation, x, kernel)`, which
`keras.layers.Dense` and `keras.layers.EinsumDense` call, read the whole kernel first.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat.backend_modules import numpy as _keras_numpy
from tfdist.keras_compat.parallel import Kernel, kernel_of


def hook_products() -> None:
    """Make Keras ask a `Kernel` for the products with it."""
    original_matmul = _keras_numpy.matmul
    original_einsum = _keras_numpy.einsum

    @functools.wraps(original_matmul)
    def matmul(x1: Any, x2: Any) -> Any:
        kernel = kernel_of(x2)
        result = None
        if kernel is not None and len(x2.shape) == 2:  # of a larger one, it is a batch of products
            result = _product(kernel, x1, x2, 1)
        return original_matmul(x1, x2) if result is None else result

    @functools.wraps(original_einsum)
    def einsum(subscripts: str, *operands: Any, **kwargs: Any) -> Any:
        kernel = kernel_of(operands[1]) if len(operands) == 2 else None
        result = None
        if kernel is not None and not kwargs and (axes := contracted_axes(subscripts)):
            result = _product(kernel, operands[0], operands[1], axes)
        return original_einsum(subscripts, *operands, **kwargs) if result is None else result

    _keras_numpy.matmul = matmul
    _keras_numpy.einsum = einsum


def contracted_axes(equation: str) -> int | None:
    """Return how many axes of a kernel an equation of `einsum` contracts, if it is a product.

    Args:
        equation: Equation of two operands. It is a product if the last axes of the first operand
            are the first of the second, in the same order, and all others are those of the result,
            in their order. An ellipsis stands for axes of the first operand.

    Returns:
        Number of axes from 1 on; None for an equation that is no such product.

    Example:
        >>> contracted_axes("abc,cde->abde"), contracted_axes("...cd,cde->...e")
        (1, 2)
        >>> contracted_axes("abc,dc->abd"), contracted_axes("ab,bc->ca")
        (None, None)
    """
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    first, comma, second = inputs.replace("...", "0").partition(",")
    if not (arrow and comma) or len(set(second)) < len(second) or "0" in second:
        return None
    for axes in range(1, len(second)):
        rows, others = first[: -axes or None], second[axes:]
        if (
            first.endswith(second[:axes])
            and result.replace("...", "0") == rows + others
            and len(set(rows + second)) == len(rows + second)
        ):
            return axes
    return None


def plain_kernel(layer: keras.layers.Layer) -> tuple[keras.Variable, int] | None:
    """Return the kernel of a layer that only multiplies its input by it.

    Args:
        layer: Any layer.

    Returns:
        Kernel and the number of its contracted axes; None for other layers than Dense and
        EinsumDense, for those with LoRA or quantized weights, and for kernels with a regularizer or
        a constraint, which need the whole kernel.
    """
    if type(layer) not in (keras.layers.Dense, keras.layers.EinsumDense) or not layer.built:
        return None
    if layer.lora_enabled or layer.quantization_mode is not None:
        return None
    axes = 1 if type(layer) is keras.layers.Dense else contracted_axes(layer.equation)
    kernel = layer.kernel
    if axes is None or kernel.regularizer is not None or kernel.constraint is not None:
        return None
    return kernel, axes


def _product(kernel: Kernel, x: Any, variable: keras.Variable, axes: int) -> tf.Tensor | None:
    """Return a product by the kernel; None for inputs of another kind.

    Keras casts operands of different dtypes, and has its own products of sparse tensors.
    """
    if isinstance(x, keras.Variable):
        x = x.value
    if (
        not isinstance(x, tf.Tensor)
        or keras.backend.standardize_dtype(x.dtype) != variable.dtype
        or x.shape.rank is None
        or x.shape.rank <= axes
        or tuple(x.shape[-axes:]) != tuple(variable.shape[:axes])
    ):
        return None
    return kernel.product(x, axes)
