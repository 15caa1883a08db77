"""Command-line parsing helpers that report errors as ValueError with the name of the flag."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from tfdist.runtime.formatting import parse_bytes


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ValueError where argparse would exit the process."""

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser.error`; raise ValueError instead of exiting."""
        raise ValueError(message.removeprefix("argument "))

    @property
    def flags(self) -> list[str]:
        """Return the flags as `--help` lists them, each in its longest form."""
        return re.findall(r"^  (?:-\w, )?(--?[\w-]+)", self.format_help(), re.MULTILINE)


def whole(least: int) -> Callable[[str], int]:
    """Return a converter for the `type=` of a flag that accepts integers of at least `least`.

    Example:
        >>> whole(1)("7")
        7
    """

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {least}, received {text!r}"
            )
        return int(text)

    return convert


def number_or_variable(flag: str, text: str, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number in the value of a flag, or in the environment variable that it names.

    Args:
        flag: Flag, for messages.
        text: A whole number of at least 0, or the name of a variable, which a scheduler sets.
        environ: Environment variables.

    Raises:
        ValueError: If there is no such number.

    Example:
        >>> number_or_variable("--index", "3"), number_or_variable("--index", "ID", {"ID": "4"})
        (3, 4)
    """
    value = text if text.isdecimal() else environ.get(text, "")
    if not value.isdecimal():
        found = f", which is {value!r}" if value else ", which is not set" if text else ""
        raise ValueError(
            f"{flag}: expected a whole number of at least 0, or the name of an environment "
            f"variable with one, such as SLURM_ARRAY_TASK_ID; received {text!r}{found}."
        )
    return int(value)


def real(expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a converter for the `type=` of a flag that accepts floats.

    Args:
        expected: Description of the accepted numbers, for the error message.
        fits: Predicate that accepts a number. Text that is not a number is passed to it as NaN, for
            which every comparison is false.

    Example:
        >>> real("seconds above 0", lambda seconds: seconds > 0)("2.5")
        2.5
        >>> real("seconds above 0", lambda seconds: seconds > 0)("soon")
        Traceback (most recent call last):
        argparse.ArgumentTypeError: expected seconds above 0, received 'soon'
    """

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not fits(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, received {text!r}")
        return value

    return convert


def byte_count(unit_required: bool = False) -> Callable[[str], int]:
    """Return a converter for the `type=` of a flag, which takes what `parse_bytes` takes.

    Args:
        unit_required: Whether a number without a unit is an error.
    """

    def convert(text: str) -> int:
        try:
            return parse_bytes(text, unit_required)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def flag_of(name: str) -> str:
    """Return the flag as the user types it, from its name in the parsed namespace.

    Example:
        >>> flag_of("log_dir")
        '--log-dir'
    """
    return "--" + name.replace("_", "-")


def nearest_flag(word: str, known: Sequence[str]) -> str | None:
    """Return the known flag closest to a misspelt one, or None if no flag is close.

    Example:
        >>> nearest_flag("--log_dri=x", ["--workers", "--log-dir"])
        '--log-dir'
    """
    nearest = difflib.get_close_matches(word.partition("=")[0].replace("_", "-"), known, n=1)
    return nearest[0] if nearest else None


def no_such_flag(word: str, known: Sequence[str], remedy: str = "") -> str:
    """Return the error message for a flag that a command does not have.

    Args:
        word: The flag as the user typed it.
        known: Flags that the command has.
        remedy: Sentence for a flag that is not close to a known one; default: lists those.

    Example:
        >>> no_such_flag("--wrokers=2", ["--workers", "--quick"])
        '--wrokers=2: no such flag. Did you mean --workers?'
        >>> no_such_flag("-x", ["--workers", "--quick"])
        '-x: no such flag. Expected one of --workers, --quick.'
    """
    if nearest := nearest_flag(word, known):
        remedy = f"Did you mean {nearest}?"
    return f"{word}: no such flag. {remedy or 'Expected one of ' + ', '.join(known) + '.'}"


def split_config(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide a command line into a command's own words and those about the run's config.

    Example:
        >>> split_config(["--workers", "2", "--config", "a.py", "--config.name=x", "--json"])
        (['--workers', '2', '--json'], ['--config', 'a.py', '--config.name=x'])
    """
    own: list[str] = []
    config: list[str] = []
    value_follows = False
    for word in argv:
        if about_config(word):
            config.append(word)
            value_follows = "=" not in word and not word.lstrip("-").startswith("no")
        else:
            is_value = value_follows and not re.match(r"-\D", word)
            (config if is_value else own).append(word)
            value_follows = False
    return own, config


def config_files(words: Sequence[str]) -> list[str]:
    """Return the values of `--config` among the words about a config.

    Example:
        >>> config_files(["--config", "a.py", "--config.train.epochs=3", "--config=b.py:TEXT"])
        ['a.py', 'b.py:TEXT']
    """
    return [
        word.partition("=")[2] if "=" in word else following
        for word, following in zip(words, [*words, ""][1:], strict=True)
        if re.match(r"--?config(=|$)", word)
    ]


def require_config(words: Sequence[str]) -> None:
    """Raise ValueError if the words about the config name no config file."""
    if not config_files(words):
        raise ValueError(
            "--config: expected a config file, such as --config=configs/digits.py; received none"
        )


def about_config(word: str) -> bool:
    """Return whether a word belongs to the run's config instead of the command's own flags.

    Example:
        >>> [about_config(word) for word in ("--config=a.py", "--noconfig.data.cache", "--configs")]
        [True, True, False]
    """
    return bool(re.match(r"--?(no)?config(\.|=|$)", word))
