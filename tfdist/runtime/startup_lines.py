"""TensorFlow's start-up lines on standard error: which they are, and how they are hidden."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tfdist.runtime import line_filter
from tfdist.runtime.launch_protocol import TASK

COPY_S = 1.0  # for the last lines
LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_NO_INFO = "1"
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
    """Hide TensorFlow's start-up lines while it is imported or finds its devices.

    All other lines on standard error appear when they end, also those of a process that crashes:
    another process copies them. That process is not a fork, which would be unsafe beside
    TensorFlow's threads. TensorFlow's own lines of level INFO stay hidden, because it reads the
    level once. Nothing is hidden if the user has set TF_CPP_MIN_LOG_LEVEL. Under a launcher
    nothing is hidden here: the launcher hides these lines on the terminal, and its log files have
    them.
    """
    copier = None if LEVEL in os.environ or TASK in os.environ else _redirect()
    if copier is None:
        yield
        return
    process, before = copier
    os.environ[LEVEL] = _NO_INFO
    try:
        yield
    finally:
        # TensorFlow has read it. Processes that this one starts hide their own lines.
        if os.environ.get(LEVEL) == _NO_INFO:
            del os.environ[LEVEL]
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
        # It sees the end of the pipe now, unless a process that was started meanwhile keeps it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(COPY_S)


@functools.cache  # TensorFlow looks once in a process
def find_devices(tensorflow: Any) -> None:
    """Let TensorFlow find the devices of this machine, without its start-up lines.

    Args:
        tensorflow: Module, which the callers that need no TensorFlow do not import.
    """
    with hidden():
        tensorflow.config.list_physical_devices("GPU")


def _redirect() -> tuple[subprocess.Popen, int] | None:
    """Put a pipe to a copying process in the place of standard error.

    Returns:
        The process, and a file descriptor of the former standard error; None if there is no
        standard error, or no process of Python can be started.
    """
    # Where Python is embedded or frozen, it is another program, or None.
    if "python" not in os.path.basename(sys.executable or "") or getattr(sys, "frozen", False):
        return None
    try:
        sys.stderr.flush()
        before = os.dup(2)
    except (OSError, ValueError, AttributeError):  # there is no standard error
        return None
    try:
        reading, writing = os.pipe()
    except OSError:
        os.close(before)
        return None
    try:
        process = subprocess.Popen(
            # -I and -S: without site-packages, it starts in some 20 ms.
            [sys.executable, "-I", "-S", line_filter.__file__, _CHATTER.pattern],
            stdin=reading,
            stdout=subprocess.DEVNULL,
            stderr=before,
            start_new_session=True,  # Ctrl-C in a terminal does not reach it
        )
        os.dup2(writing, 2)
    except OSError:
        os.close(before)
        return None
    finally:
        os.close(reading)
        os.close(writing)
    return process, before
