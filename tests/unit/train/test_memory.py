"""Test that strategies, models and engines are freed, and that epochs keep nothing."""

import collections
import gc
import types
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.sync import LocalSGD
from tfdist.train.synchronous import loop

X = np.arange(256, dtype=np.float32).reshape(32, 8) / 256
Y = X[:, :1] + 0.5


def compiled(**kwargs):
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(4, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"], **kwargs)
    return model


def use(strategy, run, **kwargs):
    """Use a strategy in a frame of its own, and return what should be gone after it."""
    with strategy.scope():
        model = compiled(**kwargs)
    run(model)
    return {
        name: weakref.ref(each)
        for name, each in {
            "strategy": strategy,
            "engine": strategy.tfdist_engine,
            "model": model,
            "optimizer": model.optimizer,
            "train function": model.train_function,
        }.items()
    }


def graphs():
    found = [each for each in gc.get_objects() if isinstance(each, tf.Graph)]
    return sum(each.building_function for each in found)


def fit_and_predict(model):
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, validation_data=(X, Y))
    model.evaluate(X, Y, batch_size=8, verbose=0)
    model.predict(X, batch_size=8, verbose=0)


def batches(model):
    model.train_on_batch(X, Y)
    model.test_on_batch(X, Y)
    model.predict_on_batch(X)


@pytest.mark.parametrize(
    ("name", "run", "kwargs"),
    [
        ("one_device", fit_and_predict, {}),
        ("mirrored", fit_and_predict, {}),
        ("central_storage", fit_and_predict, {}),
        ("mirrored", fit_and_predict, {"sync": LocalSGD(2)}),
        ("mirrored", batches, {}),
    ],
    ids=["one_device", "mirrored", "central_storage", "local_sgd", "on_batch"],
)
def test_nothing_of_a_strategy_is_kept(name, run, kwargs):
    """TensorFlow's own MirroredStrategy keeps itself, and the graphs of its steps."""
    devices = ["CPU:0"] if name == "one_device" else ["CPU:0", "CPU:1"]
    gc.collect()
    before = graphs()
    references = use(tfdist.make_strategy(name, devices=devices, **kwargs), run)
    gc.collect()
    assert [what for what, reference in references.items() if reference() is not None] == []
    assert graphs() <= before


def test_nothing_is_kept_with_callbacks(tmp_path):
    def run(model):
        callbacks = [
            tfdist.BackupAndRestore(tmp_path / "backup", save_freq=2),
            tfdist.TensorBoard(tmp_path / "tensorboard"),
            tfdist.StepBreakdown(tmp_path / "steps"),
        ]
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)

    references = use(tfdist.make_strategy("mirrored", devices=["CPU:0", "CPU:1"]), run)
    gc.collect()
    assert [what for what, reference in references.items() if reference() is not None] == []


def test_objects_do_not_grow_with_epochs(monkeypatch):
    """Only the history has a number for each metric and epoch."""
    monkeypatch.setattr(loop, "AHEAD_S", 0.0)  # the same calls in each epoch
    counts = {}

    def kinds():
        gc.collect()
        return collections.Counter(
            str(kind)
            for kind in map(type, gc.get_objects())
            if kind in (dict, list, set, types.FunctionType)
            or str(kind.__module__).split(".")[0] in ("keras", "tensorflow", "tfdist")
        )

    class Count(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch in (9, 29):
                counts[epoch] = kinds()

    def run(model):
        model.fit(X, Y, 8, epochs=30, verbose=0, validation_data=(X, Y), callbacks=[Count()])

    use(tfdist.make_strategy("mirrored", devices=["CPU:0", "CPU:1"]), run)
    grown = counts[29] - counts[9]
    assert {kind: n for kind, n in grown.items() if n >= 20} == {}
