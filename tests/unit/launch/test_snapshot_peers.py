"""Test snapshots in the memory of several hosts, each of which is a server process on loopback.

Hosts are lost by killing their server, as a machine that fails loses its memory.
"""

import contextlib
import functools
import os
import pathlib
import resource
import signal
import socket
import threading
import time

import numpy as np
import pytest

from tests.networks import crowd
from tfdist.backup import memory_tier
from tfdist.backup.claim import Superseded
from tfdist.backup.memory_tier import MemoryTier
from tfdist.backup.snapshot import Snapshot
from tfdist.cluster import json_channel
from tfdist.launch.snapshot_holder import Holder, Part
from tfdist.launch.snapshot_peers import HANDSHAKES, SAVE_S, Peers
from tfdist.launch.snapshot_server import SnapshotServer
from tfdist.runtime.snapshot_protocol import address_of, is_supported

pytestmark = pytest.mark.skipif(not is_supported(), reason="no memfd_create: Linux has it")
SECRET = b"0123456789abcdef"
RUN = "/backup"
WAIT_S = 30.0
SIZE = 300_000  # elements: more than one chunk


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def listens(name):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        return client.connect_ex(address_of(name)) == 0


class Hosts:
    """Servers of some hosts, and clients of the processes on them."""

    def __init__(self, count):
        self.servers = [SnapshotServer("127.0.0.1", SECRET) for _ in range(count)]
        self.closing = contextlib.ExitStack()
        for server in self.servers:
            self.closing.enter_context(contextlib.closing(server))
            wait_until(functools.partial(listens, server.name))

    def address(self, index):
        return f"127.0.0.1:{self.servers[index].port}"

    def meet(self, generation, *hosts, launch=""):
        for own, host in enumerate(hosts):
            peers = [(f"{each}", self.address(each)) for each in hosts]
            self.servers[host].meet(peers, own, generation, launch)

    def tier(self, host, generation):
        tier = MemoryTier(RUN, generation, self.servers[host].name)
        self.closing.callback(tier.close)
        return tier

    def lose(self, host):
        """End a server without a successor."""
        self.servers[host]._closed = True
        os.kill(self.servers[host].pid, signal.SIGKILL)
        self.servers[host]._thread.join(WAIT_S)


@pytest.fixture
def hosts():
    made = Hosts(3)
    with made.closing:
        yield made


def state(value, size=SIZE, **facts):
    return Snapshot({"x": np.full(size, float(value))}, facts)


def put(hosts, generation, step, parts):
    """Hand over the parts of a snapshot, each from its host; return the clients' answers."""
    answers = {}

    def one(part, host):
        answers[part] = hosts.tier(host, generation).put(
            state(100 * step + part, first=part), (0, step), part, len(parts)
        )

    threads = [threading.Thread(target=one, args=item) for item in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return [answers.get(part) for part in range(len(parts))]


def held(hosts, host, generation, part=0):
    """Return the step of the newest snapshot for a process of a host, and the value in a part."""
    found = hosts.tier(host, generation).get(part)
    return None if found is None else (found.at[1], found.snapshot.arrays["x"][-1])


def test_each_host_reads_the_newest_snapshot_of_one(hosts):
    hosts.meet(0, 0, 1, 2)
    assert held(hosts, 1, 0) is None
    for step in (1, 2, 3):
        assert put(hosts, 0, step, [0]) == [True]
    hosts.meet(1, 0, 1, 2)
    assert [held(hosts, host, 1) for host in range(3)] == [(3, 300.0)] * 3


def test_a_lost_host_is_survived_by_the_copy_of_its_parts(hosts):
    hosts.meet(0, 0, 1)
    parts = [0, 0, 1]  # the chief's, and the rows of two workers
    for step in (1, 2):
        assert put(hosts, 0, step, parts) == [True] * 3
    hosts.lose(1)
    hosts.meet(1, 0, 2)
    for host in (0, 2):
        assert [held(hosts, host, 1, part) for part in range(3)] == [
            (2, 200.0 + part) for part in range(3)
        ]
    assert put(hosts, 1, 3, [0, 0, 2]) == [True] * 3
    hosts.lose(0)  # the first host, which counts the parts
    hosts.meet(2, 2)
    assert [held(hosts, 2, 2, part) for part in range(3)] == [
        (3, 300.0 + part) for part in range(3)
    ]


def test_a_snapshot_counts_once_all_parts_are_stored(hosts):
    hosts.meet(0, 0, 1)
    assert put(hosts, 0, 1, [0, 1]) == [True, True]
    tier = hosts.tier(0, 0)
    answer = []
    thread = threading.Thread(
        target=lambda: answer.append(tier.put(state(7), (0, 2), 0, 2)), daemon=True
    )
    thread.start()  # the process with the other part is killed before it hands it over
    time.sleep(0.3)
    hosts.meet(1, 0, 1)
    assert [held(hosts, host, 1, 1) for host in (0, 1)] == [(1, 101.0)] * 2
    thread.join(WAIT_S)
    assert answer == [False]


def test_hosts_that_the_others_have_given_up_change_nothing(hosts, caplog):
    hosts.meet(0, 0, 1, 2)
    assert put(hosts, 0, 1, [0]) == [True]
    hosts.meet(1, 0, 1)  # without host 2, which does not know it
    stale = hosts.tier(2, 0)
    assert not stale.put(state(9), (0, 2))
    assert "generation 0 is over" in caplog.text
    with pytest.raises(Superseded, match="attempt 0 of the launch may no longer save"):
        hosts.tier(0, 0).put(state(9), (0, 2))
    assert held(hosts, 1, 1) == (1, 100.0)
    assert put(hosts, 1, 5, [1]) == [True]
    hosts.meet(2, 0, 1, 2)  # it comes back with what only it has
    assert [held(hosts, host, 2) for host in range(3)] == [(5, 500.0)] * 3


def test_a_dropped_snapshot_is_gone_on_all_hosts(hosts):
    hosts.meet(0, 0, 1, 2)
    assert put(hosts, 0, 3, [0]) == [True]
    hosts.tier(0, 0).drop()
    assert [held(hosts, host, 0) for host in range(3)] == [None] * 3
    assert put(hosts, 0, 1, [0]) == [True]  # a second training begins at the first step
    hosts.meet(1, 0, 1, 2)
    assert held(hosts, 2, 1) == (1, 100.0)


def test_a_host_without_memory_for_a_copy_is_named_once(hosts, caplog):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        poor = Peers(Holder(), listener, SECRET, available=lambda: 1000)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        peers = [("0", hosts.address(0)), ("1", address)]
        hosts.servers[0].meet(peers, 0, 0)
        poor.meet(peers, 1, 0)
        tier = hosts.tier(0, 0)
        for step in (1, 2):
            assert tier.put(state(step), (0, step))
    assert caplog.text.count("no other host holds a copy of the snapshots of this host") == 1
    reason = f"{address}: 1 kB of memory is available, and a copy needs 4.8 MB"
    assert reason in caplog.text
    assert tier.get().at == (0, 2)


def test_memory_that_another_host_refuses_is_named(hosts, caplog):
    """The limit of a file's size stands for memory that the system does not give."""
    resource.prlimit(hosts.servers[1].pid, resource.RLIMIT_FSIZE, (1000, 1000))
    hosts.meet(0, 0, 1)
    assert put(hosts, 0, 1, [0]) == [True]
    assert f"no other host holds a copy of the snapshots of this host ({hosts.address(1)}" in (
        caplog.text
    )
    assert held(hosts, 0, 0) == (1, 100.0)


def test_a_copy_goes_to_another_host_than_the_own_one(hosts):
    """Start two servers on one host, as `--on` does for two tasks."""
    peers = [(host, hosts.address(i)) for i, host in enumerate("aab")]
    for own, server in enumerate(hosts.servers):
        server.meet(peers, own, 0)
    assert put(hosts, 0, 1, [0]) == [True]
    assert [segments(server.pid) for server in hosts.servers] == [1, 0, 1]


@pytest.mark.parametrize(("parts", "expected"), [([0, 1], [2, 2, 0]), ([0], [1, 1, 0])])
def test_memory_is_released_on_all_hosts(hosts, parts, expected):
    """A host has a snapshot of its own, if it saves, and a copy, whatever the number of saves."""
    hosts.meet(0, 0, 1)
    for step in range(1, 9):
        assert put(hosts, 0, step, parts) == [True] * len(parts)
    assert [segments(server.pid) for server in hosts.servers] == expected
    hosts.meet(1, 0, 1, 2)
    assert held(hosts, 2, 1) == (8, 800.0)  # fetched
    assert put(hosts, 1, 9, parts) == [True] * len(parts)
    copies = len(parts) - 1  # host 2 gets that of host 1
    assert segments(hosts.servers[2].pid) == copies
    hosts.tier(0, 1).drop()
    assert [segments(server.pid) for server in hosts.servers] == [0, 0, 0]


def test_a_second_training_of_an_attempt_reads_what_the_first_one_saved(hosts):
    hosts.meet(0, 0, 1, 2)
    assert [held(hosts, host, 0) for host in range(3)] == [None] * 3
    for step in (1, 2):
        assert put(hosts, 0, step, [0]) == [True]
        assert [held(hosts, host, 0) for host in range(3)] == [(step, 100.0 * step)] * 3
    hosts.tier(0, 0).drop()
    assert put(hosts, 0, 1, [0]) == [True]
    assert [held(hosts, host, 0) for host in range(3)] == [(1, 100.0)] * 3


def test_a_killed_server_of_one_of_several_parts_costs_nothing_more(hosts):
    hosts.meet(0, 0, 1)
    tiers = [hosts.tier(0, 0), hosts.tier(1, 0)]

    def save(step):
        answers = []
        threads = [
            threading.Thread(
                target=lambda part=part: answers.append(
                    tiers[part].put(state(100 * step + part, first=part), (0, step), part, 2)
                )
            )
            for part in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        return answers

    for host in (1, 0):
        assert save(2 - host) == [True, True]
        os.kill(hosts.servers[host].pid, signal.SIGKILL)
    assert save(3) == [True, True]
    hosts.meet(1, 0, 1)
    assert [held(hosts, host, 1, 1) for host in (0, 1)] == [(3, 301.0)] * 2


def test_a_lost_server_completes_no_earlier_step_of_a_second_training(hosts, monkeypatch):
    monkeypatch.setattr(memory_tier, "PARTS_S", 2.0)
    hosts.meet(0, 0, 1)
    assert put(hosts, 0, 5, [0, 1]) == [True, True]
    hosts.lose(0)
    hosts.servers[0]._stop_listening()
    assert not hosts.tier(1, 0).put(state(101, first=1), (0, 1), 1, 2), "part 0 is missing"


def test_a_host_that_stops_during_a_copy_does_not_keep_later_ones_from_others(hosts):
    hosts.meet(0, 0, 1)
    os.kill(hosts.servers[1].pid, signal.SIGSTOP)
    tier = hosts.tier(0, 0)
    thread = threading.Thread(target=tier.put, args=(state(1), (0, 1)), daemon=True)
    thread.start()
    time.sleep(0.3)
    hosts.meet(1, 0, 2)
    assert put(hosts, 1, 2, [0]) == [True]
    assert segments(hosts.servers[2].pid) == 1
    os.kill(hosts.servers[1].pid, signal.SIGKILL)
    thread.join(WAIT_S)
    assert put(hosts, 1, 3, [0]) == [True]
    hosts.lose(0)
    hosts.meet(2, 2)
    assert held(hosts, 2, 2) == (3, 300.0)


def test_a_copy_that_takes_too_long_is_given_up(hosts):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peers = [("0", hosts.address(0)), ("1", f"127.0.0.1:{listener.getsockname()[1]}")]
        holder = Holder()
        own = Peers(holder, listener, SECRET, available=lambda: None)
        own.meet(peers, 1, 0)
        hosts.servers[0].meet(peers, 0, 0)
        descriptor = os.memfd_create("tfdist-snapshot")
        os.write(descriptor, b"x" * 100)
        holder.put(Part(RUN, (0, 0, 1), 1, 0, descriptor, 100))
        assert own.share(RUN, (0, 0, 1), 0, SAVE_S) == (
            f"{hosts.address(0)}: the copy takes too long"
        )
        holder.clear()


def test_a_server_that_is_stopped_does_not_stop_its_launcher(hosts):
    before = hosts.servers[0].pid
    os.kill(before, signal.SIGSTOP)
    peers = [(f"{each}", f"10.0.0.1:{each}") for each in range(20_000)]
    for generation in range(4):  # more than the pipe holds
        hosts.servers[0].meet(peers, 0, generation)
    wait_until(lambda: hosts.servers[0].pid != before)


def test_another_launch_begins_anew(hosts):
    """Its first host was restarted, and the generations begin at 0 again."""
    hosts.meet(3, 0, 1)
    assert put(hosts, 3, 1, [0]) == [True]
    hosts.meet(0, 0, 1, launch="another")
    assert [held(hosts, host, 0) for host in (0, 1)] == [None] * 2
    assert put(hosts, 0, 1, [0]) == [True]


def segments(pid):
    names = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return sum("tfdist-snapshot" in name for name in names)


def test_a_killed_server_is_told_its_peers_again(hosts):
    hosts.meet(0, 0, 1)
    assert put(hosts, 0, 1, [0]) == [True]
    before = hosts.servers[0].pid
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: put(hosts, 0, 2, [0]) == [True])
    hosts.meet(1, 0, 1)
    assert hosts.servers[0].pid != before
    assert [held(hosts, host, 1) for host in (0, 1)] == [(2, 200.0)] * 2


def test_strangers_get_nothing(hosts):
    hosts.meet(0, 0, 1)
    assert put(hosts, 0, 1, [0]) == [True]
    with pytest.raises(json_channel.WrongToken):
        json_channel.connect(hosts.address(0), b"x" * 16)
    for data in (b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000):
        with socket.create_connection(("127.0.0.1", hosts.servers[0].port)) as stranger:
            stranger.sendall(data)
    for message in ({}, {"do": "x"}, {"generation": 0, "do": "list"}, {"generation": "0"}):
        with contextlib.closing(json_channel.connect(hosts.address(0), SECRET)) as channel:
            channel.send(message)
    hosts.meet(1, 0, 1)
    assert held(hosts, 1, 1) == (1, 100.0)


def test_strangers_that_hold_connections_keep_no_host_out(hosts):
    hosts.meet(0, 0, 1)
    with crowd(hosts.address(1), 200):
        descriptors = pathlib.Path(f"/proc/{hosts.servers[1].pid}/fd")
        wait_until(lambda: len(list(descriptors.iterdir())) < HANDSHAKES + 32)
        assert put(hosts, 0, 1, [0]) == [True]
        hosts.lose(0)
        hosts.meet(1, 1)
        assert held(hosts, 1, 1) == (1, 100.0)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(OSError, match="assign requested address"):
        SnapshotServer("192.0.2.1", SECRET)
