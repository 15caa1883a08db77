"""Test the channel between launchers.

A peer that does not know the token, or changes a byte, is refused by name.
"""

import concurrent.futures
import contextlib
import json
import socket
import threading
import time

import pytest

from tfdist.cluster import json_channel

TOKEN = b"0123456789abcdef"
OTHER = b"0123456789abcdeg"
LONG_S = 20.0  # a bound that no passing test reaches
SHORT_S = 0.3  # a bound that is to be reached


@contextlib.contextmanager
def server():
    """Yield a listening socket, its address, and a pool for the other side."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        listener.settimeout(LONG_S)
        yield listener, f"127.0.0.1:{listener.getsockname()[1]}", pool


@contextlib.contextmanager
def stranger(timeout=LONG_S):
    """Yield a raw connection to a server, and the future of the channel that the server accepts."""
    with server() as (listener, address, pool):
        accepted = pool.submit(lambda: json_channel.accept(listener.accept()[0], TOKEN, timeout))
        with socket.create_connection(json_channel.split_address(address), timeout=LONG_S) as raw:
            yield raw, accepted


@contextlib.contextmanager
def middle():
    """Yield two channels with the test in their middle: what one side sends comes out there.

    What goes in there reaches the other side.
    """
    with server() as (listener, address, pool):
        with socket.create_server(("127.0.0.1", 0)) as outer:
            outer.settimeout(LONG_S)
            there = pool.submit(lambda: json_channel.accept(listener.accept()[0], TOKEN))
            here = pool.submit(
                lambda: json_channel.connect(f"127.0.0.1:{outer.getsockname()[1]}", TOKEN)
            )
            with (
                outer.accept()[0] as client,
                socket.create_connection(
                    json_channel.split_address(address), timeout=LONG_S
                ) as service,
            ):
                client.settimeout(LONG_S)
                client.sendall(line(service))
                service.sendall(line(client))
                client.sendall(line(service))
                channels = here.result(LONG_S), there.result(LONG_S)
                yield *channels, client, service
                for channel in channels:
                    channel.close()


@pytest.fixture
def pair():
    with server() as (listener, address, pool):
        there = pool.submit(lambda: json_channel.accept(listener.accept()[0], TOKEN))
        here = json_channel.connect(address, TOKEN)
        yield here, there.result(LONG_S)
        here.close()
        there.result().close()


def line(connection):
    data = b""
    while not data.endswith(b"\n"):
        piece = connection.recv(1)
        assert piece, f"closed after {data!r}"
        data += piece
    return data


def test_messages_go_both_ways_in_order(pair):
    here, there = pair
    for i in range(3):
        here.send({"i": i, "text": "ä\n"})
        there.send({"answer": i})
    assert [there.receive(LONG_S) for _ in range(3)] == [{"i": i, "text": "ä\n"} for i in range(3)]
    assert [here.receive(LONG_S)["answer"] for _ in range(3)] == [0, 1, 2]
    assert here.receive(0) is None
    here.close()
    here.close()
    with pytest.raises(json_channel.Closed, match=r"127\.0\.0\.1:\d+ closed the connection"):
        there.receive(LONG_S)


def test_many_threads_send_and_a_large_message_arrives_complete(pair):
    here, there = pair
    threads = [
        threading.Thread(
            target=lambda i=i: [here.send({"from": i, "text": "x" * 5000}) for _ in range(20)]
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    received = [there.receive(LONG_S)["from"] for _ in range(80)]
    for thread in threads:
        thread.join(LONG_S)
    assert sorted(received) == sorted([0, 1, 2, 3] * 20)
    with pytest.raises(json_channel.TooLong, match="not sent"):
        here.send({"text": "x" * json_channel.LINE_BYTES})
    here.send({"still": "usable"})
    assert there.receive(LONG_S) == {"still": "usable"}


def test_another_token_is_refused_and_both_sides_name_the_peer():
    with server() as (listener, address, pool):
        accepted = pool.submit(lambda: json_channel.accept(listener.accept()[0], TOKEN))
        with pytest.raises(
            json_channel.WrongToken, match=f"{address} does not accept this host's token"
        ):
            json_channel.connect(address, OTHER)
        with pytest.raises(
            json_channel.WrongToken, match=r"127\.0\.0\.1:\d+ does not know the token"
        ):
            accepted.result(LONG_S)


def test_server_must_prove_that_it_has_the_token():
    """Test that a peer that sends back the client's own proof, or any other, gets no channel.

    It learns nothing.
    """
    with server() as (listener, address, pool):

        def impostor(echo):
            with listener.accept()[0] as connection:
                connection.sendall(b"tfdist-wire 1 " + b"0" * 64 + b"\n")
                proof = line(connection).split()[1]
                connection.sendall((proof if echo else b"f" * 64) + b"\n")

        for echo in (True, False):
            done = pool.submit(impostor, echo)
            with pytest.raises(json_channel.WrongToken, match=f"{address} does not know"):
                json_channel.connect(address, TOKEN)
            done.result(LONG_S)


def test_replayed_handshake_is_refused():
    with server() as (listener, address, pool):
        client = pool.submit(json_channel.connect, address, TOKEN)
        with listener.accept()[0] as connection:
            connection.sendall(b"tfdist-wire 1 " + b"0" * 64 + b"\n")
            recorded = line(connection)
        with pytest.raises(json_channel.Closed):
            client.result(LONG_S)
    with stranger() as (raw, accepted):
        line(raw)
        raw.sendall(recorded)
        with pytest.raises(json_channel.WrongToken):
            accepted.result(LONG_S)
        assert line(raw) == b"wrong token\n"
        assert raw.recv(1) == b""


@pytest.mark.parametrize("part", [0, 70, -3])  # of the MAC, of the message, its end
def test_a_changed_line_is_refused(part):
    with middle() as (here, there, client, service):
        here.send({"amount": 1111})
        data = bytearray(line(client))
        data[part] = ord("1") if data[part] != ord("1") else ord("2")
        service.sendall(data)
        with pytest.raises(json_channel.Tampered, match=r"127\.0\.0\.1:\d+: line 0 was changed"):
            there.receive(LONG_S)
        with pytest.raises(json_channel.Closed):
            there.receive(LONG_S)


def test_a_repeated_a_missing_and_a_reflected_line_are_refused():
    with middle() as (here, there, client, service):
        here.send({"i": 0})
        first = line(client)
        service.sendall(first + first)
        assert there.receive(LONG_S) == {"i": 0}
        with pytest.raises(json_channel.Replayed, match="expected line 1, received line 0"):
            there.receive(LONG_S)
    with middle() as (here, there, client, service):
        here.send({"i": 0})
        here.send({"i": 1})
        line(client)
        service.sendall(line(client))
        with pytest.raises(json_channel.Replayed, match="expected line 0, received line 1"):
            there.receive(LONG_S)
    with middle() as (here, there, client, service):
        here.send({"i": 0})
        client.sendall(line(client))
        with pytest.raises(json_channel.Tampered):
            here.receive(LONG_S)


def test_a_line_of_another_session_is_refused():
    with middle() as (here, _, client, _):
        here.send({"i": 0})
        recorded = line(client)
    with middle() as (_, there, _, service):
        service.sendall(recorded)
        with pytest.raises(json_channel.Tampered):
            there.receive(LONG_S)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95pickle\n", b"\n", b"0" * 64 + b" 0\n"]
)
def test_garbage_is_refused(data):
    with stranger() as (raw, accepted):
        raw.sendall(data)
        with pytest.raises(json_channel.Garbage, match=r"127\.0\.0\.1:\d+ is no tfdist process"):
            accepted.result(LONG_S)
    with middle() as (_, there, _, service):
        service.sendall(data)
        with pytest.raises((json_channel.Garbage, json_channel.Tampered)):
            there.receive(LONG_S)


def test_peer_that_sends_no_object_is_refused(pair):
    here, there = pair
    here.send([1])
    with pytest.raises(json_channel.Garbage, match="no object"):
        there.receive(LONG_S)


def test_json_is_all_that_is_read(monkeypatch, pair):
    here, there = pair
    monkeypatch.setattr(json_channel.json, "dumps", lambda *args, **options: "[" * 100_000)
    here.send({})
    monkeypatch.setattr(json_channel.json, "dumps", json.dumps)
    with pytest.raises(json_channel.Garbage, match="no JSON"):
        there.receive(LONG_S)


def test_a_server_of_another_kind_is_named():
    with server() as (listener, address, pool):

        def ssh():
            with listener.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                line(connection) if connection.recv(1) else None

        done = pool.submit(ssh)
        with pytest.raises(json_channel.Garbage, match=f"{address}.* it sent b'SSH-2.0"):
            json_channel.connect(address, TOKEN)
        done.result(LONG_S)


def test_lines_that_never_end_are_refused():
    with stranger() as (raw, accepted):
        raw.sendall(b"0" * 10_000)
        with pytest.raises(json_channel.TooLong, match="more than 256 bytes"):
            accepted.result(LONG_S)
    with middle() as (_, there, _, service), concurrent.futures.ThreadPoolExecutor(1) as pool:
        received = pool.submit(there.receive, LONG_S)
        with contextlib.suppress(OSError):  # it hangs up before it has read all
            service.sendall(b"0" * (2 * json_channel.LINE_BYTES))
        with pytest.raises(
            json_channel.TooLong, match=f"more than {json_channel.LINE_BYTES} bytes"
        ):
            received.result(LONG_S)


def test_silent_or_slow_peer_is_dropped():
    with (
        stranger(SHORT_S) as (_, accepted),
        pytest.raises(json_channel.TooSlow, match="did not send its answer in time"),
    ):
        accepted.result(LONG_S)
    with stranger(SHORT_S) as (raw, accepted):
        started = time.monotonic()
        with contextlib.suppress(OSError):
            while not accepted.done() and time.monotonic() - started < LONG_S:
                raw.sendall(b"0")
                time.sleep(SHORT_S / 10)
        with pytest.raises(json_channel.TooSlow):
            accepted.result(LONG_S)
    with (
        server() as (_, address, _),
        pytest.raises(json_channel.TooSlow, match=f"{address} did not send its greeting"),
    ):
        json_channel.connect(address, TOKEN, SHORT_S)


def test_peer_that_does_not_read_is_dropped(pair):
    here, _ = pair

    def fill():
        while True:
            here.send({"text": "x" * (json_channel.LINE_BYTES // 2)}, SHORT_S)

    with pytest.raises(json_channel.TooSlow, match="does not read"):
        fill()
    with pytest.raises(json_channel.Closed):
        here.send({})


def test_short_token_is_refused():
    with pytest.raises(ValueError, match=r"at least 16 random bytes, received 6; make one with"):
        json_channel.connect("127.0.0.1:1", b"secret")
    with pytest.raises(OSError, match="refused"):
        json_channel.connect("127.0.0.1:1", TOKEN)
