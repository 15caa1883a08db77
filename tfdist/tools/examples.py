"""A Source gives single examples to look at, and what is wrong with those that cannot be read; it is never read whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.data.sources.base import Source

_FILES = 64  # so many files at most are opened to look into


class Example(NamedTuple):
    """An example that was read, or was not.

    Fields:
        number: Its number in the source.
        data: What was read; None where `error` is set.
        error: Why it cannot be read.
    """

    number: int
    data: Any
    error: Exception | None = None


def evenly(count: int, total: int) -> np.ndarray:
    """Numbers that lie evenly in [0, total), all of them where `count` is no less.

    Example:
        >>> evenly(3, 10).tolist(), evenly(9, 2).tolist()
        ([1, 5, 8], [0, 1])
    """
    count = min(count, total)
    return (2 * np.arange(count, dtype=np.int64) + 1) * total // (2 * max(count, 1))


def draw(
    source: Source, count: int, function: Callable[[Any], Any] = lambda data: data
) -> Iterator[Example]:
    """Some examples, the same each time.

    Evenly drawn where examples can be read by number; else the first of each file, of files evenly drawn; else the first.

    Args:
        source: Any Source.
        count: How many at most.
        function: Applied to each example; what it does not use need not be decoded.

    Returns:
        The examples in the order of their numbers.
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


def how(source: Source, count: int) -> str:
    """How `draw` draws, in words.

    Example:
        >>> how(Source.of(np.arange(10)), 4)
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
    """The examples with these numbers, of any source.

    Args:
        source: Any Source; one that can only be read from its beginning is, up to the last of them.
        numbers: int64 `[k]`, each in [0, cardinality), ascending.
        function: Applied to each example.
    """
    if source.read is not None or source.gather is not None:
        found = tf.data.Dataset.from_tensor_slices(np.asarray(numbers, np.int64))
        yield from _numbered(
            found.map(lambda n: function(source.single(n)), num_parallel_calls=tf.data.AUTOTUNE),
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
        wanted = set(np.asarray(numbers).tolist())
        last = max(wanted, default=-1) + 1
        found = _numbered(source.walk().take(last).map(_whole(function)), range(last))
        yield from (example for example in found if example.number in wanted)


def _whole(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function of one example as `Dataset.map` calls it, a tuple's parts as arguments."""
    return lambda *parts: function(parts if len(parts) > 1 else parts[0])


def _scanned(
    source: Source, runs: list[tuple[int, int, int]], function: Callable[[Any], Any]
) -> Iterator[Example]:
    """Examples of files: runs of a file, the first of its examples, and how many."""
    assert source.scan is not None
    assert source.decode is not None
    scan, decode = source.scan, source.decode
    starts = np.cumsum([0, *(source.lengths or ())])
    while runs:
        stored = tf.data.Dataset.from_tensor_slices(np.array(runs, np.int64))
        stored = stored.flat_map(lambda run: scan(run[0], run[1], run[2]))
        runs_of = [run for run, (_, _, count) in enumerate(runs) for _ in range(count)]
        numbers = [
            int(starts[file]) + first + i for file, first, count in runs for i in range(count)
        ]
        done = len(runs)
        for place, example in enumerate(
            _numbered(stored.map(lambda x: function(decode(x))), numbers)
        ):
            yield example
            if isinstance(
                example.error, tf.errors.DataLossError
            ):  # it ends the data set: go on behind its run
                done = runs_of[place] + 1
                break
        runs = runs[done:]


def _numbered(examples: tf.data.Dataset, numbers: Iterable[int]) -> Iterator[Example]:
    """Examples with their numbers."""
    iterator = iter(examples)
    for number in numbers:
        try:
            yield Example(int(number), next(iterator))
        except StopIteration:
            return
        except (tf.errors.OpError, ValueError) as error:
            yield Example(int(number), None, error)
