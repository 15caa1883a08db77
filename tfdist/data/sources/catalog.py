"""Catalogs of datasets: named Sources in a YAML file.

A catalog:

    leaves:
      kind: images
      location: ${DATA}/leaves
      license: CC BY 4.0, https://example.org/leaves
      splits:
        train: train
        test: {location: /archive/leaves-test}

Locations, and all other paths, may use environment variables, `${DATA}` or `$DATA`
(`os.path.expandvars`); a variable that is not set is an error. A relative location starts from the
directory of the catalog's file, and the relative location of a split from its entry's location.
Data are read only when you ask for a Source.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist import config
from tfdist.data.sources import catalog_kinds
from tfdist.runtime.yaml_files import parse_yaml
from tfdist.storage import files
from tfdist.storage.store_errors import UnusableStore

if TYPE_CHECKING:
    from tfdist.data.sources.source import Source


@dataclasses.dataclass(frozen=True)
class Split:
    """One split of an entry, with the settings of the entry and its own.

    Attributes:
        name: Name of the split: "train".
        entry: Name of its entry.
        file: Path of the catalog's file, for messages.
        kind: Kind of the entry, one of `catalog_kinds.KINDS`.
        locations: Locations of the entry and of the split, as written in the file.
        options: The other settings of the kind.
    """

    name: str
    entry: str
    file: str
    kind: str
    locations: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def location(self) -> str | None:
        """Return the location of the data, with all variables expanded.

        Returns:
            The location; None if the entry has none.

        Raises:
            ValueError: If a variable is not set.
        """
        location = None
        for text in self.locations:
            location = self.path(text, "location", location)
        return location

    def path(self, text: str, key: str, directory: str | None = None) -> str:
        """Expand a path of the file: environment variables, `~`, and the base directory.

        Args:
            text: Path as written in the file.
            key: Key of the setting, for messages.
            directory: Directory that a relative path starts from; default: the directory of the
                catalog's file.

        Raises:
            ValueError: If a variable is not set.
        """
        for name in re.findall(r"\$\{(\w+)\}|\$(\w+)", text):
            variable = name[0] or name[1]
            if os.path.expandvars(f"${{{variable}}}") == f"${{{variable}}}":
                raise ValueError(
                    f"{self.file}: {self.entry}.{key}: the variable {variable} in {text!r} is not "
                    f"set. Set it: export {variable}=DIRECTORY; or write the path into the file."
                )
        expanded = os.path.expanduser(os.path.expandvars(text))
        return _join(directory or _directory(self.file), expanded)

    def missing(self) -> str | None:
        """Return the location if nothing exists there; None if it exists or is not needed.

        Raises:
            ValueError: If a variable is not set, or if the file system cannot be read.
        """
        location = self.location()
        if location is None or self.kind == "tfds":  # TFDS creates its directories
            return None
        try:
            exists = files.exists(location) or files.glob(location)
        except (UnusableStore, OSError) as error:
            raise ValueError(
                f"{self.file}: {self.entry}.location: {location} cannot be read: {error}"
            ) from error
        return None if exists else location

    def source(self, data_dir: str | os.PathLike | None = None) -> Source:
        """Return the examples of the split.

        Args:
            data_dir: Directory of prepared TFDS datasets, for an entry without a location.

        Returns:
            A Source with the name "ENTRY[SPLIT]".

        Raises:
            ValueError: If the location is missing, or its data do not match the entry; the message
                names file and entry.
        """
        if missing := self.missing():
            written = (
                ""
                if self.locations[-1] == missing
                else f" ({' + '.join(map(repr, self.locations))} in the file)"
            )
            raise ValueError(
                f"{self.file}: {self.entry}.location: there is no file at {missing}{written}, for "
                f"the split {self.name!r}. Correct the location, or put the data there."
            )
        import tensorflow as tf

        try:
            source = catalog_kinds.KINDS[self.kind].open(self, data_dir)
        except (ValueError, tf.errors.OpError, OSError) as error:
            raise ValueError(f"{self.file}: {self.entry}: {error}") from error
        return dataclasses.replace(source, name=f"{self.entry}[{self.name}]")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One dataset of a catalog, checked.

    Attributes:
        name: Name of the dataset.
        file: Path of the catalog's file, for messages.
        settings: All settings of the dataset except its splits.
        splits: Mapping from each split to its own settings.
    """

    name: str
    file: str
    settings: Mapping[str, Any]
    splits: Mapping[str, Mapping[str, Any]]

    @property
    def kind(self) -> str:
        """Return the kind of the dataset, one of `catalog_kinds.KINDS`."""
        return self.settings["kind"]

    @property
    def license(self) -> str | None:
        """Return the license of the dataset, and where its text is published."""
        return self.settings.get("license")

    def split(self, name: str) -> Split:
        """Return a split, without reading it.

        Args:
            name: Name of the split; for a TFDS dataset also any slice that TFDS knows,
                "train[:80%]".

        Raises:
            ValueError: If the name is unknown.
        """
        if name not in self.splits and self.kind != "tfds":
            raise ValueError(
                f"{self.file}: {self.name} has no split {name!r}. "
                f"{config.nearest(name, self.splits)}"
            )
        parts = [self.settings, self.splits.get(name, {"split": name})]
        options = {
            key: value
            for part in parts
            for key, value in part.items()
            if key not in ("kind", "location", "license")
        }
        locations = tuple(part["location"] for part in parts if "location" in part)
        return Split(name, self.name, self.file, self.kind, locations, options)


@dataclasses.dataclass(frozen=True)
class Catalog:
    """The datasets that a YAML file names.

    Attributes:
        file: Path of the file.
        entries: Mapping from name to dataset, in the file's order.

    Example:
        >>> import numpy as np, tempfile
        >>> directory = Path(tempfile.mkdtemp())
        >>> np.savez(directory / "points.npz", x=np.zeros([5, 2]), y=np.arange(5))
        >>> text = "points: {kind: arrays, location: points.npz, label: y}"
        >>> _ = (directory / "datasets.yaml").write_text(text)
        >>> catalog = Catalog.load(directory / "datasets.yaml")
        >>> catalog.source("points", "train").cardinality
        5
    """

    file: str
    entries: Mapping[str, Entry]

    @classmethod
    def load(cls, path: str | os.PathLike) -> Catalog:
        """Read and check a catalog, without a check that its data exist.

        Args:
            path: Path of a YAML file, a mapping from entry to settings.

        Returns:
            The Catalog.

        Raises:
            ValueError: If the file is missing or not YAML, if keys are unknown or appear twice, or
                if values have the wrong type; the message names file, entry and key.
        """
        file = os.fspath(path)
        try:
            document = parse_yaml(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ValueError(
                f"{file}: no such catalog in {os.getcwd()}. Name a YAML file of data sets."
            ) from error
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: cannot be read as YAML: {error}") from error
        entries = _mapping({} if document is None else document, file, "names of data sets")
        return cls(file, {name: _entry(file, name, settings) for name, settings in entries.items()})

    def source(self, name: str, split: str, data_dir: str | os.PathLike | None = None) -> Source:
        """Return a split of a dataset.

        Args:
            name: Name of an entry.
            split: Name of a split; for a TFDS dataset also any slice that TFDS knows,
                "train[:80%]".
            data_dir: Directory of prepared TFDS datasets, for an entry without a location.

        Returns:
            A Source with the name "NAME[SPLIT]".

        Raises:
            ValueError: If the name or the split is unknown, or if the data are missing or do not
                match the entry.
        """
        if name not in self.entries:
            raise ValueError(
                f"{self.file}: no data set {name!r}. {config.nearest(name, self.entries)}"
            )
        return self.entries[name].split(split).source(data_dir)


def resolve(
    name: str,
    split: str,
    data_dir: str | os.PathLike | None = None,
    catalog: Catalog | str | os.PathLike | None = None,
) -> Source:
    """Return a dataset by name: an entry of the catalog, else a dataset of TFDS.

    Args:
        name: Name of the dataset.
        split: Name of the split.
        data_dir: Directory of prepared TFDS datasets; default: TFDS' own.
        catalog: A Catalog or its file; None: TFDS alone.

    Returns:
        The Source.

    Raises:
        ValueError: If the name or the split is unknown, or if data are missing or not as expected.
    """
    if catalog is not None and not isinstance(catalog, Catalog):
        catalog = Catalog.load(catalog)
    if catalog is not None and name in catalog.entries:
        return catalog.source(name, split, data_dir)
    from tensorflow_datasets.core import DatasetNotFoundError

    from tfdist.data.sources import tfds

    try:
        return tfds.load(name, split, data_dir)
    except ValueError as error:
        if catalog is None or not isinstance(error.__cause__, DatasetNotFoundError):
            raise
        near = config.nearest(name, catalog.entries) if catalog.entries else "It is empty."
        raise ValueError(
            f"{catalog.file}: no data set {name!r}. {near} Nor has TFDS one: {error}"
        ) from error


def _entry(file: str, name: str, settings: Any) -> Entry:
    path = f"{file}: {name}"
    settings = _mapping(settings, path, "settings such as kind and location")
    kind = settings.get("kind")
    if not isinstance(kind, str) or kind not in catalog_kinds.KINDS:
        received = "it is missing" if kind is None else f"received {kind!r}"
        raise ValueError(
            f"{path}.kind: {received}. {config.nearest(str(kind), catalog_kinds.KINDS)}"
        )
    keys = {"location": catalog_kinds.TEXT, **catalog_kinds.KINDS[kind].keys}
    common = {key: value for key, value in settings.items() if key != "splits"}
    _check_settings(
        path,
        common,
        {"kind": catalog_kinds.TEXT, "license": catalog_kinds.TEXT, **keys},
        ("splits",),
    )
    splits = _splits(path, kind, settings.get("splits"))
    for split, own in splits.items():
        _check_settings(f"{path}.splits.{split}", own, keys)
        if kind != "tfds" and "location" not in {**common, **own}:
            raise ValueError(
                f"{path}.location: missing for the split {split!r}. Set the location of the data."
            )
    return Entry(name, file, common, splits)


def _check_settings(
    path: str,
    settings: Mapping[str, Any],
    keys: Mapping[str, tuple[str, ...]],
    others: tuple[str, ...] = (),
) -> None:
    """Raise ValueError unless all settings are known and have values of the right type."""
    for key, value in settings.items():
        if key not in keys:
            raise ValueError(f"{path}.{key}: no such key. {config.nearest(key, (*keys, *others))}")
        _check(f"{path}.{key}", keys[key], value)


def _splits(path: str, kind: str, splits: Any) -> dict[str, dict[str, Any]]:
    """Return the own settings of every split."""
    if splits is None:
        return {"train": {}}
    word = catalog_kinds.KINDS[kind].word
    splits = _mapping(splits, f"{path}.splits", "names of splits")
    if not splits:
        raise ValueError(
            f"{path}.splits: expected names of splits, received none. Remove the key to have the "
            "one split `train`."
        )
    return {
        split: {word: own}
        if isinstance(own, str)
        else _mapping(own, f"{path}.splits.{split}", f"a {word} or settings")
        for split, own in splits.items()
    }


def _mapping(value: Any, path: str, keys: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a mapping of {keys}, received {value!r}.")
    for key in value:
        if not isinstance(key, str):
            raise ValueError(
                f"{path}: expected text as a name, received {key!r}. Put it in quotes."
            )
    return value


def _check(path: str, expected: tuple[str, ...], value: Any) -> None:
    """Raise ValueError unless a setting has a value of one of the expected types.

    The types are names in `catalog_kinds.FITS`.
    """
    if not any(catalog_kinds.FITS[kind](value) for kind in expected):
        quotes = (
            ""
            if isinstance(value, str)
            else " Put names that look like numbers, yes or no in quotes."
        )
        raise ValueError(f"{path}: expected {' or '.join(expected)}, received {value!r}.{quotes}")


def _directory(file: str) -> str:
    return os.path.dirname(file if "://" in file else os.path.abspath(file))


def _join(directory: str, location: str) -> str:
    """Join a directory and a location.

    Absolute locations, "/x" and "gs://x", replace the directory.
    """
    if "://" in location:
        return location
    joined = os.path.join(directory, location)
    return joined if "://" in joined else os.path.normpath(joined)
