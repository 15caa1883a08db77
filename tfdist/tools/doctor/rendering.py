"""Text rendering of checks, as a table for a terminal."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence

from tfdist.runtime.formatting import printable
from tfdist.tools.doctor.check_results import FAIL, PASS, WARN, Check, count

_COLOURS = {PASS: "\x1b[32m", WARN: "\x1b[33m", FAIL: "\x1b[31m"}
_END = "\x1b[0m"
_NAME = 16  # columns of a name; a longer name moves the finding to the right
_WORDS = {PASS: ("passed", "passed"), WARN: ("warning", "warnings"), FAIL: ("failure", "failures")}


def lines(
    checks: Sequence[Check], titles: dict[str, str], width: int, colour: bool = False
) -> list[str]:
    r"""Format checks as the lines of a table.

    Args:
        checks: Checks in display order.
        titles: Heading of each part of the diagnosis, by `Check.part`.
        width: Number of columns of the terminal.
        colour: Boolean, whether the terminal supports colours, default False.

    Returns:
        Lines of the table.

    Example:
        >>> print("\n".join(lines(
        ...     [Check("host", "cores", "warn", "1 of 8", "take more")], {"host": "this host"}, 60
        ... )))
        this host
          warn  cores            1 of 8
                                 remedy: take more
    """
    rows = []
    for part, group in itertools.groupby(checks, key=lambda check: check.part):
        rows.append(titles.get(part, part))
        for check in group:
            rows += _rows(check, max(width, 40), colour)
    return rows


def summary(checks: Sequence[Check], colour: bool = False) -> str:
    """Count the checks of each status in one line.

    Example:
        >>> summary([Check("host", "cores", "pass", "2")])
        '1 passed, 0 warnings, 0 failures'
    """
    parts = []
    for status, number in count(checks).items():
        text = f"{number} {_WORDS[status][number != 1]}"
        parts.append(_coloured(text, status) if colour and number else text)
    return ", ".join(parts)


def _rows(check: Check, width: int, colour: bool) -> list[str]:
    indent = " " * (2 + 4 + 2 + _NAME + 1)
    head = f"  {check.status}  {check.name:{_NAME}} "
    rows = _wrapped(head, check.found, indent, width)
    if colour:
        rows[0] = rows[0].replace(check.status, _coloured(check.status, check.status), 1)
    if check.remedy:
        rows += _wrapped(f"{indent}remedy: ", check.remedy, f"{indent}        ", width)
    return rows


def _wrapped(head: str, text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        printable(text),
        width,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [head.rstrip()]


def _coloured(text: str, status: str) -> str:
    return f"{_COLOURS[status]}{text}{_END}"
