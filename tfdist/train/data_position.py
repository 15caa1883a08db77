"""Position of a `fit` in its data set, saved in snapshots and restored on resume."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_compat import pass_counters


class DataPosition:
    """Position of one `fit` in its data set.

    Keras' epochs do not tell it: an epoch need not be a pass over the data, a `fit` may begin at
    another epoch than 0, and a data pipeline may have been read before. A position is therefore the
    epoch in which the current pass began, and the numbers that the data pipelines of `tfdist.data`
    had then for their next epoch. They determine the order of the examples. A data set that was
    made from such data pipelines, as by `map`, has their numbers too.

    Args:
        dataset: Data set of batches, or anything else that Keras reads.
        steps_per_epoch: Steps of an epoch, where an epoch is not one pass over the data.
        steps_per_execution: Steps of a call. The last call of an epoch reads as many batches as
            any other.
    """

    def __init__(
        self, dataset: Any, steps_per_epoch: int | None = None, steps_per_execution: int = 1
    ):
        self._counters = pass_counters(dataset) if isinstance(dataset, tf.data.Dataset) else []
        self._is_pipeline = hasattr(dataset, "of_epoch")
        self._length = int(dataset.cardinality()) if isinstance(dataset, tf.data.Dataset) else -1
        self._per_call = steps_per_execution
        self._per_epoch = self._batches(steps_per_epoch or 0)
        self._begun: list[int] | None = None
        self._returned = False  # whether the pass that begins next is one that began before

    @property
    def ordered(self) -> bool:
        """Return whether data pipelines of `tfdist.data` determine the order of the examples."""
        return bool(self._counters)

    @property
    def continuous(self) -> bool:
        """Return whether epochs are parts of passes, and each pass ends with an epoch."""
        return bool(self._per_epoch) and self._length > 0 and self._length % self._per_epoch == 0

    def begin_pass(self, epoch: int) -> None:
        """Note the beginning of a pass, before its first batch is read.

        Args:
            epoch: Epoch of Keras, from 0.
        """
        if not self._returned:
            self._begun = [epoch, *self._next()]
        self._returned = False

    def at(self, epoch: int, step: int) -> list[int]:
        """Return the position for a snapshot that is saved after some steps of an epoch."""
        if self._begun is None:
            return [epoch, *self._next()]
        begin, *numbers = self._begun
        if self.continuous and self._is_pipeline:
            # After a return to the middle of a pass, one iterator yields all passes that follow.
            epochs_per_pass = self._length // self._per_epoch
            passes = (epoch - begin) // epochs_per_pass
            return [begin + passes * epochs_per_pass, *(number + passes for number in numbers)]
        if step or self.continuous or epoch - begin < self._epochs_per_pass():
            return self._begun
        return [epoch, *self._next()]

    def go_to(self, epoch: int, step: int, position: Sequence[int]) -> int:
        """Return to a position, and return how many batches of its pass are done.

        Args:
            epoch: Epoch of Keras in which `fit` continues.
            step: Number of steps of that epoch that are done.
            position: Position that `at` returned. Empty: that of a snapshot which has none.
        """
        if not position:
            first = 0 if self._per_epoch else epoch
            position = [first, *(first for _ in self._counters)]
        begin, *numbers = position
        for counter, number in zip(self._counters, numbers, strict=False):
            counter.next = number
        done = (epoch - begin) * self._per_epoch + self._batches(step)
        self._begun = list(position)
        self._returned = done > 0
        return done

    def rest(
        self,
        dataset: tf.data.Dataset,
        done: int,
        batches_of: Callable[[tf.data.Dataset, int], tf.data.Dataset],
    ) -> tf.data.Dataset | None:
        """Return what is left of a pass, and all passes after it if this is `continuous`.

        Args:
            dataset: Data set of the whole pass.
            done: Number of its batches that are done, 1 or more.
            batches_of: Function that returns a data set without its first batches, given their
                number.

        Returns:
            The data set that continues; None if the next pass begins as usual.
        """
        if self.continuous:
            if self._is_pipeline:
                return batches_of(dataset, done).concatenate(batches_of(dataset, 0).repeat())
            return batches_of(dataset.repeat(), done)
        rest = batches_of(dataset, done)
        if self._per_epoch or not 0 < self._length <= done:
            return rest
        if self._counters:
            # Keras begins the next pass without reading the end of this one, which counts it.
            for _ in rest:
                pass
        self._returned = False
        return None

    def batches_before(self, epoch: int, step: int) -> int:
        """Return the number of batches that Keras reads before a step, from epoch 0 on.

        It is known where the number of steps per epoch is given.
        """
        return epoch * self._per_epoch + self._batches(step)

    def _next(self) -> list[int]:
        return [int(counter.next) for counter in self._counters]

    def _batches(self, steps: int) -> int:
        """Return the number of batches that the calls of so many steps read."""
        return -(-steps // self._per_call) * self._per_call

    def _epochs_per_pass(self) -> float:
        if not self._per_epoch:
            return 1
        return math.ceil(self._length / self._per_epoch) if self._length > 0 else math.inf
