"""Store that reads and writes sharded variables as whole values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import engine_of, local_component, unchanged_by_saving
from tfdist.keras_compat.parallel import (
    Sharded,
    first_value,
    has_value,
    make_sharded,
    own_copy,
    without_broadcast,
)
from tfdist.parallel.collectives import flat_shards
from tfdist.parallel.collectives.group import OUTSIDE, Group, sendable
from tfdist.parallel.sharding.whole_model_files import as_plain


class Store:
    """Read and write sharded variables; it is their `tfdist_store`.

    With several workers, reading a whole value is a collective: all workers must do it, in the same
    order.

    Args:
        strategy: Synchronous strategy of tfdist.
        group: Group of all replicas of the strategy.

    Raises:
        ValueError: If no strategy scope is entered, and this process has several replicas.
    """

    def __init__(self, strategy: tf.distribute.Strategy, group: Group):
        self.strategy = strategy
        self.group = group
        self.placement = engine_of(strategy).placement
        # If False, this process has one replica, and its variables belong to no strategy.
        self.scoped = engine_of(tf.distribute.get_strategy()) is not None
        if not self.scoped and self.placement.local_replicas > 1:
            raise ValueError(
                "strategy: expected one replica in each process outside of the strategy's scope, "
                f"received {self.placement.local_replicas}. Make model and optimizer in "
                "`with strategy.scope():`, or use one device per process."
            )
        self.slots: Store = self  # store of the optimizer slots of these variables
        self.in_train_function = False  # whether a train function runs without a scope
        # Whole variables that have the same value in all processes, by id.
        self._broadcast: dict[int, keras.Variable] = {}

    def whole(self, variable: Sharded) -> tf.Tensor:
        """Return the whole value, inside or outside of replica context."""
        if self.in_step():
            with self.bounded():
                return self._gather(variable, own_copy(variable))
        with self._scope():
            if self.placement.workers == 1:
                copies = [
                    tf.convert_to_tensor(local_component(variable, i))
                    for i in range(self.placement.local_replicas)
                ]
                return flat_shards.from_rows(tf.stack(copies), variable.tfdist_shape)
            return self._run_on_replicas(
                lambda: self._gather(
                    variable, tf.convert_to_tensor(local_component(variable, self.group.local))
                )
            )

    def looks_up(self, variable: Sharded) -> bool:
        """Return whether the store has a method `look_up` for rows of a variable, as `fsdp` may."""
        return False

    def assign_whole(self, variable: Sharded, value: tf.Tensor) -> None:
        """Assign each replica of this process its row of a whole value."""
        parts = flat_shards.to_rows(value, self.group.size)
        first = self.placement.first_replica
        if self.in_step():
            local_component(variable, self.group.local).assign(
                flat_shards.row(parts, self.group.rank)
            )
            return
        with self._scope():
            for i in range(self.placement.local_replicas):
                local_component(variable, i).assign(flat_shards.row(parts, first + i))

    def shard_variable(
        self,
        variable: keras.Variable,
        trainable: bool = True,
        initializers: Sequence[Callable] | None = None,
    ) -> None:
        """Shard a variable, with the value of the chief's first replica.

        A deferred variable gets its first value here. Only this variable is whole at a time. All
        processes must call this, in the strategy's scope.

        Args:
            variable: Variable to shard.
            trainable: Whether it may be trained.
            initializers: Initializer of each replica's row. None: the whole value is made first.
        """
        shape = tuple(variable.shape)
        dtype = variable.dtype
        with tf.init_scope():
            length = flat_shards.length(flat_shards.elements(shape), self.group.size)
            with without_broadcast():
                part = tf.Variable(
                    tf.zeros([length], dtype), trainable=trainable, name=variable.name
                )
            if initializers is not None:
                make_sharded(variable, part, shape, self)
                for i in range(self.placement.local_replicas):
                    first = initializers[self.placement.first_replica + i]
                    local_component(variable, i).assign(first(part.shape, dtype=dtype))
                return
            value = (
                tf.convert_to_tensor(local_component(variable, 0))
                if has_value(variable)
                else first_value(variable)
            )
            make_sharded(variable, part, shape, self)
            if self.placement.workers == 1:
                self.assign_whole(variable, value)  # type: ignore[arg-type]
            else:
                self._run_on_replicas(lambda: self._receive(variable, value))

    def broadcast_values(self, variables: Sequence[keras.Variable]) -> None:
        """Broadcast the chief's values to variables that stay whole, once for each variable.

        All processes must call this. Inside its scope, a strategy broadcasts by itself.

        Args:
            variables: Variables of a model. Sharded ones already have the chief's values.
        """
        new = [v for v in variables if not isinstance(v, Sharded) and id(v) not in self._broadcast]
        if self.scoped or self.group.size == 1:
            return
        with tf.init_scope(), self.bounded():
            for v in new:
                number = len(self._broadcast)
                value = own_copy(v)
                sent = tf.cast(value, sendable(value.dtype))
                whole = self.group.all_gather(
                    self._scatter_from_chief(sent, f"first {number}"), f"{OUTSIDE}first {number}"
                )
                v.assign(tf.cast(flat_shards.from_rows(whole, sent.shape), value.dtype))
                self._broadcast[id(v)] = v

    def bounded(self) -> contextlib.AbstractContextManager[None]:
        """Bound waits for other processes by the strategy's timeout in this context.

        The watchdog then raises an error that names these processes. While a graph is traced
        nothing waits, so the context does nothing.
        """
        return (
            engine_of(self.strategy).watchdog.bound()
            if tf.executing_eagerly()
            else contextlib.nullcontext()
        )

    def wrap_without_scope(
        self, model: keras.Model, function: Callable, trains: bool, caller: str = "fsdp"
    ) -> Callable:
        """Wrap a model's function for a process without a strategy scope.

        No engine bounds its waits there, or makes the first weights of all processes equal.

        Args:
            model: Model of which this store holds a part.
            function: The model's `train_function`, or another of its functions.
            trains: Flag that says that `function` is the `train_function`.
            caller: Name of the caller, for the error message.

        Raises:
            ValueError: If XLA would compile the function.
        """
        self.check_xla(model, caller)
        broadcast_done = not trains

        def bounded(*args):
            nonlocal broadcast_done
            optimizer = getattr(model, "optimizer", None)
            progress = (
                (lambda: optimizer.iterations.numpy())
                if optimizer is not None and optimizer.built
                else None
            )
            with engine_of(self.strategy).watchdog.bound(progress):
                if not broadcast_done and model.built:
                    self.broadcast_values(model.weights)
                self.in_train_function = True
                try:
                    result = function(*args)
                finally:
                    self.in_train_function = False
                if not broadcast_done:
                    self.broadcast_values(model.weights)  # this call may have built the model
                    broadcast_done = True
                return result

        return bounded

    def save_without_scope(
        self, model: keras.Model, keras_method: Callable, *args, **kwargs
    ) -> Any:
        """Run `model.save`, `save_weights` or `export` in a process without a strategy scope.

        All processes contribute their parts, and the chief writes the file.

        Args:
            model: Model of which this store holds a part.
            keras_method: Keras' own method.
            *args: Positional arguments of `keras_method`.
            **kwargs: Keyword arguments of `keras_method`.
        """
        exports = keras_method.__name__ == "export"
        with as_plain(model, self.placement.workers, self.placement.is_chief, exports):
            if not self.placement.is_chief:
                return None
            with unchanged_by_saving(model):
                return keras_method(model, *args, **kwargs)

    def check_xla(self, model: keras.Model, caller: str = "fsdp") -> None:
        """Raise ValueError if XLA would compile a model's collectives.

        Args:
            model: Any model.
            caller: Name of the caller, for the error message.

        Raises:
            ValueError: If the model is compiled with `jit_compile`, and there are several replicas.
        """
        if self.group.size > 1 and model.compiled and model.jit_compile:
            raise ValueError(
                f"{caller}: XLA cannot compile the collectives of {self.group.size} replicas "
                "(keras #18716). Pass compile(jit_compile=False): outside of a strategy's scope, "
                "Keras may choose True."
            )

    def _receive(self, variable: keras.Variable, value: tf.Tensor) -> None:
        """Assign each replica its row of the chief's value."""
        local_component(variable, self.group.local).assign(
            self._scatter_from_chief(value, f"first {variable.path}")
        )

    def _scatter_from_chief(self, value: tf.Tensor, name: str) -> tf.Tensor:
        """Return this replica's row of the chief's value.

        It is a reduce-scatter of the chief's value and of zeros from the other replicas.
        """
        parts = flat_shards.to_rows(value, self.group.size)
        return self.group.reduce_scatter(
            parts if self.group.rank == 0 else tf.zeros_like(parts), f"{OUTSIDE}{name}"
        )

    def _gather(self, variable: Sharded, part: tf.Tensor) -> tf.Tensor:
        return flat_shards.from_rows(
            self.group.all_gather(part, f"{OUTSIDE}{variable.path} {variable.tfdist_shape}"),
            variable.tfdist_shape,
        )

    def in_step(self) -> bool:
        """Return whether the caller runs in the context of one replica."""
        return not self.scoped or (
            tf.distribute.get_strategy() is self.strategy
            and not tf.distribute.in_cross_replica_context()
        )

    def _scope(self) -> Any:
        inside = tf.distribute.get_strategy() is self.strategy or not self.scoped
        return contextlib.nullcontext() if inside else self.strategy.scope()

    def _run_on_replicas(self, body: Callable) -> Any:
        """Run a function on all replicas of this process; return the first replica's result."""
        with self.bounded():
            if self.placement.local_replicas == 1:
                return body()
            results = tf.function(lambda: self.strategy.run(body), autograph=False)()
            return self.strategy.experimental_local_results(results)[0]
