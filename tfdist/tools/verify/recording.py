"""What a process recorded of its steps, as a file; nothing is trained here."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

SAMPLE = 65_536  # values of a variable that are kept, of a large one at equal distances

# Kinds of what is compared, in the order in which a step comes by them.
EXAMPLES, START, STATISTICS, LOGS, GRADIENTS, WEIGHTS, OPTIMIZER, COPIES = (
    *("examples", "initial state", "moving statistics", "loss and metrics", "gradients' norms"),
    *("weights", "optimizer", "copies"),
)
SEEDS = "seeds"
KINDS = (EXAMPLES, START, STATISTICS, LOGS, GRADIENTS, WEIGHTS, OPTIMIZER, COPIES)


@dataclasses.dataclass(frozen=True)
class Variable:
    """One variable of a model or its optimizer.

    Attributes:
        kind: WEIGHTS, STATISTICS, SEEDS or OPTIMIZER.
        path: As Keras has it, layer and name.
        layer: Class of its layer; empty for those of the optimizer.
        synchronized: Whether its layer takes statistics over all replicas.
        gradient: Its place among the trainable variables.
    """

    kind: str
    path: str
    layer: str = ""
    synchronized: bool = False
    gradient: int | None = None


@dataclasses.dataclass(frozen=True)
class Recording:
    """Some steps, as one process saw them.

    Attributes:
        variables: In the order of layers, then those of the optimizer.
        logs: Names of loss and metrics.
        steps: How many were taken.
        replicas: Of all workers.
        local_replicas: Of this process.
        silenced: Layers whose dropout or noise was switched off.
        arrays: "STEP/state/PLACE" of each variable, step 0 before the first; "STEP/logs"; "STEP/gradient/PLACE"; "STEP/rows",
            int64 fingerprints; "STEP/copies", how far the other replicas of this process are from its first, by variable.
    """

    variables: tuple[Variable, ...]
    logs: tuple[str, ...]
    steps: int
    replicas: int = 1
    local_replicas: int = 1
    silenced: tuple[str, ...] = ()
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict, repr=False)

    def write(self, path: Path) -> None:
        """Writes a file, whole or not at all."""
        facts = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "arrays"
        }
        facts["variables"] = [dataclasses.asdict(variable) for variable in self.variables]
        beside = path.with_suffix(".tmp")
        with open(beside, "wb") as file:
            np.savez(file, facts=np.array(json.dumps(facts)), **self.arrays)  # type: ignore[arg-type]
        os.replace(beside, path)

    @classmethod
    def read(cls, path: Path) -> Recording:
        """What `write` wrote."""
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files if name != "facts"}
            facts = json.loads(str(file["facts"]))
        variables = tuple(Variable(**variable) for variable in facts.pop("variables"))
        logs, silenced = (tuple(facts.pop(name)) for name in ("logs", "silenced"))
        return cls(variables, logs, silenced=silenced, arrays=arrays, **facts)

    def rows(self, step: int) -> np.ndarray:
        """Fingerprints of the rows that the replicas of this process took in a step, from 1."""
        return self.arrays.get(f"{step}/rows", np.zeros(0, np.int64))

    def draws(self) -> list[str]:
        """Variables that show that random numbers were drawn: seeds that went on."""
        places = [(place, v.path) for place, v in enumerate(self.variables) if v.kind == SEEDS]
        ends = [
            (self.arrays.get(f"0/state/{p}"), self.arrays.get(f"{self.steps}/state/{p}"), path)
            for p, path in places
        ]
        return [
            path
            for first, last, path in ends
            if first is not None and last is not None and not np.array_equal(first, last)
        ]


def read(files: Mapping[str, Sequence[Path]]) -> tuple[dict[str, list[Recording]], str]:
    """What processes recorded.

    Args:
        files: By way, that of each worker.

    Returns:
        The recordings of the ways that all workers recorded; and what is missing of the others, in words, or "".
    """
    missing = [
        f"worker {rank} wrote no recording of the steps {way!r} ({file})"
        for way, of_way in files.items()
        for rank, file in enumerate(of_way)
        if not file.exists()
    ]
    found = {
        way: [Recording.read(file) for file in of_way]
        for way, of_way in files.items()
        if all(file.exists() for file in of_way)
    }
    return found, "; ".join(missing)


def relative(one: np.ndarray, other: np.ndarray, floor: float = 0.0) -> float:
    """The largest difference of two arrays, relative to the largest value of the first.

    Args:
        one: What is right.
        other: What to compare.
        floor: The least that the difference is relative to.

    Returns:
        0 for equal ones; infinity where one is not finite and the other is, or shapes differ.

    Example:
        >>> relative(np.array([1.0, 2.0]), np.array([1.0, 2.5])), relative(np.zeros(2), np.ones(2))
        (0.25, inf)
    """
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    if one.shape != other.shape:
        return float("inf")
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    if same.all():
        return 0.0
    if not (np.isfinite(one[~same]).all() and np.isfinite(other[~same]).all()):
        return float("inf")
    finite = np.abs(one[np.isfinite(one)])
    scale = max(float(finite.max(initial=0.0)), floor)
    difference = float(np.abs(one[~same] - other[~same]).max())
    return difference / scale if scale else float("inf")


def together(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of all workers."""
    return np.concatenate(parts) if len(parts) else np.zeros(0, np.int64)
