"""Step breakdown records: where the time of each worker's steps went.

Each worker writes them; reports and benchmarks read them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

from tfdist.telemetry.layout import STEP_BREAKDOWN, append_json, read_json_lines, worker_directories

__all__ = ["PARTS", "Window", "per_step", "read"]

PARTS = {
    "input": "waiting for the batch",
    "forward_backward": "the model's forward pass and its gradients",
    "gradient_sync": "summing the gradients over the replicas",
    "update": "the optimizer, and metrics",
    "wait": "waiting for the slowest replica to bring its gradients",
    "host": "Python: Keras' loop, callbacks, starting calls",
}
"""Parts of a step, with what they are; they add up to the time from one step's end to the next."""

_KEYS = {"steady": "compiled"}  # attributes of `Window` with another name in the file


@dataclasses.dataclass(frozen=True)
class Window:
    """Consecutive steps of one worker, and where their time went.

    Attributes:
        worker: Rank of the worker.
        time: Time when the window ended, in seconds since 1970.
        epoch: Epoch of the last step, from 0.
        step: Number of steps since training began, at the end of the window.
        steps: Number of steps in the window.
        examples: Number of rows in the global batches of these steps.
        seconds: Duration in seconds, from the end of the previous window or the beginning of the
            epoch's training.
        parts: Seconds spent in each of `PARTS`, over all steps of the window. Their sum is
            `seconds`.
        bytes: Bytes of gradients that one replica contributes to the all-reduce in each step; 0
            with one replica.
        steady: Whether no call in the window traced or compiled a function. Averages leave out the
            other windows. The file has this value as `compiled`.
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
    steady: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return one flat object, as stored in `step_breakdown.jsonl`."""
        values = dataclasses.asdict(self)
        return {
            **{_KEYS.get(k, k): v for k, v in values.items() if k != "parts"},
            **{k: round(v, 6) for k, v in self.parts.items()},
        }

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Window:
        """Create a window from an object that `to_json` returned.

        Example:
            >>> window = Window(0, 1.0, 0, 8, 8, 512, 0.5, dict.fromkeys(PARTS, 0.1))
            >>> Window.from_json(window.to_json()) == window
            True
        """
        names = {field.name for field in dataclasses.fields(cls)} - {"parts"}
        return cls(
            **{k: line[_KEYS.get(k, k)] for k in names if _KEYS.get(k, k) in line},
            parts={k: float(line.get(k, 0.0)) for k in PARTS},
        )


def write(directory: str | os.PathLike, window: Window) -> None:
    """Append a window to `step_breakdown.jsonl` in a worker's directory."""
    append_json(os.path.join(directory, STEP_BREAKDOWN), window.to_json())


def read(run: str | os.PathLike) -> dict[int, list[Window]]:
    """Return the windows of each worker of a run, keyed by rank.

    Workers without a step breakdown are left out.

    Args:
        run: Directory of the run.

    Raises:
        ValueError: If a file is damaged.
    """
    records = {}
    for rank, path in worker_directories(run).items():
        file = path / STEP_BREAKDOWN
        try:
            windows = [Window.from_json(line) for line in read_json_lines(file)]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: damaged: {error!r}. Measure the steps again.") from error
        if windows:
            records[rank] = windows
    return records


def per_step(windows: Iterable[Window]) -> dict[str, float]:
    """Return the mean seconds per step of each part, without windows that compiled.

    The result is empty if no step is left.

    Example:
        >>> round(
        ...     per_step([Window(0, 1.0, 0, 8, 8, 512, 0.48, dict.fromkeys(PARTS, 0.08))])["input"],
        ...     6,
        ... )
        0.01
    """
    steady = [window for window in windows if window.steady]
    steps = sum(window.steps for window in steady)
    return (
        {part: sum(window.parts[part] for window in steady) / steps for part in PARTS}
        if steps
        else {}
    )
