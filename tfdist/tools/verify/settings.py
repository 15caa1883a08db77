"""The words of `tfdist verify` become what each of its processes is told; nothing is trained or compared here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

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
        timeout: Seconds that a step waits for other workers.
    """

    directory: str
    config: tuple[str, ...]
    strategy: str = "one_device"
    devices: str | None = None
    communication: str = "auto"
    steps: int = 5
    ways: tuple[str, ...] = (COMPILED,)
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
        values = json.loads(text)
        return cls(**{**values, "config": tuple(values["config"]), "ways": tuple(values["ways"])})

    def file(self, way: str, rank: int) -> Path:
        """What a worker recorded of one way."""
        return Path(self.directory) / f"{way}-{rank}.npz"
