"""A command's words become checked values, or a ValueError with the flag's name, and that one sentence and an exit code."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ValueError where Python's ends the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def refuse(command: str, error: ValueError) -> int:
    """Says on stderr what is wrong with a command line.

    Args:
        command: As it was typed, such as "tfdist doctor".
        error: What is wrong.

    Returns:
        The exit code for it.
    """
    print(f"{command}: error: {error}\nSee `{command} --help`.", file=sys.stderr)
    return 2


def whole(least: int) -> Callable[[str], int]:
    """For `type=` of a flag: a whole number, no less than `least`.

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
    """For `type=` of a flag: a number.

    Args:
        expected: Which numbers, in words for the error.
        fits: Whether a number is one of them; no comparison is true of the NaN that stands for what is no number.

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
    """A flag as one types it, from its name in the parsed flags.

    Example:
        >>> flag_of("log_dir")
        '--log-dir'
    """
    return "--" + name.replace("_", "-")


def nearest_flag(word: str, known: Sequence[str]) -> str | None:
    """The flag that a misspelt one is nearest to; None: it is near to none.

    Example:
        >>> nearest_flag("--log_dri=x", ["--workers", "--log-dir"])
        '--log-dir'
    """
    found = difflib.get_close_matches(word.partition("=")[0].replace("_", "-"), known, n=1)
    return found[0] if found else None


def no_such_flag(word: str, known: Sequence[str]) -> str:
    """What to say of a flag that a command has not.

    Example:
        >>> no_such_flag("--wrokers=2", ["--workers", "--quick"]), no_such_flag("-x", ["--workers", "--quick"])
        ('--wrokers=2: no such flag. Did you mean --workers?', '-x: no such flag. Expected one of --workers, --quick.')
    """
    nearest = nearest_flag(word, known)
    return f"{word}: no such flag. {f'Did you mean {nearest}?' if nearest else 'Expected one of ' + ', '.join(known) + '.'}"


def flags_beside_config(
    parser: argparse.ArgumentParser, argv: Sequence[str], needed: bool = True
) -> tuple[argparse.Namespace, list[str]]:
    """A command line of flags of a command's own, and words about a run's config.

    Args:
        parser: Of the flags.
        argv: The words after the command.
        needed: Whether a config file must be among them.

    Returns:
        The flags, and the words about the config.

    Raises:
        ValueError: Names the flag, what was expected and received.
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
    """Whether a word is about a run's config, and so no flag of the command's own.

    Example:
        >>> [about_config(word) for word in ("--config=a.py", "--noconfig.data.cache", "--configs")]
        [True, True, False]
    """
    return bool(re.match(r"--?(no)?config(\.|=|$)", word))
