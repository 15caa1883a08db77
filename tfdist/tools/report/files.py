"""Files become JSON values; what is missing or damaged is noted, and nothing is raised for it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")


class Reader:
    """Reads files, and remembers which it found, and what was wrong with them.

    Attributes:
        found: The files that were there.
        problems: One sentence for each file that is damaged, or could not be read.
    """

    def __init__(self) -> None:
        self.found: list[Path] = []
        self.problems: list[str] = []

    def bytes(self, path: Path) -> bytes | None:
        """What a file holds; None: it is missing, or cannot be read, which is noted."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.problems.append(
                f"{path} cannot be read: {os.strerror(error.errno) if error.errno else error}"
            )
            return None
        self.found.append(path)
        return content

    def object(self, path: Path) -> dict[str, Any] | None:
        """The object in a JSON file; None: it is missing, or damaged, which is noted."""
        content = self.bytes(path)
        if content is None:
            return None
        value = _parse(content)
        if value is None:
            self.problems.append(
                f"{path} is damaged: expected one JSON object, received {_glimpse(content)}; it is left out"
            )
        return value

    def lines(self, path: Path, convert: Callable[[dict[str, Any]], Value]) -> list[Value]:
        """The objects of a file of JSON lines; lines that are damaged are noted.

        Args:
            path: The file.
            convert: Makes a fact of an object. A KeyError, TypeError, ValueError, AttributeError or OverflowError of it: the line is damaged.
        """
        content = self.bytes(path)
        facts, bad, lines = [], [], (content or b"").splitlines()
        for number, line in enumerate(lines, 1):
            value = _parse(line)
            try:
                if value is None:
                    raise ValueError
                facts.append(convert(value))
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                bad.append(number)
        if bad == [len(lines)]:
            self.problems.append(
                f"{path}: its last line, {bad[0]}, is cut off or damaged, and is left out"
            )
        elif bad:
            self.problems.append(
                f"{path}: {len(bad)} of {len(lines)} lines are damaged, the first is line {bad[0]}; they are left out"
            )
        return facts


def number(value: Any) -> float:
    """A JSON value that must be a number; infinities and NaN are numbers here.

    Example:
        >>> number(3), number(float("inf"))
        (3.0, inf)
        >>> number("3")
        Traceback (most recent call last):
        ValueError: expected a number, received '3'
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number, received {value!r}")
    return float(value)


def section(value: Any, name: str) -> dict[str, Any]:
    """A section of a JSON object; empty where either is missing, or something else.

    Example:
        >>> section({"train": {"epochs": 3}, "data": 1}, "train"), section({"data": 1}, "data"), section(None, "data")
        ({'epochs': 3}, {}, {})
    """
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _parse(content: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _glimpse(content: bytes) -> str:
    if not content:
        return "nothing"
    text = content[:24].decode(errors="replace")
    return f"{len(content)} bytes that begin with {text!r}"
