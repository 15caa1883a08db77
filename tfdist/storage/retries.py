"""Bounded retries of requests to a file server."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
TRIES = 6
FIRST_DELAY_S = 0.5
LONGEST_S = 180.0  # seconds after which no request is sent again


def call(
    request: Callable[[], Result],
    is_transient: Callable[[Exception], bool],
    *,
    tries: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """Return the result of a request, which is sent again after transient errors.

    Delays double from half a second on, and are shortened at random, so that many workers do not
    come back at the same moment.

    Args:
        request: Function that sends the request. It must be safe to send it twice.
        is_transient: Whether an error may be gone the next time.
        tries: Number of requests in total; default: `TRIES`.
        sleep: Function that waits a number of seconds.
        clock: Function that returns the time in seconds.

    Raises:
        Exception: If the last request fails: with an error that is not transient, on the last try,
            or after `LONGEST_S`.

    Example:
        >>> answers = iter([OSError("busy"), OSError("busy"), "content"])
        >>> def request():
        ...     answer = next(answers)
        ...     if isinstance(answer, Exception):
        ...         raise answer
        ...     return answer
        >>> call(request, lambda error: True, sleep=lambda seconds: None)
        'content'
    """
    started = clock()
    left = TRIES if tries is None else tries
    delay = FIRST_DELAY_S
    while True:
        left -= 1
        try:
            return request()
        except Exception as error:
            if left <= 0 or clock() - started > LONGEST_S or not is_transient(error):
                raise
        sleep(delay * random.uniform(0.5, 1.0))
        delay *= 2
