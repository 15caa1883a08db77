"""Test that the evaluator finds the chief's checkpoint files and evaluates each state once.

It writes nothing of the chief's.
"""

import functools
import os
import threading
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.first_states import repeatable
from tfdist import ClusterSpec, make_strategy
from tfdist.backup.snapshot import Snapshot
from tfdist.cluster.addresses import Presence
from tfdist.cluster.preflight import PeersAbsent
from tfdist.strategies.factory import is_chief
from tfdist.tools.report import tensorboard_events
from tfdist.tools.report.run_files import Reader
from tfdist.train import evaluator as room
from tfdist.train.evaluator import find_sources

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = np.arange(32) % 3


def build(strategy=None, seed=0, units=8):
    keras.utils.set_random_seed(seed)
    with strategy.scope() if strategy else tf.distribute.get_strategy().scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(3)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    return model


@pytest.fixture
def strategy(monkeypatch):
    """Return the strategy of an evaluator beside two workers, whose chief never answers."""
    monkeypatch.setattr(room, "POLL_S", 0.02)
    monkeypatch.setattr(room, "GONE_S", 0.2)
    cluster = ClusterSpec.local(workers=2, evaluator=True).for_task("evaluator", 0)
    return make_strategy("auto", cluster, devices="cpu", start_timeout=0.5)


def chief_until(strategy, event):
    """Let the chief answer until an event."""
    strategy.tfdist_engine._presence = Presence(
        "a:1", probe=lambda address, timeout: not event.is_set()
    )


@functools.cache
def chiefs_model():
    """Return a function that returns the model of a training elsewhere, as `build` makes it."""
    return repeatable(build())


def train(callbacks, epochs):
    """Return the validation metrics of a training elsewhere."""
    model = chiefs_model()()
    keras.utils.set_random_seed(0)
    return model.fit(
        X, Y, epochs=epochs, batch_size=8, validation_data=(X, Y), verbose=0, callbacks=callbacks
    )


# --- Files ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("template", "name", "epoch"),
    [
        ("{epoch}.keras", "12.keras", 11),
        ("{epoch:02d}-{val_loss:.2f}.weights.h5", "03-0.25.weights.h5", 2),
        ("a[1]/{epoch:3d}.keras", "a[1]/  7.keras", 6),
        ("{epoch}/{epoch:03d}-{batch}.keras", "4/004-100.keras", 3),
        ("best.keras", "best.keras", None),
        ("{accuracy:.1f}.keras", "0.9.keras", None),
    ],
)
def test_epoch_is_read_from_a_checkpoints_name(tmp_path, template, name, epoch):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x")
    (tmp_path / "other.txt").write_bytes(b"x")
    for freq, finished in (("epoch", None if epoch is None else epoch + 1), (5, None)):
        (source,) = find_sources(
            [
                keras.callbacks.ModelCheckpoint(
                    tmp_path / template, save_freq=freq, save_weights_only="weights" in name
                )
            ]
        )
        (checkpoint,) = source()
        assert (checkpoint.path, checkpoint.epoch, checkpoint.finished) == (
            str(path),
            epoch,
            finished,
        )


def test_epoch_is_read_from_a_snapshot(tmp_path):
    backup = tfdist.BackupAndRestore(tmp_path)
    (source,) = find_sources([backup])
    assert source() == []
    backup.store.write(
        Snapshot({}, {"epoch": 0, "step": 0, "first": True})
    )  # nothing was trained yet
    assert source() == []
    backup.store.write(Snapshot({}, {"epoch": 3, "step": 0}))
    assert [(c.epoch, c.finished) for c in source()] == [(2, 3)]
    backup.store.write(Snapshot({}, {"epoch": 3, "step": 7}))
    assert [(c.epoch, c.finished) for c in source()] == [(3, None)]
    (tmp_path / "snapshot-2.tfdist").write_bytes(b"x")
    assert source() == []


# --- fit ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["{epoch}.keras", "{epoch:03d}-{val_loss:.2f}.weights.h5"])
def test_fit_evaluates_each_checkpoint_once_and_writes_nothing_else(
    strategy, tmp_path, capsys, name
):
    saves = keras.callbacks.ModelCheckpoint(
        tmp_path / "saved" / name, save_weights_only=name.endswith(".weights.h5")
    )
    truth = train([saves, keras.callbacks.ModelCheckpoint(tmp_path / "saved" / "last.keras")], 3)
    before = sorted(os.listdir(tmp_path / "saved"))
    called = []
    callbacks = [
        saves,
        keras.callbacks.ModelCheckpoint(
            tmp_path / "saved" / "last.keras"
        ),  # the last state, saved twice
        tfdist.TensorBoard(str(tmp_path / "logs")),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.LambdaCallback(
            on_train_begin=called.append, on_epoch_end=lambda *a: called.append(a)
        ),
    ]
    model = build(strategy, seed=1)
    history = model.fit(X, Y, epochs=3, batch_size=8, validation_data=(X, Y), callbacks=callbacks)
    assert history.epoch == [0, 1, 2]
    assert sorted(history.history) == ["val_accuracy", "val_loss"]
    np.testing.assert_allclose(history.history["val_loss"], truth.history["val_loss"], rtol=1e-6)
    assert history.model is model
    assert capsys.readouterr().out.count("evaluator: epoch") == 3
    assert called == []
    assert sorted(os.listdir(tmp_path)) == ["logs", "saved"]
    assert os.listdir(tmp_path / "logs") == ["evaluator"]
    assert sorted(os.listdir(tmp_path / "saved")) == before
    events = tf.data.TFRecordDataset([str(f) for f in (tmp_path / "logs" / "evaluator").iterdir()])
    values = [v for e in events for v in tf.compat.v1.Event.FromString(e.numpy()).summary.value]
    assert [v.tag for v in values] == ["epoch_accuracy", "epoch_loss"] * 3


@pytest.mark.parametrize("parts", ["state", "weights"])
def test_a_model_that_trains_in_parts_is_evaluated(strategy, tmp_path, parts):
    saves = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    truth = train([saves], 2)
    model = build(strategy, seed=1)
    with strategy.scope():
        if parts == "weights":
            tfdist.parallel.fsdp(model)
        model.compile(tfdist.parallel.zero("adam") if parts == "state" else "adam", model.loss)
    history = model.fit(
        X, Y, epochs=2, batch_size=8, validation_data=(X, Y), callbacks=[saves], verbose=0
    )
    np.testing.assert_allclose(history.history["val_loss"], truth.history["val_loss"], rtol=1e-6)


def test_the_model_is_evaluated_predicts_and_is_left_to_the_chief_to_save(strategy, tmp_path):
    assert not is_chief(strategy)
    model = build(strategy)
    plain = build()
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(plain.evaluate(X, Y, verbose=0))
    np.testing.assert_allclose(model.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-6)
    model.save(tmp_path / "a.keras")
    model.save_weights(tmp_path / "a.weights.h5")
    model.export(tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_a_backup_is_followed_while_it_changes_until_the_chief_is_gone(
    strategy, tmp_path, monkeypatch
):
    load = room._load
    gone = []

    def late(model, checkpoint):
        """Remove the first checkpoint before it is read, as a quicker chief does."""
        if not gone:
            gone.append(os.remove(checkpoint.path))
        return load(model, checkpoint)

    monkeypatch.setattr(room, "_load", late)
    ended = threading.Event()
    chief_until(strategy, ended)
    truth = []

    def chief():
        # The backup runs after this callback, and removes the last snapshot when training ends.
        wait = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: time.sleep(1), on_train_end=lambda *_: time.sleep(2)
        )
        truth.append(train([tfdist.BackupAndRestore(tmp_path / "backup"), wait], 3))
        ended.set()

    thread = threading.Thread(target=chief)
    thread.start()
    model = build(strategy, seed=1)
    history = model.fit(
        X,
        Y,
        epochs=10,
        validation_data=(X, Y),
        verbose=0,
        callbacks=[tfdist.BackupAndRestore(tmp_path / "backup")],
    )
    thread.join()
    assert history.epoch == [1, 2]
    np.testing.assert_allclose(
        history.history["val_loss"], truth[0].history["val_loss"][1:], rtol=1e-6
    )


def test_partial_file_is_read_once_it_is_complete(strategy, tmp_path):
    path = tmp_path / "1.weights.h5"
    build(seed=2).save_weights(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    (tmp_path / "2.weights.h5").write_bytes(b"vanishes")

    def mend():
        time.sleep(0.3)
        (tmp_path / "2.weights.h5").unlink()
        path.write_bytes(whole)

    threading.Thread(target=mend).start()
    saves = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", save_weights_only=True)
    history = build(strategy).fit(
        X, Y, epochs=1, validation_data=(X, Y), verbose=0, callbacks=[saves]
    )
    assert history.history["val_loss"] == pytest.approx(
        [build(seed=2).evaluate(X, Y, verbose=0)[0]]
    )


def test_of_old_files_only_the_newest_is_evaluated_and_ends_nothing(strategy, tmp_path):
    saves = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    train([saves], 3)
    for number in (1, 2, 3):
        os.utime(tmp_path / f"{number}.keras", (number, number))
    ended = threading.Event()
    chief_until(strategy, ended)
    threading.Timer(1.0, ended.set).start()
    started = time.monotonic()
    history = build(strategy, seed=1).fit(
        X, Y, epochs=3, validation_data=(X, Y), verbose=0, callbacks=[saves]
    )
    assert history.epoch == [2]
    assert time.monotonic() - started > 1


def test_unbuilt_model_and_dataset_are_accepted(strategy, tmp_path):
    saves = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", save_weights_only=True)

    def unbuilt():
        model = keras.Sequential([keras.layers.Dense(3)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    truth = unbuilt().fit(
        data, validation_data=data, validation_steps=2, epochs=2, verbose=0, callbacks=[saves]
    )
    with strategy.scope():
        model = unbuilt()
    history = model.fit(
        data, validation_data=data, validation_steps=2, epochs=2, verbose=0, callbacks=[saves]
    )
    np.testing.assert_allclose(history.history["val_loss"], truth.history["val_loss"], rtol=1e-6)


# --- Errors ---------------------------------------------------------------------------------------
def test_data_that_cannot_be_evaluated_are_named(strategy, tmp_path):
    model = build(strategy)
    saves = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    with pytest.raises(
        ValueError, match=r"validation_data: the evaluator needs data .* received none"
    ):
        model.fit(X, Y, callbacks=[saves])
    with pytest.raises(ValueError, match="validation_split is a part of the training data"):
        model.fit(X, Y, validation_split=0.1, callbacks=[saves])
    with pytest.raises(
        ValueError, match=r"no checkpoints to evaluate: expected a keras.callbacks.ModelCheckpoint"
    ):
        model.fit(X, Y, validation_data=(X, Y), callbacks=[keras.callbacks.CSVLogger("log.csv")])


def test_training_that_never_begins_is_reported(strategy, tmp_path):
    saves = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    with pytest.raises(
        PeersAbsent, match=r"no checkpoint, and no chief answered at 127.0.0.1:\d+ within 0.5 s"
    ):
        build(strategy).fit(X, Y, validation_data=(X, Y), verbose=0, callbacks=[saves])


def test_checkpoints_of_another_model_are_an_error_when_there_are_no_others(
    strategy, tmp_path, monkeypatch
):
    monkeypatch.setattr(room, "GIVE_UP_S", 0.2)
    build(units=5).save(tmp_path / "1.keras")
    saves = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    with pytest.raises(ValueError, match=r"1.keras: cannot be loaded into this model"):
        build(strategy).fit(X, Y, validation_data=(X, Y), verbose=0, callbacks=[saves])


def test_a_result_that_is_a_vector_has_a_curve_for_each_entry(one_device, tmp_path):
    lines = []
    report = room._Report(build(one_device), [str(tmp_path)], lines.append)
    checkpoint = types.SimpleNamespace(epoch=2, path="3.keras")
    report.add(checkpoint, {"loss": 0.5, "f1": np.array([0.25, 0.75], np.float32)})
    report.close()
    assert lines == ["evaluator: epoch 3: loss 0.5000, f1/0 0.2500, f1/1 0.7500 (3.keras)"]
    curves = tensorboard_events.scalars([tmp_path / "evaluator"], Reader())
    assert {tag: point.value for tag, (point,) in curves.items()} == {
        "epoch_loss": 0.5,
        "epoch_f1/0": 0.25,
        "epoch_f1/1": 0.75,
    }
