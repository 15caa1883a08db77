"""Test doctors of more hosts than ask in all pairs, in threads on loopback."""

import argparse
import collections
import concurrent.futures
import time
import types

import pytest

from tfdist.cluster import meeting, preflight
from tfdist.cluster.spec import ClusterSpec
from tfdist.tools.doctor import exchange, main
from tfdist.tools.doctor.check_results import FAIL, HOST, Check
from tfdist.tools.doctor.peers import PeerExchange

MANY = preflight.ALL_PAIRS + 2  # tasks
# Seconds: a bound that no passing test reaches; one for tasks that are absent, in which the others
# meet.
LONG, SHORT = 80.0, 6.0
FULL = Check(HOST, "directory", FAIL, "full", "make room")


@pytest.fixture(autouse=True)
def _links(monkeypatch):
    monkeypatch.setattr(PeerExchange, "links", lambda self, odd: [])


@pytest.fixture
def connections(monkeypatch):
    """Count connections that succeed, by the address."""
    made = collections.Counter()

    def connect(address, timeout):
        connection = meeting.connect(address, timeout)
        made[address] += 1
        return connection

    monkeypatch.setattr(exchange, "connect", connect)
    return made


def check(spec, *tasks, timeout=LONG, faults=()):
    """Check a cluster from the host of some tasks, together with the others."""
    flags = argparse.Namespace(together=True, timeout=timeout)
    begun = main.Diagnosis([*faults], types.SimpleNamespace(gpus=0), [])
    return main._check_peers(flags, spec, tasks, begun)


def check_all(hosts, timeout=LONG, faults=None):
    """Check from all hosts, pairs of a spec and its tasks; return the failed checks of each."""
    with concurrent.futures.ThreadPoolExecutor(len(hosts)) as pool:
        futures = [
            pool.submit(check, spec, *tasks, timeout=timeout, faults=(faults or {}).get(index, ()))
            for index, (spec, tasks) in enumerate(hosts)
        ]
        return [
            [f"{each.name}: {each.found}" for each in future.result() if each.status == FAIL]
            for future in futures
        ]


def one_each(count=MANY):
    spec = ClusterSpec.local(workers=count)
    return spec, [(spec, (task,)) for task in spec.tasks]


def test_connections_grow_with_the_number_of_hosts(connections):
    spec, hosts = one_each(64)
    assert check_all(hosts) == [[]] * 64
    addresses = [task.address for task in spec.tasks]
    # Each host asks two others, and reports to three; the first one asks all, and reports to all.
    assert max(connections[address] for address in addresses[1:]) <= 8
    assert sum(connections.values()) <= 10 * 64


def test_hosts_of_several_tasks_agree():
    spec = ClusterSpec.local(workers=MANY)
    hosts = [(spec, spec.tasks[first : first + 4]) for first in range(0, MANY, 4)]
    assert check_all(hosts) == [[]] * len(hosts)


@pytest.mark.parametrize("faulty", [0, 1, 20, MANY - 1])
def test_fault_of_one_host_fails_all(faulty):
    _, hosts = one_each()
    for index, failed in enumerate(check_all(hosts, faults={faulty: [FULL]})):
        # The host's own check is not among those of the cluster.
        expected = f"the doctor of worker:{faulty} found: directory: full"
        assert index == faulty == 0 or any(expected in text for text in failed), index


@pytest.mark.parametrize("absent", [0, 7, MANY - 1])
def test_an_absent_host_is_named_by_all(absent):
    spec, hosts = one_each()
    del hosts[absent]
    for failed in check_all(hosts, SHORT):
        named = f"worker:{absent} at {spec.tasks[absent].address}"
        assert any(named in text for text in failed), failed


def test_a_pair_that_cannot_connect_is_named(monkeypatch):
    """Let the host of worker:12 not reach worker:11, which the first host reaches."""
    spec, hosts = one_each()
    ask = exchange.ask

    def ask_unless_cut(address, hello, question, *args, **facts):
        if (hello["task"], address) == ("worker:12", spec.tasks[11].address):
            raise TimeoutError("timed out")
        return ask(address, hello, question, *args, **facts)

    monkeypatch.setattr(exchange, "ask", ask_unless_cut)
    found = check_all(hosts, SHORT)
    named = f"worker:11 at {spec.tasks[11].address}"
    assert any(f"{named} (timed out)" in text for text in found[12])
    assert any(f"{named} (timed out)" in text for text in found[0]), found[0]
    for failed in found:
        assert any("worker:12" in text or named in text for text in failed), failed


@pytest.mark.parametrize("seconds", [0, 1])
def test_different_clusters(monkeypatch, seconds):
    """The first host answers before it asks the odd one, which must still be there."""
    ask_all = PeerExchange.ask_all

    def ask_late(exchange):
        if exchange.leads:
            time.sleep(seconds)
        ask_all(exchange)

    monkeypatch.setattr(PeerExchange, "ask_all", ask_late)
    spec, hosts = one_each()
    jobs = {"worker": (*spec.jobs["worker"], "127.0.0.1:1")}
    other = ClusterSpec(jobs, source="file other.yaml")
    hosts[9] = (other, (other.tasks[9],))
    found = check_all(hosts)
    assert any("different cluster spec" in text for text in found[0])
    assert any("different cluster spec" in text for text in found[9])
    assert all(found)


def test_a_task_that_is_started_twice():
    """Both processes of worker:20 fail, and so do all others."""
    spec, hosts = one_each()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(check_all, hosts[:-1])
        while not _listens(spec.tasks[20].address):
            time.sleep(0.05)
        (second,) = check_all(hosts[20:21])
        assert any("already in use" in text for text in second)
        last = pool.submit(check_all, hosts[-1:])
        for failed in [*first.result(), *last.result()]:
            assert any("the doctor of worker:20 found: ports: " in text for text in failed), failed


def _listens(address):
    try:
        meeting.connect(address, 1.0).close()
    except OSError:
        return False
    return True
