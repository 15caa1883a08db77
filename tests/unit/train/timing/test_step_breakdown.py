"""Test step breakdowns: each planted delay appears in its part, and measuring changes no result.

tests/cluster/test_step_breakdown.py tests them with two workers.
"""

import logging
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.parity.cases import CROSSENTROPY, mlp
from tests.windows import typical
from tfdist.parallel.placement import Placement
from tfdist.telemetry.step_records import PARTS, per_step, read
from tfdist.train.timing import step_breakdown
from tfdist.train.timing.step_breakdown import Recorder, Times, add_host_time, compute_times

DELAY_S = 0.06  # planted, in each step


@pytest.fixture(scope="module")
def central():
    return tfdist.make_strategy("central_storage", devices="cpu:0,cpu:1")


class Sleep(keras.layers.Layer):
    """Sleep in the forward pass."""

    def call(self, x):
        def wait(x):
            time.sleep(DELAY_S)
            return x

        return x + 0 * tf.ensure_shape(
            tf.numpy_function(wait, [tf.stop_gradient(x)], tf.float32), x.shape
        )

    def compute_output_shape(self, shape):
        return shape


class Tied(keras.Model):
    """Use weights twice, by sparse and by dense gradients; have statistics and a seed."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(20, 8)
        self.dense = keras.layers.Dense(8, "tanh", kernel_regularizer="l2")
        self.norm = keras.layers.BatchNormalization()
        self.drop = keras.layers.Dropout(0.3)
        self.out = keras.layers.Dense(3)

    def call(self, x, training=False):
        rows = self.table(tf.cast(tf.abs(x * 5), tf.int32) % 20)
        rows = self.dense(self.dense(rows))
        return self.out(
            self.drop(self.norm(tf.reduce_mean(rows, 1), training=training), training=training)
        )


def image_model():
    return keras.Sequential(
        [
            keras.Input([6]),
            keras.layers.Reshape([6, 1]),
            keras.layers.Conv1D(4, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


def trained(
    strategy,
    directory,
    build=mlp,
    epochs=2,
    steps=12,
    optimizer=None,
    callbacks=(),
    data=None,
    **kwargs,
):
    """Return a model after a fit and its windows; measure only where there is a directory."""
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps * 8, 6)).astype(np.float32)
    y = rng.integers(0, 3, steps * 8)
    with strategy.scope():
        model = build()
        model.compile(
            optimizer() if optimizer else keras.optimizers.Adam(0.01),
            CROSSENTROPY,
            metrics=["accuracy"],
            **kwargs,
        )
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
    batches = data(batches) if data else batches
    measured = [tfdist.StepBreakdown(directory)] if directory else []
    history = model.fit(batches, epochs=epochs, verbose=0, callbacks=[*measured, *callbacks])
    return model, history.history, read(directory).get(0, []) if directory else []


def whole(windows, steps):
    """Check the invariants of all windows and return them."""
    assert sum(window.steps for window in windows) == steps
    for window in windows:
        assert set(window.parts) == set(PARTS)
        assert min(window.parts.values()) >= 0
        assert sum(window.parts.values()) == pytest.approx(window.seconds, abs=1e-4)
    return windows


# --- No result changes ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "build"),
    [("one_device", image_model), ("one_device", Tied), ("mirrored", Tied), ("central", mlp)],
)
def test_measured_steps_give_the_same_weights_to_the_bit(request, tmp_path, name, build):
    strategy = request.getfixturevalue(name)
    plain, history, _ = trained(strategy, None, build)
    measured, measured_history, windows = trained(strategy, tmp_path, build)
    whole(windows, 24)
    assert measured_history == history
    for a, b in zip(plain.get_weights(), measured.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_same_model_goes_on_without_being_measured(mirrored, tmp_path):
    model, _, windows = trained(mirrored, tmp_path, epochs=1)
    x = np.zeros([24, 6], np.float32)
    y = np.zeros(24, np.int64)
    model.fit(x, y, batch_size=8, verbose=0)
    assert len(read(tmp_path)[0]) == len(windows)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[tfdist.StepBreakdown(tmp_path)])
    assert read(tmp_path)[0][-1].step == 12 + 3 + 3


# --- Planted delays -------------------------------------------------------------------------------
def slow_data(batches):
    def wait(x):
        time.sleep(DELAY_S)
        return x

    return batches.map(
        lambda x, y: (tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), x.shape), y)
    )


def slow_model():
    return keras.Sequential([keras.Input([6]), Sleep(), keras.layers.Dense(3)])


def slow_callback():
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: time.sleep(DELAY_S)
    )


@pytest.mark.parametrize(
    ("part", "planted"),
    [
        ("input", {"data": slow_data}),
        ("forward_backward", {"build": slow_model}),
        ("host", {"callbacks": [slow_callback()]}),
    ],
)
def test_a_planted_delay_is_found_in_its_part(one_device, tmp_path, part, planted):
    _, _, windows = trained(one_device, tmp_path, **planted)
    parts = typical(whole(windows, 24))
    assert max(parts, key=parts.get) == part
    assert parts[part] > DELAY_S / 2


@pytest.mark.parametrize("how", [{}, {"jit_compile": False, "run_eagerly": True}])
def test_the_first_step_of_a_call_is_measured_from_its_beginning(one_device, tmp_path, how):
    """The clock is not read once the step has run."""
    _, _, windows = trained(one_device, tmp_path, slow_model, epochs=6, steps=1, **how)
    assert all(window.parts["forward_backward"] > DELAY_S / 2 for window in windows)


def test_replicas_of_one_process_wait_for_the_slowest(mirrored, tmp_path):
    """Both replicas sleep, one after the other, as Python functions of a graph do."""
    _, _, windows = trained(mirrored, tmp_path, slow_model)
    parts = per_step(whole(windows, 24))
    assert (
        parts["wait"] > DELAY_S / 4
    )  # half a delay: the mean of the one that waits a whole one and of the other
    assert windows[0].bytes == 4 * (6 * 3 + 3)


def test_the_input_wait_of_the_tensorboard_callback_is_the_same(one_device, tmp_path):
    model, _, windows = trained(one_device, tmp_path, data=slow_data)
    assert model.train_function.stats.input_seconds == pytest.approx(
        sum(w.parts["input"] for w in windows), rel=1e-3
    )
    plain, _, _ = trained(one_device, None, data=slow_data)
    assert plain.train_function.stats.input_seconds > 24 * DELAY_S / 2


# --- Ways to run steps ----------------------------------------------------------------------------
class OwnLogs(keras.Model):
    """Update twice in a step, and return a log that must be averaged after each step.

    Each step therefore runs by itself.
    """

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            self.optimizer.apply(
                tape.gradient(loss, self.trainable_variables), self.trainable_variables
            )
        return {"own": loss}


@pytest.mark.parametrize(
    "how",
    [
        {"build": OwnLogs},
        {"run_eagerly": True},
        {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())},
    ],
)
def test_steps_that_run_by_themselves_are_measured_too(mirrored, tmp_path, how):
    _, _, windows = trained(mirrored, tmp_path, steps=6, **how)
    parts = per_step(whole(windows, 12)) or windows[0].parts
    assert min(parts[name] for name in ("forward_backward", "gradient_sync", "update")) > 0


def test_data_of_unknown_length_are_measured_to_their_end(one_device, tmp_path):
    _, _, windows = trained(
        one_device, tmp_path, data=lambda batches: batches.filter(lambda x, y: True)
    )
    assert sum(window.steps for window in windows) == 24


def test_accumulated_gradients_count_as_steps(one_device, tmp_path):
    accumulated = {"optimizer": lambda: keras.optimizers.SGD(gradient_accumulation_steps=3)}
    model, _, _ = trained(one_device, tmp_path, **accumulated)
    model.fit(
        np.zeros([24, 6], np.float32),
        np.zeros(24, np.int64),
        batch_size=8,
        verbose=0,
        callbacks=[tfdist.StepBreakdown(tmp_path)],
    )
    assert read(tmp_path)[0][-1].step == 24 + 3


def test_a_directory_elsewhere_is_refused():
    with pytest.raises(ValueError, match="local file system, received 'gs://bucket/run'"):
        tfdist.StepBreakdown("gs://bucket/run")


def test_compiled_by_xla_all_is_forward_and_backward(one_device, tmp_path):
    _, _, windows = trained(one_device, tmp_path, jit_compile=True)
    parts = per_step(whole(windows, 24))
    assert parts["forward_backward"] > 0
    assert parts["gradient_sync"] == parts["wait"] == 0


def test_a_resumed_fit_goes_on_counting(one_device, tmp_path):
    def end(batch, logs):
        if batch == 5:
            raise KeyboardInterrupt

    backup = lambda: tfdist.BackupAndRestore(str(tmp_path / "backup"), save_freq=5)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        trained(
            one_device,
            tmp_path,
            callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=end), backup()],
        )
    before = len(read(tmp_path).get(0, []))
    _, _, windows = trained(one_device, tmp_path, callbacks=[backup()])
    again = whole(windows[before:], 24 - 5)
    assert [again[0].step - again[0].steps, again[-1].step] == [5, 24]
    assert (again[0].epoch, again[-1].epoch) == (0, 1)


# --- Files, and where there is nothing to measure -------------------------------------------------
def test_curves_are_written_beside_the_records(one_device, tmp_path):
    _, _, windows = trained(one_device, tmp_path)
    (file,) = (tmp_path / "worker-0").glob("events.*")
    last_steps = {
        value.tag: event.step
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    }
    assert set(last_steps) == {
        *(f"step_breakdown/{part}_milliseconds" for part in PARTS),
        "step_breakdown/examples_per_second",
    }
    assert set(last_steps.values()) == {windows[-1].step} == {24}


def test_the_first_call_counts_as_compiling(one_device, tmp_path):
    _, _, windows = trained(one_device, tmp_path)
    assert [window.steady for window in windows] == [False] + [True] * (len(windows) - 1)


@pytest.mark.parametrize("fault", ["full disk", "a file in the way"])
def test_training_continues_if_records_cannot_be_written(one_device, tmp_path, caplog, fault):
    other = tmp_path / "other"
    if fault == "full disk":
        (tmp_path / "worker-0").mkdir()
        (tmp_path / "worker-0" / "step_breakdown.jsonl").symlink_to("/dev/full")
    else:
        (tmp_path / "worker-0").touch()
    with caplog.at_level(logging.WARNING, "tfdist"):
        model, _, _ = trained(
            one_device,
            None,
            callbacks=[tfdist.StepBreakdown(tmp_path), tfdist.StepBreakdown(other)],
        )  # /dev/full has no end to read
    assert int(model.optimizer.iterations.numpy()) == 24
    assert "because a write failed" in caplog.text
    assert sum(window.steps for window in read(other)[0]) == 24


@pytest.mark.parametrize("short", [1, 4])
def test_workers_exchange_their_times_as_often_if_a_callback_watches_each_batch(monkeypatch, short):
    """Workers exchange times every few seconds, even if they run steps one by one."""
    call = 0
    exchanges = []

    def all_gather(strategy, placement, numbers):
        exchanges.append(call)
        return np.stack([numbers, numbers])

    monkeypatch.setattr(step_breakdown, "all_gather", all_gather)
    recorder = Recorder(None, Placement(workers=2, rank=1), [])
    for call in range(1, 401):  # noqa: B007 - `all_gather` reads it
        recorder.add(Times(0.0, 0.0, 0.0, 0.0, np.zeros(1)))
        recorder.end_call(0, steps=1, examples=8, waited=0.0, short=short)
    assert exchanges == list(range(0, 401, 50 * short))


def test_strategy_without_an_engine_gives_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "tfdist"):
        trained(tf.distribute.OneDeviceStrategy("/cpu:0"), tmp_path, steps=2)
    assert "measures nothing here" in caplog.text


# --- Numbers --------------------------------------------------------------------------------------
def test_readings_of_two_replicas():
    """Batch at 10; gradients at 11 and 13, sums at 14, done at 15 and 16; the next batch at 17."""
    times = compute_times(10.0, np.array([[17.0, 11, 14, 15, 13, 14, 16]]))
    assert times[:4] == (1.0, 2.0, 2.0, 2.0)
    assert times.shortest.tolist() == [1.0]


def test_a_clock_that_was_set_makes_no_part_negative():
    times = compute_times(10.0, np.array([[7.0, 5.0, 6.0, 7.0]]))
    assert min(times[:4]) == 0
    assert add_host_time({"input": 6.0, "update": 2.0}, 4.0) == {
        "input": 3.0,
        "update": 1.0,
        "wait": 0.0,
        "host": 0.0,
    }
