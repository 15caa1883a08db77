"""Test that a sharded embedding equals `keras.layers.Embedding` for any number of shards.

The tests compare results, gradients, training and files.
"""

import functools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.parity.cases import Steps
from tfdist.layers import ShardedEmbedding

ROWS = 23  # no number of shards divides the rows
WIDTH = 4
SHARDS = pytest.mark.parametrize("shards", [1, 3, 7])


def ids(*shape, seed=0, low=0):
    """Return ids of few rows, so that ids occur several times in a batch."""
    return np.random.default_rng(seed).integers(low, ROWS, shape).astype("int32")


def pair(shards, **kwargs):
    """Return a Keras layer and ours, with the same table."""
    keras.utils.set_random_seed(1)
    theirs = keras.layers.Embedding(ROWS, WIDTH, **kwargs)
    ours = ShardedEmbedding(ROWS, WIDTH, shards=shards, **kwargs)
    theirs.build()
    ours.set_table(theirs.get_weights()[0])
    return theirs, ours


def gradients(layer, inputs):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.cast(layer(inputs), tf.float32) ** 2)
    return tape.gradient(loss, layer.trainable_variables)


def model(layer, optimizer="adam", length=5):
    """Return a compiled model; its dense weights do not depend on the layer."""
    built = keras.Sequential(
        [
            keras.Input((length,), dtype="int32"),
            layer,
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1, kernel_initializer=keras.initializers.RandomNormal(seed=3)),
        ]
    )
    built.compile(optimizer, "mse")
    return built


def fit(model, seed=0, steps=6, **kwargs):
    x = ids(8 * steps, 5, seed=seed)
    return model.fit(
        x, x[:, :1] / ROWS, batch_size=8, epochs=1, shuffle=False, verbose=0, **kwargs
    ).history["loss"]


def trained(strategy, layer, optimizer, **options):
    """Return the loss of each step, and the table."""
    with strategy.scope():
        built = model(layer(), optimizer(**options))
    steps = Steps()
    fit(built, callbacks=[steps])
    return np.array(steps.rows)[:, 0], table(built.layers[0])


def table(layer):
    return layer.get_table() if isinstance(layer, ShardedEmbedding) else layer.get_weights()[0]


# --- Results --------------------------------------------------------------------------------------
@SHARDS
def test_rows_equal_those_of_keras(shards):
    theirs, ours = pair(shards)
    for dtype in ("int32", "int64", "uint8", "float32"):
        known = tf.function(ours)
        unknown = tf.function(ours, input_signature=[tf.TensorSpec(None, dtype)])
        for shape in ((), (6,), (4, 5), (2, 3, 4), (0, 5)):
            inputs = tf.constant(ids(*shape).astype(dtype))
            expected = theirs(inputs)
            for call in (ours, unknown, *([known] if dtype == "int32" or shape == (4, 5) else [])):
                output = call(inputs)
                np.testing.assert_array_equal(output, expected)
                assert output.dtype == "float32"


@SHARDS
def test_gradients_are_sparse_and_equal_those_of_keras(shards):
    theirs, ours = pair(shards)
    inputs = ids(4, 5)
    (expected,) = gradients(theirs, inputs)
    gathered = np.zeros((ROWS, WIDTH), "float32")
    parts = gradients(ours, inputs)
    assert len(parts) == shards
    for shard, gradient in enumerate(parts):
        assert isinstance(gradient, tf.IndexedSlices)
        rows = gradient.indices.numpy() * shards + shard
        mine = inputs[inputs % shards == shard]
        assert sorted(rows) == sorted(mine if shards == 1 else np.unique(mine))
        gathered[shard::shards] = tf.convert_to_tensor(gradient)
    np.testing.assert_allclose(gathered, tf.convert_to_tensor(expected), rtol=1e-6)


OPTIMIZERS = {
    "sgd": keras.optimizers.SGD,
    "momentum": functools.partial(keras.optimizers.SGD, momentum=0.9, nesterov=True),
    "adam": keras.optimizers.Adam,
    "adagrad": keras.optimizers.Adagrad,
}


@pytest.fixture(scope="module")
def training(one_device, mirrored):
    """Return the result of training with an optimizer, replicas and shards.

    Shards of None stand for Keras' own layer.
    """

    @functools.cache
    def known(optimizer, shards, replicas=1):
        initial = keras.initializers.RandomNormal(seed=2)

        def layer():
            return (
                keras.layers.Embedding(ROWS, WIDTH, initial)
                if shards is None
                else ShardedEmbedding(ROWS, WIDTH, initial, shards=shards)
            )

        return trained(
            {1: one_device, 2: mirrored}[replicas], layer, OPTIMIZERS[optimizer], learning_rate=0.1
        )

    return known


@pytest.mark.parametrize(
    ("optimizer", "shards"),
    [("sgd", 3), ("momentum", 2), ("adam", 1), ("adam", 3), ("adagrad", 1), ("adagrad", 7)],
)
def test_training_equals_that_of_keras(optimizer, shards, training):
    theirs = training(optimizer, None)
    ours = training(optimizer, shards)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_two_replicas_train_as_one(optimizer, training):
    one = training(optimizer, 3)
    two = training(optimizer, 3, replicas=2)
    np.testing.assert_allclose(two[0], one[0], rtol=1e-5)
    np.testing.assert_allclose(two[1], one[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", [keras.optimizers.Adam, keras.optimizers.Adagrad])
def test_an_id_that_occurs_twice_has_one_gradient(optimizer):
    """It has one without any strategy, too.

    There Keras' own layer gives a sum of squares in place of the square of the sum.
    """

    def step(layer):
        rule = optimizer(0.1)
        rule.apply(gradients(layer, np.array([1, 1, 2])), layer.trainable_variables)
        return table(layer)

    dense = tf.Variable(pair(1)[0].get_weights()[0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.matmul(tf.one_hot([1, 1, 2], ROWS), dense) ** 2)
    optimizer(0.1).apply([tape.gradient(loss, dense)], [dense])
    np.testing.assert_allclose(step(pair(3)[1]), dense, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"embeddings_regularizer": "l2", "embeddings_constraint": "non_neg"},
        {
            "activity_regularizer": "l1",
            "embeddings_constraint": keras.constraints.MaxNorm(0.05, axis=1),
        },
    ],
)
def test_regularizers_and_constraints_equal_those_of_keras(options, one_device):
    seeded = keras.initializers.RandomNormal(seed=2)
    theirs, ours = (
        trained(one_device, layer, keras.optimizers.SGD, learning_rate=0.1)
        for layer in (
            lambda: keras.layers.Embedding(ROWS, WIDTH, seeded, **options),
            lambda: ShardedEmbedding(ROWS, WIDTH, seeded, **options, shards=3),
        )
    )
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-6)


@SHARDS
def test_padding_is_masked(shards):
    theirs, ours = pair(shards, mask_zero=True)
    inputs = np.array([[3, 4, 0], [0, 0, 0]])
    np.testing.assert_array_equal(ours.compute_mask(inputs), theirs.compute_mask(inputs))
    pool = keras.layers.GlobalAveragePooling1D()
    np.testing.assert_array_equal(pool(ours(inputs)), pool(theirs(inputs)))
    assert ShardedEmbedding(3, 2).compute_mask(inputs) is None


def test_ragged_and_sparse_ids():
    theirs, ours = pair(3)
    ragged = tf.ragged.constant([[1, 2, 2], [], [22]])
    assert ours(ragged).to_list() == theirs(ragged).to_list()
    sparse = tf.sparse.from_dense([[1, 0, 2], [0, 0, 22]])
    np.testing.assert_array_equal(ours(sparse), theirs(sparse))


def test_symbolic_shapes():
    layer = ShardedEmbedding(ROWS, WIDTH, shards=2)
    output = layer(keras.Input((None, 3), dtype="int64"))
    assert output.shape == (None, None, 3, WIDTH)
    assert [tuple(w.shape) for w in layer.weights] == [(12, WIDTH), (11, WIDTH)]
    assert layer.count_params() == ROWS * WIDTH

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = ShardedEmbedding(ROWS, WIDTH, shards=2)
            self.top = keras.layers.Dense(1)

        def call(self, inputs):
            return self.top(keras.ops.mean(self.table(inputs), 1))

    subclassed = Subclassed()
    subclassed.compile("sgd", "mse")
    fit(subclassed)
    assert len(subclassed.weights) == 4


@SHARDS
def test_mixed_precision_casts_rows_not_the_table(shards):
    theirs, ours = pair(shards, dtype="mixed_bfloat16")
    inputs = ids(4, 5)
    output = ours(inputs)
    assert output.dtype == "bfloat16"
    np.testing.assert_array_equal(output, theirs(inputs))
    for part, gradient in zip(ours.weights, gradients(ours, inputs), strict=True):
        assert part.dtype == "float32"
        assert isinstance(gradient, tf.IndexedSlices)
        assert gradient.values.dtype == "float32"
    wide = ShardedEmbedding(1000, 2, shards=2, dtype="mixed_bfloat16")
    np.testing.assert_array_equal(wide(np.array([257.0, 999.0])), wide(np.array([257, 999])))


@pytest.mark.parametrize("wrong", [ROWS, ROWS + 4, -1])
def test_an_id_out_of_range_is_named(wrong):
    layer = ShardedEmbedding(ROWS, WIDTH, shards=3, name="words")
    for call in (layer, tf.function(layer)):
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=rf"(?s)words: expected ids from 0 to 22 .*{wrong}",
        ):
            call(tf.constant([3, wrong, 5] if wrong > 0 else [3, wrong]))


# --- Initial values and the number of shards ------------------------------------------------------
@SHARDS
@pytest.mark.parametrize("name", ["random_normal", "glorot_uniform", "orthogonal", "zeros"])
def test_initial_values_equal_those_of_keras(shards, name):
    def initializer():
        return keras.initializers.get(
            {"class_name": name, "config": {} if name == "zeros" else {"seed": 5}}
        )

    theirs = keras.layers.Embedding(ROWS, WIDTH, initializer())
    ours = ShardedEmbedding(ROWS, WIDTH, initializer(), shards=shards)
    theirs.build()
    np.testing.assert_array_equal(ours.get_table(), theirs.get_weights()[0])


def test_a_large_table_is_drawn_in_parts(recorded):
    tables = [
        ShardedEmbedding(ROWS, WIDTH, recorded(seed=seed), shards=2).get_table()
        for seed in (5, 5, None, None)
    ]
    assert set(recorded.shapes) == {(12, WIDTH), (11, WIDTH)}
    np.testing.assert_array_equal(tables[0], tables[1])
    assert (
        len(np.unique(tables)) == 3 * ROWS * WIDTH
    )  # no two shards, and no two tables without seed, are alike
    with pytest.raises(
        ValueError, match=r"is initialized in parts. Expected one of Zeros, .*GlorotUniform"
    ):
        ShardedEmbedding(ROWS, WIDTH, "glorot_uniform", shards=2).build()
    assert ShardedEmbedding(ROWS, WIDTH, "glorot_uniform", shards=1).get_table().any()


def test_weights_are_the_initial_table():
    values = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    for weights in (values, [values], values.tolist()):
        np.testing.assert_array_equal(
            ShardedEmbedding(ROWS, WIDTH, weights=weights, shards=3).get_table(), values
        )
    with pytest.raises(
        ValueError, match=r"expected a table of shape \(23, 4\), .* received \(4, 23\)"
    ):
        ShardedEmbedding(ROWS, WIDTH, weights=values.T)


@pytest.mark.parametrize(("rows", "shards"), [(ROWS, 3), (2, 2)])
def test_each_parameter_server_has_one_shard(rows, shards, monkeypatch):
    jobs = (
        "/job:chief/task:0",
        "/job:ps/task:0",
        "/job:ps/task:1",
        "/job:ps/task:2",
        "/job:worker/task:0",
    )
    devices = [tf.config.LogicalDevice(f"{job}/device:CPU:0", "CPU") for job in jobs]
    layer = ShardedEmbedding(rows, WIDTH)
    assert layer.get_config()["shards"] is None
    with monkeypatch.context() as patch:
        patch.setattr(
            tf.distribute,
            "get_strategy",
            lambda: mock.Mock(spec=tf.distribute.ParameterServerStrategy),
        )
        patch.setattr(tf.config, "list_logical_devices", lambda kind: devices)
        layer.build()
    assert layer.get_config()["shards"] == len(layer.weights) == shards
    assert len(ShardedEmbedding.from_config(layer.get_config()).build() or layer.weights) == shards


def test_without_parameter_servers_there_is_one_shard(mirrored):
    with mirrored.scope():
        layer = ShardedEmbedding(ROWS, WIDTH)
        layer.build()
    assert layer.shards == 1


# --- Files ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("before", "after"), [(None, 3), (3, None), (3, 7), (2, 1), (1, 2)])
def test_weights_files_hold_one_table(before, after, tmp_path):
    """None stands for keras.layers.Embedding."""

    def build(shards):
        return model(
            keras.layers.Embedding(ROWS, WIDTH)
            if shards is None
            else ShardedEmbedding(ROWS, WIDTH, shards=shards)
        )

    saved = build(before)
    loaded = build(after)
    assert (table(saved.layers[0]) != table(loaded.layers[0])).any()
    saved.save_weights(tmp_path / "m.weights.h5")
    loaded.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_array_equal(table(loaded.layers[0]), table(saved.layers[0]))


def test_saved_model_resumes_training(tmp_path):
    whole = model(
        ShardedEmbedding(ROWS, WIDTH, "random_normal", "l2", "non_neg", mask_zero=True, shards=3)
    )
    fit(whole)
    whole.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert loaded.layers[0].get_config() == whole.layers[0].get_config()
    assert fit(loaded, seed=1) == fit(whole, seed=1)
    for restored, expected in zip(
        loaded.optimizer.variables, whole.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(restored, expected)


def test_a_table_is_read_once_to_be_saved(monkeypatch, tmp_path):
    """Loading does not read it at all: through parameter servers it is large."""
    built = model(ShardedEmbedding(ROWS, WIDTH, shards=3))
    reads = []
    monkeypatch.setattr(
        ShardedEmbedding,
        "get_table",
        lambda self, get=ShardedEmbedding.get_table: reads.append(1) or get(self),
    )
    built.save_weights(tmp_path / "m.weights.h5")
    built.load_weights(tmp_path / "m.weights.h5")
    assert len(reads) == 1


def test_bfloat16_tables_survive_saving(tmp_path):
    saved, loaded = (
        model(ShardedEmbedding(ROWS, WIDTH, shards=3, dtype="bfloat16")) for _ in range(2)
    )
    saved.save_weights(tmp_path / "m.weights.h5")
    loaded.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_array_equal(table(loaded.layers[0]), table(saved.layers[0]))
    assert table(loaded.layers[0]).dtype == "bfloat16"


def test_files_of_other_layers_are_refused(tmp_path):
    layer = ShardedEmbedding(ROWS, WIDTH, name="words")
    with pytest.raises(ValueError, match="never built"):
        layer.load_own_variables({"0": 0})
    layer.build()
    with pytest.raises(
        ValueError,
        match=r"words: expected one array, '0', of an embedding table; the file has \['0', '1'\]",
    ):
        layer.load_own_variables({"0": 0, "1": 0})


def test_a_saved_model_serves(tmp_path):
    built = model(ShardedEmbedding(ROWS, WIDTH, shards=3))
    built.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "served"))
    inputs = ids(2, 5)
    np.testing.assert_allclose(served.serve(inputs), built(inputs), rtol=1e-6)


# --- Arguments ------------------------------------------------------------------------------------
def test_the_config_of_keras_is_taken():
    theirs = keras.layers.Embedding(
        ROWS, WIDTH, "zeros", "l2", mask_zero=True, name="words"
    ).get_config()
    ours = ShardedEmbedding.from_config(theirs).get_config()
    assert {**theirs, **ours} == {**theirs, "shards": None}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_dim": 0}, "input_dim: expected a positive integer, received 0"),
        ({"input_dim": "23"}, "input_dim: expected a positive integer, received '23'"),
        ({"output_dim": 4.0}, "output_dim: expected a positive integer, received 4.0"),
        ({"shards": True}, "shards: expected a positive integer, received True"),
        ({"shards": -1}, "shards: expected a positive integer, received -1"),
        ({"shards": 24}, "shards: expected at most input_dim=23, received 24"),
        ({"mask_zero": "no"}, "mask_zero: expected True or False, received 'no'"),
        ({"lora_rank": 2}, "lora_rank is not supported; use keras.layers.Embedding"),
        (
            {"dtype": "int8_from_float32"},
            "dtype: expected a policy without quantization, received 'int8_from_float32'",
        ),
        ({"embeddings_initializer": "no_such"}, "no_such"),
        (
            {"embeddings_regularizer": "orthogonal_regularizer"},
            "embeddings_regularizer: expected L1, L2, L1L2 or None",
        ),
        (
            {"embeddings_constraint": "unit_norm"},
            r"or UnitNorm with axis=1.*received UnitNorm\(axis=0\)",
        ),
        ({"embeddings_constraint": lambda w: w}, "embeddings_constraint: expected NonNeg"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ShardedEmbedding(**{"input_dim": ROWS, "output_dim": WIDTH, **options})


def test_quantization_and_lora_are_refused():
    layer = ShardedEmbedding(ROWS, WIDTH)
    layer.build()
    with pytest.raises(NotImplementedError, match="quantize"):
        layer.quantize("int8")
    assert not hasattr(layer, "enable_lora")
