"""Log directories of a command's processes, and excerpts of their logs."""

from __future__ import annotations

import os
import re
from pathlib import Path

LINES = 15  # maximum number of log lines in a message

# Messages that TensorFlow writes to any log, separator lines of the launcher, and blank lines.
# Other warnings stay in the excerpt, because they may explain a failure.
_CHATTER = re.compile(
    r"\s*$|I\d{4} |[WE]\d{4} .*(cuda|gpu|GPU)|WARNING: All log messages|"
    r"To enable the following|-{20,}$"
)


def keep(directory: str) -> Path:
    """Create the log directory that you name with --keep, and check that it is empty.

    Args:
        directory: Value of the flag --keep.

    Returns:
        Path of the directory.

    Raises:
        ValueError: If the directory is not empty.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise ValueError(
            f"--keep={directory}: expected a new or empty directory; "
            f"it holds {next(path.iterdir()).name}."
        )
    return path


def end_of(path: Path) -> str:
    """Return the end of a log under a heading, to append to a message; "" for an empty log."""
    lines = tail(path, LINES)
    return "".join(f"\n  {line}" for line in [f"The end of {path.name}:", *lines]) if lines else ""


def tail(path: str | os.PathLike, most: int) -> list[str]:
    r"""Return the last lines of a log, without routine messages.

    Args:
        path: Path of the log file.
        most: Maximum number of lines.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w") as file:
        ...     _ = file.write(
        ...         "begun\nE0000 00:00:1700000000.1 7 cuda_dnn.cc:1] no GPU\n\nNo space left\n"
        ...     )
        ...     file.flush()
        ...     tail(file.name, 2)
        ['begun', 'No space left']
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    return [line for line in lines if not _CHATTER.match(line)][-most:]
