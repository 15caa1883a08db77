"""Test the native collectives between processes: results, lost workers and strangers."""

import contextlib
import functools
import os
import signal
import socket
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from tests.unit.parallel.collectives.native.peers import (
    HOSTS,
    KINDS,
    WAIT_S,
    Peers,
    connect,
    require,
)
from tfdist.cluster import json_channel
from tfdist.parallel.collectives.native import connections
from tfdist.parallel.collectives.native.library import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    TransportError,
)
from tfdist.parallel.collectives.native.transport import Transport

DTYPES = ("float32", "float64", "int32", "int64", "bfloat16", "float16")
# Elements of an all-reduce: none, fewer than processes, odd, and more than one chunk of memory.
LENGTHS = (0, 1, 3, 17, 4099, 70_001)
FEW = ("shared memory", "unix")
WITH_SIZE = [*((kind, 3) for kind in KINDS), ("hosts", 4)]
UFUNCS = {"Add": np.add, "Min": np.minimum, "Max": np.maximum}


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


@functools.cache
def normals(rank, shape, salt):
    return np.random.default_rng([rank, salt]).standard_normal(shape) * 100


def values(rank, shape, dtype, salt=0):
    return normals(rank, shape, salt).astype(dtype_of(dtype))


def reduced(arrays, reduction="Add", kind=""):
    """Return what all processes must get: the sum in the order of the ranks, rounded once.

    Where processes share memory on each of several hosts, it is the sum of the hosts' sums.
    """
    if kind == "hosts" and len(arrays) % HOSTS == 0:
        return reduced(
            [reduced(arrays[host::HOSTS], reduction) for host in range(HOSTS)], reduction
        )
    wide = np.float32 if arrays[0].itemsize == 2 else arrays[0].dtype
    total = arrays[0].astype(wide)
    for x in arrays[1:]:
        total = UFUNCS[reduction](total, x.astype(wide))
    return total.astype(arrays[0].dtype)


def same(x, y):
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def compare_all(rank, gather, kind, size):
    """Return the calls whose results differ from NumPy's."""
    exchange = connect(kind, rank, size, gather)
    wrong = []

    def check(what, results, expected):
        if len(results) != len(expected) or not all(map(same, results, expected)):
            wrong.append(what)

    for dtype in DTYPES:
        for n in LENGTHS:
            for reduction in UFUNCS if n in (3, 70_001) else ("Add",):
                inputs = [values(r, n, dtype) for r in range(size)]
                results = exchange.run(ALL_REDUCE, f"sum {n}", [inputs[rank]], reduction)
                check(f"{reduction} {dtype} {n}", results, [reduced(inputs, reduction, kind)])
        shapes = [(3, 5), (0,), (), (71, 1001), (1,)]
        inputs = [[values(r, s, dtype, i) for i, s in enumerate(shapes)] for r in range(size)]
        results = exchange.run(ALL_REDUCE, "several", inputs[rank])
        sums = [reduced(list(x), kind=kind) for x in zip(*inputs, strict=True)]
        check(f"several {dtype}", results, sums)
        for n in (0, 1, 7, 50_001):
            rows = [values(r, (size, n), dtype) for r in range(size)]
            own = rows[rank]
            check(
                f"reduce_scatter {dtype} {n}",
                exchange.run(REDUCE_SCATTER, "rs", [own]),
                [reduced([x[rank] for x in rows], kind=kind)],
            )
            check(
                f"all_gather {dtype} {n}",
                exchange.run(ALL_GATHER, "ag", [own[0]]),
                [np.stack([x[0] for x in rows])],
            )
            check(
                f"all_to_all {dtype} {n}",
                exchange.run(ALL_TO_ALL, "aa", [own]),
                [np.stack([x[rank] for x in rows])],
            )
    exchange.close()
    return wrong


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *((kind, 3) for kind in ("hosts", *KINDS)),
        *((kind, size) for kind in FEW for size in (2, 4)),
        ("hosts", 4),
        ("hosts", 6),
    ],
)
def test_results_are_those_of_numpy_bit_for_bit(kind, size):
    require(kind)
    with Peers(size, compare_all, kind, size) as peers:
        assert peers.finish() == [[]] * size


FACTORS = (0.1, 1 / 3, 1.0, 0.0)  # by rank; 0 of a worker without rows, whose mean is NaN


def scaled(rank, gather, kind, size):
    """Return the sums of arrays times factors, and the calls whose results differ from NumPy's."""
    exchange = connect(kind, rank, size, gather)
    factors = FACTORS[-size:]
    sums = []
    wrong = []
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        for n in (1, 17, 4099, 70_001):
            rows = [values(r, (size, n), dtype) for r in range(size)]
            weighed = [x * x.dtype.type(f) for x, f in zip(rows, factors, strict=True)]
            own = np.full_like(rows[rank], np.nan) if factors[rank] == 0 else rows[rank]
            (total,) = exchange.run(ALL_REDUCE, "sum", [own], factor=factors[rank])
            (part,) = exchange.run(REDUCE_SCATTER, "rows", [own], factor=factors[rank])
            sums.append(total.tobytes())
            expected = reduced(weighed)
            for found, right in ((total, expected), (part, expected[rank])):
                # Those of 16 bits are not rounded before they are added where they are.
                equal = (
                    same(found, right)
                    if found.itemsize > 2
                    else np.allclose(found.astype(float), right.astype(float), 0.02, 2)
                )
                if not equal:
                    wrong.append(f"{dtype} {n}")
        shapes = [(3,), (40_001,), (1,), (71, 1001)]  # rounds begin and end within these
        rows = [[values(r, s, dtype, i) for i, s in enumerate(shapes)] for r in range(size)]
        expected = [
            reduced([x * x.dtype.type(f) for x, f in zip(each, factors, strict=True)])
            for each in zip(*rows, strict=True)
        ]
        own = [np.full_like(x, np.nan) if factors[rank] == 0 else x.copy() for x in rows[rank]]
        exchange.run(ALL_REDUCE, "several", own, in_place=True, factor=factors[rank])
        sums += [x.tobytes() for x in own]
        if own[0].itemsize > 2 and not all(map(same, own, expected)):
            wrong.append(f"several {dtype}")
    exchange.close()
    return sums, wrong


@pytest.mark.parametrize("size", [2, 3, 4])
def test_arrays_are_added_times_factors_and_all_get_the_same_bits(size):
    require("shared memory")
    with Peers(size, scaled, "shared memory", size) as peers:
        (first, wrong), *others = peers.finish()
    assert not wrong
    assert [found for found in others if found != (first, [])] == []


@pytest.mark.parametrize(
    ("kind", "dtype", "collective"),
    [
        ("unix", "float32", ALL_REDUCE),
        ("shared memory", "int32", ALL_REDUCE),
        ("shared memory", "float32", ALL_GATHER),
    ],
)
def test_a_factor_that_cannot_be_applied_is_an_error(kind, dtype, collective):
    require(kind)
    with Peers(2, refused, kind, dtype, collective) as peers:
        for message in peers.finish():
            assert message == "expected a sum of floats in shared memory for a factor"


def refused(rank, gather, kind, dtype, collective):
    exchange = connect(kind, rank, 2, gather)
    with pytest.raises(TransportError) as caught:
        exchange.run(collective, "sum", [values(rank, 3, dtype)], factor=0.5)
    exchange.close()
    return str(caught.value)


def special_values(rank, gather):
    exchange = connect("unix", rank, 2, gather)
    wrong = []
    for name in ("float16", "bfloat16"):
        every = np.arange(1 << 16, dtype=np.uint16).view(dtype_of(name))
        zero = np.zeros_like(every)
        (total,) = exchange.run(ALL_REDUCE, "every", [every if rank else zero])
        if not np.array_equal(total, every, equal_nan=True):
            wrong.append(f"{name} is changed by a sum with zero")
        odd = np.linspace(-70000, 70000, 1 << 16).astype(np.float32)
        odd = np.concatenate([odd, odd * 1e-9]).astype(dtype_of(name))
        (total,) = exchange.run(ALL_REDUCE, "odd", [odd if rank else odd[::-1].copy()])
        if not np.array_equal(total, reduced([odd[::-1], odd]), equal_nan=True):
            wrong.append(f"{name} is rounded differently")
    for reduction in ("Min", "Max"):
        (total,) = exchange.run(ALL_REDUCE, "nan", [np.float32([rank or np.nan, 1])], reduction)
        if not (np.isnan(total[0]) and total[1] == 1):
            wrong.append(f"{reduction} loses NaN")
    return wrong


def test_all_16_bit_floats_are_converted_as_numpy_converts_them():
    require("unix")
    with np.errstate(all="ignore"), Peers(2, special_values) as peers:
        assert peers.finish() == [[], []]


def sum_forever(rank, gather, kind, size, timeout, elements):
    exchange = connect(kind, rank, size, gather, timeout=timeout)
    x = np.ones(elements, np.float32)
    exchange.run(ALL_REDUCE, "gradients", [x])
    gather.say("runs")
    while True:
        exchange.run(ALL_REDUCE, "gradients", [x])


@pytest.mark.parametrize(("kind", "size"), WITH_SIZE)
def test_killed_worker_is_named_by_the_others(kind, size):
    require(kind)
    with Peers(size, sum_forever, kind, size, 60.0, 300_000) as peers:
        for rank in range(size):
            peers.await_said(rank, "runs")
        peers.signal(1, signal.SIGKILL)
        for error in peers.finish(*(rank for rank in range(size) if rank != 1)):
            assert error.startswith("TransportError: "), error
            assert "worker:1" in error, error


@pytest.mark.parametrize(("kind", "size"), [*((kind, 2) for kind in KINDS), ("hosts", 4)])
def test_stopped_worker_is_named_after_the_timeout(kind, size):
    require(kind)
    with Peers(size, sum_forever, kind, size, 1.0, 5) as peers:
        for rank in range(size):
            peers.await_said(rank, "runs")
        peers.signal(1, signal.SIGSTOP)
        (error,) = peers.finish(0)
        assert "worker:0 waited too long for worker:1: nothing arrived for 1 s" in error


def sum_different(rank, gather, kind, size):
    exchange = connect(kind, rank, size, gather)
    exchange.run(ALL_REDUCE, "gradients", [np.ones(7, np.float32)])
    x = np.ones(500_000 + (rank == 2), np.float32)
    exchange.run(ALL_REDUCE, "gradients", [x])


@pytest.mark.parametrize(("kind", "size"), WITH_SIZE)
def test_different_sizes_are_an_error_that_names_both_workers(kind, size):
    require(kind)
    with Peers(size, sum_different, kind, size) as peers:
        for rank, error in enumerate(peers.finish()):
            if kind == "hosts" and rank % HOSTS:  # the other host
                assert "lost its connection to worker:" in error
                continue
            assert "workers are out of step" in error
            assert f"worker:{rank} calls all_reduce 'gradients' of" in error
            assert "worker:2 calls" in error
            assert "2000004 bytes of float32 in 1 buffers (call 2)" in error


def abort_later(rank, gather, kind):
    exchange = connect(kind, rank, 2, gather)
    x = np.ones(3, np.float32)
    if rank == 1:
        gather(x)  # waits for the other, which has given up by then
        return "ends"
    waits = []

    def abort():
        while exchange.waiting_for() != [1]:
            threading.Event().wait(0.01)
        waits.extend(exchange.waiting_for())
        exchange.abort("no step for a while")

    threading.Thread(target=abort).start()
    errors = []
    for _ in range(2):  # all later calls fail, too
        try:
            exchange.run(ALL_REDUCE, "gradients", [x])
        except TransportError as error:
            errors.append(str(error))
    gather(x)
    return [waits, errors]


@pytest.mark.parametrize("kind", [*FEW, "python"])
def test_another_thread_ends_a_call_and_learns_for_whom_it_waits(kind):
    require(kind)
    with Peers(2, abort_later, kind) as peers:
        assert peers.finish() == [[[1], ["no step for a while"] * 2], "ends"]


def leave_first(rank, gather, kind, size):
    exchange = connect(kind, rank, size, gather)
    x = np.ones(100_000, np.float32)
    for _ in range(20):
        (total,) = exchange.run(ALL_REDUCE, "gradients", [x])
    return float(total.sum())


@pytest.mark.parametrize(
    ("kind", "size"), [*((kind, 2) for kind in (*FEW, "python")), ("hosts", 4)]
)
def test_worker_that_ends_well_lets_the_others_finish(kind, size):
    require(kind)
    with Peers(size, leave_first, kind, size) as peers:
        assert peers.finish() == [100_000.0 * size] * size


TCP_BYTES_RECEIVED = 128  # offset in struct tcp_info of linux/tcp.h


def received(rank, gather, kind, size):
    """Return the bytes that arrive over TCP in each collective, as shares of the input's."""
    exchange = connect(kind, rank, size, gather)

    def total():
        count = 0
        for descriptor in exchange._descriptors:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family != socket.AF_UNIX:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                    count += int.from_bytes(info[TCP_BYTES_RECEIVED:][:8], sys.byteorder)
        return count

    shares = []
    x = np.ones((size, 300_000), np.float32)
    for collective in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL):
        own = x[0] if collective == ALL_GATHER else x
        before = total()
        gather(np.zeros(1))  # nothing arrives before
        exchange.run(collective, "bytes", [own])
        shares.append(round((total() - before) / own.nbytes, 2))
        gather(np.zeros(1))
    return shares


def test_processes_of_a_host_send_others_no_more_than_one_process_would():
    require("tcp")
    with Peers(4, received, "tcp", 4) as peers:
        assert peers.finish() == [[1.5, 0.75, 3.0, 0.75]] * 4
    with Peers(4, received, "hosts", 4) as peers:
        assert peers.finish() == [[0.5, 0.25, 1.0, 0.5]] * 4


def with_token(rank, gather, kind):
    token = b"another secret 0" * (rank + 1)
    return connect(kind, rank, 2, gather, token, connect_s=2.0).rank


@pytest.mark.parametrize("kind", ["python", "python tcp"])
def test_worker_with_another_token_is_refused(kind):
    with Peers(2, with_token, kind) as peers:
        first, second = peers.finish()
    assert "ConfigurationError: " in second
    assert "cannot connect to worker:0: worker:0 does not accept this host's token" in second
    assert "PeersAbsent: communication native: worker:1 did not connect to worker:0" in first
    assert "does not know the token" in first


def among_strangers(rank, gather, tcp):
    """Connect while strangers do: one says nothing, one speaks another protocol."""
    strangers = []
    listen = connections._listen_at if tcp else connections._listen_locally

    def listen_and_be_called(*args):
        listener = listen(*args)
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"0" * 64 + b" " + b"0" * 64 + b"\n"):
            stranger = socket.socket(listener.family)
            stranger.connect(listener.getsockname())
            stranger.send(words)
            strangers.append(stranger)
        return listener

    setattr(connections, listen.__name__, listen_and_be_called)
    exchange = connect("python tcp" if tcp else "python", rank, 2, gather)
    (total,) = exchange.run(ALL_REDUCE, "sum", [np.float32([rank, 2])])
    return total.tolist()


@pytest.mark.parametrize("tcp", [False, True])
def test_strangers_do_not_disturb_the_start(tcp):
    with Peers(2, among_strangers, tcp) as peers:
        assert peers.finish() == [[1.0, 4.0]] * 2


def among_a_crowd(rank, gather, tcp):
    """Connect while strangers hold more connections than may be in their handshake at once."""
    connections.STRANGERS = 0
    connections.HELLO_S = WAIT_S
    listen = connections._listen_at if tcp else connections._listen_locally
    crowd = []

    def listen_and_be_crowded(*args):
        listener = listen(*args)
        for _ in range(8):
            crowd.append(socket.socket(listener.family))
            if tcp:
                crowd[-1].bind(("127.0.0.2", 0))
            crowd[-1].connect(listener.getsockname())
        return listener

    setattr(connections, listen.__name__, listen_and_be_crowded)
    return connect("python tcp" if tcp else "python", rank, 2, gather, connect_s=WAIT_S / 2).rank


@pytest.mark.parametrize("tcp", [False, True])
def test_strangers_that_hold_connections_keep_no_worker_out(tcp):
    with Peers(2, among_a_crowd, tcp) as peers:
        assert peers.finish() == [0, 1]


def introduced_late(rank, gather, kind):
    """Connect so that the first worker's data arrives before its introduction is read."""
    receive = json_channel.Channel.receive

    def receive_late(channel, timeout):
        time.sleep(0.3 if rank else 0)
        return receive(channel, timeout)

    json_channel.Channel.receive = receive_late
    exchange = connect(kind, rank, 2, gather, connect_s=5.0)
    (total,) = exchange.run(ALL_REDUCE, "sum", [np.float32([rank, 2])])
    return total.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_worker_that_is_slow_to_start_misses_no_data(kind):
    require(kind)
    with Peers(2, introduced_late, kind) as peers:
        assert peers.finish() == [[1.0, 4.0]] * 2


def shared_files():
    """Return the files in shared memory that this process maps."""
    with open("/proc/self/maps", encoding="ascii") as file:
        return {line.split(maxsplit=5)[5] for line in file if "/dev/shm" in line}


def traces(rank, gather):
    """Return the names that a session leaves while it is open: sockets and files in memory."""
    sessions = []
    listen = connections._listen_locally

    def listen_locally(session, rank):
        sessions.append(session)
        return listen(session, rank)

    connections._listen_locally = listen_locally
    before = shared_files()  # semaphores of multiprocessing
    exchange = connect("shared memory", rank, 2, gather)
    exchange.run(ALL_REDUCE, "sum", [np.ones(300_000, np.float32)])
    gather(np.zeros(1))
    with open("/proc/net/unix", encoding="ascii") as file:
        listening = [x for x in file if f"@tfdist {sessions[0]}" in x and " 00010000 " in x]
    return [listening, sorted(shared_files() - before)]


def test_a_session_has_no_files_and_listens_no_longer():
    require("shared memory")
    with Peers(2, traces) as peers:
        assert peers.finish() == [[[], []]] * 2


def descriptors():
    """Return the descriptors of this process, and what they stand for."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def inheritable(rank, gather, kind):
    """Return the sockets and memory that a program would inherit from this process."""
    before = descriptors()
    exchange = connect(kind, rank, 2, gather)
    new = {fd: target for fd, target in descriptors().items() if before.get(fd) != target}
    found = [len(new) > 0, [target for fd, target in new.items() if os.get_inheritable(fd)]]
    exchange.close()
    return found


@pytest.mark.parametrize("kind", [*FEW, "python"])
def test_programs_that_a_worker_starts_inherit_no_connection(kind):
    require(kind)
    with Peers(2, inheritable, kind) as peers:
        assert peers.finish() == [[True, []]] * 2


def fork_and_die(rank, gather, kind):
    """Fork a child that lives on, then die; the other process must notice it."""
    transport = Transport(connect(kind, rank, 2, gather), ["worker:0", "worker:1"], kind)
    exchange = transport._exchange
    exchange.run(ALL_REDUCE, "sum", [np.ones(3, np.float32)])
    if rank == 1:
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        gather.say(pid)
        os._exit(0)
    exchange.run(ALL_REDUCE, "sum", [np.ones(3, np.float32)])


@pytest.mark.parametrize("kind", [*FEW, "python"])
def test_child_of_a_dead_worker_keeps_no_connection_open(kind):
    require(kind)
    with Peers(2, fork_and_die, kind) as peers:
        (error,) = peers.finish(0)
        os.kill(peers.said[1][0], signal.SIGKILL)
    assert "lost its connection to worker:1" in error
