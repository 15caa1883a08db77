"""Formatting of numbers, durations and times for reports."""

from __future__ import annotations

import math
import time

NOTHING = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"


def units_of_time(longest: float) -> tuple[float, str]:
    """Return the unit of a time axis in seconds, and its name.

    Args:
        longest: Longest time that the axis must show, in seconds.

    Example:
        >>> units_of_time(30), units_of_time(3000)
        ((1.0, 's'), (60.0, 'min'))
    """
    return (1.0, "s") if longest < 180 else (60.0, "min") if longest < 10800 else (3600.0, "h")


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
