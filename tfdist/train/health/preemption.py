"""Preemption: turns SIGTERM into a flag that training checks between two steps.

TensorFlow's coordination service takes SIGTERM and goes on training. While this module listens,
Python receives the signal instead. A process that is blocked in TensorFlow runs no signal handler,
so a thread counts the signals, and ends the process at the second one, unless a scheduler repeats
the first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from os import _exit as end_at_once

from tfdist.runtime.launch_protocol import PREEMPTED_CODE, gets_repeated_signals

SIGNAL = signal.SIGTERM

_requested = threading.Event()


class Preempted(SystemExit):
    """Exit of a process that was asked to end, after the state of training was saved."""

    def __init__(self):
        super().__init__(PREEMPTED_CODE)


def requested() -> bool:
    """Return whether this process was asked to end since `listening` began."""
    return _requested.is_set()


def resend() -> None:
    """Send the signal once more, to its current handler."""
    os.kill(os.getpid(), SIGNAL)


def can_listen() -> bool:
    """Return whether this is the main thread, the only one that may set signal handlers."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Make SIGTERM set `requested` in this context; a second one ends the process at once.

    Outside of the main thread, where Python allows no signal handlers, this does nothing.
    """
    if not can_listen():
        yield
        return
    _requested.clear()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    thread = threading.Thread(
        target=_count_signals, args=(reader,), name="tfdist-preemption", daemon=True
    )
    thread.start()
    before = signal.signal(SIGNAL, lambda *_: _requested.set())
    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        # None means that the handler was not Python's but TensorFlow's. It cannot be restored, and
        # it swallowed the signal.
        signal.signal(SIGNAL, signal.SIG_DFL if before is None else before)
        writer.close()
        thread.join()
        reader.close()
        _requested.clear()


def _count_signals(reader: socket.socket) -> None:
    """Read the numbers of the signals as they arrive, until the other end is closed."""
    count = 0
    while numbers := reader.recv(64):
        count += numbers.count(bytes([SIGNAL]))
        if count:
            _requested.set()  # Python runs the handler only when TensorFlow returns
        if count > 1 and not gets_repeated_signals():
            end_at_once(128 + SIGNAL)
