"""Step breakdown: time of each worker's steps by part, including the wait for stragglers.

All replicas leave an all-reduce at about the same time. So a replica that spent longer in it than
another arrived earlier by the same time, whatever their clocks say. The shortest time in a step's
all-reduce is the time that the all-reduce takes, and all time beyond it is waiting.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.parallel.placement import Placement
from tfdist.runtime.formatting import milliseconds
from tfdist.runtime.launch_protocol import STRAGGLER, STRAGGLER_OVER, Launched, note
from tfdist.runtime.time_account import time_account
from tfdist.telemetry import layout
from tfdist.telemetry.step_records import Window, write
from tfdist.telemetry.writers import TensorBoardWriter
from tfdist.train.synchronous.replica_state import all_gather
from tfdist.train.timing.graph_timestamps import PER_REPLICA
from tfdist.train.timing.stragglers import Change, Limits, StragglerDetector

log = logging.getLogger("tfdist")

WINDOW_S = 1.0
# When workers exchange how long their all-reduces took. They count the same steps and calls, so
# that they need not agree on it.
EXCHANGE_STEPS = 1000
EXCHANGE_CALLS = 50  # of a fifth of a second each
# Steps per exchange. With one shape, the collective is traced once. The rest of an epoch is less.
_BLOCK = 1024


class StepBreakdown(keras.callbacks.Callback):
    """Measure where the time of each step of a `fit` goes, on every worker.

    Each worker appends to `worker-<rank>/step_breakdown.jsonl`, and writes curves
    `step_breakdown/...` for TensorBoard beside it. The parts of a step are those of
    `tfdist.telemetry.step_records.PARTS`. You need a synchronous strategy made by tfdist. Under
    others, such as parameter servers, the callback logs a warning and measures nothing.

    Args:
        directory: Directory of the run, on a local file system.

    Example:
        >>> model.fit(data, callbacks=[tfdist.StepBreakdown("runs/mine")])  # doctest: +SKIP
    """

    def __init__(self, directory: str | os.PathLike):
        super().__init__()
        self.directory = os.fspath(directory)
        if "://" in self.directory:
            raise ValueError(
                "tfdist.StepBreakdown: expected a directory on a local file system, received "
                f"{self.directory!r}; each host may have its own."
            )
        self.recorder: Recorder | None = None  # set by the engine whose fit runs

    def on_train_begin(self, logs=None):
        """See `keras.callbacks.Callback`."""
        if self.recorder is None:
            log.warning(
                "tfdist.StepBreakdown (telemetry.step_breakdown) measures nothing here. It needs a "
                "synchronous strategy of tfdist, without "
                "tf.config.experimental.enable_op_determinism(). Under parameter servers, workers "
                "do not wait for each other."
            )

    def on_epoch_begin(self, epoch, logs=None):
        """See `keras.callbacks.Callback`."""
        if self.recorder is not None:
            self.recorder.begin_epoch()


class Times(NamedTuple):
    """Times of several steps of one worker in seconds, as means over its replicas.

    Attributes:
        input: Time waiting for batches, after the first.
        forward_backward: Time until the gradients were available.
        sums: Time from there until their sums were available.
        update: Time from there until the step was done.
        shortest: Shortest time of a replica in the all-reduce of each step, `[steps]`.
    """

    input: float
    forward_backward: float
    sums: float
    update: float
    shortest: np.ndarray


class Recorder:
    """Recorder of the step times of one `fit` on one worker.

    Args:
        strategy: Synchronous strategy.
        placement: Position of this worker among all workers.
        directories: Directories of runs.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        placement: Placement,
        directories: Sequence[str],
    ):
        self._strategy = strategy
        self._placement = placement
        paths = [layout.worker_directory(directory, placement.rank) for directory in directories]
        self._tensorboards = {path: TensorBoardWriter(path) for path in paths}
        # Windows without the other workers' times, each with the shortest all-reduces of its steps.
        self._pending: list[tuple[Window, np.ndarray]] = []
        self._calls = 0  # since the last exchange
        self._steps: int | None = None  # since training began
        self._compiled = False
        self._launched = Launched.from_environ()
        self._detector = StragglerDetector(Limits.from_text(self._launched.stragglers))
        self.bytes = 0
        for path in paths:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:  # the other workers wait for this one below
                self._stop_writing(path, error)
        if placement.workers > 1:
            all_gather(strategy, placement, np.zeros(_BLOCK))  # traces the collective
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Start the first window of an epoch."""
        self._open(time.perf_counter())

    def begin(self, steps: int) -> None:
        """Start a call of the train function.

        Args:
            steps: Steps since training began; used in the first call only.
        """
        self._steps = steps if self._steps is None else self._steps

    def mark_compiled(self) -> None:
        """Record that the current window includes tracing or compilation."""
        self._compiled = True

    def add(self, times: Times) -> None:
        """Add the times of steps that have run to the current window."""
        self._parts["forward_backward"] += times.forward_backward
        self._parts["gradient_sync"] += times.sums
        self._parts["update"] += times.update
        self._shortest.append(times.shortest)

    def end_call(
        self, epoch: int, steps: int, examples: int, waited: float, short: int = 1
    ) -> None:
        """Record the end of a call of the train function, also of one that found no more data.

        Args:
            epoch: Epoch that the call belongs to.
            steps: Number of steps that it ran.
            examples: Number of rows of their global batches.
            waited: Seconds that they waited for batches.
            short: Number of such calls that take as long as a usual one, which is longer if no
                callback watches each batch; equal on all workers.
        """
        self._parts["input"] += waited
        self._done += steps
        self._examples += examples
        self._steps = (self._steps or 0) + steps
        self._calls += bool(steps)
        long = time.perf_counter() - self._begin >= WINDOW_S or self._done >= EXCHANGE_STEPS
        if steps and (long or self._compiled):
            self._close(epoch)
        if steps and (
            self._pending_steps() >= EXCHANGE_STEPS or self._calls >= EXCHANGE_CALLS * short
        ):
            self._close(epoch)
            self._exchange()

    def end_steps(self, epoch: int) -> np.ndarray | None:
        """Close the window at the end of an epoch's steps.

        Returns:
            The numbers that the other workers must `receive`, `[_BLOCK]`; None if there are no
            other workers.
        """
        self._close(epoch)
        sums = self._sums()
        return np.pad(sums, (0, _BLOCK - len(sums))) if self._placement.workers > 1 else None

    def receive(self, shortest: np.ndarray) -> None:
        """Use the numbers that `end_steps` returned on all workers.

        Args:
            shortest: One row per worker, `[workers, _BLOCK]`. All workers have run the same number
                of steps.
        """
        self._settle(shortest)

    def close(self) -> None:
        """Close the writers at the end of the fit."""
        for path, board in list(self._tensorboards.items()):
            try:
                board.close()
            except (OSError, tf.errors.OpError) as error:
                self._stop_writing(path, error)

    # --- Windows ----------------------------------------------------------------------------------
    def _open(self, now: float) -> None:
        self._begin = now
        self._done = 0
        self._examples = 0
        self._parts = dict.fromkeys(("input", "forward_backward", "gradient_sync", "update"), 0.0)
        self._shortest: list[np.ndarray] = []
        self._compiled = False

    def _close(self, epoch: int) -> None:
        now = time.perf_counter()
        if not self._done:
            return
        placement = self._placement
        seconds = now - self._begin
        shortest = np.concatenate([np.zeros(0), *self._shortest])
        parts = add_host_time(self._parts, seconds)
        window = Window(
            worker=placement.rank,
            time=time.time(),
            epoch=epoch,
            step=self._steps or 0,
            steps=self._done,
            examples=self._examples,
            seconds=seconds,
            parts=parts,
            bytes=self.bytes if placement.replicas > 1 else 0,
            steady=not self._compiled,
        )
        self._pending.append((window, shortest))
        if placement.workers == 1:
            self._exchange()
        self._open(now)

    def _pending_steps(self) -> int:
        return self._done + sum(window.steps for window, _ in self._pending)

    def _exchange(self) -> None:
        """Exchange times with the other workers; called at the same step on every worker."""
        sums = self._sums()[None]
        if self._placement.workers > 1 and sums.size:
            blocks: np.ndarray = np.pad(sums[0], (0, -sums.size % _BLOCK)).reshape(-1, _BLOCK)
            sums = np.concatenate(
                [all_gather(self._strategy, self._placement, block) for block in blocks], 1
            )
        self._settle(sums)

    def _sums(self) -> np.ndarray:
        """Return the shortest all-reduce time of a local replica, for each step not yet settled."""
        return np.concatenate([np.zeros(0), *(steps for _, steps in self._pending)])

    def _settle(self, times: np.ndarray) -> None:
        """Use the all-reduce times of each worker's fastest replica, `[workers, steps]`."""
        if self._placement.workers > 1 and self._placement.is_chief:
            self._find_stragglers(times)
        self._write_pending(times.min(0))

    def _find_stragglers(self, times: np.ndarray) -> None:
        """Compare how long the workers were busy in the pending windows.

        All leave an all-reduce at the same time. So a step takes the same time on each worker, and
        what it does not spend in the all-reduce it is busy.
        """
        for window, steps in self._pending:
            inside = times[:, : len(steps)].sum(1)
            times = times[:, len(steps) :]
            if window.steady:
                seconds = window.seconds - window.parts["host"]
                busy = (seconds - inside).tolist()
                for change in self._detector.add(busy, window.steps, window.seconds):
                    self._report(change)

    def _report(self, change: Change) -> None:
        """Tell the log and the launcher about a straggler."""
        task = self._placement.task(change.rank)
        host = _host_of(self._strategy, task)
        note(
            self._launched.log_dir,
            STRAGGLER if change.begins else STRAGGLER_OVER,
            task=task,
            attempt=self._launched.attempt,
            host=host,
            slower=round(change.slower, 3),
            step_seconds=round(change.own, 6),
            others_step_seconds=round(change.others, 6),
        )
        where = f"{task} on {host}" if host else task
        own, others = milliseconds(change.own), milliseconds(change.others)
        if change.begins:
            log.warning(
                "%s is a straggler: without waiting for others, its step takes %s, and that of "
                "the other workers %s (median). Look at what else runs on its host, at the clock "
                "of its processor, and at its data.",
                where,
                own,
                others,
            )
        else:
            log.warning("%s is no straggler any more: its step takes %s.", where, own)

    def _write_pending(self, shortest: np.ndarray) -> None:
        """Write the pending windows, with the shortest all-reduce times of all workers."""
        self._calls = 0
        pending = self._pending
        self._pending = []
        for window, steps in pending:
            needed = float(shortest[: len(steps)].sum())
            shortest = shortest[len(steps) :]
            window = split_wait(window, needed)
            if window.steady:
                time_account().move("training", "sync", window.parts["wait"])
            self._write(window)

    def _write(self, window: Window) -> None:
        values = {
            f"step_breakdown/{part}_milliseconds": 1e3 * seconds / window.steps
            for part, seconds in window.parts.items()
        }
        values["step_breakdown/examples_per_second"] = window.examples / window.seconds
        for path, board in list(self._tensorboards.items()):
            try:
                write(path, window)
                if window.steady:
                    # A TensorBoard callback's update_freq must not drop these scalars.
                    with tf.summary.record_if(True):
                        board.scalars(window.step, values)
            except (OSError, tf.errors.OpError) as error:  # a full disk must not end the training
                self._stop_writing(path, error)

    def _stop_writing(self, path: Path, error: Exception) -> None:
        log.warning(
            "tfdist.StepBreakdown stops writing to %s, because a write failed: %s",
            path,
            error,
        )
        del self._tensorboards[path]


def _host_of(strategy: tf.distribute.Strategy, task: str) -> str:
    """Return the host in the address of a task; "" if it is unknown."""
    resolver = strategy.cluster_resolver
    kind, _, index = task.partition(":")
    try:
        address = resolver.cluster_spec().task_address(kind, int(index)) if resolver else ""
    except ValueError:  # no such task
        return ""
    return address.rpartition(":")[0]


def compute_times(started: float, readings: np.ndarray) -> Times:
    """Compute the times of steps from their clock readings.

    Args:
        started: Time when the first step had its batch.
        readings: Rows of `GraphTimestamps.row`, `[steps, 1 + 3 * replicas]`. The first reading of
            each step is the time when the next batch was available.

    Example:
        There is one replica and there are two steps. The batch of the second step is late.

        >>> compute_times(10.0, np.array([[15.0, 11.0, 12.0, 14.0], [15.0, 16.0, 19.0, 19.5]]))
        Times(input=1.0, forward_backward=2.0, sums=4.0, update=2.5, shortest=array([1., 3.]))
    """
    gradients, sums, done = np.moveaxis(
        readings[:, 1:].reshape(len(readings), readings.shape[1] // PER_REPLICA, PER_REPLICA), 2, 0
    )
    finished = done.max(1, initial=0.0)
    ends = np.maximum(readings[:, 0], finished)
    begins = np.concatenate([[started], ends])[: len(ends)]
    return Times(
        input=_total(ends - finished),
        forward_backward=_total(gradients.mean(1) - begins),
        sums=_total((sums - gradients).mean(1)),
        update=_total(finished - sums.mean(1)),
        shortest=np.maximum((sums - gradients).min(1), 0.0),
    )


def _total(seconds: np.ndarray) -> float:
    return max(0.0, float(seconds.sum()))  # the clock may have been set


def add_host_time(measured: dict[str, float], seconds: float) -> dict[str, float]:
    """Complete the parts of a window: time that was not measured counts as Python's (`host`).

    The sum of the parts is `seconds`, even if the clock was set meanwhile.

    Example:
        >>> add_host_time({"input": 1.0, "update": 2.0}, 4.0)
        {'input': 1.0, 'update': 2.0, 'wait': 0.0, 'host': 1.0}
    """
    total = sum(measured.values())
    scale = min(1.0, seconds / total) if total else 1.0
    return {
        **{part: value * scale for part, value in measured.items()},
        "wait": 0.0,
        "host": max(0.0, seconds - total),
    }


def split_wait(window: Window, sums: float) -> Window:
    """Split the time that replicas spent in all-reduces into communication and waiting.

    Args:
        window: Window with all of that time as `gradient_sync`.
        sums: Seconds that the all-reduces took at their shortest, over all replicas.
    """
    inside = window.parts["gradient_sync"]
    needed = min(inside, sums)
    return dataclasses.replace(
        window, parts={**window.parts, "gradient_sync": needed, "wait": inside - needed}
    )
