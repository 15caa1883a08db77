"""Engine of a `fit` without a strategy of tfdist, which makes it resume exactly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.backup import state
from tfdist.keras_compat import fed_by, has_strategy
from tfdist.parallel.placement import Placement
from tfdist.train.data_position import DataPosition
from tfdist.train.hooks import Hooks, fewest
from tfdist.train.synchronous.feed import Feed, FeedIterator, after, limited, symbolic


class FitWithoutStrategy(Hooks):
    """Engine of one `fit` of a model whose strategy has none.

    The model may be a plain Keras model or a `PipelineModel`. Keras runs the steps. This engine
    gives Keras the data from the step on at which `fit` resumes, and does not run the steps before.
    Under a strategy that tfdist did not make, epochs keep their order of examples, but are
    restarted from their beginning.

    Args:
        model: Model that is trained.
        call: Arguments of `fit`, as `hooks.bind` returns them.
        epoch: Function that returns Keras' current epoch.
    """

    def __init__(self, model: keras.Model, call: dict[str, Any], epoch: Callable[[], int]):
        self._model = model
        self._epoch = epoch
        self._epochs = range(call["initial_epoch"], call["epochs"])
        self._steps = fewest(call["steps_per_epoch"], keras.config.max_steps_per_epoch())
        self._position = self._position_in(call["x"])
        self._feed: Feed | None = None
        self._keras_function: Callable | None = None  # of the steps
        self._iterator: Any = None  # that Keras passed to the last step
        self._replay = 0  # steps of the epoch to be counted, not run
        self._totals: list[np.ndarray] | None = None  # of metrics, until the first call
        self._logs: dict[str, Any] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Feed the model, whose `fit` runs in the context."""
        fed = contextlib.nullcontext() if has_strategy(self._model) else fed_by(self.feed)
        try:
            with fed:
                yield
        finally:
            if self._keras_function is not None:
                self._model.train_function = self._keras_function

    def feed(self, dataset: tf.data.Dataset) -> Any:
        """Return the `Feed` that Keras iterates over to train, and any other data set as it is."""
        if self._feed is not None:
            return dataset
        self._position = self._position_in(dataset)
        per_epoch = self._position.batches_before(1, 0)
        self._feed = _WholeBatches(
            dataset,
            Placement(1),
            None,
            steps=(
                range(self._epochs.start * per_epoch, self._epochs.stop * per_epoch)
                if per_epoch
                else None
            ),
            position=self._position,
            epoch=self._epoch,
        )
        return self._feed

    # --- Hooks for BackupAndRestore ---------------------------------------------------------------
    def begin(self, model: keras.Model) -> None:
        """Run the steps of this `fit` from now on; see `Hooks.begin`."""
        if self._keras_function is None:
            self._keras_function = model.train_function
            model.train_function = self._run

    def begins_within_epochs(self) -> bool:
        """Return whether this `fit` can start in the middle of an epoch."""
        return self._feed is not None

    def data_position(self, epoch: int, step: int) -> list[int]:
        """Return the position in the data after a step; see `Hooks.data_position`."""
        return self._position.at(epoch, step)

    def begin_at(
        self, model: keras.Model, epoch: int, step: int, position: Sequence[int] = ()
    ) -> bool:
        """Start this `fit` at a step of an epoch; see `Hooks.begin_at`."""
        if self._feed is None:
            self._position.go_to(epoch, 0, position)
            return False
        self._feed.begin_at(epoch, step, position)
        self._replay = step
        return True

    def metric_totals(self, model: keras.Model) -> tuple[list, list]:
        """Return the values of `model.metrics_variables`, if `fit` can resume within an epoch."""
        return [] if self._feed is None else state.each_value(model.metrics_variables), []

    def set_metric_totals(self, model: keras.Model, totals: list, parts: list) -> None:
        """Restore the values that `metric_totals` returned, at the next call of a step."""
        self._totals = totals  # Keras creates metrics in the first step

    # --- Steps ------------------------------------------------------------------------------------
    def _run(self, iterator: Any) -> dict[str, Any]:
        """Run Keras' next steps, or count steps that were done before."""
        assert self._keras_function is not None
        if self._totals is not None:
            self._restore_metrics(iterator)
        if self._replay > 0:
            self._replay -= self._model.steps_per_execution
            return self._logs
        if isinstance(iterator, FeedIterator):
            return self._keras_function(iterator.iterator)
        if iterator is not self._iterator:
            self._iterator = iterator
            self._position.begin_pass(self._epoch())
        return self._keras_function(iterator)

    def _restore_metrics(self, iterator: FeedIterator) -> None:
        model = self._model
        totals = self._totals
        self._totals = None
        assert totals is not None
        if len(model.metrics_variables) != len(totals):
            # Tracing a step creates what the step would create, without running it.
            tf.function(model.train_step, autograph=False).get_concrete_function(
                symbolic(iterator.feed.element_spec)
            )
        shapes = [tuple(v.shape) for v in model.metrics_variables]
        if shapes != [np.shape(total) for total in totals]:
            raise ValueError(
                "BackupAndRestore: expected the metrics of the snapshot, with variables of the "
                f"shapes {[np.shape(total) for total in totals]}; received {shapes}. Compile with "
                "the same metrics as before, or name another directory."
            )
        for variable, total in zip(model.metrics_variables, totals, strict=True):
            variable.assign(total)
        self._logs = model.get_metrics_result()

    def _position_in(self, data: Any) -> DataPosition:
        return DataPosition(data, self._steps, self._model.steps_per_execution)


class _WholeBatches(Feed):
    """Feed of whole batches as they are, for Keras' own steps."""

    def _of(self, dataset: tf.data.Dataset, skipped: int, most: int | None) -> tf.data.Dataset:
        return limited(after(dataset, skipped), most)
