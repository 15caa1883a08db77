"""End of this process: signals as SystemExit or deferred; handlers learn of an exception."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
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


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Call the handlers of SIGINT, SIGTERM and SIGHUP when the block has ended.

    No exception of a handler then comes between the start of a child process and the note of its
    number. A child that starts in the block does not inherit this, unlike a mask of signals. In a
    thread there is nothing to do: Python calls handlers in the main thread.

    Example:
        >>> with ending(), deferred_signals():
        ...     signal.raise_signal(signal.SIGTERM)
        ...     child = 17
        Traceback (most recent call last):
        SystemExit: 143
        >>> child
        17
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    handlers = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if callable(handler := signal.getsignal(number))
    }
    for number in handlers:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
