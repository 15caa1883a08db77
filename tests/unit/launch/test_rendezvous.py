"""Test hosts that meet, grow, fail, vanish and return: launchers in threads, with short bounds."""

import concurrent.futures
import contextlib
import errno
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.networks import crowd
from tests.processes import ROOT, environment
from tfdist.cluster import json_channel
from tfdist.cluster.addresses import free_ports, split_address
from tfdist.launch import rendezvous, rendezvous_client
from tfdist.launch.membership import Membership
from tfdist.launch.messages import Cut, Decision, Finish, Start, Stop, Terms
from tfdist.launch.rendezvous import Rendezvous
from tfdist.launch.rendezvous_client import RendezvousClient

TOKEN = b"0123456789abcdef"
LONG_S = 20.0  # a bound that no passing test reaches
SILENCE = 1.0  # a loaded machine holds up a thread for less
WINDOW = 0.5
NEVER = 600.0


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(rendezvous, "TICK_S", 0.02)
    monkeypatch.setattr(rendezvous_client, "POLL_S", 0.01)
    monkeypatch.setattr(rendezvous_client, "RETRY_S", 0.05)


def limited(restarts):
    """Return the simplest policy: so many restarts after failures that count, and no delay."""
    used = 0

    def decide(outcome):
        nonlocal used
        used += outcome.cause.counted
        text = f"{outcome.cause.host}: {outcome.cause.text}"
        return Decision(
            used <= restarts,
            text=f"{text}; all {restarts} restarts are used"
            if used > restarts
            else f"{text}; restart {used} of {restarts}",
        )

    return decide


class House:
    """Run a rendezvous and its members, all of which end with the test."""

    def __init__(self):
        self.lines = []
        self.outcomes = []
        self.stack = contextlib.ExitStack()

    def serve(
        self, min_workers, max_workers, decide=None, address="127.0.0.1:0", restarts=0, **terms
    ):
        terms = {
            "window": WINDOW,
            "host_timeout": SILENCE,
            "timeout": NEVER,
            "grace": LONG_S,
            **terms,
        }
        decide = decide or limited(restarts)

        def ask(outcome):
            self.outcomes.append(outcome)
            return decide(outcome)

        self.server = Rendezvous(
            address,
            TOKEN,
            Terms(min_workers, max_workers, **terms),
            decide=ask,
            show_line=self.lines.append,
        )
        self.stack.callback(self.server.close)
        return self.server

    def join(self, name, slots=1, digest="train.py", address=None, **options):
        options = {"token": TOKEN, "host": "127.0.0.1", "join_timeout": LONG_S, **options}
        joined = RendezvousClient(
            address or self.server.address, slots=slots, command_digest=digest, name=name, **options
        )
        self.stack.callback(joined.close)
        return joined

    def pair(self):
        """Join two members, in this order."""
        first = self.join("a")
        self.says("a (127.0.0.1) joined")
        return first, self.join("b")

    def says(self, text):
        """Wait until a line of the log contains this text."""
        limit = time.monotonic() + LONG_S
        while not any(text in line for line in list(self.lines)):
            assert time.monotonic() < limit, f"nobody said {text!r}:\n" + "\n".join(self.lines)
            time.sleep(0.01)


@pytest.fixture
def house():
    house = House()
    with house.stack:
        yield house
    left = [
        t.name for t in threading.enumerate() if t.name.startswith("rendezvous") and not _ends(t)
    ]
    assert not left


def _ends(thread):
    thread.join(5)
    return not thread.is_alive()


def get(one, kind):
    """Return the member's next order, which is of that kind."""
    order = one.order(LONG_S)
    assert isinstance(order, kind), order
    return order


def starts(*members):
    """Check that all members start one generation, in this order of workers; return the orders."""
    orders = [get(one, Start) for one in members]
    assert len({(order.generation, order.launch_id, order.addresses) for order in orders}) == 1
    first = 0
    for order in orders:
        assert order.first == first
        first += order.count
    assert first == len(orders[0].addresses) == len(set(orders[0].addresses))
    return orders


def finishes(code, text, *members):
    for one in members:
        order = get(one, Finish)
        assert order.code == code
        assert text in order.text
        assert one.order(0) == order, "there is nothing after the end"


def test_two_hosts_form_a_generation_and_finish_when_all_are_done(house):
    server = house.serve(3, 3, window=NEVER)
    a = house.join("a", slots=1)
    house.says("1 worker can run, 3 required")
    b = house.join("b", slots=2)
    first, second = starts(a, b)
    assert (first.generation, first.count, second.count) == (0, 1, 2)
    assert all(address.startswith("127.0.0.1:") for address in first.addresses)
    assert a.order(0) is None
    a.done()
    assert server.wait(0.1) is None
    b.done()
    finishes(0, "all 3 workers done", a, b)
    assert server.wait(LONG_S) == Finish(0, "all 3 workers done")
    house.says("generation 0: 3 workers on a (127.0.0.1) (1), b (127.0.0.1) (2)")


def test_it_forms_with_fewer_after_the_window_and_grows_when_another_joins(house):
    house.serve(1, 3)
    a = house.join("a")
    (alone,) = starts(a)
    assert alone.count == 1
    b = house.join("b", slots=4)
    stop = get(a, Stop)
    assert stop.gently
    assert "running" in stop.reason
    assert b.order(0.1) is None, "a has not stopped"
    a.stopped()
    first, second = starts(a, b)
    assert (first.generation, first.count, second.count) == (1, 1, 2)
    assert alone.addresses[0] not in first.addresses
    assert not house.outcomes, "growing is no failure"


def test_host_above_the_maximum_is_spare_and_replaces_a_lost_one(house):
    house.serve(2, 2, restarts=9)
    a, b = house.pair()
    starts(a, b)
    c = house.join("c", slots=5)
    house.says("c (127.0.0.1) joined")
    assert a.order(0.1) is None, "nobody stops for a spare"
    b.close("SIGINT")
    stop = get(a, Stop)
    assert (stop.gently, stop.reason) == (False, "b (127.0.0.1) was lost: SIGINT")
    a.stopped()
    assert [order.count for order in starts(a, c)] == [1, 1]
    assert house.outcomes[0].cause.what == "lost"


def test_host_that_leaves_counts_as_lost_and_can_rejoin(house):
    house.serve(1, 2, restarts=1, window=1.0)
    a, b = house.pair()
    starts(a, b)
    a.close()
    stop = get(b, Stop)
    assert "a (127.0.0.1) was lost" in stop.reason
    b.stopped()
    back = house.join("a")
    assert starts(back, b)[0].generation == 1
    assert [(report.host, report.what) for report in house.outcomes[0].reports] == [
        ("a (127.0.0.1)", "lost")
    ]


def test_never_below_the_minimum(house):
    house.serve(2, 3, window=0.1, timeout=1.0, restarts=9)
    a, b = house.pair()
    starts(a, b)
    b.close()
    get(a, Stop)
    a.stopped()
    order = get(a, Finish)
    assert order.code == 75
    assert (
        "1 of at least 2 workers can run. Present: a (127.0.0.1) with 1 slot. Missing: b "
        "(127.0.0.1), which had 1 slot"
    ) in order.text


def test_missing_hosts_are_named_after_the_timeout(house):
    server = house.serve(2, 2, timeout=0.3)
    a = house.join("a")
    finishes(
        75,
        "after 0.3 s, 1 of at least 2 workers can run. Present: a (127.0.0.1) with 1 slot. "
        "Missing: hosts that never joined",
        a,
    )
    assert server.wait(LONG_S).code == 75
    finishes(75, "never joined", house.join("late"))


def test_another_command_is_refused_and_named(house):
    house.serve(1, 2, window=NEVER)
    a = house.join("a", digest="train.py --lr 1")
    house.says("a (127.0.0.1) joined")
    b = house.join("b", digest="train.py --lr 2")
    finishes(
        78,
        "refused b (127.0.0.1): its command is train.py --lr 2, the others run train.py --lr 1",
        b,
    )
    assert a.order(0) is None
    house.says("refused b")


def test_another_token_is_refused_at_once(house):
    house.serve(1, 1, window=NEVER)
    finishes(78, "does not accept this host's token", house.join("b", token=b"x" * 16))
    house.says("rejected a connection: 127.0.0.1")


def test_foreign_connections_do_no_harm(house):
    house.serve(1, 2, window=WINDOW)
    address = split_address(house.server.address)
    with contextlib.ExitStack() as stack:
        raws = [stack.enter_context(socket.create_connection(address, LONG_S)) for _ in range(5)]
        raws[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        raws[1].sendall(b"0" * 5000)
        channel = json_channel.connect(house.server.address, TOKEN)
        channel.send({"do": "join", "slots": "many"})
        assert channel.receive(LONG_S)["code"] == 78
        channel.close()
        starts(house.join("a"))
    house.says("rejected a connection")
    house.says("another version")


def test_strangers_that_hold_connections_keep_no_host_out(house):
    server = house.serve(1, 1, host_timeout=LONG_S)
    with crowd(server.address, 200):
        starts(house.join("a", join_timeout=json_channel.HANDSHAKE_S - 1))


def test_a_failure_stops_the_others_and_the_policy_is_asked(house):
    house.serve(2, 2, window=NEVER, decide=lambda outcome: Decision(True, 0.1, "once more"))
    a, b = house.pair()
    before = starts(a, b)[0]
    b.failed("lost peers", "UnavailableError", code=1)
    stop = get(a, Stop)
    assert not stop.gently
    assert stop.reason == "b (127.0.0.1) failed: UnavailableError"
    a.failed(
        "signal", "worker:0 was killed by SIGKILL", signature="SIGKILL@7", counted=False, code=137
    )
    after = starts(a, b)[0]
    assert (before.generation, after.generation) == (0, 1)
    assert before.launch_id == after.launch_id
    assert not set(before.addresses) & set(after.addresses)
    (outcome,) = house.outcomes
    assert [report.kind for report in outcome.reports] == ["lost peers", "signal"]
    assert outcome.generation == 0
    cause = outcome.cause
    assert (cause.host, cause.signature, cause.counted, cause.code) == (
        "a (127.0.0.1)",
        "SIGKILL@7",
        False,
        137,
    )
    house.says("once more; waiting 0.1 s")


def test_the_policy_ends_it(house):
    server = house.serve(2, 2, window=NEVER, restarts=1)
    a, b = house.pair()
    starts(a, b)
    for last in (False, True):
        b.failed("error", "KeyError: 1", code=3)
        get(a, Stop)
        a.stopped()
        if not last:
            starts(a, b)
    finishes(3, "b (127.0.0.1): KeyError: 1; all 1 restarts are used", a, b)
    assert server.wait(LONG_S).code == 3


def test_a_policy_that_fails_ends_it_too(house):
    house.serve(1, 1, decide=lambda outcome: 1 / 0)
    a = house.join("a")
    starts(a)
    a.failed("error", "")
    finishes(1, "the rendezvous failed: ZeroDivisionError", a)


def test_preemption_stops_gently_and_is_not_counted(house):
    house.serve(1, 2)
    a, b = house.pair()
    starts(a, b)
    b.preempted(leaving=True)
    stop = get(a, Stop)
    assert stop.gently
    assert stop.reason == "b (127.0.0.1) was preempted"
    a.preempted()
    assert starts(a)[0].count == 1, "b is about to leave"
    b.close()
    assert a.order(0.1) is None
    a.preempted()
    assert starts(a)[0].generation == 2
    assert not house.outcomes


def test_reports_of_an_older_generation_are_ignored(house):
    house.serve(1, 1, restarts=9)
    channel = json_channel.connect(house.server.address, TOKEN)
    channel.send({"do": "join", "id": "x", "host": "h", "name": "h", "slots": 1, "digest": ""})
    heard = {}

    def until(word):
        limit = time.monotonic() + LONG_S
        while word not in heard:
            assert time.monotonic() < limit
            message = channel.receive(0.05) or {}
            channel.send({"do": "beat", "number": 0})
            if message.get("do") == "ports":
                channel.send(
                    {
                        "do": "ports",
                        "generation": message["generation"],
                        "ports": free_ports(message["count"]),
                    }
                )
            heard[message.get("do")] = message
        return heard.pop(word)

    assert until("start")["generation"] == 0
    channel.send({"do": "failed", "generation": 0, "text": "first"})
    assert until("start")["generation"] == 1
    for word in ("failed", "done", "stopped", "preempted", "nonsense"):
        channel.send({"do": word, "generation": 0})
    channel.send({"do": "done", "generation": 1})
    assert until("finish")["code"] == 0
    assert len(house.outcomes) == 1
    channel.close()


def test_a_host_that_does_not_stop_is_given_up(house):
    house.serve(1, 2, grace=0.3, restarts=9)
    a, b = house.pair()
    starts(a, b)
    b.failed("error", "boom")
    get(a, Stop)
    get(a, Cut)
    house.says("its workers did not end within 0.3 s")
    starts(a, b)
    assert [report.what for report in house.outcomes[0].reports] == ["failed", "lost"]


def test_host_without_ports_is_refused_with_the_reason(house):
    def none(count):
        raise ValueError("all taken")

    house.serve(1, 2, window=0.1)
    a = house.join("a", ports=none)
    finishes(75, "a (127.0.0.1) has no 1 free port: all taken", a)
    starts(house.join("b"))


def test_members_come_before_the_rendezvous(house):
    address = f"127.0.0.1:{free_ports(1)[0]}"
    a = house.join("a", address=address)
    assert a.order(0.2) is None
    house.serve(1, 1, address=address)
    starts(a)
    finishes(
        75,
        f"no rendezvous at {(gone := f'127.0.0.1:{free_ports(1)[0]}')} after 0.2 s",
        house.join("b", address=gone, join_timeout=0.2),
    )


def test_only_the_first_host_can_serve_and_only_at_its_address(house):
    house.serve(1, 1)
    with pytest.raises(OSError, match="already in use") as taken:
        house.serve(1, 1, address=house.server.address)
    assert taken.value.errno == errno.EADDRINUSE
    with pytest.raises(OSError, match="not an address of this machine") as elsewhere:
        house.serve(1, 1, address="192.0.2.1:2222")  # reserved for documentation
    assert elsewhere.value.errno == errno.EADDRNOTAVAIL
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", split_address(house.server.address)[1]), LONG_S)


def test_a_name_of_this_machine_alone_is_warned_of(house):
    house.serve(1, 1, address="127.1:0")
    assert (
        "127.1 is 127.0.0.1 on this machine, to which no other host can connect" in house.lines[0]
    )
    starts(house.join("a"))


def test_ipv6(house):
    try:
        house.serve(1, 1, address="[::1]:0")
    except OSError as error:
        pytest.skip(f"no IPv6 on this machine: {error}")
    (start,) = starts(house.join("a", host="::1"))
    assert start.addresses[0].startswith("[::1]:")


def test_the_rendezvous_vanishes(house):
    """Kill it, so that it cannot say farewell: the members cut, look for it, and give up."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    code = (
        "import sys, time\nfrom tfdist.launch.rendezvous import Rendezvous, Terms\n"
        f"Rendezvous({address!r}, {TOKEN!r}, Terms(2, 2, window={WINDOW}), decide=print)\n"
        f"time.sleep({4 * LONG_S})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), start_new_session=True
    )
    try:
        members = house.join("a", address=address), house.join("b", address=address)
        for one in members:
            get(one, Start)
        os.kill(process.pid, signal.SIGKILL)
        for one in members:
            assert f"lost the rendezvous at {address}" in get(one, Cut).reason
        finishes(
            75,
            f"lost the rendezvous at {address}, and could not connect again within {WINDOW:g} s",
            *members,
        )
    finally:
        process.kill()
        process.wait(LONG_S)


def test_a_frozen_launcher_is_lost_and_cuts_as_soon_as_it_wakes(house):
    """Stop it by SIGSTOP: its connection stays open, and its machine answers for it."""
    house.serve(1, 2, restarts=1)
    code = (
        "from tfdist.launch.rendezvous_client import RendezvousClient\n"
        f"with RendezvousClient({house.server.address!r}, {TOKEN!r}, '127.0.0.1', 1, 'train.py', "
        "name='b') as b:\n"
        f"  for order in iter(lambda: b.order({LONG_S}), None):\n"
        "    print(type(order).__name__, flush=True)\n"
        "    if type(order).__name__ in ('Cut', 'Finish'): break\n"
    )
    a = house.join("a")
    house.says("a (127.0.0.1) joined")
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            order = get(a, Start)
            if order.count == len(order.addresses):  # b's Python took longer than the window
                get(a, Stop)
                a.stopped()
                get(a, Start)
            assert process.stdout.readline() == "Start\n"
            os.kill(process.pid, signal.SIGSTOP)
            assert "silent for 1 s" in get(a, Stop).reason
            a.stopped()
            assert get(a, Start).count == 1
            os.kill(process.pid, signal.SIGCONT)
            assert process.stdout.readline() == "Cut\n"
            process.wait(LONG_S)
        finally:
            process.kill()


def test_first_launcher_reports_its_end(house):
    house.serve(2, 2)
    a = house.join("a")
    b = house.join("b")
    get(a, Start), get(b, Start)
    house.server.close(143, "ended by SIGTERM")
    finishes(143, "ended by SIGTERM", a, b)


def test_late_message_is_not_taken_for_the_next_generation(house):
    """It still ends the isolated tasks when the next order has already arrived."""
    house.serve(1, 2, grace=0.2, restarts=9)
    a, b = house.pair()
    starts(a, b)
    b.failed("error", "boom")
    get(a, Stop)
    get(a, Cut)
    house.says("generation 1: 2 workers")
    a.stopped()
    a.failed("lost peers", "of generation 0")
    starts(a, b)
    for one in (a, b):
        one.done()
    finishes(0, "all 2 workers done", a, b)
    assert len(house.outcomes) == 1


class Network:
    """Relay to the rendezvous; while cut, drop all data without closing connections."""

    def __init__(self, target):
        self.cut = threading.Event()
        self._target = split_address(target)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(0.05)
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._end = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(16)
        self._pool.submit(self._listen)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._end.set()
        self._pool.shutdown()
        self._server.close()

    def _listen(self):
        while not self._end.is_set():
            with contextlib.suppress(TimeoutError):
                near = self._server.accept()[0]
                if self.cut.is_set():
                    near.close()
                    continue
                far = socket.create_connection(self._target, LONG_S)
                for one, other in ((near, far), (far, near)):
                    self._pool.submit(self._carry, one, other)

    def _carry(self, one, other):
        one.settimeout(0.05)
        was_cut = False
        with one:
            while not self._end.is_set():
                was_cut |= self.cut.is_set()
                with contextlib.suppress(TimeoutError):
                    try:
                        data = one.recv(1 << 16)
                        if not data:
                            break
                        if not was_cut:
                            other.sendall(data)
                    except OSError as error:
                        if isinstance(error, TimeoutError):
                            raise
                        break
            if not was_cut:
                with contextlib.suppress(OSError):
                    other.shutdown(socket.SHUT_RDWR)


def test_partitioned_host_stops_before_the_others_continue_and_rejoins(house):
    house.serve(1, 2, restarts=1, window=2.0)
    with Network(house.server.address) as network:
        a = house.join("a")
        house.says("a (127.0.0.1) joined")
        b = house.join("b", address=network.address)
        starts(a, b)
        network.cut.set()
        assert "did not answer for 0.9 s" in get(b, Cut).reason
        stop = get(a, Stop)
        assert not stop.gently
        assert "b (127.0.0.1) was lost: it was silent for 1 s" in stop.reason
        b.stopped()  # too late to matter, and no harm
        network.cut.clear()
        a.stopped()
        first, _ = starts(a, b)
        assert first.generation == 1
        assert house.outcomes[0].reports[0].what == "lost"
        for one in (a, b):
            one.done()
        finishes(0, "done", a, b)


def test_job_shrinks_without_a_partitioned_host_and_grows_back(house):
    house.serve(1, 2, restarts=1, window=0.3)
    with Network(house.server.address) as network:
        a = house.join("a")
        house.says("a (127.0.0.1) joined")
        b = house.join("b", address=network.address)
        starts(a, b)
        network.cut.set()
        get(b, Cut)
        get(a, Stop)
        a.stopped()
        assert starts(a)[0].addresses[1:] == ()
        assert b.order(0.6) is None, "it has not given up after the restart window"
        network.cut.clear()
        assert get(a, Stop).gently
        a.stopped()
        assert starts(a, b)[0].generation == 2


def test_a_partitioned_host_gives_up_after_the_join_timeout(house):
    house.serve(1, 2, restarts=1, window=0.1)
    with Network(house.server.address) as network:
        b = house.join("b", address=network.address, join_timeout=1.5)
        starts(b)
        network.cut.set()
        get(b, Cut)
        finishes(75, "could not connect again within 1.5 s", b)


# The assembly by itself: the clock is a number.


class Table:
    """Drive a membership whose hosts answer as the test decides."""

    def __init__(self, min_workers, max_workers, **terms):
        self.now = 0.0
        self.lines = []
        self.outcomes = []
        terms = {"window": 10.0, "host_timeout": 5.0, "timeout": 60.0, **terms}

        def decide(outcome):
            self.outcomes.append(outcome)
            return Decision(True, 20.0)

        self.membership = Membership(
            Terms(min_workers, max_workers, **terms), decide, self.lines.append, self.now
        )
        self.alive = set()
        self.words = []
        self.port = 20_000

    def join(self, key, slots=1, host=None):
        host = host or f"10.0.0.{key}"
        self.alive.add(key)
        self.membership.joined(
            key,
            {
                "do": "join",
                "id": f"id-{key}",
                "host": host,
                "name": "",
                "slots": slots,
                "digest": "d",
            },
            self.now,
        )
        self.step()

    def say(self, key, word, **facts):
        self.membership.receive(key, {"do": word, **facts}, self.now)
        self.step()

    def step(self, ports=True):
        self.membership.tick(self.now)
        while self.membership.outbox:
            key, message = self.membership.outbox.pop(0)
            word = message and message["do"]
            if word == "ports" and ports and key in self.alive:
                chosen = range(self.port, self.port + message["count"])
                self.port = chosen.stop
                self.membership.receive(
                    key,
                    {"do": "ports", "generation": message["generation"], "ports": [*chosen]},
                    self.now,
                )
                self.membership.tick(self.now)
            elif word not in ("ack", "welcome", "ports", "note"):
                self.words.append((key, word))

    def pass_by(self, seconds):
        """Let time pass in small steps, with the heartbeats of all hosts that are alive."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            for key in self.alive:
                self.membership.receive(key, {"do": "beat", "number": 0}, self.now)
            self.step()

    def take(self):
        words = self.words
        self.words = []
        return words


def test_the_window_counts_from_the_last_change():
    table = Table(2, 4)
    table.join(1)
    table.pass_by(30)
    table.join(2)
    table.pass_by(9.5)
    table.join(3)
    table.pass_by(9.5)
    assert table.take() == []
    table.pass_by(0.5)
    assert table.take() == [(1, "start"), (2, "start"), (3, "start")]


def test_growing_waits_for_the_window_at_work_and_not_once_more_when_all_have_stopped():
    table = Table(1, 4)
    table.join(1)
    table.pass_by(10)
    table.join(2)
    table.pass_by(9.5)
    assert table.take() == [(1, "start")]
    table.pass_by(0.5)
    assert table.take() == [(1, "stop")]
    table.say(1, "stopped", generation=0)
    table.pass_by(0.5)
    assert table.take() == [(1, "start"), (2, "start")]


def test_job_that_is_nearly_done_does_not_grow():
    table = Table(2, 3)
    table.join(1)
    table.join(2)
    table.pass_by(10)
    table.take()
    table.say(1, "done", generation=0)
    table.join(3)
    table.pass_by(30)
    assert table.take() == []
    table.alive.remove(1)
    table.pass_by(10)
    assert table.take() == [(1, None)], "a host that is done may go"
    table.say(2, "done", generation=0)
    assert table.membership.finish.code == 0


def test_silence_is_a_loss_and_the_delay_is_kept():
    table = Table(1, 2)
    table.join(1)
    table.join(2)
    assert table.take() == [(1, "start"), (2, "start")]
    table.alive.remove(2)
    table.pass_by(4.5)
    assert table.take() == []
    table.pass_by(0.5)
    assert table.take() == [(1, "stop"), (2, None)]
    table.say(1, "stopped", generation=0)
    table.pass_by(19.5)
    assert table.take() == []
    table.pass_by(1)
    assert table.take() == [(1, "start")]
    assert table.outcomes[0].reports[0].text == "it was silent for 5 s"


def test_stalled_server_blames_no_host():
    table = Table(2, 2)
    table.join(1)
    table.join(2)
    table.take()
    table.now += 1000
    table.step()
    assert table.take() == []
    table.pass_by(100)
    assert table.take() == []
    assert not table.outcomes


def test_a_host_that_names_no_ports_is_lost_and_not_counted():
    table = Table(1, 2)
    table.join(1)
    table.alive.add(2)
    table.membership.joined(
        2, {"do": "join", "id": "b", "host": "b", "name": "", "slots": 1, "digest": "d"}, 0.0
    )
    table.step(ports=False)
    assert table.take() == []
    table.pass_by(10)
    assert (2, None) in table.take()
    assert not table.outcomes


def test_two_launchers_of_a_host_that_chose_the_same_port_are_asked_again():
    table = Table(2, 2)
    asked = []
    for key in (1, 2):
        table.membership.joined(
            key,
            {"do": "join", "id": f"{key}", "host": "h", "name": "", "slots": 1, "digest": "d"},
            0.0,
        )
    for ports in ((7, 7), (7, 8)):
        table.membership.tick(0.0)
        generation = [m["generation"] for _, m in table.membership.outbox if m["do"] == "ports"][-1]
        asked.append(generation)
        for key, port in zip((1, 2), ports, strict=True):
            table.membership.receive(
                key, {"do": "ports", "generation": generation, "ports": [port]}, 0.0
            )
    table.step()
    assert asked == [0, 1]
    assert table.take() == [(1, "start"), (2, "start")]


def test_launchers_that_always_choose_the_same_port_end_it():
    table = Table(2, 2)
    for key in (1, 2):
        table.membership.joined(
            key,
            {"do": "join", "id": f"{key}", "host": "h", "name": "", "slots": 1, "digest": "d"},
            0.0,
        )
    for generation in range(100):
        table.membership.tick(0.0)
        for key in (1, 2):
            table.membership.receive(
                key, {"do": "ports", "generation": generation, "ports": [7]}, 0.0
            )
    assert table.membership.finish.code == 75
    assert "two workers chose the same port: h:7, h:7" in table.membership.finish.text


def test_a_loss_while_all_save_ends_the_saving_and_is_not_counted():
    table = Table(1, 4)
    for key in (1, 2):
        table.join(key)
    table.pass_by(10)
    table.join(3)
    table.pass_by(10)
    assert table.take() == [(1, "start"), (2, "start"), (1, "stop"), (2, "stop")]
    table.membership.gone(2, "its power failed", table.now)
    table.step()
    assert table.take() == [(1, "stop")]
    table.say(1, "stopped", generation=0)
    table.pass_by(10.5)
    assert table.take() == [(1, "start"), (3, "start")]
    assert not table.outcomes


def test_commands_that_differ_late_differ():
    table = Table(1, 2)
    table.membership.joined(
        1, {"do": "join", "id": "1", "host": "a", "name": "", "slots": 1, "digest": "x" * 1000}, 0.0
    )
    table.membership.joined(
        2,
        {"do": "join", "id": "2", "host": "b", "name": "", "slots": 1, "digest": "x" * 1000 + "y"},
        0.0,
    )
    assert [message and message["do"] for key, message in table.membership.outbox if key == 2] == [
        "finish",
        None,
    ]


class World:
    """Test the invariants for hosts that join, fail, fall silent, dawdle and return.

    They do so at random.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.now = 0.0
        self.key = 0
        self.last = -1
        self.low = self.random.randint(1, 4)
        self.high = self.low + self.random.randint(0, 4)
        self.hosts = {}  # key -> id
        self.slots = {f"id-{i}": self.random.randint(1, 3) for i in range(5)}
        self.running = {}  # key -> the generation whose workers run there
        self.stopping = {}  # key -> the generation that it is to stop
        self.mute = set()
        self.last_counts = []
        terms = Terms(self.low, self.high, window=3.0, host_timeout=5.0, timeout=100.0, grace=8.0)
        self.membership = Membership(
            terms,
            lambda outcome: Decision(True, self.random.choice((0, 1, 7))),
            lambda text: None,
            0.0,
        )

    def step(self, calm):
        self.now += 0.25
        for key in list(self.hosts):
            if key not in self.mute:
                self.membership.receive(key, {"do": "beat", "number": 0}, self.now)
                if key in self.stopping and (calm or self.random.random() < 0.2):
                    self.report(
                        key,
                        self.stopping[key],
                        self.random.choice(("stopped", "failed", "preempted")),
                    )
        if not calm and self.random.random() < 0.08:
            self.trouble()
        if calm:
            self.mute.clear()
            for id in self.slots.keys() - self.hosts.values():
                self.join(id)
        self.membership.tick(self.now)
        self.deliver()

    def trouble(self):
        what = self.random.choice(
            ("join", "join", "join", "vanish", "mute", "fail", "preempt", "leave", "old")
        )
        key = self.random.choice(list(self.hosts)) if self.hosts else None
        if what == "join":
            self.join(
                self.random.choice(list(self.slots))
            )  # perhaps while its old connection is open
        elif key is None or key in self.mute:
            return
        elif what == "vanish":
            self.lose(key)
            self.membership.gone(key, "closed", self.now)
        elif what == "mute":
            self.mute.add(key)
        elif what == "old" and self.last > 0:
            self.membership.receive(key, {"do": "failed", "generation": self.last - 1}, self.now)
        elif key in self.running and what in ("fail", "preempt", "leave"):
            facts = {"leaving": True} if what == "leave" else {}
            self.report(
                key, self.running[key], "failed" if what == "fail" else "preempted", **facts
            )
            if what == "leave":
                self.membership.receive(key, {"do": "bye"}, self.now)
                self.lose(key)

    def join(self, id):
        self.key += 1
        for other in [key for key, known in self.hosts.items() if known == id]:
            self.lose(other)  # its launcher cut, and started again
        self.hosts[self.key] = id
        hello = {
            "do": "join",
            "id": id,
            "host": id,
            "name": "",
            "slots": self.slots[id],
            "digest": "",
        }
        self.membership.joined(self.key, hello, self.now)

    def report(self, key, generation, word, **facts):
        self.running.pop(key, None)
        self.stopping.pop(key, None)
        self.membership.receive(key, {"do": word, "generation": generation, **facts}, self.now)

    def lose(self, key):
        for known in (self.hosts, self.running, self.stopping):
            known.pop(key, None)
        self.mute.discard(key)

    def deliver(self):
        starts = []
        while self.membership.outbox:
            key, message = self.membership.outbox.pop(0)
            if message is None:
                self.lose(key)
            elif message["do"] == "ports" and key in self.hosts and key not in self.mute:
                ports = self.random.sample(range(1, 1000), message["count"])
                self.membership.receive(
                    key,
                    {"do": "ports", "generation": message["generation"], "ports": ports},
                    self.now,
                )
            elif message["do"] == "start":
                assert not self.running, (
                    "the last generation has ended everywhere before the next begins"
                )
                starts.append((key, message))
            elif message["do"] == "stop" and self.running.get(key) == message["generation"]:
                self.stopping[key] = message["generation"]
        if starts:
            generations = {message["generation"] for _, message in starts}
            (generation,) = generations
            assert generation > self.last
            self.last = generation
            counts = [message["count"] for _, message in starts]
            self.last_counts = counts
            assert self.low <= sum(counts) <= self.high
            assert [message["first"] for _, message in starts] == [
                sum(counts[:i]) for i in range(len(counts))
            ]
            assert all(len(message["addresses"]) == sum(counts) for _, message in starts)
            self.running.update({key: generation for key, _ in starts if key in self.hosts})


@pytest.mark.parametrize("seed", range(60))
def test_generations_never_overlap_and_all_hosts_work_in_the_end(seed):
    world = World(seed)
    for _ in range(600):
        world.step(calm=False)
    if world.membership.finish is None:
        for _ in range(300):
            world.step(calm=True)
        if world.membership.finish is None:
            assert sum(world.last_counts) == min(world.high, sum(world.slots.values()))
            assert not world.stopping
            assert world.running
            for key in list(world.running):
                world.report(key, world.running[key], "done")
            world.step(calm=True)
            assert world.membership.finish.code == 0
            return
    assert world.membership.finish.code == 75


def test_host_rejoins_before_its_old_connection_is_known_to_be_dead():
    table = Table(1, 2)
    table.join(1)
    table.join(2)
    table.take()
    table.alive = {1, 3}
    table.membership.joined(
        3,
        {"do": "join", "id": "id-2", "host": "10.0.0.2", "name": "", "slots": 1, "digest": "d"},
        0.0,
    )
    table.step()
    assert table.take() == [(1, "stop"), (2, None)]
    table.say(2, "done", generation=0)
    table.say(1, "stopped", generation=0)
    table.pass_by(20.5)
    assert table.take() == [(1, "start"), (3, "start")]


def test_terms_are_checked():
    with pytest.raises(ValueError, match="expected 1 <= MIN <= MAX, received MIN 3, MAX 2"):
        Terms(3, 2)
    with pytest.raises(ValueError, match="host_timeout: expected more than 0"):
        Terms(1, 2, host_timeout=0)
    with pytest.raises(ValueError, match="slots: expected at least 1"):
        RendezvousClient("127.0.0.1:1", TOKEN, "h", 0, "")
