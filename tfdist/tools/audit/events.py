"""What a process of an audit says of itself becomes lines of a file, which others read while it runs."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from typing import Any


class Writer(contextlib.AbstractContextManager):
    """Appends events to a file, each at once.

    Example:
        >>> import tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "events")
        >>> with Writer(path) as say:
        ...     say("epoch", epoch=0, steps=3)
        ...     say("read")
        >>> last(read(path), "epoch")["steps"], last(read(path), "absent")
        (3, None)
    """

    def __init__(self, path: str | os.PathLike):
        self._file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115  closed by __exit__

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def __call__(self, event: str, **facts: Any) -> None:
        self._file.write(json.dumps({"event": event, **facts}) + "\n")


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The events of a file so far, without a line that is still being written."""
    try:
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.endswith("\n")]
    except FileNotFoundError:  # its process has only begun
        return []


def last(events: Iterable[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The last event of this name."""
    return next((event for event in reversed(list(events)) if event["event"] == name), None)
