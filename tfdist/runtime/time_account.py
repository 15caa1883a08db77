"""Time account: seconds of a training process, each in exactly one category.

`runtime/goodput.py` says what each category means, and joins the accounts of all attempts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

RECORDED = (
    "startup",
    "training",
    "validation",
    "input",
    "sync",
    "compile",
    "save",
    "restore",
    "idle",
)
_COUNTS = ("steps", "base", "reached")


@dataclasses.dataclass(frozen=True)
class Account:
    """State of a time account.

    Attributes:
        seconds: Seconds since the account was opened, by `RECORDED`.
        steps: Number of training steps that the process has run.
        base: Steps since training began that were done before the first step of the running fit.
        reached: Steps since training began that are done.
    """

    seconds: Mapping[str, float]
    steps: int
    base: int
    reached: int

    def to_json(self) -> dict[str, Any]:
        """Return one flat object, as the journal has it."""
        return {
            **{name: round(seconds, 3) for name, seconds in self.seconds.items()},
            "steps": self.steps,
            "base": self.base,
            "reached": self.reached,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Account:
        """Create an account from an object that `to_json` returned.

        Raises:
            ValueError: If a value is missing, or no number of 0 or more.

        Example:
            >>> account = Account(dict.fromkeys(RECORDED, 0.5), 7, 3, 10)
            >>> Account.from_json(account.to_json()) == account
            True
        """
        numbers = [value.get(name) for name in (*RECORDED, *_COUNTS)]
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise ValueError(f"expected a number in a time account, received {number!r:.80}")
            if not 0 <= number < math.inf:
                raise ValueError(f"expected 0 or more in a time account, received {number!r}")
        return cls.from_numbers(numbers)

    @classmethod
    def from_numbers(cls, numbers: Sequence[Any]) -> Account:
        """Create an account from the seconds of `RECORDED` and the numbers of steps.

        Raises:
            ValueError: If there are more or fewer numbers, or a text is no number.
        """
        *seconds, steps, base, reached = map(float, numbers)
        by_name = dict(zip(RECORDED, seconds, strict=True))
        return cls(by_name, int(steps), int(base), int(reached))


class TimeAccount:
    """Stopwatch of the main thread, which is in exactly one category at any time.

    The first category is "startup".

    Args:
        clock: Function that returns seconds.

    Attributes:
        steps: See `Account`.
        base: See `Account`.
        reached: See `Account`.

    Example:
        >>> times = iter([0.0, 5.0, 7.0, 8.0])
        >>> account = TimeAccount(lambda: next(times))
        >>> with account.during("save"):
        ...     pass
        >>> seconds = account.state().seconds
        >>> seconds["startup"], seconds["save"]
        (6.0, 2.0)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._seconds = dict.fromkeys(RECORDED, 0.0)
        self._category = RECORDED[0]
        self._since = clock()
        self.steps = 0
        self.base = 0
        self.reached = 0

    def switch(self, category: str) -> str:
        """Enter a category, and return the one before."""
        now = self._clock()
        self._seconds[self._category] += now - self._since
        self._since = now
        former = self._category
        self._category = category
        return former

    @contextlib.contextmanager
    def during(self, category: str) -> Iterator[None]:
        """Count the time of the context, without that of contexts within it."""
        former = self.switch(category)
        try:
            yield
        finally:
            self.switch(former)

    @contextlib.contextmanager
    def running(self, category: str) -> Iterator[None]:
        """Count the time of steps, whose first ends the startup."""
        former = self.switch(category)
        try:
            yield
        finally:
            self.switch("idle" if former == "startup" else former)

    def move(self, origin: str, target: str, seconds: float) -> None:
        """Move seconds that have been counted to another category, as far as there are any."""
        moved = min(max(0.0, seconds), self._seconds[origin])
        self._seconds[origin] -= moved
        self._seconds[target] += moved

    def counted(self, category: str) -> float:
        """Return the seconds of a category, without a context that has not ended."""
        return self._seconds[category]

    def add_steps(self, steps: int) -> None:
        """Count training steps that have run."""
        self.steps += steps

    def state(self) -> Account:
        """Return the account up to now."""
        self.switch(self._category)
        return Account(dict(self._seconds), self.steps, self.base, self.reached)


@functools.cache
def time_account() -> TimeAccount:
    """Return the account of this process, which the first call opens."""
    return TimeAccount()
