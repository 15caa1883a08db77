"""Test that layers take rows from a table's variable, with the numbers of Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist

TABLE = np.arange(15, dtype="float32").reshape(5, 3)
IDS = [[4, 0, 4], [-1, -5, 2]]


@pytest.fixture(params=["one_device", "mirrored", "central_storage"])
def strategy(request):
    devices = "cpu" if request.param == "one_device" else 2
    return tfdist.make_strategy(request.param, devices=devices)


def table(**options):
    variable = keras.Variable(TABLE, **options)
    return variable


def in_replicas(strategy, function):
    """Return what each replica gives in a traced step, and the kinds of the operations."""
    step = tf.function(lambda: strategy.run(function), autograph=False)
    operations = step.get_concrete_function().graph.get_operations()
    return strategy.experimental_local_results(step()), [op.type for op in operations]


KINDS = {
    "lists": lambda: IDS,
    "int64": lambda: np.array(IDS, np.int64),
    "ragged": lambda: tf.ragged.constant([[4], [], [-1, 0]]),
    "sparse": lambda: tf.sparse.from_dense([[0, 2], [1, 0]]),
    "one": lambda: 3,
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_keras(strategy, kind):
    ids = KINDS[kind]()
    expected = keras.ops.take(TABLE, ids, axis=0)
    with strategy.scope():
        variable = table()
        outside = keras.ops.take(variable, ids, axis=0)
    inside, operations = in_replicas(strategy, lambda: keras.ops.take(variable, ids, axis=0))
    for rows in (outside, *inside):
        assert type(rows) is type(expected)
        assert rows.shape.as_list() == expected.shape.as_list()
        for part, whole in zip(
            tf.nest.flatten(rows, expand_composites=True),
            tf.nest.flatten(expected, expand_composites=True),
            strict=True,
        ):
            np.testing.assert_array_equal(part, whole)
    assert "ResourceGather" in operations
    assert "ReadVariableOp" not in operations


@pytest.mark.parametrize("take", [{"axis": 1}, {}], ids=["columns", "values"])
def test_what_else_keras_takes_is_as_it_was(strategy, take):
    with strategy.scope():
        variable = table()
    expected = keras.ops.take(TABLE, [2, -1], **take).numpy()
    inside, _ = in_replicas(strategy, lambda: keras.ops.take(variable, [2, -1], **take))
    for rows in inside:
        np.testing.assert_array_equal(rows, expected)


def test_values_of_a_stateless_scope_are_taken(strategy):
    with strategy.scope():
        variable = table()

    def other():
        with keras.StatelessScope(state_mapping=[(variable, tf.constant(-TABLE))]):
            return keras.ops.take(variable, [1], axis=0)

    for rows in in_replicas(strategy, other)[0]:
        np.testing.assert_array_equal(rows, -TABLE[[1]])


def test_without_a_strategy_keras_is_as_it_was():
    tfdist.make_strategy("one_device", devices="cpu")
    variable = table()
    step = tf.function(lambda: keras.ops.take(variable, IDS, axis=0), autograph=False)
    operations = step.get_concrete_function().graph.get_operations()
    assert "ResourceGather" not in [op.type for op in operations]


def test_the_gradient_stays_sparse_where_rows_are_cast(strategy):
    with strategy.scope():
        layer = keras.layers.Embedding(5, 3, weights=TABLE / 7, dtype="mixed_bfloat16")

    def gradient():
        with tf.GradientTape() as tape:
            rows = layer(tf.constant(IDS) % 5)
            assert rows.dtype == tf.bfloat16
            loss = tf.reduce_sum(tf.square(tf.cast(rows, tf.float32)))
        gradient = tape.gradient(loss, layer.embeddings.value)
        assert isinstance(gradient, tf.IndexedSlices)
        assert gradient.dtype == tf.float32
        return tf.convert_to_tensor(gradient)

    count = np.bincount(np.reshape(IDS, -1) % 5, minlength=5)[:, None]
    rounded = tf.cast(tf.cast(TABLE / 7, tf.bfloat16), tf.float32).numpy()
    for value in in_replicas(strategy, gradient)[0]:
        np.testing.assert_allclose(value, 2 * rounded * count, rtol=1e-2)


@pytest.mark.parametrize("ids", [[5], [-6]])
def test_ids_out_of_range_are_errors(strategy, ids):
    with strategy.scope():
        variable = table()
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"is not in \[0, 5\)"):
        in_replicas(strategy, lambda: keras.ops.take(variable, ids, axis=0))


def test_rows_of_variables_that_do_not_train(strategy):
    with strategy.scope():
        variable = keras.Variable([[1], [2]], dtype="int32", trainable=False)
    for rows in in_replicas(strategy, lambda: keras.ops.take(variable, [1, 1], axis=0))[0]:
        np.testing.assert_array_equal(rows, [[2], [2]])
