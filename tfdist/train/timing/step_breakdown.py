"""Clock readings of steps become windows: where the time of each worker's steps went, what it waited for the slowest included.

All replicas leave a sum at about the same time. So one that spent longer in it than another came earlier by as much, whatever their
clocks say: the shortest time in a step's sum is what the sum takes, and all beyond it is waiting.
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
from tfdist.telemetry import layout
from tfdist.telemetry.step_records import Window, write
from tfdist.telemetry.writers import TensorBoardWriter
from tfdist.train.synchronous.replica_state import all_gather
from tfdist.train.timing.graph_timestamps import PER_REPLICA

log = logging.getLogger("tfdist")

WINDOW_SECONDS = 1.0
# When workers tell each other how long their sums took. They count alike, and need not ask whether to.
EXCHANGE_STEPS = 1000
EXCHANGE_CALLS = 50  # of a fifth of a second each
_BLOCK = 1024  # steps told at once; one shape, so that the collective is traced once; what an epoch leaves to tell is less


class StepBreakdown(keras.callbacks.Callback):
    """Measures where the time of each step of a `fit` goes, on every worker.

    Each worker appends to `worker-<rank>/step_breakdown.jsonl`, and writes curves `step_breakdown/...` for TensorBoard beside it. The parts of a
    step are those of `tfdist.telemetry.step_records.PARTS`. It needs a synchronous strategy made by tfdist; under others, such as
    parameter servers, it says so and measures nothing.

    Args:
        directory: The run's directory, on a local file system.

    >>> model.fit(data, callbacks=[tfdist.StepBreakdown("runs/mine")])  # doctest: +SKIP
    """

    def __init__(self, directory: str | os.PathLike):
        super().__init__()
        self.directory = os.fspath(directory)
        if "://" in self.directory:
            raise ValueError(
                f"tfdist.StepBreakdown: expected a directory on a local file system, received {self.directory!r}; each host may have its own."
            )
        self.recorder: Recorder | None = None  # of the engine whose fit runs

    def on_train_begin(self, logs=None):
        if self.recorder is None:
            log.warning(
                "tfdist.StepBreakdown (telemetry.step_breakdown) measures nothing here: it is for the synchronous strategies of tfdist. Under parameter "
                "servers each worker goes at its own pace, and there is no sum to wait in."
            )

    def on_epoch_begin(self, epoch, logs=None):
        if self.recorder is not None:
            self.recorder.begin_epoch()


class Times(NamedTuple):
    """Some steps of one worker, in seconds; means over its replicas.

    Fields:
        input: Waiting for batches, after the first.
        forward_backward: Until the gradients were there.
        sums: From there until their sums were.
        update: From there until the step was done.
        shortest: Of each step, the shortest time of a replica in the sum, `[steps]`.
    """

    input: float
    forward_backward: float
    sums: float
    update: float
    shortest: np.ndarray


class Recorder:
    """What the steps of one `fit` on one worker took.

    Args:
        strategy: A synchronous strategy.
        placement: Who the other workers are.
        directories: Directories of runs.
        exact: Whether all workers run steps one by one.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        placement: Placement,
        directories: Sequence[str],
        exact: bool,
    ):
        self._strategy, self._placement, self._exact = strategy, placement, exact
        places = [layout.worker_directory(directory, placement.rank) for directory in directories]
        self._boards = {place: TensorBoardWriter(place) for place in places}
        self._pending: list[
            tuple[Window, np.ndarray]
        ] = []  # windows that lack the other workers' times, and the shortest sums of theirs
        self._calls = 0  # since the exchange before
        self._steps: int | None = None  # since training began
        self._compiled = False
        self.bytes = 0
        for place in places:
            try:
                place.mkdir(parents=True, exist_ok=True)
            except OSError as error:  # the other workers wait for this one below
                self._write_no_more(place, error)
        if placement.workers > 1:
            all_gather(strategy, placement, np.zeros(_BLOCK))  # traces it
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """The training of an epoch begins."""
        self._open(time.perf_counter())

    def begin(self, steps: int) -> None:
        """A call of the train function begins; that many steps were made since training began, if this is the first one."""
        self._steps = steps if self._steps is None else self._steps

    def compiles(self) -> None:
        """Something is traced, or compiled."""
        self._compiled = True

    def add(self, found: Times) -> None:
        """Some steps have run."""
        self._parts["forward_backward"] += found.forward_backward
        self._parts["gradient_sync"] += found.sums
        self._parts["update"] += found.update
        self._shortest.append(found.shortest)

    def called(self, epoch: int, steps: int, examples: int, waited: float) -> None:
        """A call of the train function is over, also one that found no more data.

        Args:
            epoch: Which it belongs to.
            steps: Steps that it ran.
            examples: Rows of their global batches.
            waited: Seconds that they waited for batches.
        """
        self._parts["input"] += waited
        self._done += steps
        self._examples += examples
        self._steps = (self._steps or 0) + steps
        self._calls += bool(steps)
        long = time.perf_counter() - self._begin >= WINDOW_SECONDS or self._done >= EXCHANGE_STEPS
        if steps and (long or self._compiled):
            self._close(epoch)
        if steps and (
            self._unsettled() >= EXCHANGE_STEPS
            or (self._calls >= EXCHANGE_CALLS and not self._exact)
        ):
            self._close(epoch)
            self._exchange()

    def end_steps(self, epoch: int) -> np.ndarray | None:
        """The steps of an epoch are done; returns what the other workers must `learn`, if there are others."""
        self._close(epoch)
        sums = self._sums()
        return np.pad(sums, (0, _BLOCK - len(sums))) if self._placement.workers > 1 else None

    def learn(self, shortest: np.ndarray) -> None:
        """Takes what the `end_steps` of all workers returned, `[workers, _BLOCK]`; they have run equally many steps."""
        self._settle(shortest.min(0))

    def close(self) -> None:
        """The fit is over."""
        for place, board in list(self._boards.items()):
            try:
                board.close()
            except (OSError, tf.errors.OpError) as error:
                self._write_no_more(place, error)

    # --- Below ----------------------------------------------------------------------------------------------------------
    def _open(self, now: float) -> None:
        self._begin, self._done, self._examples = now, 0, 0
        self._parts = dict.fromkeys(("input", "forward_backward", "gradient_sync", "update"), 0.0)
        self._shortest: list[np.ndarray] = []
        self._compiled = False

    def _close(self, epoch: int) -> None:
        now = time.perf_counter()
        if not self._done:
            return
        place, seconds = self._placement, now - self._begin
        shortest = np.concatenate([np.zeros(0), *self._shortest])
        parts = complete(self._parts, seconds)
        window = Window(
            worker=place.rank, time=time.time(), epoch=epoch, step=self._steps or 0, steps=self._done, examples=self._examples,
            seconds=seconds, parts=parts, bytes=self.bytes if place.replicas > 1 else 0, compiled=not self._compiled,
        )  # fmt: skip
        self._pending.append((window, shortest))
        if place.workers == 1:
            self._exchange()
        self._open(now)

    def _unsettled(self) -> int:
        return self._done + sum(window.steps for window, _ in self._pending)

    def _exchange(self) -> None:
        """Learns of the others' times; called at the same step on every worker."""
        sums = self._sums()
        if self._placement.workers > 1 and len(sums):
            blocks: np.ndarray = np.pad(sums, (0, -len(sums) % _BLOCK)).reshape(-1, _BLOCK)
            sums = np.concatenate(
                [all_gather(self._strategy, self._placement, block).min(0) for block in blocks]
            )
        self._settle(sums)

    def _sums(self) -> np.ndarray:
        """Of each step that is not settled, the shortest time of a replica here in its sum."""
        return np.concatenate([np.zeros(0), *(steps for _, steps in self._pending)])

    def _settle(self, shortest: np.ndarray) -> None:
        """Writes the windows, now that the shortest times of all workers are known."""
        self._calls = 0
        pending, self._pending = self._pending, []
        for window, steps in pending:
            needed, shortest = float(shortest[: len(steps)].sum()), shortest[len(steps) :]
            self._write(settle(window, needed))

    def _write(self, window: Window) -> None:
        values = {
            f"step_breakdown/{part}_milliseconds": 1e3 * seconds / window.steps
            for part, seconds in window.parts.items()
        }
        values["step_breakdown/examples_per_second"] = window.examples / window.seconds
        for place, board in list(self._boards.items()):
            try:
                write(place, window)
                if window.compiled:
                    with tf.summary.record_if(
                        True
                    ):  # whatever step of a TensorBoard callback's update_freq this is
                        board.scalars(window.step, values)
            except (OSError, tf.errors.OpError) as error:  # a full disk ends no training
                self._write_no_more(place, error)

    def _write_no_more(self, place: Path, error: Exception) -> None:
        log.warning(
            "tfdist.StepBreakdown writes nothing more there, as %s cannot be written: %s",
            place,
            error,
        )
        del self._boards[place]


def times_of(begun: float, readings: np.ndarray) -> Times:
    """What readings of steps say.

    Args:
        begun: When the first step had its batch.
        readings: As `Marks.row` gives them, `[steps, 1 + 3 * replicas]`, each step's first being when the next batch was there.

    Example, one replica and two steps; the second one's batch is late:
        >>> times_of(10.0, np.array([[15.0, 11.0, 12.0, 14.0], [15.0, 16.0, 19.0, 19.5]]))
        Times(input=1.0, forward_backward=2.0, sums=4.0, update=2.5, shortest=array([1., 3.]))
    """
    gradients, sums, done = np.moveaxis(
        readings[:, 1:].reshape(len(readings), readings.shape[1] // PER_REPLICA, PER_REPLICA), 2, 0
    )
    finished = done.max(1, initial=0.0)
    ends = np.maximum(readings[:, 0], finished)
    begins = np.concatenate([[begun], ends])[: len(ends)]
    return Times(
        input=_total(ends - finished),
        forward_backward=_total(gradients.mean(1) - begins),
        sums=_total((sums - gradients).mean(1)),
        update=_total(finished - sums.mean(1)),
        shortest=np.maximum((sums - gradients).min(1), 0.0),
    )


def _total(seconds: np.ndarray) -> float:
    return max(0.0, float(seconds.sum()))  # the clock may have been set


def complete(measured: dict[str, float], seconds: float) -> dict[str, float]:
    """The parts of a window: what was not measured is Python's. Their sum is `seconds`, even if the clock was set meanwhile.

    Example:
        >>> complete({"input": 1.0, "update": 2.0}, 4.0)
        {'input': 1.0, 'update': 2.0, 'wait': 0.0, 'host': 1.0}
    """
    known = sum(measured.values())
    scale = min(1.0, seconds / known) if known else 1.0
    return {
        **{part: value * scale for part, value in measured.items()},
        "wait": 0.0,
        "host": max(0.0, seconds - known),
    }


def settle(window: Window, sums: float) -> Window:
    """Splits what replicas spent in sums.

    Args:
        window: With all of it as `gradient_sync`.
        sums: Seconds that the sums took where they took shortest, over all replicas.
    """
    inside = window.parts["gradient_sync"]
    needed = min(inside, sums)
    return dataclasses.replace(
        window, parts={**window.parts, "gradient_sync": needed, "wait": inside - needed}
    )
