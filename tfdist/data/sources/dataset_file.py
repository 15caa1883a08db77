"""The manifest `dataset.json` beside record files: reading and writing."""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

from tfdist.data import files_io
from tfdist.data.sources.features import Features
from tfdist.storage import files

NAME = "dataset.json"
UNFINISHED = ".writing"
_FORMAT = "tfdist records 2"
_WITHOUT_CHECKSUM = "tfdist records 1"
_KEYS = ("examples", "classes", "class_names", "features", "structure", "compression", "shards")
_REMEDY = (
    "Copy it again from where it is whole, or delete the directory and write the data set again."
)


def read(directory: str) -> dict[str, Any] | None:
    """Read the manifest of a dataset.

    Args:
        directory: Directory of the records.

    Returns:
        The manifest; None if there is none.

    Raises:
        ValueError: If the manifest is damaged or of another version, or if the dataset is
            incomplete.

    Example:
        >>> read("/nowhere") is None
        True
    """
    path = os.path.join(directory, NAME)
    manifest = _read_json(path)
    if manifest is None:
        if files.exists(os.path.join(directory, UNFINISHED)):
            raise ValueError(
                f"{directory} holds an unfinished data set. Write it again: complete files are "
                "kept."
            )
        return None
    if manifest.get("format") not in (_FORMAT, _WITHOUT_CHECKSUM):
        raise ValueError(
            f"{path}: expected the manifest of a data set that tfdist wrote, of format "
            f"{_FORMAT!r}; received another file."
        )
    if manifest["format"] == _FORMAT:
        return _checked(manifest, path)
    missing = [key for key in _KEYS if key not in manifest]
    if missing or "crc32" in manifest:
        raise ValueError(f"{path}: damaged. {_REMEDY}")
    return manifest


def _read_json(path: str) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if there is no such file."""
    if not files.exists(path):
        return None
    content = files.read(path)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged: {error}. {_REMEDY}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: damaged: expected a JSON object. {_REMEDY}")
    return value


def read_checked(path: str) -> dict[str, Any] | None:
    """Return the object that `write_checked` wrote; None if there is no such file.

    Args:
        path: Path of the file.

    Raises:
        ValueError: If the file is damaged.
    """
    value = _read_json(path)
    return None if value is None else _checked(value, path)


def write_checked(path: str, value: dict[str, Any]) -> None:
    """Write an object and its checksum as JSON, atomically."""
    content = json.dumps({**value, "crc32": _checksum(value)}, indent=1)
    files_io.write_whole(path, content.encode())


def write(directory: str, manifest: dict[str, Any]) -> None:
    """Write a manifest atomically.

    Args:
        directory: Directory of the records.
        manifest: Content of the manifest.
    """
    write_checked(os.path.join(directory, NAME), {"format": _FORMAT, **manifest})


def _checked(value: dict[str, Any], path: str) -> dict[str, Any]:
    """Return an object without its checksum; raise ValueError if that is wrong."""
    if value.pop("crc32", None) != _checksum(value):
        raise ValueError(f"{path}: damaged: its checksum does not match its content. {_REMEDY}")
    return value


def _checksum(value: dict[str, Any]) -> int:
    """Return the checksum of an object, whatever its white space."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def features(manifest: dict[str, Any]) -> Features:
    """Return the features of the records and the structure of an example."""
    return Features.of(manifest["features"], structure=from_json(manifest["structure"]))


def to_json(structure: Any) -> Any:
    """Convert a nest of names for JSON, with tuples as lists.

    Example:
        >>> to_json(({"a": "x/a"}, "y")), from_json([{"a": "x/a"}, "y"])
        ([{'a': 'x/a'}, 'y'], ({'a': 'x/a'}, 'y'))
    """
    if isinstance(structure, dict):
        return {key: to_json(part) for key, part in structure.items()}
    return [to_json(part) for part in structure] if isinstance(structure, tuple) else structure


def from_json(structure: Any) -> Any:
    """Return the nest of names that was passed to `to_json`."""
    if isinstance(structure, dict):
        return {key: from_json(part) for key, part in structure.items()}
    return (
        tuple(from_json(part) for part in structure) if isinstance(structure, list) else structure
    )
