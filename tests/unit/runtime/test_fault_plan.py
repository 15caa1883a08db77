"""Test how chaos plans are parsed and carried out."""

import pytest

from tfdist.runtime import fault_plan
from tfdist.train.health.heartbeat import Heartbeat


def test_a_plan_of_all_kinds():
    plan = (
        "kill worker:1@step=37; stop worker:0@step=80 for 20s; kill chief@saving;corrupt newest ; "
        "fill disk@step=4; term chief@end"
    )
    faults = fault_plan.parse(plan)
    assert [fault.verb for fault in faults] == [
        "kill",
        "stop",
        "kill",
        "corrupt newest",
        "fill disk",
        "term",
    ]
    assert [fault.number for fault in faults] == list(range(6))
    assert faults[2].of("worker:0", is_chief=True)
    assert not faults[2].of("worker:1", is_chief=False)
    assert faults[0].of("worker:1", is_chief=False)
    assert not faults[0].of("worker:10", is_chief=True)


def test_none_is_an_empty_plan():
    assert fault_plan.parse(" none ") == ()


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        ";",
        "kill",
        "kill worker:1",
        "kill worker@step=3",
        "kill worker:1@step=x",
        "kill worker:1@lunch",
        "explode chief@step=1",
        "kill chief@saving for 3s",
        "corrupt newest@saving",
        "kill worker:1@step=3 for ever",
        "kill worker:1@step=3, kill chief@end",
    ],
)
def test_a_wrong_fault_is_named(wrong):
    with pytest.raises(ValueError, match="expected") as error:
        fault_plan.parse(wrong)
    assert wrong.strip("; ") in str(error.value)


def test_each_fault_happens_once():
    faults = fault_plan.parse("kill chief@step=1; kill chief@step=1")
    assert [
        fault.number
        for fault in fault_plan.left(
            faults, [{"event": fault_plan.EVENT, "number": 0}, {"event": "saved"}]
        )
    ] == [1]


def test_steps_pause_for_a_fault_in_an_epoch_that_has_just_begun(monkeypatch):
    monkeypatch.setenv("TFDIST_CHAOS", "hang worker:1@step=30")
    heartbeat = Heartbeat(is_chief=False)
    heartbeat.begin(0, 24)
    heartbeat.at(0, 24)
    assert heartbeat.next_pause(1, 0) == 6
    assert heartbeat.next_pause(1, 6) is None
