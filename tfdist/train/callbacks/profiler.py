"""Some steps of a training become a trace of TensorFlow's profiler, step by step; nothing is measured here."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable

import keras
import tensorflow as tf

from tfdist.keras_compat import engine_of, step_counter

log = logging.getLogger("tfdist")


class Profile:
    """Traces the steps of a window. Every worker has one, as all pause at the same steps; who has no directory traces nothing.

    With `steps_per_execution` it traces the executions that have a step of the window, as a whole; an epoch's last one, which may be
    shorter, counts as of all its steps.

    Args:
        first: The window's first step, counted from 1 since training began; of a model without an optimizer, since the `fit` began.
        last: Its last one.
    """

    def __init__(self, first: int, last: int):
        self.first, self.last = first, last
        self._model: keras.Model | None = None
        self._directory: str | None = None
        self._running = self._done = False
        self._trace: tf.profiler.experimental.Trace | None = None
        self._before = self._step = 0
        self._began: int | None = (
            None  # steps that were done when the first epoch of this fit began
        )

    def begin(self, model: keras.Model, directory: str | None) -> None:
        """A `fit` begins.

        Args:
            model: What it trains.
            directory: Where the trace goes, to `plugins/profile`; None: this worker traces nothing.
        """
        self._model, self._directory, self._done = model, directory, False
        self._before, self._step, self._began = 0, 0, None

    def begin_epoch(self) -> None:
        """An epoch begins; what was interrupted is restored."""
        assert self._model is not None
        optimizer = self._model.optimizer  # a train_step of the user's may need none
        begun = getattr(
            self._model.train_function, "steps_done", 0
        )  # steps that a resumed epoch counts as done
        counted = self._before + self._step  # at the end of the epoch before
        self._before = (
            counted
            if optimizer is None
            else int(keras.ops.convert_to_numpy(step_counter(optimizer))) - begun
        )  # steps before this epoch
        self._step = begun
        if self._began is None:
            self._began = self._before + begun
        self._pause()

    def before(self, batch: int) -> None:
        """A step begins, or Keras' call for one that is done."""
        if batch < self._step:
            return
        first = self._before + batch + 1
        if first <= self.last and first - 1 + self._per_call() >= self.first and not self._done:
            self._start()
            self._trace = (
                tf.profiler.experimental.Trace("train", step_num=first, _r=1)
                if self._running
                else None
            )
            if self._trace:
                self._trace.__enter__()

    def after(self, batch: int) -> None:
        """A step has ended."""
        self._leave()
        if batch + 1 > self._step:
            self._step = batch + 1
            self._pause()
        if self._running and self._before + batch + 1 >= self.last:
            self._stop()

    def end(self) -> None:
        """The `fit` has ended."""
        if self._running:
            self._stop()
        elif (
            self._directory is not None
            and not self._done
            and self._began is not None
            and self._began < self.last
        ):
            log.warning(
                "profile: steps %d to %d were not among those that ran; nothing is traced.",
                self.first,
                self.last,
            )

    def release(self) -> None:
        """The `fit` is over, perhaps by an error: the profiler ends, with what it has."""
        self._leave()
        if self._running:
            self._stop()

    def _leave(self) -> None:
        """Ends the part of the trace that is a step's."""
        if self._trace is not None:
            self._trace.__exit__(None, None, None)
            self._trace = None

    def _per_call(self) -> int:
        """Steps that run without Python, as an execution."""
        assert self._model is not None
        return self._model.steps_per_execution

    def _pause(self) -> None:
        """Lets the engine stop before the window, and after each execution in it."""
        assert self._model is not None
        engine, per_call = engine_of(self._model.distribute_strategy), self._per_call()
        begin = (
            (self.first - 1 - self._before) // per_call * per_call
        )  # a later step would let the execution with the first one run before
        if engine is not None and self._before + self._step < self.last:
            engine.pause_at(
                begin if self._step < begin else self._step + 1,
                f"profile {self.first}..{self.last}",
            )

    def _start(self) -> None:
        if self._running or self._directory is None:
            return
        try:
            tf.profiler.experimental.start(self._directory)
            self._running = True
        except tf.errors.AlreadyExistsError:
            self._done = True
            log.warning(
                "profile: another profiler runs in this process, so that steps %d to %d are not traced.",
                self.first,
                self.last,
            )
        except (
            Exception
        ) as error:  # a trace is not worth a training, which would end on this worker alone
            self._failed(error)

    def _stop(self) -> None:
        self._running, self._done = False, True
        try:
            tf.profiler.experimental.stop()
        except Exception as error:  # as above; a full disk, for one
            self._failed(error)
            return
        log.info(
            "profile of steps %d to %d: %s",
            self.first,
            self.last,
            how_to_look(str(self._directory), find=importlib.util.find_spec),
        )

    def _failed(self, error: Exception) -> None:
        self._done = True
        log.warning(
            "profile: steps %d to %d have no trace in %s: %s: %s",
            self.first,
            self.last,
            self._directory,
            type(error).__name__,
            error,
        )


def how_to_look(directory: str, find: Callable[[str], object]) -> str:
    """Where a trace is, and what shows it.

    Args:
        directory: The one that was given.
        find: Tells whether a package is there, as `importlib.util.find_spec`.

    Example:
        >>> how_to_look("runs/a/train", find=lambda name: None)
        'in runs/a/train/plugins/profile. To look at it: pip install tensorboard-plugin-profile; then TensorBoard has a tab PROFILE.'
    """
    place = os.path.join(directory, "plugins", "profile")
    if any(find(name) for name in ("tensorboard_plugin_profile", "xprof")):
        return f"in {place}, and in TensorBoard's tab PROFILE."
    return f"in {place}. To look at it: pip install tensorboard-plugin-profile; then TensorBoard has a tab PROFILE."
