"""Exercise steps that XLA compiles on the workers, and steps that it cannot compile."""

import logging

import keras
import tensorflow as tf

from tests.cluster.scripts.ps.base import (
    BATCH,
    batches,
    compiled,
    counter,
    counts,
    feature,
    numbered,
    sgd,
    trains,
    weight,
)
from tests.parity.cases import data


def is_compiled(function):
    """Return whether the graphs of a train, test or predict function have parts of XLA."""
    graphs = [getattr(graph, "function", graph).graph for graph in function._graphs.values()]
    return all("_XlaMustCompile" in str(graph.as_graph_def()) for graph in graphs)


def with_dropout():
    layers = [keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((6,)), *layers])


class Warnings(logging.Handler):
    """Collect the log lines about XLA in a context."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        if "jit_compile" in record.getMessage():
            self.lines.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("tfdist").addHandler(self)
        return self.lines

    def __exit__(self, *_):
        logging.getLogger("tfdist").removeHandler(self)


@feature
def steps_compiled_by_xla(strategy):
    """Count all steps on data that workers read, and on data that the chief reads.

    XLA compiles each size of a batch: only the first data have two.
    """
    rows = 6 * BATCH
    with Warnings() as lines:
        model = counts(strategy, batches(), model=counter(strategy, jit_compile=True))
        assert is_compiled(model.train_function)
        model.evaluate(batches(rows), verbose=0)
        assert is_compiled(model.test_function)
        arrays = counter(strategy, rows=rows, jit_compile=True)
        counts(strategy, *numbered(rows), model=arrays, rows=rows, steps=6, batch_size=BATCH)
        assert is_compiled(arrays.train_function)
        scaled = counter(
            strategy,
            lambda: keras.optimizers.LossScaleOptimizer(sgd()(), initial_scale=8.0),
            jit_compile=True,
        )
        scaled.fit(batches(rows), verbose=0)
        assert is_compiled(scaled.train_function)
        _, history = trains(strategy, model=with_dropout, jit_compile=True)
        assert history["accuracy"][-1] > 0.5, history
    assert (weight(scaled), lines) == (-6.0, []), (weight(scaled), lines)


class Afterwards(keras.Model):
    """Train by steps that need the weights that they have updated."""

    def train_step(self, data):
        logs = super().train_step(data)
        return logs | {"weight": tf.reduce_sum(self.trainable_weights[0])}


class OfRate(keras.Model):
    """Train by steps that read what is the optimizer's, on a parameter server."""

    def train_step(self, data):
        rate = 1.0 * self.optimizer.learning_rate
        return super().train_step(data) | {"rate": rate}


def of_text():
    inputs = keras.Input((6,))
    length = keras.layers.Lambda(
        lambda x: tf.cast(tf.strings.length(tf.strings.as_string(x)), x.dtype)
    )
    return keras.Model(inputs, keras.layers.Dense(3)(inputs + 0.0 * length(inputs)))


class Pinned(keras.Model):
    """Train by steps that set a weight after its update."""

    def train_step(self, data):
        logs = super().train_step(data)
        self.trainable_weights[1].assign([1.0, 2.0, 3.0])
        return logs


class Unbuilt(keras.Model):
    """Make the layer's weights at the first call."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)


def normalized():
    layer = keras.layers.SpectralNormalization(keras.layers.Dense(3))
    return keras.Sequential([keras.Input((6,)), layer])


def of_class(kind):
    inputs = keras.Input((6,))
    return kind(inputs, keras.layers.Dense(3)(inputs))


@feature
def steps_that_xla_cannot_compile(strategy):
    """Train without XLA, with a line that says why."""
    for model, reason in (
        (of_text, "XLA has no kernel for AsString"),
        (lambda: of_class(Afterwards), "kernel' after the optimizer.apply that sets it"),
        (lambda: of_class(OfRate), "/learning_rate' of another process"),
        (lambda: of_class(Pinned), "bias' itself"),
        (normalized, "kernel' itself"),
    ):
        with Warnings() as lines:
            trained, _ = trains(strategy, model=model, jit_compile=True)
        assert [reason in line for line in lines] == [True], (reason, lines)
        assert not is_compiled(trained.train_function)
    with Warnings() as lines:
        model = compiled(strategy, Unbuilt, jit_compile=True)
        x, y = data(8)
        assert model.predict(x, verbose=0).shape == (8, 3)
        assert ["the model is not built" in line for line in lines] == [True], lines
        model.fit(x, y, verbose=0)
        assert is_compiled(model.train_function)
