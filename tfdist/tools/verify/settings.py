"""Settings of a recording process of `tfdist verify`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

# Execution modes of the same steps. "compiled" is the mode of training. "rounding" reverses the
# rows of each batch: the mathematics is the same, but sums are taken in another order.
COMPILED = "compiled"
EAGER = "eager"
ROUNDING = "rounding"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a process that records steps.

    Attributes:
        directory: Directory of the recordings.
        config: Config flags for `tfdist.run.train_command.parse`.
        strategy: Name of the strategy. Default: "one_device".
        devices: Devices of the strategy, as in `make_strategy`. None: all.
        communication: Collective communication between workers. Default: "auto".
        steps: Number of steps to train. Default: 5.
        modes: Execution modes to record, one after another.
        alone: Execution modes to record with one replica before that, in the same process.
        timeout: Longest wait of a step for other workers, in seconds. Default: 600.
    """

    directory: str
    config: tuple[str, ...]
    strategy: str = "one_device"
    devices: str | None = None
    communication: str = "auto"
    steps: int = 5
    modes: tuple[str, ...] = (COMPILED,)
    alone: tuple[str, ...] = ()
    timeout: float = 600.0

    def to_json(self) -> str:
        """Serialize the settings to a single command-line argument."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Settings:
        """Parse the output of `to_json`.

        Example:
            >>> settings = Settings("/tmp/x", ("--config=a.py",), steps=3)
            >>> Settings.of_json(settings.to_json()) == settings
            True
        """
        values: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in json.loads(text).items()
        }
        return cls(**values)

    def file(self, mode: str, rank: int, alone: bool = False) -> Path:
        """Return the file for a worker's recording of an execution mode.

        Args:
            mode: Execution mode.
            rank: Rank of the worker.
            alone: Whether the recording is made with one replica. Default: False.
        """
        return Path(self.directory) / f"{'one-' if alone else ''}{mode}-{rank}.npz"


def first_device(devices: str | None) -> str | None:
    """Return the device of the single replica that several replicas are compared with.

    Returns:
        The first of the named devices. None: TensorFlow's first device.

    Example:
        >>> first_device("gpu:0,gpu:1"), first_device("2"), first_device(None)
        ('gpu:0', None, None)
    """
    return None if devices is None or devices.strip().isdigit() else devices.split(",")[0].strip()
