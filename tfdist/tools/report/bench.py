"""Parser for benchmark files; a damaged setup is reported and left out."""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

from tfdist.runtime.formatting import TIMES
from tfdist.telemetry.step_records import PARTS
from tfdist.tools.bench.results import FILE, KINDS, Setup
from tfdist.tools.report.run_files import Reader, number, section

SCALING, PREDICT, ALLREDUCE = KINDS


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Results of `tfdist bench`, as far as the file is intact.

    Attributes:
        path: Directory of the benchmark.
        kind: One of `KINDS`.
        facts: All other contents of the file: name, command, time, config, machine, versions,
            options, notes.
        setups: Measured setups.
        problems: Sentences about damage in the file.
    """

    path: Path
    kind: str
    facts: dict[str, Any]
    setups: tuple[Setup, ...]
    problems: tuple[str, ...]

    def section(self, name: str) -> dict[str, Any]:
        """Return a section of the file, such as "machine"; empty if there is none."""
        return section(self.facts, name)

    @property
    def notes(self) -> list[str]:
        """Return the sentences that compare setups."""
        notes = self.facts.get("notes")
        return [str(note) for note in notes] if isinstance(notes, list) else []


def read_benchmark(directory: Path) -> Benchmark:
    """Read a benchmark's directory; a damaged file gives a benchmark without setups."""
    reader = Reader()
    setups = []
    facts = reader.object(directory / FILE) or {}
    listed = facts.get("setups")
    if facts and not isinstance(listed, list):
        reader.problems.append(
            f"{directory / FILE}: expected a list of setups, received {listed!r}"
        )
    for index, line in enumerate(listed if isinstance(listed, list) else []):
        try:
            setups.append(_checked(Setup.from_json(line)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reader.problems.append(
                f"{directory / FILE}: setups[{index}] is damaged ({error}); it is left out"
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
    """Return words that tell a setup from other setups."""
    modes = f", {' and '.join(setup.modes)}" if setup.modes else ""
    return f"{setup.strategy} {TIMES}{setup.replicas}{modes}"


def rate(setup: Setup) -> float:
    """Return the examples per second of the median round; 0 if none was measured."""
    return setup.rate if setup.rates else 0.0


def parts(setup: Setup) -> dict[str, float]:
    """Return the seconds of each part of a step, as a mean over all workers.

    The result is empty if the step breakdown was not measured.
    """
    measured = list(setup.step_breakdown.values())
    return (
        {part: statistics.fmean(own.get(part, 0.0) for own in measured) for part in PARTS}
        if measured
        else {}
    )


def _checked(setup: Setup) -> Setup:
    """Return the setup; raise ValueError if its values have wrong types or ranges."""
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
