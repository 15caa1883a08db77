"""Exercise callbacks, optimizers, single batches, predictions and files."""

import csv
import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests import heartbeats
from tests.cluster.scripts.ps.base import (
    BATCH,
    ROWS,
    STEPS,
    Once,
    batches,
    compiled,
    counter,
    counts,
    feature,
    local,
    mean_output,
    numbered,
    one_weight,
    raises,
    same,
    sgd,
    trains,
    weight,
)
from tests.parity.cases import CROSSENTROPY, data, dataset, mlp


class Epochs(keras.callbacks.Callback):
    """Record the weights after each epoch."""

    def __init__(self):
        super().__init__()
        self.weights = []
        self.begun = []

    def on_epoch_begin(self, epoch, logs=None):
        self.begun.append(epoch)

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(weight(self.model))


@feature
def early_stopping(strategy):
    """Stop early: the rate changes its sign, so that the loss falls in two epochs only."""
    model = counter(strategy)
    epochs = Epochs()
    callbacks = [
        epochs,
        keras.callbacks.LearningRateScheduler(lambda epoch: 1.0 if epoch < 2 else -1.0),
        keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
    ]
    model.fit(batches(), epochs=9, verbose=0, callbacks=callbacks, validation_data=batches())
    assert epochs.weights == [-13.0, -26.0, -13.0, 0.0], epochs.weights
    assert weight(model) == -26.0


@feature
def learning_rates(strategy):
    model = counter(strategy)
    plateau = keras.callbacks.ReduceLROnPlateau(
        "once", mode="max", factor=0.5, patience=1, min_delta=1
    )
    history = model.fit(batches(), epochs=4, verbose=0, callbacks=[plateau]).history
    same(history["learning_rate"], [1.0, 1.0, 0.5, 0.25])
    same(weight(model), -STEPS * 2.75)


@feature
def model_checkpoints(strategy):
    directory = pathlib.Path(tempfile.mkdtemp())
    model = counter(strategy)
    epochs = Epochs()
    callbacks = [
        epochs,
        keras.callbacks.ModelCheckpoint(str(directory / "epoch-{epoch}.keras")),
        keras.callbacks.ModelCheckpoint(
            str(directory / "best.weights.h5"), "loss", save_weights_only=True, save_best_only=True
        ),
        keras.callbacks.ModelCheckpoint(
            str(directory / "step-{epoch}-{batch}.weights.h5"), save_weights_only=True, save_freq=5
        ),
    ]
    model.fit(batches(), epochs=2, verbose=0, callbacks=callbacks)
    assert sorted(p.name for p in directory.iterdir()) == [
        "best.weights.h5",
        "epoch-1.keras",
        "epoch-2.keras",
        *[f"step-{e}-{b}.weights.h5" for e, b in ((1, 10), (1, 5), (2, 12), (2, 2), (2, 7))],
    ], sorted(p.name for p in directory.iterdir())
    saved = keras.models.load_model(
        directory / "epoch-1.keras", custom_objects={"mean_output": mean_output}
    )
    assert (weight(saved), int(saved.optimizer.iterations)) == (-STEPS, STEPS)
    saved.load_weights(directory / "best.weights.h5")
    assert weight(saved) == -2 * STEPS
    saved.load_weights(directory / "step-2-7.weights.h5")
    assert weight(saved) == -(STEPS + 7), weight(
        saved
    )  # all the steps of that epoch that Keras has counted


@feature
def backup_and_restore(strategy):
    directory = tempfile.mkdtemp()

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    def fit(model, callback):
        model.fit(
            batches(),
            epochs=4,
            verbose=0,
            callbacks=[keras.callbacks.BackupAndRestore(directory), callback],
        )

    raises(KeyboardInterrupt, "", fit, counter(strategy), Interrupt())
    model = counter(strategy)
    epochs = Epochs()
    fit(model, epochs)
    assert (epochs.begun, weight(model), int(model.optimizer.iterations.numpy())) == (
        [2, 3],
        -4 * STEPS,
        4 * STEPS,
    )


@feature
def logs(strategy):
    directory = pathlib.Path(tempfile.mkdtemp())
    model = counter(strategy)
    callbacks = [
        keras.callbacks.CSVLogger(str(directory / "log.csv")),
        tfdist.TensorBoard(str(directory), histogram_freq=1),
        keras.callbacks.TerminateOnNaN(),
    ]
    history = model.fit(
        batches(), epochs=2, verbose=1, callbacks=callbacks, validation_data=batches()
    ).history
    model.fit(
        batches(),
        verbose=2,
        callbacks=[keras.callbacks.TensorBoard(str(directory / "keras"), update_freq=4)],
    )
    with open(directory / "log.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    same([float(r["loss"]) for r in rows], history["loss"])
    for where, expected in (
        ("train", {"epoch_once", "speed/examples_per_second"}),
        ("keras/train", {"batch_loss"}),
    ):
        files = [str(f) for f in (directory / where).iterdir()]
        tags = {
            v.tag
            for f in files
            for e in tf.compat.v1.train.summary_iterator(f)
            for v in e.summary.value
        }
        assert expected <= tags, tags


@feature
def terminate_on_nan(strategy):
    model = counter(strategy, sgd(float("inf")))
    history = model.fit(
        batches(), epochs=5, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()]
    ).history
    assert len(history["loss"]) <= 1, history


@feature
def stop_in_the_middle_of_an_epoch(strategy):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert set(logs) == {"loss", "once"}, logs
            if batch == 5:
                self.model.stop_training = True

    for train, ahead in ((batches(), 0), (batches().filter(lambda x, y: True), 4)):
        model = counter(strategy)
        history = model.fit(train, epochs=3, verbose=0, callbacks=[Stop()]).history
        steps = int(model.optimizer.iterations.numpy())
        assert 6 <= steps <= 6 + ahead, steps  # without a known length, steps are given out ahead
        assert (weight(model), history["once"]) == (-steps, [steps * BATCH]), (
            steps,
            weight(model),
            history,
        )
    counts(strategy, batches())


@feature
def callback_that_fails(strategy):
    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("mine")

    model = counter(strategy)
    raises(RuntimeError, "^mine$", model.fit, batches(), verbose=0, callbacks=[Fail()])
    model.set_weights([np.zeros((1, 1))])
    model.optimizer.iterations.assign(0)
    counts(strategy, batches(), model=model)


# --- Optimizers -----------------------------------------------------------------------------------
@feature
def clipping(strategy):
    for argument, clipped in (("clipnorm", 0.5), ("global_clipnorm", 0.25), ("clipvalue", 0.125)):
        model = counter(strategy, sgd(**{argument: clipped}))
        model.fit(batches(), epochs=2, verbose=0)
        assert weight(model) == -2 * STEPS * clipped, argument


@feature
def average_of_weights(strategy):
    average = {"use_ema": True, "ema_momentum": 0.5}
    trains(
        strategy,
        optimizer=lambda: keras.optimizers.AdamW(0.05, ema_overwrite_frequency=3, **average),
    )
    model = counter(strategy, sgd(**average))
    model.fit(batches(), epochs=2, verbose=0)
    assert -2 * STEPS < weight(model) < -STEPS, weight(
        model
    )  # Keras puts the average in its place at the end
    same(weight(model), model.optimizer._model_variables_moving_average[0].numpy().item())


@feature
def gradient_accumulation(strategy):
    """Update after every three steps; the rest stays in the accumulator."""

    def accumulating():
        return sgd(gradient_accumulation_steps=3)()

    rows = 90 * BATCH
    for steps, optimizer in (
        (1, accumulating),
        (10, lambda: keras.optimizers.LossScaleOptimizer(accumulating())),
    ):
        model = counter(strategy, optimizer, rows, steps_per_execution=steps)
        history = model.fit(batches(rows), epochs=2, verbose=0).history
        assert (int(model.optimizer.iterations.numpy()), history["once"]) == (60, [rows] * 2)
        waiting = (
            getattr(model.optimizer, "inner_optimizer", model.optimizer)
            ._accumulated_gradients[0]
            .numpy()
            .item()
        )
        same(weight(model) - waiting / 3, -60, 1e-5)
        # Two updates at the same time, one of each worker, take the same gradients, three for each
        # update that is due; the next updates make good for it.
        assert abs(waiting) <= 2 * 3, waiting


@feature
def optimizers_beside_the_models(strategy):
    class Model(keras.Sequential):
        def train_step(self, batch):
            x, _ = batch
            for optimizer in (self.optimizer, self.other):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(self(x))
                optimizer.apply_gradients(
                    [
                        (
                            tape.gradient(loss, self.trainable_variables)[0],
                            self.trainable_variables[0],
                        )
                    ]
                )
            return {"loss": loss}

    model = compiled(strategy, lambda: Model(one_weight().layers), sgd(), None, ())
    with strategy.scope():
        model.other = keras.optimizers.SGD(2.0)
        model.other.build(model.trainable_variables)
    model.fit(batches(600), verbose=0)
    assert (weight(model), int(model.optimizer.iterations), int(model.other.iterations)) == (
        -450,
        150,
        150,
    )


@feature
def schedule(strategy):
    rate = keras.optimizers.schedules.PiecewiseConstantDecay(
        [9], [1.0, 0.25]
    )  # steps 0 to 9, and from 10 on
    model = counter(strategy, sgd(rate))
    model.fit(batches(), epochs=2, verbose=0)
    assert weight(model) == -10 - 0.25 * (2 * STEPS - 10), weight(model)


@feature
def loss_scaling(strategy):
    def scaled(**kwargs):
        return lambda: keras.optimizers.LossScaleOptimizer(sgd()(), **kwargs)

    model = counter(strategy, scaled(initial_scale=2.0**10, dynamic_growth_steps=5), 600)
    counts(strategy, batches(600), rows=600, steps=150, model=model)
    assert float(model.optimizer.dynamic_scale.numpy()) > 2.0**10
    x, y = numbered()
    x[:BATCH] = np.inf
    model = counter(strategy, scaled())
    model.fit(dataset(x, y, batch=BATCH), epochs=2, verbose=0)
    finite = 2 * (STEPS - 1)
    assert (weight(model), int(model.optimizer.iterations.numpy())) == (-finite, finite), (
        weight(model),
        model.optimizer.iterations,
    )


@feature
def mixed_precision(strategy):
    for policy in ("mixed_bfloat16", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        try:
            model, _ = trains(strategy, epochs=10)
        finally:
            keras.config.set_dtype_policy("float32")
        assert {v.dtype for v in model.trainable_variables} == {"float32"}


@feature
def two_fits_and_another_compile(strategy):
    model = counts(strategy, batches())
    model.fit(*numbered(), verbose=0, batch_size=BATCH)
    assert weight(model) == -3 * STEPS
    with strategy.scope():
        model.compile(keras.optimizers.SGD(2.0), mean_output, metrics=[Once()])
    model.fit(batches(), verbose=0)
    assert weight(model) == -5 * STEPS
    model.layers[0].trainable = False
    with strategy.scope():
        model.compile(keras.optimizers.SGD(2.0), mean_output, metrics=[Once()])
    assert model.evaluate(batches(), verbose=0, return_dict=True)["once"] == ROWS


# --- Batches --------------------------------------------------------------------------------------
@feature
def on_batch(strategy):
    model = counter(strategy)
    x, y = numbered()
    for i in range(0, ROWS, BATCH):
        results = model.train_on_batch(x[i : i + BATCH], y[i : i + BATCH], return_dict=True)
        assert results["once"] == min(ROWS - i, BATCH), results
    assert (weight(model), int(model.optimizer.iterations.numpy())) == (-STEPS, STEPS)
    same(model.test_on_batch(x[:7], y[:7]), [-STEPS, 7])
    same(model.predict_on_batch(x[:7]), -STEPS * x[:7])
    weighted = model.train_on_batch(x[:4], y[:4], sample_weight=np.array([1, 1, 0, 0]))
    assert weight(model) == -STEPS - 0.5, weighted


@feature
def predict(strategy):
    x, _ = data(101)
    model = compiled(strategy)
    copy = local(model, mlp, loss=CROSSENTROPY)
    for given in (
        {"x": x, "batch_size": 7},
        {"x": dataset(x, batch=7)},
        {"x": dataset(x, batch=7).filter(lambda x: True)},
    ):
        same(model.predict(**given, verbose=0), copy.predict(**given, verbose=0))
    assert model.predict(dataset(x, batch=7).repeat(), steps=3, verbose=0).shape == (21, 3)
    model.steps_per_execution = 4
    same(model.predict(x, batch_size=7, verbose=0), copy.predict(x, batch_size=7, verbose=0))
    with strategy.scope():
        ordered = one_weight()  # not compiled
    ordered.set_weights([np.ones((1, 1))])
    same(ordered.predict(np.arange(500.0)[:, None], batch_size=1, verbose=0)[:, 0], np.arange(500))


@feature
def predict_several_outputs(strategy):
    def build():
        inputs = keras.Input((6,))
        return keras.Model(
            inputs, [keras.layers.Dense(2)(inputs), {"b": keras.layers.Dense(3)(inputs)}]
        )

    x, _ = data(31)
    with strategy.scope():
        model = build()
    copy = build()
    copy.set_weights(model.get_weights())
    same(model.predict(x, batch_size=7, verbose=0), copy.predict(x, batch_size=7, verbose=0))


@feature
def saving(strategy):
    directory = pathlib.Path(tempfile.mkdtemp())
    model = counts(strategy, batches())
    model.save(directory / "model.keras")
    model.save_weights(directory / "model.weights.h5")
    own = {"mean_output": mean_output}
    here = keras.models.load_model(directory / "model.keras", custom_objects=own)
    raises(ValueError, "made outside of it: it would train on", here.fit, batches(), verbose=0)
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        here = keras.models.load_model(directory / "model.keras", custom_objects=own)
    assert "/job:ps" not in here.trainable_variables[0].value.device
    assert (weight(here), int(here.optimizer.iterations.numpy())) == (-2 * STEPS, 2 * STEPS)
    here.fit(batches(), verbose=0)
    assert weight(here) == -3 * STEPS
    with strategy.scope():
        there = keras.models.load_model(directory / "model.keras", custom_objects=own)
    assert "/job:ps" in there.trainable_variables[0].value.device
    there.fit(batches(), verbose=0)
    assert (weight(there), int(there.optimizer.iterations.numpy())) == (-3 * STEPS, 3 * STEPS)
    there.load_weights(directory / "model.weights.h5")
    assert weight(there) == -2 * STEPS
    model.export(directory / "exported", verbose=False)
    exported = tf.saved_model.load(str(directory / "exported"))
    same(exported.serve(tf.ones([2, 1])), -2 * STEPS * np.ones((2, 1)))


@feature
def tensorflow_checkpoints(strategy):
    prefix = str(pathlib.Path(tempfile.mkdtemp()) / "c")
    model = counts(strategy, batches())
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(prefix)
    other = counter(strategy)
    other.optimizer.build(other.trainable_variables)
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(
        path
    ).assert_existing_objects_matched()
    assert (weight(other), int(other.optimizer.iterations.numpy())) == (-2 * STEPS, 2 * STEPS)


@feature
def heartbeats_in_a_fit(strategy):
    heartbeats.check(strategy, f"{tempfile.mkdtemp()}/progress")


@feature
def order_of_a_data_pipeline_after_a_resume(strategy):
    """Which examples an epoch drops shows whose order of examples it has."""

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    def pipeline():
        return tfdist.data.pipeline(numbered(), BATCH, seed=1, tail="drop")

    def mean_label(y_true, y_pred):
        return y_true + 0.0 * y_pred

    dropped = [
        np.mean([y for _, y in pipeline().of_epoch(epoch).as_numpy_iterator()])
        for epoch in range(3)
    ]
    assert len(set(dropped)) == 3
    for make in (pipeline, lambda: pipeline().map(lambda x, y: (2.0 * x, y))):  # workers, chief
        directory = tempfile.mkdtemp()

        def fit(callback, make=make, directory=directory):
            model = compiled(strategy, one_weight, sgd(0.0), mean_label, metrics=[])
            saves = tfdist.BackupAndRestore(directory)
            return model.fit(make(), epochs=3, verbose=0, callbacks=[saves, callback]).history[
                "loss"
            ]

        raises(KeyboardInterrupt, "", fit, Interrupt())
        same(fit(keras.callbacks.Callback()), dropped, 1e-5)


@feature
def loop_of_a_coordinator(strategy):
    """Train in a loop of TensorFlow's coordinator: the weight falls by 1 in each step."""
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        optimizer = keras.optimizers.SGD(1.0)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    @tf.function
    def step(iterator):
        def replica(x):
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(layer(x))
            grads = tape.gradient(total, layer.trainable_variables)
            optimizer.apply(grads, layer.trainable_variables)

        strategy.run(replica, args=(next(iterator),))

    rows = coordinator.create_per_worker_dataset(
        lambda: tf.data.Dataset.from_tensors([[1.0]]).repeat()
    )
    iterator = iter(rows)
    for _ in range(10):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    same(layer.kernel, [[-10.0]])
