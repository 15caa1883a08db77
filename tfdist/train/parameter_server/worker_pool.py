"""Worker pool of a parameter-server cluster, with handling of lost tasks.

Each work item counts once. Error messages name lost, stopped and silent tasks.

TensorFlow's `ClusterCoordinator` owns a thread for each worker, reconnects to a worker that comes
back, and gives its work to others. While Keras trains, each thread runs one long closure of this
pool, in which it takes item after item.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import tensorflow as tf

from tfdist.cluster.addresses import answers
from tfdist.cluster.spec import Task
from tfdist.keras_compat import servers as server_compat
from tfdist.runtime.launch_protocol import TRANSIENT_CODE

log = logging.getLogger("tfdist")

PROBE_S = 2.0  # timeout of a probe of a task
# Time that a work item may take before its worker and the parameter servers are probed.
PROBE_AFTER_S = 10.0
CLOSE_S = 10.0  # time that cancelled items may take to end


class ParameterServerLost(ConnectionError):
    """Error: a parameter server ended, was restarted or does not answer.

    The variables that it held are lost. Make a new strategy and model, and call `fit` again:
    `BackupAndRestore` resumes from its last snapshot.
    """

    exit_code = TRANSIENT_CODE  # a restart may help


class Owner(Protocol):
    """Protocol of an object that submits items to the pool and receives their results."""

    def take(self, items: collections.deque, worker: int) -> list:
        """Remove from `items` those that one worker runs at once, and return them."""

    def execute(self, worker: int, items: list, call: Callable) -> Any:
        """Run items in the worker's thread.

        `call(concrete_function, *args)` runs a function on the worker.
        """

    def forget(self, worker: int) -> None:
        """Drop state that the worker may have lost, such as iterators."""

    def done(self, items: list, result: Any) -> None:
        """Receive a result, once for each item, with the pool's lock held."""


@dataclasses.dataclass(eq=False)
class Running:
    """Items that are running on one worker.

    Attributes:
        items: The items.
        since: Time of their start, as `time.monotonic()` counts it.
        cancel: Function that cancels them.
        abandoned: Whether they were given to other workers, so that a late result is dropped.
    """

    items: list
    since: float
    cancel: Callable[[], None] = lambda: None
    abandoned: bool = False


class Pool:
    """Workers of one cluster.

    Args:
        strategy: Parameter-server strategy.
        workers: Workers by index, with their addresses.
        servers: Parameter servers by index, with their addresses.
        timeout: Time in seconds to wait for a worker if none is left, and for one work item.

    Attributes:
        requeued: Number of work items given to another worker since the pool was opened. A lost
            worker may still complete its own run of them.
    """

    requeued = 0

    def __init__(self, strategy, workers: list[Task], servers: list[Task], timeout: float):
        self.workers = workers
        self._servers = servers
        self._timeout = timeout
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.changed = threading.Condition()
        self._owner: Owner | None = None
        self._queue: collections.deque = collections.deque()
        self._running: dict[int, Running] = {}
        self._error: BaseException | None = None
        self._on_progress: Callable[[], None] = lambda: None
        self._progressed = False  # items are done that `wait` has not reported
        self._session = 0  # odd while open
        self._lost: set[int] = set()
        self._idle_since: float | None = None
        self._last_probe = 0.0

    # --- In the main thread -----------------------------------------------------------------------
    @contextlib.contextmanager
    def open(self, on_progress: Callable[[], None]) -> Iterator[None]:
        """Let the workers take items in the context, and cancel unfinished items at its end.

        Args:
            on_progress: Function that `wait` calls when items are done.
        """
        self._on_progress = on_progress
        self._session += 1
        self._error = None
        self._idle_since = None
        self.requeued = 0
        for _ in self.workers:
            server_compat.schedule(self._coordinator, self._run_worker)
        try:
            yield
        finally:
            self._close()

    def submit(self, owner: Owner, item: Any) -> None:
        """Add a work item to the end of the queue."""
        with self.changed:
            self._owner = owner
            self._queue.append(item)
            self.changed.notify_all()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()` is true. It is called with the pool's lock held.

        Raises:
            Exception: If a work item raised it; reported once.
            ParameterServerLost: If a parameter server is gone.
            TimeoutError: If no worker is left, or a worker takes too long. The message names them.
        """
        while True:
            if self._progressed:
                self._progressed = False
                self._on_progress()
            with self.changed:
                if self._error is not None:
                    break
                if ready():
                    return
                self.changed.wait(0.5)
                overdue = self._overdue()
            should_probe = overdue or self._idle_since is not None
            if (
                should_probe
                and time.monotonic() - max(self._last_probe, self._idle_since or 0.0)
                > PROBE_AFTER_S / 2
            ):
                self._probe_tasks(overdue)
        self._cancel_all()
        error = self._error
        self._error = None
        raise error

    def _cancel_all(self) -> None:
        """Cancel all work, and wait for its end up to a time limit."""
        with self.changed:
            self._queue.clear()
            for running in self._running.values():
                running.abandoned = True
        for running in list(self._running.values()):
            running.cancel()
        with self.changed:
            self.changed.wait_for(lambda: not self._running, CLOSE_S)

    def _close(self) -> None:
        self._session += 1
        self._cancel_all()
        with self.changed:
            self._running.clear()
            self._owner = None
            self.changed.notify_all()

    # --- Faults -----------------------------------------------------------------------------------
    def _overdue(self) -> list[tuple[int, Running]]:
        """Return the items whose workers should be probed. The lock is held."""
        now = time.monotonic()
        if self._running or not self._queue:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        return [
            (w, r)
            for w, r in self._running.items()
            if not r.abandoned and now - r.since > PROBE_AFTER_S
        ]

    def _probe_tasks(self, overdue: list[tuple[int, Running]]) -> None:
        """Probe silent tasks, and reassign work or fail if they do not answer."""
        self._last_probe = time.monotonic()
        for server in self._servers:
            if not self._answers(server):
                self._fail(_lost(server, "it does not answer"))
                return
        for index, running in overdue:
            worker = self.workers[index]
            seconds = time.monotonic() - running.since
            if not self._answers(worker):
                log.warning(
                    "%s at %s does not answer; other workers take over its work",
                    worker,
                    worker.address,
                )
                with self.changed:
                    self._requeue(index, running)
                running.cancel()
            elif seconds > self._timeout:
                self._fail(
                    TimeoutError(
                        f"{worker} at {worker.address} has run one work item for {seconds:.0f} s, "
                        f"more than the {self._timeout:g} s of make_strategy(timeout=...). Look "
                        "at its log. If your steps take longer, set a longer timeout."
                    )
                )
        if self._idle_since is not None:
            missing = [w for w in self.workers if not answers(w.address, PROBE_S)]
            names = ", ".join(f"{w} at {w.address}" for w in missing or self.workers)
            waited = time.monotonic() - self._idle_since
            log.warning(
                "no worker is left; waiting for %s (%.0f of %g s)", names, waited, self._timeout
            )
            if waited > self._timeout:
                self._fail(
                    TimeoutError(
                        f"No worker is left: {names} did not come back within {self._timeout:g} s. "
                        "Start them again."
                    )
                )

    def _answers(self, task: Task) -> bool:
        return answers(task.address, PROBE_S) or answers(task.address, 2 * PROBE_S)

    def _requeue(self, worker: int, running: Running) -> None:
        if not running.abandoned:
            running.abandoned = True
            self.requeued += len(running.items)
            self._queue.extendleft(reversed(running.items))
        self._lost.add(worker)
        self.changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self.changed:
            self._error = self._error or error
            self.changed.notify_all()

    # --- In the workers' threads ------------------------------------------------------------------
    def _run_worker(self) -> None:
        session = self._session
        worker = server_compat.current_worker()
        while (taken := self._take(session, worker)) is not None:
            owner, running = taken
            try:
                result = owner.execute(
                    worker,
                    running.items,
                    lambda f, *args, running=running: _call(f, args, running),
                )
            except BaseException as error:
                if self._handle_error(session, worker, running, error):
                    raise tf.errors.UnavailableError(
                        None, None, f"/job:worker/replica:0/task:{worker} was lost: {error}"
                    ) from error
            else:
                with self.changed:
                    if self._running.get(worker) is running:
                        del self._running[worker]
                    if not running.abandoned:
                        owner.done(running.items, result)
                        self._progressed = True
                    self.changed.notify_all()

    def _take(self, session: int, worker: int) -> tuple[Owner, Running] | None:
        with self.changed:
            while self._session == session and session % 2:
                if self._queue and self._error is None and self._owner is not None:
                    if worker in self._lost:
                        self._lost.discard(worker)
                        self._owner.forget(worker)
                        log.warning(
                            "%s at %s is back",
                            self.workers[worker],
                            self.workers[worker].address,
                        )
                    running = Running(self._owner.take(self._queue, worker), time.monotonic())
                    self._running[worker] = running
                    return self._owner, running
                self.changed.wait(1.0)
        return None

    def _handle_error(
        self, session: int, worker: int, running: Running, error: BaseException
    ) -> bool:
        """Handle an error in a worker's thread.

        Returns:
            Whether the worker was lost, so that TensorFlow should wait for its return.
        """
        task = self.workers[worker]
        lost = False
        if not running.abandoned:
            server = self._lost_server(error)
            if server is not None:
                error = _lost(server, _reason(error))
            elif isinstance(error, tf.errors.OpError) and not isinstance(error, _USER_ERRORS):
                lost = server_compat.is_worker_failure(error) or not self._answers(task)
        with self.changed:
            if self._running.get(worker) is running:
                del self._running[worker]
            # Abandoned items were given to other workers, or are not needed any more.
            if not running.abandoned and lost:
                log.warning(
                    "%s at %s was lost; other workers take over its work (%s)",
                    task,
                    task.address,
                    _reason(error),
                )
                self._requeue(worker, running)
            elif not running.abandoned:
                self._error = self._error or error
            self.changed.notify_all()
        while (
            running.abandoned
            and not lost
            and self._session == session
            and not answers(task.address, PROBE_S)
        ):
            time.sleep(0.5)
        return lost

    def _lost_server(self, error: BaseException) -> Task | None:
        """Return the parameter server whose loss caused an error, or None."""
        if not isinstance(error, tf.errors.OpError) or isinstance(error, _USER_ERRORS):
            return None
        for server in self._servers:
            is_named = server_compat.is_server_failure(
                error
            ) and f"/job:ps/replica:0/task:{server.index}" in str(error)
            if is_named or not self._answers(server):
                return server
        return None


# Errors that a user's step raises. A lost connection never has these types.
_USER_ERRORS = (
    tf.errors.OutOfRangeError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnimplementedError,
)


def _reason(error: tf.errors.OpError) -> str:
    """Return the gRPC message of an error, or else the first line of its message."""
    match = re.search(r'grpc_message: ?"([^"]*)', str(error))
    return match[1] if match else error.message.strip().splitlines()[0]


def _call(function, args: tuple, running: Running):
    cancelable, running.cancel = server_compat.cancelable(function)
    if running.abandoned:
        raise tf.errors.CancelledError(None, None, "given to another worker")
    return cancelable(*args)


def _lost(server: Task, reason: str) -> ParameterServerLost:
    return ParameterServerLost(
        f"{server} at {server.address} was lost ({reason}), and its variables with it. Start it "
        "again, make a new strategy and model, and call fit again: BackupAndRestore resumes from "
        "its last snapshot."
    )
