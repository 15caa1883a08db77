"""Test products of large kernels and few rows; tests/cluster/test_native.py exchanges rows."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.keras_compat.parallel import kernel_of
from tfdist.parallel.sharding import few_rows, layer_products, step_products

ROWS = 21  # of which the last batch of 8 has five


@pytest.fixture(autouse=True)
def small_kernels(monkeypatch):
    monkeypatch.setattr(layer_products, "MIN_VALUES", 1)


@pytest.fixture
def products(monkeypatch):
    """Return the paths of the kernels that are multiplied with few rows, as they are traced."""
    paths = []
    product = step_products._KernelInStep.product

    def noted(self, x, axes):
        result = product(self, x, axes)
        if result is not None:
            paths.append(self._variable.path)
        return result

    monkeypatch.setattr(step_products._KernelInStep, "product", noted)
    return paths


class Branched(keras.layers.Layer):
    """Use one kernel in a branch, and another one twice, also as it is."""

    def __init__(self):
        super().__init__(name="branched")
        self.branch = keras.layers.Dense(16, name="branch")
        self.twice = keras.layers.Dense(16, name="twice")

    def build(self, shape):
        self.branch.build(shape)
        self.twice.build(shape)
        self.built = True

    def call(self, x):
        x = tf.cond(tf.reduce_sum(x) > 0, lambda: self.branch(x), lambda: -self.branch(x))
        return self.twice(self.twice(x)) + keras.ops.mean(self.twice.kernel)


def layers():
    return [
        keras.layers.EinsumDense("abc,cde->abde", (4, 4, 8), bias_axes="de", name="split"),
        keras.layers.EinsumDense("abde,def->abf", (4, 16), name="join"),
        Branched(),
        keras.layers.Flatten(),
        keras.layers.Dense(16, "tanh", name="dense"),
        keras.layers.Dense(8, name="frozen", trainable=False),
        keras.layers.Dense(8, kernel_regularizer="l2", name="regularized"),
    ]


class Penalized(keras.Model):
    """Penalize the gradient of the output with respect to the input."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(self(x))
        return loss + 0.1 * tf.reduce_mean(tape.gradient(total, x) ** 2)


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


def trained(strategy, kind=keras.Model, policy="float32", told=True):
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 4, 16)).astype("float32")
    y = random.normal(size=(ROWS, 3)).astype("float32")
    keras.utils.set_random_seed(3)
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy(policy)
    try:
        with strategy.scope():
            outputs = inputs = keras.Input([4, 16])
            for layer in layers():
                outputs = layer(outputs)
            model = kind(inputs, keras.layers.Dense(3, dtype="float32", name="last")(outputs))
            model.compile("adam", "mse")
    finally:
        keras.mixed_precision.set_dtype_policy(before)
    data = {"x": x, "y": y, "batch_size": 8}
    if not told:
        data = {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(8)}
    losses = model.fit(**data, epochs=2, shuffle=False, verbose=0)
    return [losses.history["loss"], *model.get_weights()]


@functools.cache
def of_keras(strategy, kind, policy="float32"):
    """Return the numbers of a training with Keras' own products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_products, "MIN_VALUES", 10**9)
        return trained(strategy, kind, policy)


@pytest.mark.parametrize(
    ("devices", "kind"),
    [("mirrored", keras.Model), ("one_device", OwnStep), ("one_device", Penalized)],
)
def test_training_equals_that_without_them(request, products, devices, kind):
    strategy = request.getfixturevalue(devices)
    numbers = trained(strategy, kind)
    assert set(products) == {
        f"{name}/kernel" for name in ("split", "join", "branched/twice", "dense", "last")
    }
    products.clear()
    for value, other in zip(numbers, of_keras(strategy, kind), strict=True):
        np.testing.assert_allclose(value, other, atol=5e-6)
    assert not products


def test_kernels_of_mixed_precision(products, one_device):
    numbers = trained(one_device, policy="mixed_bfloat16")
    assert products
    expected = of_keras(one_device, keras.Model, "mixed_bfloat16")
    for value, other in zip(numbers, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=0.05, atol=0.02)


def test_many_rows_are_multiplied_as_by_keras(monkeypatch, products, one_device):
    # A sequence of 4: each example has 4 rows, but for the layers after Flatten.
    monkeypatch.setattr(few_rows, "MAX_ROWS", 8)
    trained(one_device)
    assert set(products) == {"dense/kernel", "last/kernel"}
    products.clear()
    monkeypatch.setattr(few_rows, "MAX_ROWS", 7)
    trained(one_device)
    assert not products


@pytest.mark.parametrize("most", [0, 4 * 3])
def test_a_step_decides_where_the_data_do_not_tell_the_rows(monkeypatch, products, mirrored, most):
    # Replicas have 4 examples of 4 rows, and of the last batch 3 and 2.
    monkeypatch.setattr(few_rows, "MAX_ROWS", most)
    numbers = trained(mirrored, told=False)
    assert bool(products) == (most > 0)
    for value, other in zip(numbers, of_keras(mirrored, keras.Model), strict=True):
        np.testing.assert_allclose(value, other, atol=5e-6)


def test_nothing_of_a_step_remains(one_device):
    with one_device.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    model.fit(np.zeros([8, 4]), np.zeros([8, 3]), batch_size=4, verbose=0)
    assert "scale_loss" not in vars(model.optimizer)
    assert kernel_of(model.layers[0].kernel) is None
    assert step_products.take_rows(model.trainable_variables) == {}


@pytest.mark.parametrize("few", [True, False, None])
def test_the_gradient_of_inputs_is_that_of_tensorflow(few):
    random = np.random.default_rng(0)
    dy, kernel = (tf.constant(random.normal(size=shape)) for shape in ((3, 5), (7, 5)))
    expected = tf.matmul(dy, kernel, transpose_b=True)
    found = few_rows.gradient_of_inputs(dy, kernel, few)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
