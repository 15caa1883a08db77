"""Check that each mistake raises one error that names it, and that the next fit is clean."""

import traceback

import keras
import numpy as np
import tensorflow as tf

from tests.cluster.scripts.ps.base import (
    BATCH,
    batches,
    compiled,
    counter,
    counts,
    feature,
    mean_output,
    numbered,
    one_weight,
    raises,
    sgd,
)
from tests.cluster.scripts.ps.models import OwnStep
from tests.parity.cases import CROSSENTROPY, data, dataset, mlp


@feature
def error_compiled_outside_of_the_scope(strategy):
    with strategy.scope():
        model = mlp()
    for optimizer in (
        keras.optimizers.SGD(),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    ):
        model.compile(optimizer, CROSSENTROPY)
        raises(
            ValueError,
            "optimizer .* was made outside.*strategy.scope",
            model.fit,
            *data(),
            verbose=0,
        )
    optimizer = keras.optimizers.SGD()
    with strategy.scope():
        model.compile(optimizer, CROSSENTROPY)
    raises(
        ValueError, "optimizer .* was made outside.*strategy.scope", model.fit, *data(), verbose=0
    )


@feature
def error_model_made_outside_of_the_scope(strategy):
    model = mlp()
    with strategy.scope():
        model.compile("adam", CROSSENTROPY)
    raises(ValueError, "expected a model.*strategy.scope", model.fit, *data(), verbose=0)


@feature
def error_run_eagerly(strategy):
    model = compiled(strategy, run_eagerly=True)
    for method in (model.fit, model.evaluate, model.train_on_batch):
        raises(ValueError, "run_eagerly=True under parameter_server.*one_device", method, *data())


@feature
def error_data_without_end(strategy):
    model = counter(strategy)
    endless = batches().repeat()
    raises(ValueError, "fit: .*infinite.*steps_per_epoch", model.fit, endless)
    raises(
        ValueError,
        "fit: .*infinite.*validation_steps",
        model.fit,
        batches(),
        validation_data=endless,
    )
    raises(ValueError, "evaluate: .*infinite.*steps", model.evaluate, endless)
    raises(ValueError, "predict: .*infinite.*steps", model.predict, endless)


@feature
def error_data_of_a_function(strategy):
    model = counter(strategy)
    distributed = strategy.distribute_datasets_from_function(lambda context: batches())
    for method in (model.fit, model.evaluate, model.predict):
        raises(
            ValueError,
            f"{method.__name__}: x is .*distribute_datasets_from_function.*Pass the data set",
            method,
            distributed,
        )
    raises(
        ValueError, "fit: validation_data is ", model.fit, batches(), validation_data=distributed
    )


@feature
def error_stateful_layer(strategy):
    def build():
        layer = keras.layers.SimpleRNN(2, stateful=True, name="memory")
        return keras.Sequential([keras.Input(batch_shape=(4, 3, 1)), layer])

    model = compiled(strategy, build, "sgd", "mse", ())
    x = np.ones([4, 3, 1], "float32")
    for method, arguments in ((model.fit, (x, x[:, 0])), (model.predict, (x,))):
        raises(ValueError, "stateful=True in memory, under 2 workers", method, *arguments)


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable([], "zeros")

    def update_state(self, y, prediction, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(prediction)))

    def result(self):
        return self.value


@feature
def error_metric_that_is_no_sum(strategy):
    with strategy.scope():
        model = one_weight()
        model.compile("sgd", mean_output, metrics=[Largest()])
    for method in (model.fit, model.evaluate):
        raises(
            ValueError,
            "metric largest: parameter servers can only add.*received another one",
            method,
            batches(),
            verbose=0,
        )
    counts(strategy, batches())


def own_step(strategy, returned):
    model = compiled(strategy, lambda: OwnStep(one_weight().layers), sgd(), mean_output, ())
    model.returned = returned
    return model


@feature
def error_step_that_returns_no_dict(strategy):
    model = own_step(strategy, lambda loss, y: loss)
    raises(TypeError, "train_step returned .*expected a dict", model.fit, batches(), verbose=0)
    counts(strategy, batches())


@feature
def error_of_python_in_a_step(strategy):
    def mistaken(loss, y):
        raise KeyError("a mistake of mine")

    error = raises(
        KeyError, "a mistake of mine", own_step(strategy, mistaken).fit, batches(), verbose=0
    )
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)][-1] == "mistaken"
    counts(strategy, batches())


@feature
def error_of_an_operation_in_a_step(strategy):
    x, good = data()
    y = np.where(np.arange(len(good)) == 30, 99, good)
    model = compiled(strategy)
    for given in (
        {"x": dataset(x, y)},
        {"x": x, "y": y},
        {"x": dataset(x, y).repeat(), "steps_per_epoch": 100},
    ):
        raises(
            tf.errors.InvalidArgumentError,
            "label value of 99",
            model.fit,
            **given,
            epochs=3,
            verbose=0,
        )
        history = model.fit(x, good, verbose=0).history
        assert np.isfinite(history["loss"][0])
    for method in (model.evaluate, model.train_on_batch):
        raises(tf.errors.InvalidArgumentError, "label value of 99", method, x, y)
    counts(strategy, batches())


@feature
def error_of_an_assertion_in_a_step(strategy):
    def asserting(loss, y):
        tf.debugging.assert_less(tf.reduce_max(y), 20.0, "labels are too great for me")
        return {"loss": loss}

    model = own_step(strategy, asserting)
    x, y = numbered()
    for given in ({"x": batches()}, {"x": x, "y": y, "batch_size": BATCH}):
        raises(
            tf.errors.InvalidArgumentError,
            "labels are too great for me",
            model.fit,
            **given,
            verbose=0,
        )
    counts(strategy, batches())


@feature
def error_in_the_data(strategy):
    bad = batches().map(
        lambda x, y: (tf.debugging.check_numerics(x / (30.0 - y), "a division of mine"), y)
    )
    model = counter(strategy)
    for method in (model.fit, model.evaluate):
        raises(tf.errors.InvalidArgumentError, "a division of mine", method, bad, verbose=0)

    def generated():
        yield from batches().take(5).as_numpy_iterator()
        raise OSError("a file of mine")

    raises(tf.errors.OpError, "a file of mine", model.fit, generated(), verbose=0)
    counts(strategy, batches())


@feature
def error_in_a_prediction(strategy):
    class Model(keras.Sequential):
        def predict_step(self, batch):
            tf.debugging.assert_less(batch, 20.0, "inputs are too great for me")
            return self(batch)

    with strategy.scope():
        model = Model(one_weight().layers)
    raises(
        tf.errors.InvalidArgumentError,
        "inputs are too great",
        model.predict,
        numbered()[1],
        batch_size=1,
        verbose=0,
    )
    counts(strategy, batches())
