"""Who looks at the steps of a `fit`, and what is counted for them; facts only."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class StepMonitoring:
    """Who looks at the steps of one `fit` or `evaluate`, the same on every worker.

    Args:
        exact: A callback watches every step: run them one by one, with the metrics of all replicas after each.
        progress: A progress bar shows the metrics of all replicas about four times a second.
        steps: Steps in an epoch where the caller said so.
        saves: Some worker's callback saves when a worker is asked to end, so that after each call all ask each other.
    """

    exact: bool = True
    progress: bool = False
    steps: int | None = None
    saves: bool = False


@dataclasses.dataclass
class Stats:
    """What a Runner has done since it was made; callbacks read differences.

    Fields:
        steps: Steps run.
        examples: Rows of their global batches.
        seconds: Wall time of the calls, input included.
        input_seconds: Time that steps waited for a batch.
    """

    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    input_seconds: float = 0.0
