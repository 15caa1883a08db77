"""Test preflight checks of tasks that meet on loopback and in threads.

The tests cover agreement, each fault, and the port that is free afterwards.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import socket
import threading
import time

import pytest

from tfdist.cluster import handshake, meeting, preflight
from tfdist.cluster.addresses import PortTaken, split_address
from tfdist.cluster.spec import ClusterSpec

LONG_S = 80.0  # a bound that no passing test reaches
SHORT_S = 0.8  # a bound for tasks that are absent


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    for name, seconds in {
        "RETRY_S": 0.05,
        "LINGER_S": 0.3,
        "EXCHANGE_S": 1.0,
        "PROGRESS_S": 0.3,
    }.items():
        monkeypatch.setattr(preflight, name, seconds)


def members(spec):
    return [spec.for_task(task.type, task.index) for task in spec.tasks]


def meet(specs, timeout=LONG_S, **differences):
    """Run `check` for all tasks at once and return what each raised.

    `differences` maps each option to its values.
    """
    with concurrent.futures.ThreadPoolExecutor(len(specs)) as pool:
        futures = []
        for i, spec in enumerate(specs):
            options = {
                "versions": "same",
                **{name: values[i] for name, values in differences.items()},
            }
            futures.append(pool.submit(preflight.check, spec, timeout=timeout, **options))
        return [future.exception() for future in futures]


def message(error, kind):
    assert isinstance(error, kind), error
    return str(error)


@pytest.mark.parametrize(
    "jobs",
    [{"workers": 1}, {"workers": 4}, {"workers": 2, "ps": 1, "chief": True, "evaluator": True}],
)
def test_all_meet_and_leave_their_ports_free(jobs):
    specs = members(ClusterSpec.local(**jobs))
    started = time.monotonic()
    assert meet(specs) == [None] * len(specs)
    assert time.monotonic() - started < LONG_S / 2
    for spec in specs:
        with socket.create_server(split_address(spec.task.address)):
            pass


def test_late_tasks_are_waited_for_by_name():
    specs = members(ClusterSpec.local(workers=2))
    lines = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(
            preflight.check, specs[0], LONG_S, versions="same", progress=lines.append
        )
        time.sleep(1)
        preflight.check(specs[1], LONG_S, versions="same")
        first.result()
    assert lines
    assert f"worker:0 waits for worker:1 at {specs[1].task.address} ([Errno 111]" in lines[0]


def test_it_listens_only_at_its_own_address():
    spec = members(ClusterSpec.local(workers=2))[0]
    port = split_address(spec.task.address)[1]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(preflight.check, spec, SHORT_S)
        time.sleep(SHORT_S / 2)
        with socket.create_connection(("127.0.0.1", port)):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))
        assert isinstance(waiting.exception(), preflight.PeersAbsent)


def test_absent_tasks_are_named_with_their_last_error():
    specs = members(ClusterSpec.local(workers=3))
    errors = meet(specs[:2], SHORT_S)
    assert all(isinstance(error, TimeoutError) for error in errors)
    text = next(str(error) for error in errors if "gave up" not in str(error))
    assert "1 of 3 tasks are absent" in text
    assert f"worker:2 at {specs[2].task.address} ([Errno 111] Connection refused)" in text


def test_a_name_that_never_resolves_is_an_absent_task():
    spec = ClusterSpec(
        {"worker": [*ClusterSpec.local().jobs["worker"], "nowhere.invalid:2222"]}, "worker", 0
    )
    assert "worker:1 at nowhere.invalid:2222 (" in message(
        *meet([spec], SHORT_S), preflight.PeersAbsent
    )


def other_cluster(specs):
    more = {"worker": (*specs[1].jobs["worker"], *ClusterSpec.local().jobs["worker"])}
    return [specs[0], dataclasses.replace(specs[1], jobs=more, source="file other.yaml")]


def test_different_clusters():
    errors = meet(other_cluster(members(ClusterSpec.local(workers=2))))
    assert "worker:1 at 127.0.0.1" in message(errors[0], preflight.ConfigurationError)
    assert "different cluster spec: 3 tasks, " in str(errors[0])
    assert "worker:1 has 3 tasks, " in message(errors[1], ValueError)
    assert "from file other.yaml" in str(errors[1])


def test_different_versions():
    errors = meet(
        members(ClusterSpec.local(workers=3)), versions=["keras 3.15", "keras 3.15", "keras 3.10"]
    )
    texts = [message(error, preflight.ConfigurationError) for error in errors]
    assert all("keras 3.10" in text and "keras 3.15" in text for text in texts)
    assert "different versions" in texts[2]


def test_different_attempts_wait_for_each_other():
    errors = meet(members(ClusterSpec.local(workers=2)), SHORT_S, attempt=["0", "1"])
    texts = [message(error, preflight.PeersAbsent) for error in errors]
    assert any("still attempt" in text for text in texts)  # the second to give up finds nobody


def test_a_second_process_of_one_task_on_this_machine():
    spec = members(ClusterSpec.local(workers=2))[0]
    kinds = {type(error) for error in meet([spec, spec], SHORT_S)}
    assert kinds == {preflight.PeersAbsent, PortTaken}


def test_a_second_process_of_one_task_elsewhere():
    """Send two badges of worker:1.

    The impostor's has the cluster, versions and attempt of the real one.
    """
    specs = members(ClusterSpec.local(workers=3))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        real = [pool.submit(preflight.check, spec, LONG_S, versions="same") for spec in specs[:2]]
        time.sleep(0.5)
        with socket.create_connection(split_address(specs[0].task.address)) as connection:
            fields = {
                "cluster": handshake.fingerprint(specs[0]),
                "versions": "same",
                "attempt": "0",
            }
            line = {"tfdist": 1, "task": "worker:1", "nonce": "another", **fields}
            connection.sendall(json.dumps(line).encode() + b"\n")
            assert (
                "two processes claim to be worker:1" in json.loads(connection.recv(8192))["fault"]
            )
        assert "two processes claim" in message(real[0].exception(), preflight.ConfigurationError)
        assert "worker:0 gave up: two processes" in message(
            real[1].exception(), preflight.ConfigurationError
        )


def test_an_address_that_leads_to_another_task(monkeypatch):
    """Swap two names, as a wrong /etc/hosts does; here for all tasks."""
    specs = members(ClusterSpec.local(workers=3))
    one, two = (spec.task.address for spec in specs[1:])
    monkeypatch.setattr(
        meeting, "split_address", lambda a: split_address({one: two, two: one}.get(a, a))
    )
    text = message(meet(specs)[0], preflight.ConfigurationError)
    assert "expected worker:" in text
    assert "found worker:" in text


@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"{}\n", b"[" * 5000 + b"\n", b"x" * 20000]
)
def test_another_program_at_an_address(sent):
    specs = members(ClusterSpec.local(workers=2))
    with socket.create_server(split_address(specs[1].task.address)) as stranger:

        def talk():
            while True:
                try:
                    connection, _ = stranger.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(sent)
                    connection.settimeout(0.2)
                    with contextlib.suppress(TimeoutError):
                        connection.recv(8192)

        thread = threading.Thread(target=talk)
        thread.start()
        try:
            text = message(*meet(specs[:1], SHORT_S), preflight.PeersAbsent)
        finally:
            stranger.shutdown(socket.SHUT_RDWR)
            thread.join(5)
    assert f"worker:1 at {specs[1].task.address} (" in text
    assert "no tfdist preflight" in text or "Connection reset" in text


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"{}\n",
        b"null\n",
        b"\xff\n",
        b"[" * 5000 + b"\n",
        b"x" * 20000,
    ],
)
def test_foreign_connections_do_no_harm(sent, capsys):
    specs = members(ClusterSpec.local(workers=2))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(preflight.check, specs[0], LONG_S, versions="same")
        time.sleep(0.3)
        with socket.create_connection(split_address(specs[0].task.address)) as connection:
            connection.sendall(sent)
            preflight.check(specs[1], LONG_S, versions="same")
        first.result()
    assert "Traceback" not in capsys.readouterr().err


def stranger_says(address, **fields):
    """Send the message of an unknown process that has read one of ours; return the reply."""
    with socket.create_connection(split_address(address)) as connection:
        connection.sendall(json.dumps({"tfdist": 1, "attempt": "0", **fields}).encode() + b"\n")
        return handshake.receive(connection, time.monotonic() + LONG_S)


@pytest.mark.parametrize(
    "fields",
    [
        {"task": "worker:1", "cluster": "another", "versions": "same", "nonce": "a"},
        {"task": "worker:1", "fault": "it gave up", "fault_of": "worker:1", "permanent": True},
        {"task": "worker:1", "signature": "0" * 64},
        {"task": "worker:1", "signature": 5},
    ],
)
def test_a_stranger_without_the_secret_ends_no_launch(fields):
    specs = members(ClusterSpec.local(workers=2))
    options = {"versions": "same", "secret": b"of this launch"}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(preflight.check, specs[0], LONG_S, **options)
        wait_for(specs[0].task.address)
        reply = stranger_says(
            specs[0].task.address, **{"cluster": handshake.fingerprint(specs[0]), **fields}
        )
        assert reply.keys() == {"tfdist", "signature"}
        preflight.check(specs[1], LONG_S, **options)
        assert first.exception() is None


@pytest.mark.parametrize("other", [b"of another launch", b""])
def test_a_task_of_another_launch_is_absent(other):
    specs = members(ClusterSpec.local(workers=2))
    for error in meet(specs, SHORT_S, secret=[b"of this launch", other]):
        text = message(error, preflight.PeersAbsent)
    assert "TFDIST_TASK_SECRET" in text or "Connection refused" in text


@pytest.mark.timeout(LONG_S - 5)  # closing does not wait for them either
def test_strangers_that_hold_connections_keep_no_task_out(monkeypatch):
    monkeypatch.setattr(meeting.TaskServer, "at_once", 2)
    monkeypatch.setattr(preflight, "EXCHANGE_S", LONG_S)
    specs = members(ClusterSpec.local(workers=2))
    with concurrent.futures.ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        first = pool.submit(preflight.check, specs[0], LONG_S / 4, versions="same")
        wait_for(specs[0].task.address)
        address = split_address(specs[0].task.address)
        held = [
            stack.enter_context(socket.create_connection(address, source_address=("127.0.0.2", 0)))
            for _ in range(8)
        ]
        assert held[0].recv(1) == b"", "the oldest makes room"
        preflight.check(specs[1], LONG_S, versions="same")
        assert first.exception() is None


def wait_for(address):
    limit = time.monotonic() + LONG_S
    while time.monotonic() < limit:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(split_address(address)).close()
        time.sleep(0.01)
    pytest.fail(f"nobody listens at {address}")


def test_early_connection_of_a_peers_tensorflow_delays_no_preflight(monkeypatch):
    monkeypatch.setattr(preflight, "EXCHANGE_S", LONG_S)
    specs = members(ClusterSpec.local(workers=2))
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(preflight.check, specs[0], LONG_S, versions="same")
        time.sleep(0.3)
        with socket.create_connection(split_address(specs[0].task.address)) as connection:
            connection.sendall(
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04"
            )  # of gRPC, which waits for an answer
            preflight.check(specs[1], LONG_S, versions="same")
            first.result()
    assert time.monotonic() - started < LONG_S / 2


def test_errors_of_this_task_are_raised_at_once():
    started = time.monotonic()
    specs = members(ClusterSpec.local(workers=2))
    with socket.create_server(split_address(specs[0].task.address)):
        text = message(*meet(specs[:1]), PortTaken)
    assert "already in use" in text
    elsewhere = ClusterSpec({"worker": ["203.0.113.1:2222", "203.0.113.2:2222"]}, "worker", 0)
    assert "not an address of this machine" in message(
        *meet([elsewhere]), preflight.ConfigurationError
    )
    assert "not a task of the cluster" in message(
        *meet([ClusterSpec.local()]), preflight.ConfigurationError
    )
    assert time.monotonic() - started < LONG_S / 2
