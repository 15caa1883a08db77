"""Train models, layers, metrics and custom steps of every kind."""

import keras
import numpy as np
import tensorflow as tf

from tests.cluster.scripts.ps.base import (
    BATCH,
    ROWS,
    STEPS,
    Once,
    batches,
    compiled,
    feature,
    local,
    mean_output,
    numbered,
    one_weight,
    same,
    sgd,
    trains,
    weight,
)
from tests.parity.cases import CROSSENTROPY, Subclassed, data, dataset, mlp


@feature
def sequential(strategy):
    model, _ = trains(strategy, optimizer=sgd(0.1, momentum=0.5))
    assert {v.value.device.partition("/task")[0] for v in model.weights} == {"/job:ps/replica:0"}


@feature
def unbuilt_models(strategy):
    trains(
        strategy,
        model=lambda: keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]),
    )
    model, _ = trains(strategy, (*data(),), model=lambda: Subclassed("tanh"), steps=2)
    assert all("/job:ps" in v.value.device for v in model.trainable_variables)


@feature
def batch_normalization(strategy):
    """Use momentum 0.5 on batches of one mean.

    The moving mean tells how many steps moved it at least.
    """

    def model():
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.BatchNormalization(momentum=0.5),
                keras.layers.Dense(3),
            ]
        )

    x, y = data()
    x[:] = 10 + np.tile(x[:12], (5, 1))
    model, _ = trains(strategy, (x, y), steps=2, epochs=10, model=model)
    moving = model.layers[0].moving_mean.numpy()
    assert np.all(np.abs(moving - x.mean(0)) < 1.0), moving
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    same(model.predict(x, verbose=0), copy.predict(x, verbose=0))


def check_masks(strategy, make):
    """Check that masks differ between the steps of an epoch and between epochs.

    Args:
        strategy: Strategy to train under.
        make: Function that is called in the scope, and returns layers that drop half of the units
            and double the others.
    """

    class Masks(keras.metrics.Metric):
        """Record which units were kept, for each example, as a sum of 1, 2, 4 ..."""

        def __init__(self, name="masks"):
            super().__init__(name=name)
            self.seen = self.add_variable((ROWS,), "zeros", name="seen")

        def update_state(self, y_true, y_pred, sample_weight=None):
            ids = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
            self.seen.assign_add(tf.math.unsorted_segment_sum(tf.reduce_sum(y_pred, 1), ids, ROWS))

        def result(self):
            return self.seen.value

    x = np.tile((2.0 ** np.arange(16)).astype("float32"), (ROWS, 1))
    y = numbered()[1]
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((16,)), *make(), keras.layers.Lambda(lambda x: x / 2)]
        )
        model.compile("sgd", loss=lambda a, b: tf.reduce_sum(b, 1) * 0.0, metrics=[Masks()])
    seen = [
        model.fit(x, y, batch_size=1, shuffle=False, verbose=0).history["masks"][0]
        for _ in range(2)
    ]
    masks = np.concatenate(seen)
    assert len(np.unique(masks)) > 90, f"{len(np.unique(masks))} different masks of {len(masks)}"


@feature
def dropout(strategy):
    check_masks(strategy, lambda: [keras.layers.Dropout(0.5, seed=1)])


@feature
def dropout_without_a_seed(strategy):
    """Draw from Keras' global generator, which no layer has."""

    class Drop(keras.layers.Layer):
        def call(self, x):
            return keras.random.dropout(x, 0.5)

    keras.utils.set_random_seed(1)
    check_masks(strategy, lambda: [Drop()])


@feature
def recurrent(strategy):
    x = np.random.default_rng(0).normal(size=(60, 5, 4)).astype("float32")
    y = (x.sum((1, 2)) > 0).astype("int32")

    def model():
        return keras.Sequential(
            [
                keras.Input((5, 4)),
                keras.layers.LSTM(8, dropout=0.1, recurrent_dropout=0.1),
                keras.layers.Dense(2),
            ]
        )

    trains(strategy, dataset(x, y), model=model, optimizer=lambda: keras.optimizers.Adam(0.02))


@feature
def attention(strategy):
    x = np.random.default_rng(0).normal(size=(60, 5, 4)).astype("float32")
    y = (x.sum((1, 2)) > 0).astype("int32")

    def model():
        inputs = keras.Input((5, 4))
        h = keras.layers.LayerNormalization()(
            keras.layers.MultiHeadAttention(2, 4, dropout=0.1)(inputs, inputs)
        )
        return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(h)))

    trains(strategy, dataset(x, y), model=model, optimizer=lambda: keras.optimizers.Adam(0.02))


@feature
def added_losses(strategy):
    """Check the gradient: 1 of the loss, 2 of add_loss, and 2 x 0.5 x weight of the regularizer."""

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
        model = keras.Sequential(
            [
                keras.Input((1,)),
                keras.layers.Dense(
                    1, use_bias=False, kernel_initializer="ones", kernel_regularizer="l2"
                ),
            ]
        )
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
        return keras.Model(
            inputs, keras.layers.Dense(3)(keras.layers.Flatten()(keras.layers.Embedding(4, 4)(ids)))
        )

    model, _ = trains(
        strategy, dataset(words, y), model=model, optimizer=lambda: keras.optimizers.Adam(0.1)
    )
    assert model.evaluate(dataset(words, y), verbose=0, return_dict=True)["accuracy"] == 1.0
    assert list(model.predict(dataset(words), verbose=0).argmax(1)) == list(y)


@feature
def lookup_table_in_the_data(strategy):
    table = keras.layers.StringLookup(vocabulary=["a", "b", "c"])
    words = tf.data.Dataset.from_tensor_slices((["a", "b", "c", "other"] * 3, [0.0] * 12))
    train = words.map(lambda w, y: (tf.cast(table(w), tf.float32)[None], y[None])).batch(BATCH)
    model = compiled(strategy, one_weight, sgd(), mean_output, ())
    model.fit(train, epochs=2, verbose=0)
    assert weight(model) == -2 * 3 * np.mean([1, 2, 3, 0])


@feature
def normalization_adapted(strategy):
    x, _ = data()
    with strategy.scope():
        layer = keras.layers.Normalization()
        layer.adapt(x)
        model = keras.Sequential([keras.Input((6,)), layer])
        model.compile("sgd", "mse")
    same(model.predict(x, verbose=0), (x - x.mean(0)) / x.std(0), 1e-3)


# --- Custom steps ---------------------------------------------------------------------------------
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

    model = compiled(strategy, lambda: Model(one_weight().layers), sgd(), mean_output, ["mae"])
    history = model.fit(batches(), epochs=3, verbose=0).history
    assert history["total"] == history["own_once"] == [ROWS] * 3, history
    assert "mae" in history
    assert weight(model) == -3 * STEPS


@feature
def model_without_call(strategy):
    """Train layers that the step itself builds, by an optimizer that it builds."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
            self.own = keras.optimizers.SGD(1.0)
            self.once = Once()

        @property
        def metrics(self):
            return [self.once]

        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.layer(x))
            weights = self.layer.trainable_weights
            self.own.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            self.once.update_state(y, y)
            return {"once": self.once.result()}

    with strategy.scope():
        model = Model()
        model.compile()
    history = model.fit(batches(), epochs=3, verbose=0).history
    assert history["once"] == [ROWS] * 3, history
    assert (weight(model), int(model.own.iterations)) == (-3 * STEPS, 3 * STEPS)


@feature
def train_step_with_keys_of_its_own(strategy):
    class Model(OwnStep):
        def returned(self, loss, y):
            return {"mine": loss * 0 + 7.0, "last": tf.reduce_max(y)}

    model = compiled(strategy, lambda: Model(one_weight().layers), sgd(), mean_output, ())
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
            return {
                "twice": 2.0 * self(batch[0] if isinstance(batch, tuple) else batch),
                "rows": tf.shape(batch[0])[0:1],
            }

    with strategy.scope():
        model = Model(one_weight().layers)
        model.compile("sgd", mean_output)
    assert model.evaluate(batches(), verbose=0, return_dict=True) == {"rows": ROWS % BATCH}
    model.set_weights([np.ones((1, 1))])
    assert model.predict(numbered()[0], batch_size=BATCH, verbose=0)["twice"].sum() == 2 * ROWS


# --- Metrics --------------------------------------------------------------------------------------
def many_metrics():
    return [
        "accuracy",
        keras.metrics.AUC(num_thresholds=50, name="auc"),
        keras.metrics.F1Score(threshold=0.5, name="f1"),
        keras.metrics.Precision(thresholds=[0.3, 0.5, 0.7], name="precision"),
        keras.metrics.Recall(name="recall"),
        keras.metrics.TruePositives(name="tp"),
        keras.metrics.FalseNegatives(name="fn"),
        keras.metrics.BinaryIoU(name="iou"),
        keras.metrics.SensitivityAtSpecificity(0.5, name="sas"),
        keras.metrics.R2Score(name="r2"),
        keras.metrics.RootMeanSquaredError(name="rmse"),
        keras.metrics.PearsonCorrelation(name="pearson"),
    ]


@feature
def metrics(strategy):
    x, y = data(101)
    y = (y == 1).astype("float32")[:, None]

    def binary():
        return mlp(1, activation="sigmoid")

    model = compiled(strategy, binary, "adam", "binary_crossentropy", many_metrics())
    model.fit(x, y, verbose=0)
    copy = local(model, binary, loss="binary_crossentropy", metrics=many_metrics())
    mine, theirs = (
        m.evaluate(x, y, batch_size=7, verbose=0, return_dict=True) for m in (model, copy)
    )
    assert set(mine) == set(theirs)
    same([mine[k] for k in sorted(mine)], [theirs[k] for k in sorted(mine)])


@feature
def metrics_of_classes(strategy):
    x, y = data(101)

    def several():
        top2 = keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")
        return ["accuracy", keras.metrics.MeanIoU(3, sparse_y_pred=False, name="miou"), top2]

    model = compiled(strategy, metrics=several())
    copy = local(model, mlp, loss=CROSSENTROPY, metrics=several())
    same(
        model.evaluate(x, y, batch_size=7, verbose=0), copy.evaluate(x, y, batch_size=7, verbose=0)
    )
