"""Recordings of the same steps become their differences, and which of them come first; nothing is printed or started here."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tfdist.tools.verify.recording import (
    COPIES,
    EXAMPLES,
    GRADIENTS,
    KINDS,
    LOGS,
    SEEDS,
    START,
    STATISTICS,
    WEIGHTS,
    Recording,
    relative,
    together,
)

# A difference counts only where it is this many times what rounding alone makes of the same number: where rows are summed in
# another order, Adam makes much of a gradient that is nearly 0.
ROUNDINGS = 20.0

# Rounding explains no more of these, however much it makes of them: no fault may hide behind it. Adam's steps along gradients
# that are but rounding do go far, so that single weights, and the optimizer's variables, have no such end.
_END = 0.01
_ENDS = (STATISTICS, LOGS, GRADIENTS)

# What is small beside others of its kind is compared relative to a hundredth of the largest of them.
_SMALL = 0.01
_SMALL_LOG = 1e-3
_SMALLEST = 1e-20  # squares of gradients that are but rounding


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one number, or one variable, is from the reference after a step.

    Attributes:
        step: From 1; 0: before the first.
        kind: One of `recording.KINDS`.
        name: The variable's path, or the name of a metric.
        value: Relative difference.
        allowed: The largest that rounding may explain.
        place: In the order of its kind: that of the layers.
        layer: Class of the variable's layer.
        synchronized: Whether that takes statistics over all replicas.
        worker: Whose copy it is, where workers are compared with each other.
        ratio: What it is over the reference, of gradients' norms.
        wanted: More than `allowed`, where rounding alone goes so far that this difference tells nothing; else 0.
    """

    step: int
    kind: str
    name: str
    value: float
    allowed: float
    place: int = 0
    layer: str = ""
    synchronized: bool = False
    worker: int = 0
    ratio: float | None = None
    wanted: float = 0.0

    @property
    def exceeds(self) -> bool:
        """Whether it is more than rounding."""
        return not self.value <= self.allowed and not self.wanted

    @property
    def excess(self) -> float:
        """How many times the allowed difference it is."""
        if self.value <= self.allowed:
            return (
                1.0
                if self.allowed == math.inf
                else self.value / self.allowed
                if self.allowed
                else 0.0
            )
        return self.value / self.allowed if self.allowed else math.inf

    @property
    def turn(self) -> tuple[int, int, int]:
        """When a training comes by it: by step, kind, and layer."""
        return self.step, KINDS.index(self.kind), self.place


@dataclasses.dataclass(frozen=True)
class Rows:
    """How the rows that all workers took in a step differ from the reference's.

    Attributes:
        step: The first such step, from 1.
        expected: How many the reference took.
        received: How many all workers took.
        strange: Of those received, how many the reference did not take.
        repeated: How many were taken more often than by the reference.
        shared: How many were taken by several workers, more often than the reference has them.
        missing: Of those expected, how many nobody took.
    """

    step: int
    expected: int
    received: int
    strange: int
    repeated: int
    shared: int
    missing: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A way of running the steps, compared with the reference.

    Attributes:
        differences: All of them, in the order in which a training comes by them.
        rows: None: the examples are the same in each step.
        steps: How many were compared.
        replicas: That were compared with one.
        tolerance: What is always allowed.
        infinite: What is not finite in the reference, by kind and name, and with the first such step; nothing is proved by it.
    """

    differences: tuple[Difference, ...]
    rows: Rows | None = None
    steps: int = 0
    replicas: int = 1
    tolerance: float = 0.0
    infinite: tuple[tuple[int, str, str], ...] = ()

    @property
    def same(self) -> bool:
        """Whether it is proved that nothing differs by more than rounding."""
        return not self.differs and not self.infinite and not self.wanting

    @property
    def differs(self) -> bool:
        """Whether anything differs by more than rounding."""
        return self.rows is not None or self.first is not None

    @property
    def wanting(self) -> list[Difference]:
        """Those that tell nothing, as rounding alone goes too far."""
        return [difference for difference in self.differences if difference.wanted]

    @property
    def first(self) -> Difference | None:
        """The first that is more than rounding."""
        return next((difference for difference in self.differences if difference.exceeds), None)

    def largest(self, kind: str) -> Difference | None:
        """Of a kind, the one that goes farthest beyond what is allowed, or comes nearest to it; no `lenient` one, if there are others."""
        of_kind = [difference for difference in self.differences if difference.kind == kind]
        strict = [
            difference
            for difference in of_kind
            if difference.exceeds or difference.wanted or difference.allowed <= self.tolerance
        ]
        return max(strict or of_kind, key=lambda d: d.excess, default=None)

    @property
    def lenient(self) -> list[str]:
        """Variables and metrics of which rounding alone makes so much that more than the tolerance is allowed."""
        return list(
            dict.fromkeys(
                difference.name
                for difference in self.differences
                if difference.allowed > self.tolerance
            )
        )


def compare(
    reference: Recording, workers: Sequence[Recording], rounding: Recording | None, tolerance: float
) -> Comparison:
    """Compares what the workers of a cluster recorded with one replica.

    Args:
        reference: Of one replica.
        workers: By rank.
        rounding: Of one replica, whose sums were taken in another order.
        tolerance: The relative difference that is always allowed.
    """
    chief = workers[0]
    steps = min(reference.steps, *(worker.steps for worker in workers))
    floors: dict[str, float] = {}
    found: list[Difference] = []
    for step in range(steps + 1):
        for key, at, difference, floor in _of_step(reference, chief, step, tolerance):
            if rounding is not None and key in rounding.arrays:
                own = relative(reference.arrays[key][at], rounding.arrays[key][at], floor)
                name = f"{difference.kind} {difference.name}"
                floors[name] = max(
                    own, floors.get(name, 0.0)
                )  # what was rounded once is carried on
                difference = _allowing(difference, ROUNDINGS * floors[name])
            found.append(difference)
        found += [*_copies(workers, step, tolerance), *_reports(workers, step, tolerance)]
    found += _short(reference, workers, steps, tolerance)
    found.sort(key=lambda difference: difference.turn)
    rows = rows_of(reference, workers, max(reference.steps, *(worker.steps for worker in workers)))
    return Comparison(
        tuple(found), rows, steps, chief.replicas, tolerance, tuple(_infinite(reference, steps))
    )


def _allowing(difference: Difference, rounding: float) -> Difference:
    """A difference, of which rounding may explain so much."""
    tolerance = difference.allowed
    if (
        difference.kind == START or rounding <= tolerance
    ):  # nothing is rounded before the first step
        return difference
    end = (
        max(tolerance, _END)
        if difference.kind in _ENDS or not math.isfinite(rounding)
        else math.inf
    )
    wanted = rounding if rounding > end and tolerance < difference.value <= rounding else 0.0
    return dataclasses.replace(difference, allowed=min(rounding, end), wanted=wanted)


def _of_step(
    reference: Recording, other: Recording, step: int, tolerance: float
) -> Iterator[tuple[str, Any, Difference, float]]:
    """The differences after a step, each with its key in the recordings, its index there, and the least that it is relative to."""
    kept = [
        (place, v)
        for place, v in enumerate(reference.variables)
        if f"{step}/state/{place}" in reference.arrays
    ]
    tops: dict[str, float] = {}
    for place, v in kept:
        tops[v.kind] = max(tops.get(v.kind, 0.0), _top(reference.arrays[f"{step}/state/{place}"]))
    for place, v in kept:
        if v.kind == SEEDS:
            continue
        key = f"{step}/state/{place}"
        kind = v.kind if step else START
        floor = _SMALL * tops[v.kind] if v.kind in (WEIGHTS, STATISTICS) else _SMALLEST
        value = relative(reference.arrays[key], other.arrays.get(key, np.zeros(0)), floor)
        yield (
            key,
            ...,
            Difference(step, kind, v.path, value, tolerance, place, v.layer, v.synchronized),
            floor,
        )
    if not step:
        return
    norms = {
        place: f"{step}/gradient/{v.gradient}"
        for place, v in enumerate(reference.variables)
        if v.gradient is not None
    }
    norms = {place: key for place, key in norms.items() if key in reference.arrays}
    floor = _SMALL * max((_top(reference.arrays[key]) for key in norms.values()), default=0.0)
    for place, key in norms.items():
        v = reference.variables[place]
        mine, others = reference.arrays[key], other.arrays.get(key, np.array(np.nan))
        ratio = float(others / mine) if mine > floor else None
        value = relative(mine, others, floor)
        yield (
            key,
            ...,
            Difference(
                step,
                GRADIENTS,
                v.path,
                value,
                tolerance,
                place,
                v.layer,
                v.synchronized,
                ratio=ratio,
            ),
            floor,
        )
    logs = f"{step}/logs"
    for place, name in enumerate(reference.logs):
        if name not in other.logs:
            yield (
                logs,
                place,
                Difference(step, LOGS, name, float("inf"), tolerance, place),
                _SMALL_LOG,
            )
            continue
        mine, others = reference.arrays[logs][place], other.arrays[logs][other.logs.index(name)]
        yield (
            logs,
            place,
            Difference(step, LOGS, name, relative(mine, others, _SMALL_LOG), tolerance, place),
            _SMALL_LOG,
        )


def _copies(workers: Sequence[Recording], step: int, tolerance: float) -> Iterator[Difference]:
    """How far the replicas' copies of each variable are from each other."""
    chief = workers[0]
    for place, v in enumerate(chief.variables):
        key = f"{step}/state/{place}"
        if v.kind == SEEDS or key not in chief.arrays:
            continue
        for rank, worker in enumerate(workers):
            within = float(worker.arrays[f"{step}/copies"][place])
            across = (
                relative(chief.arrays[key], worker.arrays.get(key, np.zeros(0))) if rank else 0.0
            )
            if rank or worker.local_replicas > 1:
                yield Difference(
                    step,
                    COPIES,
                    v.path,
                    max(within, across),
                    tolerance,
                    place,
                    v.layer,
                    v.synchronized,
                    rank,
                )


def _reports(workers: Sequence[Recording], step: int, tolerance: float) -> Iterator[Difference]:
    """How far what other workers report, and their sums of gradients, are from the chief's."""
    chief = workers[0]
    norms = {
        place: f"{step}/gradient/{v.gradient}"
        for place, v in enumerate(chief.variables)
        if v.gradient is not None
    }
    norms = {place: key for place, key in norms.items() if key in chief.arrays}
    floor = _SMALL * max((_top(chief.arrays[key]) for key in norms.values()), default=0.0)
    for rank, worker in enumerate(workers[1:], start=1):
        for place, key in norms.items():
            v = chief.variables[place]
            value = relative(chief.arrays[key], worker.arrays.get(key, np.array(np.nan)), floor)
            yield Difference(
                step, GRADIENTS, v.path, value, tolerance, place, v.layer, v.synchronized, rank
            )
        for place, name in enumerate(chief.logs if step else ()):
            own = (
                worker.arrays[f"{step}/logs"][worker.logs.index(name)]
                if name in worker.logs
                else np.zeros(0)
            )
            yield Difference(
                step,
                LOGS,
                name,
                relative(chief.arrays[f"{step}/logs"][place], own, _SMALL_LOG),
                tolerance,
                place,
                worker=rank,
            )


def _short(
    reference: Recording, workers: Sequence[Recording], steps: int, tolerance: float
) -> Iterator[Difference]:
    """Of which workers the data ended sooner, or later, than those of one replica."""
    for rank, worker in enumerate(workers):
        if worker.steps != reference.steps:
            name = f"the number of steps ({worker.steps}, and {reference.steps} of one replica)"
            yield Difference(steps + 1, EXAMPLES, name, math.inf, tolerance, worker=rank)


def _infinite(reference: Recording, steps: int) -> Iterator[tuple[int, str, str]]:
    """What is not finite of loss, metrics, gradients and weights, with the first step."""
    known = set()
    for step in range(steps + 1):
        values = [
            (LOGS, name, reference.arrays[f"{step}/logs"][place])
            for place, name in enumerate(reference.logs if step else ())
        ]
        for place, v in enumerate(reference.variables):
            values.append(
                (
                    GRADIENTS,
                    v.path,
                    reference.arrays.get(f"{step}/gradient/{v.gradient}", np.zeros(0)),
                )
            )
            values.append(
                (
                    v.kind,
                    v.path,
                    reference.arrays.get(f"{step}/state/{place}", np.zeros(0))
                    if v.kind == WEIGHTS
                    else np.zeros(0),
                )
            )
        for kind, name, value in values:
            if (kind, name) not in known and not np.isfinite(value).all():
                known.add((kind, name))
                yield step, kind, name


def rows_of(reference: Recording, workers: Sequence[Recording], steps: int) -> Rows | None:
    """The first step in which the workers together took other rows than the reference, or one of them twice."""
    for step in range(1, steps + 1):
        expected = Counter(reference.rows(step).tolist())
        parts = [worker.rows(step) for worker in workers]
        received = Counter(together(parts).tolist())
        if expected == received:
            continue
        takers = Counter(row for part in parts for row in set(part.tolist()))
        return Rows(
            step,
            expected.total(),
            received.total(),
            strange=sum(count for row, count in received.items() if row not in expected),
            repeated=sum(max(0, count - max(1, expected[row])) for row, count in received.items()),
            shared=sum(
                1
                for row, count in received.items()
                if takers[row] > 1 and count > max(1, expected[row])
            ),
            missing=(expected - received).total(),
        )
    return None


def _top(value: np.ndarray) -> float:
    finite = np.abs(value[np.isfinite(value)])
    return float(finite.max(initial=0.0))
