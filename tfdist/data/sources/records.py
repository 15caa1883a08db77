"""Sources of TFRecord files: random access through indexes, or streaming.

You declare the features of the records, or a manifest beside them does; they are never guessed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data import files_io, remote_cache
from tfdist.data.batch_rows import plain
from tfdist.data.sources import dataset_file
from tfdist.data.sources.features import Features
from tfdist.data.sources.record_index import SUFFIX, Index, open_indexes
from tfdist.data.sources.source import Source
from tfdist.storage import files as storage

ACCESS = ("auto", "random", "stream")
# Replaces an unreadable record of a stream, so that the records after it keep their numbers.
_UNREADABLE = b"\0tfdist: this record cannot be read\0"
_STREAM_BUFFER = 1 << 18  # bytes of one read
_REMOTE_BUFFER = 1 << 23  # bytes of one read


def records(
    files: str | os.PathLike | Sequence[str | os.PathLike],
    features: Mapping[str, Any] | None = None,
    *,
    label: str | None = None,
    classes: int | None = None,
    class_names: Sequence[str] | None = None,
    access: str = "auto",
    compression: str = "auto",
    index_dir: str | os.PathLike | None = None,
    name: str | None = None,
) -> Source:
    """Return a Source of TFRecord files, in the order of the files and of the records in each.

    An index of each file says where its records begin. It is built when the file is first opened,
    kept beside the file as `FILE.tfdist-index`, and built anew when the file changes.

    Args:
        files: Record files. A pattern such as "train-*.tfrecord": its files in alphabetical order.
            A directory: its files with "tfrecord" in their names. Or a list of files and patterns,
            in the given order. Files of object stores are read through a local cache, see
            `tfdist.data.remote_cache`.
        features: Mapping from the name of each feature in the stored `tf.train.Example` to its
            declaration: "image" (a JPEG, PNG, GIF or BMP file, decoded to uint8 `[height, width,
            3]`), "image[224,224,1]", "int64", "float32[28,28]", "string[?]" (a size that differs
            between examples), "bytes of float64[3]" (stored as one string), or a feature of `tf.io`
            such as `tf.io.VarLenFeature`. Default: the features that `tfdist.data.write` recorded
            in `dataset.json` beside the files; without that file, examples are the stored bytes.
        label: Name of the feature that is `y`; the others are `x`: one as a tensor, several as a
            dict. Default: no `y`.
        classes: Number of classes of the label.
        class_names: Names of the classes.
        access: Way of reading. "random": any record at any time, which allows a global shuffle.
            "stream": files are read from beginning to end. "auto" (default): random if files are
            local and not compressed.
        compression: Compression of the files: "", "GZIP", or "auto" (default): detected from the
            first bytes of each file.
        index_dir: Directory for the indexes; default: beside the files, or in memory if that
            directory cannot be written.
        name: Name for messages; default: `files`.

    Returns:
        A Source of `(x, y)`, a tensor or a dict; of strings if no features are known.

    Raises:
        ValueError: If no file is found; if a file is truncated, corrupt or not a TFRecord file; if
            a feature does not match its declaration; or if compressed files are to be read at
            random.

    Example:
        >>> import tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a.tfrecord")
        >>> with tf.io.TFRecordWriter(path) as writer:
        ...     writer.write(b"one"); writer.write(b"two")
        >>> source = records(path)
        >>> source.cardinality, [record.numpy() for record in source.dataset()]
        (2, [b'one', b'two'])
    """
    if access not in ACCESS:
        raise ValueError(f"access: expected one of {', '.join(ACCESS)}; received {access!r}.")
    name = name or (
        os.fspath(files) if isinstance(files, str | os.PathLike) else f"{len(files)} record files"
    )
    if class_names is not None and classes not in (None, len(class_names)):
        raise ValueError(
            f"classes={classes}: expected {len(class_names)}, the number of class_names."
        )
    paths = find(files)
    manifest = dataset_file.read(os.path.dirname(paths[0]))
    if manifest is not None and not _covers(manifest, paths):
        manifest = None
    parsed = None
    if features is not None or label is not None:
        declared = features if features is not None else (manifest or {}).get("features")
        parsed = Features.of(declared or {}, label)
    elif manifest is not None:
        parsed = dataset_file.features(manifest)
    indexes = open_indexes(paths, compression, None if index_dir is None else os.fspath(index_dir))
    if manifest is not None:
        _check_counts(manifest, indexes)
        classes = manifest["classes"] if classes is None else classes
        class_names = manifest["class_names"] if class_names is None else class_names
    if access == "auto":
        access = (
            "stream"
            if any(index.compression or files_io.is_remote(index.path) for index in indexes)
            else "random"
        )
    compressed = next((index.path for index in indexes if index.compression), None)
    if access == "random" and compressed is not None:
        raise ValueError(
            f'access="random": {compressed} is compressed and can only be read from its '
            'beginning. Pass access="stream", or write the data set without compression.'
        )
    if access == "random" and remote_cache.is_cached(paths[0]):
        remote_cache.of_environment().check_fits(paths)
    if parsed is not None:
        check_features(parsed, indexes)
    source = of_indexes(
        name,
        indexes,
        parsed.decode if parsed is not None else tf.identity,
        stream=access == "stream",
    )
    names = None if class_names is None else tuple(class_names)
    return dataclasses.replace(
        source, classes=len(names) if names and classes is None else classes, class_names=names
    )


def find(files: str | os.PathLike | Sequence[str | os.PathLike]) -> list[str]:
    """Return the absolute paths of record files.

    Args:
        files: A pattern, a directory, a file, or a list of files and patterns.

    Returns:
        The files, in the order of the list; the files of a pattern or a directory are in
        alphabetical order.

    Raises:
        ValueError: If there are no files, or if a file is named twice.
    """
    patterns = [files] if isinstance(files, str | os.PathLike) else list(files)
    paths: list[str] = []
    for pattern in map(files_io.absolute, patterns):
        if storage.is_dir(pattern):
            matches = _of_directory(pattern)
        elif storage.exists(pattern):
            matches = [pattern]
        else:
            matches = [
                path
                for path in storage.glob(pattern)
                if not _is_tfdist_file(path) and not storage.is_dir(path)
            ]
        if not matches:
            raise ValueError(
                f"files: expected TFRecord files; found none at {pattern}. Correct the path or "
                "pattern."
            )
        paths += matches
    if not paths:
        raise ValueError(f"files: expected TFRecord files; received {files!r}.")
    repeated = (
        next((path for path in paths if paths.count(path) > 1), None)
        if len(set(paths)) < len(paths)
        else None
    )
    if repeated is not None:
        raise ValueError(
            f"files: expected each file once; received {repeated} twice. Remove one of the two."
        )
    return paths


def _of_directory(directory: str) -> list[str]:
    manifest = dataset_file.read(directory)
    if manifest is not None:
        return [os.path.join(directory, shard["file"]) for shard in manifest["shards"]]
    return [
        os.path.join(directory, name)
        for name in storage.list_dir(directory)
        if "tfrecord" in name.lower() and not _is_tfdist_file(name)
    ]


def _is_tfdist_file(path: str) -> bool:
    """Return whether a file is an index, a manifest, or an incomplete one of them."""
    name = os.path.basename(path)
    return SUFFIX in name or name == dataset_file.NAME or name.startswith(".")


def _covers(manifest: Mapping[str, Any], paths: list[str]) -> bool:
    """Return whether a manifest describes all of these files."""
    names = {shard["file"] for shard in manifest["shards"]}
    return all(
        os.path.basename(path) in names and os.path.dirname(path) == os.path.dirname(paths[0])
        for path in paths
    )


def _check_counts(manifest: Mapping[str, Any], indexes: Sequence[Index]) -> None:
    counts = {shard["file"]: shard["examples"] for shard in manifest["shards"]}
    for index in indexes:
        expected = counts[os.path.basename(index.path)]
        if index.records != expected:
            raise ValueError(
                f"{index.path}: expected {expected} records, as {dataset_file.NAME} says; received "
                f"{index.records}. Write or copy it again."
            )


def check_features(features: Features, indexes: Sequence[Index]) -> None:
    """Raise ValueError unless the first records of the first and last file hold the features.

    Args:
        features: The declared features.
        indexes: Indexes of all files.

    Raises:
        ValueError: If a feature is missing or of another kind; the message names the feature and
            the file.
    """
    nonempty = [index for index in indexes if index.records]
    for index in (
        {nonempty[0].path: nonempty[0], nonempty[-1].path: nonempty[-1]}.values()
        if nonempty
        else ()
    ):
        location = f"{index.path}, {'record 0' if index.compression else 'byte 0'}"
        try:
            path = index.path
            if remote_cache.is_cached(path):
                path = remote_cache.of_environment().path(path)
            first = next(iter(tf.data.TFRecordDataset(path, index.compression).take(1)))
        except tf.errors.OpError as error:
            raise ValueError(
                f"{location}: corrupt: {error.message}. Write or copy the file again."
            ) from error
        features.check(first.numpy(), location)


def of_indexes(
    name: str,
    indexes: Sequence[Index],
    decode: Callable[[tf.Tensor], Any],
    *,
    stream: bool = False,
    order: np.ndarray | None = None,
) -> Source:
    """Return a Source of the records that indexes point to.

    Args:
        name: Name for messages.
        indexes: Indexes of the files, in order; an index may hold a part of its file's records.
        decode: Function from a record, a string scalar, to the example; a graph.
        stream: Whether to read files from beginning to end, which compressed files require.
        order: Numbers of the records in the order of the examples, int64 `[records]`; default: 0,
            1, 2, ...

    Returns:
        The Source.
    """
    assert not (stream and order is not None)
    table = _Table.of(indexes, order)
    spec = tf.data.Dataset.from_tensors(tf.constant("")).map(decode).element_spec
    lengths = tuple(index.records for index in indexes)
    raw = None if any(index.compression for index in indexes) else table.record
    if stream:
        source = Source(
            name,
            spec,
            sum(lengths),
            scan=table.scan,
            lengths=lengths,
            decode=lambda stored: decode(_readable(stored)),
            fetch=table.fetch if table.cached else None,
        )
    else:
        source = Source(
            name,
            spec,
            sum(lengths),
            read=lambda number: decode(table.record(number)),
            decode=decode,
        )
    return dataclasses.replace(source, describe=table.describe, raw=raw)


def _readable(stored: tf.Tensor) -> tf.Tensor:
    """Return a record of a stream; fail if it could not be read."""
    with tf.control_dependencies([tf.debugging.Assert(stored != _UNREADABLE, ["corrupt record"])]):
        return tf.identity(stored)


@dataclasses.dataclass(frozen=True)
class _Table:
    """Tensors that say where records are stored, for use in graphs.

    Attributes:
        paths: Paths of the files, string `[files]`.
        compressions: Compression of each file, string `[files]`.
        starts: Number of each file's first record, int64 `[files]`.
        offsets: Byte at which each record begins, int64 `[records + 1]`; 0 in a compressed file.
            The last entry is for reading no records at the end.
        buffer: Number of bytes that a stream reads at a time.
        order: Numbers of the records in the order of the examples, int64 `[records]`, see
            `of_indexes`.
        cached: Whether files are read through the cache of remote files.
    """

    paths: tf.Tensor
    compressions: tf.Tensor
    starts: tf.Tensor
    offsets: tf.Tensor
    buffer: int
    order: tf.Tensor | None
    cached: bool

    @classmethod
    def of(cls, indexes: Sequence[Index], order: np.ndarray | None) -> _Table:
        offsets = [
            np.zeros(index.records, np.int64) if index.compression else index.offsets
            for index in indexes
        ] + [np.zeros(1, np.int64)]
        cached = [remote_cache.is_cached(index.path) for index in indexes]
        if any(cached) and not all(cached):
            raise ValueError(
                f"files: expected all in object stores or none; received {indexes[0].path} and "
                f"{indexes[cached.index(not cached[0])].path}. Make two sources of them."
            )
        remote = any(files_io.is_remote(index.path) for index in indexes)
        counts = np.array([index.records for index in indexes], np.int64)
        with tf.device("CPU"):
            return cls(
                tf.constant([index.path for index in indexes]),
                tf.constant([index.compression for index in indexes]),
                tf.constant(np.cumsum(counts) - counts),
                tf.constant(np.concatenate(offsets), tf.int64),
                _REMOTE_BUFFER if remote and not any(cached) else _STREAM_BUFFER,
                None if order is None else tf.constant(order, tf.int64),
                any(cached),
            )

    def fetch(self, file: tf.Tensor) -> tf.Tensor:
        """Fetch a file into the cache of remote files; return its number."""
        with tf.control_dependencies([remote_cache.local(tf.gather(self.paths, file))]):
            return tf.identity(file)

    @plain
    def record(self, number: tf.Tensor) -> tf.Tensor:
        """Return a stored record; fail if its checksum is wrong."""
        number, file = self._locate(number)
        return self._from(file, tf.gather(self.offsets, number), 0).take(1).get_single_element()

    @plain
    def scan(self, file: tf.Tensor, first: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
        """Return consecutive records of a file.

        `_UNREADABLE` replaces each record that cannot be read.
        """
        # TensorFlow cannot rewrite a dataset with offsets, but it can rewrite one that a function
        # makes.
        readable = tf.data.Dataset.from_tensors((file, first, count)).flat_map(
            self._readable_records
        )

        def remaining(_: tf.Tensor) -> tf.data.Dataset:
            begin = tf.gather(self.starts, file) + first
            done = readable.reduce(tf.constant(0, tf.int64), lambda so_far, _: so_far + 1)
            return tf.data.Dataset.range(begin + done, begin + count).map(self._record_or_marker)

        # Read only if `readable` has fewer than `count` records.
        rest = tf.data.Dataset.from_tensors(0).flat_map(remaining)
        return readable.concatenate(rest).take(count)

    def _readable_records(
        self, file: tf.Tensor, first: tf.Tensor, count: tf.Tensor
    ) -> tf.data.Dataset:
        """Return consecutive records of a file up to the first that cannot be read.

        TensorFlow reads no further in a file after an error.
        """
        begin = tf.gather(self.offsets, tf.gather(self.starts, file) + first)
        rows = self._from(file, begin, self.buffer)
        rows = rows.skip(tf.where(tf.gather(self.compressions, file) != "", first, 0))
        return rows.take(count).ignore_errors(log_warning=True)

    def _record_or_marker(self, number: tf.Tensor) -> tf.Tensor:
        """Return a stored record, or `_UNREADABLE`.

        The latter is returned if the record cannot be read, or cannot be read by itself because the
        file is compressed.
        """
        _, file = self._locate(number)
        alone = tf.where(tf.gather(self.compressions, file) == "", tf.constant(1, tf.int64), 0)
        record = self._from(file, tf.gather(self.offsets, number), 0).take(alone).ignore_errors()
        return (
            record.concatenate(tf.data.Dataset.from_tensors(_UNREADABLE))
            .take(1)
            .get_single_element()
        )

    @plain
    def describe(self, number: tf.Tensor) -> tf.Tensor:
        """Return "FILE, byte OFFSET"; "FILE, record NUMBER" for a compressed file."""
        number, file = self._locate(number)
        compressed = tf.gather(self.compressions, file) != ""
        unit = tf.where(compressed, ", record ", ", byte ")
        record = number - tf.gather(self.starts, file)
        position = tf.where(compressed, record, tf.gather(self.offsets, number))
        return tf.strings.join([tf.gather(self.paths, file), unit, tf.strings.as_string(position)])

    def _locate(self, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the number of a record and the number of its file."""
        number = tf.cast(number, tf.int64)
        if self.order is not None:
            number = tf.gather(self.order, number)
        # `tf.searchsorted` takes 20 operations.
        after = tf.raw_ops.UpperBound(
            sorted_inputs=tf.expand_dims(self.starts, 0), values=[[number]], out_type=tf.int64
        )
        return number, tf.reshape(after, []) - 1

    def _from(self, file: tf.Tensor, offset: tf.Tensor, buffer: int) -> tf.data.Dataset:
        """Return the records of a file from a byte offset on.

        With a buffer of 0, each read fetches only the bytes that it needs.
        """
        path = tf.gather(self.paths, file)
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=remote_cache.local(path) if self.cached else path,
            compression_type=tf.gather(self.compressions, file),
            buffer_size=tf.constant(buffer, tf.int64),
            byte_offsets=offset,
        )
        return tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))
