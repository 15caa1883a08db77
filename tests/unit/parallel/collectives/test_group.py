"""Test the exchanges of a group of replicas, by dtype."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tfdist.parallel import Group

METHODS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
# Results on replicas 0 and 1, of rows 1, 2 and 3 on replica 0, and 4, 5 and 6 on replica 1;
# `all_gather` gets the first row.
EXPECTED = {
    "all_reduce": [[[5, 7, 9], [5, 7, 9]]] * 2,
    "reduce_scatter": [[5, 7, 9]] * 2,
    "all_gather": [[[1, 2, 3], [4, 5, 6]]] * 2,
    "all_to_all": [[[1, 2, 3], [4, 5, 6]]] * 2,
}


def exchanged(strategy, method, dtypes):
    """Return the results of a method on each replica, by dtype."""
    group = Group.of(strategy, f"test {method}")

    def on_replica():
        row = tf.constant([1, 2, 3]) + 3 * group.rank
        given = row if method == "all_gather" else tf.stack([row, row])
        return [
            getattr(group, method)(tf.cast(given, dtype), f"{method} {dtype}") for dtype in dtypes
        ]

    results = tf.function(
        lambda: [strategy.experimental_local_results(x) for x in strategy.run(on_replica)],
        autograph=False,
    )()
    return dict(zip(dtypes, results, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_supported_dtypes_are_exchanged(mirrored, method):
    also = ["int16", "uint16"] if method == "all_gather" else []
    for dtype, values in exchanged(
        mirrored, method, ["bfloat16", "float16", "float32", "float64", "int32", "int64", *also]
    ).items():
        assert [np.asarray(tf.cast(x, tf.int32)).tolist() for x in values] == EXPECTED[method], (
            dtype
        )
        assert {x.dtype.name for x in values} == {dtype}


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_whose_length_is_not_known_are_gathered(mirrored, dtype, count):
    group = Group.of(mirrored, f"test length {dtype}")

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], dtype)])
    def gathered(row):
        results = mirrored.run(
            lambda: group.all_gather(row + tf.cast(group.rank, dtype), f"row {dtype}")
        )
        return mirrored.experimental_local_results(results)

    row = tf.range(count, dtype=tf.float32)
    for found in gathered(tf.cast(row, dtype)):
        assert tf.cast(found, tf.float32).numpy().tolist() == [
            row.numpy().tolist(),
            (row + 1).numpy().tolist(),
        ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["bool", "int8", "complex64"])
def test_unsupported_dtypes_are_refused(mirrored, method, dtype):
    with pytest.raises(
        ValueError,
        match=f"TensorFlow's collectives, float32, .*int64; received {dtype}. Cast the tensor",
    ):
        exchanged(mirrored, method, [dtype])


@pytest.mark.parametrize(("op", "expected"), [("Add", 5.0), ("Min", 1.0), ("Max", 4.0)])
def test_a_dtype_to_send_sums_in_does_not_change_the_reduction(mirrored, op, expected):
    group = Group.of(mirrored, "test op")

    def on_replica():
        return group.all_reduce(tf.constant([1.0]) + 3.0 * group.rank, op, op, "bfloat16")

    reduced = tf.function(lambda: mirrored.run(on_replica), autograph=False)()
    for x in mirrored.experimental_local_results(reduced):
        assert x.numpy() == [expected]


def test_nothing_may_be_sent(mirrored):
    group = Group.of(mirrored, "test nothing")
    sent = tf.function(
        lambda: mirrored.run(lambda: group.all_to_all(tf.zeros([2, 0, 3]), "empty")),
        autograph=False,
    )()
    assert [x.shape for x in mirrored.experimental_local_results(sent)] == [(2, 0, 3)] * 2


def test_a_size_may_be_known_only_in_the_step(mirrored):
    group = Group.of(mirrored, "test size")

    @tf.function(input_signature=[tf.TensorSpec([], tf.int32)], autograph=False)
    def exchange(count):
        def on_replica():
            sent = tf.fill([2, count, 3], 10 * group.rank) + tf.reshape([0, 1], [2, 1, 1])
            return group.all_to_all(sent, "of any size")

        return mirrored.experimental_local_results(mirrored.run(on_replica))

    for count in (2, 5, 2):
        for rank, received in enumerate(exchange(count)):
            assert received.shape == (2, count, 3)
            assert (received.numpy() == np.reshape([rank, rank + 10], [2, 1, 1])).all()
    assert not group.bytes


def checked(x):
    return tf.debugging.check_numerics(x, "not finite")


def asserted(x):
    with tf.control_dependencies([tf.debugging.assert_all_finite(x, "not finite")]):
        return tf.identity(x)


def called(x):
    return tf.ensure_shape(tf.numpy_function(lambda array: array, [x], x.dtype), x.shape)


def looked_up(x):
    return table().lookup(tf.cast(x, tf.int64))


@functools.cache
def table():
    with tf.init_scope():
        keys = tf.range(11, dtype=tf.int64)
        entries = tf.lookup.KeyValueTensorInitializer(keys, tf.cast(keys, tf.float32))
        return tf.lookup.StaticHashTable(entries, -1.0)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("stateful", [checked, asserted, called, looked_up])
def test_replicas_do_not_wait_for_each_others_stateful_operations(mirrored, stateful, nested):
    group = Group.of(mirrored, f"test order {stateful.__name__} {nested}")
    summed = tf.function(group.all_reduce) if nested else group.all_reduce

    def on_replica():
        x = stateful(tf.cast(group.rank, tf.float32) + [1.0, 2.0])
        for i in range(2):
            x = stateful(summed(x, f"sum {i}"))
        return x

    results = tf.function(lambda: mirrored.run(on_replica), autograph=False)()
    for found in mirrored.experimental_local_results(results):
        assert found.numpy().tolist() == [6, 10]


@pytest.mark.parametrize("forward", [False, True])
def test_a_collective_of_a_gradient_in_a_branch(mirrored, forward):
    group = Group.of(mirrored, f"test branch {forward}")

    @tf.custom_gradient
    def summed(x):
        total = group.all_reduce(x, "forward") if forward else tf.identity(x)
        return total, lambda upstream: group.all_reduce(upstream, "backward")

    def on_replica():
        x = tf.cast(group.rank, tf.float32) + [1.0, 2.0]
        with tf.GradientTape() as tape:
            tape.watch(x)
            square = tf.cond(x[0] > 0.0, lambda: summed(x) ** 2, lambda: x)
        return tape.gradient(square, x)

    results = tf.function(lambda: mirrored.run(on_replica), autograph=False)()
    # Sums over the replicas of twice [3, 5], or twice [1, 2] and [2, 3].
    expected = [12, 20] if forward else [6, 10]
    for found in mirrored.experimental_local_results(results):
        assert found.numpy().tolist() == expected


@pytest.mark.parametrize("part", ["condition", "body"])
def test_a_loop_of_one_of_several_replicas_is_refused(mirrored, part):
    group = Group.of(mirrored, f"test loop {part}")

    def on_replica():
        return tf.while_loop(
            lambda x: (group.all_reduce(x, "sum") if part == "condition" else x) < 9.0,
            lambda x: [group.all_reduce(x, "sum") if part == "body" else x + 1.0],
            [1.0],
        )

    with pytest.raises(
        RuntimeError, match=r"outside of tf\.while_loop.* 2 replicas of this process"
    ):
        tf.function(lambda: mirrored.run(on_replica), autograph=False)()


def test_a_loop_around_all_replicas_sums(mirrored):
    group = Group.of(mirrored, "test loop around")

    @tf.function
    def function():
        total = mirrored.experimental_local_results(mirrored.run(lambda: tf.ones([])))
        for _ in tf.range(3):
            total = mirrored.experimental_local_results(
                mirrored.run(lambda: group.all_reduce(tf.ones([]), "sum"))
            )
        return total

    assert [x.numpy() for x in function()] == [2, 2]
