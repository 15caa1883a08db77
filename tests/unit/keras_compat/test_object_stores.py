"""Test that Keras saves and loads models in object stores, through its functions for files."""

import keras
import numpy as np
import pytest
from keras.src.utils import file_utils

from tests.memory_store import memory_s3
from tfdist import keras_compat
from tfdist.storage import files

ROOT = "s3://bucket/models"


@pytest.fixture(autouse=True)
def store():
    keras_compat.install()
    with memory_s3():
        yield


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


X = np.ones((4, 3), np.float32)


def test_all_functions_are_hooked():
    for name in ("exists", "isdir", "listdir", "makedirs", "remove", "rmtree", "join", "copy"):
        assert hasattr(getattr(file_utils, name), "__wrapped__"), name


def test_local_files_are_as_before(model, tmp_path):
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))


def test_models_are_saved_and_loaded(model):
    expected = model.predict(X, verbose=0)
    model.save(f"{ROOT}/m.keras")
    loaded = keras.models.load_model(f"{ROOT}/m.keras")
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), expected)
    model.save_weights(f"{ROOT}/m.weights.h5")
    model.set_weights([w * 0 for w in model.get_weights()])
    model.load_weights(f"{ROOT}/m.weights.h5")
    np.testing.assert_array_equal(model.predict(X, verbose=0), expected)
    assert files.list_dir(ROOT) == ["m.keras", "m.weights.h5"]


def test_models_are_exported(model):
    model.export(f"{ROOT}/exported", verbose=False)
    assert {"saved_model.pb", "variables"} <= set(files.list_dir(f"{ROOT}/exported"))


def test_callbacks_write_files(model):
    model.fit(
        X,
        X[:, :2],
        epochs=2,
        verbose=0,
        callbacks=[
            keras.callbacks.ModelCheckpoint(
                f"{ROOT}/c/{{epoch}}.weights.h5", save_weights_only=True
            ),
            keras.callbacks.CSVLogger(f"{ROOT}/log.csv"),
        ],
    )
    model.fit(
        X,
        X[:, :2],
        verbose=0,
        callbacks=[keras.callbacks.CSVLogger(f"{ROOT}/log.csv", append=True)],
    )
    assert files.list_dir(f"{ROOT}/c") == ["1.weights.h5", "2.weights.h5"]
    rows = files.read(f"{ROOT}/log.csv").decode().splitlines()
    assert [row.split(",")[0] for row in rows] == ["epoch", "0", "1", "0"]
