"""Test that a sharded embedding gives the numbers of a whole one, and that its table stays put."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.keras_compat.sparse_gradients import merge_duplicates
from tfdist.layers import ShardedEmbedding
from tfdist.parallel import deferred, fsdp
from tfdist.parallel.sharding.fsdp import tables_of

TABLE = (101, 5)  # neither rows nor values divide by two
# Those that update the rows of a sparse gradient, and one that needs a dense one.
OPTIMIZERS = {
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "lazy adam": lambda: tfdist.optimizers.LazyAdam(0.01),
}


def trained(
    strategy, optimizer, embedding, sharded, shape=TABLE, twice=True, predicts=False, **compiled
):
    """Return losses, weights and perhaps predictions; and the bytes that a sharded model sends."""
    random = np.random.default_rng(0)
    x = random.integers(0, shape[0], (25, 6))
    y = random.normal(size=(25, 3)).astype("float32")
    keras.utils.set_random_seed(3)
    with strategy.scope():
        ids = keras.Input([6], dtype="int32")
        table = embedding(*shape)
        rows = table(ids)
        if twice:
            rows = keras.layers.Add()([rows, table(ids[:, ::-1])])  # two calls, the same ids
        outputs = keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(rows))
        model = keras.Model(ids, outputs)
        shards = fsdp(model) if sharded else None
        model.compile(OPTIMIZERS[optimizer](), "mse", **compiled)
    # The last batch is one row: a replica has none.
    losses = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["loss"]
    numbers = [losses, *model.get_weights()]
    if predicts:
        numbers.append(model.predict(x[:9], batch_size=8, verbose=0))
    return numbers, shards and shards.bytes_per_step


@pytest.fixture(scope="module")
def whole(one_device):
    """Return a function that returns the numbers of one device, whose model is not sharded."""

    @functools.cache
    def numbers(*args, **kwargs):
        return trained(one_device, *args, **kwargs, sharded=False)[0]

    return numbers


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sharded_embedding_equals_a_whole_one(mirrored, whole, optimizer):
    predicts = optimizer == "sgd"
    expected = whole(optimizer, keras.layers.Embedding, predicts=predicts)
    numbers, sent = trained(mirrored, optimizer, ShardedEmbedding, sharded=True, predicts=predicts)
    for value, other in zip(numbers, expected, strict=True):
        np.testing.assert_allclose(value, other, atol=1e-6)
    assert sent < 4 * TABLE[0] * TABLE[1]  # less than the table, which no replica gathers


@pytest.fixture
def merged(monkeypatch):
    """Return a list that tells for each sparse gradient whether rows of it were merged."""
    found = []

    def noted(grad):
        result = merge_duplicates(grad)
        if isinstance(grad, tf.IndexedSlices):
            found.append(result is not grad)
        return result

    monkeypatch.setattr("tfdist.parallel.sharding.fsdp.merge_duplicates", noted)
    return found


@pytest.mark.parametrize(
    ("strategy", "optimizer", "twice", "merges"),
    [
        ("one_device", "adagrad", False, {True}),
        ("one_device", "adam", False, set()),
        ("mirrored", "adagrad", False, {False}),
        ("mirrored", "adagrad", True, {True}),
        ("mirrored", "adam", False, set()),
    ],
)
def test_rows_of_several_examples_are_updated_once(
    request, merged, whole, strategy, optimizer, twice, merges
):
    """Parts have whole rows, and Adagrad squares the sum of what all examples add to a row.

    Rows that a lookup has merged are not merged again.
    """
    strategy = request.getfixturevalue(strategy)
    settings = {"shape": (10, 4), "twice": twice}
    expected = whole(optimizer, keras.layers.Embedding, **settings)
    numbers, _ = trained(strategy, optimizer, ShardedEmbedding, sharded=True, **settings)
    assert set(merged) == merges
    for value, other in zip(numbers, expected, strict=True):
        np.testing.assert_allclose(value, other, atol=1e-6)


@pytest.mark.parametrize(("optimizer", "twice"), [("adagrad", True), ("lazy adam", False)])
def test_compiled_steps_of_one_replica_update_the_same_rows(one_device, whole, optimizer, twice):
    settings = {"shape": (40, 4), "twice": twice}
    expected = whole(optimizer, keras.layers.Embedding, jit_compile=False, **settings)
    numbers, _ = trained(
        one_device, optimizer, ShardedEmbedding, sharded=True, jit_compile=True, **settings
    )
    for value, other in zip(numbers, expected, strict=True):
        np.testing.assert_allclose(value, other, atol=1e-6)


class Bag(keras.layers.Layer):
    """Sum rows of two tables, and nothing else, as DistributedEmbedding of keras-rs does."""

    def __init__(self, rows, width):
        super().__init__()
        self.large = keras.layers.Embedding(rows, width)
        self.small = keras.layers.Embedding(7, width)

    def build(self, shape):
        self.large.build(shape)
        self.small.build(shape)

    def call(self, ids):
        return self.large(ids) + self.small(ids % 7)


class Positions(keras.layers.Layer):
    """Add a weight of its own to the rows of a table."""

    def __init__(self, rows, width):
        super().__init__()
        self.table = keras.layers.Embedding(rows, width)

    def build(self, shape):
        self.table.build(shape)
        self.added = self.add_weight(shape=[self.table.output_dim])

    def call(self, ids):
        return self.table(ids) + self.added


@pytest.mark.parametrize(
    ("optimizer", "layer", "gathered"),
    [
        ("adagrad", keras.layers.Embedding, False),
        ("adam", keras.layers.Embedding, False),
        ("adagrad", Bag, False),
        ("adam", Bag, False),
        ("adam", Positions, True),
    ],
)
def test_rows_of_tables_of_keras_are_looked_up(
    mirrored, monkeypatch, whole, optimizer, layer, gathered
):
    monkeypatch.setattr("tfdist.parallel.sharding.fsdp.MIN_VALUES", TABLE[0] * TABLE[1])
    expected = whole(optimizer, layer, predicts=False)
    numbers, sent = trained(mirrored, optimizer, layer, sharded=True)
    for value, other in zip(numbers, expected, strict=True):
        np.testing.assert_allclose(value, other, atol=1e-6)
    assert (sent >= 4 * TABLE[0] * TABLE[1] // 2) is gathered  # half of the table, at least


def test_a_table_that_is_also_read_whole_is_gathered_there(mirrored, monkeypatch):
    monkeypatch.setattr("tfdist.parallel.sharding.fsdp.MIN_VALUES", 1)

    def scores(sharded):
        keras.utils.set_random_seed(3)
        with mirrored.scope():
            ids = keras.Input([6], dtype="int32")
            table = keras.layers.Embedding(*TABLE)
            x = keras.layers.GlobalAveragePooling1D()(table(ids))
            tied = keras.layers.Lambda(lambda x: x @ keras.ops.transpose(table.embeddings))
            model = keras.Model(ids, tied(x))
            shards = fsdp(model) if sharded else None
            model.compile(keras.optimizers.Adagrad(0.1), "mse")
        x = np.random.default_rng(0).integers(0, TABLE[0], (25, 6))
        history = model.fit(x, np.eye(TABLE[0])[x[:, 0]], batch_size=8, epochs=2, verbose=0)
        if shards is not None:
            calls = {*shards._gathering.forward_group.bytes}
            assert any("lookup" in call for call in calls)
            assert any("read" in call for call in calls)
        return [history.history["loss"], *model.get_weights()]

    for value, other in zip(scores(True), scores(False), strict=True):
        np.testing.assert_allclose(value, other, atol=1e-6)


class Scores(keras.layers.Embedding):
    """Compute scores by the whole table, too, as ReversibleEmbedding of Keras does."""

    tie_weights = True


class Outer(keras.layers.Layer):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: keras.layers.Embedding(2**18, 4), 1),
        (lambda: keras.layers.Embedding(2**18 - 1, 4), 0),
        (lambda: keras.layers.Embedding(2**18, 4, lora_rank=2), 0),
        (lambda: Scores(2**18, 4), 0),
        (lambda: ShardedEmbedding(7, 2), 1),
        (lambda: ShardedEmbedding(7, 2, shards=2), 0),
    ],
    ids=["large", "small", "LoRA", "scores", "sharded", "several shards"],
)
def test_layers_whose_rows_are_looked_up(make, count):
    layer = make()
    assert not tables_of(Outer(layer))  # not built
    layer.build()
    assert not tables_of(keras.layers.TimeDistributed(layer))
    assert len(tables_of(layer)) == len(tables_of(Outer(layer))) == count


def test_ids_out_of_range_name_the_table(mirrored, monkeypatch):
    monkeypatch.setattr("tfdist.parallel.sharding.fsdp.MIN_VALUES", 1)
    with mirrored.scope():
        table = keras.layers.Embedding(*TABLE, name="items")
        model = keras.Sequential([keras.Input([], dtype="int32"), table])
        fsdp(model)
        model.compile("sgd", "mse")
    np.testing.assert_array_equal(
        model.predict(np.array([-1, -101]), verbose=0), model.get_weights()[0][[100, 0]]
    )
    for id_ in (101, -102):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"items/embeddings: .* 101 rows"):
            model.predict(np.array([0, id_]), verbose=0)


def looked_up(table, **options):
    """Return rows and gradient of a table over three replicas, and those of the whole table."""
    random = np.random.default_rng(0)
    ids = random.integers(0, table[0], (3, 8))
    ids[1] = table[0] - 1  # one row alone
    upstream = random.normal(size=(3, 8, table[1])).astype("float32")
    strategy = tfdist.make_strategy("mirrored", devices=3)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input([], dtype="int32"), ShardedEmbedding(*table)])
        fsdp(model, **options)

    def on_replica():
        rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        with tf.GradientTape() as tape:
            rows = model.layers[0](tf.constant(ids)[rank])
            loss = tf.reduce_sum(rows * tf.constant(upstream)[rank])
        return rows, tf.convert_to_tensor(tape.gradient(loss, model.trainable_weights)[0])

    results = tf.function(lambda: strategy.run(on_replica), autograph=False)()
    rows, parts = (
        np.stack([x.numpy() for x in strategy.experimental_local_results(result)])
        for result in results
    )
    values = model.get_weights()[0]
    gradient = np.zeros_like(values)
    np.add.at(gradient, ids, upstream)
    return (rows, parts.reshape(-1)[: values.size].reshape(values.shape)), (values[ids], gradient)


@pytest.mark.parametrize(
    "table",
    [(99, 4), (100, 4), (1, 7), (2, 2)],
    ids=["whole rows in parts", "rows in two parts", "a row in all parts", "an empty part"],
)
def test_rows_may_lie_in_several_parts(table):
    (rows, gradient), (expected_rows, expected_gradient) = looked_up(table)
    np.testing.assert_array_equal(rows, expected_rows)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)


@pytest.mark.parametrize("option", ["gather_dtype", "grad_dtype"])
def test_rows_are_sent_in_the_dtypes_of_weights_and_gradients(option):
    results = zip(*looked_up((100, 4), **{option: "bfloat16"}), strict=True)
    for name, (value, exact) in zip(("gather_dtype", "grad_dtype"), results, strict=True):
        error = np.abs(value - exact).max() / np.abs(exact).max()
        assert (1e-5 < error < 1e-2) if name == option else (error < 1e-6), name


def test_a_large_table_is_never_whole(mirrored, recorded):
    def table(initializer, values=None):
        with mirrored.scope():
            with deferred():
                ids = keras.Input([], dtype="int32")
                model = keras.Sequential([ids, ShardedEmbedding(*TABLE, initializer)])
                if values is not None:
                    model.set_weights([values])
            fsdp(model)
        return model.get_weights()[0]

    tables = [table(recorded(seed=seed)) for seed in (5, 5, None, None)]
    assert set(recorded.shapes) == {(253,)}
    np.testing.assert_array_equal(tables[0], tables[1])
    # No two parts, and no two tables without a seed, are alike.
    assert len(np.unique(tables)) == 3 * TABLE[0] * TABLE[1]
    np.testing.assert_array_equal(table(recorded(), tables[0] + 1), tables[0] + 1)
    assert table("glorot_uniform").any()
    assert (table("ones") == 1).all()


def test_table_in_several_weights_is_gathered(mirrored, whole):
    def in_two(*table):
        return ShardedEmbedding(*table, shards=2)

    numbers, sent = trained(mirrored, "adagrad", in_two, sharded=True)
    losses, table, *others = whole("adagrad", keras.layers.Embedding, predicts=False)
    expected = [losses, table[::2], table[1::2], *others]
    for value, other in zip(numbers, expected, strict=True):
        np.testing.assert_allclose(value, other, atol=1e-6)
    assert sent > 4 * TABLE[0] * TABLE[1]
