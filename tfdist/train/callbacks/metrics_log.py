"""What training comes to becomes scalars of writers, epoch by epoch or every so many steps; no writer is chosen here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfdist.keras_compat import engine_of, step_counter
from tfdist.telemetry.writers import Telemetry, Writer


class Log(keras.callbacks.Callback):
    """Sends losses and metrics of all replicas to writers, on the chief; training code knows none of them.

    Each epoch has, beside what Keras tells, its `learning_rate`, its `seconds` (of training, validation not included) and the
    `time` of its end, in seconds since 1970.

    Args:
        writers: Where to; see `tfdist.telemetry.writers`.
        every: Also send `batch_*` values after every so many steps of an epoch. Steps run one by one then. None: epochs only.
        settings: What the run was told, by name, for the writers that compare runs.

    Raises:
        ValueError: For an `every` that is no number of steps.

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
        self.telemetry, self.every, self.settings = Telemetry(writers), every, settings
        self.seconds: list[float] = []  # of each epoch that ran in this process
        self._begin: float | None = None
        self._writes = self._begun = False

    def rate(self, examples: int | None) -> float | None:
        """Examples per second of the median epoch, of so many examples; the first one compiles and counts only if it is alone."""
        seconds = self.seconds[1:] or self.seconds
        return examples / statistics.median(seconds) if examples and seconds else None

    def on_train_begin(self, logs=None):
        engine = engine_of(self.model.distribute_strategy)
        self._writes, self._begun = engine is None or engine.is_chief, False

    def on_epoch_begin(self, epoch, logs=None):
        if self._writes and not self._begun:  # by now what was interrupted is restored
            self._begun = True
            self.telemetry.rewind(epoch, self._steps())
            if self.settings:
                self.telemetry.settings(self.settings)
        self._served = 0
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        before, self._served = self._served, batch + 1
        if (
            self._writes
            and self.every
            and logs
            and self._served // self.every > before // self.every
        ):
            self.telemetry.scalars(
                self._steps(),
                {f"batch_{name}": float(value) for name, value in logs.items()},
                "step",
            )

    def on_test_begin(self, logs=None):
        self._stop()

    def on_epoch_end(self, epoch, logs=None):
        self._stop()
        if self._writes:
            told = {name: float(value) for name, value in (logs or {}).items()}
            self.telemetry.scalars(
                epoch,
                {**told, **self._learning_rate(), "seconds": self.seconds[-1], "time": time.time()},
            )

    def on_train_end(self, logs=None):
        if self._writes:
            self.telemetry.close()

    def _stop(self) -> None:
        """Ends the epoch's time, at its validation or its end, whichever comes first."""
        if self._begin is not None:
            self.seconds.append(time.perf_counter() - self._begin)
            self._begin = None

    def _steps(self) -> int:
        optimizer = self.model.optimizer  # a train_step of the user's may need none
        return 0 if optimizer is None else int(keras.ops.convert_to_numpy(step_counter(optimizer)))

    def _learning_rate(self) -> dict[str, float]:
        rate = getattr(self.model.optimizer, "learning_rate", None)
        return {} if rate is None else {"learning_rate": float(keras.ops.convert_to_numpy(rate))}
