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
WHO = "profile"


class Profile:
    """Traces the steps of a window. Every worker has one, as all pause at the same steps; who has no directory traces nothing.

    Args:
        first: The window's first step, counted from 1 since training began.
        last: Its last one.
    """

    def __init__(self, first: int, last: int):
        self.first, self.last = first, last
        self._model: keras.Model | None = None
        self._directory: str | None = None
        self._running = self._done = False
        self._trace: tf.profiler.experimental.Trace | None = None
        self._before = self._step = 0

    def begin(self, model: keras.Model, directory: str | None) -> None:
        """A `fit` begins.

        Args:
            model: What it trains.
            directory: Where the trace goes, to `plugins/profile`; None: this worker traces nothing.
        """
        self._model, self._directory, self._done = model, directory, False

    def begin_epoch(self) -> None:
        """An epoch begins; what was interrupted is restored."""
        assert self._model is not None
        done = int(keras.ops.convert_to_numpy(step_counter(self._model.optimizer)))
        self._step = getattr(self._model.train_function, "steps_done", 0)  # those that a resumed epoch counts as done
        self._before = done - self._step  # steps before this epoch
        self._pause()

    def before(self, batch: int) -> None:
        """A step begins, or Keras' call for one that is done."""
        if batch < self._step:
            return
        if self._within(self._before + batch + 1) and not self._done:
            self._start()
            self._trace = tf.profiler.experimental.Trace("train", step_num=self._before + batch + 1, _r=1) if self._running else None
            if self._trace:
                self._trace.__enter__()

    def after(self, batch: int) -> None:
        """A step has ended."""
        if self._trace is not None:
            self._trace.__exit__(None, None, None)
            self._trace = None
        if batch + 1 > self._step:
            self._step = batch + 1
            self._pause()
        if self._running and self._before + batch + 1 >= self.last:
            self._stop()

    def end(self) -> None:
        """The `fit` has ended."""
        if self._running:
            self._stop()
        elif self._directory is not None and not self._done:
            log.warning("profile: steps %d to %d were not among those that ran; nothing is traced.", self.first, self.last)

    def _within(self, step: int) -> bool:
        return self.first <= step <= self.last

    def _pause(self) -> None:
        """Lets the engine stop before the window, and after each step of it."""
        assert self._model is not None
        engine, done = engine_of(self._model.distribute_strategy), self._before + self._step
        if engine is not None and done < self.last:
            engine.pause_at((self.first - 1 if done < self.first - 1 else done + 1) - self._before, WHO)

    def _start(self) -> None:
        if self._running or self._directory is None:
            return
        try:
            tf.profiler.experimental.start(self._directory)
            self._running = True
        except tf.errors.AlreadyExistsError:
            self._done = True
            log.warning("profile: another profiler runs in this process, so that steps %d to %d are not traced.", self.first, self.last)

    def _stop(self) -> None:
        self._running, self._done = False, True
        tf.profiler.experimental.stop()
        log.info("profile of steps %d to %d: %s", self.first, self.last, how_to_look(str(self._directory), find=importlib.util.find_spec))


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
