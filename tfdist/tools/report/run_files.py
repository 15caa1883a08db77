"""Tolerant readers for JSON files: damage is recorded instead of raised."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")


class Reader:
    """Reads files, and records which files exist and which are damaged.

    Attributes:
        paths: Paths of the files that exist and could be read.
        problems: One sentence per file that is damaged or could not be read.
    """

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.problems: list[str] = []

    def bytes(self, path: Path) -> bytes | None:
        """Return the contents of a file, or None if it is missing or unreadable.

        An unreadable file is recorded as a problem.
        """
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.problems.append(
                f"{path} cannot be read: {os.strerror(error.errno) if error.errno else error}"
            )
            return None
        self.paths.append(path)
        return content

    def object(self, path: Path) -> dict[str, Any] | None:
        """Return the object in a JSON file, or None if the file is missing or damaged.

        A damaged file is recorded as a problem.
        """
        content = self.bytes(path)
        if content is None:
            return None
        value = _parse(content)
        if value is None:
            self.problems.append(
                f"{path} is damaged: expected one JSON object, received "
                f"{_excerpt(content)}; it is left out"
            )
        return value

    def lines(self, path: Path, convert: Callable[[dict[str, Any]], Value]) -> list[Value]:
        """Return the objects of a JSON Lines file; damaged lines are recorded as a problem.

        Args:
            path: Path of the file.
            convert: Function that converts an object. If it raises KeyError, TypeError, ValueError,
                AttributeError or OverflowError, the line counts as damaged.
        """
        content = self.bytes(path)
        facts = []
        bad = []
        lines = (content or b"").splitlines()
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
                f"{path}: {len(bad)} of {len(lines)} lines are damaged, the first is line "
                f"{bad[0]}; they are left out"
            )
        return facts


def number(value: Any) -> float:
    """Return a JSON value as float; infinities and NaN are allowed.

    Raises:
        ValueError: If the value is not a number.

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
    """Return a section of a JSON object.

    The result is empty if the object or the section is missing or has another type.

    Example:
        >>> (
        ...     section({"train": {"epochs": 3}, "data": 1}, "train"),
        ...     section({"data": 1}, "data"),
        ...     section(None, "data"),
        ... )
        ({'epochs': 3}, {}, {})
    """
    content = value.get(name) if isinstance(value, dict) else None
    return content if isinstance(content, dict) else {}


def _parse(content: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _excerpt(content: bytes) -> str:
    if not content:
        return "nothing"
    text = content[:24].decode(errors="replace")
    return f"{len(content)} bytes that begin with {text!r}"
