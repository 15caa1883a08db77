"""Test that a sharded embedding gives the numbers of a whole one, and that its table stays put."""

import keras
import numpy as np
import pytest

from tfdist.layers import ShardedEmbedding
from tfdist.parallel import fsdp

TABLE = (101, 5)  # neither rows nor values divide by two
# Those that update the rows of a sparse gradient, and one that needs a dense one.
OPTIMIZERS = {
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


def trained(strategy, optimizer, embedding, sharded):
    """Return losses, predictions and weights, and the bytes of a step if the model is sharded."""
    random = np.random.default_rng(0)
    x = random.integers(0, TABLE[0], (25, 6))
    y = random.normal(size=(25, 3)).astype("float32")
    keras.utils.set_random_seed(3)
    with strategy.scope():
        ids = keras.Input([6], dtype="int32")
        table = embedding(*TABLE)
        rows = keras.layers.Add()([table(ids), table(ids[:, ::-1])])  # two calls, the same ids
        outputs = keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(rows))
        model = keras.Model(ids, outputs)
        shards = fsdp(model) if sharded else None
        model.compile(OPTIMIZERS[optimizer](), "mse")
    # The last batch is one row: a replica has none.
    losses = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["loss"]
    numbers = [losses, model.predict(x, batch_size=8, verbose=0), *model.get_weights()]
    return numbers, shards and shards.bytes_per_step


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sharded_embedding_equals_a_whole_one(mirrored, optimizer):
    expected, _ = trained(mirrored, optimizer, keras.layers.Embedding, sharded=False)
    numbers, sent = trained(mirrored, optimizer, ShardedEmbedding, sharded=True)
    for value, other in zip(numbers, expected, strict=True):
        np.testing.assert_allclose(value, other, atol=1e-6)
    assert sent < 4 * TABLE[0] * TABLE[1]  # less than the table, which no replica gathers


def test_table_in_several_weights_is_gathered(mirrored):
    def in_two(*table):
        return ShardedEmbedding(*table, shards=2)

    (losses, predictions, *_), sent = trained(mirrored, "adagrad", in_two, sharded=True)
    expected, _ = trained(mirrored, "adagrad", keras.layers.Embedding, sharded=False)
    np.testing.assert_allclose(losses, expected[0], atol=1e-6)
    np.testing.assert_allclose(predictions, expected[1], atol=1e-6)
    assert sent > 4 * TABLE[0] * TABLE[1]
