"""Test where a training begins and ends.

The tests cover refused snapshots, files kept at the end, and events sent to the launch.
"""

import concurrent.futures
import contextlib
import os
import signal
import time

import keras
import numpy as np
import pytest

import tfdist
from tests.unit.train.callbacks.test_backup_and_restore import (
    BATCH,
    DATA,
    EPOCHS,
    STEPS,
    Counter,
    Interrupts,
    Stop,
    X,
    Y,
    model_of,
    train,
)
from tfdist import data
from tfdist.backup.claim import Superseded
from tfdist.backup.store import Store
from tfdist.runtime import launch_protocol
from tfdist.train.callbacks import backup_and_restore


@pytest.fixture
def launched(monkeypatch, tmp_path_factory):
    """Make this process an attempt of a launch, as far as it can tell."""
    logs = tmp_path_factory.mktemp("launch")

    def launch(name, attempt=0):
        monkeypatch.setattr(backup_and_restore, "_completed", set())
        for variable, value in (
            (launch_protocol.LAUNCH, name),
            (launch_protocol.RESTARTS, "1" if name else "0"),
            (launch_protocol.ATTEMPT, str(attempt)),
            (launch_protocol.TASK, "worker:0"),
            (launch_protocol.LOG_DIR, str(logs)),
        ):
            monkeypatch.setenv(variable, value)
        return logs

    return launch


def fit(
    strategy, directory, *, seed=1, epochs=EPOCHS, pipeline=DATA["pipeline"], others=(), **options
):
    model = model_of(strategy, seed)
    history = model.fit(
        pipeline(),
        epochs=epochs,
        verbose=0,
        callbacks=[tfdist.BackupAndRestore(directory, **options), *others],
    )
    return model.get_weights(), history.history, history.epoch


def same(actual, expected):
    for a, b in zip(actual[0], expected[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    np.testing.assert_equal(actual[1:], expected[1:])
    assert {value.dtype.name for value in actual[1]["pair"]} <= {"float32"}


def snapshots(directory):
    return [name for name in os.listdir(directory) if name.endswith(".tfdist")]


# --- The end --------------------------------------------------------------------------------------
@pytest.mark.parametrize("save_freq", ["epoch", 4])
def test_a_launch_that_is_complete_stays_complete(one_device, tmp_path, launched, save_freq):
    launched("one")
    counter = Counter()
    expected = fit(one_device, tmp_path, save_freq=save_freq, others=[counter])
    launched("one", attempt=1)
    again = Counter()
    same(fit(one_device, tmp_path, save_freq=save_freq, others=[again], seed=5), expected)
    assert counter.count == again.count == STEPS * EPOCHS
    launched("two")
    begun = Counter()
    same(fit(one_device, tmp_path, save_freq=save_freq, others=[begun]), expected)
    assert begun.count == STEPS * EPOCHS
    assert Store(tmp_path).newest().snapshot.facts["finished"] == "two"


def test_second_fit_of_the_same_process_starts_over(one_device, tmp_path, launched):
    launched("one")
    expected = fit(one_device, tmp_path)
    counter = Counter()
    same(fit(one_device, tmp_path, others=[counter]), expected)
    assert counter.count == STEPS * EPOCHS


def test_without_a_launch_its_snapshot_is_not_resumed(one_device, tmp_path, launched, monkeypatch):
    launched("one")
    expected = fit(one_device, tmp_path)
    launched("")
    same(fit(one_device, tmp_path), expected)
    assert not tmp_path.exists()


def test_early_stop_counts_as_complete(one_device, tmp_path, launched):
    launched("one")
    stop = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(stop.model, "stop_training", epoch == 1)
    )
    expected = fit(one_device, tmp_path, others=[stop])
    assert expected[2] == [0, 1]
    launched("one", attempt=1)
    for _ in range(2):
        same(fit(one_device, tmp_path, seed=5), expected)
        launched("one", attempt=1)


def test_the_best_weights_are_given_back_at_the_end(one_device, tmp_path):
    """The best epoch may lie before the interruption, too."""

    def attempt(directory, **options):
        best = keras.callbacks.EarlyStopping(
            "loss", mode="max", patience=9, restore_best_weights=True
        )  # the first epoch's
        return train(one_device, directory, callbacks=lambda saves: [saves, best], **options)[
            "weights"
        ]

    expected = attempt(tmp_path / "whole")
    attempt(tmp_path / "cut", interrupt=(2, 3))
    for a, b in zip(attempt(tmp_path / "cut", seed=5), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_snapshot_that_is_kept_has_its_history_and_resumes(one_device, tmp_path):
    options = {"delete_checkpoint": False}
    expected = fit(one_device, tmp_path, **options)
    assert expected[2] == [0, 1, 2]
    same(fit(one_device, tmp_path, seed=5, **options), expected)
    assert fit(one_device, tmp_path, seed=5, epochs=5, **options)[2] == [0, 1, 2, 3, 4]


def test_the_models_next_fit_begins_at_its_own_epoch(one_device, tmp_path):
    train(one_device, tmp_path, interrupt=(1, 4))
    model = model_of(one_device, 5)
    model.fit(
        DATA["pipeline"](), epochs=EPOCHS, verbose=0, callbacks=[tfdist.BackupAndRestore(tmp_path)]
    )
    assert model.fit(DATA["pipeline"](), epochs=1, verbose=0).epoch == [0]


# --- The beginning --------------------------------------------------------------------------------
def test_an_epoch_of_another_length_is_refused(one_device, tmp_path):
    train(one_device, tmp_path, interrupt=(1, 4))
    with pytest.raises(
        ValueError,
        match=(
            rf"saved after step \d of an epoch of {STEPS} steps, and an epoch now has 4 steps. "
            r"The global batch or the data"
        ),
    ):
        fit(one_device, tmp_path, pipeline=lambda: data.pipeline((X, Y), 2 * BATCH, seed=2))


def test_worker_with_another_directory_than_the_chief_gets_an_error(
    one_device, tmp_path, monkeypatch
):
    train(one_device, tmp_path, interrupt=(1, 4))
    number = Store(tmp_path).numbers()[-1]
    engine = one_device.tfdist_engine
    for chief, stored in (
        ([number, 1.0, 2.0], f"snapshot-{number} of epoch 1, step 2\\); worker 1 found none"),
        ([-1.0, 0.0, 0.0], f"none\\); worker 1 found snapshot-{number}"),
    ):
        monkeypatch.setattr(
            engine,
            "all_gather",
            lambda numbers, chief=chief: [[*map(float, chief), *numbers[3:]], numbers],
        )
        with pytest.raises(
            ValueError,
            match=rf"the snapshot that the chief restores \({stored}"
            ".*must read the same backup_dir",
        ):
            fit(one_device, tmp_path / "elsewhere" if chief[0] >= 0 else tmp_path)


def test_a_writer_that_was_superseded_ends(one_device, tmp_path):
    class TakesOver(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                deadline = time.monotonic() + 60
                while len(snapshots(tmp_path)) < 2 and time.monotonic() < deadline:
                    time.sleep(0.01)
                Store(tmp_path).claim()

    with pytest.raises(Superseded, match="another one is: process"):
        fit(one_device, tmp_path, others=[TakesOver()])
    assert Store(tmp_path).newest().snapshot.facts["epoch"] == 1


def test_an_attempt_that_was_given_up_does_not_begin(one_device, tmp_path, launched):
    launched("one", attempt=2)
    Store(tmp_path).claim("one", 3)
    with pytest.raises(Superseded, match="attempt 3 does"):
        fit(one_device, tmp_path)


# --- The journal ----------------------------------------------------------------------------------
def test_launch_is_notified_of_saves_and_restores(one_device, tmp_path, launched):
    logs = launched("one")
    assert not train(one_device, tmp_path, interrupt=(1, 4), save_freq=5)["ended"]
    train(one_device, tmp_path, seed=5, save_freq=5)
    events = [e for e in launch_protocol.read_journal(logs) if e["event"] != "saving"]
    assert [(e["event"], e["epoch"], e["step"], e["number"]) for e in events][:4] == [
        ("saved", 0, 0, 0),
        ("saved", 0, 5, 1),
        ("saved", 1, 3, 2),
        ("restored", 1, 3, 2),
    ]
    assert all(
        e["task"] == "worker:0"
        and e["seconds"] >= 0
        and e["path"] == str(tmp_path / f"snapshot-{e['number']}.tfdist")
        for e in events
    )
    assert events[-1]["epoch"] == EPOCHS


def test_a_call_of_more_steps_than_where_it_was_saved_is_refused(one_device, tmp_path):
    with pytest.raises(Stop):
        fit(one_device, tmp_path, save_freq=3, others=[Interrupts(0, 4)])
    with pytest.raises(ValueError, match="steps_per_execution=1; steps_per_execution is now 4"):
        model_of(one_device, 1, 4).fit(
            DATA["pipeline"](),
            epochs=EPOCHS,
            verbose=0,
            callbacks=[tfdist.BackupAndRestore(tmp_path, save_freq=3)],
        )


def test_signal_after_the_last_step_is_raised_after_fit(one_device, tmp_path):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
    try:
        late = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: (
                epoch == EPOCHS - 1 and os.kill(os.getpid(), signal.SIGTERM)
            )
        )
        fit(one_device, tmp_path, others=[late])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [True]


def test_save_on_request_is_resumed(one_device, tmp_path):
    """The snapshot is of the step after which a callback has asked for it, not of an epoch."""

    class Requests(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                backup.request_save()

    expected = fit(one_device, tmp_path / "calm")
    backup = tfdist.BackupAndRestore(tmp_path / "asked", save_freq=1000)
    with pytest.raises(Stop):
        model_of(one_device, 1).fit(
            DATA["pipeline"](),
            epochs=EPOCHS,
            verbose=0,
            callbacks=[backup, Requests(), Interrupts(0, 3)],
        )
    end = time.monotonic() + 30
    while Store(tmp_path / "asked").newest().snapshot.facts["step"] != 2:  # it is being written
        assert time.monotonic() < end
        time.sleep(0.05)
    same(fit(one_device, tmp_path / "asked", save_freq=1000), expected)


def test_a_callback_of_two_fits_saves_the_model_of_each(one_device, tmp_path):
    backup = tfdist.BackupAndRestore(tmp_path, save_freq=1000)
    for rate in (0.1, 0.001):
        model = model_of(one_device, 1)
        model.optimizer.learning_rate = rate
        with contextlib.suppress(Stop):
            model.fit(
                DATA["pipeline"](),
                epochs=1,
                verbose=0,
                callbacks=[backup, Interrupts(0, 3)] if rate == 0.001 else [backup],
            )
    saved = Store(tmp_path).newest().snapshot
    key = list(saved.arrays)[saved.facts["names"].index(model.optimizer.learning_rate.path)]
    assert float(saved.arrays[key]) == pytest.approx(0.001)


def test_fit_outside_of_the_main_thread_warns_that_no_signal_saves(one_device, tmp_path, caplog):
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        threads.submit(fit, one_device, tmp_path).result(60)
    assert "outside of the main thread" in caplog.text
    assert "request_save()" in caplog.text
