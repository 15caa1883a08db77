"""Formatting of shares, times and sizes for benchmark reports."""

from __future__ import annotations

import re

_SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def percent(share: float) -> str:
    """Format a share as a percentage.

    Example:
        >>> percent(0.384)
        '38 %'
    """
    return f"{share * 100:.0f} %"


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds with two or three digits.

    Example:
        >>> milliseconds(0.0123), milliseconds(0.00012), milliseconds(1.5)
        ('12.3 ms', '0.12 ms', '1,500 ms')
    """
    return f"{_digits(1e3 * seconds)} ms"


def size(count: float) -> str:
    """Format a number of bytes with a decimal unit (powers of 1000).

    Example:
        >>> size(999), size(212008), size(11.04e6)
        ('999 B', '212 kB', '11 MB')
    """
    power = 0
    while count >= 999.5 and power < 4:
        count, power = count / 1000, power + 1
    text = f"{count:.0f}" if count >= 9.95 or not power else f"{count:.1f}"
    return f"{text} {['B', 'kB', 'MB', 'GB', 'TB'][power]}"


def binary(count: int) -> str:
    """Format a number of bytes as a command-line value.

    The unit is a power of 1024 if that is exact, and otherwise there is none.

    Example:
        >>> binary(4096), binary(16 * 2**20), binary(1000)
        ('4k', '16M', '1000')
    """
    for unit, power in (("G", 2**30), ("M", 2**20), ("k", 2**10)):
        if count and count % power == 0:
            return f"{count // power}{unit}"
    return str(count)


def to_bytes(text: str) -> int:
    """Parse a number of bytes; the inverse of `binary`.

    Raises:
        ValueError: The text is not a number of bytes. The message says what was expected.

    Example:
        >>> to_bytes("4k"), to_bytes("1M"), to_bytes("100")
        (4096, 1048576, 100)
    """
    match = re.fullmatch(r"(\d+)([kmg]?)", text.strip().lower())
    if not match or not int(match[1]):
        raise ValueError(f"expected bytes such as 4k, 1M or 100, received {text!r}")
    return int(match[1]) * _SIZES[match[2]]


def _digits(number: float) -> str:
    return (
        f"{number:,.0f}" if number >= 99.5 else f"{number:.1f}" if number >= 1 else f"{number:.2f}"
    )
