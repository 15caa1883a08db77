"""Where the time of steps went, as records: written by each worker, read by reports and benchmarks; no clock is read here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

from tfdist.telemetry.layout import STEP_BREAKDOWN, append_json, read_json_lines, worker_directories

# The parts of a step. Together they are the time from one step's end to the next one's.
PARTS = {
    "input": "waiting for the batch",
    "forward_backward": "the model's forward pass and its gradients",
    "gradient_sync": "summing the gradients over the replicas",
    "update": "the optimizer, and metrics",
    "wait": "waiting for the slowest replica to bring its gradients",
    "host": "Python: Keras' loop, callbacks, starting calls",
}


@dataclasses.dataclass(frozen=True)
class Window:
    """Some steps in a row of one worker, and where their time went.

    Attributes:
        worker: Its rank.
        time: When the window ended, in seconds since 1970.
        epoch: The epoch of its last step, from 0.
        step: Steps since training began, at its end.
        steps: Steps in it.
        examples: Rows of their global batches.
        seconds: From the end of the window before, or the beginning of the epoch's training, to its end.
        parts: Seconds of each of `PARTS`, over all steps of the window; their sum is `seconds`.
        bytes: Of gradients that a replica gives into the sum, in each step; 0 where there is one replica.
        compiled: Whether the window has no call that traced or compiled; others do not count in averages.
    """

    worker: int
    time: float
    epoch: int
    step: int
    steps: int
    examples: int
    seconds: float
    parts: dict[str, float]
    bytes: int = 0
    compiled: bool = True

    def to_json(self) -> dict[str, Any]:
        """One flat object, as in `step_breakdown.jsonl`."""
        values = dataclasses.asdict(self)
        return {
            **{k: v for k, v in values.items() if k != "parts"},
            **{k: round(v, 6) for k, v in self.parts.items()},
        }

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Window:
        """The inverse of `to_json`.

        Example:
            >>> window = Window(0, 1.0, 0, 8, 8, 512, 0.5, dict.fromkeys(PARTS, 0.1))
            >>> Window.from_json(window.to_json()) == window
            True
        """
        names = {field.name for field in dataclasses.fields(cls)} - {"parts"}
        return cls(
            **{k: line[k] for k in names if k in line},
            parts={k: float(line.get(k, 0.0)) for k in PARTS},
        )


def write(directory: str | os.PathLike, window: Window) -> None:
    """Adds a window to `step_breakdown.jsonl` in a worker's directory."""
    append_json(os.path.join(directory, STEP_BREAKDOWN), window.to_json())


def read(run: str | os.PathLike) -> dict[int, list[Window]]:
    """The windows of each worker of a run, by rank; none where it had no step_breakdown.

    Args:
        run: The run's directory.
    """
    found = {
        rank: read_json_lines(path / STEP_BREAKDOWN)
        for rank, path in worker_directories(run).items()
    }
    return {
        rank: [Window.from_json(line) for line in lines] for rank, lines in found.items() if lines
    }


def per_step(windows: Iterable[Window]) -> dict[str, float]:
    """Seconds of each part in a mean step, windows that compiled left out; empty where no step is left.

    Example:
        >>> round(per_step([Window(0, 1.0, 0, 8, 8, 512, 0.48, dict.fromkeys(PARTS, 0.08))])["input"], 6)
        0.01
    """
    kept = [window for window in windows if window.compiled]
    steps = sum(window.steps for window in kept)
    return (
        {part: sum(window.parts[part] for window in kept) / steps for part in PARTS}
        if steps
        else {}
    )
