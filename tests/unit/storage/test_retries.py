"""Test the number and delays of requests that are sent again."""

import pytest

from tfdist.storage import retries


class Clock:
    def __init__(self):
        self.now = 0.0
        self.delays = []

    def sleep(self, seconds):
        self.delays.append(seconds)
        self.now += seconds

    def __call__(self):
        return self.now


def failing(times, error):
    calls = []

    def request():
        calls.append(1)
        if len(calls) <= times:
            raise error
        return len(calls)

    return request, calls


@pytest.mark.parametrize("times", [0, 1, retries.TRIES - 1])
def test_transient_errors_are_survived(times):
    clock = Clock()
    request, _ = failing(times, OSError("busy"))
    assert retries.call(request, lambda _: True, sleep=clock.sleep, clock=clock) == times + 1
    assert len(clock.delays) == times
    for index, delay in enumerate(clock.delays):
        longest = retries.FIRST_DELAY_S * 2**index
        assert longest / 2 <= delay <= longest


def test_the_last_error_is_raised():
    clock = Clock()
    request, calls = failing(10**6, OSError("busy"))
    with pytest.raises(OSError, match="busy"):
        retries.call(request, lambda _: True, sleep=clock.sleep, clock=clock)
    assert len(calls) == retries.TRIES


def test_permanent_errors_are_raised_at_once():
    clock = Clock()
    request, calls = failing(10**6, OSError("denied"))
    with pytest.raises(OSError, match="denied"):
        retries.call(request, lambda _: False, sleep=clock.sleep, clock=clock)
    assert len(calls) == 1


def test_no_request_follows_slow_ones():
    clock = Clock()

    def request():
        clock.now += retries.LONGEST_S
        raise TimeoutError

    with pytest.raises(TimeoutError):
        retries.call(request, lambda _: True, sleep=clock.sleep, clock=clock)
    assert clock.now < 3 * retries.LONGEST_S
