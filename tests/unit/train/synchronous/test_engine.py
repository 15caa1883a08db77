"""Test `fit`, `evaluate` and `predict` in one process: steps, callbacks, shared state."""

import gc
import itertools
import os
import time
import types
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import heartbeats
from tests.parity.cases import CROSSENTROPY, GLOBAL_BATCH, STEPS, Steps, data, dataset
from tfdist.runtime.goodput import CATEGORIES, REMEDIES
from tfdist.runtime.launch_protocol import Phase
from tfdist.train.synchronous import loop, worker_callbacks
from tfdist.train.synchronous.loop import Runner
from tfdist.train.synchronous.predict import Predictor
from tfdist.train.synchronous.replica_state import UNTRACED, ReplicaState


def linear():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])


def compiled(strategy, build=linear, optimizer=keras.optimizers.SGD, loss=CROSSENTROPY, **kwargs):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build()
        model.compile(optimizer(), loss, **kwargs)
    return model


def copies(strategy, variable):
    return [c.numpy() for c in strategy.experimental_local_results(variable.value)]


@pytest.fixture
def calls(monkeypatch):
    """Record the steps of each call of a graph."""
    done = []
    run_steps = Runner._run_steps

    def counted(self, iterator, steps):
        done.append(run_steps(self, iterator, steps))
        return done[-1]

    monkeypatch.setattr(loop.Runner, "_run_steps", counted)
    return done


# --- Steps and callbacks --------------------------------------------------------------------------
def test_unwatched_steps_run_many_at_a_time(one_device, calls):
    x, y = data(400)
    model = compiled(one_device)
    history = model.fit(dataset(x, y, batch=1), epochs=2, verbose=0).history
    assert sum(calls) == 800
    assert len(calls) < 200  # about 20 on an idle machine
    assert len(history["loss"]) == 2
    assert int(model.optimizer.iterations.numpy()) == 800


def test_a_progress_bar_synchronizes_metrics_once_a_second(one_device, calls, monkeypatch):
    """Each call of a graph takes 0.25 s by the clock of the test."""
    readings = itertools.count(0, 0.25)
    clock = types.SimpleNamespace(perf_counter=lambda: next(readings), time=time.time)
    monkeypatch.setattr(loop, "time", clock)
    synchronized = []
    metrics = ReplicaState.metrics

    def counted(self, *args):
        synchronized.append(sum(calls))
        return metrics(self, *args)

    monkeypatch.setattr(ReplicaState, "metrics", counted)
    compiled(one_device).fit(*data(40), batch_size=1, verbose=1)
    assert calls == [1] * 40
    assert np.diff(synchronized).tolist()[2:-1] == [4] * (len(synchronized) - 4)
    assert len(synchronized) <= 13


@pytest.mark.parametrize("name", ["one_device", "mirrored", "central_storage"])
def test_callbacks_read_and_set_variables_as_with_one_replica(name):
    read = []

    class Reads(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            optimizer = self.model.optimizer
            kernel = self.model.layers[0].kernel
            assert np.asarray(kernel[0]).shape == (3,)
            np.testing.assert_array_equal(np.asarray(kernel.value), kernel.numpy())
            read.append((float(optimizer.learning_rate), int(optimizer.iterations)))
            optimizer.learning_rate = optimizer.learning_rate * 0.5

    strategy = tfdist.make_strategy(name, devices="cpu:0" + ",cpu:1" * (name != "one_device"))
    model = compiled(strategy, optimizer=lambda: keras.optimizers.SGD(0.5))
    model.fit(*data(), batch_size=12, epochs=2, verbose=0, callbacks=[Reads()])
    assert read == [(0.5, STEPS), (0.25, 2 * STEPS)]
    assert (float(model.optimizer.learning_rate), int(model.optimizer.iterations)) == (0.125, 10)


@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
def test_results_of_the_first_epochs_are_read_without_tracing(strategy, request):
    x, y = data(22)  # uneven batches
    model = compiled(request.getfixturevalue(strategy), metrics=["accuracy"])
    model.optimizer.learning_rate = 0.0
    history = model.fit(x, y, batch_size=7, epochs=2, shuffle=False, verbose=0).history
    state = model.distribute_strategy.tfdist_engine._replica_states[model]
    assert not state._functions
    more = model.fit(x, y, batch_size=7, epochs=6, shuffle=False, verbose=0).history
    assert any(name.startswith("metrics") for name in state._functions)
    for name, values in history.items():
        np.testing.assert_allclose([*values, *more[name]], values[0], rtol=1e-6)


def test_a_callback_that_watches_batches_sees_each_step(mirrored, calls):
    x, y = data()
    watched, free = (compiled(mirrored, metrics=["accuracy"]) for _ in range(2))
    steps = Steps()
    ends = []
    watched.fit(dataset(x, y), epochs=2, verbose=0, callbacks=[steps])
    assert [c for c in calls if c] == [1] * 2 * STEPS
    free.fit(
        dataset(x, y),
        epochs=2,
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(on_epoch_end=lambda e, logs: ends.append(dict(logs)))
        ],
    )
    np.testing.assert_allclose(
        [steps.rows[STEPS - 1], steps.rows[-1]],
        [[e[k] for k in sorted(e)] for e in ends],
        rtol=1e-5,
    )
    assert steps.rows[0] != steps.rows[1]


@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
def test_single_steps_read_the_metrics_of_their_model_as_compiled(strategy, request):
    x, y = data(36)
    strategy = request.getfixturevalue(strategy)
    model = compiled(strategy)
    batches = [slice(0, 12), slice(12, 24), slice(24, 31), slice(31, 36)]
    outputs = np.asarray(model(x))  # stay, as the learning rate is 0
    of_rows = {
        "loss": keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True).numpy(),
        "accuracy": (outputs.argmax(1) == y).astype(float),
        "top": keras.metrics.sparse_top_k_categorical_accuracy(y, outputs, 2).numpy(),
    }

    for metrics in (["accuracy"], [], ["top"]):
        with strategy.scope():
            top = keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")
            made = [top if name == "top" else name for name in metrics]
            model.compile(keras.optimizers.SGD(0.0), CROSSENTROPY, metrics=made)
        for _ in range(3):
            for b in batches:
                found = model.train_on_batch(x[b], y[b], return_dict=True)
                expected = {name: of_rows[name][b].mean() for name in ("loss", *metrics)}
                assert found == pytest.approx(expected, rel=1e-6)
        seen, again = Steps(), Steps()
        for callbacks in ([seen], [], [again]):
            logs = model.fit(dataset(x, y), verbose=0, callbacks=callbacks).history
        assert seen.rows == again.rows
        assert seen.rows[-1] == pytest.approx([logs[name][0] for name in sorted(logs)], rel=1e-6)
        assert len({tuple(row) for row in seen.rows}) == len(seen.rows)


@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
def test_single_steps_begin_with_metrics_that_are_reset(strategy, request):
    strategy = request.getfixturevalue(strategy)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, "sigmoid")])
    x, y = data(UNTRACED + 4)
    y = (y > 0).astype("float32")
    for metrics in (["accuracy", keras.metrics.AUC], [keras.metrics.Precision]):
        with strategy.scope():
            made = [each if isinstance(each, str) else each(name="own") for each in metrics]
            model.compile(keras.optimizers.SGD(0.0), "binary_crossentropy", metrics=made)
        for row in range(len(x)):
            several = slice(row // 2, row + 1)
            found = model.train_on_batch(x[several], y[several], return_dict=True)
            alone = keras.losses.binary_crossentropy(y[several, None], model(x[several]))
            assert found["loss"] == pytest.approx(float(np.mean(alone)), rel=1e-5)
            assert model.metrics[1].variables
        fresh = [
            keras.metrics.BinaryAccuracy(name=each) if isinstance(each, str) else each(name="own")
            for each in metrics
        ]
        assert set(found) == {"loss", *(metric.name for metric in fresh)}
        for metric in fresh:
            metric.update_state(y[several, None], model(x[several]))
            assert found[metric.name] == pytest.approx(float(metric.result()), rel=1e-5)


class CountedResets(keras.metrics.SparseCategoricalAccuracy):
    resets = 0

    def reset_state(self):
        super().reset_state()
        self.resets += 1


@pytest.mark.parametrize("tracked", [False, True])
def test_the_own_reset_of_a_metric_runs_before_each_single_step(mirrored, tracked):
    """The metric is one of `compile`, or one that the model itself tracks."""

    class Tracking(keras.Sequential):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            self.tracked.update_state(y, y_pred, sample_weight)
            return super().compute_metrics(x, y, y_pred, sample_weight)

    x, y = data(12)
    with mirrored.scope():
        metric = CountedResets(name="counted")
        model = (Tracking if tracked else keras.Sequential)([keras.layers.Dense(3)])
        if tracked:
            model.tracked = metric
        model.compile(
            keras.optimizers.SGD(0.1),
            CROSSENTROPY,
            metrics=["accuracy", *([metric] * (not tracked))],
        )
    for number in range(1, UNTRACED + 4):
        before = metric.resets
        logs = model.train_on_batch(x, y, return_dict=True)
        # Keras' first reset comes before the metrics of `compile` are made.
        assert metric.resets > before or number == 1
        assert logs["counted"] == logs["accuracy"]


def test_training_stops_at_the_very_step_that_a_callback_names(mirrored):
    def stop(batch, logs):
        model.stop_training = batch == 2

    model = compiled(mirrored)
    history = model.fit(
        dataset(*data()),
        epochs=3,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stop)],
    )
    assert int(model.optimizer.iterations.numpy()) == 3
    assert len(history.history["loss"]) == 1


@pytest.mark.parametrize("a_call", [1, 2])
def test_endless_data_set_starts_no_unused_pass(mirrored, a_call):
    begun = []
    once = tf.data.Dataset.from_tensors(0).map(
        lambda _: tf.numpy_function(lambda: begun.append(1) or np.int64(0), [], tf.int64)
    )
    endless = once.flat_map(lambda _: dataset(*data(6 * GLOBAL_BATCH))).repeat()
    model = compiled(mirrored, steps_per_execution=a_call)
    for first, last in ((0, 1), (1, 3)):
        model.fit(endless, steps_per_epoch=6, initial_epoch=first, epochs=last, verbose=0)
        assert len(begun) == last, f"passes begun for {last} epochs"
    assert int(model.optimizer.iterations.numpy()) == 3 * 6


def test_results_stay_right_when_a_model_is_compiled_anew(mirrored):
    """Old and new metrics may lie at the same addresses, and must not be confused."""
    x, y = data(30)
    model = compiled(mirrored)
    expected = None
    for _ in range(4):
        with mirrored.scope():
            model.compile(
                "sgd",
                CROSSENTROPY,
                metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")],
            )
        gc.collect()
        result = model.evaluate(dataset(x, y), verbose=0)
        expected = expected or result
        np.testing.assert_allclose(result, expected, rtol=1e-6)


class Extended(keras.callbacks.ModelCheckpoint):
    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)


def every_callback(directory):
    """Return (name, callback, watches training batches, watches test batches) of each callback."""
    path = str(directory / "{epoch}.weights.h5")
    log = str(directory / "log")
    nothing = lambda *args, **kwargs: None  # noqa: E731
    k = keras.callbacks
    rows = [
        (k.Callback(), False, False),
        (k.ProgbarLogger(), False, False),
        (k.History(), False, False),
        (k.CSVLogger(log), False, False),
        (k.EarlyStopping(), False, False),
        (k.ReduceLROnPlateau(), False, False),
        (k.LearningRateScheduler(nothing), False, False),
        (k.RemoteMonitor(), False, False),
        (k.SwapEMAWeights(), False, False),
        (k.ModelCheckpoint(path, save_weights_only=True), False, False),
        (k.ModelCheckpoint(path, save_weights_only=True, save_freq=3), True, False),
        (k.BackupAndRestore(log), False, False),
        (k.BackupAndRestore(log, save_freq=2), True, False),
        (k.TensorBoard(log), False, False),
        (k.TensorBoard(log, update_freq="batch"), True, True),
        (k.TensorBoard(log, profile_batch=2), True, True),
        (k.TerminateOnNaN(), True, False),
        (k.LambdaCallback(on_epoch_end=nothing), False, False),
        (k.LambdaCallback(on_train_batch_end=nothing), True, False),
        (k.LambdaCallback(on_test_batch_begin=nothing), False, True),
        (tfdist.TensorBoard(log), False, False),
        (tfdist.BackupAndRestore(log), False, False),
        (Extended(path, save_weights_only=True), True, False),
        (Steps(), True, False),
    ]
    return [(type(callback).__name__, callback, *expected) for callback, *expected in rows]


def test_directories_of_checkpoints_are_there_before_two_workers_would_make_them(
    one_device, tmp_path
):
    made = tmp_path / "a" / "b" / "{epoch}.weights.h5"
    late = tmp_path / "c" / "{epoch}" / "last.weights.h5"
    (tmp_path / "file").touch()
    there = []
    look = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: there.extend(sorted(p.name for p in tmp_path.rglob("*")))
    )
    saves = [keras.callbacks.ModelCheckpoint(path, save_weights_only=True) for path in (made, late)]
    compiled(one_device).fit(dataset(*data()), verbose=0, callbacks=[*saves, look])
    assert there == ["a", "b", "c", "file"]
    assert (tmp_path / "c" / "1" / "last.weights.h5").exists()
    worker_callbacks.make_directories(
        [
            keras.callbacks.ModelCheckpoint(tmp_path / "file" / "x.keras"),
            keras.callbacks.ModelCheckpoint("x.keras"),
        ]
    )


def test_callbacks_that_need_single_steps_are_detected(tmp_path):
    rows = every_callback(tmp_path)
    for name, callback, train, test in rows:
        assert (
            worker_callbacks.needs_single_steps([callback], "train"),
            worker_callbacks.needs_single_steps([callback], "test"),
        ) == (
            train,
            test,
        ), (name, vars(callback))
    assert not worker_callbacks.needs_single_steps([], "train")
    assert worker_callbacks.needs_single_steps([c for _, c, *_ in rows], "train")
    theirs = {name for name, value in vars(keras.callbacks).items() if isinstance(value, type)}
    rest = theirs - {name for name, *_ in rows}
    # A container, a base class, and one that takes a package of its own and is its own base's only
    # batch watcher.
    assert rest <= {"CallbackList", "MonitorCallback", "OrbaxCheckpoint"}, (
        f"Keras has callbacks that this test does not know: {rest}"
    )


def test_tensorboard_writes_results_and_speed(one_device, tmp_path):
    tensorboard = tfdist.TensorBoard(str(tmp_path), write_graph=False)
    compiled(one_device).fit(
        dataset(*data()),
        epochs=2,
        verbose=0,
        callbacks=[tensorboard],
        validation_data=dataset(*data(20)),
    )
    scalars: dict[str, dict] = {}
    texts = {}
    for path in sorted(tmp_path.rglob("events*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                content = tf.make_ndarray(value.tensor)
                if value.metadata.plugin_data.plugin_name == "text":
                    texts[f"{path.parent.name}/{value.tag}", event.step] = content.item().decode()
                else:
                    tag = scalars.setdefault(f"{path.parent.name}/{value.tag}", {})
                    tag[event.step] = float(content.sum())
    assert {"train/epoch_loss", "validation/epoch_loss"} <= set(scalars)
    for name in ("examples_per_second", "step_milliseconds", "input_wait"):
        assert set(scalars[f"train/speed/{name}"]) == {0, 1}, name
    for rate, milliseconds in zip(
        scalars["train/speed/examples_per_second"].values(),
        scalars["train/speed/step_milliseconds"].values(),
        strict=True,
    ):
        assert rate == pytest.approx(GLOBAL_BATCH / milliseconds * 1e3, rel=1e-4)
    assert all(0 <= share <= 1 for share in scalars["train/speed/input_wait"].values())
    for epoch in (0, 1):
        shares = [scalars[f"train/goodput/{name}"][epoch] for name in CATEGORIES]
        assert sum(shares) == pytest.approx(1.0, abs=1e-3)
        assert scalars["train/goodput/training"][epoch] > 0
        figure, *_, first, second, third = texts.pop(("train/goodput/losses", epoch)).splitlines()
        assert figure.startswith(f"Goodput {100 * shares[0]:.1f} % of ")
        assert {line.split("|")[1].strip() for line in (first, second, third)} <= set(REMEDIES)
        largest = first.split("|")
        assert float(largest[3].rstrip("% ")) == pytest.approx(100 * max(shares[1:]), abs=0.06)
        assert largest[4].strip() == REMEDIES[largest[1].strip()]
    assert not texts


def test_other_workers_write_elsewhere_or_not_at_all(tmp_path):
    log = str(tmp_path / "log")
    k = keras.callbacks
    each = tfdist.TensorBoard(log, per_worker=True)
    chief = tfdist.TensorBoard(log)
    for callback in (each, chief, k.TensorBoard(log)):
        assert not worker_callbacks.worker_callback(callback).log_dir.startswith(str(tmp_path))
    assert (each.follows, each.root_dir) == (
        True,
        log,
    )  # what it sees goes to `worker-1` there, as tests/cluster/test_training.py finds
    assert worker_callbacks.worker_callback(k.CSVLogger(log)).filename != log
    saved = []
    model = types.SimpleNamespace(save_weights=lambda path, overwrite: saved.append(path))
    backup = worker_callbacks.worker_callback(k.BackupAndRestore(str(tmp_path / "backup")))
    backup.set_model(model)
    backup.on_epoch_end(0)
    backup.on_train_end()
    assert saved == [str(tmp_path / "backup" / "latest.weights.h5")]  # in which workers take part
    assert os.listdir(tmp_path) == []
    stopping = k.EarlyStopping()
    assert worker_callbacks.worker_callback(stopping) is stopping
    other = worker_callbacks.worker_callback(k.RemoteMonitor("http://127.0.0.1:9"))
    assert not isinstance(other, k.RemoteMonitor)  # the chief alone sends


# --- Compilation ----------------------------------------------------------------------------------
def test_xla_on_one_device_gives_the_same_numbers(one_device):
    plain, xla = (
        compiled(one_device, jit_compile=jit, metrics=["accuracy"]) for jit in (False, True)
    )
    histories = [m.fit(dataset(*data()), epochs=2, verbose=0).history for m in (plain, xla)]
    assert set(histories[0]) == set(histories[1])
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, rtol=1e-5)
    assert xla.jit_compile
    predicted = [m.predict(data()[0], batch_size=7, verbose=0) for m in (plain, xla)]
    np.testing.assert_allclose(predicted[1], predicted[0], rtol=1e-5, atol=1e-6)


# --- Losses and optimizers as users make them -----------------------------------------------------
def reduced_by_itself(y, outputs):
    return keras.ops.mean(
        keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
    )


def test_a_loss_that_keras_does_not_reduce_counts_once(mirrored, one_device):
    """Keras scales only what it reduces, so that N replicas would give N times the loss."""
    one, two = (compiled(strategy, loss=reduced_by_itself) for strategy in (one_device, mirrored))
    expected, history = (
        m.fit(dataset(*data(31)), epochs=2, verbose=0).history["loss"] for m in (one, two)
    )
    np.testing.assert_allclose(history, expected, rtol=1e-5)
    for a, b in zip(one.get_weights(), two.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


def test_a_loss_without_reduction_is_refused(mirrored):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    with pytest.raises(ValueError, match="reduction=None"):
        compiled(mirrored, loss=loss).fit(dataset(*data()), verbose=0)


def test_an_optimizer_made_outside_of_the_scope_is_refused(mirrored):
    optimizer = keras.optimizers.SGD()
    with pytest.raises(ValueError, match=r"optimizer.*strategy\.scope\(\)"):
        compiled(mirrored, optimizer=lambda: optimizer).fit(dataset(*data()), verbose=0)


# --- What replicas share, and what not ------------------------------------------------------------
def test_replicas_draw_other_dropout_masks_and_end_with_one_seed(mirrored, one_device):
    """The gradient of the kernel is the sum of both rows' masks: 1 where one of them is kept."""

    def build():
        return keras.Sequential(
            [
                keras.Input((400,)),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
            ]
        )

    seeds = {}
    for strategy in (one_device, mirrored):
        model = compiled(strategy, build, lambda: keras.optimizers.SGD(1.0), lambda y, pred: pred)
        model.fit(np.ones((2, 400), "float32"), np.zeros(2), batch_size=2, verbose=0)
        kept = np.round(-model.get_weights()[0]).astype(int)
        counts = np.bincount(kept.ravel(), minlength=3)
        assert counts.sum() == 400
        assert counts[1] > 100, counts  # 200 expected; 0 with equal masks
        seeds[strategy] = copies(strategy, model.layers[0].seed_generator.state)
    np.testing.assert_array_equal(seeds[mirrored], [seeds[one_device][0]] * 2)


def test_statistics_of_batches_are_averaged_over_replicas(mirrored):
    x = np.random.default_rng(0).normal(2, 3, (16, 5)).astype("float32")
    model = compiled(
        mirrored,
        lambda: keras.Sequential(
            [keras.Input((5,)), keras.layers.BatchNormalization(momentum=0.5)]
        ),
        loss="mse",
    )
    model.fit(dataset(x, x, batch=8), verbose=0)
    mean = np.zeros(5)
    variance = np.ones(5)
    for step in x.reshape(2, 2, 4, 5):  # [steps, replicas, rows, features]
        mean = 0.5 * mean + 0.5 * step.mean(1).mean(0)
        variance = 0.5 * variance + 0.5 * step.var(1).mean(0)
    layer = model.layers[0]
    np.testing.assert_allclose(copies(mirrored, layer.moving_mean), [mean] * 2, rtol=1e-5)
    np.testing.assert_allclose(copies(mirrored, layer.moving_variance), [variance] * 2, rtol=1e-5)


def test_frozen_weights_are_not_touched(mirrored):
    """Test that equal values of any dtype stay as they are, to the last bit.

    Replicas average statistics.
    """

    def build():
        frozen = keras.layers.Dense(
            4, dtype="float64", trainable=False, kernel_initializer="glorot_uniform"
        )
        return keras.Sequential(
            [keras.Input((6,), dtype="float64"), frozen, keras.layers.Dense(3, dtype="float64")]
        )

    model = compiled(mirrored, build)
    before = model.layers[0].get_weights()
    model.fit(dataset(*data()), epochs=2, verbose=0)
    for old, new in zip(before, model.layers[0].get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)


# --- evaluate and predict -------------------------------------------------------------------------
def test_an_uneven_batch_weighs_each_row_alike(mirrored):
    x = np.arange(7.0, dtype="float32")[:, None]
    model = compiled(
        mirrored,
        lambda: keras.Sequential([keras.Input((1,)), keras.layers.Identity()]),
        loss="mae",
        metrics=["mse"],
    )
    loss, mse = model.evaluate(dataset(x, np.zeros_like(x), batch=3), verbose=0)
    assert loss == pytest.approx(x.mean())
    assert mse == pytest.approx((x**2).mean())


@pytest.mark.parametrize("batches", [None, 30])
def test_data_that_threads_of_keras_make_go_on_in_the_next_epoch(batches, one_device, mirrored):
    """Keras stops the threads between epochs, where nothing may be read ahead."""

    class Numbers(keras.utils.PyDataset):
        num_batches = batches

        def __getitem__(self, index):
            return np.full([4, 1], index, "float32"), np.zeros([4, 1], "float32")

    def losses(strategy):
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input([1]), keras.layers.Dense(1, kernel_initializer="ones")]
            )
            model.compile(keras.optimizers.SGD(0.0), loss=lambda y, prediction: prediction)
        return model.fit(
            Numbers(workers=2),
            steps_per_epoch=4,
            epochs=3,
            validation_data=Numbers(workers=2),
            validation_steps=2,
            shuffle=False,
            verbose=0,
        ).history

    expected = {"loss": [1.5, 5.5, 9.5], "val_loss": [0.5, 2.5, 4.5]}  # of Keras by itself
    assert losses(one_device) == losses(mirrored) == expected


OUTPUT_TYPES = ("bfloat16", "int64", "complex64")  # test_custom_steps.py gathers all others, too


def test_predictions_of_any_structure_come_in_the_order_of_rows(mirrored):
    def build():
        x = keras.Input((2,))
        outputs = {
            "same": keras.layers.Identity()(x),
            "rows": keras.ops.sum(x, -1),
            "deep": (keras.ops.expand_dims(x, 1), x * 2),
            "large": x > 3,
            **{name: keras.ops.cast(x, name) for name in OUTPUT_TYPES},
        }
        return keras.Model(x, outputs)

    x = np.arange(22, dtype="float32").reshape(11, 2)
    model = compiled(mirrored, build, loss=None)
    for predicted in (
        model.predict(dataset(x, batch=4), verbose=0),
        model.predict(x, batch_size=5, verbose=0),
    ):
        np.testing.assert_array_equal(predicted["same"], x)
        np.testing.assert_array_equal(predicted["rows"], x.sum(-1))
        np.testing.assert_array_equal(predicted["deep"][0], x[:, None])
        np.testing.assert_array_equal(predicted["deep"][1], 2 * x)
        np.testing.assert_array_equal(predicted["large"], x > 3)
        for name in OUTPUT_TYPES:
            assert predicted[name].dtype.name == name
            np.testing.assert_array_equal(predicted[name].astype("float32").real, x)
    assert isinstance(model.predict_function, Predictor)
    np.testing.assert_array_equal(model.predict_on_batch(x[:3])["rows"], x[:3].sum(-1))


def test_predictions_and_evaluations_in_a_fit_send_heartbeats(mirrored, tmp_path):
    heartbeats.check(mirrored, str(tmp_path / "progress"))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            lambda x: tf.strings.as_string(x),
            "expected outputs that are numbers .* received strings",
        ),
        (lambda x: tf.RaggedTensor.from_tensor(x), "expected dense outputs .* received Ragged"),
        (lambda x: tf.sparse.from_dense(x), "expected dense outputs .* received Sparse"),
    ],
    ids=["strings", "ragged", "sparse"],
)
def test_outputs_that_replicas_cannot_exchange_are_refused(mirrored, output, message):
    class Outputs(keras.Model):
        def call(self, x):
            return output(x)

    with mirrored.scope():
        model = Outputs()
        model.built = True
    with pytest.raises(ValueError, match=f"predict: {message}"):
        model.predict(np.ones([4, 2], "float32"), verbose=0)


# --- Other models; memory -------------------------------------------------------------------------
def test_models_of_other_strategies_are_untouched(mirrored):
    """Test that models without `mirrored` do not notice its hooks in Keras.

    They are outside of its scope, or under TensorFlow's own strategy.
    """
    ours = compiled(mirrored)
    ours.fit(dataset(*data()), verbose=0)
    for strategy in (tf.distribute.get_strategy(), tf.distribute.OneDeviceStrategy("/cpu:0")):
        model = compiled(strategy)
        history = model.fit(dataset(*data()), verbose=0).history
        model.predict(data()[0], verbose=0)
        for function in (model.train_function, model.predict_function):
            assert not isinstance(function, Runner | Predictor)
        assert np.isfinite(history["loss"]).all()
    assert isinstance(ours.train_function, Runner)


@pytest.mark.parametrize("use", ["fit", "train_on_batch"])
def test_unreferenced_model_is_freed(mirrored, use):
    model = compiled(mirrored, metrics=["accuracy"])
    if use == "fit":
        model.fit(dataset(*data()), epochs=2, verbose=0, validation_data=dataset(*data(20)))
        model.evaluate(dataset(*data(20)), verbose=0)
        model.predict(data()[0], verbose=0)
    else:
        for _ in range(UNTRACED + 2):
            model.train_on_batch(*data(12))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_silence_outside_of_calls_is_no_hang(one_device, monkeypatch):
    phases = []
    monkeypatch.setattr(one_device.tfdist_engine.heartbeat, "beat", phases.append)
    with one_device.scope():
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones([8, 2], np.float32)
    y = np.ones([8, 1], np.float32)
    for call in (
        lambda: model.fit(x, y, verbose=0),
        lambda: model.evaluate(x, y, verbose=0),
        lambda: model.train_on_batch(x, y),
        lambda: model.predict(x, verbose=0),
    ):
        call()
        assert phases[-1] == Phase.IDLE
        phases.clear()


# --- Models that replicas cannot share ------------------------------------------------------------
@pytest.mark.parametrize("wrap", [lambda layer: layer, keras.layers.Bidirectional])
def test_a_stateful_recurrent_layer_is_refused_under_several_replicas(mirrored, one_device, wrap):
    def build():
        layer = keras.layers.GRU(2, stateful=True, name="memory")
        return keras.Sequential([keras.Input(batch_shape=(4, 3, 1)), wrap(layer)])

    x = np.ones([4, 3, 1], "float32")
    model = compiled(mirrored, build, loss="mse")
    y = np.ones(model.output_shape, "float32")
    for method, arguments in (
        (model.fit, {"x": x, "y": y}),
        (model.evaluate, {"x": x, "y": y}),
        (model.predict, {"x": x}),
        (model.train_on_batch, {"x": x, "y": y}),
        (model.predict_on_batch, {"x": x}),
    ):
        with pytest.raises(ValueError, match=r"stateful=True in .*memory, under 2 replicas"):
            method(**arguments)
    model = compiled(one_device, build, loss="mse")
    first, second = (model.predict(x, batch_size=4, verbose=0) for _ in range(2))
    assert np.abs(first - second).max() > 1e-3  # it goes on with the state


# --- Files ----------------------------------------------------------------------------------------
def test_a_model_is_saved_outside_of_the_scope_that_it_is_saved_in(mirrored, tmp_path):
    """On several workers, a variable that the chief makes in the scope waits for all of them."""
    scopes = []

    @keras.saving.register_keras_serializable("tests")
    class Layer(keras.layers.Dense):
        def save_own_variables(self, store):
            scopes.append(tf.distribute.has_strategy())
            super().save_own_variables(store)

    with mirrored.scope():
        model = compiled(
            mirrored, lambda: keras.Sequential([keras.Input((6,)), Layer(3)]), metrics=["accuracy"]
        )
        model.fit(dataset(*data()), verbose=0)
        model.save(tmp_path / "model.keras")
        model.save_weights(tmp_path / "model.weights.h5")
        assert tf.distribute.get_strategy() is mirrored
    assert scopes == [False, False]
    saved = keras.models.load_model(tmp_path / "model.keras")
    for a, b in zip(saved.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


# --- Loops with strategy.run ----------------------------------------------------------------------
def run_steps(strategy, replica, rows):
    """Run the function of a replica on each batch of a data set."""
    step = tf.function(lambda batch: strategy.run(replica, args=batch), autograph=False)
    for batch in strategy.experimental_distribute_dataset(rows):
        step(batch)


def train_in_loop(strategy, build, optimizer=keras.optimizers.Adam, inside=lambda update: update()):
    """Return the weights and slots after two steps of a loop, and the number of updates."""
    model = compiled(strategy)
    x, y = data(24)
    with strategy.scope():
        optimizer = optimizer(0.1)
        if build:
            optimizer.build(model.trainable_variables)

    def replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(CROSSENTROPY(y, model(x, training=True))) / 2
        grads = tape.gradient(loss, model.trainable_variables)
        inside(
            lambda: optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        )

    run_steps(strategy, replica, dataset(x, y))
    variables = [*model.trainable_variables, *optimizer.variables]
    return [c for v in variables for c in copies(strategy, v)]


@pytest.mark.parametrize(
    ("kind", "optimizer", "variables"),
    [
        ("mirrored", keras.optimizers.Adam, 2 * (2 + 6)),  # of each variable a copy per replica
        ("mirrored", keras.optimizers.Nadam, 2 * (2 + 7)),
        ("mirrored", keras.optimizers.Adafactor, 2 * (2 + 8)),
        ("central_storage", keras.optimizers.Nadam, 2 + 7),
    ],
)
def test_a_loop_builds_its_optimizer_in_the_first_step(kind, optimizer, variables):
    strategy = tfdist.make_strategy(kind, devices="cpu:0,cpu:1")
    built = train_in_loop(strategy, True, optimizer)
    lazily = train_in_loop(strategy, False, optimizer)
    assert len(built) == variables
    for a, b in zip(built, lazily, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_an_update_in_a_branch_of_a_loop_is_refused(mirrored):
    def branch(update):
        tf.cond(tf.constant(True), lambda: update() or True, lambda: True)

    with pytest.raises(ValueError, match=r"strategy\.run\(\).*tf\.cond"):
        train_in_loop(mirrored, build=False, inside=branch)


class Offset(keras.layers.Layer):
    """Make a weight of a value, and not of an initializer."""

    def build(self, shape):
        self.offset = keras.Variable(0.5)

    def call(self, x):
        return x + self.offset


@pytest.mark.parametrize("kind", ["mirrored", "central_storage"])
def test_a_loop_builds_layers_and_metrics_in_the_first_step(kind):
    strategy = tfdist.make_strategy(kind, devices="cpu:0,cpu:1")
    x = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
    y = (x.sum(axis=1, keepdims=True) > 0).astype("float32")

    def trained(build):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential(
                [keras.layers.Dense(4, "relu"), Offset(), keras.layers.Dense(1)]
            )
            optimizer = keras.optimizers.Adam(0.1)
            score = keras.metrics.F1Score(threshold=0.5)
            if build:
                model.build((None, 6))
                score.update_state(y, y)
                score.reset_state()

        def replica(x, y):
            with tf.GradientTape() as tape:
                outputs = model(x)
                loss = tf.reduce_sum((y - outputs) ** 2) / 8
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            score.update_state(y, outputs)

        run_steps(strategy, replica, dataset(x, y, batch=8))
        variables = [*model.weights, *optimizer.variables]
        return [c for v in variables for c in copies(strategy, v)], score.result()

    (lazily, score_lazily), (built, score) = trained(build=False), trained(build=True)
    assert len(lazily) == len(built)
    for a, b in zip(lazily, built, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    np.testing.assert_allclose(score_lazily, score)


def test_a_loop_compiles_gradients_and_not_their_sum(mirrored):
    model = compiled(mirrored)
    x, y = data(8)
    with mirrored.scope():
        optimizer = keras.optimizers.SGD(0.1)

    def gradients(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(CROSSENTROPY(y, model(x, training=True))) / 2
        return tape.gradient(loss, model.trainable_variables)

    def update(grads):
        optimizer.apply(grads, model.trainable_variables)

    def weights_after(step):
        run_steps(mirrored, step, dataset(x, y))
        return model.get_weights()

    initial = model.get_weights()
    expected = weights_after(lambda x, y: update(gradients(x, y)))
    model.set_weights(initial)
    by_xla = tf.function(gradients, jit_compile=True)
    for a, b in zip(weights_after(lambda x, y: update(by_xla(x, y))), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    with pytest.raises(ValueError, match=r"sgd.*without jit_compile=True.*gradients alone"):
        weights_after(tf.function(lambda x, y: update(gradients(x, y)), jit_compile=True))


@pytest.mark.parametrize("sparse", [False, True])
def test_predict_builds_a_model(mirrored, sparse):
    x = np.ones([5, 4], "float32")
    with mirrored.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(3)])
    batches = tf.data.Dataset.from_tensor_slices(x).batch(3)
    batches = batches.map(tf.sparse.from_dense) if sparse else batches
    predictions = model.predict(batches, verbose=0)
    np.testing.assert_allclose(predictions, x @ model.get_weights()[0], rtol=1e-6)


DETERMINISTIC = """
import sys, keras, numpy as np, tensorflow as tf, tfdist
keras.utils.set_random_seed(1)
tf.config.experimental.enable_op_determinism()
x = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
for name, devices in (("mirrored", "cpu:0,cpu:1"), ("one_device", "cpu:0")):
    strategy = tfdist.make_strategy(name, devices=devices)
    for callback in (
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None),
        tfdist.StepBreakdown(sys.argv[1]),
    ):
        with strategy.scope():
            model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, use_bias=False)])
            model.set_weights([np.ones([3, 1])])
            model.compile("sgd", "mse")
        fitted = model.fit(x, x[:, 0], batch_size=8, epochs=2, verbose=0, callbacks=[callback])
        print(*fitted.history["loss"])
"""


def test_deterministic_operations_give_equal_losses(run_python, tmp_path):
    """Run in a process of its own, because its operations stay deterministic."""
    run = run_python(DETERMINISTIC, str(tmp_path))
    assert run.returncode == 0, run.stderr
    losses = np.array([line.split() for line in run.stdout.splitlines()], float)
    assert losses.shape == (4, 2)
    np.testing.assert_allclose(losses, losses[[0] * 4], rtol=1e-6)
    assert run.stderr.count("measures nothing here") == 2
