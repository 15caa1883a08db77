"""Watchdog that bounds the time that calls wait for other workers without a step.

A call beyond the bound ends with an error that names the other workers.

TensorFlow's own bound, `CommunicationOptions(timeout_seconds=...)`, starts a thread for each
collective, which then sleeps that long
(tensorflow/core/common_runtime/base_collective_executor.cc). At some fifty collectives a second, a
process runs out of threads within ten minutes. Here one thread watches all calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import tensorflow as tf

from tfdist.keras_compat import abort_collectives
from tfdist.parallel.placement import Placement

CHECKS = 8  # checks of a call within the bound

# Errors of TensorFlow and of native collectives where workers are in different ones
# (tensorflow/core/common_runtime/collective_param_resolver_local.cc).
_MISMATCH = re.compile(
    r"(?:Collective instance \d+ expected |Shape mismatch in the collective instance"
    r"|workers are out of step: )[^\n]*"
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    progress: Callable[[], Any] | None


class Abortable(Protocol):
    """Collectives beside TensorFlow's."""

    def abort(self, message: str) -> None:
        """End the current call and all later ones with this message."""

    def waiting_for(self) -> list[str]:
        """Return the names of the workers for which the current call waits."""


class Watchdog:
    """Bound on the time that calls of this process wait for other workers.

    Args:
        seconds: Seconds without a step; the call may take a quarter longer to end. Infinite means
            no bound.
        placement: Position of this process among the workers. Without other workers, nothing is
            bounded.

    Attributes:
        seconds: Seconds as given; infinite if there are no other workers.
        transport: Collectives to abort together with TensorFlow's; None if there are none.
    """

    transport: Abortable | None = None

    def __init__(self, seconds: float = math.inf, placement: Placement | None = None):
        self.seconds = seconds if placement is not None and placement.workers > 1 else math.inf
        self._placement = placement
        self._lock = threading.Lock()
        self._calls: list[_Call] = []  # nested, the outermost first
        self._abort_message: str | None = None  # the error message, once a call was ended
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def bound(self, progress: Callable[[], Any] | None = None) -> Iterator[None]:
        """Bound the calls in this context, their own work and the wait for their data included.

        Args:
            progress: Function that returns, in another thread, a value that changes with each
                step of a call that runs many steps. None for a call that runs one step.

        Raises:
            TimeoutError: If no step was made for too long. After that, no call can wait for other
                workers in this process any more.
        """
        if self.seconds == math.inf:
            with self.explained():
                yield
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="tfdist-watchdog", daemon=True)
            self._thread.start()
        call = _Call(progress)
        self._calls.append(call)
        try:
            with self.explained():
                yield
        except tf.errors.OpError as error:
            if self._abort_message is None:
                raise
            raise TimeoutError(self._abort_message) from error
        finally:
            with self._lock:  # the watchdog may be ending this call right now
                self._calls.remove(call)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Explain TensorFlow's error about workers that are in different collectives.

        Raises:
            RuntimeError: If this worker and the others are out of step.
        """
        try:
            yield
        except tf.errors.OpError as error:
            mismatch = _MISMATCH.search(error.message or "")
            if mismatch is None or self._placement is None:
                raise
            raise RuntimeError(
                f"{self._placement.task(self._placement.rank)} is out of step with "
                f"{self._others()}: they waited for each other in different operations. Making a "
                "variable in strategy.scope() is an operation of all workers, and so are fit, "
                "evaluate, predict and the steps of an optimizer. Run the same script in every "
                "task, and let no worker make a variable, or call one of these methods, alone "
                f"({mismatch[0]})."
            ) from error

    def _watch(self) -> None:
        pause = self.seconds / CHECKS
        seen: _Call | None = None
        last = None
        unchanged = 0
        while True:
            time.sleep(pause)
            call = next(iter(self._calls), None)
            if call is None:
                seen = None
                continue
            current = _call_with_timeout(call.progress, pause / 8) if call.progress else None
            # Checks are counted, because a clock goes on while this process is stopped.
            unchanged = unchanged + 1 if call is seen and current in (None, last) else 0
            seen = call
            last = last if current is None else current
            if unchanged == CHECKS:
                with self._lock:
                    if call in self._calls:
                        self._abort_message = self._message()
                        abort_collectives(self._abort_message)
                        if self.transport is not None:
                            self.transport.abort(self._abort_message)
                        return

    def _message(self) -> str:
        placement = self._placement
        assert placement is not None
        late = self.transport.waiting_for() if self.transport is not None else []
        return (
            f"{placement.task(placement.rank)} waited too long for "
            f"{', '.join(late) or self._others()}: no step for "
            f"{self.seconds:g} s. A worker hangs, is cut off, gets no data, or has fewer batches "
            "than the others. Look at the workers' logs, and give all workers data of the same "
            "length. If your steps take longer, pass a longer make_strategy(timeout=...)."
        )

    def _others(self) -> str:
        placement = self._placement
        assert placement is not None
        return ", ".join(
            placement.task(rank) for rank in range(placement.workers) if rank != placement.rank
        )


def _call_with_timeout(function: Callable[[], Any], seconds: float) -> Any:
    """Return a function's result; None if it takes longer, as on a device that hangs.

    Args:
        function: Function without arguments.
        seconds: Seconds to wait for it.
    """
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
