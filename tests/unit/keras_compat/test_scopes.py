"""Test that a model trains in a strategy's scope, and alone where the user means it to."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.parity.cases import CROSSENTROPY, data, mlp
from tfdist.keras_compat import scopes
from tfdist.train.synchronous.loop import Runner

TWO = "cpu:0,cpu:1"


def compiled(build=mlp):
    keras.utils.set_random_seed(1)
    model = build()
    model.compile(keras.optimizers.SGD(0.1), CROSSENTROPY)
    return model


def losses(model):
    return model.fit(*data(24), batch_size=12, epochs=2, shuffle=False, verbose=0).history["loss"]


@pytest.fixture(scope="module")
def alone():
    """Return the losses on one device."""
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        return losses(compiled())


# --- Models outside of the scope ------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
def test_training_is_refused_where_no_scope_was_ever_entered(method):
    strategy = tfdist.make_strategy("mirrored", devices=TWO)
    strategy.scope()  # made, and not entered
    model = compiled()
    with pytest.raises(ValueError, match=r"(?s)MirroredStrategy whose scope was never.*with strat"):
        getattr(model, method)(*data(12))
    assert int(model.optimizer.iterations) == 0
    del strategy


def test_training_in_each_of_several_processes_is_refused_although_the_scope_was_entered(mirrored):
    scopes.watch(mirrored, processes=3)
    with mirrored.scope():
        compiled()
    with pytest.raises(ValueError, match="each of 3 processes would train it alone"):
        losses(compiled())


def test_training_outside_of_a_scope_that_was_entered_is_refused(tmp_path, alone):
    """Such a model may still evaluate and predict."""
    strategy = tfdist.make_strategy("mirrored", devices=TWO)
    with strategy.scope():
        compiled().save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    with pytest.raises(ValueError, match=r"a MirroredStrategy, received the model 'seq.*One.*\("):
        losses(loaded)
    assert loaded.predict(data(24)[0], verbose=0).shape == (24, 3)
    assert loaded.evaluate(*data(24), verbose=0) > 0
    del strategy
    np.testing.assert_allclose(losses(loaded), alone, rtol=1e-6)  # nothing is left to belong to


def test_strategy_that_was_dropped_is_warned_of(caplog):
    tfdist.make_strategy("mirrored", devices=TWO)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tfdist"):
        losses(compiled())
    # In a long process TensorFlow may warn of retracing, too.
    assert len([record for record in caplog.records if record.name == "tfdist"]) == 1


def before_any_strategy():
    yield compiled()


def fitted_outside_of_the_with_block():
    strategy = tfdist.make_strategy("mirrored", devices=TWO)
    with strategy.scope():
        model = compiled()
    yield model


def under_one_device():
    strategy = tfdist.make_strategy("one_device", devices="cpu")
    yield compiled()
    with strategy.scope():
        model = compiled()
    yield model


def under_a_second_strategy():
    strategies = [tfdist.make_strategy("mirrored", devices=TWO) for _ in range(2)]
    strategies.append(tfdist.make_strategy("one_device", devices="cpu"))
    strategies.append(tf.distribute.OneDeviceStrategy("/cpu:0"))
    for strategy in strategies[2:]:  # nobody enters the scopes of the others
        with strategy.scope():
            model = compiled()
        yield model


@pytest.mark.parametrize(
    "legal",
    [
        before_any_strategy,
        fitted_outside_of_the_with_block,
        under_one_device,
        under_a_second_strategy,
    ],
)
def test_training_is_allowed(legal, alone, caplog):
    with caplog.at_level(logging.WARNING, "tfdist"):
        for model in legal():
            np.testing.assert_allclose(losses(model), alone, rtol=1e-5)
    assert [record for record in caplog.records if record.name == "tfdist"] == []


# --- Weights outside of the scope -----------------------------------------------------------------
def unbuilt():
    return keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])


def test_weights_made_outside_of_the_scope_are_refused_as_each_replica_would_update_them(mirrored):
    with mirrored.scope():
        model = compiled(unbuilt)
    model.build((None, 6))  # the mistake: it makes the weights
    with pytest.raises(ValueError, match=r"dense\w*/kernel', made outside of it: each of the 2 "):
        losses(model)


def test_frozen_weights_may_be_made_outside_of_the_scope(mirrored):
    layer = keras.layers.Dense(8, "tanh", trainable=False)
    layer.build((None, 6))
    with mirrored.scope():
        model = compiled(
            lambda: keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(3)])
        )
    before = layer.get_weights()[0]
    first, second = losses(model)
    assert second < first
    np.testing.assert_array_equal(layer.get_weights()[0], before)


# --- clear_session --------------------------------------------------------------------------------
def test_clear_session_inside_the_scope_keeps_training_distributed(mirrored, alone):
    """A tuner calls it before it builds the model of each trial, in a scope that stays entered."""
    with mirrored.scope():
        for _ in range(2):
            keras.utils.clear_session()
            assert tf.distribute.get_strategy() is mirrored
            model = compiled()
            assert model.name == "sequential"  # Keras' own state is cleared
            np.testing.assert_allclose(losses(model), alone, rtol=1e-5)
            assert isinstance(model.train_function, Runner)
    assert not tf.distribute.has_strategy()


def test_clear_session_outside_of_a_scope_is_tensorflows():
    before = tf.compat.v1.get_default_graph()
    keras.utils.clear_session()
    assert tf.compat.v1.get_default_graph() is not before
