"""Snapshot format (checkpoint file): named arrays and JSON facts, with a checksum.

This is the checkpoint format of `BackupAndRestore`. A file that is not exactly what was written is
never accepted as a snapshot. The content is `MAGIC`, the header's length (8 bytes, little endian),
the header in JSON, the arrays one after the other, and the CRC-32 of all that (4 bytes, little
endian). The checksum detects any change of up to 32 bits in a row, and all but one in 2^32 of other
changes.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import mmap
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["Damaged", "Snapshot", "arrays_of", "unpack"]

MAGIC = b"tfdist snapshot\n"
VERSION = 1
_LENGTH = 8  # bytes
_CHECKSUM = 4  # bytes
_PIECE = 1 << 20  # bytes read at a time


class Damaged(ValueError):
    """Error: a file is not a snapshot, or was changed after it was written."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Training state at one step.

    Attributes:
        arrays: Arrays by name, of any shape, of numbers or booleans.
        facts: All other state, JSON-serializable.
    """

    arrays: Mapping[str, np.ndarray]
    facts: Mapping[str, Any]


def numbered(prefix: str, arrays: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays of one kind, under names that `arrays_of` finds.

    Args:
        prefix: Beginning of the names, such as "metrics/".
        arrays: The arrays, in their order.

    Example:
        >>> numbered("metrics/", [1.0, 2.0])
        {'metrics/0': 1.0, 'metrics/1': 2.0}
    """
    return {f"{prefix}{i}": array for i, array in enumerate(arrays)}


def arrays_of(prefix: str, snapshot: Snapshot) -> list[np.ndarray]:
    """Return a snapshot's arrays of one kind, in their order.

    Args:
        prefix: Beginning of their names, as for `numbered`.
        snapshot: Snapshot that has the arrays.
    """
    return [array for key, array in snapshot.arrays.items() if key.startswith(prefix)]


def pack(snapshot: Snapshot) -> Iterator[bytes | memoryview]:
    """Yield a file's content in pieces, so that the arrays are not copied a second time.

    Args:
        snapshot: Snapshot to write.

    Yields:
        The pieces of the content, in the order in which to write them.

    Example:
        >>> content = b"".join(pack(Snapshot({"weights": np.ones(3)}, {"epoch": 7})))
        >>> unpack(content, "a file")
        Snapshot(arrays={'weights': array([1., 1., 1.])}, facts={'epoch': 7})
    """
    arrays = {name: np.asarray(array) for name, array in snapshot.arrays.items()}
    listed = [[name, tf.as_dtype(array.dtype).name, array.shape] for name, array in arrays.items()]
    header = json.dumps({"version": VERSION, "arrays": listed, "facts": snapshot.facts}).encode()
    checksum = 0
    beginning: list[bytes | memoryview] = [MAGIC, len(header).to_bytes(_LENGTH, "little"), header]
    for piece in [*beginning, *map(_bytes, arrays.values())]:
        checksum = zlib.crc32(piece, checksum)
        yield piece
    yield checksum.to_bytes(_CHECKSUM, "little")


def unpack(content: bytes | mmap.mmap, name: str) -> Snapshot:
    """Return the snapshot in the content of a file.

    Args:
        content: Complete content of the file. The arrays are views of it.
        name: Name of the file, for messages.

    Raises:
        Damaged: If the content is not what `pack` returned, byte for byte.
        ValueError: If another version of tfdist wrote the file.
    """
    file = content if isinstance(content, mmap.mmap) else io.BytesIO(content)
    check(file, name)
    header = layout(file, name)
    view = memoryview(content)
    arrays = {
        key: np.frombuffer(view[begin : begin + math.prod(shape) * kind.itemsize], kind).reshape(
            shape
        )
        for key, (kind, shape, begin) in header.arrays.items()
    }
    return Snapshot(arrays, header.facts)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Header of a snapshot file.

    Attributes:
        arrays: Dtype, shape, and position of the first byte in the file, by the name of the array.
        facts: The facts of the `Snapshot`.
    """

    arrays: Mapping[str, tuple[np.dtype, tuple[int, ...], int]]
    facts: Mapping[str, Any]


def check(file: Any, name: str) -> None:
    """Raise Damaged unless a file is what `pack` returned, byte for byte.

    The file is read in pieces.

    Args:
        file: File object at its beginning, with `read(bytes)`.
        name: Name of the file, for messages.

    Raises:
        Damaged: If the file is not what was written.
    """
    begin = b""
    tail = b""
    checksum = 0
    size = 0
    while piece := file.read(_PIECE):
        begin = begin or piece[: len(MAGIC)]
        size += len(piece)
        data = tail + piece
        checksum = zlib.crc32(memoryview(data)[:-_CHECKSUM], checksum)
        tail = data[-_CHECKSUM:]
    if begin != MAGIC[: len(begin)] or not begin:
        raise Damaged(f"{name}: expected a snapshot, received a file of another format.")
    if size < len(MAGIC) + _LENGTH + _CHECKSUM or checksum != int.from_bytes(tail, "little"):
        raise Damaged(
            f"{name}: damaged: its checksum does not match its content ({size} bytes). The file "
            "was truncated or changed."
        )


def layout(file: Any, name: str) -> Layout:
    """Return the positions of the arrays in a file, without reading them.

    Call `check` first: this function does not verify the checksum.

    Args:
        file: File object with `seek(offset)` and `read(bytes)`.
        name: Name of the file, for messages.

    Raises:
        ValueError: If another version of tfdist wrote the file.
    """
    file.seek(len(MAGIC))
    length = int.from_bytes(file.read(_LENGTH), "little")
    header = json.loads(file.read(length))
    if header["version"] != VERSION:
        raise ValueError(
            f"{name}: expected a snapshot of version {VERSION}, received one of version "
            f"{header['version']}. Use the version of tfdist that wrote it."
        )
    arrays = {}
    offset = len(MAGIC) + _LENGTH + length
    for key, dtype, shape in header["arrays"]:
        kind = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
        arrays[key] = kind, tuple(shape), offset
        offset += math.prod(shape) * kind.itemsize
    return Layout(arrays, header["facts"])


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
