"""Step monitoring: requirements of callbacks on the steps of a `fit`, and step counters."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class StepMonitoring:
    """Requirements on the steps of one `fit` or `evaluate`, the same on every worker.

    Attributes:
        exact: Whether a callback watches every step. Steps then run one by one, with the metrics of
            all replicas after each.
        progress: Whether a progress bar shows the metrics of all replicas, about once a second.
        steps: Steps in an epoch, if the caller gave them.
        saves: Whether some worker's callback saves when a worker is asked to stop. All workers then
            ask each other after each call.
    """

    exact: bool = True
    progress: bool = False
    steps: int | None = None
    saves: bool = False


@dataclasses.dataclass
class Stats:
    """Counters of what a `Runner` has done since it was made; callbacks read differences.

    Attributes:
        steps: Number of steps run.
        examples: Number of rows of their global batches.
        seconds: Wall time of the calls in seconds, input included.
        input_seconds: Time in seconds that steps waited for a batch.
    """

    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    input_seconds: float = 0.0
