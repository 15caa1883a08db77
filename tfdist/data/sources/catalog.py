"""Names in a YAML file become Sources; nothing is read before one is asked for.

A catalog:

    leaves:
      kind: images
      location: ${DATA}/leaves
      license: CC BY 4.0, https://example.org/leaves
      splits:
        train: train
        test: {location: /archive/leaves-test}

Locations, and all other paths, may use environment variables, `${DATA}` or `$DATA` (`os.path.expandvars`); one that is not
set is an error. A relative location begins at the directory of the catalog's file, that of a split at its entry's location.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tfdist import config
from tfdist.data.sources import catalog_kinds

if TYPE_CHECKING:
    from tfdist.data.sources.base import Source


@dataclasses.dataclass(frozen=True)
class Split:
    """One split of an entry, with the entry's settings and its own.

    Attributes:
        name: "train".
        entry: Its entry's name.
        file: The catalog's file, for messages.
        kind: One of `kinds.KINDS`.
        locations: The entry's location and the split's, as they stand in the file.
        options: The kind's other settings.
    """

    name: str
    entry: str
    file: str
    kind: str
    locations: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def location(self) -> str | None:
        """Where its data lie, all variables expanded; None where the entry does not say.

        Raises:
            ValueError: For a variable that is not set.
        """
        place = None
        for text in self.locations:
            place = self.path(text, "location", place)
        return place

    def path(self, text: str, key: str, directory: str | None = None) -> str:
        """A path that stands in the file, with its variables' values, and the user's home for `~`.

        Args:
            text: The path as it stands there.
            key: The setting's key, for messages.
            directory: Where a relative path begins; default: the directory of the catalog's file.

        Raises:
            ValueError: For a variable that is not set.
        """
        for name in re.findall(r"\$\{(\w+)\}|\$(\w+)", text):
            variable = name[0] or name[1]
            if os.path.expandvars(f"${{{variable}}}") == f"${{{variable}}}":
                raise ValueError(
                    f"{self.file}: {self.entry}.{key}: the variable {variable} in {text!r} is not set. "
                    f"Set it: export {variable}=DIRECTORY; or write the path into the file."
                )
        expanded = os.path.expanduser(os.path.expandvars(text))
        return _join(directory or _directory(self.file), expanded)

    def missing(self) -> str | None:
        """The location, if nothing lies there; None if something does, or no location is needed.

        Raises:
            ValueError: For a variable that is not set, and a file system that TensorFlow cannot read.
        """
        import tensorflow as tf

        location = self.location()
        if location is None or self.kind == "tfds":  # TFDS makes its directories
            return None
        try:
            found = tf.io.gfile.exists(location) or tf.io.gfile.glob(location)
        except (tf.errors.OpError, OSError) as error:
            raise ValueError(
                f"{self.file}: {self.entry}.location: {location} cannot be read: {error}"
            ) from error
        return None if found else location

    def source(self, data_dir: str | os.PathLike | None = None) -> Source:
        """The examples.

        Args:
            data_dir: Where prepared TFDS data sets lie, for an entry without a location.

        Returns:
            A Source with the name "ENTRY[SPLIT]".

        Raises:
            ValueError: Names file and entry where the location is missing, or its data are not what the entry says.
        """
        if missing := self.missing():
            written = (
                ""
                if self.locations[-1] == missing
                else f" ({' + '.join(map(repr, self.locations))} in the file)"
            )
            raise ValueError(
                f"{self.file}: {self.entry}.location: nothing lies at {missing}{written}, for the split {self.name!r}. "
                "Correct the location, or put the data there."
            )
        import tensorflow as tf

        try:
            source = catalog_kinds.KINDS[self.kind].open(self, data_dir)
        except (ValueError, tf.errors.OpError, OSError) as error:
            raise ValueError(f"{self.file}: {self.entry}: {error}") from error
        return dataclasses.replace(source, name=f"{self.entry}[{self.name}]")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One data set of a catalog, checked.

    Attributes:
        name: Its name.
        file: The catalog's file, for messages.
        settings: All of its settings but its splits.
        splits: The settings that each split has of its own.
    """

    name: str
    file: str
    settings: Mapping[str, Any]
    splits: Mapping[str, Mapping[str, Any]]

    @property
    def kind(self) -> str:
        """One of `kinds.KINDS`."""
        return self.settings["kind"]

    @property
    def license(self) -> str | None:
        """Under which terms it may be used, and where that is written."""
        return self.settings.get("license")

    def split(self, name: str) -> Split:
        """One of its splits, unread; of a TFDS data set also any slice that TFDS knows, "train[:80%]".

        Raises:
            ValueError: For an unknown name.
        """
        if name not in self.splits and self.kind != "tfds":
            raise ValueError(
                f"{self.file}: {self.name} has no split {name!r}. {config.nearest(name, self.splits)}"
            )
        both = [self.settings, self.splits.get(name, {"split": name})]
        options = {
            key: value
            for part in both
            for key, value in part.items()
            if key not in ("kind", "location", "license")
        }
        locations = tuple(part["location"] for part in both if "location" in part)
        return Split(name, self.name, self.file, self.kind, locations, options)


@dataclasses.dataclass(frozen=True)
class Catalog:
    """The data sets that a file names.

    Attributes:
        file: The file.
        entries: Its data sets by name, in the file's order.

    Example:
        >>> import numpy as np, tempfile
        >>> directory = Path(tempfile.mkdtemp())
        >>> np.savez(directory / "points.npz", x=np.zeros([5, 2]), y=np.arange(5))
        >>> _ = (directory / "datasets.yaml").write_text("points: {kind: arrays, location: points.npz, label: y}")
        >>> catalog = Catalog.load(directory / "datasets.yaml")
        >>> catalog.source("points", "train").cardinality
        5
    """

    file: str
    entries: Mapping[str, Entry]

    @classmethod
    def load(cls, path: str | os.PathLike) -> Catalog:
        """Reads and checks a catalog; whether its data are there is not looked at.

        Args:
            path: A YAML file, entry to settings.

        Returns:
            The Catalog.

        Raises:
            ValueError: For a file that is missing or no YAML, for keys that are unknown or appear twice, and for values of
                the wrong type; names file, entry and key.
        """
        file = os.fspath(path)
        try:
            document = yaml.load(Path(path).read_text(encoding="utf-8"), _UniqueKeyLoader)
        except FileNotFoundError as error:
            raise ValueError(
                f"{file}: no such catalog in {os.getcwd()}. Name a YAML file of data sets."
            ) from error
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            problem = " ".join(str(error).replace('"<unicode string>", ', "").split())
            raise ValueError(f"{file}: cannot be read as YAML: {problem}") from error
        entries = _mapping({} if document is None else document, file, "names of data sets")
        return cls(file, {name: _entry(file, name, settings) for name, settings in entries.items()})

    def source(self, name: str, split: str, data_dir: str | os.PathLike | None = None) -> Source:
        """A split of a data set.

        Args:
            name: Name of an entry.
            split: One of its splits; of a TFDS data set also any slice that TFDS knows, "train[:80%]".
            data_dir: Where prepared TFDS data sets lie, for an entry without a location.

        Returns:
            A Source with the name "NAME[SPLIT]".

        Raises:
            ValueError: For an unknown name or split, and where the data are missing or not what the entry says.
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
    """A data set by name: an entry of the catalog, else a data set of TFDS.

    Args:
        name: Name of the data set.
        split: Its split.
        data_dir: Where prepared TFDS data sets lie; default: where TFDS keeps them.
        catalog: A Catalog or its file; None: TFDS alone.

    Returns:
        The Source.

    Raises:
        ValueError: For an unknown name or split, and where data are missing or not what they should be.
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
    _checked(
        path,
        common,
        {"kind": catalog_kinds.TEXT, "license": catalog_kinds.TEXT, **keys},
        ("splits",),
    )
    splits = _splits(path, kind, settings.get("splits"))
    for split, own in splits.items():
        _checked(f"{path}.splits.{split}", own, keys)
        if kind != "tfds" and "location" not in {**common, **own}:
            raise ValueError(
                f"{path}.location: it is missing, for the split {split!r}. Say where the data lie."
            )
    return Entry(name, file, common, splits)


def _checked(
    path: str,
    settings: Mapping[str, Any],
    keys: Mapping[str, tuple[str, ...]],
    others: tuple[str, ...] = (),
) -> None:
    """Raises ValueError unless all settings are known, and hold what they should."""
    for key, value in settings.items():
        if key not in keys:
            raise ValueError(f"{path}.{key}: no such key. {config.nearest(key, (*keys, *others))}")
        _check(f"{path}.{key}", keys[key], value)


def _splits(path: str, kind: str, splits: Any) -> dict[str, dict[str, Any]]:
    """Every split's own settings."""
    if splits is None:
        return {"train": {}}
    word = catalog_kinds.KINDS[kind].word
    splits = _mapping(splits, f"{path}.splits", "names of splits")
    if not splits:
        raise ValueError(
            f"{path}.splits: expected names of splits, received none. Leave the key out to have one, train."
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
    """Raises ValueError unless a setting holds one of the things expected, names in `kinds.FITS`."""
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
    """A location seen from a directory, which it may leave: "/x" and "gs://x" stand for themselves."""
    if "://" in location:
        return location
    joined = os.path.join(directory, location)
    return joined if "://" in joined else os.path.normpath(joined)


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML in which a repeated key is an error instead of the last one's silent victory."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"the key {key.value!r} appears twice; give each its own name"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)
