"""Test callbacks and class weights that a config names."""

import csv
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import config, data
from tfdist.parallel import zero
from tfdist.run import build, compilation
from tfdist.run.fit_callbacks import CheckMonitor, callbacks, check_optimizer
from tfdist.run.train_command import run
from tfdist.telemetry.layout import read_json_lines

CODE = """
import os
import keras

class Note(keras.callbacks.Callback):
    def __init__(self, word="none", **kwargs):
        super().__init__()
        self.word = word
        self.more = kwargs

    def on_epoch_end(self, epoch, logs=None):
        logs["extra"] = 7.0

class Crash(keras.callbacks.Callback):
    def __init__(self, marker):
        super().__init__()
        self.marker = marker

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2 and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            raise RuntimeError("once")

def second():
    return keras.callbacks.EarlyStopping("loss")

def number():
    return 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own_callbacks.py"
    path.write_text(CODE)
    return path


def train(**settings):
    return config.Run.from_dict({"train": settings}).train


def test_callbacks_are_made_in_order_with_their_options(file, tmp_path):
    settings = train(
        callbacks=f"EarlyStopping, {file}:Note, csv_logger, {file}:second, model_checkpoint",
        callback_options={
            "EarlyStopping": {"patience": 3},
            "Note": {"word": "hello", "other": 2},
            "csv_logger": {"filename": "logs/log.csv", "append": True},
            "model_checkpoint": {"filepath": str(tmp_path / "best.keras")},
        },
    )
    made = callbacks(settings, tmp_path / "run", chief=True)
    stopping, note, log, second, saves = (c for c in made if not isinstance(c, CheckMonitor))
    assert len(made) == 7  # both that stop have their check
    assert (stopping.patience, second.monitor) == (3, "loss")
    assert (note.word, note.more) == ("hello", {"other": 2})
    assert (log.filename, log.append) == (str(tmp_path / "run" / "logs" / "log.csv"), True)
    assert saves.filepath == str(tmp_path / "best.keras")
    assert (tmp_path / "run" / "logs").is_dir()
    assert callbacks(train(), tmp_path, chief=True) == []


def test_the_chief_alone_makes_directories(tmp_path):
    settings = train(callbacks="csv_logger", callback_options={"csv_logger": {"filename": "a/b"}})
    callbacks(settings, tmp_path, chief=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("{file}:Not", {}, "train.callbacks=.*defines no function Not. Did you mean Note"),
        ("{file}:number", {}, "train.callbacks=.*: expected a keras.callbacks.Callback.*int"),
        ("{file}:Crash", {}, "train.callbacks=.*Crash, train.callback_options.Crash: .*marker"),
        (
            "{file}:Crash",
            {"Crash": {"mark": 3}},
            "train.callback_options.Crash.mark: .*Did you mean marker",
        ),
    ],
)
def test_mistakes_about_own_callbacks_name_the_key(file, tmp_path, name, options, message):
    settings = train(callbacks=name.format(file=file), callback_options=options)
    with pytest.raises(ValueError, match=message):
        callbacks(settings, tmp_path, chief=True)


def test_what_a_callback_needs_of_the_optimizer_is_checked(one_device):
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    swap, reduce = keras.callbacks.SwapEMAWeights(), keras.callbacks.ReduceLROnPlateau()
    model.compile(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 9)), "mse")
    with pytest.raises(ValueError, match=r"swap_ema_weights needs an average .* train\.ema=0"):
        check_optimizer([swap], model)
    with pytest.raises(ValueError, match=r"reduce_lr_on_plateau needs a constant .* CosineDecay"):
        check_optimizer([reduce], model)
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
    check_optimizer([swap, reduce], model)
    with one_device.scope():
        scaled = keras.optimizers.LossScaleOptimizer(zero(keras.optimizers.SGD(use_ema=True)))
    check_optimizer([swap, reduce], types.SimpleNamespace(optimizer=scaled))
    model.compile(loss="mse", optimizer=None)
    check_optimizer([swap, reduce], model)


def test_what_is_monitored_must_exist(tmp_path):
    settings = train(
        callbacks="early_stopping, model_checkpoint",
        callback_options={
            "early_stopping": {"monitor": "val_acuracy"},
            "model_checkpoint": {"filepath": "all.keras"},  # saves each epoch
        },
    )
    check, stopping, _ = callbacks(settings, tmp_path, chief=False)
    key = r"train\.callback_options\.early_stopping\.monitor"
    with pytest.raises(ValueError, match=f"{key}: .*'val_acuracy'. Did you mean val_accuracy"):
        check.on_epoch_end(0, {"loss": 1.0, "val_accuracy": 0.5})
    stopping.monitor = "loss"
    check.on_epoch_end(0, {"loss": 1.0})


def test_a_run_with_callbacks_resumes_and_stops_early(file, tmp_path, digits_dir):
    settings = config.Run.from_dict(
        {
            "strategy": {"name": "one_device", "devices": "cpu"},
            "data": {
                "data_dir": str(digits_dir),
                "train_split": "train[:10%]",
                "eval_split": "test[:50]",
                "global_batch": 50,
            },
            "model": {"name": "mlp", "options": {"widths": (8,)}},
            "train": {
                "epochs": 9,
                "callbacks": "early_stopping, reduce_lr_on_plateau, csv_logger, model_checkpoint, "
                f"{file}:Note, {file}:Crash",
                "callback_options": {
                    # No improvement counts: it stops after the first epoch and four more.
                    "early_stopping": {"patience": 4, "min_delta": 100.0},
                    "reduce_lr_on_plateau": {"patience": 3, "min_delta": 100.0, "factor": 0.5},
                    "csv_logger": {"filename": "log.csv"},
                    "model_checkpoint": {
                        "filepath": "saved/{epoch}.weights.h5",
                        "save_weights_only": True,
                    },
                    "Crash": {"marker": str(tmp_path / "crashed")},
                },
                "class_weight": {0: 1.0, 3: 5.0},
            },
            "output": {"dir": str(tmp_path / "run"), "save_model": False},
            "telemetry": {"backends": "jsonl"},
        }
    )
    with pytest.raises(RuntimeError, match="once"):
        run(settings)
    assert run(settings)["epochs"] == 5
    rows = list(csv.DictReader((tmp_path / "run" / "log.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["0", "1", "2", "3", "4"]
    history = read_json_lines(tmp_path / "run" / "history.jsonl")
    assert [line["extra"] for line in history] == [7.0] * 5
    rates = [line["learning_rate"] for line in history]
    assert rates == pytest.approx([1e-3] * 4 + [5e-4])  # of each epoch, not of the next one
    saved = sorted(path.name for path in (tmp_path / "run" / "saved").iterdir())
    assert saved == [f"{epoch}.weights.h5" for epoch in range(1, 6)]


def batches(**more):
    x = np.random.default_rng(1).normal(size=(24, 3)).astype("float32")
    y = (x.sum(1) > 0).astype("int32") + (x[:, 0] > 0)
    return data.pipeline((x, y), 8, seed=1, **more)


def test_class_weights_are_those_of_a_data_pipeline(one_device, mirrored):
    settings = config.Run.from_dict(
        {
            "model": {"name": "mlp", "options": {"widths": (4,), "classes": 3}},
            "train": {"class_weight": {"1": 4.0}},
        }
    )
    results = []
    for strategy in (one_device, mirrored):
        train = batches()
        weights = compilation.class_weight(settings, train)
        assert weights == {0: 1.0, 1: 4.0, 2: 1.0}
        model = build.make_model(settings, strategy, train)
        model.fit(train, epochs=2, verbose=0, class_weight=weights)
        results.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    np.testing.assert_allclose(*results, atol=1e-5)
    model = build.make_model(settings, one_device, batches())
    model.fit(batches(), epochs=2, verbose=0)
    plain = np.concatenate([w.ravel() for w in model.get_weights()])
    assert np.abs(plain - results[0]).max() > 1e-4


@pytest.mark.parametrize(
    ("settings", "train", "message"),
    [
        ({"class_weight": {3: 1}}, batches, r"class_weight\.3: expected a class from 0 to 2"),
        (
            {"class_weight": {0: 1}},
            lambda: tf.data.Dataset.from_tensors(([[0.0]], [0], [1.0])),
            "class_weight: expected data of inputs and one target, without weights",
        ),
    ],
)
def test_class_weights_that_do_not_suit_the_data_are_refused(settings, train, message):
    given = {"train": settings, "model": {"name": "mlp", "options": {"classes": 3}}}
    with pytest.raises(ValueError, match=message):
        compilation.class_weight(config.Run.from_dict(given), train())


def test_swapped_averages_survive_a_crash(one_device, tmp_path):
    """At the end of an epoch, the averages are in the model, and the weights in the optimizer."""

    class Crash(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError("crash")

    def fit(directory, *more):
        keras.utils.set_random_seed(3)
        with one_device.scope():
            model = keras.Sequential([keras.Input([3]), keras.layers.Dense(3, "softmax")])
            optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
            model.compile(optimizer, "sparse_categorical_crossentropy")
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        saves = tfdist.BackupAndRestore(directory)
        model.fit(batches(), epochs=3, verbose=0, callbacks=[swap, saves, *more])
        return model.get_weights()

    with pytest.raises(RuntimeError, match="crash"):
        fit(tmp_path / "a", Crash())
    for resumed, whole in zip(fit(tmp_path / "a"), fit(tmp_path / "b"), strict=True):
        np.testing.assert_array_equal(resumed, whole)
