"""Test how a fleet ends its agents, and how it gives up slots whose tasks are slow."""

import threading

import pytest

from tfdist.launch.engines import fleet
from tfdist.launch.engines.fleet import Fleet, NoRoom, Slot
from tfdist.launch.engines.ssh import Ssh, parse_hosts


def ssh(hosts):
    return Ssh(parse_hosts(hosts), None)


def hosts(slots):
    return [slot.host for slot in slots]


def test_ssh_avoids_a_host_while_there_is_room():
    engine = ssh("a,b,c")
    first = engine.allocate(2, [])
    assert hosts(first) == ["a", "b"]
    assert engine.avoid(first[0], 2)
    assert hosts(engine.allocate(2, [])) == ["b", "c"]
    assert not engine.avoid(first[1], 2)
    assert hosts(engine.allocate(2, [])) == ["b", "c"]


def fleet_of(engine, names, slots):
    made = Fleet(engine, ["train.py"], None, log_dir="", timeout=1.0)
    made._slots = slots
    made._by_task = dict(zip(names, slots, strict=True))
    return made


class Without:
    """An engine that cannot avoid a slot."""


class Silent:
    def avoid(self, slot, count):
        raise NoRoom("the controller does not answer")


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        (ssh("a,b,c"), ""),
        (ssh("a,b"), "there is no room for the tasks without b"),
        (Without(), "this engine cannot move a task away from b"),
        (
            Silent(),
            "there may be no room for the tasks without b: the controller does not answer",
        ),
    ],
)
def test_fleet_says_why_a_task_stays(engine, problem):
    made = fleet_of(engine, ["worker:0", "worker:1"], [Slot("a", "a"), Slot("b", "b")])
    assert made.give_up("worker:1") == problem


class Agent:
    """An agent whose program ends only once all agents are being closed, or never."""

    def __init__(self, together):
        self._together = together
        self.closed = False

    def close(self):
        self._together.wait(30)
        self.closed = True


def test_agents_are_closed_at_the_same_time():
    together = threading.Barrier(3)
    agents = [Agent(together) for _ in range(3)]
    fleet.close_all(agents)  # one after another, the first would wait for the second
    assert all(agent.closed for agent in agents)


def test_agent_that_does_not_end_is_left_after_a_bound(monkeypatch):
    monkeypatch.setattr(fleet, "CLOSE_ALL_S", 0.1)
    never = threading.Event()
    stuck = Agent(never)
    others = [Agent(threading.Barrier(1)) for _ in range(2)]
    fleet.close_all([stuck, *others])
    assert not stuck.closed
    never.set()
