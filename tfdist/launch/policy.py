"""How attempts ended becomes whether, and when, there is another one; nothing is started or waited for here."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from tfdist.launch.failures import Kind, Verdict
from tfdist.launch.messages import Decision

FIRST_DELAY = 1.0  # seconds before the second restart in a row without a step in between; each one more doubles it
LONGEST_DELAY = 30.0


@dataclasses.dataclass(frozen=True)
class Failed:
    """How an attempt ended that did not do its work.

    Attributes:
        verdict: Why.
        stepped: Whether any step was made.
        reached: Epoch and step of the last sign of training; None: there was none.
    """

    verdict: Verdict
    stepped: bool = False
    reached: tuple[int, int] | None = None

    @property
    def cause(self) -> Cause:
        """What decides about a restart."""
        failure = self.verdict.cause
        where = (
            "before the first step"
            if self.reached is None
            else f"after step {self.reached[1]} of epoch {self.reached[0] + 1}"
        )
        error = f"{failure.message}\n{failure.traceback.rpartition(chr(10))[2]}"
        return Cause(
            failure.kind.value,
            hashlib.sha256(ascii(error).encode()).hexdigest()[:16],
            where,
            self.stepped,
        )


@dataclasses.dataclass(frozen=True)
class Cause:
    """Of a failure, what decides about a restart; hosts tell it to each other as text.

    Attributes:
        kind: Value of `failures.Kind`.
        error: The same for the same error; short, as texts between hosts are bounded.
        where: Where in the training, in words.
        progressed: Whether there was a step in this attempt.
    """

    kind: str
    error: str = ""
    where: str = ""
    progressed: bool = True

    def to_text(self) -> str:
        """Example:
        >>> Cause.from_text(Cause("signal").to_text())
        Cause(kind='signal', error='', where='', progressed=True)
        """
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Cause:
        """The inverse of `to_text`.

        Raises:
            ValueError, TypeError: It is none.
        """
        return cls(**json.loads(text))


class Policy:
    """Decides about restarts.

    A preemption is not counted. A mistake in the configuration ends the job, and so does an error of the user's code that comes
    back at the same step: a restart does not help either.

    Args:
        restarts: How many to allow.

    Example:
        >>> policy = Policy(restarts=1)
        >>> policy.decide(Cause("signal"))
        Decision(restart=True, delay=0.0, text='restart 1 of 1', code=None)
        >>> policy.decide(Cause("signal")).text
        'the restarts are used up (--restarts 1)'
    """

    def __init__(self, restarts: int):
        self._restarts = restarts
        self._used = 0
        self._fruitless = 0  # restarts in a row after which no step was made
        self._last: tuple | None = None

    def decide(self, cause: Cause) -> Decision:
        """What follows an attempt that failed or was preempted."""
        self._fruitless = 0 if cause.progressed else self._fruitless + 1
        signature = cause.kind, cause.error, cause.where
        again, self._last = signature == self._last, signature
        if cause.kind == Kind.CONFIGURATION.value:
            return Decision(False, 0.0, "a restart does not mend a configuration")
        if not self._restarts:
            return Decision(False, 0.0, "")
        if cause.kind == Kind.ERROR.value and again:
            return Decision(
                False, 0.0, f"the same error {cause.where} a second time: a restart does not help"
            )
        if cause.kind == Kind.PREEMPTED.value:
            return Decision(True, self._delay(), "preempted: restart, not counted")
        if not self.left:
            return Decision(False, 0.0, f"the restarts are used up (--restarts {self._restarts})")
        self._used += 1
        return Decision(True, self._delay(), f"restart {self._used} of {self._restarts}")

    @property
    def left(self) -> int:
        """How many restarts are left."""
        return self._restarts - self._used

    def allow_one(self) -> bool:
        """Counts the restart of one task that its group does without meanwhile; False: none is left."""
        allowed = self.left > 0
        self._used += allowed
        return allowed

    def _delay(self) -> float:
        return (
            0.0
            if self._fruitless < 2
            else min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** (self._fruitless - 2))
        )
