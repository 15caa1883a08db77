"""Parser for the scalars in TensorBoard event files, without TensorFlow."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tfdist.tools.report.run_files import Reader

PATTERN = "*tfevents*"
# A record starts with its length and a checksum of the length, and ends with one of its data.
_HEAD = 12  # bytes
_FOOT = 4  # bytes
# Larger events without a scalar, such as graphs and images, are not checked: the checksum of a
# megabyte takes Python a tenth of a second.
_UNCHECKED = 1 << 16  # bytes
_FORMS = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}  # `struct` formats by the tensor's DataType


@dataclasses.dataclass(frozen=True)
class Scalar:
    """Point of a curve: the step, the time in seconds since 1970, and the value."""

    step: int
    time: float
    value: float


def scalars(directories: Iterable[Path], reader: Reader) -> dict[str, list[Scalar]]:
    """Read the curves in the event files of some directories, by tag and sorted by step.

    If a step was written twice, the later value counts.

    Args:
        directories: Directories to search; they need not exist.
        reader: Reader that records damaged files.
    """
    by_tag: dict[str, dict[int, Scalar]] = {}
    for path in sorted(
        path for directory in directories for path in directory.glob(PATTERN) if path.is_file()
    ):
        for tag, scalar in _of_file(path, reader):
            before = by_tag.setdefault(tag, {}).get(scalar.step)
            if before is None or before.time <= scalar.time:
                by_tag[tag][scalar.step] = scalar
    return {
        tag: [points[step] for step in sorted(points)] for tag, points in sorted(by_tag.items())
    }


def _of_file(path: Path, reader: Reader) -> Iterator[tuple[str, Scalar]]:
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    content = reader.bytes(path) or b""
    offset = 0
    while offset < len(content):
        size = int.from_bytes(content[offset : offset + 8], "little")
        end = offset + _HEAD + size + _FOOT
        try:
            if end > len(content) or not _is_whole(content, offset, 8):
                raise DecodeError
            event = Event.FromString(content[offset + _HEAD : end - _FOOT])
            values = [(value.tag, _number(value)) for value in event.summary.value]
            checked = size <= _UNCHECKED or any(number is not None for _, number in values)
            if checked and not _is_whole(content, offset + _HEAD, size):
                raise DecodeError
        except DecodeError:
            reader.problems.append(
                f"{path} is cut off or damaged after {offset} of {len(content)} bytes; the "
                "rest is left out"
            )
            return
        for tag, number in values:
            if number is not None:
                yield tag, Scalar(event.step, event.wall_time, number)
        offset = end


def _is_whole(content: bytes, begin: int, size: int) -> bool:
    """Return whether some bytes have the checksum that follows them: their CRC-32C, masked."""
    crc = 0xFFFFFFFF
    for byte in memoryview(content)[begin : begin + size]:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return masked == int.from_bytes(content[begin + size : begin + size + _FOOT], "little")


def _crc_table() -> list[int]:
    """Return the CRC-32C of each byte value."""
    table = list(range(256))
    for _ in range(8):
        table = [crc >> 1 ^ 0x82F63B78 * (crc & 1) for crc in table]
    return table


_CRC = _crc_table()


def _number(value: Any) -> float | None:
    """Return the number in a Summary.Value, or None if it holds something else."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return value.simple_value
    if kind != "tensor" or value.tensor.tensor_shape.dim or value.tensor.dtype not in _FORMS:
        return None
    tensor = value.tensor
    if tensor.tensor_content:
        form = _FORMS[tensor.dtype]
        return (
            float(struct.unpack(form, tensor.tensor_content)[0])
            if len(tensor.tensor_content) == struct.calcsize(form)
            else math.nan
        )
    for numbers in (tensor.float_val, tensor.double_val, tensor.int_val, tensor.int64_val):
        if numbers:
            return float(numbers[0])
    return 0.0  # protobuf does not write the default value
