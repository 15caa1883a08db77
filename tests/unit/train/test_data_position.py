"""Test that a resumed fit reads the rest of its data, however epochs and passes relate."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.first_states import repeatable, rewound
from tests.interrupts import Interrupts, Stop
from tfdist import data
from tfdist.train.data_position import DataPosition

STEPS = 6  # of a pass
X = np.random.default_rng(0).normal(size=(4 * STEPS, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


@functools.cache
def made_pipeline():
    return data.pipeline((X, Y), 4, seed=2)


def batches():
    return rewound(made_pipeline())


def read_before():
    """Return a data pipeline that another fit has read."""
    result = batches()
    result.epochs.next = 3
    return result


# Data, arguments of fit, save_freq of its backup, and steps until it is interrupted.
CASES = {
    "epochs that begin at another": (batches, {"epochs": 4, "initial_epoch": 2}, "epoch", 8),
    "data that were read before": (read_before, {"epochs": 2}, "epoch", 8),
    "half a pass an epoch": (batches, {"epochs": 5, "steps_per_epoch": 3}, 2, 9),
    "half a pass an epoch, mapped": (
        lambda: batches().map(lambda x, y: (x, 2.0 * y)),
        {"epochs": 5, "steps_per_epoch": 3},
        2,
        9,
    ),
    "a pass of two epochs and a short one": (
        lambda: batches().prefetch(1).take(5),
        {"epochs": 5, "steps_per_epoch": 2},
        3,
        8,
    ),
    "an endless data set": (
        lambda: batches().repeat(),
        {"epochs": 3, "steps_per_epoch": 4},
        3,
        8,
    ),
    "data made from a pipeline": (
        lambda: batches().map(lambda x, y: (x, 2.0 * y)),
        {"epochs": 3},
        "epoch",
        8,
    ),
    "passes over a pipeline that is read twice": (
        lambda: batches().repeat(2),
        {"epochs": 2},
        5,
        17,
    ),
    "a pipeline in a cache": (lambda: batches().cache(), {"epochs": 3}, 4, 14),
    "the last step of an epoch": (lambda: batches().prefetch(1), {"epochs": 3}, STEPS, 8),
}


@pytest.fixture(scope="module", params=["strategy", "none"])
def model(request):
    """Return a function that returns a model in its first state, under a strategy or none."""
    strategy = (
        request.getfixturevalue("one_device")
        if request.param == "strategy"
        else tf.distribute.get_strategy()
    )
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], jit_compile=False)
        return repeatable(model)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("case", CASES)
def test_resumed_fit_reads_what_is_left(model, tmp_path, case):
    make, arguments, save_freq, steps = CASES[case]

    def fit(directory, *callbacks):
        own = model()
        backup = tfdist.BackupAndRestore(tmp_path / directory, save_freq=save_freq)
        history = own.fit(make(), verbose=0, callbacks=[backup, *callbacks], **arguments)
        return history.history, own.get_weights(), int(own.optimizer.iterations.numpy())

    whole = fit("whole")
    with pytest.raises(Stop):
        fit("cut", Interrupts(steps))
    resumed = fit("cut")
    assert resumed[2] == whole[2]
    assert resumed[0] == whole[0]
    for mine, other in zip(resumed[1], whole[1], strict=True):
        np.testing.assert_array_equal(mine, other)


def test_arrays_resume_without_a_strategy(tmp_path):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"], weighted_metrics=["mse"], jit_compile=False)
    fresh = repeatable(model)

    def fit(directory, *callbacks):
        backup = tfdist.BackupAndRestore(tmp_path / directory, save_freq=4)
        return fresh().fit(
            X,
            Y,
            sample_weight=np.arange(len(X)),
            batch_size=4,
            epochs=2,
            shuffle=False,
            validation_split=0.25,
            verbose=0,
            callbacks=[backup, *callbacks],
        ).history, model.get_weights()

    whole, weights = fit("whole")
    with pytest.raises(Stop):
        fit("cut", Interrupts(10))
    resumed, resumed_weights = fit("cut")
    assert resumed == whole
    for mine, other in zip(resumed_weights, weights, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_a_strategy_of_tensorflow_restarts_an_epoch_in_its_order(tmp_path, caplog):
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        model.compile("sgd", metrics=[first_row], loss="mse", jit_compile=False)
        fresh = repeatable(model)

    def fit(directory, *callbacks):
        backup = tfdist.BackupAndRestore(tmp_path / directory, save_freq=4)
        history = fresh().fit(batches(), epochs=2, verbose=0, callbacks=[backup, *callbacks])
        return history.history["first_row"]

    whole = fit("whole")
    with pytest.raises(Stop):
        fit("cut", Interrupts(STEPS + 3))
    assert fit("cut") == whole
    assert "was saved after step 2 of epoch 1. fit starts this epoch again" in caplog.text


def first_row(y, _):
    """Return a metric that shows the order of the examples."""
    return tf.reduce_sum(y[:1])


def test_metrics_that_the_snapshot_does_not_have_are_refused(tmp_path):
    def fit(metrics, *callbacks):
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=metrics, jit_compile=False)
        backup = tfdist.BackupAndRestore(tmp_path, save_freq=2)
        model.fit(batches(), verbose=0, callbacks=[backup, *callbacks])

    with pytest.raises(Stop):
        fit(["mae"], Interrupts(4))
    with pytest.raises(ValueError, match="expected the metrics of the snapshot"):
        fit([])


def test_position_has_the_epoch_at_which_a_pass_began():
    pipeline = batches()
    pipeline.epochs.next = 7
    position = DataPosition(pipeline, steps_per_epoch=3)
    assert position.at(5, 0) == [5, 7]
    position.begin_pass(5)
    pipeline.epochs.next = 8  # the pass reads its first batch
    assert position.at(6, 2) == [5, 7]
    assert position.at(7, 0) == [7, 8]
    resumed = batches()
    assert DataPosition(resumed, steps_per_epoch=3).go_to(6, 2, [5, 7]) == 5
    assert resumed.epochs.next == 7


def test_snapshots_without_a_position_count_epochs_as_passes():
    pipeline = batches()
    assert DataPosition(pipeline).go_to(4, 2, ()) == 2
    assert pipeline.epochs.next == 4
