"""Test that LazyAdam updates the rows of a batch as Adam does, and leaves all other rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.layers import ShardedEmbedding
from tfdist.optimizers import LazyAdam
from tfdist.parallel import fsdp, zero
from tfdist.sync import Gradients

ROWS, WIDTH = 23, 5


def reference(table, steps, rate=0.1, beta_1=0.9, beta_2=0.8, epsilon=1e-7):
    """Return a table after steps, each `{row: gradient}`, by the formulas of Kingma and Ba 2015."""
    table = table.astype("float64")
    m, v = np.zeros_like(table), np.zeros_like(table)
    for number, step in enumerate(steps, 1):
        for row, gradient in step.items():
            m[row] = beta_1 * m[row] + (1 - beta_1) * gradient
            v[row] = beta_2 * v[row] + (1 - beta_2) * gradient**2
            scale = rate * np.sqrt(1 - beta_2**number) / (1 - beta_1**number)
            table[row] -= scale * m[row] / (np.sqrt(v[row]) + epsilon)
    return table, m, v


@pytest.mark.parametrize("way", ["eager", "graph", "XLA"])
def test_rows_and_moments_follow_the_formulas(way):
    random = np.random.default_rng(0)
    table = random.normal(size=(ROWS, WIDTH)).astype("float32")
    variable = keras.Variable(table)
    optimizer = LazyAdam(0.1, beta_2=0.8)
    optimizer.build([variable])

    def update(values, rows):
        optimizer.apply([tf.IndexedSlices(values, rows, [ROWS, WIDTH])], [variable])

    if way != "eager":
        update = tf.function(update, reduce_retracing=True, jit_compile=way == "XLA")
    steps = []
    for _ in range(5):
        rows = random.integers(0, ROWS, 6)
        values = random.normal(size=(6, WIDTH)).astype("float32")
        update(tf.constant(values), tf.constant(rows))
        steps.append({row: values[rows == row].sum(0) for row in rows})  # rows occur twice
    expected = reference(table, steps)
    for value, other in zip([variable, *optimizer.variables[2:]], expected, strict=True):
        np.testing.assert_allclose(value.numpy(), other, atol=1e-6)


def test_largest_velocities_are_kept_for_rows():
    random = np.random.default_rng(0)
    dense, lazy = (keras.Variable(np.ones([ROWS, WIDTH], "float32")) for _ in range(2))
    optimizers = keras.optimizers.Adam(0.1, amsgrad=True), LazyAdam(0.1, amsgrad=True)
    for scale in (1.0, 0.1, 0.01):  # all rows are used, so that Adam gives the same
        values = tf.constant(scale * random.normal(size=(ROWS, WIDTH)).astype("float32"))
        optimizers[0].apply([values], [dense])
        optimizers[1].apply([tf.IndexedSlices(values, tf.range(ROWS), values.shape)], [lazy])
    np.testing.assert_allclose(lazy.numpy(), dense.numpy(), atol=1e-6)


def trained(
    strategy, embedding=keras.layers.Embedding, shard=lambda model: None, make=LazyAdam, **options
):
    """Return the losses of a small model, its first and last weights, and its optimizer's state."""
    random = np.random.default_rng(1)
    x = random.integers(0, ROWS // 2, (25, 6)) * 2  # odd rows are never used
    y = random.normal(size=(25, 3)).astype("float32")
    keras.utils.set_random_seed(3)
    with strategy.scope():
        ids = keras.Input([6], dtype="int32")
        rows = embedding(ROWS, WIDTH)(ids)
        outputs = keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(rows))
        model = keras.Model(ids, outputs)
        shard(model)
        model.compile(make(0.05, **options), "mse")
    first = model.get_weights()
    losses = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["loss"]
    state = [v.numpy() for v in model.optimizer.variables if v.shape != ()]
    return losses, first, model.get_weights(), state


@pytest.fixture(scope="module")
def expected(one_device):
    return trained(one_device)


@pytest.mark.parametrize(
    ("replicas", "embedding", "shard"),
    [
        (2, keras.layers.Embedding, lambda model: None),
        (2, ShardedEmbedding, fsdp),
        (1, ShardedEmbedding, fsdp),
    ],
    ids=["whole", "sharded", "one part"],
)
def test_replicas_update_the_rows_that_one_updates(
    mirrored, one_device, expected, replicas, embedding, shard
):
    numbers = trained(mirrored if replicas == 2 else one_device, embedding, shard)
    for kind, other in zip(numbers, expected, strict=True):
        for value, from_one in zip(kind, other, strict=True):
            np.testing.assert_allclose(value, from_one, atol=2e-6)
    _, (first, *_), (last, *_), _ = numbers
    moved = np.abs(last - first).max(1)
    assert not moved[1::2].any()  # no batch used these rows
    assert moved[:-1:2].min() > 0.01


def test_a_saved_optimizer_goes_on_with_its_moments(tmp_path):
    random = np.random.default_rng(0)
    x, y = random.integers(0, ROWS, (8, 3)), random.normal(size=(8, 3, WIDTH))
    model = keras.Sequential([keras.Input([3]), keras.layers.Embedding(ROWS, WIDTH)])
    model.compile(LazyAdam(0.1, amsgrad=True), "mse")
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is LazyAdam
    for each in (model, loaded):
        each.fit(x[::-1], y, verbose=0)
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])


@pytest.mark.parametrize(
    "option",
    [{"global_clipnorm": 1.0}, {"gradient_accumulation_steps": 2}, {"loss_scale_factor": 8.0}],
)
def test_options_that_make_gradients_dense_are_refused(option):
    (name,) = option
    with pytest.raises(ValueError, match=f"LazyAdam: {name}: expected None, received .*clipvalue"):
        LazyAdam(0.1, **option)


@pytest.mark.parametrize("option", [{"clipnorm": 1e-3}, {"clipvalue": 1e-3}])
def test_clipped_gradients_stay_sparse(one_device, expected, option, caplog):
    numbers = trained(one_device, **option)
    _, (first, *_), (last, *_), _ = numbers
    assert (first[1::2] == last[1::2]).all()
    assert (first[0] != last[0]).any()
    assert numbers[0] != expected[0]
    assert "is dense" not in caplog.text


def test_rows_of_an_index_are_summed_before_they_are_clipped():
    table = keras.Variable(np.zeros([3, 2], "float32"))
    optimizer = LazyAdam(0.1, clipvalue=0.5)
    rows = tf.IndexedSlices([[0.4, 0.4], [0.4, -0.4]], [1, 1], [3, 2])
    optimizer.apply([rows], [table])
    moments = optimizer.variables[2].numpy()
    np.testing.assert_allclose(moments, [[0, 0], [0.05, 0], [0, 0]], atol=1e-7)


def test_a_table_with_a_dense_gradient_is_named(mirrored, caplog):
    trained(mirrored, shard=fsdp)  # which gathers the table of a keras.layers.Embedding
    lines = [line for line in caplog.messages if "LazyAdam" in line]
    assert len(lines) == 1
    assert "the gradient of embedding" in lines[0]
    assert "/embeddings is dense, so that all of its rows are updated" in lines[0]


@pytest.mark.parametrize(
    ("cause", "sync", "options"),
    [
        ("the synchronization policy", Gradients(clip_norm=1.0), {}),
        (
            "what clips, checks or scales gradients under fsdp",
            None,
            {"embedding": ShardedEmbedding, "shard": fsdp, "clipnorm": 1.0},
        ),
        ("zero", None, {"make": lambda rate: zero(LazyAdam(rate))}),
    ],
)
def test_ways_that_make_gradients_dense_are_refused(cause, sync, options):
    strategy = tfdist.make_strategy("mirrored", devices=2, sync=sync)
    with pytest.raises(ValueError, match=f"expected sparse gradients .* but {cause} makes them"):
        trained(strategy, **options)
