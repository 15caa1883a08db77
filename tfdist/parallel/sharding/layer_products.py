"""Products in layers that need no whole kernel, and have a large one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.keras_compat.kernel_products import plain_kernel
from tfdist.keras_compat.parallel import sublayers
from tfdist.parallel.sharding.product_costs import Product

MIN_VALUES = 2**18  # of a kernel; the collectives of a product are more than those of a gather


def products_of(layer: keras.layers.Layer, replicas: int) -> dict[int, Product]:
    """Return the products in a layer that need no whole kernel, and have a large one.

    Args:
        layer: Built layer, perhaps with layers inside it.
        replicas: Number of replicas.

    Returns:
        Products by the id of the kernel. The result is empty for layers that may multiply in a
        loop, where replicas cannot meet, and for a layer that was built without knowing the shape
        of an example.
    """
    inside = sublayers(layer)
    shape = _built_shape(layer)
    example = [n for n in shape[1:] if n is not None]
    if (
        len(shape) < 2
        or len(example) < len(shape) - 1
        or any(isinstance(x, keras.layers.Wrapper | keras.layers.RNN) for x in inside)
    ):
        return {}
    values = math.prod(example)
    found = {}
    for each in inside:
        if (plain := plain_kernel(each)) is None:
            continue
        kernel, axes = plain
        inputs, outputs = math.prod(kernel.shape[:axes]), math.prod(kernel.shape[axes:])
        if inputs * outputs >= MIN_VALUES and inputs % replicas == 0:
            found[id(kernel)] = Product(
                inputs,
                outputs,
                # The input of a layer inside is taken to have as many rows as the outer layer's.
                values / (inputs if each is layer else example[-1]),
                tf.as_dtype(kernel.dtype).size,
                tf.as_dtype(each.compute_dtype).size,
                kernel.trainable,
            )
    return found


def _built_shape(layer: keras.layers.Layer) -> Sequence[int | None]:
    """Return the shape of the first input for which a layer was built; () if it is not known.

    It is the same in all processes. Shapes of a step are not, where processes have their own data.
    """
    config = layer.get_build_config() or {}
    shape = config.get("input_shape") or next(iter(config.get("shapes_dict", {}).values()), ())
    while isinstance(shape, list | tuple) and isinstance(next(iter(shape), None), list | tuple):
        shape = shape[0]  # of several inputs
    if isinstance(shape, tf.TensorShape) and shape.rank is not None:
        shape = shape.as_list()
    known = isinstance(shape, list | tuple) and all(n is None or isinstance(n, int) for n in shape)
    return shape if known else ()
