"""Where a command's processes keep their logs, and the last lines of one that a person wants to read; no process is looked at here."""

from __future__ import annotations

import os
import re
from pathlib import Path

# What TensorFlow says in any log, rules of the launcher, and blank lines. What else warns may be the reason.
_CHATTER = re.compile(
    r"\s*$|I\d{4} |[WE]\d{4} .*(cuda|gpu|GPU)|WARNING: All log messages|To enable the following|-{20,}$"
)


def keep(directory: str) -> Path:
    """The directory that a user has named for them, made where it is not there.

    Args:
        directory: After the flag --keep.

    Raises:
        ValueError: It holds something.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise ValueError(
            f"--keep={directory}: expected a new or empty directory; it holds {next(path.iterdir()).name}."
        )
    return path


def tail(path: str | os.PathLike, most: int) -> list[str]:
    r"""The end of a log.

    Args:
        path: The file.
        most: Lines, at most.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w") as file:
        ...     _ = file.write("begun\nE0000 00:00:1700000000.1 7 cuda_dnn.cc:1] no GPU\n\nNo space left\n")
        ...     file.flush()
        ...     tail(file.name, 2)
        ['begun', 'No space left']
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    return [line for line in lines if not _CHATTER.match(line)][-most:]
