"""Final training result: write it to the launch's logs, and compare two results.

Only launches with a chaos plan write it. Nothing is ever restored from it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from tfdist.backup import state
from tfdist.backup.snapshot import Snapshot, pack, unpack
from tfdist.backup.store import rename_local, write_local
from tfdist.runtime.launch_protocol import RESULT, Launched

# Absolute or relative difference of floats, which sums of the same numbers in another order have.
TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Outcome of comparing one result with another.

    Attributes:
        same: Whether the results are equal, except for floats that differ by less than the
            tolerance.
        text: The outcome in words, to be followed by the name of the other result.
        detail: Largest or first difference; "" if there is none.
    """

    same: bool
    text: str
    detail: str = ""


def write(launched: Launched, model: keras.Model, history: Mapping[str, Any]) -> None:
    """Write the result of a training atomically, if its launch has a chaos plan.

    Args:
        launched: Settings that the launcher passed to this process.
        model: Trained model. Variables that are sharded over several workers are gathered.
        history: History of the training: "epoch" with the epoch numbers, "values" with a list for
            each metric name, one value an epoch.

    Raises:
        OSError: If the file cannot be written.
    """
    if not is_wanted(launched):
        return
    model_state = state.of_model(model, gathered=True)
    assert launched.log_dir is not None
    path = os.path.join(launched.log_dir, RESULT)
    part = f"{path}.{launched.attempt}.part"
    write_local(part, pack(Snapshot(model_state.arrays, {**model_state.facts, "history": history})))
    rename_local(part, path)


def is_wanted(launched: Launched) -> bool:
    """Return whether a launch compares its training results.

    Args:
        launched: Settings that the launcher passed to this process.
    """
    return launched.chaos is not None and launched.log_dir is not None


def read(log_dir: str) -> Snapshot:
    """Return the result of a launch.

    Args:
        log_dir: Directory of the launch's logs.

    Raises:
        ValueError: If there is no result, or it is damaged.
    """
    path = os.path.join(log_dir, RESULT)
    try:
        with open(path, "rb") as file:
            return unpack(file.read(), path)
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}. Expected the result of a training with "
            "tfdist.BackupAndRestore that has finished under `tfdist launch --chaos PLAN`; "
            "--chaos none is the run without faults."
        ) from error


def compare(own: Snapshot, other: Snapshot) -> Comparison:
    """Compare a result with another.

    Args:
        own: First result.
        other: Second result.

    Example:
        >>> a, b = (
        ...     Snapshot(
        ...         {"model/0": np.array([1.0, x])},
        ...         {"optimizer": None, "names": ["kernel"], "history": {}},
        ...     )
        ...     for x in (2, 3)
        ... )
        >>> compare(a, a).text
        'equal bit for bit to'
        >>> compare(a, b)
        Comparison(same=False, text='DIFFERENT from', detail='kernel [1]: 2.0 here, 3.0 there; 1 of 1 arrays differ')
    """  # noqa: E501
    difference = next(_other_model(own, other), None)
    if difference:
        return Comparison(False, "of ANOTHER MODEL than", difference)
    pairs = [*_arrays(own, other), *_columns(own, other)]
    unequal = [(name, a, b) for name, a, b in pairs if _bits(a) != _bits(b)]
    if not unequal:
        return Comparison(True, "equal bit for bit to")
    distant = [(name, a, b) for name, a, b in unequal if not _is_close(a, b)]
    if distant:
        name, a, b = distant[0]
        return Comparison(
            False,
            "DIFFERENT from",
            f"{_first(name, a, b)}; {len(distant)} of {len(pairs)} arrays differ",
        )
    largest, name = max(
        (float(np.max(np.abs(np.nan_to_num(a.astype(np.float64) - b.astype(np.float64))))), name)
        for name, a, b in unequal
    )
    return Comparison(
        True,
        f"within {TOLERANCE:g} of",
        f"the largest difference is {largest:.2g}, in {name}; {len(unequal)} of {len(pairs)} "
        "arrays differ",
    )


def _other_model(own: Snapshot, other: Snapshot) -> Iterator[str]:
    """Yield the differences between two models, as text."""
    own_value = own.facts["optimizer"]
    other_value = other.facts["optimizer"]
    if own_value != other_value:
        yield f"optimizer {own_value} here, {other_value} there"
    own_arrays = _describe(own)
    other_arrays = _describe(other)
    for key in dict.fromkeys((*own_arrays, *other_arrays)):
        name, own_value = own_arrays.get(key, ("", "nothing"))
        other_name, other_value = other_arrays.get(key, ("", "nothing"))
        # Only dtype and shape count: Keras numbers layer names through all models.
        if own_value != other_value:
            yield (
                f"{key.replace('/', ' variable ')}, {name or other_name}: {own_value} here, "
                f"{other_value} there"
            )


def _describe(result: Snapshot) -> dict[str, tuple[str, str]]:
    named = zip(result.arrays.items(), result.facts["names"], strict=True)
    return {key: (name, f"{array.dtype} {list(array.shape)}") for (key, array), name in named}


def _arrays(own: Snapshot, other: Snapshot) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    for (key, array), name in zip(own.arrays.items(), own.facts["names"], strict=True):
        yield name, array, other.arrays[key]


def _columns(own: Snapshot, other: Snapshot) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    own_columns, other_columns = (
        {"epoch": facts["history"].get("epoch", []), **facts["history"].get("values", {})}
        for facts in (own.facts, other.facts)
    )
    for key in dict.fromkeys((*own_columns, *other_columns)):
        a, b = (np.asarray(columns.get(key, ())) for columns in (own_columns, other_columns))
        if key != "epoch" or a.size or b.size:
            yield f"history {key}", a, b


def _bits(array: np.ndarray) -> tuple[tuple[int, ...], bytes]:
    return array.shape, np.ascontiguousarray(array).tobytes()


def _is_close(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape or a.dtype.kind in "iub":
        return False
    return np.allclose(
        a.astype(np.float64), b.astype(np.float64), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
    )


def _first(name: str, a: np.ndarray, b: np.ndarray) -> str:
    if a.shape != b.shape:
        return f"{name}: {len(a)} long here, {len(b)} there"
    index = next(
        index for index in np.ndindex(a.shape) if not _is_close(a[index][None], b[index][None])
    )
    position = f" {list(index)}" if index else ""
    return f"{name}{position}: {a[index]!s} here, {b[index]!s} there"
