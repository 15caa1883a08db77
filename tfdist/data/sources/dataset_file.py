"""The file `dataset.json` beside records becomes what is known of them, and back; records are not opened."""

from __future__ import annotations

import json
import os
from typing import Any

import tensorflow as tf

from tfdist.data import files_io
from tfdist.data.sources.features import Features

NAME = "dataset.json"
UNFINISHED = ".writing"
_FORMAT = "tfdist records 1"


def read(directory: str) -> dict[str, Any] | None:
    """What a manifest says.

    Args:
        directory: Where the records lie.

    Returns:
        The manifest; None where there is none.

    Raises:
        ValueError: For a damaged one, one of another version, and where a data set is only half written.

    Example:
        >>> read("/nowhere") is None
        True
    """
    path = os.path.join(directory, NAME)
    manifest = read_json(path)
    if manifest is None:
        if tf.io.gfile.exists(os.path.join(directory, UNFINISHED)):
            raise ValueError(
                f"{directory} holds a data set that is not written to its end. Write it again: what is there is kept."
            )
        return None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise ValueError(
            f"{path}: expected the manifest of a data set that tfdist wrote, of format {_FORMAT!r}; received another file."
        )
    return manifest


def read_json(path: str) -> Any:
    """What a JSON file holds; None where there is no such file."""
    if not tf.io.gfile.exists(path):
        return None
    with tf.io.gfile.GFile(path, "rb") as file:
        content = file.read()
    try:
        return json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}. Write the data set again.") from error


def write(directory: str, manifest: dict[str, Any]) -> None:
    """Writes a manifest, whole or not at all."""
    content = json.dumps({"format": _FORMAT, **manifest}, indent=1)
    files_io.write_whole(os.path.join(directory, NAME), content.encode())


def features(manifest: dict[str, Any]) -> Features:
    """The features of the records, and what one example looks like."""
    return Features.of(manifest["features"], structure=from_json(manifest["structure"]))


def to_json(structure: Any) -> Any:
    """A nest of names as JSON holds it: a tuple is a list there.

    Example:
        >>> to_json(({"a": "x/a"}, "y")), from_json([{"a": "x/a"}, "y"])
        ([{'a': 'x/a'}, 'y'], ({'a': 'x/a'}, 'y'))
    """
    if isinstance(structure, dict):
        return {key: to_json(part) for key, part in structure.items()}
    return [to_json(part) for part in structure] if isinstance(structure, tuple) else structure


def from_json(structure: Any) -> Any:
    """The nest of names that `to_json` was given."""
    if isinstance(structure, dict):
        return {key: from_json(part) for key, part in structure.items()}
    return (
        tuple(from_json(part) for part in structure) if isinstance(structure, list) else structure
    )
