"""Functional training API: custom losses and custom training loops.

Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist.loops.prepare import prepare_training
    from tfdist.loops.steps import train_step, update
    from tfdist.loops.training import evaluate, train
    from tfdist.loops.training_state import State

# Name -> module that defines it.
_MODULES = {
    "State": "tfdist.loops.training_state",
    "evaluate": "tfdist.loops.training",
    "prepare_training": "tfdist.loops.prepare",
    "train": "tfdist.loops.training",
    "train_step": "tfdist.loops.steps",
    "update": "tfdist.loops.steps",
}

__all__ = ["State", "evaluate", "prepare_training", "train", "train_step", "update"]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(
            f"module 'tfdist.loops' has no attribute {name!r}; it has {', '.join(sorted(_MODULES))}"
        )
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _MODULES)
