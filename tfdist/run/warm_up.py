"""Warm-up of the learning rate, before any schedule."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

__all__ = ["WarmUp"]


@keras.saving.register_keras_serializable("tfdist")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """Learning rate that grows in a line, and then follows a schedule.

    In update `i`, counted from 0, of `updates`, the rate is i / updates of the first one of the
    schedule, which begins after the warm-up. Keras' `CosineDecay` has the same warm-up. See Goyal
    et al., "Accurate, Large Minibatch SGD", section 2.2.

    Args:
        after: Learning rate after the warm-up: a number, or a Keras schedule.
        updates: Number of updates of the warm-up, 1 or more.

    Example:
        >>> rate = WarmUp(0.4, 4)
        >>> [round(float(rate(step)), 2) for step in range(6)]
        [0.0, 0.1, 0.2, 0.3, 0.4, 0.4]
    """

    def __init__(self, after: float | Any, updates: int):
        self.after = (
            keras.optimizers.schedules.deserialize(after) if isinstance(after, dict) else after
        )
        self.updates = updates

    def __call__(self, step: Any) -> Any:
        """Return the rate of an update."""
        step = ops.cast(step, "float32")
        share = ops.minimum(1.0, step / self.updates)
        left = ops.maximum(0.0, step - self.updates)
        return share * (self.after(left) if callable(self.after) else self.after)

    def get_config(self) -> dict[str, Any]:
        """See `keras.optimizers.schedules.LearningRateSchedule`."""
        after = self.after
        if callable(after):
            after = keras.optimizers.schedules.serialize(after)
        return {"after": after, "updates": self.updates}
