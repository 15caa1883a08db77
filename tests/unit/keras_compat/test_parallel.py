"""Test the private names of Keras that sharding and pipeline parallelism rely on."""

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
from tfdist.parallel.pipeline_parallel.stage_passes import is_seed


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


# --- Pipeline parallelism -------------------------------------------------------------------------
def test_calls_of_a_graph_can_run_in_their_order():
    inputs = keras.Input((4,))
    dense = keras.layers.Dense(4)
    add = keras.layers.Add()
    model = keras.Model(inputs, add([dense(dense(inputs)), inputs]))
    calls = compat.graph_calls(model)
    assert [operation for operation, _, _ in calls] == [dense, dense, add]
    known = {id(x) for x in model.inputs}
    for _, takes, makes in calls:
        assert {id(x) for x in takes} <= known
        known |= {id(x) for x in makes}
    assert {id(x) for x in model.outputs} <= known
    assert compat.graph_calls(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])) is None


def test_a_variable_moves_with_its_value():
    variable = keras.Variable(np.arange(3.0), dtype="float32", trainable=False, name="moved")
    compat.move(variable, "/job:localhost/replica:0/task:0/device:CPU:1")
    assert variable.value.device.endswith("CPU:1")
    assert variable.numpy().tolist() == [0, 1, 2]
    assert not variable.value.trainable
    variable.assign_add([1, 1, 1])
    assert variable.numpy().tolist() == [1, 2, 3]


def test_masks_are_found_by_layers():
    tokens = tf.constant([[1, 2, 0]])
    embedded = keras.layers.Embedding(3, 2, mask_zero=True)(tokens)
    assert compat.mask_of(embedded).numpy().tolist() == [[True, True, False]]
    assert compat.mask_of(tf.identity(embedded)) is None
    average = keras.layers.GlobalAveragePooling1D()
    np.testing.assert_allclose(
        average(compat.with_mask(tf.identity(embedded), compat.mask_of(embedded))),
        average(embedded),
        rtol=1e-6,
    )


@pytest.mark.parametrize("scaled", [False, True])
def test_slots_and_updates_are_where_their_variables_are(scaled):
    with tf.device("cpu:1"):
        variable = keras.Variable([1.0, 2.0])
    inner = keras.optimizers.AdamW(0.1, weight_decay=0.1, gradient_accumulation_steps=2)
    optimizer = keras.optimizers.LossScaleOptimizer(inner) if scaled else inner
    stock = inner._distribution_strategy
    with compat.updating_in_place(optimizer):
        optimizer.build([variable])

    @tf.function
    def step():
        with tf.device("cpu:1"):
            gradient = 2.0 * variable.value
        with compat.updating_in_place(optimizer):
            optimizer.apply([gradient], [variable])

    graph = step.get_concrete_function().graph
    assert inner._distribution_strategy is stock
    assert (
        not {"_all_reduce_sum_gradients", "_backend_reset_gradient_accumulators"}
        & vars(inner).keys()
    )
    slots = [v for v in inner.variables if v.shape == (2,)]
    assert len(slots) == 3
    assert {v.value.device[-5:] for v in slots} == {"CPU:1"}
    graph_def = graph.as_graph_def(add_shapes=True)
    nodes = [
        node
        for nodes in (graph_def.node, *(f.node_def for f in graph_def.library.function))
        for node in nodes
    ]
    assert "IdentityN" not in {node.op for node in nodes}
    large = [
        node
        for node in nodes
        if any(
            [size.size for size in shape.dim] == [2]
            for shape in node.attr["_output_shapes"].list.shape
        )
    ]
    assert {"RealDiv", "AddV2"} <= {node.op for node in large}
    assert "ResourceApplyAdam" in {node.op for node in nodes}
    assert {
        node.device[-5:]
        for node in large
        if node.op not in ("Placeholder", "ReadVariableOp", "Const")
    } == {"CPU:1"}


def test_frozen_weights_are_distinguished_from_state():
    layer = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(2),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
        ]
    )
    layer.trainable = False
    assert [v.name for v in compat.layer_weights(layer)] == ["kernel", "bias", "gamma", "beta"]
    assert {v.name for v in layer.variables} - {v.name for v in compat.layer_weights(layer)} == {
        "moving_mean",
        "moving_variance",
        "seed_generator_state",
    }


def test_a_stateless_scope_collects_seeds_and_losses():
    layer = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(4, activity_regularizer="l2", kernel_regularizer="l2"),
            keras.layers.Dropout(0.5),
        ]
    )
    seeds = [v for v in layer.variables if is_seed(v)]
    assert [v.shape for v in seeds] == [(2,)]
    before = seeds[0].numpy()
    with keras.StatelessScope(
        [(v, v.value) for v in layer.variables], collect_losses=True
    ) as scope:
        layer(tf.ones([2, 4]), training=True)
    assert len(scope.losses) == 1  # the kernel's is not among them
    assert (scope.get_current_value(seeds[0]).numpy() != before).any()
    assert (seeds[0].numpy() == before).all()
