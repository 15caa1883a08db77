"""Recordings of training steps, their file format, and relative differences of arrays."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

SAMPLE = 65_536  # maximum number of recorded values of a variable, evenly spaced

# Kinds of compared values, in the order in which a step computes them.
EXAMPLES = "examples"
START = "initial state"
STATISTICS = "moving statistics"
LOGS = "loss and metrics"
GRADIENTS = "gradients' norms"
WEIGHTS = "weights"
OPTIMIZER = "optimizer"
COPIES = "copies"
SEEDS = "seeds"
KINDS = (EXAMPLES, START, STATISTICS, LOGS, GRADIENTS, WEIGHTS, OPTIMIZER, COPIES)


@dataclasses.dataclass(frozen=True)
class Variable:
    """Variable of a model or its optimizer.

    Attributes:
        kind: Kind of variable: WEIGHTS, STATISTICS, SEEDS or OPTIMIZER.
        path: Keras path of the variable: layer and name.
        layer: Class of its layer; empty for variables of the optimizer.
        synchronized: Whether its layer computes its statistics over all replicas. Default: False.
        gradient: Index among the trainable variables. None: the variable is not trainable.
    """

    kind: str
    path: str
    layer: str = ""
    synchronized: bool = False
    gradient: int | None = None


@dataclasses.dataclass(frozen=True)
class Recording:
    """Training steps as one process saw them.

    Attributes:
        variables: Variables in the order of layers, followed by those of the optimizer.
        logs: Names of loss and metrics.
        steps: Number of steps that were taken.
        replicas: Number of replicas of all workers.
        local_replicas: Number of replicas of this process.
        silenced: Names of layers whose dropout or noise was switched off.
        arrays: Recorded values by key. "STEP/state/PLACE" is a variable, where step 0 is the state
            before the first step. "STEP/logs" are loss and metrics. "STEP/gradient/PLACE" is the
            norm of a gradient. "STEP/rows" are int64 fingerprints. "STEP/copies" is the difference
            of the other replicas of this process from its first, by variable.
    """

    variables: tuple[Variable, ...]
    logs: tuple[str, ...]
    steps: int
    replicas: int = 1
    local_replicas: int = 1
    silenced: tuple[str, ...] = ()
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict, repr=False)

    def write(self, path: Path) -> None:
        """Write the recording to a file atomically."""
        facts = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "arrays"
        }
        facts["names"] = sorted(self.arrays)  # a damaged directory of a ZIP file hides members
        facts["variables"] = [dataclasses.asdict(variable) for variable in self.variables]
        temporary = path.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            np.savez(
                file,
                facts=np.array(json.dumps(facts)),
                **self.arrays,  # type: ignore[arg-type]
            )
        os.replace(temporary, path)

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a recording from a file that `write` wrote.

        Raises:
            ValueError: If the file is damaged.
        """
        try:
            with np.load(path) as file:
                arrays = {name: file[name] for name in file.files if name != "facts"}
                facts = json.loads(str(file["facts"]))
            if sorted(arrays) != facts.pop("names"):
                raise ValueError("arrays are missing")
            variables = tuple(Variable(**variable) for variable in facts.pop("variables"))
            logs, silenced = (tuple(facts.pop(name)) for name in ("logs", "silenced"))
            return cls(variables, logs, silenced=silenced, arrays=arrays, **facts)
        except Exception as error:  # of zipfile, zlib, NumPy or JSON, whatever the damage hit
            reason = " ".join(str(error).split())
            raise ValueError(f"{path}: damaged: {reason}. Run the command again.") from error

    def rows(self, step: int) -> np.ndarray:
        """Return fingerprints of the rows that this process read in a step, int64 `[rows]`.

        Args:
            step: Step number from 1.
        """
        return self.arrays.get(f"{step}/rows", np.zeros(0, np.int64))

    def draws(self) -> list[str]:
        """Return the paths of seeds that advanced, which shows that random numbers were drawn."""
        seeds = [(index, v.path) for index, v in enumerate(self.variables) if v.kind == SEEDS]
        ends = [
            (self.arrays.get(f"0/state/{p}"), self.arrays.get(f"{self.steps}/state/{p}"), path)
            for p, path in seeds
        ]
        return [
            path
            for first, last, path in ends
            if first is not None and last is not None and not np.array_equal(first, last)
        ]


def read(files: Mapping[str, Sequence[Path]]) -> tuple[dict[str, list[Recording]], str]:
    """Read the recordings of several processes.

    Args:
        files: File of each worker, by execution mode.

    Returns:
        The recordings of the execution modes that all workers recorded, and a message about the
        missing ones, or "".
    """
    missing = [
        f"worker {rank} wrote no recording of the steps {mode!r} ({file})"
        for mode, of_mode in files.items()
        for rank, file in enumerate(of_mode)
        if not file.exists()
    ]
    recordings = {
        mode: [Recording.read(file) for file in of_mode]
        for mode, of_mode in files.items()
        if all(file.exists() for file in of_mode)
    }
    return recordings, "; ".join(missing)


def relative(one: np.ndarray, other: np.ndarray, floor: float = 0.0) -> float:
    """Return the largest difference of two arrays, relative to the largest value of the first.

    Args:
        one: Reference array.
        other: Array to compare.
        floor: Smallest scale that the difference is relative to. Default: 0.

    Returns:
        The relative difference: 0 for equal arrays; infinity if one is not finite where the other
        is, or if shapes differ.

    Example:
        >>> relative(np.array([1.0, 2.0]), np.array([1.0, 2.5])), relative(np.zeros(2), np.ones(2))
        (0.25, inf)
    """
    one = np.asarray(one, np.float64)
    other = np.asarray(other, np.float64)
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
    """Concatenate the rows of all workers."""
    return np.concatenate(parts) if len(parts) else np.zeros(0, np.int64)
