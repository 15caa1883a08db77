"""Test how models are built that only their own steps can call."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.keras_compat import model_building

ROWS = np.random.default_rng(0).normal(size=(20, 6)).astype("float32")


@pytest.fixture(autouse=True)
def float64():
    """Compute in float64: Adam magnifies rounding where gradients are close to zero."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_dtype_policy(before)


class Autoencoder(keras.Model):
    """Model without `call()`; its step builds its layers, a metric and a second optimizer."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.layers.Dense(3, "tanh")
        self.normalization = keras.layers.BatchNormalization(synchronized=True)
        self.decoder = keras.Sequential([keras.layers.Dense(6)])
        self.error = keras.metrics.MeanSquaredError(name="error")
        self.average = keras.layers.Dense(3, "tanh")
        self.decoder_optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
        self.traces = 0

    @property
    def metrics(self):
        return [self.error]

    def train_step(self, x):
        self.traces += 1
        with tf.GradientTape(persistent=True) as tape:
            y = self.decoder(self.normalization(self.encoder(x), training=True))
            loss = self.compute_loss(x, x, y)
        self.average(x)
        for mean, weight in zip(self.average.weights, self.encoder.weights, strict=True):
            mean.assign(0.5 * mean + 0.5 * weight)
        for optimizer, part in (
            (self.optimizer, self.encoder),
            (self.decoder_optimizer, self.decoder),
        ):
            weights = part.trainable_weights
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.error.update_state(x, y)
        return {"error": self.error.result()}

    def test_step(self, x):
        y = self.decoder(self.normalization(self.average(x), training=False))
        self.error.update_state(x, y)
        return {"error": self.error.result()}


class WithCall(Autoencoder):
    """Model whose `call()` takes something else than the data."""

    def call(self, inputs):
        code, scale = inputs
        return self.decoder(code) * scale


def compiled(strategy, cls):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = cls()
        model.compile(keras.optimizers.Adam(0.05), "mse")
    return model


def trained(strategy, cls):
    model = compiled(strategy, cls)
    before = model.evaluate(ROWS, batch_size=4, verbose=0)
    history = model.fit(
        ROWS, batch_size=8, epochs=3, shuffle=False, validation_data=(ROWS,), verbose=0
    ).history
    return model, [before, history["error"], history["val_error"]]


@pytest.mark.parametrize(("name", "cls"), [("one_device", WithCall), ("mirrored", Autoencoder)])
def test_a_step_builds_as_it_does_without_a_strategy(name, cls, mirrored, request, recwarn):
    """The last batch of 20 rows has 4; evaluation comes before training."""
    with mirrored.scope():
        pass  # a plain model beside a strategy that was never entered would be an error
    plain, expected = trained(tf.distribute.get_strategy(), cls)
    recwarn.clear()
    model, numbers = trained(request.getfixturevalue(name), cls)
    assert "unbuilt" not in " ".join(str(w.message) for w in recwarn)
    for a, b in zip(numbers, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert int(model.decoder_optimizer.iterations.numpy()) == 9


def test_a_model_is_built_once_for_each_compile(one_device):
    model = compiled(one_device, Autoencoder)
    model.fit(ROWS, batch_size=4, verbose=0)
    with model_building.running("fit"):
        traces = model.traces
        model_building.build(model, None, ROWS[:4])
        assert model.traces == traces
        model.compile("sgd", "mse")
        model_building.build(model, None, ROWS[:4])
        assert model.traces == traces + 1


def test_a_step_builds_from_data_that_the_user_distributed(mirrored):
    model = compiled(mirrored, Autoencoder)
    data = mirrored.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_tensor_slices(ROWS).batch(4)
    )
    model.fit(data, verbose=0)
    assert model.encoder.kernel.shape == (6, 3)
    assert int(model.optimizer.iterations.numpy()) == 3


def test_building_changes_no_variable_and_restores_the_tape(one_device):
    model = compiled(one_device, Autoencoder)
    gradient = tf.GradientTape.gradient
    with model_building.running("fit"):
        model_building.build(model, None, tf.TensorSpec([None, 6]))
    assert tf.GradientTape.gradient is gradient
    assert model.optimizer.built
    assert int(model.optimizer.iterations.numpy()) == 0
    assert model.error.count.numpy() == 0
    assert not model.decoder.layers[0].bias.numpy().any()
    # The learning rate, the count of steps, and the momenta of kernel and bias.
    assert len(model.decoder_optimizer.variables) == 4


def test_layers_that_a_failing_step_leaves_unbuilt_are_named(mirrored, caplog):
    class Fails(Autoencoder):
        def train_step(self, x):
            self.encoder(x)
            raise ZeroDivisionError("a mistake in the step")

    model = compiled(mirrored, Fails)
    with caplog.at_level(logging.WARNING, "tfdist"), pytest.raises(ZeroDivisionError):
        model.fit(ROWS, batch_size=4, verbose=0)
    assert "a mistake in the step" in caplog.text
    assert model.encoder.built
