"""Profiling: trace a window of training steps with TensorFlow's profiler."""

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
    """Traces the steps of a window.

    Every worker needs one, because all workers pause at the same steps. A worker without a
    directory traces nothing.

    With `steps_per_execution`, whole executions are traced: every execution that contains a step of
    the window. The last execution of an epoch may be shorter, but counts as having all its steps.

    Args:
        first: First step of the window, counted from 1 since training began. For a model without an
            optimizer, steps are counted since the `fit` began.
        last: Last step of the window.
    """

    def __init__(self, first: int, last: int):
        self.first = first
        self.last = last
        self._model: keras.Model | None = None
        self._directory: str | None = None
        self._running = False
        self._done = False
        self._trace: tf.profiler.experimental.Trace | None = None
        self._before = 0
        self._step = 0
        # Number of steps that were done when the first epoch of this fit began.
        self._first_done: int | None = None

    def begin(self, model: keras.Model, directory: str | None) -> None:
        """Reset the state at the start of a `fit`.

        Args:
            model: Model to train.
            directory: Directory of the trace, which goes to its subdirectory `plugins/profile`;
                None if this worker does not trace.
        """
        self._model = model
        self._directory = directory
        self._done = False
        self._before = 0
        self._step = 0
        self._first_done = None

    def begin_epoch(self) -> None:
        """Count the steps done before this epoch. A snapshot is already restored by then."""
        assert self._model is not None
        optimizer = self._model.optimizer  # a custom train_step may not need one
        # Steps that a resumed epoch counts as done.
        steps_done = getattr(self._model.train_function, "steps_done", 0)
        previous_end = self._before + self._step  # steps at the end of the previous epoch
        self._before = (
            previous_end
            if optimizer is None
            else int(keras.ops.convert_to_numpy(step_counter(optimizer))) - steps_done
        )  # steps before this epoch
        self._step = steps_done
        if self._first_done is None:
            self._first_done = self._before + steps_done
        self._pause()

    def before(self, batch: int) -> None:
        """Start tracing a step if it is in the window.

        Keras also calls this for the replayed steps of a resumed epoch, which are ignored.
        """
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
        """End the trace of a step, and stop the profiler after the last step of the window."""
        self._leave()
        if batch + 1 > self._step:
            self._step = batch + 1
            self._pause()
        if self._running and self._before + batch + 1 >= self.last:
            self._stop()

    def end(self) -> None:
        """Stop the profiler at the end of a `fit`, or warn if no step of the window ran."""
        if self._running:
            self._stop()
        elif (
            self._directory is not None
            and not self._done
            and self._first_done is not None
            and self._first_done < self.last
        ):
            log.warning(
                "profile: nothing is traced, because steps %d to %d did not run in this fit.",
                self.first,
                self.last,
            )

    def release(self) -> None:
        """Stop the profiler, and keep what it traced, also after a `fit` that failed."""
        self._leave()
        if self._running:
            self._stop()

    def _leave(self) -> None:
        """End the trace event of the current step."""
        if self._trace is not None:
            self._trace.__exit__(None, None, None)
            self._trace = None

    def _per_call(self) -> int:
        """Return the number of steps of one execution, which run without returning to Python."""
        assert self._model is not None
        return self._model.steps_per_execution

    def _pause(self) -> None:
        """Make the engine pause before the window, and after each execution in it."""
        assert self._model is not None
        engine = engine_of(self._model.distribute_strategy)
        per_call = self._per_call()
        # A pause at a later step would come after the execution with the window's first step.
        begin = (self.first - 1 - self._before) // per_call * per_call
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
                "profile: steps %d to %d are not traced, because another profiler runs in this "
                "process.",
                self.first,
                self.last,
            )
        except Exception as error:
            # A failed trace must not end training, which would fail on this worker only.
            self._failed(error)

    def _stop(self) -> None:
        self._running = False
        self._done = True
        try:
            tf.profiler.experimental.stop()
        except Exception as error:  # as above; the disk may be full, for example
            self._failed(error)
            return
        log.info(
            "profile of steps %d to %d: %s",
            self.first,
            self.last,
            viewing_hint(str(self._directory), find=importlib.util.find_spec),
        )

    def _failed(self, error: Exception) -> None:
        self._done = True
        log.warning(
            "profile: could not trace steps %d to %d to %s: %s: %s",
            self.first,
            self.last,
            self._directory,
            type(error).__name__,
            error,
        )


def viewing_hint(directory: str, find: Callable[[str], object]) -> str:
    """Return where a trace is and how to view it.

    Args:
        directory: Directory that was given to the profiler.
        find: Function that returns None for a package that is not installed, as
            `importlib.util.find_spec` does.

    Example:
        >>> viewing_hint("runs/a/train", find=lambda name: None)
        'in runs/a/train/plugins/profile. To view it: pip install tensorboard-plugin-profile; then TensorBoard has a tab PROFILE.'
    """  # noqa: E501
    path = os.path.join(directory, "plugins", "profile")
    if any(find(name) for name in ("tensorboard_plugin_profile", "xprof")):
        return f"in {path}, and in TensorBoard's tab PROFILE."
    return (
        f"in {path}. To view it: pip install tensorboard-plugin-profile; then TensorBoard has a "
        "tab PROFILE."
    )
