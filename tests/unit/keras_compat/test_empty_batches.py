"""Test convolutions and pooling of batches without rows under several replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import gen_nn_ops

from tfdist import keras_compat
from tfdist.keras_compat import empty_batches

IMAGE = (6, 6, 3)
VOLUME = (4, 4, 4, 3)
CASES = {
    "conv2d": (IMAGE, (3, 3, 3, 4), lambda x, k: tf.nn.conv2d(x, k, 1, "VALID")),
    "conv1d": (IMAGE[1:], (3, 3, 4), lambda x, k: tf.nn.conv1d(x, k, 1, "VALID")),
    "conv2d_transpose": (
        IMAGE,
        (3, 3, 4, 3),
        lambda x, k: tf.nn.conv2d_transpose(x, k, [tf.shape(x)[0], 8, 8, 4], 1, "VALID"),
    ),
    "conv3d": (VOLUME, (3, 3, 3, 3, 4), lambda x, k: tf.nn.conv3d(x, k, [1] * 5, "VALID")),
    "conv3d_transpose": (
        VOLUME,
        (3, 3, 3, 4, 3),
        lambda x, k: tf.nn.conv3d_transpose(x, k, [tf.shape(x)[0], 6, 6, 6, 4], 1, "VALID"),
    ),
    "depthwise_conv2d_native": (
        IMAGE,
        (3, 3, 3, 2),
        lambda x, k: tf.nn.depthwise_conv2d(x, k, [1] * 4, "VALID"),
    ),
    "max_pool": (IMAGE, (), lambda x, k: k * tf.nn.max_pool2d(x, 2, 2, "SAME")),
    "max_pool3d": (VOLUME, (), lambda x, k: k * tf.nn.max_pool3d(x, 2, 2, "SAME")),
    "max_pool_with_argmax": (
        IMAGE,
        (),
        lambda x, k: k * tf.nn.max_pool_with_argmax(x, 2, 2, "SAME")[0],
    ),
    "fractional_max_pool": (
        IMAGE,
        (),
        lambda x, k: k * tf.nn.fractional_max_pool(x, 1.5, seed=1)[0],
    ),
    "avg_pool": (IMAGE, (), lambda x, k: k * tf.nn.avg_pool2d(x, 2, 2, "SAME")),
    "avg_pool3d": (VOLUME, (), lambda x, k: k * tf.nn.avg_pool3d(x, 2, 2, "SAME")),
}


def results(strategy, shape, kernel, operation, rows):
    """Return output and gradients, computed in a graph as a training step is."""

    def replica(x, k):
        with tf.GradientTape() as tape:
            tape.watch([x, k])
            y = operation(x, k)
            y = tf.nn.bias_add(y, tf.ones(y.shape[-1]))
            loss = tf.reduce_sum(y * y)
        return y, *tape.gradient(loss, [x, k])

    @tf.function(input_signature=[tf.TensorSpec([None, *shape]), tf.TensorSpec(kernel)])
    def step(x, k):
        return tf.nest.map_structure(
            lambda v: strategy.experimental_local_results(v)[-1], strategy.run(replica, args=(x, k))
        )

    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, *shape))[:rows]
    k = rng.normal(size=kernel)
    return [v.numpy() for v in step(tf.constant(x, tf.float32), tf.constant(k, tf.float32))]


@pytest.mark.parametrize("name", CASES)
def test_batches_with_rows_are_computed_as_without_the_hook(name, one_device, mirrored):
    for value, expected in zip(
        results(mirrored, *CASES[name], 3), results(one_device, *CASES[name], 3), strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_without_rows_has_the_right_shape_and_gradients_of_zero(name, mirrored):
    expected = results(mirrored, *CASES[name], 3)
    y, of_x, of_kernel = results(mirrored, *CASES[name], 0)
    assert y.shape == (0, *expected[0].shape[1:])
    assert of_x.shape == (0, *expected[1].shape[1:])
    np.testing.assert_array_equal(of_kernel, np.zeros_like(expected[2]))
    assert np.abs(expected[2]).max() > 0


def test_only_several_replicas_have_the_additional_operations(mirrored, one_device, monkeypatch):
    def operations(strategy, rows):
        x = tf.TensorSpec([rows, *IMAGE])
        function = tf.function(
            lambda x: strategy.run(lambda: tf.nn.max_pool2d(x, 2, 2, "VALID"))
        ).get_concrete_function(x)
        return {op.type for op in function.graph.get_operations()}

    assert "EnsureShape" in operations(mirrored, None)
    assert "EnsureShape" not in operations(mirrored, 2)
    assert "EnsureShape" not in operations(one_device, None)
    monkeypatch.setattr(keras_compat, "device_type", lambda strategy: "GPU")
    assert "EnsureShape" not in operations(mirrored, None)


@pytest.mark.parametrize("name", [*empty_batches.OPERATIONS, "conv3d_backprop_input_v2"])
def test_an_operation_is_hooked_once(name):
    operation = getattr(gen_nn_ops, name)
    assert operation.__code__.co_filename == empty_batches.__file__
    assert operation.__wrapped__.__code__.co_filename != empty_batches.__file__


@pytest.mark.parametrize("name", empty_batches.EXTREMES)
@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_eager_extremes_of_rows_need_no_rows(name, dtype, mirrored):
    extreme = getattr(keras.ops, name)
    x = tf.cast(tf.zeros([0, 3]), dtype)
    for y in mirrored.experimental_local_results(mirrored.run(lambda: extreme(x, axis=1))):
        assert (y.shape, y.dtype.name) == ((0,), dtype)
    with pytest.raises(tf.errors.InvalidArgumentError, match="of an empty tensor"):
        extreme(x, axis=1)  # outside of a replica
