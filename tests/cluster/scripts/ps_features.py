"""Features of Keras meet a parameter-server cluster: `ps_features.py OUT [FEATURE ...]`.

The chief writes to the file OUT what went wrong with each feature, null where nothing did; other tasks serve. The models are such that
the result is known whatever the order in which workers take steps: see `counter`.
"""

import csv
import json
import pathlib
import sys
import tempfile
import time
import traceback

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.parity.cases import CROSSENTROPY, data, dataset, mlp

ROWS, BATCH = 50, 4  # 13 batches, the last one of 2
STEPS = -(-ROWS // BATCH)
FEATURES = {}


def feature(function):
    FEATURES[function.__name__] = function
    return function


def same(a, b, tolerance=1e-6):
    for x, y in zip(keras.tree.flatten(a), keras.tree.flatten(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


def compiled(strategy, model=mlp, optimizer="adam", loss=CROSSENTROPY, metrics=("accuracy",), **kwargs):
    with strategy.scope():
        built = model()
        built.compile(optimizer() if callable(optimizer) else optimizer, loss, metrics=list(metrics), **kwargs)
    return built


def local(model, like, **kwargs):
    """The same weights in a model of this process alone."""
    copy = like()
    copy.build((None, *model.input_shape[1:]))
    copy.set_weights(model.get_weights())
    copy.compile("sgd", **kwargs)
    return copy


def trains(strategy, train=None, *, rows=60, steps=5, epochs=6, **kwargs):
    """A classifier that learns, each of whose steps counts; its model and history."""
    model = compiled(strategy, **kwargs)
    history = model.fit(*(train if isinstance(train, tuple) else [train or dataset(*data(rows))]), epochs=epochs, verbose=0).history
    assert all(np.all(np.isfinite(v)) for v in history.values()), history
    assert history["loss"][-1] < history["loss"][0], history
    assert int(model.optimizer.iterations.numpy()) == epochs * steps, model.optimizer.iterations
    return model, history


# --- A model that counts ----------------------------------------------------------------------------------------------
@keras.saving.register_keras_serializable()
class Once(keras.metrics.Metric):
    """How many of the examples, whose numbers are the labels, were seen exactly once."""

    def __init__(self, rows=ROWS, name="once", **kwargs):
        super().__init__(name=name, **kwargs)
        self.rows = rows
        self.counts = self.add_variable((rows,), "zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ids = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
        self.counts.assign_add(tf.math.bincount(ids, minlength=self.rows, maxlength=self.rows, dtype=tf.float32))

    def result(self):
        return tf.reduce_sum(tf.cast(tf.equal(self.counts, 1.0), tf.float32))


def mean_output(y_true, y_pred):
    return y_pred


def one_weight():
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])


def counter(strategy, optimizer=lambda: keras.optimizers.SGD(1.0), rows=ROWS, **kwargs):
    """A model with one weight whose gradient is 1 for any batch of ones: after N steps of SGD it is -N exactly."""
    return compiled(strategy, one_weight, optimizer, mean_output, metrics=[Once(rows)], **kwargs)


def weight(model):
    return float(model.get_weights()[0].item())


def numbered(rows=ROWS):
    return np.ones((rows, 1), "float32"), np.arange(rows, dtype="float32")[:, None]


def batches(rows=ROWS, batch=BATCH):
    return dataset(*numbered(rows), batch=batch)


def counts(strategy, *train, epochs=2, steps=STEPS, rows=ROWS, model=None, **kwargs):
    """Every step counts once in weight and optimizer, every example once in each epoch's metrics."""
    model = model or counter(strategy, rows=rows)
    history = model.fit(*train, epochs=epochs, verbose=0, **kwargs).history
    result = weight(model), int(model.optimizer.iterations.numpy()), history["once"]
    assert result == (-epochs * steps, epochs * steps, [rows] * epochs), result
    return model


def shuffled(**kwargs):
    return tf.data.Dataset.from_tensor_slices(numbered()).shuffle(ROWS, **kwargs).batch(BATCH)


@feature
def data_set(strategy):
    counts(strategy, batches())


@feature
def data_set_from_a_range(strategy):
    """Read by the workers themselves."""
    counts(strategy, tf.data.Dataset.range(ROWS).map(lambda i: (tf.ones([1]), tf.cast(i, tf.float32)[None])).batch(BATCH))


@feature
def shuffled_with_a_seed(strategy):
    counts(strategy, shuffled(seed=3))


@feature
def shuffled_without_a_seed(strategy):
    counts(strategy, shuffled())


@feature
def data_set_without_end(strategy):
    model = counter(strategy)
    history = model.fit(batches().repeat(), steps_per_epoch=STEPS, epochs=3, verbose=0).history
    assert history["once"] == [ROWS] * 3, history
    assert weight(model) == -3 * STEPS
    history = model.fit(batches().repeat(), steps_per_epoch=5, epochs=3, verbose=0).history
    assert history["once"] == [20, 20, 18], history  # an epoch goes on where the last one stopped
    assert weight(model) == -3 * STEPS - 15


@feature
def data_set_of_unknown_length(strategy):
    counts(strategy, batches().filter(lambda x, y: True), epochs=3)


@feature
def data_set_of_unknown_length_with_steps(strategy):
    model = counter(strategy)
    history = model.fit(batches().filter(lambda x, y: True).repeat(), steps_per_epoch=STEPS, epochs=2, verbose=0).history
    assert (history["once"], weight(model)) == ([ROWS] * 2, -2 * STEPS), history


@feature
def data_that_ends_before_its_steps(strategy):
    model = counter(strategy)
    history = model.fit(batches(), steps_per_epoch=10, epochs=3, verbose=0).history
    assert (history["once"], weight(model), int(model.optimizer.iterations.numpy())) == ([40, 10], -13, 13), (history, weight(model))


@feature
def arrays(strategy):
    counts(strategy, *numbered(), batch_size=BATCH)


@feature
def py_dataset(strategy):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return STEPS

        def __getitem__(self, i):
            return tuple(a[i * BATCH : (i + 1) * BATCH] for a in numbered())

    counts(strategy, Batches())
    counts(strategy, Batches(workers=2, use_multiprocessing=False), shuffle=True)


@feature
def generator(strategy):
    def forever():
        while True:
            yield from batches().as_numpy_iterator()

    counts(strategy, forever(), steps_per_epoch=STEPS)
    counts(strategy, batches().as_numpy_iterator(), epochs=1)


@feature
def data_set_of_a_generator(strategy):
    signature = tuple(tf.TensorSpec([None, 1]) for _ in range(2))
    counts(strategy, tf.data.Dataset.from_generator(lambda: batches().as_numpy_iterator(), output_signature=signature))


@feature
def steps_per_execution(strategy):
    for steps in (1, 4, 10):  # 13 steps
        counts(strategy, batches(), model=counter(strategy, steps_per_execution=steps))
        counts(strategy, *numbered(), batch_size=BATCH, model=counter(strategy, steps_per_execution=steps))
    model = counter(strategy, steps_per_execution=4)
    history = model.fit(batches().repeat(), steps_per_epoch=STEPS, epochs=2, verbose=0).history
    assert (history["once"], weight(model)) == ([ROWS] * 2, -2 * STEPS), history
    counts(strategy, batches().filter(lambda x, y: True), epochs=3, model=counter(strategy, steps_per_execution=4))


@feature
def six_hundred_steps(strategy):
    rows = 600 * BATCH
    model = counter(strategy, rows=rows)
    for done in range(1, 4):
        history = model.fit(batches(rows), verbose=0).history
        assert (int(model.optimizer.iterations.numpy()), weight(model), history["once"]) == (600 * done, -600 * done, [rows])
    model = counter(strategy, "adam", rows=rows, steps_per_execution=10)
    history = model.fit(*numbered(rows), batch_size=BATCH, epochs=2, verbose=0).history
    assert (int(model.optimizer.iterations.numpy()), history["once"]) == (1200, [rows] * 2), history


@feature
def evaluation_sees_each_example_once(strategy):
    model = counter(strategy)
    for given in ((batches(),), numbered(), (shuffled(),), (batches().filter(lambda x, y: True),)):
        assert model.evaluate(*given, verbose=0, return_dict=True)["once"] == ROWS
    assert model.evaluate(batches().repeat(), steps=5, verbose=0, return_dict=True)["once"] == 5 * BATCH
    history = model.fit(batches(), epochs=2, verbose=0, validation_data=shuffled()).history
    assert history["once"] == history["val_once"] == [ROWS] * 2, history
    history = model.fit(batches(), epochs=2, verbose=0, validation_data=batches().repeat(), validation_steps=6).history
    assert history["val_once"] == [6 * BATCH] * 2, history


# --- Inputs -------------------------------------------------------------------------------------------------------------
@feature
def validation(strategy):
    x, y = data()
    for given in ({"validation_data": (x, y)}, {"validation_data": dataset(x, y, batch=7)}):
        model = compiled(strategy, optimizer="sgd")
        history = model.fit(x, y, batch_size=12, epochs=2, verbose=0, **given).history
        expected = local(model, mlp, loss=CROSSENTROPY, metrics=["accuracy"]).evaluate(x, y, verbose=0)
        same([history["val_loss"][-1], history["val_accuracy"][-1]], expected)
    model = compiled(strategy, optimizer="sgd")
    history = model.fit(x, y, batch_size=12, epochs=2, verbose=0, validation_split=0.2).history
    expected = local(model, mlp, loss=CROSSENTROPY, metrics=["accuracy"]).evaluate(x[48:], y[48:], verbose=0)
    same([history["val_loss"][-1], history["val_accuracy"][-1]], expected)
    assert int(model.optimizer.iterations.numpy()) == 8


@feature
def class_weight(strategy):
    x, y = numbered()
    weights = {0: 0.5, 1: 2.0, 2: 4.0}
    model = counter(strategy)
    model.fit(x, y % 3, batch_size=BATCH, shuffle=False, class_weight=weights, epochs=2, verbose=0)
    given = np.array([weights[int(i % 3)] for i in range(ROWS)])
    same(weight(model), -2 * sum(np.mean(given[i : i + BATCH]) for i in range(0, ROWS, BATCH)), 1e-5)


@feature
def sample_weight(strategy):
    x, y = numbered()
    given = np.linspace(0, 1, ROWS).astype("float32")
    expected = -sum(np.mean(given[i : i + BATCH]) for i in range(0, ROWS, BATCH))
    for train in ({"x": x, "y": y, "sample_weight": given, "batch_size": BATCH, "shuffle": False}, {"x": dataset(x, y, given, batch=BATCH)}):
        model = counter(strategy)
        model.fit(**train, verbose=0)
        same(weight(model), expected, 1e-5)


@feature
def weighted_metrics(strategy):
    x, y = data()
    given = np.linspace(0, 1, len(x)).astype("float32")
    model = compiled(strategy, weighted_metrics=["accuracy"])
    copy = local(model, mlp, loss=CROSSENTROPY, metrics=["accuracy"], weighted_metrics=["accuracy"])
    same(model.evaluate(x, y, sample_weight=given, batch_size=7, verbose=0), copy.evaluate(x, y, sample_weight=given, batch_size=7, verbose=0))


@feature
def dicts(strategy):
    x, y = data()

    def build():
        a, b = keras.Input((6,), name="a"), keras.Input((2,), name="b")
        h = keras.layers.Concatenate()([keras.layers.Dense(5, "tanh")(a), b])
        return keras.Model({"a": a, "b": b}, {"label": keras.layers.Dense(3, name="label")(h), "sum": keras.layers.Dense(1, name="sum")(h)})

    given = {"a": x, "b": x[:, :2]}, {"label": y, "sum": x.sum(1, keepdims=True)}
    names = {"loss": {"label": CROSSENTROPY, "sum": "mse"}, "metrics": {"label": ["accuracy"], "sum": ["mae"]}}
    with strategy.scope():
        model = build()
        model.compile("adam", **names)
    for train in ((dataset(*given),), given):
        history = model.fit(*train, epochs=2, verbose=0, validation_data=given).history
        assert {"label_accuracy", "sum_mae", "val_sum_mae"} <= set(history), history
    copy = build()
    copy.set_weights(model.get_weights())
    copy.compile("sgd", **names)
    same(model.evaluate(*given, batch_size=7, verbose=0, return_dict=True), copy.evaluate(*given, batch_size=7, verbose=0, return_dict=True))
    same(model.predict(given[0], batch_size=7, verbose=0), copy.predict(given[0], batch_size=7, verbose=0))


@feature
def ragged_and_sparse_inputs(strategy):
    ids = tf.ragged.constant([[1, 2], [3], [], [4, 5, 6]] * 6)
    sparse = tf.sparse.from_dense(np.eye(24, 4, dtype="float32"))
    y = np.zeros((24, 1), "float32")

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(1)

        def call(self, x):
            a, b = x
            lengths = tf.cast(a.row_lengths(), tf.float32)[:, None]
            return self.out(tf.concat([lengths, tf.sparse.to_dense(b)], 1))

    with strategy.scope():
        model = Model()
        model.compile("sgd", "mse")
    train = tf.data.Dataset.from_tensor_slices(((ids, sparse), y)).batch(5)
    model.fit(train, epochs=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 10


# --- Models -------------------------------------------------------------------------------------------------------------
@feature
def sequential(strategy):
    model, history = trains(strategy, optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.5))
    assert all("/job:ps" in v.value.device for v in model.variables if v.trainable)
    assert {v.value.device for v in model.variables if v.trainable} != 1


@feature
def unbuilt_models(strategy):
    trains(strategy, model=lambda: keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]))

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)

        def call(self, x):
            return self.second(self.first(x))

    model, _ = trains(strategy, model=Model)
    assert all("/job:ps" in v.value.device for v in model.trainable_variables)
    trains(strategy, (*data(),), model=Model, steps=2)


@feature
def batch_normalization(strategy):
    """Momentum 0.5 on batches of one mean: the moving mean tells how many steps moved it at least."""

    def model():
        return keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(3)])

    x, y = data()
    x[:] = 10 + np.tile(x[:12], (5, 1))
    model, _ = trains(strategy, (x, y), steps=2, epochs=10, model=model)
    moving = model.layers[0].moving_mean.numpy()
    assert np.all(np.abs(moving - x.mean(0)) < 1.0), moving
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    same(model.predict(x, verbose=0), copy.predict(x, verbose=0))


@feature
def dropout(strategy):
    """Masks differ between the steps of an epoch and between epochs."""

    class Masks(keras.metrics.Metric):
        """Sums of 1, 2, 4 ...: which units were kept, for each example."""

        def __init__(self, name="masks"):
            super().__init__(name=name)
            self.seen = self.add_variable((ROWS,), "zeros", name="seen")

        def update_state(self, y_true, y_pred, sample_weight=None):
            ids = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
            self.seen.assign_add(tf.math.unsorted_segment_sum(tf.reduce_sum(y_pred, 1), ids, ROWS))

        def result(self):
            return self.seen.value

    x, y = np.tile((2.0 ** np.arange(16)).astype("float32"), (ROWS, 1)), numbered()[1]
    with strategy.scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Lambda(lambda x: x / 2)])
        model.compile("sgd", loss=lambda a, b: tf.reduce_sum(b, 1) * 0.0, metrics=[Masks()])
    seen = [model.fit(x, y, batch_size=1, shuffle=False, verbose=0).history["masks"][0] for _ in range(2)]
    masks = np.concatenate(seen)
    assert len(np.unique(masks)) > 90, f"{len(np.unique(masks))} different masks of {len(masks)}"


@feature
def recurrent(strategy):
    x = np.random.default_rng(0).normal(size=(60, 5, 4)).astype("float32")
    y = (x.sum((1, 2)) > 0).astype("int32")

    def model():
        return keras.Sequential([keras.Input((5, 4)), keras.layers.LSTM(8, dropout=0.1, recurrent_dropout=0.1), keras.layers.Dense(2)])

    trains(strategy, dataset(x, y), model=model, optimizer=lambda: keras.optimizers.Adam(0.02))


@feature
def attention(strategy):
    x = np.random.default_rng(0).normal(size=(60, 5, 4)).astype("float32")
    y = (x.sum((1, 2)) > 0).astype("int32")

    def model():
        inputs = keras.Input((5, 4))
        h = keras.layers.LayerNormalization()(keras.layers.MultiHeadAttention(2, 4, dropout=0.1)(inputs, inputs))
        return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(h)))

    trains(strategy, dataset(x, y), model=model, optimizer=lambda: keras.optimizers.Adam(0.02))


@feature
def added_losses(strategy):
    """The gradient is 1 of the loss, 2 of add_loss, and 2 x 0.5 x weight of the regularizer."""

    class Extra(keras.layers.Layer):
        def call(self, x):
            self.add_loss(2.0 * tf.reduce_mean(x))
            return x

    with strategy.scope():
        model = keras.Sequential([*one_weight().layers, Extra()])
        model.compile(keras.optimizers.SGD(1.0), mean_output)
    history = model.fit(batches(), epochs=2, verbose=0).history
    assert weight(model) == -3 * 2 * STEPS
    assert history["loss"][1] < history["loss"][0] < 0
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", kernel_regularizer="l2")])
        model.compile("sgd", mean_output)
    same(model.evaluate(batches(), verbose=0), 1.01)
    model.fit(batches(), verbose=0)
    assert weight(model) < 1 - 0.01 * STEPS


@feature
def lookup_table_in_the_model(strategy):
    words = np.array([["a"], ["b"], ["c"], ["other"]] * 15)
    y = np.tile(np.array([0, 1, 2, 0]), 15)

    def model():
        inputs = keras.Input((1,), dtype="string")
        ids = keras.layers.StringLookup(vocabulary=["a", "b", "c"])(inputs)
        return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(keras.layers.Embedding(4, 4)(ids))))

    fast = lambda: keras.optimizers.Adam(0.1)
    model, _ = trains(strategy, dataset(words, y), model=model, optimizer=fast)
    assert model.evaluate(dataset(words, y), verbose=0, return_dict=True)["accuracy"] == 1.0
    assert list(model.predict(dataset(words), verbose=0).argmax(1)) == list(y)


@feature
def lookup_table_in_the_data(strategy):
    table = keras.layers.StringLookup(vocabulary=["a", "b", "c"])
    words = tf.data.Dataset.from_tensor_slices((["a", "b", "c", "other"] * 3, [0.0] * 12))
    train = words.map(lambda w, y: (tf.cast(table(w), tf.float32)[None], y[None])).batch(BATCH)
    model = compiled(strategy, one_weight, lambda: keras.optimizers.SGD(1.0), mean_output, ())
    model.fit(train, epochs=2, verbose=0)
    assert weight(model) == -2 * 3 * np.mean([1, 2, 3, 0])


@feature
def normalization_adapted(strategy):
    x, y = data()
    with strategy.scope():
        layer = keras.layers.Normalization()
        layer.adapt(x)
        model = keras.Sequential([keras.Input((6,)), layer])
        model.compile("sgd", "mse")
    same(model.predict(x, verbose=0), (x - x.mean(0)) / x.std(0), 1e-3)


# --- Custom steps --------------------------------------------------------------------------------------------------------
class OwnStep(keras.Sequential):
    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return self.returned(loss, y)


@feature
def train_step_that_returns_metrics(strategy):
    class Model(OwnStep):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.total = keras.metrics.Sum(name="total")
            self.once = Once(name="own_once")

        def returned(self, loss, y):
            self.total.update_state(tf.ones_like(y))
            self.once.update_state(y, y)
            return {m.name: m.result() for m in self.metrics}

    with strategy.scope():
        model = Model(one_weight().layers)
        model.compile(keras.optimizers.SGD(1.0), mean_output)
    history = model.fit(batches(), epochs=3, verbose=0).history
    assert history["total"] == history["own_once"] == [ROWS] * 3, history
    assert weight(model) == -3 * STEPS


@feature
def train_step_with_keys_of_its_own(strategy):
    class Model(OwnStep):
        def returned(self, loss, y):
            return {"mine": loss * 0 + 7.0, "last": tf.reduce_max(y)}

    with strategy.scope():
        model = Model(one_weight().layers)
        model.compile(keras.optimizers.SGD(1.0), mean_output)
    for steps in (1, 4):
        model.steps_per_execution = steps
        history = model.fit(batches(), epochs=2, verbose=0).history
        assert history["mine"] == [7.0] * 2, history
        assert history["last"] == [ROWS - 1.0] * 2, history  # the last step's
    assert weight(model) == -4 * STEPS


@feature
def test_step_and_predict_step_of_its_own(strategy):
    class Model(keras.Sequential):
        def test_step(self, batch):
            return {"rows": tf.reduce_sum(tf.ones_like(batch[1]))}

        def predict_step(self, batch):
            return {"twice": 2.0 * self(batch[0] if isinstance(batch, tuple) else batch), "rows": tf.shape(batch[0])[0:1]}

    with strategy.scope():
        model = Model(one_weight().layers)
        model.compile("sgd", mean_output)
    assert model.evaluate(batches(), verbose=0, return_dict=True) == {"rows": ROWS % BATCH}
    model.set_weights([np.ones((1, 1))])
    assert model.predict(numbered()[0], batch_size=BATCH, verbose=0)["twice"].sum() == 2 * ROWS


# --- Callbacks ------------------------------------------------------------------------------------------------------------
class Epochs(keras.callbacks.Callback):
    """Weights after each epoch."""

    def __init__(self):
        super().__init__()
        self.weights, self.begun = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.begun.append(epoch)

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(weight(self.model))


@feature
def early_stopping(strategy):
    """The rate changes its sign: the loss falls in the first two epochs only."""
    model, epochs = counter(strategy), Epochs()
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
    plateau = keras.callbacks.ReduceLROnPlateau("once", mode="max", factor=0.5, patience=1, min_delta=1)
    history = model.fit(batches(), epochs=4, verbose=0, callbacks=[plateau]).history
    same(history["learning_rate"], [1.0, 1.0, 0.5, 0.25])
    same(weight(model), -STEPS * 2.75)


@feature
def model_checkpoints(strategy):
    directory = pathlib.Path(tempfile.mkdtemp())
    model, epochs = counter(strategy), Epochs()
    callbacks = [
        epochs,
        keras.callbacks.ModelCheckpoint(str(directory / "epoch-{epoch}.keras")),
        keras.callbacks.ModelCheckpoint(str(directory / "best.weights.h5"), "loss", save_weights_only=True, save_best_only=True),
        keras.callbacks.ModelCheckpoint(str(directory / "step-{epoch}-{batch}.weights.h5"), save_weights_only=True, save_freq=5),
    ]
    model.fit(batches(), epochs=2, verbose=0, callbacks=callbacks)
    assert sorted(p.name for p in directory.iterdir()) == [
        "best.weights.h5", "epoch-1.keras", "epoch-2.keras", *[f"step-{e}-{b}.weights.h5" for e, b in ((1, 10), (1, 5), (2, 12), (2, 2), (2, 7))]
    ], sorted(p.name for p in directory.iterdir())
    saved = keras.models.load_model(directory / "epoch-1.keras", custom_objects={"mean_output": mean_output})
    assert (weight(saved), int(saved.optimizer.iterations)) == (-STEPS, STEPS)
    saved.load_weights(directory / "best.weights.h5")
    assert weight(saved) == -2 * STEPS
    saved.load_weights(directory / "step-2-7.weights.h5")
    assert weight(saved) == -(STEPS + 7 + 1), weight(saved)


@feature
def backup_and_restore(strategy):
    directory = tempfile.mkdtemp()

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    backup = lambda: keras.callbacks.BackupAndRestore(directory)
    try:
        counter(strategy).fit(batches(), epochs=4, verbose=0, callbacks=[backup(), Interrupt()])
        raise AssertionError("not interrupted")
    except KeyboardInterrupt:
        pass
    model, epochs = counter(strategy), Epochs()
    model.fit(batches(), epochs=4, verbose=0, callbacks=[backup(), epochs])
    assert (epochs.begun, weight(model), int(model.optimizer.iterations.numpy())) == ([2, 3], -4 * STEPS, 4 * STEPS)


@feature
def logs(strategy):
    directory = pathlib.Path(tempfile.mkdtemp())
    model = counter(strategy)
    callbacks = [
        keras.callbacks.CSVLogger(str(directory / "log.csv")),
        tfdist.TensorBoard(str(directory), histogram_freq=1),
        keras.callbacks.TensorBoard(str(directory / "keras"), update_freq=4),
        keras.callbacks.TerminateOnNaN(),
    ]
    history = model.fit(batches(), epochs=2, verbose=1, callbacks=callbacks, validation_data=batches()).history
    with open(directory / "log.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    same([float(r["loss"]) for r in rows], history["loss"])
    tags = [v.tag for f in (directory / "train").iterdir() for e in tf.compat.v1.train.summary_iterator(str(f)) for v in e.summary.value]
    assert {"epoch_once", "speed/examples_per_second"} <= set(tags), tags


@feature
def terminate_on_nan(strategy):
    model = counter(strategy, lambda: keras.optimizers.SGD(float("inf")))
    history = model.fit(batches(), epochs=5, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()]).history
    assert len(history["loss"]) <= 1, history


@feature
def stop_in_the_middle_of_an_epoch(strategy):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert set(logs) == {"loss", "once"}, logs
            if batch == 5:
                self.model.stop_training = True

    for train in (batches(), batches().filter(lambda x, y: True), shuffled()):
        model = counter(strategy)
        history = model.fit(train, epochs=3, verbose=0, callbacks=[Stop()]).history
        result = weight(model), int(model.optimizer.iterations.numpy()), history["once"]
        assert result == (-6.0, 6, [22.0 if 0 else 24.0]), result
        counts(strategy, batches())


@feature
def callback_that_fails(strategy):
    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("mine")

    model = counter(strategy)
    raises(RuntimeError, "^mine$", lambda: model.fit(batches(), verbose=0, callbacks=[Fail()]))
    model.set_weights([np.zeros((1, 1))])
    model.optimizer.iterations.assign(0)
    counts(strategy, batches(), model=model)


# --- Optimizers -------------------------------------------------------------------------------------------------------------
@feature
def clipping(strategy):
    for argument, clipped in (("clipnorm", 0.5), ("global_clipnorm", 0.25), ("clipvalue", 0.125)):
        model = counter(strategy, lambda: keras.optimizers.SGD(1.0, **{argument: clipped}))
        model.fit(batches(), epochs=2, verbose=0)
        assert weight(model) == -2 * STEPS * clipped, argument


@feature
def average_of_weights(strategy):
    optimizer = lambda: keras.optimizers.AdamW(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)
    trains(strategy, optimizer=optimizer)
    model = counter(strategy, lambda: keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5))
    model.fit(batches(), epochs=2, verbose=0)
    assert -2 * STEPS < weight(model) < -STEPS, weight(model)  # Keras puts the average in its place at the end
    same(weight(model), model.optimizer._model_variables_moving_average[0].numpy().item())


@feature
def gradient_accumulation(strategy):
    rows, n = 300 * BATCH, 3
    for steps in (1, 10):
        model = counter(strategy, lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=n), rows, steps_per_execution=steps)
        history = model.fit(batches(rows), epochs=2, verbose=0).history
        assert (int(model.optimizer.iterations.numpy()), history["once"]) == (200, [rows] * 2)
        same(weight(model) - model.optimizer._accumulated_gradients[0].numpy().item() / n, -200, 1e-5)
        assert abs(weight(model) + 200) <= 1, weight(model)


@feature
def schedule(strategy):
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([9], [1.0, 0.25])  # steps 0 to 9, and from 10 on
    model = counter(strategy, lambda: keras.optimizers.SGD(rate))
    model.fit(batches(), epochs=2, verbose=0)
    assert weight(model) == -10 - 0.25 * (2 * STEPS - 10), weight(model)


@feature
def loss_scaling(strategy):
    model = counter(strategy, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0**10, dynamic_growth_steps=5))
    counts(strategy, batches(600), rows=600, steps=150, model=counter(strategy, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)), 600))
    model.fit(batches(), verbose=0)
    assert float(model.optimizer.dynamic_scale.numpy()) > 2.0**10
    x, y = numbered()
    x[:BATCH] = np.inf
    model = counter(strategy, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)))
    model.fit(dataset(x, y, batch=BATCH), epochs=2, verbose=0)
    assert (weight(model), int(model.optimizer.iterations.numpy())) == (-2 * (STEPS - 1), 2 * (STEPS - 1)), (weight(model), model.optimizer.iterations)


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


# --- Metrics ------------------------------------------------------------------------------------------------------------------
def many_metrics():
    return [
        "accuracy", keras.metrics.AUC(num_thresholds=50, name="auc"), keras.metrics.F1Score(threshold=0.5, name="f1"),
        keras.metrics.Precision(thresholds=[0.3, 0.5, 0.7], name="precision"), keras.metrics.Recall(name="recall"),
        keras.metrics.TruePositives(name="tp"), keras.metrics.FalseNegatives(name="fn"), keras.metrics.BinaryIoU(name="iou"),
        keras.metrics.SensitivityAtSpecificity(0.5, name="sas"), keras.metrics.R2Score(name="r2"),
        keras.metrics.RootMeanSquaredError(name="rmse"), keras.metrics.PearsonCorrelation(name="pearson"),
    ]  # fmt: skip


@feature
def metrics(strategy):
    x, y = data(101)
    y = (y == 1).astype("float32")[:, None]
    binary = lambda: mlp(1, activation="sigmoid")
    model = compiled(strategy, binary, "adam", "binary_crossentropy", many_metrics())
    model.fit(x, y, verbose=0)
    copy = local(model, binary, loss="binary_crossentropy", metrics=many_metrics())
    for size in (7, 32):
        mine, theirs = (m.evaluate(x, y, batch_size=size, verbose=0, return_dict=True) for m in (model, copy))
        assert set(mine) == set(theirs)
        same([mine[k] for k in sorted(mine)], [theirs[k] for k in sorted(mine)])


@feature
def metrics_of_classes(strategy):
    x, y = data(101)
    several = lambda: ["accuracy", keras.metrics.MeanIoU(3, sparse_y_pred=False, name="miou"), keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")]
    model = compiled(strategy, metrics=several())
    copy = local(model, mlp, loss=CROSSENTROPY, metrics=several())
    same(model.evaluate(x, y, batch_size=7, verbose=0), copy.evaluate(x, y, batch_size=7, verbose=0))


# --- Batches, predictions, files ------------------------------------------------------------------------------------------------
@feature
def on_batch(strategy):
    model = counter(strategy)
    x, y = numbered()
    for i in range(0, ROWS, BATCH):
        results = model.train_on_batch(x[i : i + BATCH], y[i : i + BATCH], return_dict=True)
        assert results["once"] == min(ROWS, i + BATCH), results
    assert (weight(model), int(model.optimizer.iterations.numpy())) == (-STEPS, STEPS)
    model.reset_metrics()
    same(model.test_on_batch(x[:7], y[:7]), [-STEPS, 7])
    same(model.predict_on_batch(x[:7]), -STEPS * x[:7])
    model.reset_metrics()
    weighted = model.train_on_batch(x[:4], y[:4], sample_weight=np.array([1, 1, 0, 0]))
    assert weight(model) == -STEPS - 0.5, weighted


@feature
def predict(strategy):
    x, _ = data(101)
    model = compiled(strategy)
    copy = local(model, mlp, loss=CROSSENTROPY)
    for given in ({"x": x, "batch_size": 7}, {"x": dataset(x, batch=7)}, {"x": dataset(x, batch=7).filter(lambda x: True)}):
        same(model.predict(**given, verbose=0), copy.predict(**given, verbose=0))
    assert model.predict(dataset(x, batch=7).repeat(), steps=3, verbose=0).shape == (21, 3)
    model.steps_per_execution = 4
    same(model.predict(x, batch_size=7, verbose=0), copy.predict(x, batch_size=7, verbose=0))
    ordered = one_weight()
    with strategy.scope():
        ordered = one_weight()
    ordered.set_weights([np.ones((1, 1))])
    same(ordered.predict(np.arange(500.0)[:, None], batch_size=1, verbose=0)[:, 0], np.arange(500))


@feature
def predict_several_outputs(strategy):
    def build():
        inputs = keras.Input((6,))
        return keras.Model(inputs, [keras.layers.Dense(2)(inputs), {"b": keras.layers.Dense(3)(inputs)}])

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
    same(tf.saved_model.load(str(directory / "exported")).serve(tf.ones([2, 1])), -2 * STEPS * np.ones((2, 1)))


@feature
def tensorflow_checkpoints(strategy):
    prefix = str(pathlib.Path(tempfile.mkdtemp()) / "c")
    model = counts(strategy, batches())
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(prefix)
    other = counter(strategy)
    other.optimizer.build(other.trainable_variables)
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path).assert_existing_objects_matched()
    assert (weight(other), int(other.optimizer.iterations.numpy())) == (-2 * STEPS, 2 * STEPS)


# --- Errors -----------------------------------------------------------------------------------------------------------------------
def raises(kind, pattern, function, seconds=30.0):
    import re

    began = time.monotonic()
    try:
        function()
    except kind as error:
        assert re.search(pattern, str(error), re.S), f"{type(error).__name__}: {error}"
        assert time.monotonic() - began < seconds
        return error
    raise AssertionError("no error")


def is_clean(strategy, model=None):
    counts(strategy, batches())


@feature
def error_compiled_outside_of_the_scope(strategy):
    with strategy.scope():
        model = mlp()
    model.compile("adam", CROSSENTROPY)
    raises(ValueError, "optimizer adam was made outside.*strategy.scope", lambda: model.fit(dataset(*data()), verbose=0))
    model.compile(keras.optimizers.LossScaleOptimizer("adam"), CROSSENTROPY)
    raises(ValueError, "was made outside.*strategy.scope", lambda: model.fit(dataset(*data()), verbose=0))
    optimizer = keras.optimizers.SGD()
    with strategy.scope():
        model.compile(optimizer, CROSSENTROPY)
    raises(ValueError, "optimizer SGD was made outside.*strategy.scope", lambda: model.fit(dataset(*data()), verbose=0))


@feature
def error_model_made_outside_of_the_scope(strategy):
    model = mlp()
    def build():
        with strategy.scope():
            model.compile("adam", CROSSENTROPY)
        model.fit(dataset(*data()), verbose=0)
    raises(ValueError, "strategy.scope", build)


@feature
def error_run_eagerly(strategy):
    model = compiled(strategy, run_eagerly=True)
    for method in (model.fit, model.evaluate, model.train_on_batch):
        raises(ValueError, "run_eagerly=True under parameter_server.*one_device", lambda: method(*data()))


@feature
def error_jit_compile(strategy):
    raises(ValueError, "jit_compile=True.*Pass jit_compile=False", lambda: compiled(strategy, jit_compile=True).fit(*data(), verbose=0))
    for automatic in ("auto", False):
        compiled(strategy, jit_compile=automatic).fit(*data(), verbose=0)


@feature
def error_data_without_end(strategy):
    model, endless = counter(strategy), batches().repeat()
    raises(ValueError, "fit: .*no end.*steps_per_epoch", lambda: model.fit(endless))
    raises(ValueError, "fit: .*no end.*validation_steps", lambda: model.fit(batches(), validation_data=endless))
    raises(ValueError, "evaluate: .*no end.*steps", lambda: model.evaluate(endless))
    raises(ValueError, "predict: .*no end.*steps", lambda: model.predict(endless))


@feature
def error_step_that_returns_no_dict(strategy):
    class Model(OwnStep):
        def returned(self, loss, y):
            return loss

    with strategy.scope():
        model = Model(one_weight().layers)
        model.compile(keras.optimizers.SGD(1.0), mean_output)
    raises(TypeError, "train_step returned .*expected a dict", lambda: model.fit(batches(), verbose=0))
    is_clean(strategy)


@feature
def error_of_python_in_a_step(strategy):
    class Model(OwnStep):
        def returned(self, loss, y):
            raise KeyError("a mistake of mine")

    with strategy.scope():
        model = Model(one_weight().layers)
        model.compile(keras.optimizers.SGD(1.0), mean_output)
    error = raises(KeyError, "a mistake of mine", lambda: model.fit(batches(), verbose=0))
    assert "returned" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    is_clean(strategy)


@feature
def error_of_an_operation_in_a_step(strategy):
    x, y = data()
    y[30] = 99
    for given in ({"x": dataset(x, y)}, {"x": x, "y": y}, {"x": dataset(x, y).repeat(), "steps_per_epoch": 200}):
        model = compiled(strategy)
        raises(tf.errors.InvalidArgumentError, "label value of 99", lambda: model.fit(**given, epochs=3, verbose=0), 10)
        y_good = np.minimum(y, 2)
        history = model.fit(x, y_good, verbose=0).history
        assert np.isfinite(history["loss"][0])
    raises(tf.errors.InvalidArgumentError, "label value of 99", lambda: model.evaluate(x, y, verbose=0), 10)
    raises(tf.errors.InvalidArgumentError, "label value of 99", lambda: model.train_on_batch(x, y), 10)
    is_clean(strategy)


@feature
def error_of_an_assertion_in_a_step(strategy):
    class Model(OwnStep):
        def returned(self, loss, y):
            tf.debugging.assert_less(tf.reduce_max(y), 20.0, "labels are too great for me")
            return {"loss": loss}

    with strategy.scope():
        model = Model(one_weight().layers)
        model.compile(keras.optimizers.SGD(1.0), mean_output)
    for given in ((batches(),), numbered()):
        raises(tf.errors.InvalidArgumentError, "labels are too great for me", lambda: model.fit(*given, batch_size=None if len(given) == 1 else BATCH, verbose=0), 10)
    is_clean(strategy)


@feature
def error_in_the_data(strategy):
    bad = batches().map(lambda x, y: (tf.debugging.check_numerics(x / (30.0 - y), "a division of mine"), y))
    model = counter(strategy)
    raises(tf.errors.InvalidArgumentError, "a division of mine", lambda: model.fit(bad, verbose=0), 10)
    raises(tf.errors.InvalidArgumentError, "a division of mine", lambda: model.evaluate(bad, verbose=0), 10)

    def generated():
        yield from batches().take(5).as_numpy_iterator()
        raise OSError("a file of mine")

    raises(Exception, "a file of mine", lambda: model.fit(generated(), verbose=0), 10)
    is_clean(strategy)


@feature
def error_in_a_prediction(strategy):
    class Model(keras.Sequential):
        def predict_step(self, batch):
            tf.debugging.assert_less(batch, 20.0, "inputs are too great for me")
            return self(batch)

    with strategy.scope():
        model = Model(one_weight().layers)
    raises(tf.errors.InvalidArgumentError, "inputs are too great", lambda: model.predict(np.arange(50.0)[:, None], batch_size=1, verbose=0), 10)
    is_clean(strategy)


def main(out, *names):
    strategy = tfdist.make_strategy(timeout=60)
    results, seconds = {}, {}
    for name in names or FEATURES:
        keras.utils.set_random_seed(1)
        began = time.monotonic()
        try:
            results[name] = FEATURES[name](strategy)
        except Exception:
            results[name] = traceback.format_exc()
        seconds[name] = time.monotonic() - began
        print(f"{seconds[name]:6.1f} s {name}", results[name] or "", flush=True)
        pathlib.Path(out).write_text(json.dumps(results))
    keras.backend.clear_session()


if __name__ == "__main__":
    main(*sys.argv[1:])
