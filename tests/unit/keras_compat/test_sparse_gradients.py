"""Test sums of rows of sparse gradients."""

import numpy as np
import tensorflow as tf

from tfdist.keras_compat.sparse_gradients import mark_distinct, merge_duplicates, to_dense


def test_repeated_indices_of_a_sparse_gradient_are_summed():
    grad = tf.IndexedSlices(
        tf.constant([[1.0], [10.0], [100.0]]), tf.constant([4, 2, 4]), tf.constant([6, 1])
    )
    merged = merge_duplicates(grad)
    assert merged.indices.numpy().tolist() == [4, 2]
    assert merged.values.numpy().tolist() == [[101.0], [10.0]]
    for each in (grad, merged):
        np.testing.assert_array_equal(to_dense(each, 6), [[0], [0], [10], [0], [101], [0]])


def test_other_gradients_stay():
    for grad in (None, tf.ones([6, 1])):
        assert merge_duplicates(grad) is grad
        assert to_dense(grad, 6) is grad


def test_gradients_without_duplicates_stay():
    grad = tf.IndexedSlices(tf.ones([2, 1]), mark_distinct(tf.constant([4, 2])))
    assert merge_duplicates(grad) is grad
    both = tf.IndexedSlices(
        tf.concat([grad.values, grad.values], 0), tf.concat([grad.indices, grad.indices], 0)
    )
    assert merge_duplicates(both).indices.numpy().tolist() == [4, 2]
