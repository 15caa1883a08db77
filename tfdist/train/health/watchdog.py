"""Calls that wait for other workers become bounded: one in which no step is made for too long is ended by an error that names them.

TensorFlow's own bound, `CommunicationOptions(timeout_seconds=...)`, starts a thread for each collective, which then sleeps that long
(tensorflow/core/common_runtime/base_collective_executor.cc): at some fifty collectives a second a process runs out of threads within
ten minutes. Here one thread looks at all calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.keras_compat import abort_collectives
from tfdist.parallel.placement import Placement

LOOKS = 8  # how often a call is looked at within the bound


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    sign: Callable[[], Any] | None


class Watchdog:
    """How long the calls of this process wait for other workers.

    Args:
        seconds: Without a step; it may take a quarter longer until the call ends. Infinite: for ever.
        placement: Who the others are; where there are none, nothing is bounded.
    """

    def __init__(self, seconds: float = math.inf, placement: Placement | None = None):
        self._seconds = seconds if placement is not None and placement.workers > 1 else math.inf
        self._placement = placement
        self._lock = threading.Lock()
        self._calls: list[_Call] = []  # one within the other
        self._ended: str | None = None  # the cause
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def bound(self, sign: Callable[[], Any] | None = None) -> Iterator[None]:
        """Bounds what the block calls, its own work and the wait for its data included.

        Args:
            sign: Gives, in another thread, what changes with each step of a call of many; None: there is one.

        Raises:
            TimeoutError: No step was made for too long. No call can wait for other workers in this process any more.
        """
        if self._seconds == math.inf:
            yield
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="tfdist-watchdog", daemon=True)
            self._thread.start()
        call = _Call(sign)
        self._calls.append(call)
        try:
            yield
        except tf.errors.OpError as error:
            if self._ended is None:
                raise
            raise TimeoutError(self._ended) from error
        finally:
            with self._lock:  # not in the middle of ending it
                self._calls.remove(call)

    def _watch(self) -> None:
        pause = self._seconds / LOOKS
        seen: _Call | None = None
        last, quiet = None, 0
        while True:
            time.sleep(pause)
            call = next(iter(self._calls), None)
            if call is None:
                seen = None
                continue
            now = _soon(call.sign, pause / 8) if call.sign else None
            # Looks are counted, and no clock is read, which goes on while this process is stopped.
            quiet = quiet + 1 if call is seen and now in (None, last) else 0
            seen, last = call, last if now is None else now
            if quiet == LOOKS:
                with self._lock:
                    if call in self._calls:
                        self._ended = self._cause()
                        abort_collectives(self._ended)
                        return

    def _cause(self) -> str:
        place = self._placement
        assert place is not None
        others = ", ".join(place.task(rank) for rank in range(place.workers) if rank != place.rank)
        return (
            f"{place.task(place.rank)} waited too long for {others}, {self._seconds:g} s without a step: a worker hangs, is cut off, gets no data, or has "
            "fewer batches than others. Look at its log; give all workers data of the same length; make_strategy(timeout=...) waits longer."
        )


def _soon(function: Callable[[], Any], seconds: float) -> Any:
    """What a function gives; None where it takes longer than that, as on a device that hangs."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
