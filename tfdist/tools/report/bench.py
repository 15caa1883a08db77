"""The file of a benchmark becomes facts; a setup that is damaged is named and left out."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.telemetry.anatomy import PARTS
from tfdist.tools.report.files import Reader, number
from tfdist.tools.report.read import BENCHMARK
from tfdist.tools.report.words import TIMES

SCALING, PREDICT, ALLREDUCE = "scaling", "predict", "allreduce"


@dataclasses.dataclass(frozen=True)
class Setup:
    """One row of a benchmark.

    Attributes:
        strategy: Its name.
        replicas: How many computed.
        workers: In how many processes.
        modes: Of "strong" and "weak".
        global_batch: Examples of a step.
        bytes: That a replica gave into the sum of a step.
        seconds: Of a step, in each round.
        rates: Examples per second, in each round.
        parts: Seconds of each part of a step, a mean of all workers; empty: not measured.
        speedup: Against one replica; None: there is none to compare with.
        efficiency: 1 is ideal; None as for `speedup`.
        bandwidth: Bytes per second; None: not measured.
        reason: Why efficiency was lost, in a sentence; may be "".
        error: Why there are no numbers; None: there are.
    """

    strategy: str
    replicas: int
    workers: int
    modes: tuple[str, ...]
    global_batch: int
    bytes: int
    seconds: tuple[float, ...]
    rates: tuple[float, ...]
    parts: dict[str, float]
    speedup: float | None
    efficiency: float | None
    bandwidth: float | None
    reason: str
    error: str | None

    @property
    def rate(self) -> float | None:
        """Examples per second of the median round."""
        return statistics.median(self.rates) if self.rates else None

    @property
    def step(self) -> float | None:
        """Seconds of the median round's step."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def label(self) -> str:
        """What tells it from others, in words."""
        kind = f", {' and '.join(self.modes)}" if self.modes else ""
        return f"{self.strategy} {TIMES}{self.replicas}{kind}"


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What `tfdist bench` has measured.

    Attributes:
        path: Its directory.
        kind: "scaling", "predict" or "allreduce".
        facts: All else that its file says: name, command, time, config, machine, versions, options, notes.
        setups: Its rows.
        problems: What is wrong with its file.
    """

    path: Path
    kind: str
    facts: dict[str, Any]
    setups: tuple[Setup, ...]
    problems: tuple[str, ...]

    def section(self, name: str) -> dict[str, Any]:
        """A part of the file, such as "machine"; empty where there is none."""
        value = self.facts.get(name)
        return value if isinstance(value, dict) else {}


def read_benchmark(directory: Path) -> Benchmark:
    """Reads a benchmark's directory; without a row where its file is damaged."""
    reader = Reader()
    facts = reader.object(directory / BENCHMARK) or {}
    listed = facts.get("setups")
    setups = []
    for place, line in enumerate(listed if isinstance(listed, list) else []):
        try:
            setups.append(_setup(line))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reader.problems.append(f"{directory / BENCHMARK}: setups[{place}] is damaged ({error}); it is left out")
    kind = facts.get("kind")
    if facts and not isinstance(listed, list):
        reader.problems.append(f"{directory / BENCHMARK}: expected a list of setups, received {listed!r}")
    return Benchmark(directory, kind if kind in (PREDICT, ALLREDUCE) else SCALING, facts, tuple(setups), tuple(reader.problems))


def _setup(line: Mapping[str, Any]) -> Setup:
    anatomies = list((line.get("anatomy") or {}).values())
    parts = {part: statistics.fmean(number(parts.get(part, 0.0)) for parts in anatomies) for part in PARTS} if anatomies else {}
    return Setup(
        strategy=str(line["strategy"]),
        replicas=int(number(line["replicas"])),
        workers=int(number(line.get("workers", 1))),
        modes=tuple(map(str, line.get("modes") or ())),
        global_batch=int(number(line.get("global_batch") or 0)),
        bytes=int(number(line.get("bytes") or 0)),
        seconds=tuple(map(number, line.get("seconds") or ())),
        rates=tuple(map(number, line.get("rates") or ())),
        parts=parts,
        speedup=_optional(line.get("speedup")),
        efficiency=_optional(line.get("efficiency")),
        bandwidth=_optional(line.get("bus_bandwidth")),
        reason=str(line.get("reason") or ""),
        error=str(line["error"]) if line.get("error") else None,
    )


def _optional(value: Any) -> float | None:
    return None if value is None else number(value)
