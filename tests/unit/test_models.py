"""Test that reference models have their shapes, survive saving, and refuse unknown options."""

import keras
import numpy as np
import pytest

from tfdist import models

IMAGE = {"input_shape": (8, 8, 1), "classes": 10}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, IMAGE) for name in models.MODELS),
        ("cnn", {"input_shape": (5, 7, 3), "classes": 2, "filters": (4, 4, 4), "dropout": 0.5}),
        ("transformer", {"input_shape": (12,), "classes": 3, "vocabulary": 100, "depth": 1}),
    ],
)
def test_a_model_gives_probabilities_and_survives_saving(name, options, tmp_path):
    model = models.build(name, **options)
    inputs = np.random.default_rng(0).integers(0, 100, (4, *options["input_shape"]))
    outputs = model.predict(inputs, verbose=0)
    assert outputs.shape == (4, options["classes"])
    np.testing.assert_allclose(outputs.sum(1), 1, rtol=1e-5)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(inputs, verbose=0), outputs, rtol=1e-5)


@pytest.mark.parametrize("name", models.MODELS)
def test_probabilities_are_float32_under_mixed_precision(name):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = models.build(name, **IMAGE)
    finally:
        keras.config.set_dtype_policy("float32")
    assert model.output.dtype == "float32"
    assert model.weights[0].dtype == "float32"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cnm", IMAGE, "model 'cnm': no such model. Did you mean cnn"),
        (
            "mlp",
            {**IMAGE, "drop_out": 0.1},
            "model 'mlp' has no option 'drop_out'. Did you mean dropout",
        ),
        ("mlp", {"classes": 10}, "option 'input_shape' is missing"),
        (
            "transformer",
            {"input_shape": (12,), "classes": 3},
            r"expected input_shape=\(length,\) with vocabulary=",
        ),
    ],
)
def test_wrong_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        models.build(name, **options)
