"""Metric logging: a callback that sends losses and metrics to any number of writers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfdist.keras_compat import engine_of, step_counter
from tfdist.telemetry.writers import Telemetry, Writer


class Log(keras.callbacks.Callback):
    """Callback that sends the losses and metrics of all replicas to writers, on the chief.

    The training code does not depend on any writer. Metrics whose results are vectors or dicts give
    a number for each entry, such as `f1_score/0`. In addition to the logs of Keras, each epoch
    has its `learning_rate`, its `seconds` (of training, without validation) and the `time` of its
    end, in seconds since 1970.

    Args:
        writers: Writers that receive the values; see `tfdist.telemetry.writers`.
        every: Number of steps of an epoch after which `batch_*` values are sent too. Steps then run
            one by one. None: only at the end of epochs.
        settings: Settings of the run by name, for writers that compare runs.

    Raises:
        ValueError: If `every` is not a number of steps.

    Example:
        >>> import sys
        >>> from tfdist.telemetry.writers import ConsoleWriter
        >>> log = Log([ConsoleWriter(sys.stdout)], settings={"optimizer": "adam"})
        >>> log.seconds
        []
    """

    def __init__(
        self,
        writers: Sequence[Writer],
        every: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        if every is not None and (
            isinstance(every, bool) or not isinstance(every, int) or every < 1
        ):
            raise ValueError(
                f"every: expected a number of steps, 1 or more, or None; received {every!r}."
            )
        self.telemetry = Telemetry(writers)
        self.every = every
        self.settings = settings
        self.seconds: list[float] = []  # of each epoch that ran in this process
        self._begin: float | None = None
        self._writes = False
        self._started = False

    def rate(self, examples: int | None) -> float | None:
        """Return the examples per second of the median epoch, or None if it is unknown.

        The first epoch includes compilation, so it counts only if it is the only one.

        Args:
            examples: Number of examples of an epoch, or None if it is unknown.
        """
        seconds = self.seconds[1:] or self.seconds
        return examples / statistics.median(seconds) if examples and seconds else None

    def on_train_begin(self, logs=None):
        """See `keras.callbacks.Callback`."""
        engine = engine_of(self.model.distribute_strategy)
        self._writes = engine is None or engine.is_chief
        self._started = False

    def on_epoch_begin(self, epoch, logs=None):
        """See `keras.callbacks.Callback`."""
        if self._writes and not self._started:  # a snapshot, if there is one, is restored by now
            self._started = True
            self.telemetry.rewind(epoch, self._steps())
            if self.settings:
                self.telemetry.settings(self.settings)
        self._batches = 0
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        """See `keras.callbacks.Callback`."""
        before = self._batches
        self._batches = batch + 1
        if (
            self._writes
            and self.every
            and logs
            and self._batches // self.every > before // self.every
        ):
            self.telemetry.scalars(
                self._steps(),
                {f"batch_{name}": value for name, value in logs.items()},
                "step",
            )

    def on_test_begin(self, logs=None):
        """See `keras.callbacks.Callback`."""
        self._stop()

    def on_epoch_end(self, epoch, logs=None):
        """See `keras.callbacks.Callback`."""
        self._stop()
        if self._writes:
            self.telemetry.scalars(
                epoch,
                {
                    **self._learning_rate(),
                    # ReduceLROnPlateau adds the rate of the epoch, before it changes it.
                    **(logs or {}),
                    "seconds": self.seconds[-1],
                    "time": time.time(),
                },
            )

    def on_train_end(self, logs=None):
        """See `keras.callbacks.Callback`."""
        if self._writes:
            self.telemetry.close()

    def _stop(self) -> None:
        """Stop the timer of the epoch, at its validation or its end, whichever comes first."""
        if self._begin is not None:
            self.seconds.append(time.perf_counter() - self._begin)
            self._begin = None

    def _steps(self) -> int:
        optimizer = self.model.optimizer  # a custom train_step may not need one
        return 0 if optimizer is None else int(keras.ops.convert_to_numpy(step_counter(optimizer)))

    def _learning_rate(self) -> dict[str, float]:
        rate = getattr(self.model.optimizer, "learning_rate", None)
        return {} if rate is None else {"learning_rate": float(keras.ops.convert_to_numpy(rate))}
