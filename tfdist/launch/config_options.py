"""Options of a launch from the section `launch` of a config file."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tfdist.launch.config_reader import SECTION
from tfdist.runtime import yaml_files
from tfdist.runtime.cli_arguments import Parser, config_files, flag_of, nearest_flag
from tfdist.runtime.command import Defaults
from tfdist.runtime.launch_protocol import environment

READ_S = 60.0  # for get_config()
YAML_READER = "tfdist.run.config_files"  # also reads the bases of a file
NONE = "none"  # value of --config for no file
SEPARATORS = {"env": "=", "volume": ":"}  # of a name and its value, in options that are repeatable
FLAGS_ONLY = ("config", "dry_run", "help")


def add_flag(parser) -> None:
    """Add --config to a parser."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"config file whose section `{SECTION}` has defaults for these flags (that of "
        f"`tfdist train` in COMMAND); {NONE}: no file",
    )


def from_section(
    others: Collection[str],
) -> Callable[[Parser, Sequence[str], Sequence[str]], Defaults]:
    """Return a function that finds the defaults of a command's flags in a config file.

    Args:
        others: Names of options that only another command has, which are left to it.
    """
    return functools.partial(_find, others)


def _find(
    others: Collection[str], parser: Parser, own: Sequence[str], command: Sequence[str]
) -> Defaults:
    path = _config_file(own, command)
    if path is None:
        return Defaults()
    source = f"{SECTION}.{{}} in {path}; flags prevail, and `--config {NONE}` reads no file"
    given = {word.partition("=")[0] for word in own}
    words = []
    # The engine comes first: the other options depend on it.
    for key, value in sorted(read_section(path).items(), key=lambda item: item[0] != "on"):
        if key not in others and (key in SEPARATORS or flag_of(key) not in given):
            words += _words(parser, path, key, value, source)
    return Defaults(words, source)


def _config_file(own: Sequence[str], command: Sequence[str]) -> str | None:
    """Return the config file that the command line names; None if there is none to read."""
    files = config_files(own)
    if files:
        return None if files[-1] == NONE else files[-1]
    if list(command[:2]) != ["tfdist", "train"]:
        return None
    for word in command[2:]:
        key = word.lstrip("-").removeprefix("no")
        if key.startswith(f"config.{SECTION}."):
            name = key.partition("=")[0].rpartition(".")[2]
            raise ValueError(
                f"{word}: expected an option of the launch as a flag before `--`, such as "
                f"{flag_of(name)}; received it as a key for `tfdist train`"
            )
    files = config_files(command)
    return files[0] if files and _names_section(files[0].partition(":")[0]) else None


def _names_section(path: str) -> bool:
    """Return whether the text of a config file has the section.

    Running the file could take the seconds of an import of TensorFlow. The file may also be only on
    other machines, or in an image.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return False
    if path.endswith(yaml_files.ENDINGS):  # the base may have the section
        return bool(re.search(rf"""^['"]?({SECTION}|base)\b""", text, re.MULTILINE))
    return bool(re.search(rf"""[.]{SECTION}\b|['"]{SECTION}['"]""", text))


def read_section(file: str) -> dict[str, Any]:
    """Return the section `launch` of a config file.

    Args:
        file: Path of the file; after a colon, text for its `get_config`.

    Raises:
        ValueError: If the file is missing or wrong. The message names it.
    """
    path, *text = file.split(":", 1)
    module = YAML_READER if path.endswith(yaml_files.ENDINGS) else "tfdist.launch.config_reader"
    if not os.path.isfile(path):
        raise ValueError(
            f"--config: expected a Python file that defines get_config(), or a YAML file; received "
            f"{path!r}, which is not in {os.getcwd()}"
        )
    try:
        result = subprocess.run(
            [sys.executable, "-m", module, path, *text],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=READ_S,
        )
        found = json.loads(result.stdout)
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"{path}: expected a config, but get_config() did not return within {READ_S:g} s"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{path}: expected a config, but the process that reads it ended with code "
            f"{result.returncode}"
        ) from error
    if "error" in found:
        named = str(found["error"]).startswith(path)
        raise ValueError(found["error"] if named else f"{path}: {found['error']}")
    return found["section"]


def _words(parser: Parser, path: str, key: str, value: Any, source: str) -> list[str]:
    """Return the words of the command line that an option stands for."""
    flag = flag_of(key)
    place = f"{path}: {SECTION}.{key}"
    if flag not in parser.flags or key in FLAGS_ONLY:
        near = nearest_flag(flag, parser.flags)
        raise ValueError(
            f"{place}: expected an option of `{parser.prog}`, which has no {flag}; "
            + (
                f"did you mean {near.removeprefix('--').replace('-', '_')}?"
                if near
                else f"`{parser.prog} --help` lists them"
            )
        )
    if value is None or value is False:
        return []
    words = [flag] if value is True else [f"{flag}={text}" for text in _texts(place, key, value)]
    try:
        parsed = vars(parser.parse_known_args(words)[0])[key]
    except ValueError as error:
        if value is True:
            raise ValueError(f"{place}: expected a value for {flag}, received True") from error
        raise Defaults(words, source).locate(error, ()) from error
    if isinstance(value, list | dict) and not isinstance(parsed, list):
        raise ValueError(f"{place}: expected one value for {flag}, received {value!r}")
    return words


def _texts(place: str, key: str, value: Any) -> list[str]:
    named = isinstance(value, Mapping) and key in SEPARATORS
    values = [*value.values()] if named else value if isinstance(value, list) else [value]
    for each in values:
        if isinstance(each, bool) or not isinstance(each, str | int | float):
            raise ValueError(
                f"{place}: expected text, a number, true or false"
                + (", or a list or mapping of texts" if key in SEPARATORS else "")
                + f"; received {value!r}"
            )
    if not named:
        return [str(each) for each in values]
    return [f"{name}{SEPARATORS[key]}{each}" for name, each in value.items()]
