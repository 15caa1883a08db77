"""Test preflights of more tasks than meet in all pairs, in threads on loopback.

The tests cover the number of connections, each fault, and a first task that is late, dies or hangs.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.processes import ROOT, environment
from tests.unit.cluster.test_preflight import members, message
from tfdist.cluster import handshake, meeting, preflight
from tfdist.cluster.addresses import PortTaken, split_address
from tfdist.cluster.preflight import ConfigurationError, PeersAbsent
from tfdist.cluster.spec import ClusterSpec

MANY = preflight.ALL_PAIRS + 2  # tasks
# Seconds: a bound that no passing test reaches; one for tasks that are absent, in which the others
# meet.
LONG, SHORT = 80.0, 4.0


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    for name, seconds in {"RETRY_S": 0.05, "LINGER_S": 0.3, "EXCHANGE_S": 1.0}.items():
        monkeypatch.setattr(preflight, name, seconds)


def start(pool, specs, timeout=LONG, **options):
    options = {"versions": "same", **options}
    return [pool.submit(preflight.check, spec, timeout=timeout, **options) for spec in specs]


@contextlib.contextmanager
def many(count=MANY):
    """Yield the specs of a cluster's tasks, and a pool of threads for them."""
    with concurrent.futures.ThreadPoolExecutor(count + 2) as pool:
        yield members(ClusterSpec.local(workers=count)), pool


def errors(futures):
    return [future.exception() for future in futures]


def meet(specs, pool, timeout=LONG, **options):
    return errors(start(pool, specs, timeout, **options))


@pytest.fixture
def connections(monkeypatch):
    """Return the connections of all preflights by target, without those that failed."""
    made = collections.Counter()

    def connect(address, timeout):
        connection = meeting.connect(address, timeout)
        made[address] += 1
        return connection

    monkeypatch.setattr(preflight, "connect", connect)
    return made


def test_connections_grow_with_the_number_of_tasks(monkeypatch, connections):
    monkeypatch.setattr(preflight, "RETRY_S", LONG)  # nobody asks again just because time passes
    with many(64) as (specs, pool):
        assert meet(specs, pool) == [None] * 64
        addresses = [spec.task.address for spec in specs]
        assert sum(connections.values()) <= 8 * 64
        # The first task, and the one before; the first task also says that all have met.
        assert max(connections[address] for address in addresses[1:]) <= 6
        for address in addresses:
            with socket.create_server(split_address(address)):
                pass


def test_all_pairs_meet_up_to_the_limit(connections):
    with many(4) as (specs, pool):
        assert meet(specs, pool) == [None] * 4
        assert all(connections[spec.task.address] >= 3 for spec in specs)


@pytest.mark.parametrize("late", [0, 1, MANY - 1])
def test_a_late_task_is_waited_for_by_name(monkeypatch, late):
    monkeypatch.setattr(preflight, "PROGRESS_S", 0.3)
    lines = collections.defaultdict(list)
    named = threading.Event()

    def progress(line):
        who = re.match(r"preflight: after \d+ s (\S+) waits for ", line)[1]
        lines[who].append(line)
        if all(any(name in line for line in lines[f"worker:{i}"]) for i in watched):
            named.set()

    with many() as (specs, pool):
        name = f" worker:{late} at {specs[late].task.address} ("
        watched = {0, 1, 20, MANY - 1} - {late}
        early = [spec for spec in specs if spec.rank != late]
        futures = start(pool, early, progress=progress)
        assert named.wait(LONG), dict(lines)
        futures += start(pool, [specs[late]])
        assert errors(futures) == [None] * MANY


def test_an_absent_task_is_named_by_all_with_its_last_error():
    with many() as (specs, pool):
        found = meet(specs[:7] + specs[8:], pool, SHORT)
        for error in found:
            text = message(error, PeersAbsent)
            assert f"1 of {MANY} tasks are absent: worker:7 at {specs[7].task.address} (" in text
            assert "[Errno 111] Connection refused" in text


def test_absent_tasks_are_counted_even_if_not_all_are_named():
    with many() as (specs, pool):
        found = meet(specs[:10], pool, SHORT)
        assert f"{MANY - 10} of {MANY} tasks are absent: worker:10 at " in message(
            found[0], PeersAbsent
        )


def test_different_clusters():
    with many() as (specs, pool):
        jobs = {"worker": specs[9].jobs["worker"] + tuple(ClusterSpec.local().jobs["worker"])}
        specs[9] = dataclasses.replace(specs[9], jobs=jobs, source="file other.yaml")
        found = [message(error, ConfigurationError) for error in meet(specs, pool)]
        assert f"different cluster spec: {MANY} tasks, " in found[9]
        assert "from file other.yaml" in found[9]
        assert all(f"{MANY + 1} tasks, " in text and f"{MANY} tasks, " in text for text in found)
        assert all(text.count(" gave up: ") <= 1 for text in found)


def test_a_cluster_below_the_limit_and_one_above():
    with many() as (specs, pool):
        jobs = {"worker": specs[1].jobs["worker"][:3]}
        specs[1] = dataclasses.replace(specs[1], jobs=jobs)
        found = [message(error, ConfigurationError) for error in meet(specs, pool)]
        assert all("different cluster spec: " in text for text in found)


def test_different_versions():
    with many() as (specs, pool):
        futures = start(pool, specs[:-1], versions="keras 3.15")
        futures += start(pool, specs[-1:], versions="keras 3.10")
        for text in [message(error, ConfigurationError) for error in errors(futures)]:
            assert "different versions" in text
            assert "keras 3.10" in text
            assert "keras 3.15" in text


def test_a_second_process_of_one_task_on_this_machine():
    with many() as (specs, pool):
        first = start(pool, specs[:-1])
        time.sleep(0.5)
        assert "already in use" in message(*meet(specs[20:21], pool), PortTaken)
        assert errors(first + start(pool, specs[-1:])) == [None] * MANY


def test_a_second_process_of_one_task_elsewhere():
    with many() as (specs, pool):
        futures = start(pool, specs[:-1])
        hello = handshake.hello_message(specs[0], "worker:20", "same", "0", "another")
        address = split_address(specs[0].task.address)
        fault = ""
        while "two processes" not in fault:  # until worker:0 knows the real one
            with (
                contextlib.suppress(OSError),
                socket.create_connection(address) as connection,
            ):
                connection.sendall(json.dumps(hello).encode() + b"\n")
                fault = json.loads(connection.recv(8192)).get("fault", "")
            if futures[0].done():
                break
        for error in errors(futures):
            assert "two processes claim to be worker:20" in message(error, ConfigurationError)


def test_an_address_that_leads_to_another_task(monkeypatch):
    """Swap two names that are no neighbours, as a wrong /etc/hosts of the first task does."""
    with many() as (specs, pool):
        one, two = (specs[i].task.address for i in (5, 25))
        monkeypatch.setattr(
            meeting, "split_address", lambda a: split_address({one: two, two: one}.get(a, a))
        )
        for error in meet(specs, pool):
            assert "the address belongs to another machine" in message(error, ConfigurationError)


def test_another_program_at_an_address():
    with many() as (specs, pool):
        with socket.create_server(split_address(specs[7].task.address)) as stranger:

            def talk():
                with contextlib.suppress(OSError):
                    while True:
                        with stranger.accept()[0] as connection:
                            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

            thread = threading.Thread(target=talk)
            thread.start()
            try:
                found = meet(specs[:7] + specs[8:], pool, SHORT)
            finally:
                stranger.shutdown(socket.SHUT_RDWR)
                thread.join(5)
        for error in found:
            assert f"worker:7 at {specs[7].task.address} (" in message(error, PeersAbsent)
            assert "no tfdist preflight" in str(error) or "Connection reset" in str(error)


def test_own_mistakes_are_raised_at_once():
    with many() as (specs, pool):
        with socket.create_server(split_address(specs[20].task.address)):
            assert "already in use" in message(*meet(specs[20:21], pool), PortTaken)
        addresses = [f"203.0.113.{i}:2222" for i in range(1, MANY + 1)]
        elsewhere = ClusterSpec({"worker": addresses}, "worker", 20)
        assert "not an address of this machine" in message(
            *meet([elsewhere], pool), ConfigurationError
        )
        mixed = ClusterSpec(
            {"worker": [*addresses[:20], "127.0.0.1:2222", *addresses[21:]]}, "worker", 20
        )
        text = message(*meet([mixed], pool), ConfigurationError)
        assert "worker:20 at 127.0.0.1:2222 (127.0.0.1) is a loopback address" in text


def test_a_name_that_never_resolves_is_an_absent_task():
    addresses = [*ClusterSpec.local(workers=MANY - 1).jobs["worker"], "nowhere.invalid:2222"]
    spec = ClusterSpec({"worker": addresses}, "worker", 0)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        (error,) = meet([spec], pool, 0.5)
        assert f"worker:{MANY - 1} at nowhere.invalid:2222 (" in message(error, PeersAbsent)


def test_a_pair_that_cannot_connect_is_named_by_all(monkeypatch):
    """Let worker:12 not reach worker:11, which the first task reaches."""
    with many() as (specs, pool):
        target = specs[11].task.address
        from_12 = threading.local()

        def connect(address, timeout):
            if address == target and getattr(from_12, "yes", False):
                raise TimeoutError("timed out")
            return meeting.connect(address, timeout)

        exchange = preflight._Barrier._exchange

        def marked(self, task, *args, **facts):
            from_12.yes = str(self.me) == "worker:12"
            return exchange(self, task, *args, **facts)

        monkeypatch.setattr(preflight, "connect", connect)
        monkeypatch.setattr(preflight._Barrier, "_exchange", marked)
        found = meet(specs, pool, SHORT)
        for error in found:
            text = message(error, PeersAbsent)
            assert "worker:12" in text, text
            assert f"worker:11 at {target} (timed out)" in text, text


def test_a_task_that_is_slow_to_acknowledge_the_release(monkeypatch):
    monkeypatch.setattr(preflight, "EXCHANGE_S", 0.3)
    receive = handshake.receive

    def receive_slowly(connection, limit):
        reply = receive(connection, limit)
        if reply.get("go"):
            time.sleep(1)
        return reply

    monkeypatch.setattr(preflight, "receive", receive_slowly)
    with many(3) as (specs, pool):
        assert meet(specs, pool, 4 * SHORT) == [None] * 3


def test_a_first_task_that_dies_is_named():
    with many() as (specs, pool):
        code = (
            "import sys; from tfdist.cluster import preflight, spec; "
            "preflight.check(spec.ClusterSpec.from_tf_config(sys.argv[1]), versions='same')"
        )
        words = [sys.executable, "-c", code, specs[0].to_tf_config()]
        with subprocess.Popen(words, cwd=ROOT, env=environment()) as first:
            try:
                # One task never comes, so the first one cannot finish.
                futures = start(pool, specs[1:-1], 3 * SHORT)
                while not all(future.running() for future in futures):
                    time.sleep(0.05)
                time.sleep(SHORT)
            finally:
                first.kill()
        texts = [message(error, PeersAbsent) for error in errors(futures)]
        refused = f"worker:0 at {specs[0].task.address} ([Errno 111] Connection refused)"
        # The one after the task that never comes has not met it, or was told of worker:0 first.
        assert [refused in text for text in texts].count(False) <= 1
        assert all(refused in text or f"worker:{MANY - 1} at " in text for text in texts)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_first_task_that_hangs_is_named(frozen):
    with many() as (specs, pool):
        code = (
            "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); "
            "print('up', flush=True); time.sleep(1000)"
        )
        address = specs[0].task.address
        port = str(split_address(address)[1])
        words = [sys.executable, "-c", code, port]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as first:
            try:
                first.stdout.readline()
                if frozen:
                    first.send_signal(signal.SIGSTOP)
                found = meet(specs[1:], pool, SHORT)
            finally:
                first.kill()
        for error in found:
            text = message(error, PeersAbsent)
            # Linux accepts connections for it, until too many wait.
            assert re.search(rf"worker:0 at {address} \((a process listens there|timed out)", text)


def test_a_forged_release_is_not_believed():
    """Say to a task, in the name of the first one, that all have met."""
    with many() as (specs, pool):
        futures = start(pool, specs[:-1], SHORT)
        time.sleep(0.5)
        hello = handshake.hello_message(specs[0], "worker:0", "same", "0", "forged")
        with (
            contextlib.suppress(OSError),
            socket.create_connection(split_address(specs[3].task.address)) as connection,
        ):
            connection.sendall(json.dumps({**hello, "go": True}).encode() + b"\n")
            connection.recv(8192)
        assert all(errors(futures))


def test_each_task_asks_the_one_before_it_in_tensorflows_ring():
    spec = ClusterSpec({"worker": [f"10.0.0.{i}:2222" for i in range(1, MANY + 1)]})
    tasks = spec.listening_tasks

    def peers(rank):
        return list(preflight.peers_of(tasks, tasks[rank]))

    assert peers(0) == [f"worker:{i}" for i in range(1, MANY)]
    assert peers(1) == ["worker:0"]
    assert peers(2) == ["worker:0", "worker:19"]
    assert peers(12) == ["worker:0", "worker:11"]
    assert (
        len(preflight.peers_of(tasks[: preflight.ALL_PAIRS], tasks[1])) == preflight.ALL_PAIRS - 1
    )
