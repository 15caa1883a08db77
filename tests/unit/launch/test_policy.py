"""Test whether the policy allows another attempt, and when."""

import pytest

from tfdist.launch.failures import Failure, Kind, Verdict
from tfdist.launch.policy import MAX_DELAY_S, Failed, Policy


def cause(kind=Kind.SIGNAL, stepped=True, reached=(0, 5), message="", code=1):
    return Failed(
        Verdict(Failure("worker:1", kind, code, 0.0, "ended", message)), stepped, reached
    ).cause


def test_restarts_are_counted():
    policy = Policy(2)
    steps = [policy.decide(cause(reached=(0, step))) for step in (3, 5, 7)]
    assert [decision.restart for decision in steps] == [True, True, False]
    assert "--restarts 2" in steps[2].text


def test_without_restarts_there_is_no_attempt_and_no_message():
    decision = Policy(0).decide(cause())
    assert (decision.restart, decision.text) == (False, "")


def test_preemptions_are_not_counted():
    policy = Policy(1)
    for _ in range(5):
        assert policy.decide(cause(Kind.PREEMPTED)).restart
    assert policy.decide(cause()).restart
    assert policy.decide(cause(Kind.PREEMPTED)).restart
    assert not policy.decide(cause(reached=(0, 9))).restart


def test_configuration_error_is_never_retried():
    assert not Policy(9).decide(cause(Kind.CONFIGURATION)).restart


@pytest.mark.parametrize("reached", [(1, 7), None])
def test_the_same_error_at_the_same_step_is_not_tried_a_third_time(reached):
    policy = Policy(9)
    assert policy.decide(cause(Kind.ERROR, reached=reached, message="ValueError: x")).restart
    decision = policy.decide(cause(Kind.ERROR, reached=reached, message="ValueError: x"))
    assert not decision.restart
    assert "occurred twice" in decision.text


@pytest.mark.parametrize(
    "second",
    [
        {"kind": Kind.ERROR, "message": "ValueError: x", "reached": (1, 8)},
        {"kind": Kind.ERROR, "message": "ValueError: y", "reached": (1, 7)},
        {"kind": Kind.SIGNAL, "message": "ValueError: x", "reached": (1, 7)},
    ],
)
def test_another_error_or_step_is_retried(second):
    policy = Policy(9)
    assert policy.decide(cause(Kind.ERROR, reached=(1, 7), message="ValueError: x")).restart
    assert policy.decide(cause(**second)).restart


def test_the_delay_grows_while_no_step_is_made():
    policy = Policy(99)
    delays = [policy.decide(cause(stepped=False, reached=(2, 0))).delay for _ in range(9)]
    assert delays[0] == 0
    assert delays == sorted(delays)
    assert delays[-1] == MAX_DELAY_S
    assert policy.decide(cause(reached=(2, 1))).delay == 0


def test_tasks_restarted_alone_count_too():
    policy = Policy(1)
    assert policy.allow_one()
    assert not policy.allow_one()
    assert not policy.decide(cause()).restart
