"""The manifest `dataset.json` beside record files: reading and writing."""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import tensorflow as tf

from tfdist.data import files_io
from tfdist.data.sources.features import Features

NAME = "dataset.json"
UNFINISHED = ".writing"
_FORMAT = "tfdist records 2"
_WITHOUT_CHECKSUM = "tfdist records 1"


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
    manifest = read_json(path)
    if manifest is None:
        if tf.io.gfile.exists(os.path.join(directory, UNFINISHED)):
            raise ValueError(
                f"{directory} holds an unfinished data set. Write it again: complete files are "
                "kept."
            )
        return None
    if not isinstance(manifest, dict) or manifest.get("format") not in (_FORMAT, _WITHOUT_CHECKSUM):
        raise ValueError(
            f"{path}: expected the manifest of a data set that tfdist wrote, of format "
            f"{_FORMAT!r}; received another file."
        )
    if manifest["format"] == _FORMAT and manifest.pop("crc32", None) != _checksum(manifest):
        raise ValueError(
            f"{path}: damaged: its checksum does not match its content. Copy it again from where "
            "it is whole, or delete the directory and write the data set again."
        )
    return manifest


def read_json(path: str) -> Any:
    """Return the content of a JSON file; None if there is no such file.

    Args:
        path: Path of the file.

    Raises:
        ValueError: If the file is not JSON.
    """
    if not tf.io.gfile.exists(path):
        return None
    with tf.io.gfile.GFile(path, "rb") as file:
        content = file.read()
    try:
        return json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}. Write the data set again.") from error


def write(directory: str, manifest: dict[str, Any]) -> None:
    """Write a manifest atomically.

    Args:
        directory: Directory of the records.
        manifest: Content of the manifest.
    """
    manifest = {"format": _FORMAT, **manifest}
    content = json.dumps({**manifest, "crc32": _checksum(manifest)}, indent=1)
    files_io.write_whole(os.path.join(directory, NAME), content.encode())


def _checksum(manifest: dict[str, Any]) -> int:
    """Return the checksum of a manifest, whatever its white space."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


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
