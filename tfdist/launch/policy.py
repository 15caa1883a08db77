"""Restart policy: whether to restart after a failure, and the restart backoff."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from tfdist.launch.failures import Kind, Verdict
from tfdist.launch.messages import Decision

# Seconds before the second restart in a row without a step in between; each further one doubles it.
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 30.0


@dataclasses.dataclass(frozen=True)
class Failed:
    """Outcome of a failed attempt.

    Attributes:
        verdict: Root cause and the other failures.
        stepped: Whether at least one step was finished, default False.
        reached: Epoch and step of the last heartbeat of training; None if there was none.
    """

    verdict: Verdict
    stepped: bool = False
    reached: tuple[int, int] | None = None

    @property
    def cause(self) -> Cause:
        """Return the properties of the failure that decide about a restart."""
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
    """Properties of a failure that decide about a restart; hosts exchange them as text.

    Attributes:
        kind: Value of `failures.Kind`.
        error: Text that is equal for the same error; short, because texts between hosts are
            bounded.
        where: Position in training, in words.
        progressed: Whether this attempt finished a step, default True.
    """

    kind: str
    error: str = ""
    where: str = ""
    progressed: bool = True

    def to_text(self) -> str:
        """Return the cause as JSON text.

        Example:
            >>> Cause.from_text(Cause("signal").to_text())
            Cause(kind='signal', error='', where='', progressed=True)
        """
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Cause:
        """Parse the text of `to_text`.

        Raises:
            ValueError: If the text is not JSON.
            TypeError: If the JSON does not describe a cause.
        """
        return cls(**json.loads(text))


class Policy:
    """Restart policy.

    A preemption does not count as a restart. A configuration error ends the job. So does an error
    of the user's code that repeats at the same step, because another restart does not help.

    Args:
        restarts: Maximum number of restarts.
        used: Number of restarts that earlier starts of the same job have used, default 0.

    Example:
        >>> policy = Policy(restarts=1)
        >>> policy.decide(Cause("signal"))
        Decision(restart=True, delay=0.0, text='restart 1 of 1', code=None)
        >>> policy.decide(Cause("signal")).text
        'no restart is left (--restarts 1)'
    """

    def __init__(self, restarts: int, used: int = 0):
        self._restarts = restarts
        self._used = used
        self._restarts_without_step = 0  # consecutive restarts without a finished step
        self._last: tuple | None = None

    def decide(self, cause: Cause) -> Decision:
        """Return the decision after an attempt that failed or was preempted."""
        self._restarts_without_step = 0 if cause.progressed else self._restarts_without_step + 1
        signature = cause.kind, cause.error, cause.where
        repeated = signature == self._last
        self._last = signature
        if cause.kind == Kind.CONFIGURATION.value:
            return Decision(False, 0.0, "no restart: it would not fix a configuration error")
        if not self._restarts:
            return Decision(False, 0.0, "")
        if cause.kind == Kind.ERROR.value and repeated:
            return Decision(False, 0.0, f"no restart: the same error occurred twice {cause.where}")
        if cause.kind == Kind.PREEMPTED.value:
            return Decision(True, self._delay(), "preempted: restart that does not count")
        if not self.left:
            return Decision(False, 0.0, f"no restart is left (--restarts {self._restarts})")
        self._used += 1
        return Decision(True, self._delay(), f"restart {self._used} of {self._restarts}")

    @property
    def left(self) -> int:
        """Return the number of restarts that are left."""
        return self._restarts - self._used

    @property
    def used(self) -> int:
        """Return the number of restarts that are used."""
        return self._used

    def allow_one(self) -> bool:
        """Count the restart of one task while its group continues; return False if none is left."""
        allowed = self.left > 0
        self._used += allowed
        return allowed

    def _delay(self) -> float:
        return (
            0.0
            if self._restarts_without_step < 2
            else min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** (self._restarts_without_step - 2))
        )
