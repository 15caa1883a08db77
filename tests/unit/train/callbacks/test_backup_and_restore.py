"""Test that a fit interrupted at any step and resumed in another model ends as one that was not."""

import contextlib
import functools
import itertools
import os
import signal
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.first_states import repeatable, rewound
from tfdist import data
from tfdist.backup.store import Store
from tfdist.runtime.launch_protocol import PREEMPTED_CODE

EXAMPLES = 56
BATCH = 8
EPOCHS = 3
STEPS = -(-EXAMPLES // BATCH)
X = np.random.default_rng(0).normal(size=(EXAMPLES, 5)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


class Stop(Exception):
    pass


class Interrupts(keras.callbacks.Callback):
    """End a fit after a step, or before an epoch."""

    def __init__(self, epoch=None, step=None):
        super().__init__()
        self.where = (epoch, step)
        self.now = None
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch
        if self.where == (epoch, 0):
            raise Stop

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((self.now, batch))
        if self.where == (self.now, batch + 1):
            raise Stop


@pytest.fixture
def strategy(request):
    """Return the strategy that a test names.

    Tests of what both strategies do alike use the one that is traced in less time.
    """
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def no_strategy():
    """Return TensorFlow's default strategy, of models that are made outside of any scope."""
    return tf.distribute.get_strategy()


@functools.cache
def made_pipeline():
    return data.pipeline((X, Y), BATCH, seed=2)


def pipeline():
    return rewound(made_pipeline())


DATA = {
    "pipeline": pipeline,
    "tf.data": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH),
    "short last batch": lambda: tf.data.Dataset.from_tensor_slices((X[:50], Y[:50])).batch(BATCH),
}


class Pair(keras.metrics.MeanAbsoluteError):
    """A metric whose result is a vector."""

    def result(self):
        return keras.ops.stack([super().result(), keras.ops.cast(self.count, "float32")])


MODELS = {}  # what takes most of the time is to trace a model's steps


def model_of(strategy, seed, steps_per_execution=1, vectors=True):
    """Return a model as it is when it is made after setting this seed.

    Keras' own TensorBoard takes no metric whose result is a vector.
    """
    key = id(strategy), seed, steps_per_execution, vectors
    keras.utils.set_random_seed(seed)
    if key not in MODELS:
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input([5]),
                    keras.layers.Dense(6, "relu"),
                    keras.layers.BatchNormalization(center=False, scale=False),
                    keras.layers.Dropout(0.3),
                    keras.layers.Dense(1),
                ]
            )
            model.compile(
                keras.optimizers.Adam(0.01),
                "mse",
                metrics=["mae", *([Pair(name="pair")] if vectors else [])],
                steps_per_execution=steps_per_execution,
                jit_compile=False,
            )
            MODELS[key] = strategy, repeatable(model)
    _, fresh = MODELS[key]
    return fresh()


class Counter(keras.callbacks.Callback):
    """Count steps, and remember how many."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1

    def get_state(self):
        return self.count

    def set_state(self, state):
        self.count = state


def train(
    strategy,
    directory,
    kind="pipeline",
    interrupt=(None, None),
    save_freq=2,
    seed=1,
    steps_per_execution=1,
    callbacks=lambda saves: [saves],
    vectors=True,
    **fit,
):
    model = model_of(strategy, seed, steps_per_execution, vectors)
    stopping = keras.callbacks.EarlyStopping("loss", patience=9)
    interrupts = Interrupts(*interrupt)
    saves = tfdist.BackupAndRestore(directory, save_freq=save_freq)
    ended = True
    try:
        history = model.fit(
            DATA[kind](),
            epochs=EPOCHS,
            verbose=0,
            callbacks=[stopping, *callbacks(saves), interrupts],
            **fit,
        )
    except Stop:
        ended = False
        history = model.history
    return {
        "ended": ended,
        "history": history.history,
        "epochs": history.epoch,
        "weights": model.get_weights(),
        "best": stopping.best,
        "seen": interrupts.seen,
        "iterations": int(model.optimizer.iterations.numpy()),
    }


def same(actual, expected):
    assert actual["ended"]
    assert actual["iterations"] == expected["iterations"] == STEPS * EPOCHS
    assert actual["epochs"] == expected["epochs"]
    assert actual["best"] == expected["best"]
    assert set(actual["history"]) == set(expected["history"])
    for name, values in expected["history"].items():
        np.testing.assert_array_equal(actual["history"][name], values, err_msg=name)
    for a, b in zip(actual["weights"], expected["weights"], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the result of an uninterrupted fit on a strategy; each runs once."""

    @functools.cache
    def fit(strategy, kind="pipeline"):
        return train(strategy, tmp_path_factory.mktemp("whole"), kind)

    return fit


@pytest.mark.parametrize(
    ("strategy", "kind", "interrupts"),
    [
        ("one_device", "pipeline", [(0, 2), (1, 4), (2, STEPS - 1)]),
        ("mirrored", "pipeline", [(0, 3), (1, 0), (1, STEPS)]),
        ("one_device", "tf.data", [(0, 3)]),
        ("mirrored", "short last batch", [(1, STEPS)]),
        ("no_strategy", "pipeline", [(0, 3), (1, STEPS), (2, 1)]),
        ("no_strategy", "short last batch", [(1, 3)]),
    ],
    indirect=["strategy"],
)
def test_resumed_fit_equals_an_uninterrupted_one(strategy, undisturbed, tmp_path, kind, interrupts):
    """Each attempt resumes in another model than the one before, with other weights until then."""
    seeds = itertools.cycle([1, 5])
    for interrupt in interrupts:
        assert not train(strategy, tmp_path, kind, interrupt, seed=next(seeds))["ended"]
    resumed = train(strategy, tmp_path, kind, seed=next(seeds))
    same(resumed, undisturbed(strategy, kind))
    epoch, step = interrupts[-1]
    saved = (epoch * STEPS + step) // 2 * 2  # steps
    assert resumed["seen"][0] == ((saved - 1) // STEPS, 0)  # callbacks see the whole epoch
    assert not tmp_path.exists()


def test_sigterm_saves_the_step_without_a_strategy(no_strategy, undisturbed, tmp_path):
    ask = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 2 and os.kill(os.getpid(), signal.SIGTERM)
    )
    with pytest.raises(SystemExit) as caught:
        train(no_strategy, tmp_path, save_freq="epoch", callbacks=lambda saves: [saves, ask])
    assert caught.value.code == PREEMPTED_CODE
    assert Store(tmp_path).newest().snapshot.facts["step"] == 3
    same(train(no_strategy, tmp_path, save_freq="epoch", seed=5), undisturbed(no_strategy))


def test_callbacks_get_each_step_wherever_they_are_listed(one_device, tmp_path):
    before = Counter()
    after = Counter()
    options = {"callbacks": lambda saves: [before, saves, after], "save_freq": 3}
    assert not train(one_device, tmp_path, interrupt=(1, 5), **options)["ended"]
    before.count = 100
    after.count = 100
    assert train(one_device, tmp_path, seed=5, **options)["ended"]
    assert (before.count, after.count) == (STEPS * EPOCHS, STEPS * EPOCHS)


def test_backup_precedes_keras_own_callbacks_in_a_callback_list(one_device, tmp_path):
    counter = Counter()
    own = tfdist.BackupAndRestore(tmp_path, save_freq=2)
    model = model_of(one_device, 1)
    together = keras.callbacks.CallbackList(
        [own, counter], add_history=True, model=model, epochs=1, steps=STEPS
    )
    model.fit(DATA["pipeline"](), verbose=0, callbacks=together)
    assert [type(c).__name__ for c in together.callbacks] == [
        "Counter",
        "BackupAndRestore",
        "History",
    ]


def test_a_training_killed_before_its_first_save_begins_from_the_same_state(
    mirrored, undisturbed, tmp_path
):
    assert not train(mirrored, tmp_path, interrupt=(0, 3), save_freq="epoch")["ended"]
    assert os.listdir(tmp_path).count("snapshot-0.tfdist") == 1
    same(train(mirrored, tmp_path, save_freq="epoch", seed=5), undisturbed(mirrored))


@pytest.mark.parametrize(
    ("strategy", "save_freq", "steps_per_execution"),
    [
        ("one_device", "epoch", 1),
        ("mirrored", "0.001s", 1),
        ("one_device", 5, 3),
        ("no_strategy", "epoch", 1),
        ("no_strategy", 5, 3),
    ],
    indirect=["strategy"],
)
def test_fit_resumes_for_any_save_frequency(
    strategy, undisturbed, tmp_path, save_freq, steps_per_execution
):
    options = {"save_freq": save_freq, "steps_per_execution": steps_per_execution}
    assert not train(strategy, tmp_path / "cut", interrupt=(2, 3), **options)["ended"]
    same(train(strategy, tmp_path / "cut", **options), undisturbed(strategy))


def test_a_fit_that_fails_waits_for_its_last_snapshot(one_device, tmp_path, monkeypatch, caplog):
    write = Store.write

    def slowly(store, snapshot):
        time.sleep(0.3)
        return write(store, snapshot)

    monkeypatch.setattr(Store, "write", slowly)
    assert not train(one_device, tmp_path, interrupt=(0, 5), save_freq=2)["ended"]
    assert Store(tmp_path).newest().snapshot.facts["step"] == 4

    def full(store, snapshot):
        raise OSError("no space left")

    def fills_the_disk(epoch, logs):
        if epoch == 1:
            monkeypatch.setattr(Store, "write", full)

    fills = keras.callbacks.LambdaCallback(on_epoch_begin=fills_the_disk)
    assert not train(
        one_device,
        tmp_path,
        interrupt=(1, 3),
        save_freq=2,
        callbacks=lambda saves: [saves, fills],
    )["ended"]
    assert f"{tmp_path}: the last snapshot was not written: no space left" in caplog.text


def test_a_clock_that_jumps_by_a_year_disturbs_nothing(
    one_device, undisturbed, tmp_path, monkeypatch
):
    """The clock affects neither when it saves, nor which snapshot is the newest."""
    expected = undisturbed(one_device)
    true = time.time
    jumps = itertools.cycle([0, 3e7, -3e7])
    written = []
    monkeypatch.setattr(time, "time", lambda: true() + next(jumps))
    write = Store.write
    monkeypatch.setattr(
        Store,
        "write",
        lambda store, snapshot: written.append(time.monotonic()) or write(store, snapshot),
    )
    pace = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: time.sleep(0.04))
    begun = time.monotonic()
    train(
        one_device,
        tmp_path / "cut",
        interrupt=(2, 5),
        save_freq="0.2s",
        callbacks=lambda saves: [saves, pace],
    )
    assert 3 <= len(written) <= 2 + (time.monotonic() - begun) / 0.2
    files = sorted(
        (tmp_path / "cut").glob("*.tfdist"), key=lambda file: int(file.stem.partition("-")[2])
    )
    for years, file in enumerate(files):  # the newer, the older
        os.utime(file, (true() - 3e7 * years,) * 2)
    assert Store(tmp_path / "cut").newest().number == len(written) - 1
    same(train(one_device, tmp_path / "cut", seed=5), expected)


@pytest.mark.parametrize("save_freq", ["5 minutes", "0s", "epochs", 2.5])
def test_wrong_times_are_refused(save_freq, tmp_path):
    with pytest.raises(ValueError, match="save_freq"):
        tfdist.BackupAndRestore(tmp_path, save_freq=save_freq)


def test_csv_log_continues_after_a_resume(one_device, tmp_path):
    def fit(interrupt, directory):
        model = model_of(one_device, 1)
        table = keras.callbacks.CSVLogger(tmp_path / directory / "log.csv")
        callbacks = [
            table,
            tfdist.BackupAndRestore(tmp_path / directory / "backup", save_freq=3),
            Interrupts(*interrupt),
        ]
        try:
            model.fit(DATA["pipeline"](), epochs=EPOCHS, verbose=0, callbacks=callbacks)
        except Stop:
            table.csv_file.close()
        with open(tmp_path / directory / "log.csv") as file:
            return [[float(x) for x in row.split(",")[:2]] for row in file.read().splitlines()[1:]]

    for directory in ("whole", "cut"):
        (tmp_path / directory).mkdir()
    whole = fit((None, None), "whole")
    assert [row[0] for row in whole] == [0, 1, 2]
    assert [row[0] for row in fit((2, 1), "cut")] == [
        0,
        1,
    ]  # saved after step 6 of epoch 1, whose row is written again
    np.testing.assert_allclose(fit((None, None), "cut"), whole, rtol=1e-6)


def test_a_model_that_is_compiled_again_saves_its_new_optimizer(one_device, tmp_path):
    keras.utils.set_random_seed(1)
    with one_device.scope():
        model = keras.Sequential([keras.Input([5]), keras.layers.Dense(1)])
    for attempt, optimizer in enumerate(("sgd", "adam", "adam")):
        with one_device.scope():
            model.compile(optimizer, "mse", metrics=["mae"])
        saves = tfdist.BackupAndRestore(
            tmp_path / str(attempt), save_freq="epoch", delete_checkpoint=False
        )
        model.fit(X, Y, epochs=1 + attempt, batch_size=BATCH, verbose=0, callbacks=[saves])
        snapshot = Store(tmp_path / str(attempt)).newest().snapshot
        for index, variable in enumerate(model.optimizer.variables):
            np.testing.assert_array_equal(snapshot.arrays[f"optimizer/{index}"], variable)


class Total(keras.metrics.Metric):
    """A metric whose state is gathered, as it does not declare that states add up."""

    def __init__(self):
        super().__init__(name="total")
        self.value = self.add_variable(shape=(), initializer="zeros", name="value")

    def update_state(self, y, predictions, sample_weight=None):
        self.value.assign_add(keras.ops.sum(y**2))

    def result(self):
        return keras.ops.convert_to_tensor(self.value)


def test_gathered_metric_is_saved_as_it_is_after_each_of_two_resumes(mirrored, tmp_path):
    """A run that resumes at the end of an epoch reads the metric before its first update."""
    x = np.random.default_rng(0).normal(size=(96, 5)).astype("float32")
    y = x.sum(axis=1, keepdims=True)

    def fit(directory, last=None):
        def stop(epoch, logs):
            if epoch == last:
                raise Stop

        keras.utils.set_random_seed(1)
        with mirrored.scope():
            model = keras.Sequential([keras.Input([5]), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=[Total()])
        callbacks = [
            tfdist.BackupAndRestore(directory, save_freq=1),
            keras.callbacks.LambdaCallback(on_epoch_end=stop),
        ]
        with contextlib.suppress(Stop):
            return model.fit(
                data.pipeline((x, y), 12, seed=3),
                validation_data=(x[:30], y[:30]),
                epochs=3,
                verbose=0,
                callbacks=callbacks,
            ).history["total"]

    for epoch in (0, 1):
        assert fit(tmp_path, epoch) is None
    np.testing.assert_allclose(fit(tmp_path), [np.sum(y**2)] * 3, rtol=1e-5)
