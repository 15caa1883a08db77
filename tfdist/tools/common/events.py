"""Event files: JSON Lines in which child processes report their progress.

Other processes read a file while its owner still writes to it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from typing import Any


class Writer(contextlib.AbstractContextManager):
    """Appends events to a file, each one immediately.

    Example:
        >>> import tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "events")
        >>> with Writer(path) as write:
        ...     write("epoch", epoch=0, steps=3)
        ...     write("read")
        >>> last(read(path), "epoch")["steps"], last(read(path), "absent")
        (3, None)
    """

    def __init__(self, path: str | os.PathLike):
        # Closed by `__exit__`.
        self._file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def __call__(self, event: str, **facts: Any) -> None:
        """Append an event with these facts."""
        self._file.write(json.dumps({"event": event, **facts}) + "\n")


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Return the events of a file so far, without a line that is still being written.

    Raises:
        ValueError: If a line is damaged; the message names the file and the line.
    """
    try:
        with open(path, "rb") as file:
            lines = [line for line in file if line.endswith(b"\n")]
    except FileNotFoundError:  # its process has only just started
        return []
    return [_event(line, f"{os.fspath(path)}, line {i}") for i, line in enumerate(lines, 1)]


def _event(line: bytes, where: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise ValueError("expected an event")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: damaged: {error}. Run the command again.") from error
    return event


def named(path: str | os.PathLike, name: str) -> list[dict[str, Any]]:
    """Return the events with this name of a file so far."""
    return [event for event in read(path) if event["event"] == name]


def last(events: Iterable[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Return the last event with this name, or None."""
    return next((event for event in reversed(list(events)) if event["event"] == name), None)
