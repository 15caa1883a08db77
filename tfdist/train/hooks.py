"""What an engine is asked by the hooks in `keras_compat`: each method here leaves Keras as it is; engines override some."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.backup import state
from tfdist.keras_compat import strategy_of
from tfdist.train.health import preemption
from tfdist.train.health.heartbeat import Heartbeat
from tfdist.train.health.watchdog import Watchdog


def _as_keras(self, model: keras.Model, keras_method: Callable, *args, **kwargs) -> Any:
    return keras_method(model, *args, **kwargs)


class Hooks:
    """The methods named in `keras_compat.MODEL_HOOKS`, called with (model, Keras' own method, its arguments), and the others.

    Attributes:
        is_chief: Whether this process writes checkpoints, logs and console.
        heartbeat: What its fits tell the launcher; None: nothing.
        watchdog: How long it waits for other workers.
        feeding: Whether Keras is in `fit`, `evaluate` or `predict`, and gets its data from the method `feed`.
    """

    is_chief = True
    feeding = False
    heartbeat: Heartbeat | None = None
    watchdog = Watchdog()

    fit = _as_keras
    evaluate = _as_keras
    predict = _as_keras
    train_on_batch = _as_keras
    test_on_batch = _as_keras
    predict_on_batch = _as_keras
    make_train_function = _as_keras
    make_test_function = _as_keras
    make_predict_function = _as_keras
    get_metrics_result = _as_keras
    save = _as_keras
    save_weights = _as_keras
    export = _as_keras

    def feed(self, dataset):
        """What Keras walks over instead of a `tf.data.Dataset`."""
        raise NotImplementedError

    def apply(self, optimizer: keras.optimizers.Optimizer, keras_apply: Callable, grads, variables):
        """`optimizer.apply` in replica context."""
        return keras_apply(optimizer, grads, variables)

    # --- What BackupAndRestore asks -----------------------------------------------------------------------------------
    def begins_within_epochs(self) -> bool:
        """Whether `begin_at` can, with the data of the `fit` that runs."""
        return False

    def begin_at(self, model: keras.Model, epoch: int, step: int) -> bool:
        """Lets the `fit` that begins take up its data there, and count the steps before as done; False: it cannot."""
        return False

    def pause_at(self, step: int, who: str = "backup") -> None:
        """Lets no call of the train function go beyond this step of the epoch, so that Python sees the state after it.

        All workers must ask alike. Of each of those who ask, by name, the last wish counts.
        """

    def stopping(self) -> bool:
        """Whether a worker was asked to end, all have agreed on this moment, and no step has run of which Keras does not know."""
        return preemption.asked()

    def moment(self, name: str) -> None:
        """Something begins or is done for which a chaos plan may have a fault; `Heartbeat.moment` names them."""
        if self.heartbeat is not None:
            self.heartbeat.moment(name)

    def broadcast_from_chief(self, numbers: list[float]) -> list[float]:
        """The chief's numbers, on every worker."""
        return numbers

    def all_gather(self, numbers: list[float]) -> list[list[float]]:
        """The numbers of all workers, by rank; none goes on before all have said theirs."""
        return [numbers]

    def replicas(self) -> tuple[int, int]:
        """How many replicas there are, and the number of the first of this process."""
        return 1, 0

    def values(self, model: keras.Model, variables: Sequence[keras.Variable]) -> list[np.ndarray]:
        """The values of a model's variables, copied to the host."""
        return state.each_value(variables)

    def gathered(self, model: keras.Model) -> contextlib.AbstractContextManager[None]:
        """Inside, the process that writes reads sharded variables whole; called by all workers."""
        return contextlib.nullcontext()

    def metric_totals(self, model: keras.Model) -> list:
        """The values of `model.metrics_variables` over all replicas, whose other state has met then too."""
        return []

    def set_metric_totals(self, model: keras.Model, totals: list) -> None:
        """Sets what `metric_totals` gave."""

    def sync_totals(self, model: keras.Model) -> list:
        """The state of `tfdist.sync`'s policy over all replicas, such as gradients that were added up; afterwards this is the state that they have."""
        return []

    def set_sync_totals(self, model: keras.Model, totals: list) -> None:
        """Sets what `sync_totals` gave."""

    def bytes_per_step(self, model: keras.Model) -> float:
        """Bytes that a replica sends to others in a step of training, on average; 0 before one was traced, not a number where nobody knows."""
        return 0.0

    # --- What losses ask ----------------------------------------------------------------------------------------------
    def scale_loss_for_distribution(self, keras_function: Callable, value):
        """A replica's share of a mean loss."""
        return keras_function(value)

    def unscale_loss_for_distribution(self, keras_function: Callable, value):
        """The inverse of `scale_loss_for_distribution`."""
        return keras_function(value)

    def reduce_weighted_values(self, keras_function: Callable, *args, **kwargs):
        """The mean of loss values."""
        return keras_function(*args, **kwargs)


def bind(keras_method: Callable, model, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a Keras method by name, defaults filled in; `kwargs` is what to call it with."""
    bound = inspect.signature(keras_method).bind(model, *args, **kwargs)
    given = dict(bound.arguments)
    bound.apply_defaults()
    call = dict(bound.arguments)
    extra = given.pop("kwargs", {})
    given.pop(next(iter(bound.signature.parameters)))
    return {**call, **extra, "kwargs": {**given, **extra}}


def fewest(*steps: int | None) -> int | None:
    """The least of those given."""
    return min((s for s in steps if s), default=None)


def check_optimizer(model: keras.Model, strategy) -> None:
    """Makes sure that a model was compiled in its strategy's scope."""
    optimizer = getattr(model, "optimizer", None)  # a model that only predicts need not be compiled
    while optimizer is not None:
        if strategy_of(optimizer) is not strategy:
            raise ValueError(
                f"The optimizer {optimizer.name} was made outside of the strategy's scope. Make it, and call compile(), inside "
                "`with strategy.scope():`, where the model is made."
            )
        optimizer = getattr(optimizer, "inner_optimizer", None)
