"""Indexes of TFRecord files: the byte where each record begins.

An index is built from the headers of the records alone; their contents are not read.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from tfdist.data import files_io
from tfdist.storage import files

SUFFIX = ".tfdist-index"
_VERSION = 2
THREADS = 16  # they wait for disks or networks most of the time

# Record: length (8 bytes), checksum of the length (4), content, checksum of the content (4).
HEADER = 12
FRAME = 16
_LOCAL_CHUNK = 1 << 16
_REMOTE_CHUNK = 1 << 23
_MAX_OFFSET = 1 << 62  # bytes, larger than any file; a corrupt length may be any number of 64 bits


@dataclasses.dataclass(frozen=True)
class Index:
    """Byte offsets of the records of a file.

    Attributes:
        path: Path of the file.
        compression: Compression of the file, "" or "GZIP".
        records: Number of records.
        offsets: Byte at which each record begins, int64 `[records]`; int64 `[0]` for a compressed
            file, which has no such offsets.
    """

    path: str
    compression: str
    records: int
    offsets: np.ndarray = dataclasses.field(repr=False)


def open_indexes(
    paths: Sequence[str], compression: str = "auto", index_dir: str | None = None
) -> list[Index]:
    """Return the indexes of files: read if they are up to date, else built and saved.

    An index belongs to one size and modification time of its file; if these have changed, it is
    built anew. It is written atomically, so that several processes may do this at once.

    Args:
        paths: Absolute paths of TFRecord files.
        compression: Compression of the files: "", "GZIP", or "auto" (default): detected from the
            first bytes of each file.
        index_dir: Directory for the indexes; default: beside each file. If the default cannot be
            written, the indexes are kept in memory only.

    Returns:
        The index of each file.

    Raises:
        ValueError: If a file is missing, not a TFRecord file, truncated or corrupt (the message
            names the byte), or if `index_dir` cannot be written.
    """
    if compression not in ("auto", "", "GZIP"):
        raise ValueError(f'compression: expected "auto", "" or "GZIP"; received {compression!r}.')
    if index_dir is not None:
        index_dir = files_io.absolute(index_dir)
        try:
            files.make_dirs(index_dir)
        except files_io.CANNOT_WRITE as error:
            raise ValueError(
                f"index_dir={index_dir!r} cannot be made: {error}. Name a directory that can be "
                "written."
            ) from error
    with concurrent.futures.ThreadPoolExecutor(max(1, min(THREADS, len(paths)))) as pool:
        results = list(pool.map(lambda path: _open(path, compression, index_dir), paths))
    unsaved = [index.path for index, saved in results if not saved]
    if unsaved:
        logging.warning(
            "The index of %s%s cannot be saved beside the data, so each run builds it again. Pass "
            "index_dir=, a directory that can be written.",
            unsaved[0],
            f" and {len(unsaved) - 1} other files" if len(unsaved) > 1 else "",
        )
    return [index for index, _ in results]


def write_index(index: Index, directory: str | None, stamp: tuple[int, int]) -> None:
    """Save the index of a file.

    Args:
        index: Index of a local or remote file.
        directory: Directory for the index; None: beside the file.
        stamp: Size and modification time of the file when it was read.

    Raises:
        OSError: If the path cannot be written; or another error of `files_io.CANNOT_WRITE`.
    """
    content = np.ascontiguousarray(index.offsets, "<i8").tobytes()
    size, time = stamp
    header = {
        "version": _VERSION,
        "file": os.path.basename(index.path),
        "size": size,
        "time": time,
        "compression": index.compression,
        "records": index.records,
    }
    header["crc32"] = _checksum(header, content)
    files_io.write_whole(
        _index_path(index.path, directory), json.dumps(header).encode() + b"\n" + content
    )


def _checksum(header: dict[str, Any], content: bytes) -> int:
    """Return the checksum of an index: of its header, without this number, and of its offsets."""
    return zlib.crc32(content, zlib.crc32(json.dumps(header).encode()))


def _open(path: str, compression: str, index_dir: str | None) -> tuple[Index, bool]:
    """Return the index of a file, and whether it is saved anywhere."""
    stamp = _stamp(path)
    for directory in dict.fromkeys((None, index_dir)):
        index = _read(path, stamp, _index_path(path, directory))
        if index is not None and compression in ("auto", index.compression):
            return index, True
    index = build(path, compression)
    if _stamp(path) != stamp:
        raise ValueError(
            f"{path} changed while it was read. Wait until it is written, then start again."
        )
    try:
        write_index(index, index_dir, stamp)
    except files_io.CANNOT_WRITE as error:
        if index_dir is not None:
            raise ValueError(
                f"index_dir={index_dir!r} cannot be written: {error}. Name another directory."
            ) from error
        return index, False
    return index, True


def _stamp(path: str) -> tuple[int, int]:
    """Return the size in bytes and the modification time in nanoseconds, or a version."""
    try:
        stat = files.stat(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file. Correct the path.") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a directory; expected a TFRecord file.") from None
    version = stat.version if stat.version.isdigit() else zlib.crc32(stat.version.encode())
    return stat.size, int(version)


def _index_path(path: str, directory: str | None) -> str:
    if directory is None:
        return path + SUFFIX
    # Files of the same name in several directories may share one directory of indexes.
    return os.path.join(
        directory,
        f"{os.path.basename(path)}-{hashlib.sha256(path.encode()).hexdigest()[:12]}{SUFFIX}",
    )


def _read(path: str, stamp: tuple[int, int], index_path: str) -> Index | None:
    """Return the index saved at a path; None if it is missing, damaged or of an older file."""
    try:
        first, _, content = files.read(index_path).partition(b"\n")
        header = json.loads(first)
        crc = header.pop("crc32")
        if (
            crc != _checksum(header, content)
            or header["version"] != _VERSION
            or (header["size"], header["time"]) != stamp
        ):
            return None
        return Index(
            path,
            header["compression"],
            header["records"],
            np.frombuffer(content, "<i8").astype(np.int64),
        )
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ):
        return None


def build(path: str, compression: str = "auto") -> Index:
    """Build the index of a file by reading the header of each record.

    Args:
        path: Path of a TFRecord file.
        compression: Compression of the file: "", "GZIP", or "auto" (default): detected from its
            first bytes.

    Returns:
        The index.

    Raises:
        ValueError: If a header is wrong, or a record ends beyond the file; the message names the
            byte.
    """
    size = _stamp(path)[0]
    with _opened(path) as file:
        begin = file.read(HEADER)
        file.seek(0)
        if compression == "auto":
            # The first two bytes alone could be a part of a length.
            zipped = begin[:2] == b"\x1f\x8b" and not (len(begin) == HEADER and _valid(begin)[0])
            compression = "GZIP" if zipped else ""
        if compression == "":
            offsets = _read_offsets(
                path,
                _Headers(file, size, _REMOTE_CHUNK if files_io.is_remote(path) else _LOCAL_CHUNK),
            )
            return Index(path, "", len(offsets), offsets)
        try:
            with gzip.GzipFile(fileobj=file, mode="rb") as content:
                records = len(_read_offsets(path, _Headers(content, None, _LOCAL_CHUNK)))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(
                f"{path}: truncated or corrupt as a GZIP file: {error}. Write or copy it again."
            ) from error
        return Index(path, "GZIP", records, np.zeros(0, np.int64))


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    if files_io.is_remote(path):
        with files.open_read(path) as file:
            yield file
    else:
        # TensorFlow's own file reads half a megabyte at each offset.
        with open(path, "rb", buffering=0) as file:
            yield file


class _Headers:
    """Reader of headers at increasing offsets.

    If records are large, it reads little more than the headers.

    Args:
        file: Open file, at its beginning.
        size: Size of the file in bytes; None for a file that is decompressed.
        chunk: Number of bytes to read at a time.
    """

    def __init__(self, file: Any, size: int | None, chunk: int) -> None:
        self.file = file
        self.size = size
        self.chunk = chunk
        self.buffer = b""  # bytes of the file, from `base` on
        self.base = 0

    def at(self, offset: int) -> bytes:
        """Return the header at an offset; it is shorter or empty at the end of the file."""
        if self.size is not None and offset >= self.size:
            return b""
        at = offset - self.base
        if at + HEADER > len(self.buffer):
            size = self.chunk
            if at > len(self.buffer):
                size = HEADER if at - len(self.buffer) > self.chunk else size
                self.file.seek(min(offset, _MAX_OFFSET))  # a decompressed file stops at its end
            self.buffer = self.buffer[at:]
            self.base = offset
            at = 0
            while len(self.buffer) < HEADER and (more := self.file.read(size)):
                self.buffer += more
        return self.buffer[at : at + HEADER]

    def end(self) -> int:
        """Return the end of the file, once a header there has been requested."""
        return self.file.tell() if self.size is None else self.size


def _read_offsets(path: str, headers: _Headers) -> np.ndarray:
    """Return the offset of each record, int64 `[records]`."""
    offsets: list[int] = []
    seen = bytearray()
    offset = 0
    while header := headers.at(offset):
        offsets.append(offset)
        seen += header.ljust(HEADER, b"\0")
        offset += FRAME + int.from_bytes(header[:8], "little")
    unit = "byte" if headers.size is not None else "decompressed byte"
    wrong = np.flatnonzero(~_valid(seen))
    if len(wrong) and offsets[wrong[0]] + HEADER <= headers.end():
        first = offsets[wrong[0]]
        if first == 0:
            raise ValueError(
                f"{path} is no TFRecord file: {unit} 0 begins no record. Correct the path, or "
                "write the file again."
            )
        raise ValueError(
            f"{path}, {unit} {first}: corrupt: the header of a record has a wrong checksum. Write "
            "or copy the file again."
        )
    if offset != headers.end():
        raise ValueError(
            f"{path}, {unit} {offsets[-1]}: truncated: the record that begins there ends beyond "
            f"the file's {headers.end()} bytes. Write or copy the file again."
        )
    return np.array(offsets, np.int64)


def _valid(headers: bytes | bytearray) -> np.ndarray:
    """Return which headers have the right checksum, bool `[headers]`.

    The checksum is the CRC-32C of the length, rotated, plus a constant.
    """
    table = np.frombuffer(headers, np.uint8).reshape(-1, HEADER)
    crc: np.ndarray = np.full(len(table), 0xFFFFFFFF, np.uint32)
    for column in range(8):
        crc = _CRC[(crc ^ table[:, column]) & 0xFF] ^ (crc >> 8)
    crc = ~crc
    masked = ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)
    return masked == np.ascontiguousarray(table[:, 8:]).view("<u4")[:, 0]


def _crc_table() -> np.ndarray:
    """Return the CRC-32C table of all byte values, uint32 `[256]`."""
    crc: np.ndarray = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = np.where(crc & 1, (crc >> 1) ^ np.uint32(0x82F63B78), crc >> 1)
    return crc


_CRC = _crc_table()
