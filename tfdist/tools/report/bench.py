"""The file of a benchmark becomes facts; a setup that is damaged is named and left out."""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

from tfdist.telemetry.step_records import PARTS
from tfdist.tools.bench.results import FILE, KINDS, Setup
from tfdist.tools.report.files import Reader, number, section
from tfdist.tools.report.formatting import TIMES

SCALING, PREDICT, ALLREDUCE = KINDS


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What `tfdist bench` has measured, as far as its file is whole.

    Attributes:
        path: Its directory.
        kind: One of `KINDS`.
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
        return section(self.facts, name)

    @property
    def notes(self) -> list[str]:
        """Sentences that compare setups."""
        found = self.facts.get("notes")
        return [str(note) for note in found] if isinstance(found, list) else []


def read_benchmark(directory: Path) -> Benchmark:
    """Reads a benchmark's directory; without a row where its file is damaged."""
    reader, setups = Reader(), []
    facts = reader.object(directory / FILE) or {}
    listed = facts.get("setups")
    if facts and not isinstance(listed, list):
        reader.problems.append(
            f"{directory / FILE}: expected a list of setups, received {listed!r}"
        )
    for place, line in enumerate(listed if isinstance(listed, list) else []):
        try:
            setups.append(_checked(Setup.from_json(line)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reader.problems.append(
                f"{directory / FILE}: setups[{place}] is damaged ({error}); it is left out"
            )
    kind = facts.get("kind")
    if facts and kind not in KINDS:
        reader.problems.append(
            f"{directory / FILE}: expected a kind of {', '.join(KINDS)}, received {kind!r}"
        )
    return Benchmark(
        directory, kind if kind in KINDS else SCALING, facts, tuple(setups), tuple(reader.problems)
    )


def label(setup: Setup) -> str:
    """What tells a setup from others, in words."""
    modes = f", {' and '.join(setup.modes)}" if setup.modes else ""
    return f"{setup.strategy} {TIMES}{setup.replicas}{modes}"


def rate(setup: Setup) -> float:
    """Examples per second of the median round; 0 where there are none."""
    return setup.rate if setup.rates else 0.0


def parts(setup: Setup) -> dict[str, float]:
    """Seconds of each part of a step, a mean of all workers; empty where not measured."""
    measured = list(setup.step_breakdown.values())
    return (
        {part: statistics.fmean(own.get(part, 0.0) for own in measured) for part in PARTS}
        if measured
        else {}
    )


def _checked(setup: Setup) -> Setup:
    """The setup, whose values are of the kinds that they should be."""
    numbers = [
        setup.replicas,
        setup.workers,
        setup.global_batch,
        setup.bytes,
        *setup.seconds,
        *setup.rates,
    ]
    numbers += [value for own in setup.step_breakdown.values() for value in own.values()]
    numbers += [value for value in (setup.speedup, setup.efficiency) if value is not None]
    if (
        not all(math.isfinite(number(value)) and value >= 0 for value in numbers)
        or setup.replicas < 1
    ):
        raise ValueError("expected numbers that are finite and not negative")
    if not all(
        isinstance(text, str)
        for text in (setup.strategy, setup.reason, setup.error or "", *setup.modes)
    ):
        raise ValueError("expected strategy, modes, reason and error as text")
    return setup
