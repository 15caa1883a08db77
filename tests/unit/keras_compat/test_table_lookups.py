"""Test that layers take rows from a table's variable, with the numbers of Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.keras_compat.table_lookups import tables_updated

TABLE = np.arange(15, dtype="float32").reshape(5, 3)
IDS = [[4, 0, 4], [-1, -5, 2]]
KINDS = {
    "lists": lambda: IDS,
    "int64": lambda: np.array(IDS, np.int64),
    "ragged": lambda: tf.ragged.constant([[4], [], [-1, 0]]),
    "sparse": lambda: tf.sparse.from_dense([[0, 2], [1, 0]]),
    "int16": lambda: np.array([-5, 4], np.int16),
    "one": lambda: 3,
}


@pytest.fixture(params=["one_device", "mirrored", "central_storage"])
def strategy(request):
    devices = "cpu" if request.param == "one_device" else 2
    return tfdist.make_strategy(request.param, devices=devices)


def in_replicas(strategy, function, by_rows=True):
    """Return what each replica gives in a traced step, and the kinds of the operations."""

    def on_replica():
        with tables_updated(by_rows):
            return function()

    step = tf.function(lambda: strategy.run(on_replica), autograph=False)
    operations = step.get_concrete_function().graph.get_operations()
    return strategy.experimental_local_results(step()), [op.type for op in operations]


def assert_same(result, expected):
    assert type(result) is type(expected)
    parts, others = (tf.nest.flatten(x, expand_composites=True) for x in (result, expected))
    for part, other in zip(parts, others, strict=True):
        np.testing.assert_array_equal(part, other)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_keras(strategy, kind):
    ids = KINDS[kind]()
    expected = keras.ops.take(TABLE, ids, axis=0)
    with strategy.scope():
        variable = keras.Variable(TABLE)
        assert_same(keras.ops.take(variable, ids, axis=0), expected)
    inside, operations = in_replicas(strategy, lambda: keras.ops.take(variable, ids, axis=0))
    for rows in inside:
        assert_same(rows, expected)
    assert "ResourceGather" in operations
    assert "ReadVariableOp" not in operations


def test_rows_keep_the_shape_of_sparse_ids(strategy):
    with strategy.scope():
        variable = keras.Variable(TABLE)

    def on_replica(ids):
        with tables_updated(True):
            found = keras.ops.take(variable, ids, axis=0)
        assert found.shape.as_list() == [None, 2, 3]
        return found

    spec = tf.SparseTensorSpec([None, 2], tf.int64)
    step = tf.function(lambda ids: strategy.run(on_replica, (ids,)), input_signature=[spec])
    ids = tf.sparse.from_dense(tf.constant([[0, 2], [1, 0]], tf.int64))
    for each in strategy.experimental_local_results(step(ids)):
        np.testing.assert_array_equal(each, TABLE[[[0, 2], [1, 0]]])


@pytest.mark.parametrize("by_rows", [False, None])
def test_tables_that_are_updated_as_a_whole_are_read(strategy, by_rows):
    """After a gather from a variable, TensorFlow would copy it at each such update."""
    with strategy.scope():
        variable = keras.Variable(TABLE)

    def rows():
        return keras.ops.take(variable, IDS, axis=0)

    inside, operations = in_replicas(strategy, rows, by_rows=by_rows)
    for each in inside:
        np.testing.assert_array_equal(each, TABLE[IDS])
    assert "ResourceGather" not in operations


@pytest.mark.parametrize(("dtype", "regularizer"), [("int8", None), ("float32", "l2")])
def test_other_tables_are_read(strategy, dtype, regularizer):
    with strategy.scope():
        variable = keras.Variable(TABLE, dtype=dtype)
        variable.regularizer = keras.regularizers.get(regularizer)
    found, operations = in_replicas(strategy, lambda: keras.ops.take(variable, IDS, axis=0))
    for each in found:
        np.testing.assert_array_equal(each, TABLE[IDS])
    assert "ResourceGather" not in operations


@pytest.mark.parametrize(
    ("optimizer", "by_rows"),
    [
        (lambda: keras.optimizers.Adagrad(), True),
        (lambda: keras.optimizers.SGD(), True),
        (lambda: tfdist.optimizers.LazyAdam(), True),
        (lambda: keras.optimizers.SGD(momentum=0.9), False),
        (lambda: keras.optimizers.Adagrad(clipnorm=1.0), False),
        (lambda: keras.optimizers.Adam(), False),
        (lambda: tfdist.parallel.zero("adagrad"), False),
    ],
    ids=["adagrad", "sgd", "lazy adam", "momentum", "clipping", "adam", "zero"],
)
def test_steps_gather_from_the_table_if_the_optimizer_updates_rows(mirrored, optimizer, by_rows):
    with mirrored.scope():
        model = keras.Sequential([keras.Input([2], dtype="int32"), keras.layers.Embedding(5, 3)])
        model.compile(optimizer(), "mse")
    engine = mirrored.tfdist_engine
    assert engine.updates_rows(model) is by_rows
    engine.use(tfdist.sync.policy("bfloat16"))
    try:
        assert not engine.updates_rows(model)
        engine.use(tfdist.sync.policy(tfdist.sync.LocalSGD(every=2)))
        assert engine.updates_rows(model) is by_rows
    finally:
        engine.use(tfdist.sync.policy(None))


def test_a_fit_gathers_from_the_table(strategy):
    with strategy.scope():
        table = keras.layers.Embedding(5, 3)
        model = keras.Sequential([keras.Input([3], dtype="int32"), table])
        model.compile(keras.optimizers.Adagrad(), "mse")
    seen = []
    call = table.call

    def noted(ids):
        rows = call(ids)
        if not tf.executing_eagerly():
            seen.extend(op.type for op in rows.graph.get_operations())
        return rows

    table.call = noted
    x, y = np.array(IDS) % 5, np.zeros([2, 3, 3])
    for method, *arguments in ((model.fit, x, y), (model.evaluate, x, y), (model.predict, x)):
        seen.clear()
        method(*arguments, verbose=0)
        assert "ResourceGather" in seen


@pytest.mark.parametrize("take", [{"axis": 1}, {}], ids=["columns", "values"])
def test_what_else_keras_takes_is_as_it_was(strategy, take):
    with strategy.scope():
        variable = keras.Variable(TABLE)
    expected = keras.ops.take(TABLE, [2, -1], **take).numpy()
    inside, _ = in_replicas(strategy, lambda: keras.ops.take(variable, [2, -1], **take))
    for rows in inside:
        np.testing.assert_array_equal(rows, expected)


def test_values_of_a_stateless_scope_are_taken(strategy):
    with strategy.scope():
        variable = keras.Variable(TABLE)

    def other():
        with keras.StatelessScope(state_mapping=[(variable, tf.constant(-TABLE))]):
            return keras.ops.take(variable, [1], axis=0)

    for rows in in_replicas(strategy, other)[0]:
        np.testing.assert_array_equal(rows, -TABLE[[1]])


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
        variable = keras.Variable(TABLE)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"is not in \[0, 5\)"):
        in_replicas(strategy, lambda: keras.ops.take(variable, ids, axis=0))
