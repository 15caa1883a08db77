"""A variable's rows, one on each replica, are read and written as one whole; what is computed with them is not known here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import engine_of, local_component
from tfdist.keras_compat.parallel import Sharded, first_value, has_value, make_sharded, own_copy
from tfdist.parallel.collectives import flat_shards
from tfdist.parallel.collectives.group import OUTSIDE, Group, sendable
from tfdist.parallel.sharding.whole_model_files import as_plain, check_export


class Store:
    """Reads and writes sharded variables, whose `tfdist_store` it is.

    In processes that train together, reading the whole is a collective: all of them do it, in one order.

    Args:
        strategy: A synchronous strategy of tfdist.
        group: All its replicas.

    Raises:
        ValueError: No scope is entered, and this process has several replicas.
    """

    def __init__(self, strategy: tf.distribute.Strategy, group: Group):
        self.strategy, self.group, self.placement = strategy, group, engine_of(strategy).placement
        # Else: this process has one replica, and variables without a strategy.
        self.scoped = engine_of(tf.distribute.get_strategy()) is not None
        if not self.scoped and self.placement.local_replicas > 1:
            raise ValueError(
                f"strategy: outside of its scope expected one with one replica in each process, received one with {self.placement.local_replicas}. Make model and "
                "optimizer in `with strategy.scope():`, or name one device a process."
            )
        self.slots: Store = self  # of the slots that an optimizer makes for these variables
        self.steps = False  # whether a train function runs, of a process without a scope
        self._alike: dict[
            int, keras.Variable
        ] = {}  # whole variables that all processes have with one value, by id

    def whole(self, variable: Sharded) -> tf.Tensor:
        """The whole value, in replica context or outside."""
        if self.in_step():
            with self.bounded():
                return self._gathered(variable, own_copy(variable))
        with self._scope():
            if self.placement.workers == 1:
                copies = [
                    tf.convert_to_tensor(local_component(variable, i))
                    for i in range(self.placement.local_replicas)
                ]
                return flat_shards.from_rows(tf.stack(copies), variable.tfdist_shape)
            return self._everywhere(
                lambda: self._gathered(
                    variable, tf.convert_to_tensor(local_component(variable, self.group.local))
                )
            )

    def put(self, variable: Sharded, value: tf.Tensor) -> None:
        """Gives each replica of this process its row."""
        parts, first = flat_shards.to_rows(value, self.group.size), self.placement.first_replica
        if self.in_step():
            local_component(variable, self.group.local).assign(
                tf.raw_ops.DeepCopy(x=parts[self.group.rank])
            )
            return
        with self._scope():
            for i in range(self.placement.local_replicas):
                # A slice shares the memory of the whole, and would keep it.
                local_component(variable, i).assign(tf.raw_ops.DeepCopy(x=parts[first + i]))

    def take(self, variable: keras.Variable, trainable: bool = True) -> None:
        """Shards a variable, with the value of the chief's first replica; a deferred one gets its first value now.

        No more than this variable is whole at a time. To be called in the strategy's scope, by all processes.
        """
        shape, dtype = tuple(variable.shape), variable.dtype
        with tf.init_scope():
            part = tf.Variable(
                tf.zeros([flat_shards.length(flat_shards.elements(shape), self.group.size)], dtype),
                trainable=trainable,
                name=variable.name,
            )
            value = (
                tf.convert_to_tensor(local_component(variable, 0))
                if has_value(variable)
                else first_value(variable)
            )
            make_sharded(variable, part, shape, self)
            if self.placement.workers == 1:
                self.put(variable, value)  # type: ignore[arg-type]
            else:
                self._everywhere(lambda: self._receive(variable, value))

    def share(self, variables: Sequence[keras.Variable]) -> None:
        """Gives variables that stay whole the chief's values, once; called by all processes. In its scope a strategy does so itself.

        Args:
            variables: Of a model; sharded ones have the chief's values already.
        """
        new = [v for v in variables if not isinstance(v, Sharded) and id(v) not in self._alike]
        if self.scoped or self.group.size == 1:
            return
        with tf.init_scope(), self.bounded():
            for v in new:
                number, value = len(self._alike), own_copy(v)
                sent = tf.cast(value, sendable(value.dtype))
                whole = self.group.all_gather(
                    self._of_chief(sent, f"first {number}"), f"{OUTSIDE}first {number}"
                )
                v.assign(tf.cast(flat_shards.from_rows(whole, sent.shape), value.dtype))
                self._alike[id(v)] = v

    def bounded(self) -> contextlib.AbstractContextManager[None]:
        """Inside, waits for other processes end after the strategy's timeout with an error that names them; where a graph is made, nobody waits."""
        return (
            engine_of(self.strategy).watchdog.bound()
            if tf.executing_eagerly()
            else contextlib.nullcontext()
        )

    def beside(
        self, model: keras.Model, function: Callable, trains: bool, who: str = "fsdp"
    ) -> Callable:
        """A model's function in a process without a scope, where no engine bounds it, nor makes the processes' first weights equal.

        Args:
            model: Of which this holds a part.
            function: Its `train_function`, or another.
            trains: Whether it is that one.
            who: For the message.

        Raises:
            ValueError: XLA is to compile it.
        """
        self.check_xla(model, who)
        begun = not trains

        def bounded(*args):
            nonlocal begun
            optimizer = getattr(model, "optimizer", None)
            sign = (
                (lambda: optimizer.iterations.numpy())
                if optimizer is not None and optimizer.built
                else None
            )
            with engine_of(self.strategy).watchdog.bound(sign):
                if not begun and model.built:
                    self.share(model.weights)
                self.steps = True
                try:
                    result = function(*args)
                finally:
                    self.steps = False
                if not begun:
                    self.share(model.weights)  # of a model that this call has built
                    begun = True
                return result

        return bounded

    def save_beside(self, model: keras.Model, keras_method: Callable, *args, **kwargs) -> Any:
        """`model.save`, `save_weights` or `export` in a process without a scope: all give their parts, and the chief writes.

        Args:
            model: Of which this holds a part.
            keras_method: Keras' own method.
            *args: Of it.
            **kwargs: Of it.

        Raises:
            ValueError: A model is to be exported whose weights are sharded.
        """
        if keras_method.__name__ == "export":
            check_export(model)
        with as_plain(model, self.placement.workers, self.placement.is_chief):
            return keras_method(model, *args, **kwargs) if self.placement.is_chief else None

    def check_xla(self, model: keras.Model, who: str = "fsdp") -> None:
        """Makes sure that XLA does not compile a model's collectives.

        Args:
            model: Any.
            who: For the message.

        Raises:
            ValueError: It would.
        """
        if self.group.size > 1 and model.compiled and model.jit_compile:
            raise ValueError(
                f"{who}: XLA cannot compile the collectives of {self.group.size} replicas (keras #18716). Pass compile(jit_compile=False), which "
                "outside of a strategy's scope is not always Keras' default."
            )

    def _receive(self, variable: keras.Variable, value: tf.Tensor) -> None:
        """Gives each replica its row of the chief's value."""
        local_component(variable, self.group.local).assign(
            self._of_chief(value, f"first {variable.path}")
        )

    def _of_chief(self, value: tf.Tensor, name: str) -> tf.Tensor:
        """This replica's row of the chief's value: the sum of that and of zeros."""
        parts = flat_shards.to_rows(value, self.group.size)
        return self.group.reduce_scatter(
            parts if self.group.rank == 0 else tf.zeros_like(parts), f"{OUTSIDE}{name}"
        )

    def _gathered(self, variable: Sharded, part: tf.Tensor) -> tf.Tensor:
        return flat_shards.from_rows(
            self.group.all_gather(part, f"{OUTSIDE}{variable.path} {variable.tfdist_shape}"),
            variable.tfdist_shape,
        )

    def in_step(self) -> bool:
        """Whether this is one replica's context."""
        return not self.scoped or (
            tf.distribute.get_strategy() is self.strategy
            and not tf.distribute.in_cross_replica_context()
        )

    def _scope(self) -> Any:
        inside = tf.distribute.get_strategy() is self.strategy or not self.scoped
        return contextlib.nullcontext() if inside else self.strategy.scope()

    def _everywhere(self, body: Callable) -> Any:
        """Runs something in all replicas of this process; returns the first one's result."""
        with self.bounded():
            if self.placement.local_replicas == 1:
                return body()
            results = tf.function(lambda: self.strategy.run(body), autograph=False)()
            return self.strategy.experimental_local_results(results)[0]
