"""The words of `tfdist verify` become what each of its processes is told; nothing is trained or compared here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

# How the same steps are run. "compiled" is how training runs them. "rounding" gives each batch's rows in reverse: the same
# mathematics, summed in another order.
COMPILED, EAGER, ROUNDING = "compiled", "eager", "rounding"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a process records.

    Attributes:
        directory: Where it writes.
        config: Words for `tfdist.run.parse`.
        strategy: Name of the strategy.
        devices: Its devices, as `make_strategy` takes them; None: all.
        communication: How workers reduce gradients.
        steps: How many to train.
        ways: Of running them, one after the other.
        alone: Ways of running them before that, in the same process, with one replica.
        timeout: Seconds that a step waits for other workers.
    """

    directory: str
    config: tuple[str, ...]
    strategy: str = "one_device"
    devices: str | None = None
    communication: str = "auto"
    steps: int = 5
    ways: tuple[str, ...] = (COMPILED,)
    alone: tuple[str, ...] = ()
    timeout: float = 600.0

    def to_json(self) -> str:
        """The settings as a word on a command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Settings:
        """The settings that `to_json` wrote.

        Example:
            >>> settings = Settings("/tmp/x", ("--config=a.py",), steps=3)
            >>> Settings.of_json(settings.to_json()) == settings
            True
        """
        values: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in json.loads(text).items()
        }
        return cls(**values)

    def file(self, way: str, rank: int, alone: bool = False) -> Path:
        """What a worker recorded of one way; or what was recorded with one replica."""
        return Path(self.directory) / f"{'one-' if alone else ''}{way}-{rank}.npz"


def first_device(devices: str | None) -> str | None:
    """The device of one replica that is to be compared with those of several.

    Example:
        >>> first_device("gpu:0,gpu:1"), first_device("2"), first_device(None)
        ('gpu:0', None, None)
    """
    return None if devices is None or devices.strip().isdigit() else devices.split(",")[0].strip()
