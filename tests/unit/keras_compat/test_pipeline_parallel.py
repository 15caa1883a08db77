"""Test the private names of Keras that pipeline parallelism relies on; see test_hooks.py."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.keras_compat.parallel import (
    graph_calls,
    layer_weights,
    mask_of,
    move,
    updating_in_place,
    with_mask,
)
from tfdist.parallel.pipeline_parallel.stage_passes import is_seed

L = keras.layers


def test_calls_of_a_graph_can_run_in_their_order():
    inputs = keras.Input((4,))
    dense = L.Dense(4)
    add = L.Add()
    model = keras.Model(inputs, add([dense(dense(inputs)), inputs]))
    calls = graph_calls(model)
    assert [operation for operation, _, _ in calls] == [dense, dense, add]
    known = {id(x) for x in model.inputs}
    for _, takes, makes in calls:
        assert {id(x) for x in takes} <= known
        known |= {id(x) for x in makes}
    assert {id(x) for x in model.outputs} <= known
    assert graph_calls(keras.Sequential([keras.Input((4,)), L.Dense(2)])) is None


def test_a_variable_moves_with_its_value():
    variable = keras.Variable(np.arange(3.0), dtype="float32", trainable=False, name="moved")
    move(variable, "/job:localhost/replica:0/task:0/device:CPU:1")
    assert variable.value.device.endswith("CPU:1")
    assert variable.numpy().tolist() == [0, 1, 2]
    assert not variable.value.trainable
    variable.assign_add([1, 1, 1])
    assert variable.numpy().tolist() == [1, 2, 3]


def test_masks_are_found_by_layers():
    tokens = tf.constant([[1, 2, 0]])
    embedded = L.Embedding(3, 2, mask_zero=True)(tokens)
    assert mask_of(embedded).numpy().tolist() == [[True, True, False]]
    assert mask_of(tf.identity(embedded)) is None
    average = L.GlobalAveragePooling1D()
    np.testing.assert_allclose(
        average(with_mask(tf.identity(embedded), mask_of(embedded))), average(embedded), rtol=1e-6
    )


@pytest.mark.parametrize("scaled", [False, True])
def test_slots_and_updates_are_where_their_variables_are(scaled):
    with tf.device("cpu:1"):
        variable = keras.Variable([1.0, 2.0])
    inner = keras.optimizers.AdamW(0.1, weight_decay=0.1, gradient_accumulation_steps=2)
    optimizer = keras.optimizers.LossScaleOptimizer(inner) if scaled else inner
    stock = inner._distribution_strategy
    with updating_in_place(optimizer):
        optimizer.build([variable])

    @tf.function
    def step():
        with tf.device("cpu:1"):
            gradient = 2.0 * variable.value
        with updating_in_place(optimizer):
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
    assert {"Sqrt", "AddV2"} <= {node.op for node in large}
    assert {
        node.device[-5:]
        for node in large
        if node.op not in ("Placeholder", "ReadVariableOp", "Const")
    } == {"CPU:1"}


def test_frozen_weights_are_distinguished_from_state():
    layer = keras.Sequential(
        [keras.Input((4,)), L.Dense(2), L.BatchNormalization(), L.Dropout(0.5)]
    )
    layer.trainable = False
    assert [v.name for v in layer_weights(layer)] == ["kernel", "bias", "gamma", "beta"]
    assert {v.name for v in layer.variables} - {v.name for v in layer_weights(layer)} == {
        "moving_mean",
        "moving_variance",
        "seed_generator_state",
    }


def test_a_stateless_scope_collects_seeds_and_losses():
    layer = keras.Sequential(
        [
            keras.Input((4,)),
            L.Dense(4, activity_regularizer="l2", kernel_regularizer="l2"),
            L.Dropout(0.5),
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
