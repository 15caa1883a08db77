"""Test native collectives as TensorFlow operations: two ranks are threads of this process."""

import concurrent.futures
import contextlib
import os
import socket

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.parallel.collectives.native.peers import require
from tfdist.parallel.collectives.native.library import CompiledExchange, shared_bytes
from tfdist.parallel.collectives.native.python_exchange import PythonExchange
from tfdist.parallel.collectives.native.transport import Transport

NAMES = ["worker:0", "worker:1"]
EXCHANGES = {
    "compiled": CompiledExchange,
    "shared memory": CompiledExchange,
    "python": PythonExchange,
}


@pytest.fixture(params=list(EXCHANGES))
def both(request):
    """Run a function of a transport on both ranks at once, and return the results."""
    kind = request.param
    if kind != "python":
        require("unix")
    ends = socket.socketpair()
    with contextlib.ExitStack() as stack:
        memory = []
        if kind == "shared memory":
            memory.append(os.memfd_create("test"))
            stack.callback(os.close, memory[0])
            os.truncate(memory[0], shared_bytes(2))
        pair = [
            Transport(
                EXCHANGES[kind](
                    rank,
                    [None if r == rank else ends[rank] for r in range(2)],
                    NAMES,
                    30.0,
                    *memory,
                ),
                NAMES,
                kind if memory else "sockets",
            )
            for rank in range(2)
        ]

    def run(function):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(function, pair[rank], rank) for rank in range(2)]
            return [call.result(60) for call in calls]

    yield run
    for transport in pair:
        transport.close()


@pytest.mark.parametrize("compiled", [False, True])
def test_collectives_have_the_shapes_and_values_of_their_names(both, compiled):
    def on_rank(transport, rank):
        def collectives():
            x = tf.constant([[1.0, 2.0], [3.0, 4.0]]) * (10.0**rank)
            results = [
                *transport.all_reduce([x, tf.zeros([0]), x[0, 0]], "sum"),
                *transport.all_reduce([x], "largest", "Max"),
                transport.reduce_scatter(x, "rows of sums"),
                transport.all_gather(x[1], "rows"),
                transport.all_to_all(x, "columns"),
            ]
            assert [r.shape for r in results] == [[2, 2], [0], [], [2, 2], [2], [2, 2], [2, 2]]
            return results

        return [
            x.numpy().tolist() for x in (tf.function(collectives) if compiled else collectives)()
        ]

    sums = [[11.0, 22.0], [33.0, 44.0]]
    for rank, results in enumerate(both(on_rank)):
        assert results == [
            sums,
            [],
            11.0,
            [[10.0, 20.0], [30.0, 40.0]],
            sums[rank],
            [[3.0, 4.0], [30.0, 40.0]],
            [[1.0, 2.0], [10.0, 20.0]] if rank == 0 else [[3.0, 4.0], [30.0, 40.0]],
        ]


@pytest.mark.parametrize("compiled", [False, True])
def test_sums_are_of_tensors_times_each_ranks_factor(both, compiled):
    def on_rank(transport, rank):
        def collectives(factor):
            x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
            lost = x * (np.nan if rank else 1.0)
            return [
                *transport.all_reduce([x, x[0]], "sum", factor=factor),
                *transport.all_reduce([x], "of a number", factor=0.5),
                *transport.all_reduce([lost], "without", factor=tf.cast(1 - rank, tf.float64)),
                transport.reduce_scatter(x, "rows of sums", factor),
            ]

        function = tf.function(collectives) if compiled else collectives
        return [x.numpy().tolist() for x in function(tf.constant([0.5, 2.0][rank], tf.float64))]

    x = np.array([[1.0, 2.0], [3.0, 4.0]])
    for rank, results in enumerate(both(on_rank)):
        expected = [2.5 * x, 2.5 * x[0], x, x, 2.5 * x[rank]]
        assert results == [each.tolist() for each in expected]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int32"])
def test_a_scalar_travels_alone(both, dtype):
    def on_rank(transport, rank):
        x = tf.cast(2 + rank, dtype)
        return transport.all_reduce([x], "sum")[0], transport.all_gather(x, "both")

    for total, each in both(on_rank):
        assert (total.shape, total.dtype.name, int(total)) == ((), dtype, 5)
        assert (each.dtype.name, tf.cast(each, tf.int32).numpy().tolist()) == (dtype, [2, 3])


def test_calls_keep_their_order_in_loops_branches_and_functions(both):
    def on_rank(transport, rank):
        @tf.function
        def inner(x):
            return transport.all_reduce([x], "inner")[0]

        @tf.function
        def steps(n):
            total = tf.constant(0, tf.int64)
            for i in tf.range(n):
                (a,) = transport.all_reduce([tf.cast(i, tf.int64) + rank], "first")
                if a % 4 == 1:
                    a += transport.all_reduce([tf.constant([7], tf.int64)], "sometimes")[0][0]
                # Independent of what came before: only the program says which one is first.
                b = inner(tf.ones([1000 + rank * 0], tf.int64))
                c = transport.all_gather(tf.constant([rank], tf.int64), "ranks")
                total += a + b[-1] + tf.reduce_sum(c)
            return total

        return int(steps(tf.constant(5)))

    # a is 1, 3, 5, 7, 9, and 14 is added to the first, third and fifth; b is 2, and c adds 1.
    assert both(on_rank) == [25 + 3 * 14 + 5 * 3] * 2


def test_inputs_that_are_used_later_keep_their_values(both):
    def on_rank(transport, rank):
        @tf.function
        def step(x):
            (total,) = transport.all_reduce([x * 1.0], "temporary")
            (again,) = transport.all_reduce([x], "argument")
            return total, again, x

        x = tf.range(10_000.0) + rank
        return [y.numpy() for y in step(x)]

    for rank, (total, again, x) in enumerate(both(on_rank)):
        np.testing.assert_array_equal(x, np.arange(10_000.0) + rank)
        np.testing.assert_array_equal(total, 2 * np.arange(10_000.0) + 1)
        np.testing.assert_array_equal(again, total)


@pytest.mark.parametrize("both", ["compiled", "shared memory"], indirect=True)
def test_a_gradient_is_refused_and_not_left_out(both):
    def on_rank(transport, rank):
        x = tf.ones([3])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = transport.all_reduce([x], "mine: sum")[0] * 2.0
        with pytest.raises(NotImplementedError, match=r"mine: sum: .*use tfdist.all_gather_rows"):
            tape.gradient(y, x)

    both(on_rank)


def test_errors_reach_the_caller(both):
    def on_rank(transport, rank):
        with pytest.raises(tf.errors.OpError, match=r"out of step: worker:\d calls"):
            transport.all_reduce([tf.ones([3 + rank])], "sum")
        with pytest.raises(tf.errors.OpError, match="workers are out of step"):
            tf.function(lambda: transport.all_reduce([tf.ones([3])], "sum"))()
        transport.abort("too late")
        return transport.waiting_for()

    assert both(on_rank) == [[], []]


def test_closed_transport_fails_at_once(both):
    def on_rank(transport, rank):
        transport.close()
        with contextlib.suppress(tf.errors.OpError):
            transport.all_reduce([tf.ones([3])], "sum")
            return "no error"

    assert both(on_rank) == [None, None]
