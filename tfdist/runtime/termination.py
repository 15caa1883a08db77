"""End of this process: signals become SystemExit, and handlers learn of an exception."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator


def ends_by_exception() -> bool:
    """Return, in a handler of `atexit`, whether an exception ends this process."""
    return getattr(sys, "last_value", None) is not None


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit with the code 128 + signal while the block runs.

    A signal that is ignored stays ignored: SIGHUP under `nohup`.

    Example:
        >>> with ending():
        ...     signal.raise_signal(signal.SIGTERM)
        Traceback (most recent call last):
        SystemExit: 143
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {
        number: handler for number, handler in before.items() if handler is not signal.SIG_IGN
    }
    for number in before:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: the handler was not installed from Python and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
