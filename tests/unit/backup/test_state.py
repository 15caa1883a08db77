"""Test that the state of a model and its callbacks moves to another process' model and callbacks.

Where it does not fit, the error names the first difference.
"""

import json
import random

import keras
import numpy as np
import pytest

from tfdist.backup.snapshot import pack, unpack
from tfdist.backup.state import (
    into_callbacks,
    into_model,
    into_random,
    of_callbacks,
    of_model,
    of_random,
)

X = np.random.default_rng(0).normal(size=(24, 5)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def model(units=4, optimizer="adam", extra=False):
    layers = [
        keras.layers.Dense(units, "relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(1),
    ]
    built = keras.Sequential(layers + [keras.layers.Dense(1)] * extra)
    built.compile(optimizer, "mse")
    built.build([None, 5])
    built.optimizer.build(built.trainable_variables)
    return built


def fit(model, epochs, **options):
    return model.fit(
        X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **options
    ).history.get("loss")


def through_a_file(snapshot):
    return unpack(b"".join(pack(snapshot)), "here")


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "scaled"])
def test_training_resumes_as_if_never_interrupted(optimizer):
    make = {
        "scaled": lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), initial_scale=8.0, dynamic_growth_steps=4
        )
    }.get(optimizer, lambda: optimizer)
    keras.utils.set_random_seed(3)
    whole = model(optimizer=make())
    fit(whole, 2)
    kept = through_a_file(of_model(whole))
    expected = fit(whole, 2)
    keras.utils.set_random_seed(4)
    other = model(optimizer=make())
    into_model(kept, other, "here")
    assert fit(other, 2) == expected  # dropout and all
    for a, b in zip(whole.weights, other.weights, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: model(units=5),
            (
                r"here: .*expected sequential\w*/dense\w*/kernel float32 \[5, 5\] "
                r"as model variable 0, received .*/kernel float32 \[5, 4\]"
            ),
        ),
        (
            lambda: model(optimizer="sgd"),
            "here: expected the state of a model with the optimizer SGD, received one with Adam",
        ),
        (lambda: model(extra=True), r"expected .* as model variable \d+, received"),
    ],
)
def test_snapshot_of_another_model_is_refused(other, message):
    snapshot = of_model(model())
    other = other()
    before = other.get_weights()
    with pytest.raises(ValueError, match=message):
        into_model(snapshot, other, "here")
    for a, b in zip(before, other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


class Counts(keras.callbacks.Callback):
    def __init__(self, count=0):
        super().__init__()
        self.count = count

    def get_state(self):
        return {"count": self.count}

    def set_state(self, state):
        self.count = state["count"]


def test_state_of_callbacks_is_restored():
    def callbacks():
        return [
            keras.callbacks.EarlyStopping("loss", patience=9),
            keras.callbacks.ReduceLROnPlateau("loss", patience=7),
            Counts(),
            keras.callbacks.History(),
            Counts(),
        ]

    first = callbacks()
    fit(model(), 3, callbacks=first)
    first[2].count = 5
    first[4].count = 6
    states = json.loads(json.dumps(of_callbacks(first)))
    second = callbacks()
    fit(model(), 0, callbacks=second)
    into_callbacks(states, second)
    assert (second[2].count, second[4].count) == (5, 6)
    assert (second[0].best, second[0].wait, second[1].best, second[1].wait) == (
        first[0].best,
        first[0].wait,
        first[1].best,
        first[1].wait,
    )
    into_callbacks(states, second[3:])  # those that are no longer there are no error
    assert second[4].count == 5


def test_state_of_random_generators_is_restored():
    state = through_a_file(of_random())
    expected = random.random(), np.random.rand(3).tolist()
    into_random(state)
    assert (random.random(), np.random.rand(3).tolist()) == expected
