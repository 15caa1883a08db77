"""Signals that ask a process to end become an exception, so that what it has begun is ended, too; nothing is ended here."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """While the block runs, SIGTERM and SIGHUP end it with SystemExit and the code 128 + the signal.

    One that is ignored stays so: SIGHUP under `nohup`.

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
            signal.signal(
                number, signal.SIG_DFL if handler is None else handler
            )  # None: not Python's, and cannot be put back
