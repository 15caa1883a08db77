"""Test that a fleet gives up slow slots where its engine has room elsewhere."""

import pytest

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
    fleet = Fleet(engine, ["train.py"], None, log_dir="", timeout=1.0)
    fleet._slots = slots
    fleet._by_task = dict(zip(names, slots, strict=True))
    return fleet


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
    fleet = fleet_of(engine, ["worker:0", "worker:1"], [Slot("a", "a"), Slot("b", "b")])
    assert fleet.give_up("worker:1") == problem
