"""Arrays and facts become the content of one file, with a checksum; what is not just what was written is never taken for it.

The content: `MAGIC`, the header's length (8 bytes, little endian), the header in JSON, the arrays one after the other, and the CRC-32
of all that (4 bytes, little endian), which sees any change of up to 32 bits in a row, and others but for one in 2^32.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

MAGIC = b"tfdist snapshot\n"
VERSION = 1
_LENGTH, _CHECKSUM = 8, 4  # bytes
_PIECE = 1 << 20  # bytes that are read at a time


class Damaged(ValueError):
    """A file is no snapshot, or no longer the one that was written."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A state of training at one moment.

    Attributes:
        arrays: Names to arrays of any shape, of numbers or truth values.
        facts: All else, as JSON knows it.
    """

    arrays: Mapping[str, np.ndarray]
    facts: Mapping[str, Any]


def numbered(prefix: str, arrays: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of one kind, by names that `arrays_of` finds.

    >>> numbered("metrics/", [1.0, 2.0])
    {'metrics/0': 1.0, 'metrics/1': 2.0}
    """
    return {f"{prefix}{place}": array for place, array in enumerate(arrays)}


def arrays_of(prefix: str, snapshot: Snapshot) -> list[np.ndarray]:
    """A snapshot's arrays of one kind, in their order."""
    return [array for key, array in snapshot.arrays.items() if key.startswith(prefix)]


def pack(snapshot: Snapshot) -> Iterator[bytes | memoryview]:
    """A file's content in pieces, so that no second copy of the arrays is made.

    Args:
        snapshot: The snapshot.

    Yields:
        What to write, in this order.

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


def unpack(content: bytes, name: str) -> Snapshot:
    """A snapshot from the content of its file.

    Args:
        content: All of it; the arrays are views of it.
        name: Of the file, for messages.

    Raises:
        Damaged: It is not what `pack` gave, byte for byte.
        ValueError: It was written by another version of tfdist.
    """
    file = io.BytesIO(content)
    check(file, name)
    found, view = layout(file, name), memoryview(content)
    arrays = {
        key: np.frombuffer(view[begin : begin + math.prod(shape) * kind.itemsize], kind).reshape(
            shape
        )
        for key, (kind, shape, begin) in found.arrays.items()
    }
    return Snapshot(arrays, found.facts)


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a file's header says.

    Attributes:
        arrays: Names to dtype, shape, and the place of the first byte in the file.
        facts: As of the `Snapshot`.
    """

    arrays: Mapping[str, tuple[np.dtype, tuple[int, ...], int]]
    facts: Mapping[str, Any]


def check(file: Any, name: str) -> None:
    """Makes sure that a file is what `pack` gave, byte for byte; it is read in pieces.

    Args:
        file: At its begin; has `read(bytes)`.
        name: Of the file, for messages.

    Raises:
        Damaged: It is not.
    """
    begin, tail, checksum, size = b"", b"", 0, 0
    while piece := file.read(_PIECE):
        begin, size = begin or piece[: len(MAGIC)], size + len(piece)
        held = tail + piece
        checksum, tail = zlib.crc32(memoryview(held)[:-_CHECKSUM], checksum), held[-_CHECKSUM:]
    if begin != MAGIC[: len(begin)] or not begin:
        raise Damaged(f"{name}: expected a snapshot; it does not begin as one.")
    if size < len(MAGIC) + _LENGTH + _CHECKSUM or checksum != int.from_bytes(tail, "little"):
        raise Damaged(
            f"{name}: its checksum is not that of its content ({size} bytes): it was cut off or changed."
        )


def layout(file: Any, name: str) -> Layout:
    """Where the arrays of a file lie that `check` has found whole; none of them is read.

    Args:
        file: Has `seek(place)` and `read(bytes)`.
        name: Of the file, for messages.

    Raises:
        ValueError: It was written by another version of tfdist.
    """
    file.seek(len(MAGIC))
    length = int.from_bytes(file.read(_LENGTH), "little")
    header = json.loads(file.read(length))
    if header["version"] != VERSION:
        raise ValueError(
            f"{name}: expected a snapshot of version {VERSION}, received one of version {header['version']}. Take the tfdist that wrote it."
        )
    arrays, place = {}, len(MAGIC) + _LENGTH + length
    for key, dtype, shape in header["arrays"]:
        kind = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
        arrays[key] = kind, tuple(shape), place
        place += math.prod(shape) * kind.itemsize
    return Layout(arrays, header["facts"])


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
