"""Command-line parsing helpers that report errors as ValueError with the name of the flag."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ValueError where argparse would exit the process."""

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser.error`; raise ValueError instead of exiting."""
        raise ValueError(message.removeprefix("argument "))


def refuse(command: str, error: ValueError) -> int:
    """Print on stderr what is wrong with a command line.

    Args:
        command: The command as the user typed it, such as "tfdist doctor".
        error: The fault.

    Returns:
        The exit code for a wrong command line, 2.
    """
    print(f"{command}: error: {error}\nSee `{command} --help`.", file=sys.stderr)
    return 2


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
    found = difflib.get_close_matches(word.partition("=")[0].replace("_", "-"), known, n=1)
    return found[0] if found else None


def no_such_flag(word: str, known: Sequence[str]) -> str:
    """Return the error message for a flag that a command does not have.

    Example:
        >>> no_such_flag("--wrokers=2", ["--workers", "--quick"])
        '--wrokers=2: no such flag. Did you mean --workers?'
        >>> no_such_flag("-x", ["--workers", "--quick"])
        '-x: no such flag. Expected one of --workers, --quick.'
    """
    nearest = nearest_flag(word, known)
    return (
        f"{word}: no such flag. "
        f"{f'Did you mean {nearest}?' if nearest else 'Expected one of ' + ', '.join(known) + '.'}"
    )


def flags_beside_config(
    parser: argparse.ArgumentParser, argv: Sequence[str], needed: bool = True
) -> tuple[argparse.Namespace, list[str]]:
    """Parse a command line that mixes a command's own flags with flags of the run's config.

    Args:
        parser: Parser of the command's own flags.
        argv: Words after the command.
        needed: Whether the command requires a config file, default True.

    Returns:
        The parsed flags, and the words that belong to the config.

    Raises:
        ValueError: If a flag is unknown or wrong. The message names the flag, the expected and the
            received value.
    """
    flags, words = parser.parse_known_args(argv)
    unknown = [word for word in words if word.startswith("-") and not about_config(word)]
    if unknown:
        raise ValueError(no_such_flag(unknown[0], ["--config", *map(flag_of, vars(flags))]))
    if needed and not any(re.match(r"--?config(=|$)", word) for word in words):
        raise ValueError(
            "--config: expected a config file, such as --config=configs/digits.py; received none"
        )
    return flags, words


def about_config(word: str) -> bool:
    """Return whether a word belongs to the run's config instead of the command's own flags.

    Example:
        >>> [about_config(word) for word in ("--config=a.py", "--noconfig.data.cache", "--configs")]
        [True, True, False]
    """
    return bool(re.match(r"--?(no)?config(\.|=|$)", word))
