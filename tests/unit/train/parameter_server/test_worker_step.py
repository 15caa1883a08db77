"""Test what stands for variables in steps that XLA compiles on workers of parameter servers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.keras_compat import replaced_values
from tfdist.train.parameter_server.worker_step import GivenValue


def gradient(stands_for: keras.Variable, trainable: bool):
    """Return the gradient of the sum of squares, which a compiled function computes."""

    @tf.function(jit_compile=True, autograph=False)
    def compiled(value):
        with replaced_values([stands_for], [GivenValue(value, trainable)]):
            with tf.GradientTape() as tape:
                loss = keras.ops.sum(stands_for * stands_for)
            return tape.gradient(loss, [stands_for])[0]

    return compiled(tf.constant([5.0, 7.0]))


@pytest.mark.parametrize("scope", [False, True])
def test_a_tape_returns_the_gradient_of_a_value_for_its_variable(scope, mirrored):
    if scope:
        with mirrored.scope():
            assert gradient(keras.Variable([2.0, 3.0]), True).numpy().tolist() == [10.0, 14.0]
    else:
        assert gradient(keras.Variable([2.0, 3.0]), True).numpy().tolist() == [10.0, 14.0]


def test_no_gradient_passes_an_assignment():
    statistic = keras.Variable([2.0, 3.0], trainable=False)

    @tf.function(jit_compile=True, autograph=False)
    def compiled(x):
        with replaced_values([statistic], [GivenValue(tf.constant([5.0, 7.0]), False)]):
            with tf.GradientTape() as tape:
                tape.watch(x)
                statistic.assign(statistic * x)
                quotient = x / statistic
            return tape.gradient(quotient, x)

    np.testing.assert_allclose(compiled(tf.constant([2.0, 2.0])), [1 / 10, 1 / 14], rtol=1e-6)


def test_a_tape_watches_no_frozen_variable():
    assert gradient(keras.Variable([2.0, 3.0]), False) is None


def test_an_assignment_changes_the_value_and_not_the_variable():
    weight = keras.Variable([2.0, 3.0])
    value = GivenValue(tf.constant([5.0, 7.0]), False)
    with replaced_values([weight], [value]):
        weight.assign(weight + 1.0)
        np.testing.assert_array_equal(tf.convert_to_tensor(weight), [6.0, 8.0])
    assert value.is_assigned
    np.testing.assert_array_equal(weight.numpy(), [2.0, 3.0])
