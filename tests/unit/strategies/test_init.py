"""Test that `tfdist.init` distributes what a script or notebook makes after it."""

import concurrent.futures

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.parity.cases import CROSSENTROPY, data, mlp
from tfdist.strategies import init as module
from tfdist.train.synchronous.loop import Runner

TWO = "cpu:0,cpu:1"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Forget what other tests have made, and leave the scope at the end."""
    monkeypatch.setattr(module, "_made", None)
    yield
    module._scope.change(None)
    assert not tf.distribute.has_strategy()


def losses():
    keras.utils.set_random_seed(1)
    model = mlp()
    model.compile(keras.optimizers.SGD(0.1), CROSSENTROPY)
    history = model.fit(*data(24), batch_size=12, epochs=2, shuffle=False, verbose=0).history
    if isinstance(tf.distribute.get_strategy(), tf.distribute.MirroredStrategy):
        assert model.distribute_strategy is tf.distribute.get_strategy()
        assert isinstance(model.train_function, Runner)
    return history["loss"]


@pytest.fixture(scope="module")
def alone():
    """Return the losses on one device."""
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        return losses()


def test_a_call_distributes_models_in_the_rest_of_the_script(alone):
    strategy = tfdist.init(devices=TWO)
    assert strategy.num_replicas_in_sync == 2
    for _ in range(2):  # a tuner's trials, or a notebook's cell that runs again
        keras.utils.clear_session()
        assert tfdist.init(None, devices=TWO) is strategy
        np.testing.assert_allclose(losses(), alone, rtol=1e-5)
    with strategy.scope():  # a script may still have its `with` block
        keras.Variable(1.0)
    assert tf.distribute.get_strategy() is strategy


def test_a_data_set_may_use_layers_and_models_can_be_saved_and_loaded(tmp_path):
    tfdist.init(devices=TWO)
    x, y = data(24)
    scale = keras.layers.Normalization()
    scale.adapt(x)
    noise = keras.layers.GaussianNoise(0.1, seed=3)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    batches = batches.map(lambda x, y: (noise(scale(x), training=True), y))
    model = mlp()
    model.compile("sgd", CROSSENTROPY)
    model.fit(batches, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.distribute_strategy is tf.distribute.get_strategy()
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-6)


def test_other_arguments_replace_the_strategy_or_leave_it_as_it_was(alone):
    former = tfdist.init(devices=TWO)
    model = mlp()
    with pytest.raises(ValueError, match="too late: 9 CPU devices"):
        tfdist.init(devices="cpu:0,cpu:8")
    with pytest.raises(ValueError, match="too late: a cluster"):
        tfdist.init("multi_worker_mirrored", devices=TWO)
    assert tf.distribute.get_strategy() is former
    assert tfdist.init(devices=TWO) is former
    strategy = tfdist.init(devices="cpu:1,cpu:2")
    assert strategy is not former
    np.testing.assert_allclose(losses(), alone, rtol=1e-5)
    with pytest.raises(RuntimeError, match="Mixing different"):
        model.predict(data(2)[0], verbose=0)


def test_wrong_arguments_are_those_of_make_strategy():
    with pytest.raises(TypeError, match="device_count"):
        tfdist.init(device_count=2)
    with pytest.raises(ValueError, match="did you mean 'mirrored'"):
        tfdist.init("miror")
    assert not tf.distribute.has_strategy()


def test_a_call_in_the_scope_of_another_strategy_is_refused(mirrored):
    with mirrored.scope(), pytest.raises(ValueError, match=r"tfdist.init: .*a MirroredStrategy"):
        tfdist.init(devices=TWO)
    assert not tf.distribute.has_strategy()


def in_threads(count, function):
    """Return the results of a function in threads of their own, or raise the error of one."""

    def call():
        try:
            return function()
        finally:
            module._scope.change(None)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(call) for _ in range(count)]
    return [future.result() for future in futures]


def test_a_thread_enters_the_same_scope_by_a_call_of_its_own(alone):
    strategy = tfdist.init(devices=TWO)
    with pytest.raises(ValueError, match=r"after tfdist\.init\(\.\.\.\) in this thread"):
        in_threads(1, losses)
    ((entered, history),) = in_threads(1, lambda: (tfdist.init(devices=TWO), losses()))
    assert entered is strategy
    np.testing.assert_allclose(history, alone, rtol=1e-5)


def test_threads_that_call_it_together_get_one_strategy():
    strategies = in_threads(3, lambda: tfdist.init(devices=TWO))
    assert len(set(map(id, strategies))) == 1
