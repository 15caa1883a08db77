"""Parameter-server training: run Keras' `fit`, `evaluate` and `predict` on remote workers.

The coordinator dispatches the steps and runs none itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.keras_compat import global_seed
from tfdist.keras_compat.sparse_gradients import merge_duplicates
from tfdist.runtime.launch_protocol import Phase
from tfdist.train.callbacks.saving import backing
from tfdist.train.data_position import DataPosition
from tfdist.train.health.heartbeat import Heartbeat, length
from tfdist.train.hooks import Hooks, bind, check_optimizer, check_stateful, fewest
from tfdist.train.parameter_server.batch_stream import Stream
from tfdist.train.parameter_server.dispatch import RemoteRunner
from tfdist.train.parameter_server.metric_deltas import count_updates, ticket
from tfdist.train.parameter_server.predict import RemotePredictor
from tfdist.train.parameter_server.worker_pool import Pool
from tfdist.train.synchronous.compiled_step import postpone
from tfdist.train.synchronous.step_monitoring import StepMonitoring
from tfdist.train.synchronous.worker_callbacks import backups_last, listed, needs_single_steps


class Coordinator(Hooks):
    """Engine of one parameter-server strategy.

    Args:
        strategy: Strategy; this object becomes its `tfdist_engine`.
        pool: Pool of workers.
        host: Device of this process.
        reading: Reader of `tf.data` input: `workers`, `coordinator`, or `auto`, which is the
            workers if the data set can be sent to them.
    """

    heartbeat: Heartbeat

    def __init__(
        self, strategy: tf.distribute.Strategy, pool: Pool, host: str, reading: str = "auto"
    ):
        self._strategy = strategy
        self._pool = pool
        self._host = host
        self._reading = reading
        self._kind: str | None = None  # the Keras method that is reading data
        self._by_workers = False
        self._active: RemoteRunner | None = None
        self._watches: dict[str, StepMonitoring] = {}
        self._training_stream: Stream | None = None  # of the running fit
        self._steps_per_epoch: int | None = None  # None unless given
        self.heartbeat = Heartbeat(is_chief=True)
        strategy.tfdist_engine = self

    # --- fit, evaluate, predict -------------------------------------------------------------------
    def fit(self, model: keras.Model, keras_method: Callable, *args, **kwargs):
        """Run `keras.Model.fit` on the workers."""
        call = bind(keras_method, model, args, kwargs)
        _undistribute("fit", call, "x", "validation_data")
        self._check(model)
        callbacks = backups_last(call["kwargs"])
        steps = fewest(call["steps_per_epoch"], keras.config.max_steps_per_epoch())
        self._training_stream = None
        self._steps_per_epoch = steps
        self._watches = {
            "fit": StepMonitoring(needs_single_steps(callbacks, "train"), steps=steps),
            "evaluate": StepMonitoring(
                needs_single_steps(callbacks, "test"), steps=call["validation_steps"]
            ),
        }
        if isinstance(call["x"], tf.data.Dataset):
            # Keras warns that its default True has no effect on a Dataset.
            call["kwargs"].setdefault("shuffle", False)
        _check_end("fit", call["x"], steps, "steps_per_epoch")
        _check_end("fit", call["validation_data"], call["validation_steps"], "validation_steps")
        self.heartbeat.begin(call["initial_epoch"], steps or length(call["x"]))
        with (
            backing(callbacks, True, call["initial_epoch"], call["validation_data"]),
            self._during("fit", call["x"]),
        ):
            return keras_method(model, **call["kwargs"])

    def evaluate(self, model: keras.Model, keras_method: Callable, *args, **kwargs):
        """Run `keras.Model.evaluate` on the workers."""
        call = bind(keras_method, model, args, kwargs)
        _undistribute("evaluate", call, "x")
        # Keras passes a CallbackList when this is the validation of a fit.
        if not isinstance(call["callbacks"], keras.callbacks.CallbackList):
            self._check(model)
            self._watches = {
                "evaluate": StepMonitoring(
                    needs_single_steps(listed(call["callbacks"]), "test"), steps=call["steps"]
                )
            }
        _check_end("evaluate", call["x"], call["steps"], "steps")
        self.heartbeat.expect_tracing(model.test_function)
        with self._during("evaluate", call["x"]):
            return keras_method(model, **call["kwargs"])

    def predict(self, model: keras.Model, keras_method: Callable, *args, **kwargs):
        """Run `keras.Model.predict` on the workers."""
        call = bind(keras_method, model, args, kwargs)
        _undistribute("predict", call, "x")
        self._check(model)
        _check_end("predict", call["x"], call["steps"], "steps")
        self.heartbeat.expect_tracing(model.predict_function)
        with self._during("predict", None):
            return keras_method(model, **call["kwargs"])

    def train_on_batch(self, model: keras.Model, keras_method: Callable, *args, **kwargs):
        """Run `keras.Model.train_on_batch` on the workers."""
        self._check(model)
        self._watches = {}
        with self._pool.open(self._report_progress):
            try:
                return keras_method(model, *args, **kwargs)
            finally:
                self._active = None
                self.heartbeat.end()

    test_on_batch = train_on_batch
    predict_on_batch = train_on_batch

    # --- Hooks of these methods -------------------------------------------------------------------
    def make_train_function(self, model: keras.Model, _, force: bool = False):
        """See `keras.Model.make_train_function`."""
        if force or not isinstance(model.train_function, RemoteRunner):
            model.train_function = self._runner(model, model.train_step)
        self._begin(model.train_function, "fit")
        return model.train_function

    def make_test_function(self, model: keras.Model, _, force: bool = False):
        """See `keras.Model.make_test_function`."""
        if force or not isinstance(model.test_function, RemoteRunner):
            model.test_function = self._runner(model, model.test_step)
        self._begin(model.test_function, "evaluate")
        return model.test_function

    def make_predict_function(self, model: keras.Model, _, force: bool = False):
        """See `keras.Model.make_predict_function`."""
        if force or not isinstance(model.predict_function, RemotePredictor):
            model.predict_function = RemotePredictor(self._pool, self._strategy, model, self._host)
        return model.predict_function

    def get_metrics_result(self, model: keras.Model, keras_method: Callable):
        """Wait for the workers at the end of an epoch, and return the metrics.

        Keras calls this eagerly at the end of each epoch.
        """
        runner = self._active
        if not tf.executing_eagerly() or runner is None or runner.model is not model:
            return keras_method(model)
        results = runner.end_epoch()
        if runner is model.train_function:
            self.heartbeat.epoch += 1
            self.heartbeat.step = 0
        return results

    def save(self, model: keras.Model, keras_method: Callable, *args, **kwargs):
        """Save a model after all steps that Keras has counted are done."""
        if self._active is not None and self._active.model is model:
            self._active.join()
        return keras_method(model, *args, **kwargs)

    save_weights = save
    export = save

    def apply(self, optimizer: keras.optimizers.Optimizer, keras_apply: Callable, grads, variables):
        """Apply gradients, so that every update of the optimizer is counted exactly once."""
        if postpone(optimizer, keras_apply, grads, variables):
            return None
        grads = [merge_duplicates(g) for g in grads]
        # It updates through its inner optimizer, in a tf.cond.
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            count_updates(optimizer, optimizer.check_finite(grads))
            return keras_apply(optimizer, grads, variables)
        count_updates(optimizer, True)
        with ticket(optimizer):
            return keras_apply(optimizer, grads, variables)

    def data_position(self, epoch: int, step: int) -> list[int]:
        """Return the position in the data after a step; see `Hooks.data_position`."""
        stream = self._training_stream
        return [] if stream is None else stream.position.at(epoch, step)

    def begin_at(
        self, model: keras.Model, epoch: int, step: int, position: Sequence[int] = ()
    ) -> bool:
        """Return False: training can resume only at the beginning of an epoch.

        The steps that workers have done within an epoch have no order. The epochs keep their order
        of examples.
        """
        self.heartbeat.epoch = epoch
        if self._training_stream is not None:
            self._training_stream.position.go_to(epoch, 0, position)
        return False

    def synchronize(self, model: keras.Model) -> None:
        """Wait for all dispatched steps."""
        if self._active is not None:
            self._active.join()

    @property
    def feeding(self) -> bool:  # type: ignore[override]
        """Return whether a `fit`, `evaluate` or `predict` is reading data."""
        return self._kind is not None

    def feed(self, dataset: tf.data.Dataset) -> Stream:
        """Return the iterable that Keras reads instead of a data set."""
        trains = self._kind == "fit" and self._training_stream is None
        stream = Stream(
            dataset,
            self._host,
            self._by_workers,
            global_seed(),
            DataPosition(dataset, self._steps_per_epoch) if trains else None,
            lambda: self.heartbeat.epoch,
        )
        if trains:
            self._training_stream = stream
        if self._reading == "workers" and self._by_workers and not stream.by_workers:
            raise ValueError(
                'reading="workers": the workers cannot read this data set, because it holds Python '
                "code, a variable or large arrays. Build it from files and TensorFlow operations, "
                'or pass reading="auto".'
            )
        return stream

    # --- Helpers ----------------------------------------------------------------------------------
    def _runner(self, model, model_step) -> RemoteRunner:
        def results():
            active = self._active
            self._active = None
            try:
                return model.get_metrics_result()
            finally:
                self._active = active

        trains = model_step == model.train_step

        def on_call(steps: int) -> None:
            if trains:
                done = max(0, steps - self.heartbeat.step)
                self.heartbeat.at(self.heartbeat.epoch, steps, done)
            else:
                self.heartbeat.beat(Phase.RUNNING)

        return RemoteRunner(
            self._pool, self._strategy, model, model_step, results, self.apply, on_call, self._host
        )

    def _begin(self, runner: RemoteRunner, kind: str) -> None:
        runner.begin(self._watches.get(kind, StepMonitoring()))
        self._active = runner

    @contextlib.contextmanager
    def _during(self, kind: str, data):
        outer = self._kind, self._active, self._by_workers
        self._kind = kind
        # Keras also makes data sets of arrays, which are in this process, and of generators, which
        # cannot be sent to workers.
        self._by_workers = self._reading != "coordinator" and isinstance(data, tf.data.Dataset)
        with contextlib.nullcontext() if outer[0] else self._pool.open(self._report_progress):
            try:
                yield
            finally:
                self._kind, self._active, self._by_workers = outer
                if outer[0] is None:
                    self.heartbeat.end()

    def _report_progress(self) -> None:
        self.heartbeat.beat_within_fit(Phase.RUNNING)

    def _check(self, model: keras.Model) -> None:
        check_optimizer(model, self._strategy)
        check_stateful(model, len(self._pool.workers), "workers")
        if model.run_eagerly:
            raise ValueError(
                "run_eagerly=True under parameter_server: steps run as graphs in other processes. "
                "Compile the model without run_eagerly. To debug a step, train with the strategy "
                "one_device."
            )


def _undistribute(method: str, call: dict, *names: str) -> None:
    """Replace what `strategy.experimental_distribute_dataset` returned by the data set itself.

    TensorFlow builds its result only in a worker, for `create_per_worker_dataset`. One replica
    trains on the batch of a step, so that batch is the one that TensorFlow would give it.

    Args:
        method: Name of the Keras method.
        call: Its arguments, as `bind` returns them.
        *names: Names of the arguments that hold data.
    """
    for name in names:
        if not isinstance(call[name], tf.distribute.DistributedDataset):
            continue
        dataset = getattr(call[name], "tfdist_dataset", None)
        if dataset is None:
            raise ValueError(
                f"{method}: {name} is a result of strategy.distribute_datasets_from_function, "
                "which has other data in each worker, expected a tf.data.Dataset. Pass the data "
                "set itself: the workers share its batches."
            )
        call[name] = dataset
        call["kwargs"][name] = dataset


def _check_end(method: str, data, steps: int | None, argument: str) -> None:
    if (
        isinstance(data, tf.data.Dataset)
        and not steps
        and int(data.cardinality()) == tf.data.INFINITE_CARDINALITY
    ):
        raise ValueError(
            f"{method}: the data set is infinite, expected {argument}. Pass {argument}=..., or "
            "remove repeat()."
        )
