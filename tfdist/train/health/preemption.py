"""A signal that asks a process to end becomes a question that training asks itself between two steps.

TensorFlow's coordination service takes SIGTERM and goes on training; while this listens, Python has it instead. A process that is
blocked in TensorFlow runs no signal handler, so a thread counts the signals, and ends the process at the second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from os import _exit as end_at_once

from tfdist.runtime.launch_protocol import PREEMPTED_CODE

SIGNAL = signal.SIGTERM

_asked = threading.Event()


class Preempted(SystemExit):
    """The process was asked to end, and the state of training is saved."""

    def __init__(self):
        super().__init__(PREEMPTED_CODE)


def asked() -> bool:
    """Whether this process was asked to end since somebody listens."""
    return _asked.is_set()


def ask_again() -> None:
    """Sends the signal once more, to whoever handles it now."""
    os.kill(os.getpid(), SIGNAL)


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Within it SIGTERM sets `asked`, and a second one ends the process at once.

    Outside of the main thread, where Python allows no signal handlers, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _asked.clear()
    ours, pythons = socket.socketpair()
    pythons.setblocking(False)
    thread = threading.Thread(target=_count, args=(ours,), name="tfdist-preemption", daemon=True)
    thread.start()
    before = signal.signal(SIGNAL, lambda *_: _asked.set())
    descriptor = signal.set_wakeup_fd(pythons.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        # None: a handler that is not Python's, TensorFlow's; it cannot be put back, and swallowed the signal.
        signal.signal(SIGNAL, signal.SIG_DFL if before is None else before)
        pythons.close()
        thread.join()
        ours.close()
        _asked.clear()


def _count(ours: socket.socket) -> None:
    """Reads the numbers of the signals as they come, until the other end is closed."""
    count = 0
    while numbers := ours.recv(64):
        count += numbers.count(bytes([SIGNAL]))
        if count:
            _asked.set()  # the handler itself waits until TensorFlow returns
        if count > 1:
            end_at_once(128 + SIGNAL)
