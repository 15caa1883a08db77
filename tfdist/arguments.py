"""A command's words become checked values, or a ValueError with the flag's name; nothing is printed and no process ends here."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ValueError where Python's ends the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def whole(least: int) -> Callable[[str], int]:
    """For `type=` of a flag: a whole number, no less than `least`.

    Example:
        >>> whole(1)("7")
        7
    """

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, received {text!r}")
        return int(text)

    return convert
