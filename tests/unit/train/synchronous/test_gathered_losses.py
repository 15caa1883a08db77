"""Test Keras' losses in which the rows of a batch depend on each other, on two replicas.

`tests/parity` trains with each of them; these tests say where they are gathered, and where not.
"""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.keras_compat import mixes_rows
from tfdist.sync import LocalSGD

layers = keras.layers
ROWS = 10
BATCH = 6  # the second batch has four rows


def images():
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 4, 4, 1)).astype("float32")
    return x, (x + random.normal(size=x.shape) > 0).astype("float32")


def segmenter(cls=keras.Model):
    keras.utils.set_random_seed(3)
    inputs = keras.Input([4, 4, 1])
    return cls(inputs, layers.Conv2D(1, 3, padding="same", activation="sigmoid")(inputs))


def trained(strategy, loss, cls=keras.Model, **compiled):
    """Return the losses and the weights of two epochs."""
    with strategy.scope():
        model = segmenter(cls)
        model.compile(keras.optimizers.SGD(1.0), loss, **compiled)
    x, y = images()
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
    return [history.history["loss"], *model.get_weights()]


def gathers(strategy, loss, cls=keras.Model, **compiled):
    """Return how many times a training step gathers rows."""
    with strategy.scope():
        model = segmenter(cls)
        model.compile(keras.optimizers.SGD(1.0), loss, **compiled)
    count = 0
    own = tf.distribute.ReplicaContext.all_gather

    def all_gather(*args, **kwargs):
        nonlocal count
        count += 1
        return own(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.distribute.ReplicaContext, "all_gather", all_gather)
        model.fit(*images(), batch_size=BATCH, verbose=0)
    return count


class OwnSteps(keras.Model):
    """A model whose step computes a loss of Keras by itself."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.losses.Dice()(y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class GatheringSteps(keras.Model):
    """A model that gathers the rows of a loss of Keras by itself."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        y, y_pred = tfdist.all_gather_rows(y), tfdist.all_gather_rows(y_pred)
        return super().compute_loss(x, y, y_pred, sample_weight, training)


@pytest.mark.parametrize(
    "loss", [keras.losses.Dice(reduction="sum"), keras.losses.Tversky(axis=(0, 1, 2)), "dice"]
)
def test_two_replicas_train_to_the_numbers_of_one(loss, one_device, mirrored):
    for one, two in zip(trained(one_device, loss), trained(mirrored, loss), strict=True):
        np.testing.assert_allclose(two, one, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("cls", [OwnSteps, GatheringSteps])
def test_losses_of_own_steps_see_all_rows_once(cls, one_device, mirrored):
    loss = keras.losses.Dice()
    [_, *of_one], [_, *of_two] = trained(one_device, loss), trained(mirrored, loss, cls)
    for one, two in zip(of_one, of_two, strict=True):
        np.testing.assert_allclose(two, one, rtol=2e-5, atol=1e-6)


def test_only_losses_over_the_batch_are_gathered(mirrored):
    assert gathers(mirrored, keras.losses.Dice()) > 0
    assert gathers(mirrored, keras.losses.Dice(axis=(1, 2, 3))) == 0
    assert gathers(mirrored, "binary_crossentropy") == 0


def test_rows_are_not_gathered_twice(mirrored):
    assert gathers(mirrored, keras.losses.Dice(), GatheringSteps) == gathers(
        mirrored, keras.losses.Dice()
    )


def test_steps_of_local_sgd_gather_nothing():
    local = tfdist.make_strategy("mirrored", devices="cpu:0,cpu:1", sync=LocalSGD(every=2))
    assert gathers(local, keras.losses.Dice()) == 0


def test_xla_leaves_the_step_to_the_collective(mirrored, caplog):
    caplog.set_level(logging.WARNING, "tfdist")
    compiled = trained(mirrored, keras.losses.Dice(), jit_compile=True)
    assert "it has a collective, the all_gather for the loss 'dice'" in caplog.text
    for with_xla, plain in zip(compiled, trained(mirrored, keras.losses.Dice()), strict=True):
        np.testing.assert_allclose(with_xla, plain)


def test_axes_tell_whether_rows_depend_on_each_other():
    assert mixes_rows(keras.losses.Circle(), 1)
    assert mixes_rows(keras.losses.Dice(axis=(-4, -1)), 4)
    assert not mixes_rows(keras.losses.Dice(axis=(-3, -1)), 4)
    assert not mixes_rows(keras.losses.Dice(axis=-1), 4)
    assert mixes_rows(keras.losses.Dice(axis=0), 4)
    assert not mixes_rows(keras.losses.MeanSquaredError(), 2)

    class Own(keras.losses.Dice):
        def call(self, y_true, y_pred):
            return keras.losses.mean_squared_error(y_true, y_pred)

    assert not mixes_rows(Own(), 4)
