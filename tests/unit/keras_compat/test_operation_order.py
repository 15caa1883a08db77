"""Test in which order the stateful operations of a function run."""

import gc
import weakref

import tensorflow as tf

from tfdist import keras_compat
from tfdist.keras_compat.operation_order import TABLE_READS


def controls(function):
    """Return the control inputs of each stateful operation of a function, by name."""
    graph = function.get_concrete_function().graph
    return {
        op.name: [before.name for before in op.control_inputs]
        for op in graph.get_operations()
        if op.type in ("Timestamp", *TABLE_READS, "LookupTableInsertV2")
    }


def test_an_unordered_operation_waits_for_no_other():
    @tf.function
    def two():
        first = tf.timestamp("first")
        second = tf.timestamp("second")
        keras_compat.unordered(second.op)
        return first, second

    assert controls(two) == {"first": [], "second": []}
    ordered = tf.function(lambda: (tf.timestamp("first"), tf.timestamp("second")))
    assert controls(ordered)["second"] == ["first"]  # else the function is not needed


def in_turns(order):
    """Return a function in which replicas read the clock in turns, and order after each."""

    @tf.function(autograph=False)
    def function():
        times = [tf.timestamp("first")]
        for turn in ("a", "b"):
            for scope in ("", "replica_1/", "gradient_tape/replica_1/"):
                times.append(tf.timestamp(f"{scope}{turn}"))
                order()
        return [*times, tf.timestamp("last")]

    return function


def test_operations_wait_for_those_of_their_own_replica(mirrored):
    assert controls(in_turns(keras_compat.order_by_replica)) == {
        "first": [],
        "a": ["first"],
        "replica_1/a": [],
        "gradient_tape/replica_1/a": ["replica_1/a"],
        "b": ["a"],
        "replica_1/b": ["gradient_tape/replica_1/a"],
        "gradient_tape/replica_1/b": ["replica_1/b"],
        "last": ["b"],
    }
    ordered = controls(in_turns(lambda: None))
    assert ordered["replica_1/a"] == ["a"]  # else the function is not needed


def test_an_unordered_operation_stays_so(mirrored):
    @tf.function(autograph=False)
    def function():
        first, second = tf.timestamp("first"), tf.timestamp("second")
        keras_compat.unordered(second.op)
        keras_compat.order_by_replica()
        return first, second, tf.timestamp("third")

    assert controls(function) == {"first": [], "second": [], "third": ["first"]}


def test_an_ordered_graph_is_not_kept():
    function = in_turns(keras_compat.order_by_replica)
    graph = weakref.ref(function.get_concrete_function().graph)
    del function
    gc.collect()
    assert graph() is None


def test_a_graph_around_the_graph_of_a_call_is_ordered():
    @tf.function(autograph=False)
    def function():
        first, second = tf.timestamp("first"), tf.timestamp("replica_1/first")
        tf.function(keras_compat.order_by_replica)()
        return first, second

    assert controls(function)["replica_1/first"] == []


def test_reads_of_a_table_wait_for_changes_alone(mirrored):
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    @tf.function
    def function():
        keys = tf.constant([1], tf.int64)
        a, size = table.lookup(keys, name="a"), table.size(name="size")
        table.insert(keys, [2.0], name="insert")
        return a, size, table.lookup(keys, name="b"), table.lookup(keys, name="c")

    found = controls(function)
    assert [len(found[name]) for name in found] == [0, 0, 2, 1, 1]
    assert [x.numpy().tolist() for x in function()] == [[0], 0, [2], [2]]
