"""Test the behaviour that all strategies of tfdist share."""

import gc

import keras
import pytest
import tensorflow as tf

from tfdist.strategies import base


def test_scope_without_a_reference_stays_entered(mirrored):
    mirrored.scope().__enter__()
    gc.collect()
    try:
        variable = keras.Variable([1.0])
        assert tf.distribute.get_strategy() is mirrored
    finally:
        base._entered[-1].__exit__(None, None, None)
    assert not tf.distribute.has_strategy()
    assert len(mirrored.experimental_local_results(variable.value)) == 2


def test_scopes_are_entered_and_left_as_often_as_tensorflows_own(mirrored):
    scope = mirrored.scope()
    with scope as strategy, scope, mirrored.scope():
        assert strategy is mirrored
        assert len(base._entered) == 3
    assert not tf.distribute.has_strategy()
    with pytest.raises(ZeroDivisionError), mirrored.scope():
        raise ZeroDivisionError
    assert not tf.distribute.has_strategy()
    assert base._entered == []
    assert len(mirrored.experimental_local_results(keras.Variable([1.0]).value)) == 1
