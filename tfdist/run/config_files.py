"""Config files of a run, in Python or YAML, read into a `ConfigDict` of settings."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import runpy
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist import config
from tfdist.config import packaged, reference, user_functions
from tfdist.config.checks import hint, typed
from tfdist.config.sections import LAUNCH
from tfdist.runtime import yaml_files

if TYPE_CHECKING:
    from ml_collections import ConfigDict

BASE = "base"  # key of a YAML file that names the config that it changes


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a config file.

    Attributes:
        values: The settings.
        places: Place of each key that a YAML file sets, as "FILE, line 3".
    """

    values: ConfigDict
    places: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def locate(self, error: ValueError) -> ValueError:
        """Return an error whose message begins with the place of its key, if it has one.

        Args:
            error: Error whose message begins with a key and a colon.
        """
        parts = str(error).partition(": ")[0].split(".")
        for end in range(len(parts), min(1, len(parts) - 1), -1):  # not down to the section
            if place := self.places.get(".".join(parts[:end])):
                return ValueError(f"{place}: {error}")
        return error

    def without(self, key: str) -> Settings:
        """Return settings without the places of a key and of those in it."""
        places = {
            name: place
            for name, place in self.places.items()
            if name != key and not name.startswith(f"{key}.")
        }
        return dataclasses.replace(self, places=places)


def load(name: str) -> Settings:
    """Return the settings of a config file.

    Args:
        name: Value of `--config`: a Python file that defines get_config(), a YAML file, or the name
            of a packaged config. After a colon, text for get_config().

    Raises:
        ValueError: If the file is missing or wrong. The message names the file, the key and the
            line, as far as they are known.
    """
    path, colon, text = name.partition(":")
    file = packaged.find(path)
    if not file.endswith(yaml_files.ENDINGS):
        return Settings(_of_python(path, file, [text] if colon else []))
    if colon:
        raise ValueError(
            f"--config={name}: expected no text after the name of a YAML file, received {text!r}."
        )
    return _of_yaml(file, ())


def _of_python(path: str, file: str, text: Sequence[str]) -> ConfigDict:
    """Return the result of get_config() in a file."""
    from ml_collections import ConfigDict

    try:
        result = runpy.run_path(file)["get_config"](*text)
    except Exception as error:
        raise user_functions.failed(f"--config={path}", error) from error
    if not isinstance(result, ConfigDict):
        raise ValueError(
            f"--config={path}: expected get_config() to return a changed tfdist.config.default(), "
            f"received {result!r}."
        )
    return result


def _of_yaml(file: str, below: tuple[str, ...]) -> Settings:
    """Return the settings of a YAML file, as changes of its base or of the defaults.

    Args:
        file: Path of the file.
        below: Files that have this one as their base, directly or not.
    """
    if os.path.realpath(file) in map(os.path.realpath, below):
        raise ValueError(
            f"{below[-1]}: {BASE}: expected a config that does not depend on this file, received "
            f"{file}, which does: {' -> '.join((*below, file))}."
        )
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: expected UTF-8 text, received {error.reason}.") from error
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}.") from error
    try:
        document, lines = yaml_files.parse_settings(text)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if not isinstance(document, dict):
        found = "nothing" if document is None else f"{type(document).__name__} {document!r}"
        raise ValueError(
            f"{file}: expected a mapping of keys, such as `train: {{epochs: 3}}`; received {found}."
        )
    places = {key: f"{file}, line {line}" for key, line in lines.items()}
    result = _base(file, places.get(BASE, file), document, below)
    for key, value in document.items():
        if key != BASE:
            try:
                _set(result.values, key, value, os.path.dirname(file))
            except ValueError as error:
                raise Settings(result.values, places).locate(error) from error
    return Settings(result.values, {**result.places, **places})


def _base(file: str, place: str, document: Mapping[str, Any], below: tuple[str, ...]) -> Settings:
    """Return the settings of the config that a YAML file changes: its base, or the defaults."""
    if BASE not in document:
        return Settings(config.default())
    name = document[BASE]
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"{place}: {BASE}: expected the name of a config, such as digits or common.yaml; "
            f"received {name!r}."
        )
    path, colon, text = name.partition(":")
    beside = os.path.join(os.path.dirname(file), path)
    if not os.path.isfile(beside) and path not in packaged.names():
        raise ValueError(
            f"{place}: {BASE}: expected a file beside this one or a packaged config "
            f"({', '.join(packaged.names())}), received {name!r}."
        )
    if beside.endswith(yaml_files.ENDINGS) and not colon:
        return _of_yaml(beside, (*below, file))
    try:
        return load((beside if os.path.isfile(beside) else path) + colon + text)
    except ValueError as error:
        raise ValueError(f"{place}: {BASE}: {error}") from error


def _set(values: ConfigDict, key: Any, value: Any, directory: str) -> None:
    """Set a key outside of all sections, or the keys of a section.

    Args:
        values: Settings to change.
        key: Key of the YAML file.
        value: Its value.
        directory: Directory of the file.
    """
    _check_name(key, str(key))
    if key != LAUNCH:
        config.check_key(key)
    kinds = typing.get_type_hints(config.Run)
    if key != LAUNCH and not dataclasses.is_dataclass(kinds[key]):
        values[key] = typed(key, value, kinds[key])
        return
    if value is None:  # a section whose lines are all comments
        return
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}: expected a section of keys, received {value!r}.")
    for name, inner in value.items():
        _check_name(name, f"{key}.{name}")
        if key == LAUNCH:
            values[key][name] = inner
        else:
            config.check_key(f"{key}.{name}")
            inner = _value(f"{key}.{name}", inner, directory)
            # At once, because the command line takes the type of a value from the file.
            values[key][name] = typed(f"{key}.{name}", inner, hint(kinds[key], name, key))


def _value(key: str, value: Any, directory: str) -> Any:
    """Return a value of a section as a config file in Python would have it."""
    words = key in reference.WORDS
    if words and isinstance(value, list) and all(isinstance(word, str) for word in value):
        value = ", ".join(value)
    if key in user_functions.KEYS and isinstance(value, str):
        parts = value.split(",") if words else [value]
        return ",".join(_beside(part.strip(), directory) for part in parts)
    return _plain(key, value)


def _beside(text: str, directory: str) -> str:
    """Return FILE.py:FUNCTION with the path of the file, if it is in a directory."""
    if not user_functions.in_file(text) or not directory:
        return text
    path = os.path.join(directory, text)
    return path if os.path.isfile(path.rpartition(":")[0]) else text


def _plain(key: str, value: Any) -> Any:
    """Return a value with tuples for lists, which the command line can change."""
    if isinstance(value, list):
        return tuple(_plain(key, inner) for inner in value)
    if not isinstance(value, dict):
        return value
    for name in value:
        if "." in str(name):
            short = f"{key}.{name}".rpartition(":")[2]
            raise ValueError(
                f"{key}.{name}: expected a name without a dot, received {name!r}. Options of a "
                f"function of your own have its name, such as {short}."
            )
    return {name: _plain(f"{key}.{name}", inner) for name, inner in value.items()}


def _check_name(name: Any, key: str) -> None:
    if not isinstance(name, str):
        raise ValueError(f"{key}: expected the name of a key, received {name!r}.")


def main(argv: Sequence[str]) -> None:
    """Print the section `launch` of a config file as JSON, for the launcher."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            section = load(":".join(argv)).values[LAUNCH].to_dict()
        print(json.dumps({"section": section}), flush=True)
    except (ValueError, TypeError) as error:
        print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
