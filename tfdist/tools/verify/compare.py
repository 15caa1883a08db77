"""Comparison of recorded steps with those of a reference, with bounds for rounding errors."""

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

# A difference counts only if it is this many times the effect of rounding on the same value. If
# rows are summed in another order, Adam amplifies the rounding error of a gradient that is almost
# zero.
ROUNDINGS = 20.0

# Upper bound for the difference that rounding may explain in these kinds, so that no fault can hide
# behind it. Single weights and the optimizer's variables have no such bound, because Adam takes
# large steps along gradients that consist only of rounding errors.
_END = 0.01
_ENDS = (STATISTICS, LOGS, GRADIENTS)

# A small value is compared relative to a hundredth of the largest value of its kind.
_SMALL = 0.01
_SMALL_LOG = 1e-3
_SMALLEST = 1e-20  # squares of gradients that consist only of rounding errors


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference of one number or variable from the reference after a step.

    Attributes:
        step: Step number from 1; 0 for the state before the first step.
        kind: Kind of value, one of `recording.KINDS`.
        name: Path of the variable, or name of the metric.
        value: Relative difference.
        allowed: Largest relative difference that rounding may explain.
        index: Index within its kind, in the order of layers. Default: 0.
        layer: Class of the variable's layer; "" if there is none.
        synchronized: Whether the layer computes its statistics over all replicas.
        worker: Rank of the worker whose copy is compared. Default: 0.
        ratio: Norm of the gradient divided by that of the reference; None for other kinds.
        needed: Bound that would be necessary, if rounding alone can exceed `allowed` by so much
            that this difference proves nothing; otherwise 0.
    """

    step: int
    kind: str
    name: str
    value: float
    allowed: float
    index: int = 0
    layer: str = ""
    synchronized: bool = False
    worker: int = 0
    ratio: float | None = None
    needed: float = 0.0

    @property
    def exceeds(self) -> bool:
        """Return whether the difference is larger than rounding explains."""
        return not self.value <= self.allowed and not self.needed

    @property
    def excess(self) -> float:
        """Return the difference as a multiple of the allowed difference."""
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
        """Return the sort key in training order: step, kind and layer."""
        return self.step, KINDS.index(self.kind), self.index


@dataclasses.dataclass(frozen=True)
class Rows:
    """Difference between the rows that all workers took in a step and the reference's rows.

    Attributes:
        step: First step with such a difference, from 1.
        expected: Number of rows that the reference took.
        received: Number of rows that all workers took.
        strange: Number of received rows that the reference did not take.
        repeated: Number of rows that were taken more often than by the reference.
        shared: Number of rows that several workers took, more often than the reference has them.
        missing: Number of expected rows that no worker took.
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
    """Comparison of the steps of one execution mode with the reference.

    Attributes:
        differences: All differences in training order.
        rows: Difference in the rows that were read. None: the examples are the same in each step.
        steps: Number of steps that were compared.
        replicas: Number of replicas that were compared with one.
        tolerance: Relative difference that is always allowed.
        infinite: Values of the reference that are not finite, as (first such step, kind, name).
            Such values prove nothing.
    """

    differences: tuple[Difference, ...]
    rows: Rows | None = None
    steps: int = 0
    replicas: int = 1
    tolerance: float = 0.0
    infinite: tuple[tuple[int, str, str], ...] = ()

    @property
    def same(self) -> bool:
        """Return whether it is proved that nothing differs by more than rounding."""
        return not self.differs and not self.infinite and not self.inconclusive

    @property
    def differs(self) -> bool:
        """Return whether anything differs by more than rounding."""
        return self.rows is not None or self.first is not None

    @property
    def inconclusive(self) -> list[Difference]:
        """Return the differences that prove nothing because rounding alone is too large."""
        return [difference for difference in self.differences if difference.needed]

    @property
    def first(self) -> Difference | None:
        """Return the first difference that rounding does not explain, or None."""
        return next((difference for difference in self.differences if difference.exceeds), None)

    def largest(self, kind: str) -> Difference | None:
        """Return the difference of a kind with the largest multiple of its allowed value.

        A difference that only an allowed value above the tolerance accepts counts only if there are
        no others. None is returned if the kind has no differences.

        Args:
            kind: Kind of value, one of `recording.KINDS`.
        """
        of_kind = [difference for difference in self.differences if difference.kind == kind]
        strict = [
            difference
            for difference in of_kind
            if difference.exceeds or difference.needed or difference.allowed <= self.tolerance
        ]
        return max(strict or of_kind, key=lambda d: d.excess, default=None)

    @property
    def lenient(self) -> list[str]:
        """Return the variables and metrics that are allowed more than the tolerance.

        Rounding alone changes them by that much.
        """
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
    """Compare the recordings of the workers of a cluster with the recording of one replica.

    Args:
        reference: Recording of one replica.
        workers: Recordings of the workers, by rank.
        rounding: Recording of one replica that sums in another order. None: only `tolerance` is
            allowed.
        tolerance: Relative difference that is always allowed.

    Returns:
        The comparison.
    """
    chief = workers[0]
    steps = min(reference.steps, *(worker.steps for worker in workers))
    floors: dict[str, float] = {}
    differences: list[Difference] = []
    for step in range(steps + 1):
        for key, at, difference, floor in _of_step(reference, chief, step, tolerance):
            if rounding is not None and key in rounding.arrays:
                own = relative(reference.arrays[key][at], rounding.arrays[key][at], floor)
                name = f"{difference.kind} {difference.name}"
                # A rounding error propagates to later steps.
                floors[name] = max(own, floors.get(name, 0.0))
                difference = _allowing(difference, ROUNDINGS * floors[name])
            differences.append(difference)
        differences += [*_copies(workers, step, tolerance), *_reports(workers, step, tolerance)]
    differences += _short(reference, workers, steps, tolerance)
    differences.sort(key=lambda difference: difference.turn)
    rows = rows_of(reference, workers, max(reference.steps, *(worker.steps for worker in workers)))
    return Comparison(
        tuple(differences),
        rows,
        steps,
        chief.replicas,
        tolerance,
        tuple(_infinite(reference, steps)),
    )


def _allowing(difference: Difference, rounding: float) -> Difference:
    """Raise the allowed value of a difference to what rounding may explain."""
    tolerance = difference.allowed
    # Nothing is rounded before the first step.
    if difference.kind == START or rounding <= tolerance:
        return difference
    end = (
        max(tolerance, _END)
        if difference.kind in _ENDS or not math.isfinite(rounding)
        else math.inf
    )
    needed = rounding if rounding > end and tolerance < difference.value <= rounding else 0.0
    return dataclasses.replace(difference, allowed=min(rounding, end), needed=needed)


def _of_step(
    reference: Recording, other: Recording, step: int, tolerance: float
) -> Iterator[tuple[str, Any, Difference, float]]:
    """Yield the differences after a step.

    Each comes with its key in the recordings, its index in that array, and the smallest scale that
    it is relative to.
    """
    recorded = [
        (index, v)
        for index, v in enumerate(reference.variables)
        if f"{step}/state/{index}" in reference.arrays
    ]
    tops: dict[str, float] = {}
    for index, v in recorded:
        tops[v.kind] = max(tops.get(v.kind, 0.0), _top(reference.arrays[f"{step}/state/{index}"]))
    for index, v in recorded:
        if v.kind == SEEDS:
            continue
        key = f"{step}/state/{index}"
        kind = v.kind if step else START
        floor = _SMALL * tops[v.kind] if v.kind in (WEIGHTS, STATISTICS) else _SMALLEST
        value = relative(reference.arrays[key], other.arrays.get(key, np.zeros(0)), floor)
        yield (
            key,
            ...,
            Difference(step, kind, v.path, value, tolerance, index, v.layer, v.synchronized),
            floor,
        )
    if not step:
        return
    norms, floor = _gradient_norms(reference, step)
    for index, key in norms.items():
        v = reference.variables[index]
        mine = reference.arrays[key]
        others = other.arrays.get(key, np.array(np.nan))
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
                index,
                v.layer,
                v.synchronized,
                ratio=ratio,
            ),
            floor,
        )
    logs = f"{step}/logs"
    for index, name in enumerate(reference.logs):
        if name not in other.logs:
            yield (
                logs,
                index,
                Difference(step, LOGS, name, float("inf"), tolerance, index),
                _SMALL_LOG,
            )
            continue
        mine = reference.arrays[logs][index]
        others = other.arrays[logs][other.logs.index(name)]
        yield (
            logs,
            index,
            Difference(step, LOGS, name, relative(mine, others, _SMALL_LOG), tolerance, index),
            _SMALL_LOG,
        )


def _copies(workers: Sequence[Recording], step: int, tolerance: float) -> Iterator[Difference]:
    """Yield the differences between the replicas' copies of each variable."""
    chief = workers[0]
    for index, v in enumerate(chief.variables):
        key = f"{step}/state/{index}"
        if v.kind == SEEDS or key not in chief.arrays:
            continue
        for rank, worker in enumerate(workers):
            within = float(worker.arrays[f"{step}/copies"][index])
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
                    index,
                    v.layer,
                    v.synchronized,
                    rank,
                )


def _reports(workers: Sequence[Recording], step: int, tolerance: float) -> Iterator[Difference]:
    """Yield the differences of logs and summed gradients between other workers and the chief."""
    chief = workers[0]
    norms, floor = _gradient_norms(chief, step)
    for rank, worker in enumerate(workers[1:], start=1):
        for index, key in norms.items():
            v = chief.variables[index]
            value = relative(chief.arrays[key], worker.arrays.get(key, np.array(np.nan)), floor)
            yield Difference(
                step, GRADIENTS, v.path, value, tolerance, index, v.layer, v.synchronized, rank
            )
        for index, name in enumerate(chief.logs if step else ()):
            own = (
                worker.arrays[f"{step}/logs"][worker.logs.index(name)]
                if name in worker.logs
                else np.zeros(0)
            )
            yield Difference(
                step,
                LOGS,
                name,
                relative(chief.arrays[f"{step}/logs"][index], own, _SMALL_LOG),
                tolerance,
                index,
                worker=rank,
            )


def _gradient_norms(recording: Recording, step: int) -> tuple[dict[int, str], float]:
    """Return the key of each recorded gradient norm by its variable's index, and a scale.

    The scale is the smallest value that differences of the norms are relative to.
    """
    keys = {
        index: f"{step}/gradient/{v.gradient}"
        for index, v in enumerate(recording.variables)
        if v.gradient is not None
    }
    keys = {index: key for index, key in keys.items() if key in recording.arrays}
    floor = _SMALL * max((_top(recording.arrays[key]) for key in keys.values()), default=0.0)
    return keys, floor


def _short(
    reference: Recording, workers: Sequence[Recording], steps: int, tolerance: float
) -> Iterator[Difference]:
    """Yield a difference for each worker with more or fewer steps than the reference."""
    for rank, worker in enumerate(workers):
        if worker.steps != reference.steps:
            name = f"the number of steps ({worker.steps}, and {reference.steps} of one replica)"
            yield Difference(steps + 1, EXAMPLES, name, math.inf, tolerance, worker=rank)


def _infinite(reference: Recording, steps: int) -> Iterator[tuple[int, str, str]]:
    """Yield loss, metrics, gradients and weights that are not finite, with the first step."""
    known = set()
    for step in range(steps + 1):
        values = [
            (LOGS, name, reference.arrays[f"{step}/logs"][index])
            for index, name in enumerate(reference.logs if step else ())
        ]
        for index, v in enumerate(reference.variables):
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
                    reference.arrays.get(f"{step}/state/{index}", np.zeros(0))
                    if v.kind == WEIGHTS
                    else np.zeros(0),
                )
            )
        for kind, name, value in values:
            if (kind, name) not in known and not np.isfinite(value).all():
                known.add((kind, name))
                yield step, kind, name


def rows_of(reference: Recording, workers: Sequence[Recording], steps: int) -> Rows | None:
    """Return the first difference between the rows of the workers and of the reference.

    The rows differ if the workers together took other rows, or took one of them twice. None is
    returned if all steps are the same.
    """
    for step in range(1, steps + 1):
        expected = Counter(reference.rows(step).tolist())
        parts = [worker.rows(step) for worker in workers]
        received = Counter(together(parts).tolist())
        if expected == received:
            continue
        workers_by_row = Counter(row for part in parts for row in set(part.tolist()))
        return Rows(
            step,
            expected.total(),
            received.total(),
            strange=sum(count for row, count in received.items() if row not in expected),
            repeated=sum(max(0, count - max(1, expected[row])) for row, count in received.items()),
            shared=sum(
                1
                for row, count in received.items()
                if workers_by_row[row] > 1 and count > max(1, expected[row])
            ),
            missing=(expected - received).total(),
        )
    return None


def _top(value: np.ndarray) -> float:
    finite = np.abs(value[np.isfinite(value)])
    return float(finite.max(initial=0.0))
