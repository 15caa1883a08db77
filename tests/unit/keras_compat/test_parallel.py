"""Test the private names of Keras that sharding relies on."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.ops import gradient_registry

from tfdist.keras_compat import install
from tfdist.keras_compat import parallel as compat


class _Rows:
    """Store one replica's two rows."""

    def __init__(self):
        self.slots = self

    def whole(self, variable):
        return tf.reshape(compat.own_copy(variable), variable.tfdist_shape)

    def assign_whole(self, variable, value):
        with compat.as_shards():
            variable.assign(tf.reshape(value, [-1]))


@pytest.fixture(scope="module", autouse=True)
def hooks():
    install()


@pytest.fixture
def variable():
    made = keras.Variable(np.arange(6, dtype=np.float32), name="v")
    compat.make_sharded(made, None, (2, 3), _Rows())
    return made


def test_a_sharded_variable_is_whole_but_in_shards(variable):
    assert (tuple(variable.shape), variable.ndim, variable.numpy().tolist()) == (
        (2, 3),
        2,
        [[0, 1, 2], [3, 4, 5]],
    )
    variable.assign(variable + 1)
    with compat.as_shards():
        assert variable.numpy().tolist() == [1, 2, 3, 4, 5, 6]
    with compat.replaced_shards({id(variable): tf.ones([2, 3])}):
        assert compat.have_values([variable])
        assert variable.numpy().sum() == 6
    assert not compat.have_values([variable])


@pytest.mark.parametrize(
    "name",
    ["SGD", "Adam", "AdamW", "Lion", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl"],
)
def test_slots_are_as_long_as_a_part_and_marked(variable, name):
    optimizer = getattr(keras.optimizers, name)(use_ema=True)
    optimizer.build([variable])
    slots = [v for v in optimizer.variables if isinstance(v, compat.Sharded)]
    assert slots
    assert {(v.tfdist_shape, tuple(v.shape)) for v in slots} == {((2, 3), (2, 3))}
    with compat.as_shards():
        assert {tuple(v.shape) for v in slots} == {(6,)}
    assert compat.known_variables(keras.optimizers.LossScaleOptimizer(optimizer)) == [variable]


def test_exceptions_from_weight_decay_are_found_again(variable):
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_list=[variable])
    optimizer.build([variable])
    with compat.as_shards():
        assert not optimizer._use_weight_decay(variable.value)


def test_deferred_variables_are_left_alone():
    with compat.without_values():
        layer = keras.layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(seed=4))
        layer.build((None, 3))
    keras.Sequential(
        [keras.Input([3]), keras.layers.Dense(2)]
    )  # Keras gives variables their values when it is done with a model
    assert not compat.has_value(layer.kernel)
    first = compat.first_value(layer.kernel)
    compat.initialize(layer.kernel)
    np.testing.assert_array_equal(first, layer.kernel.numpy())
    np.testing.assert_array_equal(first, keras.initializers.GlorotUniform(seed=4)((3, 2)))


def test_layers_learn_from_their_context_again_whether_they_train():
    seen = []

    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__(dtype="mixed_bfloat16")
            self.drop = keras.layers.Dropout(0.5)

        def call(self, x):
            if not seen:
                seen.append(compat.context())
            return self.drop(x)

    x = tf.ones([100, 10])
    outer = Outer()
    outer(x, training=True)
    dropped = keras.layers.Dropout(0.5)
    assert np.all(dropped(x) == 1)
    with compat.in_context(seen[0]):
        assert not np.all(dropped(x) == 1)
        assert keras.Variable(1.0).value.dtype == tf.bfloat16


def test_tensors_carry_masks():
    x = keras.layers.Embedding(3, 2, mask_zero=True)(tf.constant([[1, 0]]))
    assert compat.mask_of(x).numpy().tolist() == [[True, False]]
    other = tf.identity(x)
    compat.set_mask(other, compat.mask_of(x))
    assert compat.mask_of(other) is compat.mask_of(x)


def test_a_model_is_saved_with_another_optimizer(tmp_path):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    with compat.saved_with(model, keras.optimizers.SGD(0.5)):
        model.save(tmp_path / "model.keras")
    assert isinstance(model.optimizer, keras.optimizers.Adam)
    assert isinstance(
        keras.models.load_model(tmp_path / "model.keras").optimizer, keras.optimizers.SGD
    )


@pytest.mark.parametrize("freed", [False, True])
def test_a_custom_gradient_lives_as_long_as_its_graph(freed):
    def traced():
        with tf.Graph().as_default() as graph:
            x = tf.ones([2])

            @tf.custom_gradient
            def triple(y):
                return [2 * y], lambda dy: dy * (x + 2)  # not what TensorFlow would find

            results = list(triple(x))
            if freed:
                assert compat.freed_with_graph(results) == results
                compat.objects_of(graph)["it"] = x
            name = tf.compat.as_str(results[0].op.get_attr("_gradient_op_type"))
            with tf.compat.v1.Session() as session:
                assert session.run(tf.gradients(results, [x])[0]).tolist() == [3, 3]
        return weakref.ref(graph), name

    graph, name = traced()
    gc.collect()
    assert (graph() is None) == freed  # where it is so without our doing, `freed_with_graph` can go
    assert (name in gradient_registry._registry) != freed
