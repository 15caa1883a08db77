"""Test calls of traced functions that skip TensorFlow's checks."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tfdist.keras_compat.flat_calls import FlatFunction, flat_call

Pair = collections.namedtuple("Pair", ["data", "rows"])


def counting(body, **options):
    """Return a `tf.function`, and the list of the shapes with which it was traced."""
    traces = []

    def traced(*arguments):
        traces.append([x if x is None else tuple(x.shape) for x in tf.nest.flatten(arguments)])
        return body(*arguments)

    return tf.function(traced, autograph=False, **options), traces


def test_a_flat_call_equals_tensorflows_for_nests_iterators_and_variables():
    total = tf.Variable(1.0)
    dataset = tf.data.Dataset.from_tensor_slices([[1.0, 2.0], [3.0, 4.0]])

    @tf.function(autograph=False)
    def function(iterator, following, batch):
        total.assign_add(tf.reduce_sum(batch.data["x"][1]))
        result = {
            "b": following.get_value() * 10 + batch.data["a"],
            "a": (next(iterator), batch.rows is None),
        }
        return result, iterator.get_next_as_optional(), total.read_value()

    def arguments():
        iterator = iter(dataset.repeat())
        data = {"x": [tf.ones([1]), tf.fill([2], 3.0)], "a": tf.constant([5.0, 6.0])}
        return iterator, iterator.get_next_as_optional(), Pair(data, None)

    traced = function.get_concrete_function(*arguments())
    expected = traced(*arguments())
    found = flat_call(traced, *arguments())
    tf.nest.assert_same_structure(expected[0], found[0])
    for a, b in zip(tf.nest.flatten(expected[0]), tf.nest.flatten(found[0]), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(expected[1].get_value(), found[1].get_value())
    assert (float(expected[2]), float(found[2])) == (7.0, 13.0)


def test_an_error_in_a_flat_call_is_tensorflows():
    @tf.function(autograph=False)
    def function(x):
        with tf.control_dependencies([tf.debugging.assert_positive(x, "not positive")]):
            return tf.identity(x)

    traced = function.get_concrete_function(tf.ones([2]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="not positive"):
        flat_call(traced, tf.zeros([2]))


def test_a_function_takes_another_trace_only_for_other_types():
    function, traces = counting(lambda batch: tf.reduce_sum(batch.data[0]))
    call = FlatFunction(function)
    small, large = np.ones([2, 3], "float32"), np.ones([4, 3], "float32")
    for x in (small, small, large, large, small):
        assert float(call(Pair((tf.constant(x), None), None))) == x.sum()
    assert traces == [[(2, 3), None, None], [(4, 3), None, None]]
    assert call(Pair((tf.constant(small.astype("int64")), None), None)).dtype == tf.int64
    assert float(call(Pair((tf.constant(small), tf.constant(2.0)), None))) == 6
    assert float(call(Pair([tf.constant(small), None], None))) == 6  # a list, not a tuple
    assert len(traces) == 5


def test_one_trace_serves_all_numbers_of_rows():
    function, traces = counting(lambda x: tf.reduce_sum(x))
    call = FlatFunction(function, lambda x: (tf.TensorSpec([None, *x.shape[1:]], x.dtype),))
    assert [float(call(tf.ones([rows, 2]))) for rows in (3, 1, 3)] == [6, 2, 6]
    assert traces == [[(None, 2)]]


def test_ragged_and_sparse_tensors_go_to_tensorflow():
    function = tf.function(
        lambda x: tf.reduce_sum(x.values), autograph=False, reduce_retracing=True
    )
    call = FlatFunction(function)
    assert float(call(tf.ragged.constant([[1.0], [2.0, 3.0]]))) == 6
    assert float(call(tf.sparse.from_dense([[0.0, 4.0]]))) == 4
    assert float(call(tf.ragged.constant([[[1.0]], [[2.0, 3.0]]]).merge_dims(0, 1))) == 6
