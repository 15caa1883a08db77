"""Arrays and facts become the content of one file, with a checksum; what is not just what was written is never taken for it.

The content: `MAGIC`, the header's length (8 bytes, little endian), the header in JSON, the arrays one after the other, and the CRC-32
of all that (4 bytes, little endian), which sees any change of up to 32 bits in a row, and others but for one in 2^32.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

MAGIC = b"tfdist snapshot\n"
VERSION = 1
_LENGTH, _CHECKSUM = 8, 4  # bytes


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
    view = memoryview(content)
    if bytes(view[: len(MAGIC)]) != MAGIC[: len(view)] or not len(view):
        raise Damaged(f"{name}: expected a snapshot; it does not begin as one.")
    if len(view) < len(MAGIC) + _LENGTH + _CHECKSUM or zlib.crc32(view[:-_CHECKSUM]) != int.from_bytes(view[-_CHECKSUM:], "little"):
        raise Damaged(f"{name}: its checksum is not that of its content ({len(view)} bytes): it was cut off or changed.")
    begin = len(MAGIC) + _LENGTH
    end = begin + int.from_bytes(view[len(MAGIC) : begin], "little")
    header = json.loads(bytes(view[begin:end]))
    if header["version"] != VERSION:
        raise ValueError(f"{name}: expected a snapshot of version {VERSION}, received one of version {header['version']}. Take the tfdist that wrote it.")
    arrays = {}
    for key, dtype, shape in header["arrays"]:
        kind = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
        begin, end = end, end + math.prod(shape) * kind.itemsize
        arrays[key] = np.frombuffer(view[begin:end], kind).reshape(shape)
    return Snapshot(arrays, header["facts"])


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
