"""Test that names in the checks of configs are those of Keras."""

import inspect

import keras
import pytest

from tfdist import models
from tfdist.config import keras_callbacks, keras_names, sections
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


def test_options_of_models_are_those_that_exist():
    for name, function in models.MODELS.items():
        parameters = inspect.signature(function).parameters
        assert (*sections.OF_DATA, *sections.MODEL_OPTIONS[name]) == tuple(parameters)


def test_callbacks_and_their_options_are_those_of_keras():
    kinds = {
        keras_names.plain(name): kind
        for name, kind in vars(keras.callbacks).items()
        if isinstance(kind, type) and name != "MonitorCallback"
    }
    here = {
        keras_names.plain(name) for name in (*keras_callbacks.CALLBACKS, *keras_callbacks.INSTEAD)
    }
    assert here == set(kinds)
    for name, options in keras_callbacks.CALLBACKS.items():
        theirs = inspect.signature(kinds[keras_names.plain(name)]).parameters
        assert set(options) == set(theirs) - {"kwargs"}, name
        for option, kind in options.items():
            default = theirs[option].default
            required = default is inspect.Parameter.empty
            assert required == (keras_callbacks.FILES.get(name) == option), (name, option)
            if not required and option != "headers":
                assert kind.fits(default), (name, option, default)
