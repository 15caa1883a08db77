"""Test straggler detection: which worker is named, and once per episode."""

import pytest

from tfdist.train.timing.stragglers import MIN_STEPS, Limits, StragglerDetector


def windows(detector, *busy, steps=10, seconds=10.0):
    """Return (rank, begins) of the changes after each of several windows."""
    return [[(c.rank, c.begins) for c in detector.add(b, steps, seconds)] for b in busy]


def test_an_episode_is_named_once_and_its_end_too():
    detector = StragglerDetector(Limits(0.5, 10.0))
    slow, equal = [1.0, 1.0, 2.0, 1.0], [1.0, 1.0, 1.1, 1.0]
    assert windows(detector, equal, slow, slow, equal, equal, slow) == [
        [],
        [(2, True)],
        [],
        [(2, False)],
        [],
        [(2, True)],
    ]


@pytest.mark.parametrize(
    ("busy", "slow"),
    [
        ([1.0, 1.6], [1]),  # of two, the other is the median
        ([1.6, 1.0], [0]),
        ([1.0, 1.4], []),
        ([1.0, 1.0, 9.0, 9.0, 1.0], [2, 3]),
        ([9.0, 9.0, 9.0, 1.0], []),  # a fast worker makes no stragglers of all others
        ([0.0, 0.0, 1.0], []),  # no step was measured
        ([1.0], []),
        ([-1.0, 1.0, 1.0, 1.0], []),  # a clock that was set
    ],
)
def test_who_is_slow(busy, slow):
    assert windows(StragglerDetector(Limits(0.5, 10.0)), busy) == [[(rank, True) for rank in slow]]


def test_windows_are_joined_until_they_are_long_enough():
    detector = StragglerDetector(Limits(0.5, 10.0))
    # A pause of one second within ten is no straggler.
    assert windows(detector, [0.5, 3.0], seconds=5.0) == [[]]
    assert windows(detector, [4.5, 4.0], seconds=5.0) == [[]]
    few = MIN_STEPS - 1
    assert windows(detector, [1.0, 9.0], steps=few, seconds=99.0) == [[]]
    assert windows(detector, [1.0, 9.0], steps=1, seconds=0.1) == [[(1, True)]]


def test_a_change_tells_the_times_of_a_step():
    (change,) = StragglerDetector(Limits(0.5, 1.0)).add([0.2, 0.2, 0.9], steps=10, seconds=1.0)
    assert (change.own, change.others) == pytest.approx((0.09, 0.02))
    assert change.slower == pytest.approx(3.5)
