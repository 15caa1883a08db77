"""Test the Ray engine with a program that stands for its driver; tests/engines has a real Ray."""

import argparse
import importlib.util
import json
import sys
import time

import pytest

from tfdist.launch.engines import ray_launch
from tfdist.launch.engines.fleet import Interrupted, NoRoom
from tfdist.launch.engines.ray_engine import Ray

# Answers each order by the lines of a table.
DRIVER = """
import json, sys
from tfdist.launch.engines.agent_protocol import decode, encode
answers = json.loads(sys.argv[1])
for line in sys.stdin.buffer:
    order = decode(line)
    left = answers.get(order["type"])
    for kind, facts in left.pop(0) if left else []:
        if kind == "die":
            print("Ray says goodbye", flush=True)
            sys.exit(3)
        sys.stdout.buffer.write(encode({"type": kind, **facts}))
        sys.stdout.buffer.flush()
"""
OPENED = [["opened", {}]]


def placed(*nodes):
    bundles = [{"node": node, "name": node, "address": "10.0.0.1"} for node in nodes]
    return [["placed", {"bundles": bundles}]]


@pytest.fixture
def ray(tmp_path):
    """Make engines with the given answers of their drivers; close them afterwards."""
    (tmp_path / "driver.py").write_text(DRIVER)
    made = []

    def make(answers, **options):
        command = [sys.executable, str(tmp_path / "driver.py"), json.dumps(answers)]
        made.append(Ray("10.0.0.1:6379", driver=command, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def test_only_lost_and_moved_slots_are_new(ray):
    engine = ray({"open": [OPENED], "place": [placed("a", "b", "c"), placed("a", "b", "d")]})
    first = engine.allocate(3, [])
    assert [slot.host for slot in first] == ["a", "b", "c"]
    second = engine.allocate(3, [first[1]])
    assert second[0] == first[0]
    assert second[1].host == "b"
    assert second[1] != first[1]
    assert second[2].host == "d"


def test_driver_decides_whether_a_slow_task_can_leave_its_node(ray):
    engine = ray(
        {
            "open": [OPENED],
            "place": [placed("a", "b"), placed("a", "c")],
            "avoid": [[["avoided", {"text": ""}]], [["avoided", {"text": "all full"}]]],
        }
    )
    first = engine.allocate(2, [])
    assert engine.avoid(first[1], 2)
    second = engine.allocate(2, [first[1]])
    assert (second[0], second[1].host) == (first[0], "c")
    with pytest.raises(NoRoom, match="all full"):
        engine.avoid(second[1], 2)


def test_output_and_end_of_an_agent_arrive(ray):
    engine = ray(
        {
            "open": [OPENED],
            "place": [placed("a")],
            "connect": [
                [
                    ["data", {"id": 0, "text": "one\ntw"}],
                    ["data", {"id": 0, "text": "o\nrest"}],
                    ["ended", {"id": 0, "text": "ActorDiedError: gone"}],
                ]
            ],
        }
    )
    transport = engine.connect(*engine.allocate(1, []))
    assert [transport.read() for _ in range(4)] == [b"one\n", b"two\n", b"rest", b""]
    assert transport.ending() == "ActorDiedError: gone"
    with pytest.raises(BrokenPipeError):
        transport.write(b"ping\n")


def test_driver_that_dies_ends_its_agents_and_is_started_again(ray):
    lines = []
    engine = ray(
        {"open": [OPENED], "place": [placed("a")], "connect": [[["die", {}]]]},
        show_line=lines.append,
    )
    (slot,) = engine.allocate(1, [])
    transport = engine.connect(slot)
    assert transport.read() == b""
    assert transport.ending() == "its driver ended with 3: Ray says goodbye"
    assert engine.allocate(1, [slot]) != [slot]
    assert lines == ["tfdist: its driver ended with 3: Ray says goodbye: connecting again"]


def test_lack_of_room_and_refusals_are_told(ray):
    lines = []
    engine = ray(
        {"open": [OPENED], "place": [[["pending", {"text": "all full"}]] * 2]},
        queue_timeout=0.5,
        show_line=lines.append,
    )
    with pytest.raises(NoRoom, match=r"gave no room within 0.5 s: all full; .*--queue-timeout"):
        engine.allocate(1, [])
    assert lines == ["tfdist: waiting for room in Ray: all full"]
    with pytest.raises(NoRoom, match=r"Ray at 10\.0\.0\.1:6379: no cluster"):
        ray({"open": [[["refused", {"text": "no cluster"}]]]}).allocate(1, [])
    with pytest.raises(NoRoom, match="its driver ended with 3: Ray says goodbye"):
        ray({"open": [[["die", {}]]]}).allocate(1, [])


def test_user_ends_the_wait(ray):
    began = time.monotonic()
    engine = ray({"open": [OPENED]}, interrupted=lambda: time.monotonic() > began + 0.5)
    with pytest.raises(Interrupted):
        engine.allocate(1, [])


def flags(**given):
    names = ("address", "workers", "ps", "chief", "evaluator")
    return argparse.Namespace(**{**dict.fromkeys(names), **given})


def test_absent_ray_and_wrong_addresses_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'tfdist\[ray\]'"):
        ray_launch.fill_in(flags(), {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match=r"--address: 'ray://a:1' .*`ray start`"):
        ray_launch.fill_in(flags(address="ray://a:1"), {})
    found = flags(chief=True)
    ray_launch.fill_in(found, {})
    assert (found.address, found.workers) == ("auto", 0)
