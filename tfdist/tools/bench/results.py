"""Benchmark results with speed-up, efficiency and bandwidth, stored in `bench.json`."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.runtime.formatting import counted

__all__ = ["Bench", "Setup", "read"]

FILE = "bench.json"
KINDS = ("scaling", "predict", "allreduce")
MODES = ("strong", "weak")  # fixed global batch, or fixed batch of each replica
BASELINE = "one_device"


@dataclasses.dataclass(frozen=True)
class Setup:
    """Measurements of one strategy with one number of replicas and one batch size.

    In an all-reduce, a number of bytes takes the place of the batch size.

    Attributes:
        strategy: Name of the strategy, as in `make_strategy`.
        replicas: Number of replicas.
        workers: Number of processes.
        modes: Scaling modes of the setup, from `MODES`. One replica has both, because they are the
            same for it. Empty for kinds other than scaling.
        global_batch: Rows of a step, or of a predicted batch, over all replicas; 0 in an
            all-reduce.
        bytes: Bytes that each replica contributes to the sum: the gradients of a step, or the
            tensor of an all-reduce; 0 if nothing is summed.
        seconds: Seconds of a mean step in each round; empty if the setup failed.
        rates: Examples per second over all replicas in each round; empty in an all-reduce.
        step_breakdown: Seconds of each part of a mean step (see
            `tfdist.telemetry.step_records.PARTS`), by rank; empty if it was not measured.
        speedup: Median rate divided by the baseline's median rate. None: there is no baseline.
        efficiency: Speed-up divided by the number of replicas. None: there is no baseline.
        reason: Sentence on the cause of the lost efficiency, with a remedy.
        error: Message of the failure. None: the setup did not fail.
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
        """Return the strategy and the number of replicas in words, for messages."""
        return f"{self.strategy} with {counted(self.replicas, 'replica')}"

    @property
    def step(self) -> float:
        """Return the seconds of the median step."""
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """Return the median of examples per second."""
        return statistics.median(self.rates)

    @property
    def algorithm_bandwidth(self) -> float:
        """Return bytes per second of the median step; 0 if nothing was summed."""
        return self.bytes / self.step if self.seconds and self.step else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """Return the bytes per second that a ring sends over each connection.

        It is 2 (n - 1) / n of the algorithm bandwidth. Setups with different numbers n of replicas
        can be compared by it.

        Example:
            >>> Setup("mirrored", 4, 1, bytes=1000, seconds=(0.5, 0.5, 0.5)).bus_bandwidth
            3000.0
        """
        return self.algorithm_bandwidth * 2 * (self.replicas - 1) / self.replicas

    def to_json(self) -> dict[str, Any]:
        """Return the object in `bench.json`.

        It has the fields, and derived values for readers that do not use tfdist.
        """
        values = dataclasses.asdict(self)
        values["step_breakdown"] = {str(rank): parts for rank, parts in self.step_breakdown.items()}
        values["median_seconds"] = self.step if self.seconds else None
        values["median_rate"] = self.rate if self.rates else None
        values["rate_spread"] = [min(self.rates), max(self.rates)] if self.rates else None
        if self.bytes and self.seconds and not self.rates:
            values["algorithm_bandwidth"] = self.algorithm_bandwidth
            values["bus_bandwidth"] = self.bus_bandwidth
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Setup:
        """Return the setup of an object from `to_json`.

        Example:
            >>> setup = Setup(
            ...     "mirrored", 2, 1, ("strong",), 64, seconds=(0.1,), rates=(640.0,),
            ...     step_breakdown={0: {"input": 0.1}},
            ... )
            >>> Setup.from_json(json.loads(json.dumps(setup.to_json()))) == setup
            True
        """
        known = _known_fields(cls, values)
        for name in ("modes", "seconds", "rates"):
            known[name] = tuple(known.get(name, ()))
        known["step_breakdown"] = {
            int(rank): parts for rank, parts in known.get("step_breakdown", {}).items()
        }
        return cls(**known)


@dataclasses.dataclass(frozen=True)
class Bench:
    """Complete benchmark, as stored in `bench.json`.

    Attributes:
        kind: Kind of benchmark, one of `KINDS`.
        name: Name of the run that was measured; "allreduce" for that kind.
        command: Command line that repeats the benchmark.
        time: Start time in seconds since the epoch.
        config: Settings of the run, from `config.Run.to_dict`; None in an all-reduce.
        machine: Description of the machine: "system", "cores", "memory" (bytes), "gpus" (names),
            "load" (load average at the start).
        versions: Versions of "tfdist", "python", "tensorflow" and "keras".
        options: "steps" (timed) and "warmup" (untimed) of each round, "rounds", "threads" (of each
            replica; None: TensorFlow's choice) and "parameters" of the model.
        setups: Setups in the order of the table.
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
        """Return the object of `bench.json`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **values,
            "setups": [setup.to_json() for setup in self.setups],
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Bench:
        """Return the benchmark of an object from `to_json`.

        Example:
            >>> setups = (Setup("mirrored", 2, 1),)
            >>> bench = Bench("scaling", "digits", "tfdist bench", 1.0, None, {}, {}, {}, setups)
            >>> Bench.from_json(json.loads(json.dumps(bench.to_json()))) == bench
            True
        """
        known = _known_fields(cls, values)
        return cls(
            **{
                **known,
                "setups": tuple(map(Setup.from_json, values["setups"])),
                "notes": tuple(values.get("notes", ())),
            }
        )


def _known_fields(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of a dataclass; a file of another version has others."""
    return {
        field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values
    }


def read(path: str | os.PathLike) -> Bench:
    """Read a benchmark from its file, or from the directory that contains the file.

    Raises:
        ValueError: If the file is damaged.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    try:
        return Bench.from_json(json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: damaged: {error!r}. Run `tfdist bench` again.") from error


def baseline(setups: Sequence[Setup], setup: Setup) -> Setup | None:
    """Return the setup that another setup is compared with, or None.

    The baseline has one replica. It is `BASELINE` if that was measured, and otherwise the same
    strategy.

    Args:
        setups: All setups.
        setup: Setup to compare. If it measures inference, the baseline has the same global batch.
    """
    alone = [other for other in setups if other.replicas == 1 and other.rates]
    if not setup.modes:
        alone = [other for other in alone if other.global_batch == setup.global_batch]
    ranked = [
        other for name in (BASELINE, setup.strategy) for other in alone if other.strategy == name
    ]
    return ranked[0] if ranked else None


def compared(setups: Sequence[Setup]) -> tuple[Setup, ...]:
    """Return the setups with their speed-up and efficiency filled in.

    Under strong and under weak scaling, N replicas scale perfectly if they have N times the
    examples per second of one.

    Example:
        >>> alone = Setup("one_device", 1, 1, MODES, 64, seconds=(0.1,), rates=(640.0,))
        >>> both = Setup("mirrored", 2, 1, ("strong",), 64, seconds=(0.0625,), rates=(1024.0,))
        >>> [(setup.speedup, setup.efficiency) for setup in compared([alone, both])]
        [(1.0, 1.0), (1.6, 0.8)]
    """
    done = []
    for setup in setups:
        reference = baseline(setups, setup) if setup.rates else None
        if reference is not None:
            speedup = setup.rate / reference.rate
            setup = dataclasses.replace(setup, speedup=speedup, efficiency=speedup / setup.replicas)
        done.append(setup)
    return tuple(done)
