"""What was found about one thing becomes a Check, which passes, warns or fails with a remedy; nothing is looked at here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

PASS, WARN, FAIL = "pass", "warn", "fail"
HOST, CLUSTER, RUN = "host", "cluster", "run"  # the parts of a diagnosis, in their order


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of a diagnosis.

    Attributes:
        part: What it is about: "host", "cluster" or "run".
        name: What was looked at, in a few words; unique in its part.
        status: "pass", "warn" or "fail".
        found: What was found.
        remedy: What to do about it, one sentence; "" where it passes.
    """

    part: str
    name: str
    status: str
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.status == PASS) == (not self.remedy), self


def graded(
    part: str, name: str, found: str, remedy: str = "", *, fails: bool = False, warns: bool = False
) -> Check:
    """The check of something that may be wrong.

    Args:
        part: Of `Check`.
        name: Of `Check`.
        found: What was found.
        remedy: What to do, if it is wrong.
        fails: Whether it makes training impossible or wrong.
        warns: Whether it costs something.

    Example:
        >>> graded("host", "cores", "2", "take more", warns=2 < 4).status, graded("host", "cores", "8", "take more").remedy
        ('warn', '')
    """
    status = FAIL if fails else WARN if warns else PASS
    return Check(part, name, status, found, "" if status == PASS else remedy)


def of_error(part: str, name: str, error: object, remedy: str = "see the message") -> Check:
    """A failed check of an error's sentence, whose last part says what to do.

    Args:
        part: Of `Check`.
        name: Of `Check`.
        error: The exception, or its text.
        remedy: What to do where the sentence does not say.

    Example:
        >>> of_error("host", "x", "port 80 is taken; choose another one.")
        Check(part='host', name='x', status='fail', found='port 80 is taken', remedy='choose another one')
    """
    text = " ".join(str(error).split()).rstrip(".")
    ends = list(re.finditer(r"(?:;|(?<!\b[A-Z])\.) (?=[\w`])", text))
    if not ends:
        return Check(part, name, FAIL, text, remedy)
    return Check(part, name, FAIL, text[: ends[-1].start()], text[ends[-1].end() :])


def exit_code(checks: Sequence[Check]) -> int:
    """1 where one fails, else 0."""
    return int(any(check.status == FAIL for check in checks))


def count(checks: Sequence[Check]) -> dict[str, int]:
    """How many pass, warn and fail.

    Example:
        >>> count([Check("host", "cores", "pass", "2")])
        {'pass': 1, 'warn': 0, 'fail': 0}
    """
    return {
        status: sum(check.status == status for check in checks) for status in (PASS, WARN, FAIL)
    }


def document(checks: Sequence[Check], host: str, version: str) -> dict[str, Any]:
    """The diagnosis as `--json` prints it; docs/doctor.md describes it."""
    counts = count(checks)
    worst = FAIL if counts[FAIL] else WARN if counts[WARN] else PASS
    return {
        "tfdist": version,
        "host": host,
        "status": worst,
        "counts": counts,
        "checks": [dataclasses.asdict(check) for check in checks],
    }
