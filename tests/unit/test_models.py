"""Test that reference models have their shapes, survive saving, and refuse unknown options."""

import math

import keras
import numpy as np
import pytest

from tfdist import models
from tfdist.parallel import deferred

IMAGE = {"input_shape": (8, 8, 1), "classes": 10}
# Of each model, the smallest that has all of its parts.
SMALL = {name: IMAGE for name in models.MODELS if name != "resnet34"}
SMALL["resnet50"] = {**IMAGE, "filters": 2}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *SMALL.items(),
        ("cnn", {"input_shape": (5, 7, 3), "classes": 2, "filters": (4, 4, 4), "dropout": 0.5}),
        ("transformer", {"input_shape": (12,), "classes": 3, "vocabulary": 100, "depth": 1}),
    ],
)
def test_a_model_gives_probabilities_and_survives_saving(name, options, tmp_path):
    model = models.build(name, **options)
    inputs = np.random.default_rng(0).integers(0, 100, (4, *options["input_shape"]))
    outputs = model(inputs).numpy()
    assert outputs.shape == (4, options["classes"])
    np.testing.assert_allclose(outputs.sum(1), 1, rtol=1e-5)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(inputs).numpy(), outputs, rtol=1e-5)


@pytest.mark.parametrize(("name", "options"), SMALL.items())
def test_probabilities_are_float32_under_mixed_precision(name, options):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = models.build(name, **options)
    finally:
        keras.config.set_dtype_policy("float32")
    assert model.output.dtype == "float32"
    assert model.weights[0].dtype == "float32"


# torchvision's models have as many, https://pytorch.org/vision/stable/models.html
@pytest.mark.parametrize(("name", "count"), [("resnet34", 21_797_672), ("resnet50", 25_557_032)])
def test_residual_networks_have_the_weights_of_their_paper(name, count):
    with deferred():
        model = models.build(name, input_shape=(224, 224, 3), classes=1000)
    assert sum(math.prod(v.shape) for v in model.trainable_variables) == count
    # Each convolution's input, from the stem to the pooling: 224 / 2 / 2, and halved three times.
    sizes = {layer.output.shape[1] for layer in model.layers if len(layer.output.shape) == 4}
    assert sizes == {224, 112, 56, 28, 14, 7}


def shapes(blocks):
    model = models.build("resnet", **IMAGE, blocks=blocks)
    return [(v.path.rpartition("/")[2], tuple(v.shape)) for v in model.weights]


@pytest.mark.parametrize("blocks", [(2, 2, 2), [2, 2, 2]])
def test_one_number_of_blocks_is_that_of_every_stage(blocks):
    assert shapes(blocks) == shapes(2)


def test_each_stage_can_have_its_number_of_blocks():
    filters = [shape[-1] for _, shape in shapes((1, 2, 3)) if shape[:2] == (3, 3)]
    assert filters == [16] * (1 + 2) + [32] * 4 + [64] * 6  # one convolution before the blocks


@pytest.mark.parametrize(
    "blocks", [0, True, 1.5, "1,2,1", None, (), (1, 2), (1, 0, 1), (1, 2.0, 1)]
)
def test_wrong_blocks_are_named_with_their_key(blocks):
    message = (
        r"\(model\.options\.blocks\): expected a whole number of at least 1, or 3 of them, .*rec"
    )
    with pytest.raises(ValueError, match=message):
        models.build("resnet", **IMAGE, blocks=blocks)


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
