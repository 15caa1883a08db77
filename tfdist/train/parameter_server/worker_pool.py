"""Worker pool of a parameter-server cluster, with handling of lost tasks.

Each piece of work counts once. Error messages name lost, stopped and silent tasks.

TensorFlow's `ClusterCoordinator` owns a thread for each worker, reconnects to a worker that comes
back, and gives its work to others. While Keras trains, each thread runs one long closure of this
pool, in which it takes piece after piece.
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

PROBE_SECONDS = 2.0  # timeout of a probe of a task
# Time that a piece of work may take before its worker and the parameter servers are probed.
PATIENCE_SECONDS = 10.0
CLOSE_SECONDS = 10.0  # time that cancelled pieces may take to end


class ParameterServerLost(ConnectionError):
    """Error: a parameter server ended, was restarted or does not answer.

    The variables that it held are lost. Make a new strategy and model, and call `fit` again:
    `BackupAndRestore` resumes from its last snapshot.
    """

    exit_code = TRANSIENT_CODE  # a restart may help


class Owner(Protocol):
    """Protocol of an object that submits pieces to the pool and receives their results."""

    def take(self, pieces: collections.deque, worker: int) -> list:
        """Remove from `pieces` those that one worker runs at once, and return them."""

    def execute(self, worker: int, pieces: list, call: Callable) -> Any:
        """Run pieces in the worker's thread.

        `call(concrete_function, *args)` runs a function on the worker.
        """

    def forget(self, worker: int) -> None:
        """Drop state that the worker may have lost, such as iterators."""

    def done(self, pieces: list, result: Any) -> None:
        """Receive a result, once for each piece, with the pool's lock held."""


@dataclasses.dataclass(eq=False)
class Running:
    """Pieces that are running on one worker.

    Attributes:
        pieces: The pieces.
        since: Time of their start, as `time.monotonic()` counts it.
        cancel: Function that cancels them.
        abandoned: Whether they were given to other workers, so that a late result is dropped.
    """

    pieces: list
    since: float
    cancel: Callable[[], None] = lambda: None
    abandoned: bool = False


class Pool:
    """Workers of one cluster.

    Args:
        strategy: Parameter-server strategy.
        workers: Workers by index, with their addresses.
        servers: Parameter servers by index, with their addresses.
        timeout: Time in seconds to wait for a worker if none is left, and for one piece of work.
    """

    def __init__(self, strategy, workers: list[Task], servers: list[Task], timeout: float):
        self.workers = workers
        self._servers = servers
        self._timeout = timeout
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.changed = threading.Condition()
        self._owner: Owner | None = None
        self._todo: collections.deque = collections.deque()
        self._running: dict[int, Running] = {}
        self._error: BaseException | None = None
        self._turn = 0  # odd while open
        self._lost: set[int] = set()
        self._idle_since: float | None = None
        self._asked = 0.0

    # --- In the main thread -----------------------------------------------------------------------
    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Let the workers take pieces in the context, and cancel unfinished pieces at its end."""
        self._turn += 1
        self._error = None
        self._idle_since = None
        for _ in self.workers:
            server_compat.schedule(self._coordinator, self._take_turn)
        try:
            yield
        finally:
            self._close()

    def submit(self, owner: Owner, piece: Any) -> None:
        """Add a piece of work to the end of the queue."""
        with self.changed:
            self._owner = owner
            self._todo.append(piece)
            self.changed.notify_all()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()` is true. It is called with the pool's lock held.

        Raises:
            Exception: Error that a piece of work raised, reported once.
            ParameterServerLost: A parameter server is gone.
            TimeoutError: No worker is left, or a worker takes too long. The message names them.
        """
        while True:
            with self.changed:
                if self._error is not None:
                    break
                if ready():
                    return
                self.changed.wait(0.5)
                late = self._late()
            silent = late or self._idle_since is not None
            if (
                silent
                and time.monotonic() - max(self._asked, self._idle_since or 0.0)
                > PATIENCE_SECONDS / 2
            ):
                self._ask(late)
        self._drop()
        error, self._error = self._error, None
        raise error

    def _drop(self) -> None:
        """Cancel all work, and wait for its end up to a time limit."""
        with self.changed:
            self._todo.clear()
            for running in self._running.values():
                running.abandoned = True
        for running in list(self._running.values()):
            running.cancel()
        with self.changed:
            self.changed.wait_for(lambda: not self._running, CLOSE_SECONDS)

    def _close(self) -> None:
        self._turn += 1
        self._drop()
        with self.changed:
            self._running.clear()
            self._owner = None
            self.changed.notify_all()

    # --- Faults -----------------------------------------------------------------------------------
    def _late(self) -> list[tuple[int, Running]]:
        """Return the pieces whose workers should be probed. The lock is held."""
        now = time.monotonic()
        if self._running or not self._todo:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        return [
            (w, r)
            for w, r in self._running.items()
            if not r.abandoned and now - r.since > PATIENCE_SECONDS
        ]

    def _ask(self, late: list[tuple[int, Running]]) -> None:
        """Probe silent tasks, and reassign work or fail if they do not answer."""
        self._asked = time.monotonic()
        for server in self._servers:
            if not self._answers(server):
                self._fail(_lost(server, "it does not answer"))
                return
        for index, running in late:
            worker = self.workers[index]
            seconds = time.monotonic() - running.since
            if not self._answers(worker):
                log.warning(
                    "%s at %s does not answer; its work is given to others", worker, worker.address
                )
                with self.changed:
                    self._give_back(index, running)
                running.cancel()
            elif seconds > self._timeout:
                self._fail(
                    TimeoutError(
                        f"{worker} at {worker.address} has been at work on one piece for "
                        f"{seconds:.0f} s, more than the {self._timeout:g} s of "
                        "make_strategy(timeout=...). Look at its log; set a longer timeout for "
                        "longer steps."
                    )
                )
        if self._idle_since is not None:
            missing = [w for w in self.workers if not answers(w.address, PROBE_SECONDS)]
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
        return answers(task.address, PROBE_SECONDS) or answers(task.address, 2 * PROBE_SECONDS)

    def _give_back(self, worker: int, running: Running) -> None:
        if not running.abandoned:
            running.abandoned = True
            self._todo.extendleft(reversed(running.pieces))
        self._lost.add(worker)
        self.changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self.changed:
            self._error = self._error or error
            self.changed.notify_all()

    # --- In the workers' threads ------------------------------------------------------------------
    def _take_turn(self) -> None:
        turn = self._turn
        worker = server_compat.current_worker()
        while (taken := self._take(turn, worker)) is not None:
            owner, running = taken
            try:
                result = owner.execute(
                    worker,
                    running.pieces,
                    lambda f, *args, running=running: _call(f, args, running),
                )
            except BaseException as error:
                if self._failed(turn, worker, running, error):
                    raise tf.errors.UnavailableError(
                        None, None, f"/job:worker/replica:0/task:{worker} was lost: {error}"
                    ) from error
            else:
                with self.changed:
                    if self._running.get(worker) is running:
                        del self._running[worker]
                    if not running.abandoned:
                        owner.done(running.pieces, result)
                    self.changed.notify_all()

    def _take(self, turn: int, worker: int) -> tuple[Owner, Running] | None:
        with self.changed:
            while self._turn == turn and turn % 2:
                if self._todo and self._error is None and self._owner is not None:
                    if worker in self._lost:
                        self._lost.discard(worker)
                        self._owner.forget(worker)
                        log.warning(
                            "%s at %s takes part again",
                            self.workers[worker],
                            self.workers[worker].address,
                        )
                    running = self._running[worker] = Running(
                        self._owner.take(self._todo, worker), time.monotonic()
                    )
                    return self._owner, running
                self.changed.wait(1.0)
        return None

    def _failed(self, turn: int, worker: int, running: Running, error: BaseException) -> bool:
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
            # Abandoned pieces were given to other workers, or are not needed any more.
            if not running.abandoned and lost:
                log.warning(
                    "%s at %s was lost; its work is given to others (%s)",
                    task,
                    task.address,
                    _reason(error),
                )
                self._give_back(worker, running)
            elif not running.abandoned:
                self._error = self._error or error
            self.changed.notify_all()
        while (
            running.abandoned
            and not lost
            and self._turn == turn
            and not answers(task.address, PROBE_SECONDS)
        ):
            time.sleep(0.5)
        return lost

    def _lost_server(self, error: BaseException) -> Task | None:
        """Return the parameter server whose loss caused an error, or None."""
        if not isinstance(error, tf.errors.OpError) or isinstance(error, _USER_ERRORS):
            return None
        for server in self._servers:
            named = server_compat.is_server_failure(
                error
            ) and f"/job:ps/replica:0/task:{server.index}" in str(error)
            if named or not self._answers(server):
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
    said = re.search(r'grpc_message: ?"([^"]*)', str(error))
    return said[1] if said else error.message.strip().splitlines()[0]


def _call(function, args: tuple, running: Running):
    cancelable, running.cancel = server_compat.cancelable(function)
    if running.abandoned:
        raise tf.errors.CancelledError(None, None, "given to another worker")
    return cancelable(*args)


def _lost(server: Task, why: str) -> ParameterServerLost:
    return ParameterServerLost(
        f"{server} at {server.address} was lost ({why}); its variables are gone. Start it again, "
        "make a new strategy and model, and fit "
        "again: BackupAndRestore goes on from its last backup."
    )
