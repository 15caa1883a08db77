"""Kinds of catalog entries: their settings, and how each opens a Source."""

from __future__ import annotations

import dataclasses
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tfdist import config
from tfdist.storage import files

if TYPE_CHECKING:
    from tfdist.data.sources.catalog import Split
    from tfdist.data.sources.source import Source


# Errors of NumPy for a file that is not an array.
_READ_ERRORS = (
    ValueError,
    OSError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
)


class Kind(NamedTuple):
    """Definition of an entry's `kind`.

    Attributes:
        open: Function from a split and the directory of TFDS datasets to the Source.
        keys: Settings that the kind accepts besides kind, location, license and splits, with the
            types that each may have: names in `FITS`.
        word: Setting that a split sets if it is plain text in the file: its location, or the
            dataset's own name for the split.
    """

    open: Callable[[Split, str | os.PathLike | None], Source]
    keys: Mapping[str, tuple[str, ...]]
    word: str = "location"


FITS: Mapping[str, Callable[[Any], bool]] = {
    "text": lambda x: isinstance(x, str),
    "a whole number": lambda x: isinstance(x, int) and not isinstance(x, bool),
    "true or false": lambda x: isinstance(x, bool),
    "null": lambda x: x is None,
    "a list of names": lambda x: (
        isinstance(x, list) and x != [] and all(isinstance(name, str) for name in x)
    ),
    "a mapping of names to text": lambda x: (
        isinstance(x, dict) and x != {} and all(isinstance(y, str) for xy in x.items() for y in xy)
    ),
}
TEXT, NUMBER, TRUTH, NULL, NAMES, MAPPING = ((name,) for name in FITS)


def _tfds(split: Split, data_dir: str | os.PathLike | None) -> Source:
    from tfdist.data.sources import tfds

    name = split.options.get("name", split.entry)
    part = split.options.get("split", split.name)
    return tfds.load(name, part, split.location() or data_dir, **_settings(split, "index_dir"))


def _images(split: Split, _: Any) -> Source:
    from tfdist.data.sources import image_files

    return image_files.image_folder(_location(split), **split.options)


def _manifest(split: Split, _: Any) -> Source:
    from tfdist.data.sources import image_files

    return image_files.manifest(
        _location(split), **{**split.options, **_settings(split, "root", "classes")}
    )


def _imagenet(split: Split, _: Any) -> Source:
    from tfdist.data.sources import image_files

    options = {"split": split.name, **split.options}
    return image_files.imagenet(_location(split), **options)


def _table(split: Split, _: Any) -> Source:
    from tfdist.data.sources import tables

    return tables.table(_location(split), **{**split.options, **_settings(split, "classes")})


def _records(split: Split, _: Any) -> Source:
    from tfdist.data.sources.records import records

    options = {key: value for key, value in split.options.items() if key != "classes"}
    classes, names = _classes(split)
    return records(
        _location(split),
        classes=classes,
        class_names=names,
        **{**options, **_settings(split, "index_dir")},
    )


def _location(split: Split) -> str:
    location = split.location()
    assert location is not None
    return location


def _settings(split: Split, *keys: str) -> dict[str, Any]:
    """Return some of the settings, if they are present; text among them is a path."""
    settings = {key: split.options[key] for key in keys if key in split.options}
    return {
        key: split.path(value, key) if isinstance(value, str) else value
        for key, value in settings.items()
    }


def _arrays(split: Split, _: Any) -> Source:
    from tfdist.data.sources.source import of_arrays

    location = _location(split)
    label = split.options.get("label")
    arrays = _Arrays(location)
    features = split.options.get("features", [name for name in arrays.names if name != label])
    one = features[0] if isinstance(features, list) and len(features) == 1 else features
    x = arrays.read(one) if isinstance(one, str) else {name: arrays.read(name) for name in one}
    classes, names = _classes(split)
    source = of_arrays(x if label is None else (x, arrays.read(label)), location, classes)
    return dataclasses.replace(source, class_names=names)


def _classes(split: Split) -> tuple[int | None, tuple[str, ...] | None]:
    """Return the number of classes and their names, from a setting that may be either."""
    classes = split.options.get("classes")
    return (len(classes), tuple(classes)) if isinstance(classes, list) else (classes, None)


class _Arrays:
    """NumPy arrays at a location, by name.

    The location is an .npz file, a .npy file, or a directory of .npy files.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self._open = files.open_read
        if location.endswith(".npz"):
            with self._open(location) as file, self._load(file) as archive:
                self._files = dict.fromkeys(archive.files, location)
        elif location.endswith(".npy"):
            self._files = {os.path.basename(location)[:-4]: location}
        else:
            paths = files.glob(os.path.join(location, "*.npy"))
            self._files = {os.path.basename(path)[:-4]: path for path in paths}
        if not self._files:
            raise ValueError(
                f"{location}: expected an .npz or .npy file, or a directory of .npy files; "
                "received none."
            )

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def read(self, name: str) -> np.ndarray:
        if name not in self._files:
            raise ValueError(
                f"{self.location}: no array {name!r}. {config.nearest(name, self._files)}"
            )
        with self._open(self._files[name]) as file:
            loaded = self._load(file)
            if isinstance(loaded, np.ndarray):
                return loaded
            try:
                return loaded[name]
            except _READ_ERRORS as error:
                raise self._read_error(error, name) from error

    def _load(self, file: Any) -> Any:
        try:
            return np.load(file)
        except _READ_ERRORS as error:
            raise self._read_error(error) from error

    def _read_error(self, error: Exception, name: str = "") -> ValueError:
        return ValueError(
            f"{self.location}{f', array {name!r}' if name else ''}: NumPy cannot read it: {error}. "
            "Write it again."
        )


_FILES = {"channels": NUMBER, "decode": TRUTH}
_CLASSES = NUMBER + NAMES + TEXT
KINDS: Mapping[str, Kind] = {
    "tfds": Kind(_tfds, {"name": TEXT, "split": TEXT, "index_dir": TEXT}, "split"),
    "images": Kind(_images, {"classes": NAMES, "labels": TRUTH, "extensions": NAMES, **_FILES}),
    "manifest": Kind(
        _manifest,
        {
            "root": TEXT,
            "path_column": TEXT + NUMBER,
            "label_column": TEXT + NUMBER + NULL,
            "delimiter": TEXT,
            "header": TRUTH,
            "classes": _CLASSES,
            "check": TRUTH,
            **_FILES,
        },
    ),
    "imagenet": Kind(_imagenet, {"split": TEXT, "check": TRUTH, **_FILES}, "split"),
    "table": Kind(
        _table,
        {
            "features": TEXT + NAMES,
            "label": TEXT,
            "classes": _CLASSES,
            "types": MAPPING,
            "delimiter": TEXT,
        },
    ),
    "records": Kind(
        _records,
        {
            "features": MAPPING,
            "label": TEXT,
            "classes": NUMBER + NAMES,
            "access": TEXT,
            "compression": TEXT,
            "index_dir": TEXT,
        },
    ),
    "arrays": Kind(_arrays, {"features": TEXT + NAMES, "label": TEXT, "classes": NUMBER + NAMES}),
}
