"""Parse the save frequency of a callback."""

from __future__ import annotations

import re
from typing import Any

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(save_freq: Any) -> float | None:
    """Return the time in seconds that a `save_freq` such as "5m" gives, or None.

    Args:
        save_freq: "epoch", a number of steps, or a time such as "30s", "5m" or "1h".

    Returns:
        The time in seconds; None for "epoch" or a number of steps.

    Raises:
        ValueError: It is a text of another form.
    """
    if not isinstance(save_freq, str) or save_freq == "epoch":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", save_freq)
    if not match or not float(match[1]):
        raise ValueError(
            'save_freq: expected "epoch", a number of steps, or a time such as "30s", "5m" or '
            f'"1h"; received {save_freq!r}.'
        )
    return float(match[1]) * _SECONDS[match[2]]
