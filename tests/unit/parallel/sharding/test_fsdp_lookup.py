"""Test that a sharded embedding gives the numbers of a whole one, and that its table stays put."""

import keras
import numpy as np
import pytest

from tfdist.layers import ShardedEmbedding
from tfdist.parallel import fsdp

TABLE = (101, 5)  # neither rows nor values divide by two


def trained(strategy, embedding, sharded):
    """Return losses, predictions and weights, and the bytes of a step if the model is sharded."""
    random = np.random.default_rng(0)
    x = random.integers(0, TABLE[0], (25, 6))
    y = random.normal(size=(25, 3)).astype("float32")
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([6], dtype="int32"),
                embedding(*TABLE),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(3),
            ]
        )
        shards = fsdp(model) if sharded else None
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
    # The last batch is one row: a replica has none.
    losses = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["loss"]
    numbers = [losses, model.predict(x, batch_size=8, verbose=0), *model.get_weights()]
    return numbers, shards and shards.bytes_per_step


@pytest.fixture(scope="module")
def whole(mirrored):
    return trained(mirrored, keras.layers.Embedding, sharded=False)[0]


@pytest.mark.parametrize("shards", [None, 2], ids=["a table", "a table in two weights"])
def test_sharded_embedding_equals_a_whole_one(mirrored, whole, shards):
    numbers, sent = trained(
        mirrored, lambda *table: ShardedEmbedding(*table, shards=shards), sharded=True
    )
    if shards == 2:  # its rows are in another order
        first, second = numbers[2:4]
        table = np.empty(TABLE, "float32")
        table[::2] = first
        table[1::2] = second
        numbers[2:4] = [table]
    for value, expected in zip(numbers, whole, strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-6)
    table_bytes = 4 * TABLE[0] * TABLE[1]
    assert (sent < table_bytes) == (shards is None)
