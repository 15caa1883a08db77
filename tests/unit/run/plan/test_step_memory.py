"""Test what the measured needs say about embedding tables that FSDP leaves in parts."""

import keras
import pytest

from tfdist import config
from tfdist.layers import ShardedEmbedding
from tfdist.parallel.sharding import fsdp
from tfdist.run.plan import step_memory

ROWS, WIDTH, PIXELS, CLASSES = 2**18, 4, 64, 10


def towers(input_shape, classes):
    """Return a model of two that share a table; a pixel of the digits is an id, from 0 to 1."""
    table = ShardedEmbedding(ROWS, WIDTH)

    def tower():
        pixels = keras.Input(input_shape)
        return keras.Model(pixels, keras.layers.Flatten()(table(keras.layers.Flatten()(pixels))))

    pixels = keras.Input(input_shape)
    joined = keras.layers.Concatenate()([tower()(pixels), tower()(pixels)])
    return keras.Model(pixels, keras.layers.Dense(classes, "softmax")(joined))


def flat(input_shape, classes):
    pixels = keras.Input(input_shape)
    rows = keras.layers.Embedding(ROWS, WIDTH)(keras.layers.Flatten()(pixels))
    outputs = keras.layers.Dense(classes, "softmax")(keras.layers.Flatten()(rows))
    return keras.Model(pixels, outputs)


@pytest.mark.parametrize(
    ("model", "optimizer", "rows", "updates_rows"),
    [("towers", "adam", None, False), ("flat", "adagrad", PIXELS * WIDTH * 4, True)],
)
def test_a_table_is_no_unit_that_is_gathered(digits_dir, model, optimizer, rows, updates_rows):
    settings = config.Run.from_dict(
        {
            "model": {"name": f"{__name__}:{model}"},
            "data": {"data_dir": str(digits_dir), "global_batch": 32},
            "train": {"optimizer": optimizer},
        }
    )
    needs = step_memory.measure(settings, 2)
    towers_of_model = 2 if model == "towers" else 1
    dense = [towers_of_model * PIXELS * WIDTH * CLASSES * 4, CLASSES * 4]
    assert needs.tables == [ROWS * WIDTH * 4]
    assert sorted(needs.weights) == sorted([*needs.tables, *dense])
    assert needs.units == [sum(dense)]
    assert (needs.table_rows, needs.updates_rows) == (rows, updates_rows)


def test_products_are_those_that_fsdp_need_not_gather(digits_dir):
    settings = config.Run.from_dict(
        {
            "model": {"name": "mlp", "options": {"widths": (512, 512)}},
            "data": {"data_dir": str(digits_dir), "global_batch": 32},
        }
    )
    needs = step_memory.measure(settings, 2)
    kernels = [512 * 512 * 4 if n == 512 * 513 * 4 else 0 for n in needs.units]
    assert [sum(p.kernel_bytes for p in each) for each in needs.products] == kernels
    assert sum(kernels) > 0


def test_rows_are_unknown_of_a_layer_that_returns_others():
    class Mean(keras.layers.Embedding):
        def call(self, inputs):
            return keras.ops.mean(super().call(inputs), 1)

    with keras.StatelessScope(initialize_variables=False):
        layer = Mean(ROWS, WIDTH)
        ids = keras.Input([3])
        model = keras.Model(ids, layer(ids))
    assert fsdp.tables_of(layer) == [layer.embeddings]
    assert step_memory._table_rows(model, [layer]) is None
