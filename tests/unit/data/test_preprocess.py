"""Test that Keras layers learn from a source in its order and preprocess batches row by row.

They do the latter inside of a data pipeline.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import data
from tfdist.data import preprocess

X = {
    "age": np.array([1.0, 2.0, 3.0, 4.0, 10.0], np.float32),
    "city": np.array(["Rome", "Paris", "Rome", "Oslo", "Rome"]),
    "note": np.array(["good food", "bad", "good bad food", "x", "good"]),
    "other": np.arange(5),
}
Y = np.arange(5)


def test_text_and_tables_in_a_pipeline():
    layers = {
        "age": keras.layers.Normalization(),
        "city": keras.layers.StringLookup(output_mode="one_hot"),
        "note": keras.layers.TextVectorization(output_sequence_length=2),
    }
    prepare = preprocess.adapt(layers, (X, Y), global_batch=2)
    assert layers["city"].get_vocabulary() == ["[UNK]", "Rome", "Paris", "Oslo"]
    assert layers["note"].get_vocabulary()[2:4] == ["good", "food"]
    rows = {}
    for x, y in data.pipeline((X, Y), 2, batch_transform=prepare):
        assert {name: value.shape[1:] for name, value in x.items()} == {
            "age": (1,),
            "city": (4,),
            "note": (2,),
            "other": (),
        }
        rows |= {
            int(label): {name: value[i].numpy() for name, value in x.items()}
            for i, label in enumerate(y)
        }
    np.testing.assert_allclose(
        [rows[i]["age"][0] for i in range(5)], (X["age"] - 4) / np.std(X["age"]), rtol=1e-5
    )
    assert [rows[i]["city"].argmax() for i in range(5)] == [1, 2, 1, 3, 1]
    assert rows[2]["note"].tolist() == [2, layers["note"].get_vocabulary().index("bad")]
    assert [rows[i]["other"] for i in range(5)] == Y.tolist()


@pytest.mark.parametrize(
    ("make", "x", "expected"),
    [
        (lambda: keras.layers.Discretization(num_bins=2), X["age"], [0, 0, 1, 1, 1]),
        (lambda: keras.layers.StringLookup(output_mode="count"), X["city"], None),
        (lambda: keras.layers.Rescaling(0.5), X["age"], X["age"] / 2),
        (lambda: keras.layers.Normalization(mean=1.0, variance=4.0), X["age"], (X["age"] - 1) / 2),
        (lambda: keras.layers.Normalization(axis=None), X["age"].reshape(5, 1), None),
    ],
)
def test_one_layer_for_x_itself(make, x, expected):
    layer = make()
    prepare = (
        preprocess.adapt(layer, (x, Y))
        if "mean" not in layer.get_config() or layer.get_config()["mean"] is None
        else preprocess.Preprocess(layer)
    )
    ((result, labels),) = data.pipeline((x, Y), 5, shuffle=False, batch_transform=prepare)
    assert labels.numpy().tolist() == Y.tolist()
    assert result.shape[0] == 5
    if expected is not None:
        np.testing.assert_allclose(result[:, 0], expected)


def test_x_alone_and_learning_in_any_size_of_batch():
    layers = [keras.layers.Normalization() for _ in range(2)]
    results = [
        preprocess.adapt(layer, X["age"], global_batch=size)(tf.constant(X["age"]))
        for layer, size in zip(layers, (2, 100), strict=True)
    ]
    np.testing.assert_allclose(*results, rtol=1e-5)


def test_wrong_layers_are_refused():
    lookup = keras.layers.StringLookup(vocabulary=["a"])
    with pytest.raises(ValueError, match="expected a Keras layer, or a dict of them; received 3"):
        preprocess.Preprocess({"age": 3})
    with pytest.raises(ValueError, match=r"no feature 'citi'. Did you mean city"):
        preprocess.adapt({"citi": keras.layers.StringLookup()}, (X, Y))
    with pytest.raises(ValueError, match="x has the features age, city, note, other"):
        preprocess.Preprocess(lookup)(X)
    with pytest.raises(
        ValueError,
        match="x has no features: expected one layer, received one for the feature 'city'",
    ):
        preprocess.Preprocess({"city": lookup})(tf.constant(["a"]))
    with pytest.raises(ValueError, match=r"to the longest of their batch.*output_sequence_length"):
        data.pipeline(
            (X["note"], Y),
            2,
            batch_transform=preprocess.adapt(keras.layers.TextVectorization(), X["note"]),
        )
    with pytest.raises(ValueError, match=r"has not been adapted. Call adapt"):
        preprocess.Preprocess(keras.layers.Normalization())(tf.constant(X["age"]))
