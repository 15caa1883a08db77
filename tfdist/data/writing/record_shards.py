"""Record files of a dataset that is being written: one shard for each range of examples."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data import files_io
from tfdist.data.errors import cause, location_of
from tfdist.data.sources import dataset_file
from tfdist.data.sources.record_index import FRAME
from tfdist.data.sources.source import Source
from tfdist.data.writing.encode import Encoder
from tfdist.storage import files

_REPORT_EVERY = 1000  # examples between two calls of `progress`


class Progress:
    """Progress of several threads: counts examples and reports them from time to time.

    Args:
        report: Function called with the number of examples done, and their total or None.
        total: Total number of examples, if known.
    """

    def __init__(self, report: Callable[[int, int | None], None] | None, total: int | None):
        self._report = report
        self._total = total
        self._done = 0
        self._reported = 0
        self._lock = threading.Lock()

    def add(self, examples: int) -> None:
        """Count more examples, and report them if it is time."""
        with self._lock:
            self._done += examples
            if self._report is not None and (
                self._done - self._reported >= _REPORT_EVERY or self._done == self._total
            ):
                self._reported = self._done
                self._report(self._done, self._total)


@dataclasses.dataclass(frozen=True)
class Shards:
    """The files of a dataset that is being written.

    In the directory `.writing`, a file `00003.tfrecord` is complete once `00003.json` exists, which
    has its number of examples, its size in bytes and its checksum.

    Attributes:
        source: The examples.
        encoder: Encoder of the examples.
        directory: Final directory of the dataset.
        compression: Compression of the files, "" or "GZIP".
        group: Number of examples transferred from TensorFlow to Python at a time, because single
            transfers are slow.
        progress: Progress that counts the examples.
    """

    source: Source
    encoder: Encoder
    directory: str
    compression: str
    group: int
    progress: Progress

    def write_all(self, counts: Sequence[int], workers: int) -> list[dict[str, Any]]:
        """Write files of given numbers of examples, several at a time, except complete ones.

        Args:
            counts: Number of examples of each file.
            workers: Number of threads.

        Returns:
            The entry of each file: "file", its final name, "examples", "bytes" and "sha256".

        Raises:
            ValueError: If a file cannot be written; raised for the first one, once the other
                threads have stopped.
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
                pool.map(
                    lambda number: self._complete_entry(number, len(counts)), range(len(counts))
                )
            )
            missing = [number for number, entry in enumerate(entries) if entry is None]
            self.progress.add(sum(counts) - sum(counts[number] for number in missing))
            # Each thread writes consecutive files, so that it needs only one dataset. Creating a
            # dataset takes as long as reading many examples.
            parts = np.array_split(missing, max(1, min(workers, len(missing))))
            futures = [pool.submit(several, part.tolist()) for part in parts if len(part)]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            except BaseException:
                stop.set()
                raise
        return self._add_names(entries)

    def write_on(self, limit: float) -> list[dict[str, Any]]:
        """Write one file after the other until the source ends, after the complete ones.

        Args:
            limit: Size in bytes at which a file is full, before compression.

        Returns:
            The entry of each file, as `write_all` does.

        Raises:
            ValueError: If the source has another number of examples than it declares.
        """
        entries: list[dict[str, Any] | None] = []
        begin = 0
        while (entry := self._complete_entry(len(entries), None)) is not None:
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
                f"{self.source.name}: expected {self.source.cardinality} examples; received "
                f"{total}."
            )
        return self._add_names(entries)

    def move(self, entries: Sequence[dict[str, Any]]) -> list[str]:
        """Rename all files to their final names, and return their paths."""
        final = [os.path.join(self.directory, entry["file"]) for entry in entries]
        for number, path in enumerate(final):
            part = self._part(number)
            if files.exists(part):  # else an earlier call has moved it
                files.rename(part, path)
        return final

    def _records(self, ranges: Sequence[tuple[int, int | None]]) -> Iterator[bytes]:
        """Yield the records of some examples, see `selected_examples`."""
        numbers = _numbers(ranges)
        groups = iter(self._prepared(ranges).ragged_batch(self.group).prefetch(2))
        while True:
            try:
                group = next(groups, None)
            except tf.errors.OpError as error:
                # Read them again one by one, to name the one that cannot be read.
                single_ranges = [
                    (number, number + 1) for number in itertools.islice(numbers, self.group)
                ]
                for _ in name_unreadable(
                    self.source, iter(self._prepared(single_ranges)), _numbers(single_ranges)
                ):
                    pass
                raise ValueError(
                    f"{self.source.name}: examples from {single_ranges[0][0]} on cannot be read: "
                    f"{error.message}"
                ) from error
            if group is None:
                return
            for parts in _rows(group):
                next(numbers)
                yield self.encoder.serialize(parts)

    def _prepared(self, ranges: Sequence[tuple[int, int | None]]) -> tf.data.Dataset:
        return selected_examples(
            self.source, ranges, self.encoder.prepare, bool(self.encoder.images)
        )

    def _write(
        self,
        number: int,
        records: Iterable[bytes],
        expected: int | None,
        limit: float = float("inf"),
        stop: threading.Event | None = None,
    ) -> dict[str, Any]:
        """Write one file, of the expected records or up to its limit, and its entry."""
        path = self._part(number)
        if files.through_fsspec(path):  # TensorFlow cannot write there
            with tempfile.TemporaryDirectory(prefix="tfdist-upload-") as directory:
                local = os.path.join(directory, os.path.basename(path))
                count = self._write_file(local, number, records, expected, limit, stop)
                with writable(self.directory):
                    files.upload(local, path)
        else:
            count = self._write_file(path, number, records, expected, limit, stop)
        entry = {"examples": count, "bytes": files.stat(path).size, "sha256": sha256(path)}
        with writable(self.directory):
            dataset_file.write_checked(self._part(number, "json"), entry)
        return entry

    def _write_file(
        self,
        path: str,
        number: int,
        records: Iterable[bytes],
        expected: int | None,
        limit: float,
        stop: threading.Event | None,
    ) -> int:
        """Write one file, and return its number of records."""
        count = 0
        size = 0
        with writable(self.directory):
            writer = tf.io.TFRecordWriter(path, self.compression)
        try:
            for record in records:
                if stop is not None and stop.is_set():
                    raise _Stopped
                with writable(self.directory):
                    writer.write(record)
                count += 1
                size += len(record) + FRAME
                self.progress.add(1)
                if size >= limit:
                    break
        finally:
            with writable(self.directory):
                writer.close()
        if expected not in (None, count):
            raise ValueError(
                f"{self.source.name}: expected {expected} examples in file {number}; received "
                f"{count}. The source has fewer examples than its cardinality, "
                f"{self.source.cardinality}."
            )
        return count

    def _complete_entry(self, number: int, total: int | None) -> dict[str, Any] | None:
        """Return the entry of a complete file of an earlier call.

        Returns:
            The entry; None if there is none, or if the file is damaged.
        """
        try:
            entry = dataset_file.read_checked(self._part(number, "json"))
        except ValueError:  # damaged
            return None
        if entry is None:
            return None
        path = self._part(number)
        if total is not None and not files.exists(path):
            path = os.path.join(self.directory, self._name(number, total))
        if (
            not files.exists(path)
            or files.stat(path).size != entry["bytes"]
            or sha256(path) != entry["sha256"]
        ):
            return None
        return entry

    def _add_names(self, entries: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
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
    """Signals a writer thread to stop because another thread has failed."""


def _rows(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the examples of a batch of `Encoder.prepare` values, as NumPy arrays."""
    columns: dict[str, Any] = {}
    for name, column in group.items():
        if isinstance(column, tf.RaggedTensor):
            columns[name] = np.split(column.values.numpy(), column.row_splits.numpy()[1:-1])
        else:
            columns[name] = column.numpy()
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))


def selected_examples(
    source: Source,
    ranges: Sequence[tuple[int, int | None]],
    function: Callable[[Any, Any], Any],
    stored: bool,
) -> tf.data.Dataset:
    """Apply a function to some examples of a source.

    Args:
        source: The examples.
        ranges: One or more ranges: first number, and the number after the last. None: up to the end
            of a source with `walk`.
        function: Function called with a decoded example and the same example as the source stores
            it; a graph.
        stored: Whether the function needs the stored example. It is None if not needed, or if the
            source does not provide it.

    Returns:
        A dataset of the function's results.
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
        scan = source.scan
        decode = source.decode
        assert source.lengths is not None
        assert decode is not None
        ends = np.cumsum(source.lengths)
        starts = ends - source.lengths
        first = np.maximum(starts, bounds[:, :1])
        last = np.minimum(ends, bounds[:, 1:])
        selected, file = np.nonzero(first < last)
        file_ranges = tf.data.Dataset.from_tensor_slices(
            (file, first[selected, file] - starts[file], (last - first)[selected, file])
        )
        return file_ranges.flat_map(scan).map(
            lambda stored_example: function(decode(stored_example), stored_example),
            num_parallel_calls=parallel,
        )

    def one(number: tf.Tensor) -> Any:
        stored_example = source.raw(number) if stored and source.raw is not None else None
        return function(source.single(number), stored_example)

    numbers = tf.data.Dataset.from_tensor_slices(bounds).flat_map(
        lambda bounds_of_range: tf.data.Dataset.range(bounds_of_range[0], bounds_of_range[1])
    )
    return numbers.map(one, num_parallel_calls=parallel)


def _numbers(ranges: Sequence[tuple[int, int | None]]) -> Iterator[int]:
    """Yield the numbers in some ranges."""
    for begin, end in ranges:
        yield from itertools.count(begin) if end is None else range(begin, end)


def name_unreadable(
    source: Source, elements: Iterator[Any], numbers: Iterable[int]
) -> Iterator[Any]:
    """Yield the elements of a dataset with one element per example; name unreadable examples.

    Args:
        source: Source of the examples.
        elements: Elements of the dataset.
        numbers: Numbers of the examples; if the source does not know its number of examples, they
            may end after the elements.

    Yields:
        The elements.

    Raises:
        ValueError: If an example cannot be read; the message names the example, and its place if
            the source knows it.
    """
    for number in numbers:
        try:
            element = next(elements)
        except StopIteration:
            if source.walk is not None:
                return
            raise ValueError(
                f"{source.name}: expected {source.cardinality} examples; the data ended before "
                f"example {number}."
            ) from None
        except tf.errors.OpError as error:
            location = location_of(source, number)
            raise ValueError(
                f"{source.name}: example {number}{f' ({location})' if location else ''} cannot be "
                f"read: {cause(error)}"
            ) from error
        yield element


@contextlib.contextmanager
def writable(directory: str) -> Iterator[None]:
    """Convert errors for a directory that cannot be written to a ValueError that names it.

    Args:
        directory: The directory.
    """
    try:
        yield
    except files_io.CANNOT_WRITE as error:
        raise ValueError(
            f"directory={directory!r} cannot be written: {error}. Name another one, or free disk "
            "space and call again: complete files are kept."
        ) from error


def sha256(path: str) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with files.open_read(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
