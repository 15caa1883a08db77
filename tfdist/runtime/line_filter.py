"""Line filter: copies standard input to standard error, without lines of a pattern.

It is run as a file in a process of its own, and imports nothing of tfdist.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys

_CHUNK = 1 << 16  # bytes


def copy(source: int, target: int, pattern: re.Pattern[str]) -> None:
    """Copy the lines of a file that do not begin with a match, until the file ends.

    Args:
        source: File descriptor to read, such as that of a pipe.
        target: File descriptor to write.
        pattern: Pattern of the lines to leave out.
    """
    unfinished = b""
    while chunk := os.read(source, _CHUNK):
        *lines, unfinished = (unfinished + chunk).split(b"\n")
        kept = [line + b"\n" for line in lines if not pattern.match(line.decode(errors="replace"))]
        _write(target, b"".join(kept))
    _write(target, unfinished)


def _write(target: int, content: bytes) -> None:
    while content:
        content = content[os.write(target, content) :]


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        copy(0, 2, re.compile(sys.argv[1]))
