"""Formatting of byte counts, durations and text from the network for display."""

from __future__ import annotations


def amount(count: float) -> str:
    """Format a number of bytes with a unit.

    Units are powers of 1000, as for disks and memory that are sold.

    Example:
        >>> amount(999), amount(1500), amount(25e9)
        ('999 B', '1.5 kB', '25 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB" if count < 1000 else f"{count:,.0f} TB"


def lasting(seconds: float) -> str:
    """Format a duration or a difference of clocks, given in seconds.

    Example:
        >>> lasting(0.00012), lasting(0.25), lasting(75), lasting(7200)
        ('0.12 ms', '250 ms', '75 s', '120 min')
    """
    size = abs(seconds)
    if size < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if size < 600 else f"{seconds / 60:.0f} min"


def printable(text: str) -> str:
    r"""Replace characters of a text that could control a terminal by "?".

    Such characters move the cursor, change the colours, or do worse.

    Example:
        >>> printable("worker:1\x1b[2J")
        'worker:1?[2J'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)
