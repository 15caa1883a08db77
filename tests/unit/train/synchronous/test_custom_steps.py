"""Test that custom steps, losses and metrics of models train to one replica's numbers.

Two replicas train on batches that do not divide, and on one that leaves a replica without rows.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfdist
from tests.parity.cases import Steps
from tfdist.keras_compat import copies
from tfdist.parallel.replica_weight import weighted_step
from tfdist.telemetry.layout import read_json_lines
from tfdist.telemetry.named_scalars import named_scalars
from tfdist.telemetry.writers import JsonlWriter
from tfdist.tools.report import tensorboard_events
from tfdist.tools.report.read import read_run
from tfdist.tools.report.run_files import Reader
from tfdist.train.synchronous import replica_step
from tfdist.train.synchronous.gathered_metrics import MetricUpdates, is_gathered

ROWS = 33  # batches of 16, 16 and 1 rows
mse = keras.losses.MeanSquaredError


def data(outputs=1):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, 4)).astype("float32")
    y = (x[:, :outputs] ** 2 + rng.normal(size=(ROWS, outputs)) * 0.3).astype("float32")
    return x, y


def mlp(cls=keras.Model, **kwargs):
    keras.utils.set_random_seed(1)
    inputs = keras.Input([4])
    hidden = keras.layers.Dense(5, activation="tanh", **kwargs)(inputs)
    return cls(inputs, keras.layers.Dense(1)(hidden))


class OwnStep(keras.Model):
    """Return logs in the form of Keras' guide "Customizing fit()"."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return self.logs(loss, y, self(x))

    def test_step(self, data):
        x, y = data
        prediction = self(x, training=False)
        return self.logs(self.loss_of(y, prediction), y, prediction)

    def loss_of(self, y, prediction):
        return tf.reduce_mean(tf.square(y - prediction))

    def logs(self, loss, y, prediction):
        return {"loss": loss}


class LossOfEachRow(OwnStep):
    """Take the gradient of a vector, which TensorFlow takes for its sum."""

    def loss_of(self, y, prediction):
        return tf.square(y - prediction)[:, 0] / 30

    def logs(self, loss, y, prediction):
        return {"loss": tf.reduce_mean(loss)}


class KerasLoss(OwnStep):
    def loss_of(self, y, prediction):
        return mse()(y, prediction)


class Trackers(OwnStep):
    """Update metrics in several forms; `metrics` leaves one of them out."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="total")
        self.listed = keras.metrics.Mean(name="listed")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")
        self.omitted = keras.metrics.RootMeanSquaredError(name="omitted")

    @property
    def metrics(self):
        return [self.tracker, self.listed, self.error]

    def logs(self, loss, y, prediction):
        self.tracker.update_state(loss)
        self.listed.update_state([loss])
        self.listed.update_state([loss, 2 * loss])
        self.error.update_state(y, prediction)
        self.omitted.update_state(y, prediction)
        return {
            "loss": self.tracker.result(),
            "listed": self.listed.result(),
            "mae": self.error.result(),
            "omitted": self.omitted.result(),
            "twice": 2 * loss,
        }


class Guide(OwnStep):
    """Return nested logs: `compile_metrics` is a dict."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=prediction)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, prediction)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        return keras.Model.test_step(self, data)


class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred)) + ops.sum(self.losses)


class AddedToLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight) + ops.mean(ops.abs(y_pred))


class Endpoint(keras.layers.Layer):
    def call(self, targets, predictions):
        self.add_loss(mse()(targets, predictions))
        return predictions


def endpoint():
    keras.utils.set_random_seed(1)
    inputs = keras.Input([4])
    targets = keras.Input([1])
    hidden = keras.layers.Dense(5, kernel_regularizer="l2", activity_regularizer="l1")(inputs)
    outputs = Endpoint()(targets, keras.layers.Dense(1)(hidden))
    return keras.Model([inputs, targets], outputs)


class Gan(keras.Model):
    """Two models, two optimizers, and no `call`."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(1)
        dense = keras.layers.Dense
        self.generator = keras.Sequential([keras.Input([2]), dense(4, "tanh"), dense(4)])
        self.critic = keras.Sequential([keras.Input([4]), dense(5, "tanh"), dense(1)])
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def train_step(self, data):
        x, _ = data
        entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        with tf.GradientTape() as tape:
            both = tf.concat([self.generator(x[:, :2]), x], 0)
            labels = tf.concat([tf.ones([tf.shape(x)[0], 1]), tf.zeros([tf.shape(x)[0], 1])], 0)
            d_loss = entropy(labels, self.critic(both))
        weights = self.critic.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            fooled = self.critic(self.generator(x[:, :2]))
            g_loss = entropy(tf.zeros([tf.shape(x)[0], 1]), fooled)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


class StaticRows(OwnStep):
    """Use the number of rows in Python, as with one device where batches have a static size."""

    def loss_of(self, y, prediction):
        rows = prediction.shape[0]
        return tf.reduce_sum(tf.eye(rows) * tf.square(y - tf.transpose(prediction))) / rows


def fitted(strategy, make, loss="mse", metric=None, rows=ROWS, evaluates=False):
    """Return the history of fit, and of evaluate if asked for, and the weights."""
    x, y = (array[:rows] for array in data())
    with strategy.scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=metric and [metric()])
    inputs = (x, y) if len(model.inputs) > 1 else x
    batches = tf.data.Dataset.from_tensor_slices((inputs, y)).batch(16)
    history = model.fit(batches, epochs=2, verbose=0).history
    if evaluates:
        results = model.evaluate(batches, verbose=0, return_dict=True)
        history |= {f"test {name}": value for name, value in results.items()}
    return history, model.get_weights()


def check_equal(ones, twos):
    assert list(ones[0]) == list(twos[0])
    for name in ones[0]:
        np.testing.assert_allclose(ones[0][name], twos[0][name], rtol=2e-5, err_msg=name)
    for one, two in zip(ones[1], twos[1], strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: mlp(OwnStep),
        lambda: mlp(KerasLoss),
        lambda: mlp(Trackers),
        lambda: mlp(Guide),
        lambda: mlp(OwnLoss, kernel_regularizer="l2"),
        lambda: mlp(AddedToLoss),
        endpoint,
    ],
    ids=["mean by hand", "Keras' loss", "trackers", "guide", "compute_loss", "added", "endpoint"],
)
def test_own_losses_are_those_of_one_replica(make, one_device, mirrored):
    loss = None if make is endpoint else "mse"
    metric = None if make is endpoint else keras.metrics.MeanAbsoluteError
    ones = fitted(one_device, make, loss, metric, evaluates=True)
    check_equal(ones, fitted(mirrored, make, loss, metric, evaluates=True))
    assert ones[0]["loss"][1] < ones[0]["loss"][0]


def test_the_gradient_of_a_vector_is_warned_of(one_device, mirrored, caplog):
    replica_step._warn_of_sum.cache_clear()
    fitted(one_device, lambda: mlp(LossOfEachRow))
    fitted(mirrored, lambda: mlp(OwnStep))
    assert "takes the gradient of a tensor" not in caplog.text
    fitted(mirrored, lambda: mlp(LossOfEachRow))
    assert caplog.text.count("takes the gradient of a tensor of shape (None,)") == 1


@pytest.mark.parametrize("sync", ["sum", "replicas", "bfloat16"])
def test_a_mean_by_hand_obeys_the_policy(sync, one_device):
    """A Keras loss in Keras' own step gets the same gradients."""

    strategy = tfdist.make_strategy("mirrored", devices="cpu:0,cpu:1", sync=sync)
    own = fitted(strategy, lambda: mlp(KerasLoss))[1]
    for one, two in zip(own, fitted(strategy, mlp)[1], strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)


def test_two_optimizers_in_one_step(one_device, mirrored):
    def trained(strategy):
        with strategy.scope():
            model = Gan()
            model.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.2))
        history = model.fit(*data(), batch_size=16, epochs=2, shuffle=False, verbose=0).history
        return history, model.generator.get_weights() + model.critic.get_weights()

    check_equal(trained(one_device), trained(mirrored))


def test_losses_of_outputs_count_by_rows(one_device, mirrored):
    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input([4])
        outputs = [keras.layers.Dense(1, name=name)(inputs) for name in "ab"]
        return keras.Model(inputs, dict(zip("ab", outputs, strict=True)))

    def trained(strategy):
        x, y = data(2)
        with strategy.scope():
            model = make()
            model.compile("sgd", {"a": "mse", "b": "mae"}, loss_weights={"a": 1.0, "b": 0.5})
        y = {"a": y[:, :1], "b": y[:, 1:]}
        keywords = {"batch_size": 16, "verbose": 0}
        history = model.fit(
            x, y, epochs=2, shuffle=False, validation_data=(x, y), **keywords
        ).history
        return history, model.get_weights()

    ones = trained(one_device)
    assert {"a_loss", "val_b_loss"} <= set(ones[0])
    check_equal(ones, trained(mirrored))


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_reductions_in_own_steps(reduction, one_device, mirrored):
    class Reduced(OwnStep):
        def loss_of(self, y, prediction):
            weights = tf.abs(y[:, 0])
            return 0.05 * mse(reduction=reduction)(y, prediction, sample_weight=weights)

        def logs(self, loss, y, prediction):
            return {"loss": loss}

    check_equal(*(fitted(s, lambda: mlp(Reduced), evaluates=True) for s in (one_device, mirrored)))


def history_of_epoch(history):
    return {name: value for name, (value,) in history.items()}


def check_logged(expected, directory, with_steps):
    """Check that each entry of a result has curves and columns of its own."""
    *steps, epoch = read_json_lines(directory / "history.jsonl")
    others = {"step": 0, "seconds": epoch["seconds"], "time": epoch["time"]}
    assert epoch == expected | others | {"learning_rate": pytest.approx(0.01)}
    names = {name for name in expected if not name.startswith("val_")}
    assert [set(line) for line in steps] == [{"batch", *(f"batch_{name}" for name in names)}][
        : int(with_steps)
    ]
    found = read_run(directory)
    assert set(found.metrics) == {"learning_rate", *names}
    for split, prefix in (("train", ""), ("validation", "val_")):
        curves = tensorboard_events.scalars([directory / split], Reader())
        for name in names:
            (point,) = curves[f"epoch_{name}"]
            assert point.value == pytest.approx(expected[prefix + name], rel=1e-6)
        if prefix:
            assert {f"evaluation_{name}_vs_iterations" for name in names} <= set(curves)
        elif with_steps:
            assert {f"batch_{name}" for name in names} <= set(curves)


class ByThreshold(keras.metrics.Metric):
    """A metric with a dict as its result."""

    def __init__(self):
        super().__init__(name="by_threshold")
        self.high = self.add_variable([], "zeros", name="high")
        self.rows = self.add_variable([], "zeros", name="rows")

    def update_state(self, y, prediction, sample_weight=None):
        self.high.assign_add(ops.sum(ops.cast(prediction > 0.1, "float32")))
        self.rows.assign_add(ops.cast(ops.shape(prediction)[0], "float32"))

    def result(self):
        return {"high": self.high, "share": self.high / self.rows}


@pytest.mark.parametrize("eager", [False, True])
def test_results_that_are_no_scalars(eager, one_device, mirrored, tmp_path):
    def trained(strategy):
        x, y = (array[:17] if eager else array for array in data())  # two batches, or three
        with strategy.scope():
            model = mlp()
            vector = keras.metrics.Precision(thresholds=[0.1, 0.5], name="precision")
            f1 = keras.metrics.F1Score(average=None, name="f1")
            metrics = [vector, f1, ByThreshold()]
            model.compile("sgd", "mse", metrics=metrics, run_eagerly=eager)
        directory = tmp_path / type(strategy).__name__
        callbacks = [
            keras.callbacks.CSVLogger(directory / "log.csv"),
            tfdist.TensorBoard(directory, graph=False, update_freq=1 if eager else "epoch"),
            tfdist.Log([JsonlWriter(directory / "history.jsonl")], every=2 if eager else None),
            tfdist.BackupAndRestore(directory / "backup", save_freq=1 if eager else "epoch"),
        ]
        directory.mkdir(exist_ok=True)
        y = (y > 0.5).astype("float32")
        options = {"batch_size": 16, "validation_data": (x, y), "validation_batch_size": 16}
        history = model.fit(x, y, shuffle=False, verbose=2, callbacks=callbacks, **options).history
        check_logged(named_scalars(history_of_epoch(history)), directory, eager)
        if not eager:
            values = model.evaluate(x, y, batch_size=16, verbose=0)
            history["test"] = np.hstack([np.ravel(v) for v in values])
        return history, (directory / "log.csv").read_text().splitlines()

    ones = trained(one_device)
    twos = trained(mirrored)
    check_equal((ones[0], []), (twos[0], []))
    assert ones[1][0] == twos[1][0]
    assert len(twos[1]) == 2


class Stateful(keras.metrics.Metric):
    """A metric with one state, which `new` computes from the old one and the errors of a batch."""

    start = 0.0

    def __init__(self):
        super().__init__(name=type(self).__name__)
        self.state = self.add_variable([], "zeros", name="state")
        self.reset_state()

    def update_state(self, y, prediction, sample_weight=None):
        self.state.assign(self.new(self.state, ops.abs(y - prediction)))

    def reset_state(self):
        self.state.assign(self.start)

    def result(self):
        return ops.convert_to_tensor(self.state)


class Largest(Stateful):
    def new(self, state, errors):
        return ops.maximum(state, ops.max(errors))


class Smallest(Largest):
    start = float("inf")

    def new(self, state, errors):
        return ops.minimum(state, ops.min(errors))


class Running(Stateful):
    def new(self, state, errors):
        return 0.9 * state + 0.1 * ops.mean(errors)


class Last(Stateful):
    def new(self, state, errors):
        return ops.mean(errors)


class SumOfBatchMeans(Stateful):
    def new(self, state, errors):
        return state + ops.mean(errors)


class AboveThree(Largest):
    start = 3.0


class Plain(Stateful):
    tfdist_sums_rows = True

    def new(self, state, errors):
        return state + ops.sum(errors)


class FromOne(Plain):
    start = 1.0


class BatchesAbove(Stateful):
    """A metric that no data in [0, 1] tell from a sum over rows."""

    def new(self, state, errors):
        return state + ops.cast(ops.max(errors) > 1.5, "float32")


class Inner(keras.metrics.Metric):
    """A metric that keeps the mean of each batch's mean error in a metric of its own."""

    tfdist_sums_rows = True

    def __init__(self):
        super().__init__(name="Inner")
        self.mean = keras.metrics.Mean()
        self.state = self.mean.total

    def update_state(self, y, prediction, sample_weight=None):
        self.mean.update_state(ops.mean(ops.abs(y - prediction)))

    def result(self):
        return self.mean.result()


class KerasVariable(keras.metrics.Metric):
    """A metric whose state has no aggregation, so that it cannot be summed."""

    tfdist_sums_rows = True

    def __init__(self):
        super().__init__(name=type(self).__name__)
        self.state = keras.Variable(0.0, trainable=False)

    def update_state(self, y, prediction, sample_weight=None):
        self.state.assign(self.state + ops.sum(ops.abs(y - prediction)))

    def reset_state(self):
        self.state.assign(0.0)

    def result(self):
        return ops.convert_to_tensor(self.state)


class TfVariable(KerasVariable):
    def __init__(self):
        super().__init__()
        self.values = [tf.Variable(0.0, trainable=False)]

    def update_state(self, y, prediction, sample_weight=None):
        self.values[0].assign_add(ops.sum(ops.abs(y - prediction)))

    def reset_state(self):
        self.values[0].assign(0.0)

    def result(self):
        return tf.identity(self.values[0])


class Perplexity(keras.metrics.MeanSquaredError):
    """A metric whose state Keras updates."""

    def __init__(self):
        super().__init__(name="perplexity")
        self.state = self.total

    def result(self):
        return ops.exp(super().result())


def root_of_mean(y, prediction):
    return ops.sqrt(ops.mean(ops.square(y - prediction)))


def mean_by_hand(y, prediction):
    return ops.mean(ops.square(y - prediction))


def declared_mean_by_hand(y, prediction):
    return ops.mean(ops.square(y - prediction))


declared_mean_by_hand.tfdist_sums_rows = True


def masked_mean(y, prediction):
    mask = ops.cast(y > 1.5, "float32")
    return ops.sum(mask * ops.abs(y - prediction)) / ops.maximum(ops.sum(mask), 1.0)


def mean_without_nan(y, prediction):
    known = ops.logical_not(ops.isnan(ops.where(y > 1.0, np.nan, y)))
    error = ops.where(known, ops.abs(y - prediction), 0.0)
    return ops.sum(error) / ops.maximum(ops.sum(ops.cast(known, "float32")), 1.0)


SUMS = (Plain, FromOne, Inner, Perplexity)
METRICS = (
    *SUMS,
    *(Largest, Smallest, AboveThree, Running, Last, SumOfBatchMeans),
    *(BatchesAbove, KerasVariable, TfVariable),
)
FUNCTIONS = (
    *(root_of_mean, mean_by_hand, declared_mean_by_hand, masked_mean, mean_without_nan),
    keras.losses.dice,
    keras.losses.Dice(),
    keras.losses.MeanSquaredError(name="of_keras"),
)


def test_metrics_are_those_of_one_replica(one_device, mirrored):
    """The states of those that do not declare sums, and only of those, are made of all rows."""

    def trained(strategy, made):
        x, y = data()
        with strategy.scope():
            model = mlp()
            made.extend(metric() for metric in METRICS)
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[*made, *FUNCTIONS])
        keywords = {"batch_size": 16, "verbose": 0, "validation_data": (x, y)}
        history = model.fit(x, y, epochs=2, shuffle=False, **keywords).history
        return history, model.get_weights()

    made: list = []
    check_equal(trained(one_device, []), trained(mirrored, made))
    assert tuple(type(m) for m in made if not is_gathered(m.state)) == SUMS


def test_ragged_targets_are_gathered_and_sparse_ones_refused(mirrored):
    class Values(Stateful):
        def update_state(self, values):
            values = values.values if isinstance(values, tf.RaggedTensor) else values
            self.state.assign(ops.maximum(self.state, ops.max(values)))

    with mirrored.scope():
        metric = Values()

    def replica(convert):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        values = convert(tf.cast(tf.fill([replica + 1, 2], replica + 3), tf.float32))
        with weighted_step(0.5):
            MetricUpdates().update(metric, type(metric).update_state.__get__(metric), (values,), {})
        return tf.identity(copies(metric.state)[0])

    states = tf.function(lambda: mirrored.run(replica, args=(tf.RaggedTensor.from_tensor,)))()
    assert [float(x) for x in mirrored.experimental_local_results(states)] == [4.0, 4.0]
    with pytest.raises(ValueError, match=r"metric Values: expected dense or ragged.*SparseTensor"):
        tf.function(lambda: mirrored.run(replica, args=(tf.sparse.from_dense,)))()


def test_rows_of_all_types_are_gathered(mirrored):
    types = [
        *("bool", "bfloat16", "float32", "float64"),
        *("uint8", "int16", "uint32", "int64"),
    ]

    def replica():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        own = tf.reshape(replica, [1])
        return [tfdist.all_gather_rows(tf.cast(own, dtype)) for dtype in types]

    for dtype, rows in zip(types, tf.function(lambda: mirrored.run(replica))(), strict=True):
        for gathered in mirrored.experimental_local_results(rows):
            assert gathered.dtype == dtype
            np.testing.assert_array_equal(tf.cast(gathered, tf.int32), [0, 1])


def test_gathered_rows_keep_their_static_shape(mirrored):
    """Metrics of images read the rank of their inputs, and the number of channels."""

    def replica(x):
        images = tf.reshape(tf.repeat(x, 8), [-1, 2, 2, 2])
        assert tfdist.all_gather_rows(images).shape.as_list() == [None, 2, 2, 2]
        unknown = tf.numpy_function(lambda x: x, [images], images.dtype)
        return tf.shape(tfdist.all_gather_rows(unknown))

    run = tf.function(lambda: mirrored.run(replica, (tf.range(3.0),)))
    for shape in mirrored.experimental_local_results(run()):
        assert shape.numpy().tolist() == [6, 2, 2, 2]


def test_a_declared_aggregation_counts(one_device, mirrored):
    class Rows(Stateful):
        """Count the rows of the first replica."""

        def __init__(self):
            super().__init__()
            self.state = self.add_variable([], "zeros", aggregation="only_first_replica")

        def new(self, state, errors):
            return state + ops.cast(ops.shape(errors)[0], "float32")

    history, _ = fitted(mirrored, mlp, metric=Rows)
    assert history["Rows"] == [17.0, 17.0]  # 8, 8 and 1


def test_a_scalar_for_a_state_that_is_no_sum_is_a_mean_of_rows(one_device, mirrored):
    class Peak(Largest):
        def update_state(self, loss):
            self.state.assign(ops.maximum(self.state, loss))

    class Tracked(OwnStep):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.error = Peak()

        def logs(self, loss, y, prediction):
            self.error.update_state(loss)
            return {"peak": self.error.result()}

    check_equal(*(fitted(s, lambda: mlp(Tracked), evaluates=True) for s in (one_device, mirrored)))


def test_rows_that_depend_on_each_other_are_gathered(one_device, mirrored):
    """A loss is a quotient of sums over the rows, as Dice's; another compares own with all rows."""

    def compared(y, prediction):
        every = tfdist.all_gather_rows(prediction)
        return tf.reduce_mean(tf.square(y - prediction + 0.1 * tf.reduce_sum(every)))

    def quotient(y, prediction):
        y = tfdist.all_gather_rows(y)
        prediction = tfdist.all_gather_rows(prediction)
        return tf.reduce_sum(tf.square(y - prediction)) / tf.reduce_sum(1.0 + tf.square(prediction))

    for loss in (quotient, compared):
        options = {"rows": 31, "evaluates": loss is quotient}  # the last batch has 15 rows
        ones = fitted(one_device, mlp, loss, **options)
        check_equal(ones, fitted(mirrored, mlp, loss, **options))
        assert ones[0]["loss"][1] < ones[0]["loss"][0]


class Centered(keras.layers.Layer):
    """Subtract the mean of all rows, which each replica makes of sums over all replicas."""

    def call(self, x):
        context = tf.distribute.get_replica_context()
        sums = tf.reduce_sum(x, 0), tf.cast(tf.shape(x)[0], x.dtype)
        if context is not None:
            sums = context.all_reduce("SUM", sums)
        return x - sums[0] / sums[1]


class GatheredPeak(keras.layers.Layer):
    """Divide by one plus the largest square among all rows."""

    def call(self, x):
        return x / (1.0 + ops.max(ops.square(tfdist.all_gather_rows(x)), 0))


class AddedLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.5 * ops.mean(ops.square(x)))
        return x


def with_collectives(cls=keras.Model):
    """Return a model in whose forward pass replicas meet several times, between its losses."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input([4])
    x = keras.layers.Dense(5, activity_regularizer="l2")(inputs)
    x = keras.layers.BatchNormalization(synchronized=True)(AddedLoss()(x))
    x = GatheredPeak()(keras.layers.Dense(5, activity_regularizer="l1")(x))
    x = keras.layers.Dense(4, "tanh")(Centered()(AddedLoss()(x)))
    return cls(inputs, keras.layers.Dense(1)(x))


def test_gradients_and_losses_are_right_where_a_model_has_collectives(one_device, mirrored):
    """Gradients that cross replicas keep their weights, and each replica keeps its own losses."""

    def trained(strategy):
        x, y = data()
        with strategy.scope():
            model = with_collectives()
            model.compile(keras.optimizers.SGD(0.1), mse(reduction="mean_with_sample_weight"))
        rows = {"sample_weight": np.abs(x[:, 0]) + 0.1, "batch_size": 16, "verbose": 0}
        history = model.fit(x, y, epochs=2, shuffle=False, **rows).history
        history["test"] = model.evaluate(x, y, **rows)
        return history, model.get_weights()

    ones = trained(one_device)
    check_equal(ones, trained(mirrored))
    assert ones[0]["loss"][1] < ones[0]["loss"][0]


@pytest.mark.parametrize("sync", ["sum", "replicas"])
def test_gradients_that_cross_replicas_obey_the_policy(sync):
    """A loss of gathered rows is the same on all replicas: its gradients are summed like them."""
    strategy = tfdist.make_strategy("mirrored", devices="cpu:0,cpu:1", sync=sync)

    def gathered(y, prediction):
        y, prediction = tfdist.all_gather_rows(y), tfdist.all_gather_rows(prediction)
        return tf.reduce_mean(tf.square(y - prediction))

    x, y = (array[:3] for array in data())  # 2 rows and 1
    with strategy.scope():
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1), gathered)
    before = model.get_weights()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(y - model(x)))
    grads = tape.gradient(loss, model.trainable_weights)
    model.fit(x, y, batch_size=3, verbose=0)
    factor = 2.0 if sync == "sum" else 1.0
    for old, new, grad in zip(before, model.get_weights(), grads, strict=True):
        np.testing.assert_allclose(new, old - 0.1 * factor * grad, rtol=1e-4, atol=1e-6)


class Decorated(Trackers):
    """A step and helpers in `tf.function`, one with Python control flow on tensors."""

    @tf.function
    def train_step(self, data):
        if tf.shape(data[0])[0] > 100:
            tf.print("many rows")
        x, y = data
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            loss = self.loss_of(y, prediction) + sum(self.losses)
        self.update(tape.gradient(loss, self.trainable_weights))
        self.track(y, prediction)
        return {"loss": self.tracker.result(), "mae": self.error.result()}

    @tf.function
    def update(self, grads):
        self.optimizer.apply(grads, self.trainable_weights)

    @tf.function
    def track(self, y, prediction):
        self.tracker.update_state(sum(self.losses))  # the update has been made
        self.error.update_state(y, prediction)


def test_steps_and_helpers_may_be_tf_functions(one_device, mirrored):
    ones = fitted(one_device, lambda: with_collectives(Decorated))
    check_equal(ones, fitted(mirrored, lambda: with_collectives(Decorated)))


@pytest.mark.parametrize("compiled", [False, True])
def test_an_update_in_a_branch_is_refused(compiled, mirrored):
    class Branch(OwnStep):
        def train_step(self, data):
            def update():
                OwnStep.train_step(self, data)
                return 0

            if compiled:
                tf.function(update, jit_compile=True)()
            else:
                tf.cond(self.optimizer.iterations > 0, update, lambda: 0)
            return {}

    with pytest.raises(ValueError, match=r"train_step.*tf\.cond.*gradient_accumulation_steps"):
        fitted(mirrored, lambda: mlp(Branch))


class Direct(OwnStep):
    """Update the weights without the optimizer, from the second step on."""

    by_keras = True
    gathers = False

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
        grads = tape.gradient(loss, self.trainable_weights)
        if self.gathers:
            grads = tf.distribute.get_replica_context().all_reduce("MEAN", grads)
        self.calls.assign_add(1)
        factor = tf.where(self.calls > 1, 0.1, 0.0)
        for weight, grad in zip(self.trainable_weights, grads, strict=True):
            (weight if self.by_keras else weight.value).assign_sub(factor * grad)
        return {}

    def __init__(self, *args):
        super().__init__(*args)
        self.calls = self.add_weight(dtype="int32", initializer="zeros", trainable=False)


class DirectByTensorFlow(Direct):
    by_keras = False


class DirectFromSums(Direct):
    gathers = True


def test_weights_that_a_step_sets_must_be_equal_on_all_replicas(mirrored):
    remedy = r"'dense\w*/kernel'.*replica 1.*replica 0.*optimizer\.apply"
    for model in (Direct, DirectByTensorFlow):
        with pytest.raises(ValueError, match=remedy):
            fitted(mirrored, lambda model=model: mlp(model))
    before = mlp().get_weights()
    after = fitted(mirrored, lambda: mlp(DirectFromSums))[1]
    assert np.abs(before[0] - after[0]).max() > 0


def test_compile_outside_of_the_scope_is_compile_inside(mirrored):
    def trained(inside):
        with mirrored.scope():
            model = mlp()
            if inside:
                model.compile("adam", "mse", metrics=["mae"])
        if not inside:
            model.compile("adam", "mse", metrics=["mae"])
        return model.fit(*data(), batch_size=16, shuffle=False, verbose=0).history, []

    check_equal(trained(True), trained(False))


def test_a_metric_that_is_made_outside_of_the_scope_is_named(mirrored):
    metric = Largest()
    with mirrored.scope():
        model = mlp()
        model.compile("sgd", "mse", metrics=[metric])
    with pytest.raises(ValueError, match=r"in the scope.*'Largest/state', made outside of it: 2"):
        model.fit(*data(), batch_size=16, verbose=0)


@pytest.mark.parametrize("text", [False, True])
def test_logs_that_are_no_numbers_are_named(text, mirrored):
    class Odd(OwnStep):
        def logs(self, loss, y, prediction):
            return {"word": tf.constant("a")} if text else 7.0

    message = "returned a value of dtype string" if text else "returned float"
    with pytest.raises(TypeError, match=f"train_step {message}.*expected a dict of names"):
        fitted(mirrored, lambda: mlp(Odd))


def test_all_optimizers_of_a_step_resume(mirrored, tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise InterruptedError

    def trained(*callbacks):
        with mirrored.scope():
            model = Gan()
            model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02))
        model.fit(*data(), batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        return model.generator.get_weights() + model.critic.get_weights()

    with pytest.raises(InterruptedError):
        trained(tfdist.BackupAndRestore(tmp_path), Stop())
    for one, two in zip(trained(), trained(tfdist.BackupAndRestore(tmp_path)), strict=True):
        np.testing.assert_array_equal(one, two)


def test_statistics_of_no_rows_are_no_gradients(mirrored):
    """BatchNormalization divides by the number of rows, which is 0 on a replica."""
    with mirrored.scope():
        model = keras.Sequential(
            [keras.Input([4]), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse")
    history = model.fit(*data(), batch_size=16, epochs=2, shuffle=False, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert all(np.isfinite(w).all() for w in model.get_weights())


@pytest.mark.parametrize("watched", [False, True])
def test_steps_know_the_number_of_rows_of_batches_of_a_static_size(one_device, mirrored, watched):
    x, y = data()
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(16, drop_remainder=True)
    callbacks = [Steps()] * watched

    def trained(strategy):
        with strategy.scope():
            model = mlp(StaticRows)
            model.compile(keras.optimizers.SGD(0.1))
        history = model.fit(batches, epochs=2, verbose=0, callbacks=callbacks).history
        if not watched:
            history |= {"test": model.evaluate(batches, verbose=0)}
        return history, model.get_weights()

    check_equal(trained(one_device), trained(mirrored))


class TwoSizes(keras.Model):
    """Train on few rows with labels and more without, as in Keras' example of SimCLR."""

    def train_step(self, data):
        unlabeled, (x, y) = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            loss += tf.reduce_mean(tf.abs(self(unlabeled, training=True)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


def test_batches_of_rows_with_labels_and_more_without_train_to_one_replicas_numbers(
    one_device, mirrored
):
    x, y = data()
    pairs = tf.data.Dataset.from_tensor_slices((x[:12], y[:12])).batch(4, drop_remainder=True)
    unlabeled = tf.data.Dataset.from_tensor_slices(x[::-1]).batch(8, drop_remainder=True)
    batches = tf.data.Dataset.zip(unlabeled, pairs)

    def trained(strategy):
        with strategy.scope():
            model = mlp(TwoSizes)
            model.compile(keras.optimizers.SGD(0.1))
        return model.fit(batches, epochs=2, verbose=0).history, model.get_weights()

    check_equal(trained(one_device), trained(mirrored))


@pytest.mark.parametrize("watched", [False, True])
def test_one_model_trains_on_batches_of_several_static_sizes(one_device, mirrored, watched):
    examples = tf.data.Dataset.from_tensor_slices(data())
    callbacks = [Steps()] * watched

    def trained(strategy):
        with strategy.scope():
            model = mlp(OwnStep)
            model.compile(keras.optimizers.SGD(0.1))
        logs = {}
        for size in (8, 4, 16):
            batches = examples.batch(size, drop_remainder=True)
            logs[f"loss {size}"] = model.fit(batches, verbose=0, callbacks=callbacks).history[
                "loss"
            ]
            if not watched:
                logs[f"test loss {size}"] = model.evaluate(batches, verbose=0)
        return logs, model.get_weights()

    check_equal(trained(one_device), trained(mirrored))


def test_predict_refuses_arrays_of_different_numbers_of_rows(mirrored):
    with mirrored.scope():
        inputs = [keras.Input([2]), keras.Input([2])]
        model = keras.Model(inputs, keras.layers.Dense(1)(inputs[0]))
    batches = tf.data.Dataset.from_tensors(((tf.zeros([8, 2]), tf.zeros([4, 2])),))
    with pytest.raises(
        ValueError, match=r"same number of rows, received shapes \(8, 2\), \(4, 2\)"
    ):
        model.predict(batches, verbose=0)
