"""Define models whose results do not depend on the order of the workers' steps, and helpers."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.parity.cases import CROSSENTROPY, data, dataset, mlp

ROWS = 50
BATCH = 4  # 13 batches, the last one of 2
STEPS = -(-ROWS // BATCH)
FEATURES = {}


def feature(function):
    FEATURES[function.__name__] = function
    return function


def same(a, b, tolerance=1e-6):
    for x, y in zip(keras.tree.flatten(a), keras.tree.flatten(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


def compiled(
    strategy, model=mlp, optimizer="adam", loss=CROSSENTROPY, metrics=("accuracy",), **kwargs
):
    with strategy.scope():
        built = model()
        built.compile(
            optimizer() if callable(optimizer) else optimizer, loss, metrics=list(metrics), **kwargs
        )
    return built


def local(model, like, **kwargs):
    """Return a model of this process alone with the same weights."""
    copy = like()
    copy.build((None, *model.input_shape[1:]))
    copy.set_weights(model.get_weights())
    copy.compile("sgd", **kwargs)
    return copy


def trains(strategy, train=None, *, rows=60, steps=5, epochs=6, **kwargs):
    """Train a classifier, check that it learns and counts each step; return model and history."""
    model = compiled(strategy, **kwargs)
    history = model.fit(
        *(train if isinstance(train, tuple) else [train or dataset(*data(rows))]),
        epochs=epochs,
        verbose=0,
    ).history
    assert all(np.all(np.isfinite(v)) for v in history.values()), history
    assert history["loss"][-1] < history["loss"][0], history
    assert int(model.optimizer.iterations.numpy()) == epochs * steps, model.optimizer.iterations
    return model, history


# --- A model that counts --------------------------------------------------------------------------
@keras.saving.register_keras_serializable()
class Once(keras.metrics.Metric):
    """Count the examples, whose numbers are the labels, that were seen exactly once."""

    def __init__(self, rows=ROWS, name="once", **kwargs):
        super().__init__(name=name, **kwargs)
        self.rows = rows
        self.counts = self.add_variable((rows,), "zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ids = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
        self.counts.assign_add(
            tf.math.bincount(ids, minlength=self.rows, maxlength=self.rows, dtype=tf.float32)
        )

    def result(self):
        return tf.reduce_sum(tf.cast(tf.equal(self.counts, 1.0), tf.float32))


def mean_output(y_true, y_pred):
    return y_pred


def one_weight():
    return keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )


def sgd(rate=1.0, **kwargs):
    return lambda: keras.optimizers.SGD(rate, **kwargs)


def counter(strategy, optimizer=sgd(), rows=ROWS, **kwargs):
    """Return a model with one weight whose gradient is 1 for any batch of ones.

    After N steps of SGD the weight is -N exactly.
    """
    return compiled(strategy, one_weight, optimizer, mean_output, metrics=[Once(rows)], **kwargs)


def weight(model):
    return float(model.get_weights()[0].item())


def numbered(rows=ROWS):
    return np.ones((rows, 1), "float32"), np.arange(rows, dtype="float32")[:, None]


def batches(rows=ROWS, batch=BATCH):
    return dataset(*numbered(rows), batch=batch)


def counts(strategy, *train, epochs=2, steps=STEPS, rows=ROWS, model=None, **kwargs):
    """Check that every step counts once in weight and optimizer.

    Every example counts once in each epoch's metrics.
    """
    model = model or counter(strategy, rows=rows)
    history = model.fit(*train, epochs=epochs, verbose=0, **kwargs).history
    result = weight(model), int(model.optimizer.iterations.numpy()), history["once"]
    assert result == (-epochs * steps, epochs * steps, [rows] * epochs), result
    return model


def raises(kind, pattern, function, *args, seconds=60.0, **kwargs):
    """Return the error of a call, which must be raised within some seconds."""
    began = time.monotonic()
    with pytest.raises(kind, match=f"(?s){pattern}") as caught:
        function(*args, **kwargs)
    assert time.monotonic() - began < seconds
    return caught.value
