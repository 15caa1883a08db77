"""Ranges of a source's examples become record files; which ranges, and who else writes there, is not decided here."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data import files_io
from tfdist.data.errors import cause, place
from tfdist.data.sources import dataset_file
from tfdist.data.sources.base import Source
from tfdist.data.sources.record_index import FRAME
from tfdist.data.writing.encode import Encoder

_REPORTED = 1000  # examples between two calls of `progress`


class Progress:
    """Counts the examples of several threads, and tells somebody now and then.

    Args:
        tell: Called with the examples done, and all of them or None.
        total: All of them, if that is known.
    """

    def __init__(self, tell: Callable[[int, int | None], None] | None, total: int | None):
        self._tell, self._total = tell, total
        self._done = self._told = 0
        self._lock = threading.Lock()

    def add(self, examples: int) -> None:
        """Counts this many more."""
        with self._lock:
            self._done += examples
            if self._tell is not None and (
                self._done - self._told >= _REPORTED or self._done == self._total
            ):
                self._told = self._done
                self._tell(self._done, self._total)


@dataclasses.dataclass(frozen=True)
class Shards:
    """The files of a data set that is being written.

    In the directory `.writing`, a file `00003.tfrecord` is whole once `00003.json` says how many examples and bytes
    it has, and its checksum.

    Attributes:
        source: The examples.
        encoder: How each is stored.
        directory: Where the data set shall lie.
        compression: "" or "GZIP".
        group: Examples to hand over from TensorFlow to Python at a time, which costs much for each by itself.
        progress: Is told of each example.
    """

    source: Source
    encoder: Encoder
    directory: str
    compression: str
    group: int
    progress: Progress

    def write_all(self, counts: Sequence[int], workers: int) -> list[dict[str, Any]]:
        """Writes files with these numbers of examples, several at a time, but for those that are whole.

        Args:
            counts: Examples of each file.
            workers: Threads.

        Returns:
            The entry of each file: "file", its name in the end, "examples", "bytes" and "sha256".

        Raises:
            ValueError: Of the first file that could not be written, once the other threads have stopped.
        """
        stop = threading.Event()
        begins = np.cumsum([0, *counts]).tolist()

        def several(numbers: Sequence[int]) -> None:
            records = self._records([(begins[number], begins[number + 1]) for number in numbers])
            for number in numbers:
                entries[number] = self._write(
                    number, itertools.islice(records, counts[number]), counts[number], stop=stop
                )

        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            entries = list(
                pool.map(lambda number: self._whole(number, len(counts)), range(len(counts)))
            )
            missing = [number for number, entry in enumerate(entries) if entry is None]
            self.progress.add(sum(counts) - sum(counts[number] for number in missing))
            # Each thread writes neighbouring files, so that it makes one data set, which takes as long as many examples.
            parts = np.array_split(missing, max(1, min(workers, len(missing))))
            futures = [pool.submit(several, part.tolist()) for part in parts if len(part)]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            except BaseException:
                stop.set()
                raise
        return self._named(entries)

    def write_on(self, limit: float) -> list[dict[str, Any]]:
        """Writes one file after the other until the source ends, after those that are whole.

        Args:
            limit: Bytes after which a file is full, before compression.

        Returns:
            The entry of each file, as `write_all` does.
        """
        entries: list[dict[str, Any] | None] = []
        begin = 0
        while (entry := self._whole(len(entries), None)) is not None:
            entries.append(entry)
            begin += entry["examples"]
        self.progress.add(begin)
        records = self._records([(begin, None)])
        for first in records:
            entries.append(
                self._write(len(entries), itertools.chain([first], records), None, limit)
            )
        total = sum(entry["examples"] for entry in entries if entry)
        if self.source.cardinality not in (None, total):
            raise ValueError(
                f"{self.source.name}: expected {self.source.cardinality} examples; received {total}."
            )
        return self._named(entries)

    def move(self, entries: Sequence[dict[str, Any]]) -> list[str]:
        """Gives all files their names, and returns their paths."""
        final = [os.path.join(self.directory, entry["file"]) for entry in entries]
        for number, path in enumerate(final):
            part = self._part(number)
            if tf.io.gfile.exists(part):  # not so where an earlier call ended here
                tf.io.gfile.rename(part, path, overwrite=True)
        return final

    def _records(self, ranges: Sequence[tuple[int, int | None]]) -> Iterator[bytes]:
        """The records of these examples, see `chosen`."""
        numbers = _numbers(ranges)
        groups = iter(self._prepared(ranges).ragged_batch(self.group).prefetch(2))
        while True:
            try:
                group = next(groups, None)
            except tf.errors.OpError as error:
                # One after the other, to name the one that cannot be read.
                again = [(number, number + 1) for number in itertools.islice(numbers, self.group)]
                for _ in named(self.source, iter(self._prepared(again)), _numbers(again)):
                    pass
                raise ValueError(
                    f"{self.source.name}: examples from {again[0][0]} on cannot be read: {error.message}"
                ) from error
            if group is None:
                return
            for parts in _rows(group):
                next(numbers)
                yield self.encoder.serialize(parts)

    def _prepared(self, ranges: Sequence[tuple[int, int | None]]) -> tf.data.Dataset:
        return chosen(self.source, ranges, self.encoder.prepare, bool(self.encoder.images))

    def _write(
        self,
        number: int,
        records: Iterable[bytes],
        expected: int | None,
        limit: float = float("inf"),
        stop: threading.Event | None = None,
    ) -> dict[str, Any]:
        """Writes one file, of the records expected or up to its limit, and its entry."""
        path, count, size = self._part(number), 0, 0
        with writable(self.directory):
            writer = tf.io.TFRecordWriter(path, self.compression)
        try:
            for record in records:
                if stop is not None and stop.is_set():
                    raise _Stopped
                with writable(self.directory):
                    writer.write(record)
                count, size = count + 1, size + len(record) + FRAME
                self.progress.add(1)
                if size >= limit:
                    break
        finally:
            with writable(self.directory):
                writer.close()
        if expected not in (None, count):
            raise ValueError(
                f"{self.source.name}: expected {self.source.cardinality} examples; it ended before them."
            )
        entry = {"examples": count, "bytes": tf.io.gfile.stat(path).length, "sha256": sha256(path)}
        with writable(self.directory):
            files_io.write_whole(self._part(number, "json"), json.dumps(entry).encode())
        return entry

    def _whole(self, number: int, total: int | None) -> dict[str, Any] | None:
        """The entry of a file that an earlier call wrote to its end; None where there is none, or the file is damaged."""
        entry = dataset_file.read_json(self._part(number, "json"))
        if entry is None:
            return None
        path = self._part(number)
        if total is not None and not tf.io.gfile.exists(path):
            path = os.path.join(self.directory, self._name(number, total))
        if (
            not tf.io.gfile.exists(path)
            or tf.io.gfile.stat(path).length != entry["bytes"]
            or sha256(path) != entry["sha256"]
        ):
            return None
        return entry

    def _named(self, entries: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
        return [
            {"file": self._name(number, len(entries)), **(entry or {})}
            for number, entry in enumerate(entries)
        ]

    def _name(self, number: int, total: int) -> str:
        prefix = re.sub(r"[^\w.-]", "_", os.path.basename(self.directory.rstrip("/"))) or "data"
        return f"{prefix}-{number:05d}-of-{total:05d}.tfrecord"

    def _part(self, number: int, ending: str = "tfrecord") -> str:
        return os.path.join(self.directory, dataset_file.UNFINISHED, f"{number:05d}.{ending}")


class _Stopped(Exception):
    """Another thread has failed."""


def _rows(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The examples of a batch of what `Encoder.prepare` made, as NumPy's arrays."""
    columns: dict[str, Any] = {}
    for name, column in group.items():
        if isinstance(column, tf.RaggedTensor):
            columns[name] = np.split(column.values.numpy(), column.row_splits.numpy()[1:-1])
        else:
            columns[name] = column.numpy()
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))


def chosen(
    source: Source,
    ranges: Sequence[tuple[int, int | None]],
    function: Callable[[Any, Any], Any],
    stored: bool,
) -> tf.data.Dataset:
    """What a function makes of some examples.

    Args:
        source: The examples.
        ranges: First number, and the one after the last: one range or more. None: up to the end of a source to walk
            through.
        function: Called with an example as users see it, and as the source stores it; a graph.
        stored: Whether it needs the latter, which is None where not, or where the source does not tell.

    Returns:
        A data set of what it returns.
    """
    parallel = tf.data.AUTOTUNE
    if source.walk is not None:
        whole = isinstance(source.element_spec, tuple)
        walks = [
            source.walk().skip(begin).take(-1 if end is None else end - begin)
            for begin, end in ranges
        ]
        examples = functools.reduce(tf.data.Dataset.concatenate, walks)
        return examples.map(
            lambda *parts: function(parts if whole else parts[0], None), num_parallel_calls=parallel
        )
    bounds = np.array(ranges, np.int64)
    if source.scan is not None:
        scan, decode = source.scan, source.decode
        assert source.lengths is not None
        assert decode is not None
        ends = np.cumsum(source.lengths)
        starts = ends - source.lengths
        first, last = np.maximum(starts, bounds[:, :1]), np.minimum(ends, bounds[:, 1:])
        used, file = np.nonzero(first < last)
        pieces = tf.data.Dataset.from_tensor_slices(
            (file, first[used, file] - starts[file], (last - first)[used, file])
        )
        return pieces.flat_map(scan).map(
            lambda held: function(decode(held), held), num_parallel_calls=parallel
        )

    def one(number: tf.Tensor) -> Any:
        held = source.raw(number) if stored and source.raw is not None else None
        return function(source.single(number), held)

    numbers = tf.data.Dataset.from_tensor_slices(bounds).flat_map(
        lambda both: tf.data.Dataset.range(both[0], both[1])
    )
    return numbers.map(one, num_parallel_calls=parallel)


def _numbers(ranges: Sequence[tuple[int, int | None]]) -> Iterator[int]:
    """The numbers in these ranges."""
    for begin, end in ranges:
        yield from itertools.count(begin) if end is None else range(begin, end)


def named(source: Source, elements: Iterator[Any], numbers: Iterable[int]) -> Iterator[Any]:
    """What a data set yields, an element for each of these examples; an error says which cannot be read.

    Args:
        source: Whose examples they are.
        elements: What the data set yields.
        numbers: Of the examples; where the source does not know how many it has, its end is theirs too.

    Yields:
        The elements.

    Raises:
        ValueError: With the example, and its place where the source knows it.
    """
    for number in numbers:
        try:
            element = next(elements)
        except StopIteration:
            if source.walk is not None:
                return
            raise ValueError(
                f"{source.name}: expected {source.cardinality} examples; received {number}."
            ) from None
        except tf.errors.OpError as error:
            where = place(source, number)
            raise ValueError(
                f"{source.name}: example {number}{f' ({where})' if where else ''} cannot be read: {cause(error)}"
            ) from error
        yield element


@contextlib.contextmanager
def writable(directory: str) -> Iterator[None]:
    """Turns what is raised where a directory cannot be written into a ValueError that names it."""
    try:
        yield
    except files_io.CANNOT_WRITE as error:
        raise ValueError(
            f"directory={directory!r} cannot be written: {error}. Name another one, or make room and call again: what is whole is kept."
        ) from error


def sha256(path: str) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with tf.io.gfile.GFile(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
