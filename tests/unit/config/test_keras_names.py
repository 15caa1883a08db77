"""Test that names in the checks of configs are those of Keras."""

import keras
import pytest

from tfdist import models
from tfdist.config import keras_names, sections
from tfdist.strategies import factory

# They take other objects, or values instead of targets and predictions.
WITHOUT_NAMES = {
    "LossScaleOptimizer",
    "MultiOptimizer",
    "MeanMetricWrapper",
    "Mean",
    "Sum",
}


@pytest.mark.parametrize(
    ("module", "base", "names", "more"),
    [
        (keras.optimizers, keras.optimizers.Optimizer, keras_names.OPTIMIZERS, ()),
        (keras.losses, keras.losses.Loss, keras_names.LOSSES, keras_names.SHORT),
        (
            keras.metrics,
            keras.metrics.Metric,
            keras_names.METRICS,
            (*keras_names.SHORT, *keras_names.BY_LOSS),
        ),
    ],
    ids=["optimizers", "losses", "metrics"],
)
def test_names_are_those_of_keras(module, base, names, more):
    kinds = {
        keras_names.plain(name)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base
        if name not in WITHOUT_NAMES
    }
    here = set(map(keras_names.plain, set(names) - set(more)))
    kinds -= set(map(keras_names.plain, more))  # keras.metrics.Accuracy
    assert here - kinds == set(), "names that Keras does not have"
    assert kinds - here == set(), "names of Keras that a config cannot say"


def test_short_names_are_those_of_keras():
    for short, name in keras_names.SHORT.items():
        assert keras.losses.get(short) is keras.losses.get(name)


def test_models_and_strategies_are_those_that_exist():
    assert set(sections.MODELS) == set(models.MODELS)
    assert set(sections.STRATEGIES) == set(factory.NAMES)
