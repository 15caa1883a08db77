"""Test doctor's checks of a cluster: planted faults in facts, in files and on loopback.

Check that they use the words of the preflight, and that strangers cannot misuse the server.
"""

import ast
import concurrent.futures
import contextlib
import dataclasses
import json
import re
import socket
import threading
import time

import pytest
import yaml

from tests.networks import crowd
from tests.processes import ROOT
from tfdist.cluster import handshake, preflight
from tfdist.cluster import meeting as cluster_meeting
from tfdist.cluster.addresses import split_address
from tfdist.cluster.handshake import fingerprint, hello_message
from tfdist.cluster.spec import ClusterSpec
from tfdist.tools.doctor import check_server, cluster, exchange, main
from tfdist.tools.doctor import peers as doctor_peers
from tfdist.tools.doctor.check_server import Responder
from tfdist.tools.doctor.exchange import Link
from tfdist.tools.doctor.peers import FileLookup, Peer, PeerExchange, serving

SPEC = ClusterSpec(
    {"worker": ("10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.3:2222")}, source="file c.yaml"
)


def who(spec, task="worker:0", versions="keras 3.15", nonce="mine", gpus=0):
    tasks = [[str(task), task.address] for task in spec.listening_tasks]
    return {**hello_message(spec, task, versions, "doctor", nonce), "tasks": tasks, "gpus": gpus}


def peers(spec=SPEC, first=1, **changes):
    """Return tasks 1, 2, ... as their doctors describe them; `changes` apply to worker:1."""
    by_task = {}
    for task in spec.listening_tasks[first:]:
        mine = changes if task.index == 1 else {}
        offset = mine.get("offset", 0.0)
        facts = {key: value for key, value in mine.items() if key != "offset"}
        said = {**who(spec, str(task), nonce=f"of {task}"), **facts}
        by_task[str(task)] = Peer(str(task), task.address, said, offset=offset)
    return by_task


def bad(checks):
    assert all(check.remedy for check in checks if check.status != "pass")
    return [check for check in checks if check.status != "pass"]


def one(checks, name, *texts, status="fail"):
    """Return the one check that does not pass."""
    (check,) = bad(checks)
    assert (check.name, check.status) == (name, status)
    for text in texts:
        assert text in f"{check.found}; {check.remedy}"
    return check


def judged(**changes):
    return cluster.check_peers(SPEC, who(SPEC), {"worker:0"}, peers(**changes), {}, 5.0)


def same_words(check, sentence):
    """Return whether a check and another part of tfdist say the same of the same mistake."""
    assert (
        f"{check.found}; {check.remedy}" in sentence or f"{check.found}. {check.remedy}" in sentence
    ), (check, sentence)


def test_hosts_that_fit_together():
    assert not bad(judged())


# What this host alone can see: real files, names, sockets.
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "worker: [a:1, b:99999]",
            "worker:1: address 'b:99999' has the invalid port 99999; use 1 to 65535",
        ),
        (
            "worker: [a:1, a:1]",
            "worker:1 has the duplicate address a:1 of worker:0; give each task its own port",
        ),
        ("wroker: [a:1]", "job 'wroker': unknown; jobs are chief, worker, ps, evaluator"),
        ("ps: [a:1]", "expected a chief or worker among the jobs, received ['ps']; add a worker"),
        (
            "worker: [a:1]\nworker: [b:1]",
            "the key 'worker' appears twice; give each its own name",
        ),
        ("worker: {0: a:1", "cannot be parsed"),
    ],
)
def test_a_wrong_file(text, message, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(text)
    assert main.main(["--quick", "--json", "--cluster", str(tmp_path / "c.yaml")]) == 1
    checks = [
        check
        for check in json.loads(capsys.readouterr().out)["checks"]
        if check["part"] == "cluster"
    ]
    assert [(check["name"], check["status"]) for check in checks] == [("file", "fail")]
    assert message in f"{checks[0]['found']}; {checks[0]['remedy']}"


def alone(spec):
    """Return the preflight's sentence where one task sees the fault by itself."""
    with pytest.raises(ValueError) as error:
        preflight.check(spec, timeout=0.01)
    return str(error.value)


def test_a_name_that_does_not_resolve():
    spec = ClusterSpec({"worker": ("127.0.0.1:2222", "no-such-host.invalid:2222")})
    checks, _ = cluster.check_spec(spec, spec.tasks[:1])
    one(
        checks,
        "names",
        "worker:1 at no-such-host.invalid:2222 does not resolve",
        "add it to DNS or /etc/hosts",
    )


def test_an_address_of_another_machine():
    spec = ClusterSpec({"worker": ("203.0.113.1:2222", "203.0.113.2:2222")}, "worker", 0)
    checks, _ = cluster.check_spec(spec, [spec.task])
    same_words(
        one(checks, "addresses", "203.0.113.1:2222 is not an address of this machine"), alone(spec)
    )


def test_loopback_beside_real_addresses():
    spec = ClusterSpec({"worker": ("127.0.0.1:2222", "203.0.113.2:2222")}, "worker", 0)
    checks, _ = cluster.check_spec(spec, [spec.task])
    same_words(one(checks, "addresses", "is a loopback address"), alone(spec))


def test_two_names_of_one_machine_and_port():
    spec = ClusterSpec({"worker": ("127.0.0.1:2222", "localhost:2222")}, "worker", 0)
    checks, _ = cluster.check_spec(spec, [spec.task])
    same_words(one(checks, "addresses", "are the same machine and port"), alone(spec))


def test_a_port_that_is_taken():
    spec = ClusterSpec.local(workers=2).for_task("worker", 0)
    with socket.create_server(split_address(spec.task.address)):
        checks, taken = cluster.check_spec(spec, [spec.task])
        checks += cluster.check_ports([spec.task], taken, {})
        same_words(one(checks, "ports", "already in use on this machine"), alone(spec))


def test_no_task_is_here(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("worker: ['203.0.113.1:2222', '203.0.113.2:2222']")
    assert (
        main.main(["--quick", "--json", "--together", "--cluster", str(tmp_path / "c.yaml")]) == 1
    )
    assert "expected a task with an address of this host" in capsys.readouterr().out


# What the others say.
def test_a_task_that_does_not_come():
    spec = ClusterSpec.local(workers=2).for_task("worker", 0)
    peer_exchange = PeerExchange(Responder(spec, who(spec), {}), [spec.task], timeout=0.2)
    peer_exchange.ask_all()
    checks = cluster.check_peers(
        spec, who(spec), peer_exchange.own, peer_exchange.peers, peer_exchange.missing, 0.2
    )
    check = one(
        checks, "reach", "1 of 2 tasks are absent: worker:1 at 127.0.0.1:", "Connection refused"
    )
    with pytest.raises(preflight.PeersAbsent) as error:
        preflight.check(spec, timeout=0.2)
    same_words(check, str(error.value))


def test_a_task_that_reaches_us_but_cannot_be_reached():
    """Block a port: nobody listens at worker:1.

    The doctor of worker:1 asks worker:0, and says that it is done.
    """
    spec = ClusterSpec.local(workers=2)
    responder = Responder(spec, who(spec), {})
    with serving(responder, spec.tasks[:1]):
        blocked = PeerExchange(
            Responder(spec, who(spec, "worker:1", nonce="theirs"), {}), spec.tasks[1:], timeout=5
        )
        blocked.ask_all()
        assert not blocked.missing
        blocked.report_done("", ["worker:1"])
        peer_exchange = PeerExchange(responder, spec.tasks[:1], timeout=0.5)
        peer_exchange.ask_all()
    assert responder.done == {"worker:1": ""}
    checks = cluster.check_peers(
        spec,
        who(spec),
        peer_exchange.own,
        peer_exchange.peers,
        peer_exchange.missing,
        peer_exchange.elapsed,
    )
    one(checks, "reach", "1 of 2 tasks are absent: worker:1 at 127.0.0.1:")


def test_doctor_does_not_wait_for_a_task_that_reported_a_fault_and_ended():
    spec = ClusterSpec.local(workers=2)
    responder = Responder(spec, who(spec), {})
    responder.done["worker:1"] = "directory: full"
    peer_exchange = PeerExchange(responder, spec.tasks[:1], timeout=30)
    peer_exchange.ask_all()
    assert not peer_exchange.missing
    assert peer_exchange.elapsed < 20
    assert not cluster.check_peers(
        spec, who(spec), peer_exchange.own, peer_exchange.peers, peer_exchange.missing, 0.0
    )  # not that all are here


def test_a_doctor_that_is_done_serves_until_it_was_asked():
    spec = ClusterSpec.local(workers=2)
    responders = [
        Responder(spec, who(spec, str(task), nonce=f"of {task}"), {}) for task in spec.tasks
    ]
    first, second = (
        PeerExchange(responder, [task], timeout=0.5)
        for responder, task in zip(responders, spec.tasks, strict=True)
    )
    with serving(responders[0], spec.tasks[:1]), serving(responders[1], spec.tasks[1:]):
        second.ask_all()
        exchange.ask(
            spec.tasks[1].address,
            who(spec, nonce="twin"),
            "done",
            serves=["worker:0"],
            wrong="ports: taken",
        )
        assert second.wait_until_asked("") == {"worker:0": "it has not asked this host"}
        assert second.wait_until_asked("a fault, which the others were told") == {}
        first.ask_all()
        assert second.wait_until_asked("") == {}


def test_a_doctor_with_another_cluster_gets_the_time_to_ask():
    """Doctor does not tell it, as it would refuse, and waits until it has asked.

    It then sees by itself that the clusters differ, rather than that nobody is there.
    """
    spec = ClusterSpec.local(workers=2)
    theirs = ClusterSpec({"worker": spec.jobs["worker"][::-1]})
    responder = Responder(spec, who(spec), {})
    with (
        serving(responder, spec.tasks[:1]),
        serving(Responder(theirs, who(theirs, nonce="theirs"), {}), theirs.tasks[:1]),
    ):
        peer_exchange = PeerExchange(responder, spec.tasks[:1], timeout=30)
        peer_exchange.ask_all()
        late_asker = threading.Timer(
            0.3, exchange.ask, (spec.tasks[0].address, who(theirs, nonce="theirs"), "hello")
        )
        late_asker.start()
        peer_exchange.report_done("spec: differs", ["worker:0"])
        assert peer_exchange.wait_until_asked("spec: differs") == {}
        assert responder.askers == {"theirs": {"worker:0"}}
        late_asker.join()


def test_the_bound_holds_within_a_round_of_questions(monkeypatch):
    """Twenty tasks take the connection and say nothing.

    Each would take the time of an exchange, sixteen at once.
    """
    monkeypatch.setattr(exchange, "EXCHANGE_S", 60.0)
    spec = ClusterSpec.local(workers=21)
    with contextlib.ExitStack() as stack:
        for task in spec.tasks[1:]:
            stack.enter_context(socket.create_server(split_address(task.address)))
        peer_exchange = PeerExchange(Responder(spec, who(spec), {}), spec.tasks[:1], timeout=1.0)
        peer_exchange.ask_all()
    assert len(peer_exchange.missing) == 20
    assert peer_exchange.elapsed < 50
    assert "not asked: the others took all the time" in peer_exchange.missing.values()


def other(*addresses):
    return ClusterSpec({"worker": addresses}, source="file c.yaml")


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        (
            other("10.0.0.2:2222", "10.0.0.1:2222", "10.0.0.3:2222"),
            "another order: worker:0 is 10.0.0.1:2222 here and 10.0.0.2:2222 there",
        ),
        (
            other("10.0.0.1:9999", "10.0.0.2:2222", "10.0.0.3:2222"),
            "worker:0 is 10.0.0.1:2222 here and 10.0.0.1:9999 there",
        ),
        (
            other("10.0.0.1:2222", "10.0.0.2:2222"),
            "3 tasks here, 2 there: worker:2 is 10.0.0.3:2222 here and missing there",
        ),
    ],
    ids=["order", "the leader's port", "size"],
)
def test_different_clusters(spec, where):
    checks = judged(
        **{key: who(spec, "worker:1", nonce="of worker:1")[key] for key in ("cluster", "tasks")}
    )
    check = one(
        checks,
        "spec",
        "worker:1 at 10.0.0.2:2222 has a different cluster spec",
        where,
        "use the same file in all tasks",
    )
    same_words(
        dataclasses.replace(check, found=check.found.replace(f" ({where})", "")), theirs(spec)
    )


def theirs(spec, versions="keras 3.15"):
    """Return the preflight's message to worker:1 with another cluster or other versions."""
    with pytest.raises(preflight.ConfigurationError) as error:
        preflight.compare(
            hello_message(spec, "worker:1", versions, "0", "x"),
            "worker:1 at 10.0.0.2:2222",
            who(SPEC),
            SPEC.source,
        )
    return str(error.value)


def test_different_versions():
    check = one(
        judged(versions="keras 3.10"),
        "versions",
        "has different versions: keras 3.10; worker:0 has keras 3.15",
        "install the same",
    )
    same_words(check, theirs(SPEC, "keras 3.10"))


def test_a_task_that_is_claimed_twice():
    by_task = peers()
    by_task["worker:2"] = dataclasses.replace(
        by_task["worker:2"], hello=who(SPEC, "worker:2", nonce="another")
    )
    by_task["worker:1"] = dataclasses.replace(
        by_task["worker:1"], hello=who(SPEC, "worker:0", nonce="other")
    )
    checks = bad(cluster.check_peers(SPEC, who(SPEC), {"worker:0"}, by_task, {}, 5.0))
    assert (
        "worker:0 expected worker:1 at 10.0.0.2:2222 and found worker:0: "
        "the address belongs to another machine"
    ) in checks[0].found
    by_task["worker:0"] = Peer("worker:0", "10.0.0.1:2222", who(SPEC, "worker:0", nonce="other"))
    checks = bad(cluster.check_peers(SPEC, who(SPEC), {"worker:0"}, by_task, {}, 5.0))
    assert any("two processes claim to be worker:0" in check.found for check in checks)


def test_different_numbers_of_devices():
    one(
        judged(gpus=4),
        "devices",
        "GPUs differ: worker:0 0, worker:1 4, worker:2 0",
        "CUDA_VISIBLE_DEVICES",
    )


def test_parameter_servers_need_no_gpus():
    spec = ClusterSpec({"chief": ("a:1",), "worker": ("b:1", "c:1"), "ps": ("d:1",)})
    by_task = {
        task: Peer(task, "x:1", {**who(spec, task, nonce=task), "gpus": 2})
        for task in ("worker:0", "worker:1")
    }
    by_task["ps:0"] = Peer("ps:0", "d:1", who(spec, "ps:0", nonce="ps"))
    assert not bad(cluster.check_peers(spec, who(spec, "chief:0"), {"chief:0"}, by_task, {}, 5.0))


@pytest.mark.parametrize(
    ("offset", "status", "text"),
    [(5.0, "warn", "is 5 s ahead of this host's"), (-4000.0, "fail", "is 1 h 6 min behind")],
)
def test_clocks_that_differ(offset, status, text):
    one(
        judged(offset=offset),
        "clocks",
        f"that of worker:1 at 10.0.0.2:2222 {text}",
        "timedatectl",
        status=status,
    )


def test_directory_that_is_not_shared_is_named():
    blind = [
        FileLookup("/runs", "worker:1", "/runs", seen=False),
        FileLookup("/runs", "worker:2", "/runs", seen=True),
    ]
    one(
        cluster.check_lookups(blind),
        "shared directory",
        "/runs: a file written here is not seen by worker:1 in /runs",
        "mount the same file system",
    )
    one(
        cluster.check_lookups([FileLookup("/runs", "worker:1")]),
        "shared directory",
        "unknown for worker:1",
        status="warn",
    )


def test_unusable_directory_keeps_its_index(tmp_path):
    spec = ClusterSpec.local(workers=2)
    (tmp_path / "b").mkdir()
    responder = Responder(spec, who(spec, nonce="theirs"), {}, [None, str(tmp_path / "b")])
    with serving(responder, spec.tasks[1:]):
        peer_exchange = PeerExchange(Responder(spec, who(spec), {}), spec.tasks[:1], timeout=5)
        peer_exchange.ask_all()
        lookups = peer_exchange.share([str(tmp_path / "a"), str(tmp_path / "b"), None])
    assert [(lookup.other, lookup.seen) for lookup in lookups] == [
        (None, False),
        (str(tmp_path / "b"), True),
    ]
    assert [entry.name for entry in tmp_path.rglob("*")] == ["b"]


def test_directories_that_were_made_are_removed(tmp_path):
    spec = ClusterSpec.local(workers=2)
    PeerExchange(Responder(spec, who(spec), {}), spec.tasks[:1], timeout=5).share(
        [str(tmp_path / "a" / "b" / "c")]
    )
    assert not list(tmp_path.iterdir())


GOOD = Link("worker:0", "worker:1", latency=1e-4, rate=1e9)


@pytest.mark.parametrize(
    ("link", "status", "text"),
    [
        (
            Link("worker:1", "worker:2", 1e-4, 1e8),
            "warn",
            "the slowest is from worker:1 to worker:2",
        ),
        (
            Link("worker:1", "worker:2", 2e-2, 1e9),
            "warn",
            "the farthest is from worker:1 to worker:2",
        ),
        (
            Link("worker:1", "worker:2", error="timed out"),
            "fail",
            "from worker:1 to worker:2: timed out",
        ),
    ],
)
def test_a_link_that_is_slow_or_broken(link, status, text):
    one(cluster.check_links([GOOD, GOOD, link]), "network", text, status=status)
    assert not bad(cluster.check_links([GOOD, GOOD]))


def test_a_pause_is_not_a_slow_link(monkeypatch):
    """Doctor measures a link that seems slow again, and the best rate counts.

    A link that is slow stays so.
    """
    spec = ClusterSpec.local(workers=2)
    rates = {("worker:0", "worker:1"): [1e8, 1e9, 2e9], ("worker:1", "worker:0"): [1e9]}
    monkeypatch.setattr(PeerExchange, "hosts", lambda self: ["worker:0", "worker:1"])
    monkeypatch.setattr(
        PeerExchange,
        "_measure",
        lambda self, source, target: Link(source, target, 1e-4, rates[source, target].pop(0)),
    )
    links = PeerExchange(Responder(spec, who(spec), {}), spec.tasks[:1], timeout=5).links(
        cluster.odd_links
    )
    assert [link.rate for link in links] == [1e9, 1e9]
    rates.update({("worker:0", "worker:1"): [1e8, 2e8, 1e8], ("worker:1", "worker:0"): [1e9]})
    links = PeerExchange(Responder(spec, who(spec), {}), spec.tasks[:1], timeout=5).links(
        cluster.odd_links
    )
    assert [link.rate for link in links] == [2e8, 1e9]
    one(
        cluster.check_links([*links, links[1]]),
        "network",
        "the slowest is from worker:0 to worker:1",
        status="warn",
    )
    assert GOOD.better(Link("worker:0", "worker:1", error="timed out")) == GOOD


def test_a_fault_that_another_host_found():
    one(
        cluster.check_ends({"worker:1": "Python: 2.7", "worker:2": ""}, {}, SPEC, 5.0),
        "other hosts",
        "the doctor of worker:1 found: Python: 2.7",
    )
    one(
        cluster.check_ends({"worker:2": ""}, {"worker:1": "it hangs"}, SPEC, 5.0),
        "other hosts",
        "worker:1 at 10.0.0.2:2222 (it hangs)",
    )


def test_a_preflight_that_answers_in_place_of_a_doctor():
    spec = ClusterSpec.local(workers=2)
    with serving(Responder(spec, who(spec), {}), spec.tasks[:1]):
        with pytest.raises(preflight.PeersAbsent, match="still attempt doctor there"):
            preflight.check(spec.for_task("worker", 1), timeout=0.3, versions="keras 3.15")


def test_messages_in_the_docs_are_those_of_the_code():
    """Each message that docs/doctor.md lists for a mistake is part of some text in the package."""
    rows = (
        (ROOT / "docs/doctor.md")
        .read_text()
        .partition("## Which tool reports")[2]
        .partition("## JSON")[0]
        .splitlines()
    )
    words = [
        word
        for row in rows
        if row.startswith("|")
        for word in re.findall(r"`([^`]+)`", row.split("|")[3])
    ]
    texts = {
        node.value
        for path in (ROOT / "tfdist").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert len(words) >= 20
    assert not [word for word in words if not any(word in text for text in texts)]


# The server, and strangers.
@pytest.fixture
def served(tmp_path):
    """Return (address, hello, directory) of a doctor that serves worker:0 of two."""
    spec = ClusterSpec.local(workers=2)
    with serving(
        Responder(spec, who(spec), {"tasks": [], "gpus": 0}, [str(tmp_path)]), spec.tasks[:1]
    ) as failed:
        assert not failed
        yield spec.tasks[0].address, who(spec, "worker:1", nonce="theirs"), tmp_path


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"question": "token", "directory": 0, "token": "../../../etc/passwd"}, "no token"),
        ({"question": "token", "directory": "/etc", "token": "0" * 32}, "no token"),
        ({"question": "measure", "peer": "10.0.0.9:80"}, "no task of this cluster"),
        ({"question": "measure", "peer": ["worker:1"] * 3}, "no task of this cluster"),
        ({"question": "run"}, "no such question"),
    ],
)
def test_server_refuses_invalid_requests(served, facts, text):
    address, mine, _ = served
    with pytest.raises(exchange.Refused, match=text):
        exchange.ask(address, mine, **facts)


def test_server_sends_only_files_written_by_a_doctor(served):
    address, mine, directory = served
    token = "ab" * 16
    (directory / f".tfdist-doctor-{token}").write_text("a secret of somebody else")
    assert exchange.ask(address, mine, "token", directory=0, token=token)["content"] == ""
    (directory / f".tfdist-doctor-{token}").write_text("cd" * 16)
    assert exchange.ask(address, mine, "token", directory=0, token=token)["content"] == "cd" * 16
    assert exchange.ask(address, mine, "token", directory=1, token=token)["directory"] is None


def test_peer_with_another_cluster_gets_only_the_servers_hello(served):
    address, mine, _ = served
    stranger = {**mine, "cluster": fingerprint(SPEC)}
    assert exchange.ask(address, stranger, "hello")["task"] == "worker:0"
    for question in ("token", "measure", "stream", "done"):
        with pytest.raises(exchange.Refused, match="differ"):
            exchange.ask(address, stranger, question)


def test_fault_replaces_an_earlier_report_without_a_fault():
    spec = ClusterSpec.local(workers=2)
    responder = Responder(spec, who(spec), {})
    for wrong, reported in (
        ("", ""),
        ("directory: full", "directory: full"),
        ("", "directory: full"),
    ):
        responder.answer(
            {**who(spec), "ask": "done", "serves": ["worker:1", "worker:9", 7], "wrong": wrong},
            "worker:0",
            "here",
        )
        assert responder.done == {"worker:1": reported}


def test_a_budget_of_questions(served):
    address, mine, _ = served
    said = set()
    for _ in range(100):
        with pytest.raises(exchange.Refused) as refused:
            exchange.ask(address, mine, "measure", peer=None)
        said.add(str(refused.value))
    assert said == {
        "no task of this cluster",
        "this doctor was asked to measure too often; start it again",
    }


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"null\n",
        b"\xff\n",
        b"[" * 5000 + b"\n",
        b"{" + b"x" * 100000,
    ],
)
def test_malformed_requests_do_not_stop_the_server(served, sent, capsys):
    address, mine, _ = served
    with (
        socket.create_connection(split_address(address)) as connection,
        contextlib.suppress(OSError),
    ):
        connection.sendall(sent)
    assert exchange.ask(address, mine, "hello")["task"] == "worker:0"
    assert "Traceback" not in capsys.readouterr().err


def test_strangers_that_hold_connections_keep_no_doctor_out(served, monkeypatch):
    monkeypatch.setattr(check_server.Server, "exchange_s", 60.0)
    address, mine, _ = served
    with crowd(address, 200):
        assert exchange.ask(address, mine, "hello")["task"] == "worker:0"


# It would clear the screen, if the colour code within were removed; then C1, BEL, SO and a mark.
EVIL = "\x1b[2\x1b[1KJ\x9b2J\x1b]0;t\x07\x0e\x85\u202e\u2066\n"


def run_doctor(capsys, path, *words):
    """Return what doctor prints as worker:0; fail if it could control the terminal."""
    main.main(["--quick", "--cluster", str(path), "--task", "worker:0", *words])
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert not [letter for letter in text if not letter.isprintable() and letter != "\n"]
    return text


@pytest.mark.parametrize("kind", ["spec", "fault", "refusal"])
def test_text_of_another_host_does_not_control_the_terminal(kind, tmp_path, capsys, monkeypatch):
    class Stranger(Responder):
        def answer(self, request, task, host):
            if kind == "refusal":
                return {**self.hello, "refused": f"refusal{EVIL}"}
            return super().answer(request, task, host)

    monkeypatch.setattr(doctor_peers, "PROGRESS_S", 0.1)  # so that it says for whom it waits
    spec = ClusterSpec.local(workers=2)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"worker": list(spec.jobs["worker"])}))
    hello = who(spec, "worker:1", handshake.installed_versions(), f"nonce{EVIL}")
    if kind == "spec":
        hello |= {"cluster": f"spec{EVIL}"}
    facts = {"tasks": [[f"worker:1{EVIL}", f"x{EVIL}"]], "wrong": f"fault{EVIL}", "gpus": EVIL}
    with serving(Stranger(spec, hello, facts), spec.tasks[1:]):
        assert f"{kind}?[2" in run_doctor(capsys, tmp_path / "c.yaml", "--timeout", "1")


def test_text_of_a_host_that_asks_does_not_control_the_terminal(tmp_path, capsys):
    spec = ClusterSpec.local(workers=2)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"worker": list(spec.jobs["worker"])}))

    def ask():
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                facts = {"serves": ["worker:1"], "wrong": f"fault{EVIL}"}
                hello = {**who(spec), "task": f"asker{EVIL}"}
                return exchange.ask(spec.tasks[0].address, hello, "done", **facts)
            time.sleep(0.02)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(ask)
        said = run_doctor(capsys, tmp_path / "c.yaml", "--serve", "--timeout", "1")
    assert "asker?[2" in said
    assert "worker:1 is done: fault?[2" in said


def test_a_link_is_measured(served):
    address, mine, _ = served
    link = exchange.measure("worker:1", "worker:0", address, mine)
    assert not link.error
    assert link.rate > 0 < link.latency


@pytest.mark.parametrize("received", [[], None, "x", 10**400])
def test_a_peer_that_sends_another_type(served, monkeypatch, received):
    send = handshake.send

    def send_received(connection, message):
        send(connection, {**message, "received": received})

    for module in (cluster_meeting, check_server):
        monkeypatch.setattr(module, "send", send_received)
    address, mine, _ = served
    assert exchange.measure("worker:1", "worker:0", address, mine).error
    peer_exchange = PeerExchange(
        Responder(ClusterSpec({"worker": (address, "127.0.0.1:1")}), mine, {}), [], timeout=0.2
    )
    assert peer_exchange._hello("worker:0")
