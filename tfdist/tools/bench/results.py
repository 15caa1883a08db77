"""What was measured becomes medians, efficiencies and `bench.json`; nothing is measured or printed here."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.runtime.formatting import counted

FILE = "bench.json"
KINDS = ("scaling", "predict", "allreduce")
MODES = ("strong", "weak")  # the global batch stays, or that of a replica
BASELINE = "one_device"


@dataclasses.dataclass(frozen=True)
class Setup:
    """One strategy with so many replicas on one batch (or, of an all-reduce, on so many bytes), and what it took.

    Attributes:
        strategy: Its name, as `make_strategy` takes it.
        replicas: Copies of the model; of an all-reduce, those that sum.
        workers: Processes.
        modes: What it belongs to, of `MODES`: both with one replica, where they are the same; none in other kinds.
        global_batch: Rows of a step, or of a batch to predict, of all replicas together; 0 in an all-reduce.
        bytes: That each replica gives into the sum: the gradients of a step, or those of an all-reduce; 0 where nothing is summed.
        seconds: Of a mean step, in each round; empty where it failed.
        rates: Examples per second of all replicas together, in each round; empty in an all-reduce.
        step_breakdown: Seconds of each part of a mean step (see `tfdist.telemetry.step_records.PARTS`), by worker; empty where not measured.
        speedup: Its median rate over that of the baseline; None where there is none.
        efficiency: Speed-up over replicas.
        reason: What the lost efficiency goes into, in one sentence, with a remedy.
        error: Why it failed; None where it did not.
    """

    strategy: str
    replicas: int
    workers: int
    modes: tuple[str, ...] = ()
    global_batch: int = 0
    bytes: int = 0
    seconds: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    step_breakdown: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    speedup: float | None = None
    efficiency: float | None = None
    reason: str = ""
    error: str | None = None

    @property
    def title(self) -> str:
        """The processes that measured it, in a few words, for messages."""
        return f"{self.strategy} with {counted(self.replicas, 'replica')}"

    @property
    def step(self) -> float:
        """Seconds of the median step."""
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """The median of examples per second."""
        return statistics.median(self.rates)

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes over the seconds of the median step; 0 where nothing was summed."""
        return self.bytes / self.step if self.seconds and self.step else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """What a ring sends over each connection: 2 (n - 1) / n of the algorithm's bandwidth, so that n replicas compare with 2.

        Example:
            >>> Setup("mirrored", 4, 1, bytes=1000, seconds=(0.5, 0.5, 0.5)).bus_bandwidth
            3000.0
        """
        return self.algorithm_bandwidth * 2 * (self.replicas - 1) / self.replicas

    def to_json(self) -> dict[str, Any]:
        """An object as in `bench.json`: the fields, and what follows from them for who reads it without tfdist."""
        values = dataclasses.asdict(self)
        values["step_breakdown"] = {str(rank): parts for rank, parts in self.step_breakdown.items()}
        values["median_seconds"] = self.step if self.seconds else None
        values["median_rate"] = self.rate if self.rates else None
        values["rate_spread"] = [min(self.rates), max(self.rates)] if self.rates else None
        if self.bytes and self.seconds and not self.rates:
            values["algorithm_bandwidth"], values["bus_bandwidth"] = (
                self.algorithm_bandwidth,
                self.bus_bandwidth,
            )
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Setup:
        """The inverse of `to_json`.

        Example:
            >>> setup = Setup("mirrored", 2, 1, ("strong",), 64, seconds=(0.1,), rates=(640.0,), step_breakdown={0: {"input": 0.1}})
            >>> Setup.from_json(json.loads(json.dumps(setup.to_json()))) == setup
            True
        """
        kept = {
            field.name: values[field.name]
            for field in dataclasses.fields(cls)
            if field.name in values
        }
        for name in ("modes", "seconds", "rates"):
            kept[name] = tuple(kept.get(name, ()))
        kept["step_breakdown"] = {
            int(rank): parts for rank, parts in kept.get("step_breakdown", {}).items()
        }
        return cls(**kept)


@dataclasses.dataclass(frozen=True)
class Bench:
    """A whole benchmark: `bench.json`.

    Attributes:
        kind: One of `KINDS`.
        name: Of the run that was measured; "allreduce" of that kind.
        command: The words that make it again.
        time: When it began, in seconds since 1970.
        config: The settings of the run, as `config.Run.to_dict` has them; None in an all-reduce.
        machine: What it ran on: "system", "cores", "memory" (bytes), "gpus" (names), "load" (at the beginning).
        versions: Of "tfdist", "python", "tensorflow", "keras".
        options: "steps" (that count) and "warmup" (that do not) of each round, "rounds", "threads" (of each replica; None:
            TensorFlow's choice) and "parameters" of the model.
        setups: In the order of the table.
        notes: Sentences that compare setups.
    """

    kind: str
    name: str
    command: str
    time: float
    config: dict[str, Any] | None
    machine: dict[str, Any]
    versions: dict[str, str]
    options: dict[str, Any]
    setups: tuple[Setup, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The object of `bench.json`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **values,
            "setups": [setup.to_json() for setup in self.setups],
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Bench:
        """The inverse of `to_json`.

        Example:
            >>> bench = Bench("scaling", "digits", "tfdist bench", 1.0, None, {}, {}, {}, (Setup("mirrored", 2, 1),))
            >>> Bench.from_json(json.loads(json.dumps(bench.to_json()))) == bench
            True
        """
        kept = {
            field.name: values[field.name]
            for field in dataclasses.fields(cls)
            if field.name in values
        }
        return cls(
            **{
                **kept,
                "setups": tuple(map(Setup.from_json, values["setups"])),
                "notes": tuple(values.get("notes", ())),
            }
        )


def read(path: str | os.PathLike) -> Bench:
    """A benchmark from its file, or from the directory with it."""
    path = Path(path)
    return Bench.from_json(
        json.loads((path / FILE if path.is_dir() else path).read_text(encoding="utf-8"))
    )


def baseline(setups: Sequence[Setup], setup: Setup) -> Setup | None:
    """What a setup is measured against: one replica, of `BASELINE` where that was measured, else of the same strategy.

    Args:
        setups: All that there are.
        setup: The one; where it predicts, the baseline has its global batch.
    """
    alone = [other for other in setups if other.replicas == 1 and other.rates]
    if not setup.modes:
        alone = [other for other in alone if other.global_batch == setup.global_batch]
    ranked = [
        other for name in (BASELINE, setup.strategy) for other in alone if other.strategy == name
    ]
    return ranked[0] if ranked else None


def compared(setups: Sequence[Setup]) -> tuple[Setup, ...]:
    """The setups with their speed-up and efficiency.

    Under strong scaling as under weak, perfect means that N replicas have N times the examples per second of one.

    Example:
        >>> alone = Setup("one_device", 1, 1, MODES, 64, seconds=(0.1,), rates=(640.0,))
        >>> both = Setup("mirrored", 2, 1, ("strong",), 64, seconds=(0.0625,), rates=(1024.0,))
        >>> [(setup.speedup, setup.efficiency) for setup in compared([alone, both])]
        [(1.0, 1.0), (1.6, 0.8)]
    """
    done = []
    for setup in setups:
        against = baseline(setups, setup) if setup.rates else None
        if against is not None:
            speedup = setup.rate / against.rate
            setup = dataclasses.replace(setup, speedup=speedup, efficiency=speedup / setup.replicas)
        done.append(setup)
    return tuple(done)
