"""Exercise steps that XLA compiles on the workers, and steps that it cannot compile."""

import logging

import keras
import tensorflow as tf

from tests.cluster.scripts.ps.base import (
    BATCH,
    batches,
    counter,
    counts,
    feature,
    numbered,
    sgd,
    trains,
    weight,
)


def is_compiled(function):
    """Return whether the graphs of a train, test or predict function have parts of XLA."""
    graphs = [getattr(graph, "function", graph).graph for graph in function._graphs.values()]
    return all("_XlaMustCompile" in str(graph.as_graph_def()) for graph in graphs)


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
    """Count all steps on data that workers read, and on data that the chief reads."""
    with Warnings() as lines:
        model = counts(strategy, batches(), model=counter(strategy, jit_compile=True))
        assert is_compiled(model.train_function)
        model.evaluate(batches(), verbose=0)
        assert is_compiled(model.test_function)
        counts(strategy, *numbered(), model=counter(strategy, jit_compile=True), batch_size=BATCH)
        scaled = counter(
            strategy,
            lambda: keras.optimizers.LossScaleOptimizer(sgd()(), initial_scale=8.0),
            jit_compile=True,
        )
        scaled.fit(batches(), verbose=0)
    assert (weight(scaled), lines) == (-float(len(list(batches()))), []), (weight(scaled), lines)


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
    ):
        with Warnings() as lines:
            trained, _ = trains(strategy, model=model, jit_compile=True)
        assert [reason in line for line in lines] == [True], (reason, lines)
        assert not is_compiled(trained.train_function)
