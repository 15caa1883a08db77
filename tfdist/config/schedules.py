"""Schedules of the learning rate that a config can name, and checks of their options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdist.config.checks import nearest

SCHEDULES: dict[str, tuple[str, ...]] = {  # the options of each
    "constant": (),
    "cosine": ("final",),
    "polynomial": ("final", "power"),
    "steps": ("epochs", "factor"),
}
KEY = "train.schedule_options"


def check_options(schedule: str, options: Mapping[str, Any], epochs: int) -> None:
    """Check the options of a schedule. A user's function checks its own.

    Args:
        schedule: Name of the schedule.
        options: Its options.
        epochs: Number of epochs of the run.

    Raises:
        ValueError: If an option is unknown, missing or wrong. The message names its key.

    Example:
        >>> check_options("steps", {"epochs": [30, 60, 80]}, 90)
        >>> check_options("cosine", {"power": 2}, 90)
        Traceback (most recent call last):
        ValueError: train.schedule_options.power: no option of "cosine". Expected one of final.
    """
    if ":" in schedule:
        return
    allowed = SCHEDULES[schedule]
    for name, value in options.items():
        if name not in allowed:
            remedy = nearest(name, allowed) if allowed else "It has none."
            raise ValueError(f'{KEY}.{name}: no option of "{schedule}". {remedy}')
        _check_value(name, value)
    if "epochs" not in allowed:
        return
    if "epochs" not in options:
        raise ValueError(
            f'{KEY}.epochs: expected the epochs after which "steps" lowers the rate, such as '
            "(30, 60, 80); received none."
        )
    ends = numbers(options["epochs"])
    if ends != sorted(set(ends)) or ends[-1] >= epochs:
        raise ValueError(
            f"{KEY}.epochs: expected growing numbers below train.epochs, which are {epochs}; "
            f"received {options['epochs']!r}."
        )
    factors = numbers(options.get("factor", 0.1))
    if len(factors) not in (1, len(ends)):
        raise ValueError(
            f"{KEY}.factor: expected one number, or {len(ends)} as there are epochs; received "
            f"{options['factor']!r}."
        )


def numbers(value: Any) -> list[float]:
    """Return the numbers of an option that is one number or several.

    Example:
        >>> numbers(3), numbers((3, 4.5))
        ([3], [3, 4.5])
    """
    return [*value] if isinstance(value, list | tuple) else [value]


def _check_value(name: str, value: Any) -> None:
    expected, fits = {
        "final": ("a share from 0 to 1", lambda number: 0 <= number <= 1),
        "power": ("a number above 0", lambda number: number > 0),
        "epochs": ("numbers above 0", lambda number: number > 0),
        "factor": ("numbers above 0", lambda number: number > 0),
    }[name]
    several = numbers(value) if name in ("epochs", "factor") else [value]
    right = several and all(
        isinstance(number, int | float) and not isinstance(number, bool) and fits(number)
        for number in several
    )
    if not right:
        raise ValueError(f"{KEY}.{name}: expected {expected}, received {value!r}.")
