"""Test that Keras' layers leave products with a `KernelPart` to it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.keras_compat import install
from tfdist.keras_compat.kernel_products import contracted_axes
from tfdist.keras_compat.parallel import KernelPart, make_sharded, replaced_shards


class Store:
    """Store that refuses to read a whole variable."""

    def whole(self, variable):
        raise AssertionError("the whole kernel was read")


class Part(KernelPart):
    """Part that multiplies by a kernel of its own."""

    def __init__(self, kernel, answers=True):
        self.kernel = kernel
        self.answers = answers

    def whole(self):
        if self.answers:
            raise AssertionError("the whole kernel was read")
        return tf.constant(self.kernel)

    def product(self, x, axes):
        return tf.tensordot(x, self.kernel, axes) if self.answers else None


def kernel_of(layer, shape):
    """Build a layer, shard its kernel, and return the kernel and its value."""
    install()
    layer.build(shape)
    value = keras.ops.convert_to_numpy(layer.kernel)
    variable = layer.kernel
    make_sharded(variable, tf.Variable(np.zeros(2, "float32")), value.shape, Store())
    return variable, value


LAYERS = {
    "dense": (lambda: keras.layers.Dense(3), (4, 5)),
    "dense of sequences": (lambda: keras.layers.Dense(3), (4, 2, 5)),
    "to heads": (lambda: keras.layers.EinsumDense("abc,cde->abde", (2, 2, 3)), (4, 2, 5)),
    "of heads": (lambda: keras.layers.EinsumDense("abcd,cde->abe", (2, 3)), (4, 2, 2, 5)),
    "ellipsis": (lambda: keras.layers.EinsumDense("...x,xy->...y", (3,)), (4, 2, 5)),
}


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gets_the_product_of_the_part(name, answers):
    make, shape = LAYERS[name]
    layer = make()
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    expected = make()
    expected.build(shape)
    variable, value = kernel_of(layer, shape)
    expected.kernel.assign(value)
    with replaced_shards({id(variable): Part(value, answers)}):
        found = layer(x)
    np.testing.assert_allclose(found, expected(x), atol=1e-6)


@pytest.mark.parametrize(
    "x",
    [tf.sparse.from_dense, lambda x: x.astype("float64"), lambda x: x.astype("int32")],
    ids=["sparse", "float64", "int32"],
)
def test_other_inputs_are_multiplied_by_the_whole_kernel(x):
    layer = keras.layers.Dense(3, use_bias=False)
    variable, value = kernel_of(layer, (4, 5))
    given = x(np.ones((4, 5), "float32"))
    part = Part(value)
    part.whole = lambda: tf.constant(value)
    part.product = None  # a call of it would fail
    with replaced_shards({id(variable): part}):
        found = keras.ops.matmul(given, variable)
    np.testing.assert_allclose(found, np.ones((4, 5)) @ value, atol=1e-6)


@pytest.mark.parametrize(
    ("equation", "axes"),
    [
        ("ab,bc->ac", 1),
        ("a b , b c -> a c", 1),
        ("abc,cde->abde", 1),
        ("abcd,cde->abe", 2),
        ("...cd,cde->...e", 2),
        ("ab,cb->ac", None),  # the kernel is transposed
        ("ab,bc->ca", None),
        ("abc,bcd->abd", None),  # b is an axis of the result, too
        ("ab,bb->ab", None),
        ("ab,ab->a", None),
        ("ab,bc", None),
        ("ab->ba", None),
    ],
)
def test_equations_that_are_products(equation, axes):
    assert contracted_axes(equation) == axes
