"""How often something is saved, in a user's words, becomes numbers."""

from __future__ import annotations

import re
from typing import Any

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(save_freq: Any) -> float | None:
    """The time that a `save_freq` says; None where it says none."""
    if not isinstance(save_freq, str) or save_freq == "epoch":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", save_freq)
    if not found or not float(found[1]):
        raise ValueError(
            f'save_freq: expected "epoch", a number of steps, or a time such as "30s", "5m" or "1h"; received {save_freq!r}.'
        )
    return float(found[1]) * _SECONDS[found[2]]
