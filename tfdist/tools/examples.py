"""Sampling of single examples from a Source, including those that cannot be read.

No function here reads a whole source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.data.sources.source import Source

_FILES = 64  # files that are opened at most for a sample


class Example(NamedTuple):
    """Example that was read, or that could not be read.

    Attributes:
        number: Index of the example in the source.
        data: Value that was read; None if `error` is set.
        error: Exception that says why the example cannot be read; None if it was read.
    """

    number: int
    data: Any
    error: Exception | None = None


def evenly(count: int, total: int) -> np.ndarray:
    """Return indices that are evenly spaced in [0, total).

    All indices are returned if `count` is at least `total`.

    Example:
        >>> evenly(3, 10).tolist(), evenly(9, 2).tolist()
        ([1, 5, 8], [0, 1])
    """
    count = min(count, total)
    return (2 * np.arange(count, dtype=np.int64) + 1) * total // (2 * max(count, 1))


def draw(
    source: Source, count: int, function: Callable[[Any], Any] = lambda data: data
) -> Iterator[Example]:
    """Yield a deterministic sample of the examples of a source.

    The sample is evenly spaced if examples can be read by index. Otherwise it is the first examples
    of each file, for evenly spaced files, or else the first examples of the source.

    Args:
        source: Any Source.
        count: Maximum number of examples.
        function: Function that is applied to each example. Features that it does not use need not
            be decoded.

    Returns:
        The examples in the order of their indices.
    """
    if source.scan is not None:
        assert source.lengths is not None
        files = np.flatnonzero(source.lengths)
        if count < sum(source.lengths):
            files = files[evenly(min(_FILES, count), len(files))]
            count = count // len(files)
        yield from _scanned(
            source, [(int(file), 0, min(count, source.lengths[file])) for file in files], function
        )
    elif source.walk is not None:
        yield from _numbered(source.walk().take(count).map(_whole(function)), range(count))
    else:
        yield from numbered(source, evenly(count, source.cardinality or 0), function)


def sampling(source: Source, count: int) -> str:
    """Return in words how `draw` samples a source.

    Example:
        >>> sampling(Source.of(np.arange(10)), 4)
        'evenly drawn'
    """
    if source.cardinality is not None and count >= source.cardinality:
        return "all"
    if source.scan is not None:
        return (
            "the first of each file"
            if len(source.lengths or ()) <= _FILES
            else f"the first of each of {_FILES} files"
        )
    return "the first" if source.walk is not None else "evenly drawn"


def numbered(
    source: Source, numbers: np.ndarray, function: Callable[[Any], Any] = lambda data: data
) -> Iterator[Example]:
    """Yield the examples with the given indices, from any source.

    Args:
        source: Any Source. One that can only be read sequentially is read from its beginning up to
            the last of the indices.
        numbers: Ascending indices, int64 `[k]`, each in [0, cardinality).
        function: Function that is applied to each example.

    Returns:
        The examples in the order of `numbers`.
    """
    if source.read is not None or source.gather is not None:
        dataset = tf.data.Dataset.from_tensor_slices(np.asarray(numbers, np.int64))
        yield from _numbered(
            dataset.map(lambda n: function(source.single(n)), num_parallel_calls=tf.data.AUTOTUNE),
            numbers,
        )
    elif source.scan is not None:
        assert source.lengths is not None
        starts = np.cumsum([0, *source.lengths])
        runs = []
        for number in numbers:
            file = int(np.searchsorted(starts, number, side="right")) - 1
            runs.append((file, int(number - starts[file]), 1))
        yield from _scanned(source, runs, function)
    else:
        assert source.walk is not None
        requested = set(np.asarray(numbers).tolist())
        last = max(requested, default=-1) + 1
        dataset = _numbered(source.walk().take(last).map(_whole(function)), range(last))
        yield from (example for example in dataset if example.number in requested)


def _whole(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """Adapt a function of one example to `Dataset.map`, which unpacks tuples."""
    return lambda *parts: function(parts if len(parts) > 1 else parts[0])


def _scanned(
    source: Source, runs: list[tuple[int, int, int]], function: Callable[[Any], Any]
) -> Iterator[Example]:
    """Yield examples from files.

    Args:
        source: Source with `scan`, `decode` and `lengths`.
        runs: Consecutive examples to read, as (file, index of the first example in the file,
            count).
        function: Function that is applied to each example.
    """
    assert source.scan is not None
    assert source.decode is not None
    scan = source.scan
    decode = source.decode
    starts = np.cumsum([0, *(source.lengths or ())])
    while runs:
        stored = tf.data.Dataset.from_tensor_slices(np.array(runs, np.int64))
        stored = stored.flat_map(lambda run: scan(run[0], run[1], run[2]))
        runs_of = [run for run, (_, _, count) in enumerate(runs) for _ in range(count)]
        numbers = [
            int(starts[file]) + first + i for file, first, count in runs for i in range(count)
        ]
        done = len(runs)
        for index, example in enumerate(
            _numbered(stored.map(lambda x: function(decode(x))), numbers)
        ):
            yield example
            # A DataLossError ends the data set: continue after the run that caused it.
            if isinstance(example.error, tf.errors.DataLossError):
                done = runs_of[index] + 1
                break
        runs = runs[done:]


def _numbered(examples: tf.data.Dataset, numbers: Iterable[int]) -> Iterator[Example]:
    """Yield each example of a data set with its index."""
    iterator = iter(examples)
    for number in numbers:
        try:
            yield Example(int(number), next(iterator))
        except StopIteration:
            return
        except (tf.errors.OpError, ValueError) as error:
            yield Example(int(number), None, error)
