"""TensorFlow's start-up lines on standard error: which they are, and how they are hidden."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from os import _exit

from tfdist.runtime.launch_protocol import TASK

COPY_S = 1.0  # for the last lines
LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# The format of glog. 303: libcuda is a stub, so there is no GPU driver, which is not an error on a
# CPU machine. TensorFlow 2.23 adds where in its source it found that, as to other errors of CUDA.
_CHATTER = re.compile(
    r"I\d{4} [\d:.]+ +\d+ \S+:\d+\]|WARNING: All log messages before absl::InitializeLog"
    r"|E\d{4} .*failed call to cuInit.*\(303\)"
    r"|=== Source Location Trace: ===|external/xla/\S+/cuda_status\.cc:\d+$"
)


def is_chatter(line: str) -> bool:
    """Return whether a line is informational only.

    TF_CPP_MIN_LOG_LEVEL does not affect the lines of TensorFlow's first moments.

    Example:
        >>> is_chatter("I0000 00:00:1700000000.1 77 port.cc:153] oneDNN is on."), is_chatter("I am")
        (True, False)
    """
    return _CHATTER.match(line) is not None


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Hide TensorFlow's start-up lines while it is imported and finds its devices.

    All other lines on standard error appear at once, also those of a process that crashes: another
    process copies them. Nothing is hidden if the user has set TF_CPP_MIN_LOG_LEVEL, or if
    TensorFlow is already loaded. Under a launcher nothing is hidden here: the launcher hides these
    lines on the terminal, and its log files have them.
    """
    if LEVEL in os.environ or TASK in os.environ or "tensorflow" in sys.modules:
        yield
        return
    os.environ[LEVEL] = "1"
    try:
        sys.stderr.flush()
        before = os.dup(2)
    except (OSError, ValueError, AttributeError):  # there is no standard error
        yield
        return
    reading, writing = os.pipe()
    copier = os.fork()
    if not copier:
        try:
            os.close(writing)
            _copy(reading, before)
        finally:
            _exit(0)
    os.close(reading)
    os.dup2(writing, 2)
    os.close(writing)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
        # It sees the end of the pipe now, unless a process that was started meanwhile keeps it.
        end = time.monotonic() + COPY_S
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(copier, os.WNOHANG) == (0, 0) and time.monotonic() < end:
                time.sleep(0.005)


def _copy(source: int, target: int) -> None:
    """Copy a pipe's lines, but not those of TensorFlow's start, until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    unfinished = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(source, 1 << 16):
            *lines, unfinished = (unfinished + chunk).split(b"\n")
            kept = [line + b"\n" for line in lines if not is_chatter(line.decode(errors="replace"))]
            os.write(target, b"".join(kept))
        os.write(target, unfinished)
