"""Text formatting for people: numbers with units, times, counts, and aligned tables."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Sequence

NOTHING = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"


def counted(number: int, noun: str, nouns: str | None = None) -> str:
    """Return a number with its noun in the singular or plural.

    Args:
        number: The count.
        noun: Singular noun.
        nouns: Plural noun, default the singular with an "s".

    Example:
        >>> counted(1, "step"), counted(1500, "step"), counted(2, "batch", "batches")
        ('1 step', '1,500 steps', '2 batches')
    """
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return the lines of a table with aligned columns.

    Args:
        rows: Cells of the table, the same number in each row.
        left: Indices of the left-aligned columns, default (0,). All others are right-aligned.

    Example:
        >>> aligned([("strategy", "ms"), ("mirrored", "1.25"), ("one", "12.50")])
        ['strategy     ms', 'mirrored   1.25', 'one       12.50']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def printable(text: str) -> str:
    r"""Replace characters of a text that could control a terminal by "?".

    Such characters move the cursor, change the colours, or do worse.

    Example:
        >>> printable("worker:1\x1b[2J")
        'worker:1?[2J'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def format_bytes(count: float, binary: bool = False) -> str:
    """Format a number of bytes with three digits and a unit.

    Args:
        count: Number of bytes.
        binary: Whether units are powers of 1024. Default: powers of 1000, as of disks and networks.

    Example:
        >>> format_bytes(999), format_bytes(1500), format_bytes(25e9), format_bytes(1.2e16)
        ('999 B', '1.5 kB', '25 GB', '12,000 TB')
        >>> format_bytes(4096, binary=True), format_bytes(1000, binary=True)
        ('4 KiB', '1,000 B')
    """
    base = 1024 if binary else 1000
    units = ("B", "KiB", "MiB", "GiB", "TiB") if binary else ("B", "kB", "MB", "GB", "TB")
    power = 0
    while abs(count) >= base - 0.5 and power < len(units) - 1:
        count /= base
        power += 1
    text = f"{count:.3g}" if abs(count) < 999.5 else f"{count:,.0f}"
    return f"{text} {units[power]}"


def parse_bytes(text: str, unit_required: bool = False) -> int:
    """Parse a number of bytes, with the units of the GNU core utilities.

    kB, MB, GB and TB are powers of 1000; KiB to TiB are powers of 1024, and so are k, M, G and T.

    Args:
        text: Number with a unit, in upper or lower case.
        unit_required: Whether a number without a unit is refused. Default: False.

    Returns:
        Number of bytes, at least 1.

    Raises:
        ValueError: If the text is not a number of bytes. The message says what was expected.

    Example:
        >>> parse_bytes("16GB"), parse_bytes("1.5 GiB"), parse_bytes("64k"), parse_bytes("100")
        (16000000000, 1610612736, 65536, 100)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?b?)|b)?", text.strip().lower())
    size = 0.0
    if match and (match[0][-1].isalpha() or not unit_required):
        base = 1000 if match[3] == "b" else 1024
        size = float(match[1]) * base ** " kmgt".index(match[2] or " ")
    if size < 1:
        other = "" if unit_required else ", or a number of bytes"
        raise ValueError(f"expected a size such as 16GB, 800MiB or 64k{other}, received {text!r}")
    return int(size)


def percent(share: float) -> str:
    """Format a share as a percentage.

    Example:
        >>> percent(0.384)
        '38 %'
    """
    return f"{share * 100:.0f} %"


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds, so that times can be compared.

    Example:
        >>> milliseconds(0.0123), milliseconds(0.00012), milliseconds(1.5)
        ('12.3 ms', '0.12 ms', '1,500 ms')
    """
    number = 1e3 * seconds
    digits = 0 if number >= 99.5 else 1 if number >= 1 else 2
    return f"{number:,.{digits}f} ms"


def duration(seconds: float) -> str:
    """Format a duration in seconds.

    Example:
        >>> duration(0.0123), duration(12.34), duration(75), duration(7384)
        ('12.3 ms', '12.3 s', '1 min 15 s', '2 h 3 min')
    """
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def moment(when: float) -> str:
    """Format a time in seconds since 1970 as local date and time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    except (ValueError, OverflowError, OSError):
        return f"{when:g} s since 1970"


def figure(value: float) -> str:
    """Format a number for a table, with four digits.

    Example:
        >>> figure(0.93602), figure(12345.6), figure(3), figure(float("nan"))
        ('0.936', '12,346', '3', 'nan')
    """
    if not math.isfinite(value) or abs(value) >= 1e15:
        return f"{value:.4g}"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def scaled(value: float) -> str:
    """Format a number for an axis.

    Example:
        >>> scaled(0.25), scaled(1200), scaled(34000), scaled(2.5e6), scaled(3e-05)
        ('0.25', '1,200', '34k', '2.5M', '3e-05')
    """
    if value and abs(value) < 1e-3:
        return f"{value:.3g}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size or (abs(value) >= size and letter != "k"):
            return f"{value / size:.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def units_of_time(longest: float) -> tuple[float, str]:
    """Return the unit of a time axis in seconds, and its name.

    Args:
        longest: Longest time that the axis must show, in seconds.

    Example:
        >>> units_of_time(30), units_of_time(3000)
        ((1.0, 's'), (60.0, 'min'))
    """
    return (1.0, "s") if longest < 180 else (60.0, "min") if longest < 10800 else (3600.0, "h")
