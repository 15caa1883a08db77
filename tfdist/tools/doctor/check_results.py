"""Check results of `tfdist doctor`: pass, warn or fail, with a remedy."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

PASS = "pass"
WARN = "warn"
FAIL = "fail"
# Parts of a diagnosis, in display order.
HOST = "host"
CLUSTER = "cluster"
RUN = "run"


@dataclasses.dataclass(frozen=True)
class Check:
    """Result of one check of a diagnosis.

    Attributes:
        part: Subject of the check: "host", "cluster" or "run".
        name: Short name of what was checked, unique in its part.
        status: Status "pass", "warn" or "fail".
        found: Description of what was found.
        remedy: One sentence that says what to do about it; "" if the check passes.
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
    """Create a check whose status depends on how serious its fault is.

    Args:
        part: Subject of the check; see `Check`.
        name: Short name of the check; see `Check`.
        found: Description of what was found.
        remedy: Sentence that says what to do; left out if the check passes.
        fails: Boolean, whether the fault makes training impossible or wrong.
        warns: Boolean, whether the fault costs something.

    Returns:
        The check.

    Example:
        >>> graded("host", "cores", "2", "take more", warns=2 < 4).status, graded(
        ...     "host", "cores", "8", "take more"
        ... ).remedy
        ('warn', '')
    """
    status = FAIL if fails else WARN if warns else PASS
    return Check(part, name, status, found, "" if status == PASS else remedy)


def of_error(part: str, name: str, error: object, remedy: str = "see the message") -> Check:
    """Create a failed check from an error message whose last clause says what to do.

    Args:
        part: Subject of the check; see `Check`.
        name: Short name of the check; see `Check`.
        error: Exception, or its text.
        remedy: Remedy to use if the message contains none. Default: "see the message".

    Returns:
        The check.

    Example:
        >>> of_error(  # doctest: +NORMALIZE_WHITESPACE
        ...     "host", "x", "port 80 is taken; choose another one."
        ... )
        Check(part='host', name='x', status='fail', found='port 80 is taken',
              remedy='choose another one')
    """
    text = " ".join(str(error).split()).rstrip(".")
    ends = list(re.finditer(r"(?:;|(?<!\b[A-Z])\.) (?=[\w`])", text))
    if not ends:
        return Check(part, name, FAIL, text, remedy)
    return Check(part, name, FAIL, text[: ends[-1].start()], text[ends[-1].end() :])


def exit_code(checks: Sequence[Check]) -> int:
    """Return 1 if any check fails, else 0."""
    return int(any(check.status == FAIL for check in checks))


def count(checks: Sequence[Check]) -> dict[str, int]:
    """Count the checks that pass, warn and fail.

    Example:
        >>> count([Check("host", "cores", "pass", "2")])
        {'pass': 1, 'warn': 0, 'fail': 0}
    """
    return {
        status: sum(check.status == status for check in checks) for status in (PASS, WARN, FAIL)
    }


def document(checks: Sequence[Check], host: str, version: str) -> dict[str, Any]:
    """Return the diagnosis in the JSON format of `--json`, which docs/doctor.md describes."""
    counts = count(checks)
    worst = FAIL if counts[FAIL] else WARN if counts[WARN] else PASS
    return {
        "tfdist": version,
        "host": host,
        "status": worst,
        "counts": counts,
        "checks": [dataclasses.asdict(check) for check in checks],
    }
