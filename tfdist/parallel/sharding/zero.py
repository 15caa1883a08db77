"""ZeRO stages 1 and 2: optimizer state and gradients sharded over the replicas.

Rajbhandari et al. 2020, arXiv:1910.02054, sections 5.1 and 5.2. The model stays whole on each
replica. Gradients are reduced in buckets that begin with the last layer, while backward computes
the gradients of earlier layers. Each replica updates its part of each variable, and an all-gather
then makes the variables whole.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import (
    engine_of,
    in_local_update,
    local_component,
    local_update,
    step_counter,
    strategy_of,
)
from tfdist.keras_compat.parallel import (
    Sharded,
    as_shards,
    clipping,
    copy_weight_decay_exclusions,
    make_sharded,
    moving_averages,
    without_broadcast,
)
from tfdist.optimizers import check_sparse
from tfdist.parallel.collectives import flat_shards
from tfdist.parallel.collectives.bucketing import all_gather, all_reduce, reduce_scatter
from tfdist.parallel.collectives.group import OUTSIDE, Group
from tfdist.parallel.sharding import global_norm
from tfdist.parallel.sharding.fsdp import check_deferred
from tfdist.parallel.sharding.global_norm import check_elementwise
from tfdist.parallel.sharding.sharded_variables import Store
from tfdist.parallel.sharding.step_products import take_rows
from tfdist.sync import Gradients

_numbers = itertools.count()


def zero(
    optimizer: keras.optimizers.Optimizer | str,
    stage: int = 2,
    *,
    sync: Gradients | str | None = None,
    strategy: tf.distribute.Strategy | None = None,
    elementwise: bool = False,
) -> Zero:
    """Shard an optimizer's state, and in stage 2 its gradients, over the replicas (ZeRO).

    With N replicas, each holds 1/N of the optimizer's slots, and 1/N of the gradients once they are
    reduced. The results equal those of the unsharded optimizer, up to the rounding of sums.
    Clipping by norms, moving averages, schedules, weight decay and its exceptions, accumulation and
    loss scaling are the optimizer's own. Under the policy mixed_float16, Keras wraps the result in
    a LossScaleOptimizer.

    Args:
        optimizer: Keras optimizer, or its name.
        stage: ZeRO stage, 1 or 2. In stage 1 gradients are summed whole on each replica. In stage 2
            each replica receives only its part of the sum.
        sync: Gradient policy with `combine` ("mean" or "sum"), `comm_dtype` (the dtype in which
            gradients and updates are sent), `bucket_bytes`, `clip_norm` and `skip_nonfinite`; or a
            short name such as "bfloat16", as for `tfdist.sync.policy`. None: the policy of the
            strategy.
        strategy: Strategy over whose replicas the state is sharded. None: the strategy in whose
            scope you call this. Pass it in a process that trains without a scope. Each such process
            has one replica, and gives the mean of its own examples' loss to `fit`.
        elementwise: Flag that says that an optimizer that is not Keras' own updates each element of
            a variable independently.

    Returns:
        The `Zero` optimizer, to compile the model with.

    Raises:
        ValueError: If the optimizer is not elementwise, or an argument is wrong.

    Example:
        >>> import tfdist
        >>> with tfdist.make_strategy("one_device", devices="cpu").scope():
        ...     print(zero("adam", stage=2).inner_optimizer.name)
        adam
    """
    return Zero(
        keras.optimizers.get(optimizer),
        stage,
        sync=sync,
        strategy=strategy,
        elementwise=elementwise,
    )


@dataclasses.dataclass
class _Parts:
    """Variables that a `Zero` was built for.

    They are in an object of their own because Keras tracks lists of variables.

    Attributes:
        full: Variables of the model, whole on each replica.
        shards: This replica's part of each variable, as of the current step.
        buckets: Indices of the variables that are sent together, one list for each bucket.
        functions: Traced functions of moving averages, by name.
    """

    full: list[keras.Variable] = dataclasses.field(default_factory=list)
    shards: list[keras.Variable] = dataclasses.field(default_factory=list)
    buckets: list[list[int]] = dataclasses.field(default_factory=list)
    functions: dict[str, Callable[[], None]] = dataclasses.field(default_factory=dict)


@keras.saving.register_keras_serializable("tfdist")
class Zero(keras.optimizers.Optimizer):
    """Optimizer with state sharded over the replicas; see `zero`."""

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        stage: int = 2,
        *,
        sync: Gradients | str | None = None,
        strategy: tf.distribute.Strategy | None = None,
        elementwise: bool = False,
        name: str | None = None,
    ):
        strategy = strategy or tf.distribute.get_strategy()
        engine = global_norm.synchronous_engine(strategy, "zero")
        if stage not in (1, 2):
            raise ValueError(
                f"stage: expected 1 or 2, received {stage!r}; tfdist.parallel.fsdp() shards the "
                "model's weights too (stage 3)."
            )
        if not elementwise:
            check_elementwise(inner_optimizer)
        policy = _policy(sync if sync is not None else engine.aggregation.policy, inner_optimizer)
        # Its own rate is for other optimizers, which take it from a checkpoint of TensorFlow.
        rate = float(inner_optimizer.learning_rate)
        super().__init__(learning_rate=rate, name=name or f"zero_{inner_optimizer.name}")
        self.inner_optimizer = inner_optimizer
        self.stage = stage
        self.policy = policy
        self._elementwise = elementwise
        self.group = Group.of(strategy, f"zero {next(_numbers)}")
        self._store = Store(strategy, self.group)
        # Called with this replica's part of the summed gradients.
        self.reduced: Callable[[list], None] | None = None
        self._parts = _Parts()
        self._scaled = False  # whether an optimizer around this one scales the loss

    @property
    def tfdist_kind(self) -> str:
        """Return the name of this optimizer in snapshots.

        It is the inner optimizer's name, so that a snapshot also fits the inner optimizer itself,
        and any number of replicas.
        """
        return type(self.inner_optimizer).__name__

    # --- Delegated to the inner optimizer ---------------------------------------------------------
    @property
    def variables(self) -> list[keras.Variable]:
        """See `keras.optimizers.Optimizer`."""
        return self.inner_optimizer.variables

    @property
    def learning_rate(self):
        """See `keras.optimizers.Optimizer`."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def iterations(self):
        """See `keras.optimizers.Optimizer`."""
        return self.inner_optimizer.iterations

    def scale_loss(self, loss):
        """See `keras.optimizers.Optimizer`."""
        return self.inner_optimizer.scale_loss(loss)

    def get_config(self) -> dict[str, Any]:
        """See `keras.optimizers.Optimizer`."""
        return {
            "name": self.name,
            "inner_optimizer": keras.optimizers.serialize(self.inner_optimizer),
            "stage": self.stage,
            "elementwise": self._elementwise,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects=None) -> Zero:
        """Return the optimizer of a config; the inner one in a process without an engine.

        See `keras.optimizers.Optimizer`.
        """
        inner = keras.optimizers.deserialize(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        if engine_of(tf.distribute.get_strategy()) is None:
            return inner  # a single process that loads a file of `model.save` has no replicas
        return cls(inner, config["stage"], elementwise=config["elementwise"], name=config["name"])

    # --- State ------------------------------------------------------------------------------------
    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create this replica's part of the state.

        Args:
            variables: Variables of the model, whole.

        Raises:
            ValueError: If `fsdp` has sharded the variables, or their gradients cannot be summed.
        """
        if self.built:
            return
        if any(isinstance(v, Sharded) for v in variables):
            raise ValueError(
                "zero: fsdp(model) already shards the optimizer's state. Compile the model with "
                "the inner optimizer."
            )
        global_norm.check_variables(variables, "zero")
        self._store.broadcast_values(variables)
        full = list(variables)
        shards = []
        with tf.init_scope():
            for v in full:
                shape = (flat_shards.length(flat_shards.elements(v.shape), self.group.size),)
                with without_broadcast():
                    part = keras.Variable(tf.zeros(shape, v.dtype), dtype=v.dtype, name=v.name)
                shards.append(part)
                make_sharded(shards[-1], None, v.shape, self._store)
            copy_weight_decay_exclusions(self.inner_optimizer, full, self.inner_optimizer, shards)
            self.inner_optimizer.build(shards)
        self._parts = _Parts(full, shards)
        self._parts.buckets = self._buckets([True] * len(full))
        super().build(variables)

    def _buckets(self, sent: Sequence[bool]) -> list[list[int]]:
        """Return the indices of the variables that are sent together; not all may be sent."""
        full = self._parts.full
        sizes = [
            flat_shards.elements(v.shape) * tf.as_dtype(v.dtype).size * is_sent
            for v, is_sent in zip(full, sent, strict=True)
        ]
        return flat_shards.buckets(sizes, [v.dtype for v in full], self.policy.bucket_bytes)

    @property
    def resident_bytes(self) -> int:
        """Return the size in bytes of each replica's part of the state."""
        with as_shards():
            return sum(
                flat_shards.elements(v.shape) * tf.as_dtype(v.dtype).size
                for v in (*self._parts.shards, *self.variables)
            )

    @property
    def bytes_per_step(self) -> float:
        """Return the mean bytes that a replica sends in a step; 0 before the first trace."""
        steps = (
            1 if self._may_change_each_step else self.inner_optimizer.gradient_accumulation_steps
        )
        return sum(
            sent / (steps if name.startswith("whole") else 1)
            for name, sent in self.group.bytes_in_steps.items()
        )

    def group_of_factors(self) -> Group:
        """Return the group in which a step may exchange rows instead of gradients."""
        return self.group

    # --- A step -----------------------------------------------------------------------------------
    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[keras.Variable] | None = None
    ) -> None:
        """Reduce gradients over the replicas, update this replica's part, and gather all parts.

        Args:
            grads: Gradients of this replica, one or None for each variable.
            trainable_variables: Variables to update. None: those that the optimizer was built with.
        """
        engine = engine_of(tf.distribute.get_strategy())
        if in_local_update():
            self._apply(grads, trainable_variables)
        elif engine is None:
            self.update(self, Zero._apply, grads, trainable_variables)
        else:
            engine.apply(self, Zero._apply, grads, trainable_variables)

    def update(
        self,
        optimizer: keras.optimizers.Optimizer,
        keras_apply: Callable,
        grads: Sequence[Any],
        variables: Sequence[Any] | None,
    ) -> Any:
        """Update the variables; called in replica context, in place of `optimizer.apply`.

        Gradients are reduced before a LossScaleOptimizer around this one unscales them. Small
        gradients are thus sent with the loss scale, and the LossScaleOptimizer sees sums that are
        not finite.

        Args:
            optimizer: Outermost optimizer.
            keras_apply: Keras' own `apply`.
            grads: Gradients of this replica.
            variables: Variables to update. None: those that the optimizer was built with.

        Raises:
            ValueError: If the optimizer is not built and `variables` is None, or the gradients do
                not fit the variables that it was built with.
        """
        with (
            self._store.bounded(),
            local_update(optimizer, self.group.local),
            global_norm.agree_on_finite(self.group, optimizer, self),
        ):
            if not self.built:
                if variables is None:
                    raise ValueError(
                        "zero: expected apply(gradients, variables), received no variables. Pass "
                        "them, or call build(variables) first."
                    )
                optimizer.build(list(variables))
            updated = self._parts.full if variables is None else list(variables)
            check_sparse(self, grads, "zero")
            parts = self._reduce(self._in_build_order(list(grads), updated))
            if self.reduced is not None:
                self.reduced([p for p in parts if p is not None])
            self._scaled = optimizer is not self
            indices = self._indices()
            return keras_apply(optimizer, [parts[indices[id(v)]] for v in updated], variables)

    def wrap_without_scope(self, model: keras.Model, function: Callable, trains: bool) -> Callable:
        """Wrap a model's function for a process without a scope; see `Store.beside`."""
        check_deferred(model)
        return self._store.wrap_without_scope(model, function, trains, "zero")

    def save_without_scope(
        self, model: keras.Model, keras_method: Callable, *args, **kwargs
    ) -> Any:
        """Save or export a model in a process without a scope; see `Store.save_beside`."""
        return self._store.save_without_scope(model, keras_method, *args, **kwargs)

    def _apply(
        self, sums: Sequence[Any], trainable_variables: Sequence[keras.Variable] | None = None
    ) -> None:
        """Update this replica's part of the variables by its part of the sums, and gather all."""
        parts = self._in_build_order(
            list(sums),
            self._parts.full if trainable_variables is None else list(trainable_variables),
        )
        local = self.group.local
        indices = [i for i, p in enumerate(parts) if p is not None]

        def update() -> None:
            before = {}
            assigned: list = []
            # Moving averages cover all variables, also those without a gradient.
            for i in range(len(parts)) if self.inner_optimizer.use_ema else indices:
                rows = self._rows(local_component(self._parts.full[i], local))
                # One copy after the other, so that not all of them are in memory beside the last
                # ones.
                with tf.control_dependencies(assigned):
                    copy = flat_shards.row(rows, self.group.rank)
                shard = local_component(self._parts.shards[i], local)
                assigned = [shard.assign(copy, read_value=False)]
                if self.policy.comm_dtype:
                    before[i] = rows[self.group.rank]
            inner = self.inner_optimizer
            limit = self.policy.clip_norm
            with (
                as_shards(),
                clipping(inner, lambda grads: global_norm.clip(self.group, inner, grads, limit)),
            ):
                self.inner_optimizer.apply(
                    [parts[i] for i in indices], [self._parts.shards[i] for i in indices]
                )
            self._after_update(lambda: self._gather(indices, before, local), local)
            for v in (
                self._parts.full[i] for i in indices if self._parts.full[i].constraint is not None
            ):
                copy = local_component(v, local)
                copy.assign(v.constraint(tf.convert_to_tensor(copy)))

        # A LossScaleOptimizer must see nonfinite gradients, and skips the update itself.
        if not self.policy.skip_nonfinite or self._scaled:
            update()
            return
        tf.cond(
            global_norm.finite_on_all(self.group, [parts[i] for i in indices]), update, lambda: None
        )

    def _in_build_order(self, grads: list, variables: list[keras.Variable]) -> list:
        """Return a gradient or None for each variable that the optimizer was built with.

        Args:
            grads: Gradients, one or None for each of `variables`.
            variables: Variables of the gradients.
        """
        indices = self._indices()
        unknown = [v.path for v in variables if id(v) not in indices]
        if unknown:
            raise ValueError(
                f"zero: {', '.join(unknown[:4])}: the optimizer was built with other variables. "
                "Make another optimizer for these."
            )
        if len(grads) != len(variables):
            raise ValueError(
                f"zero: expected {len(variables)} gradients, one or None for each variable, "
                f"received {len(grads)}."
            )
        ordered: list = [None] * len(indices)
        for g, v in zip(grads, variables, strict=True):
            ordered[indices[id(v)]] = g
        return ordered

    def _indices(self) -> dict[int, int]:
        """Return the index of each variable, by its id."""
        return {id(v): i for i, v in enumerate(self._parts.full)}

    def _reduce(self, grads: list) -> list:
        """Return this replica's part of the sum of each gradient over the replicas."""
        # A sum of sparse and dense gradients, as for tied weights, has lost its static shape.
        dense = [
            None if g is None else tf.cast(tf.reshape(g, v.shape), v.dtype)
            for g, v in zip(grads, self._parts.full, strict=True)
        ]
        scale = global_norm.scale(self.policy, self.group.size)
        own_rows = take_rows(self._parts.full)
        if self.stage == 1:
            sums = all_reduce(
                self.group,
                dense,
                "sums",
                self.policy.bucket_bytes,
                self.policy.comm_dtype,
                scale,
            )
            parts = [
                None if x is None else flat_shards.to_rows(x, self.group.size)[self.group.rank]
                for x in sums
            ]
        else:
            rows = [None if g is None else flat_shards.to_rows(g, self.group.size) for g in dense]
            # Small gradients between large ones that are not sent travel together.
            plan = self._buckets([g is not None for g in dense])
            parts = reduce_scatter(self.group, rows, plan, "sum", self.policy.comm_dtype, scale)
        for i, own in own_rows.items():
            parts[i] = own if parts[i] is None else parts[i] + own
        return parts

    def _after_update(self, gather: Callable[[], None], local: int) -> None:
        """Call `gather`; with gradient accumulation, only after a step that updated variables."""
        if self._may_change_each_step:
            gather()
            return
        counter = local_component(step_counter(self.inner_optimizer), local)
        tf.cond(
            tf.equal(counter % self.inner_optimizer.gradient_accumulation_steps, 0),
            gather,
            lambda: None,
        )

    @property
    def _may_change_each_step(self) -> bool:
        """Return whether each step may change variables.

        This is so without gradient accumulation, or if moving averages may overwrite the variables
        between updates.
        """
        inner = self.inner_optimizer
        return not inner.gradient_accumulation_steps or bool(
            inner.use_ema and inner.ema_overwrite_frequency
        )

    def _gather(self, indices: list[int], before: dict[int, tf.Tensor], local: int) -> None:
        own: list = [None] * len(self._parts.shards)
        for i in indices:
            x = tf.convert_to_tensor(local_component(self._parts.shards[i], local))
            own[i] = tf.cast(x - before[i], self.policy.comm_dtype) if before else x
        for i, part in all_gather(self.group, own, self._parts.buckets, "whole"):
            copy = local_component(self._parts.full[i], local)
            value = tf.cast(flat_shards.from_rows(part, self._parts.full[i].shape), copy.dtype)
            if before:
                copy.assign_add(value)
            else:
                copy.assign(value)

    # --- Collectives outside of a step ------------------------------------------------------------
    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """Assign moving averages to the variables at the end of a `fit`, if the optimizer has any.

        All processes must call this.

        Args:
            var_list: Variables, as for `keras.optimizers.Optimizer`. All variables that the
                optimizer was built with are assigned.
        """
        if self.inner_optimizer.use_ema:
            self._run_on_averages(self._publish)

    def swap_averages(self) -> None:
        """Exchange the values of the variables with their moving averages.

        All processes must call this.
        """
        self._run_on_averages(self._swap)

    def reset_averages(self) -> None:
        """Set the moving averages to the values of the variables."""
        self._run_on_averages(self._reset)

    def _run_on_averages(
        self, function: Callable[[Sequence[tf.Variable], Sequence[tf.Variable]], None]
    ) -> None:
        """Call a method on each replica.

        Args:
            function: Method of this replica's copies of the variables, and its parts of their
                moving averages.
        """

        def on_replica() -> None:
            local = self.group.local
            copies = [local_component(v, local) for v in self._parts.full]
            averages = moving_averages(self.inner_optimizer)
            function(copies, [local_component(v, local) for v in averages])

        strategy = strategy_of(self)
        name = function.__name__
        if name not in self._parts.functions:
            self._parts.functions[name] = tf.function(
                lambda: strategy.run(on_replica), autograph=False
            )
        with self._store.bounded():
            self._parts.functions[name]()

    def _publish(self, copies: Sequence[tf.Variable], averages: Sequence[tf.Variable]) -> None:
        for i, whole in self._whole_averages(averages):
            copies[i].assign(whole)

    def _swap(self, copies: Sequence[tf.Variable], averages: Sequence[tf.Variable]) -> None:
        for i, whole in self._whole_averages(averages):
            averages[i].assign(self._own_row(copies[i]))
            copies[i].assign(whole)

    def _reset(self, copies: Sequence[tf.Variable], averages: Sequence[tf.Variable]) -> None:
        for copy, average in zip(copies, averages, strict=True):
            average.assign(self._own_row(copy))

    def _whole_averages(self, averages: Sequence[tf.Variable]) -> Iterator[tuple[int, tf.Tensor]]:
        """Yield the index of each variable and its whole average."""
        parts = [tf.convert_to_tensor(average) for average in averages]
        for i, rows in all_gather(self.group, parts, self._parts.buckets, f"{OUTSIDE}averages"):
            yield i, flat_shards.from_rows(rows, self._parts.full[i].shape)

    def _own_row(self, v: tf.Variable) -> tf.Tensor:
        """Return this replica's part of a whole variable."""
        return flat_shards.row(self._rows(v), self.group.rank)

    def _rows(self, v: tf.Variable) -> tf.Tensor:
        """Return the parts of all replicas of a whole variable."""
        return flat_shards.to_rows(tf.convert_to_tensor(v), self.group.size)


def _policy(given: Any, optimizer: keras.optimizers.Optimizer) -> Gradients:
    policy = global_norm.check_policy(
        given, "zero", ("mean", "sum"), "all replicas update one state"
    )
    global_norm.check_clipping(policy, optimizer, "zero")
    return policy
