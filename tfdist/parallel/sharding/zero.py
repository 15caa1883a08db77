"""An optimizer becomes one whose state each replica holds a part of: ZeRO, stages 1 and 2; the model stays whole on each.

Rajbhandari et al. 2020, arXiv:1910.02054, sections 5.1 and 5.2. Gradients are reduced in buckets, from the last layer on, while backward
computes those of the layers before; each replica updates its part of each variable, and all gather the parts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
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
    exclude_alike,
    make_sharded,
    moving_averages,
)
from tfdist.parallel.collectives import flat_shards
from tfdist.parallel.collectives.bucketing import all_gather, all_reduce, reduce_scatter
from tfdist.parallel.collectives.group import OUTSIDE, Group
from tfdist.parallel.sharding import global_norm
from tfdist.parallel.sharding.fsdp import check_deferred
from tfdist.parallel.sharding.global_norm import check_elementwise
from tfdist.parallel.sharding.sharded_variables import Store
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
    """Shards an optimizer's state, and in stage 2 its gradients, over the replicas.

    With N replicas each holds 1/N of the optimizer's slots, and of the gradients once they are reduced. Results are those of the optimizer by itself,
    to the rounding of sums. Clipping by norms, moving averages, schedules, weight decay and its exceptions, accumulation and loss scaling are the
    optimizer's own. Under the policy mixed_float16 Keras puts a LossScaleOptimizer around it.

    Args:
        optimizer: A Keras optimizer, or its name.
        stage: 1: gradients are summed whole on each replica. 2: each replica receives the sum of its part only.
        sync: How: `combine` ("mean" or "sum"), `comm_dtype` (gradients and updates travel in it), `bucket_bytes`, `clip_norm`, `skip_nonfinite`; or a short name
            such as "bfloat16", as for `tfdist.sync.policy`. None: as the strategy was made.
        strategy: None: the one in whose scope this is called. Named in a process that trains without a scope, beside others with one replica each, of
            which each gives the mean of its own examples' loss to `fit`.
        elementwise: Says of an optimizer that is not Keras' own that it treats each element of a variable by itself.

    Raises:
        ValueError: The optimizer does not treat elements one by one, or an argument is wrong.

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
    """What a `Zero` was built with; by itself, as Keras tracks lists of variables.

    Attributes:
        full: The model's variables, whole on each replica.
        shards: This replica's part of each, as of the step that runs.
        buckets: Which travel together, by their places.
    """

    full: list[keras.Variable] = dataclasses.field(default_factory=list)
    shards: list[keras.Variable] = dataclasses.field(default_factory=list)
    buckets: list[list[int]] = dataclasses.field(default_factory=list)


class Zero(keras.optimizers.Optimizer):
    """See `zero`."""

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
        engine = global_norm.engine_in_step(strategy, "zero")
        if stage not in (1, 2):
            raise ValueError(
                f"stage: expected 1 or 2, received {stage!r}; tfdist.parallel.fsdp() shards the model's weights too (stage 3)."
            )
        if not elementwise:
            check_elementwise(inner_optimizer)
        policy = _policy(sync if sync is not None else engine.aggregation.policy, inner_optimizer)
        super().__init__(learning_rate=0.0, name=name or f"zero_{inner_optimizer.name}")
        self.inner_optimizer, self.stage, self.policy, self._elementwise = (
            inner_optimizer,
            stage,
            policy,
            elementwise,
        )
        self.group = Group.of(strategy, f"zero {next(_numbers)}")
        self._store = Store(strategy, self.group)
        self.reduced: Callable[[list], None] | None = (
            None  # called with this replica's part of the sums
        )
        self._parts = _Parts()
        self._scaled = False  # whether an optimizer around this one scales the loss

    @property
    def tfdist_kind(self) -> str:
        """What snapshots name it: they fit the optimizer inside as well, and any number of replicas."""
        return type(self.inner_optimizer).__name__

    # --- As of the optimizer inside ----------------------------------------------------------------------------------
    @property
    def variables(self) -> list[keras.Variable]:
        return self.inner_optimizer.variables

    @property
    def learning_rate(self):
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def iterations(self):
        return self.inner_optimizer.iterations

    def scale_loss(self, loss):
        return self.inner_optimizer.scale_loss(loss)

    def get_config(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "inner_optimizer": keras.optimizers.serialize(self.inner_optimizer),
            "stage": self.stage,
            "elementwise": self._elementwise,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects=None) -> Zero:
        inner = keras.optimizers.deserialize(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        if engine_of(tf.distribute.get_strategy()) is None:
            return inner  # nobody to share with: a file of `model.save` in a process by itself
        return cls(inner, config["stage"], elementwise=config["elementwise"], name=config["name"])

    # --- State ---------------------------------------------------------------------------------------------------------
    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Makes this replica's part of the state.

        Args:
            variables: The model's, whole.
        """
        if self.built:
            return
        if any(isinstance(v, Sharded) for v in variables):
            raise ValueError(
                "zero: fsdp(model) has sharded the optimizer's state already; compile the model with the optimizer itself."
            )
        global_norm.check_variables(variables, "zero")
        self._store.share(variables)
        full, shards = list(variables), []
        with tf.init_scope():
            for v in full:
                shape = (flat_shards.length(flat_shards.elements(v.shape), self.group.size),)
                shards.append(keras.Variable(tf.zeros(shape, v.dtype), dtype=v.dtype, name=v.name))
                make_sharded(shards[-1], None, v.shape, self._store)
            exclude_alike(self.inner_optimizer, full, self.inner_optimizer, shards)
            self.inner_optimizer.build(shards)
        sizes = [flat_shards.elements(v.shape) * tf.as_dtype(v.dtype).size for v in full]
        self._parts = _Parts(
            full,
            shards,
            flat_shards.buckets(sizes, [v.dtype for v in full], self.policy.bucket_bytes),
        )
        super().build(variables)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the state of each replica."""
        with as_shards():
            return sum(
                flat_shards.elements(v.shape) * tf.as_dtype(v.dtype).size
                for v in (*self._parts.shards, *self.variables)
            )

    @property
    def bytes_per_step(self) -> float:
        """Bytes that a replica sends in a step, on average; 0 before one was traced."""
        steps = 1 if self._gathers_always else self.inner_optimizer.gradient_accumulation_steps
        return sum(
            sent / (steps if name.startswith("whole") else 1)
            for name, sent in self.group.bytes_in_steps.items()
        )

    # --- A step ----------------------------------------------------------------------------------------------------------
    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[keras.Variable] | None = None
    ) -> None:
        """Reduces the gradients over the replicas, updates this replica's part of the variables, and gathers all.

        Args:
            grads: This replica's, one or None a variable.
            trainable_variables: The variables; None: those it was built with.
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
        """Updates the variables; called in replica context, in place of `optimizer.apply`.

        Gradients are reduced before an optimizer around this one takes the scale of the loss out of them: small ones travel with it, and sums that
        are not finite are seen.

        Args:
            optimizer: The outermost optimizer.
            keras_apply: Keras' own `apply`.
            grads: This replica's.
            variables: The variables; None: those that it was built with.
        """
        with (
            self._store.bounded(),
            local_update(optimizer, self.group.local),
            global_norm.agreeing(self.group, optimizer, self),
        ):
            if not self.built:
                if variables is None:
                    raise ValueError(
                        "zero: expected apply(gradients, variables), or build(variables) before."
                    )
                optimizer.build(list(variables))
            known = self._parts.full if variables is None else list(variables)
            parts = self._reduce(self._by_place(list(grads), known))
            if self.reduced is not None:
                self.reduced([p for p in parts if p is not None])
            self._scaled = optimizer is not self
            places = self._places()
            return keras_apply(optimizer, [parts[places[id(v)]] for v in known], variables)

    def beside(self, model: keras.Model, function: Callable, trains: bool) -> Callable:
        """A model's function in a process without a scope; see `Store.beside`."""
        check_deferred(model)
        return self._store.beside(model, function, trains, "zero")

    def save_beside(self, model: keras.Model, keras_method: Callable, *args, **kwargs) -> Any:
        """A model's file in a process without a scope; see `Store.save_beside`."""
        return self._store.save_beside(model, keras_method, *args, **kwargs)

    def _apply(
        self, sums: Sequence[Any], trainable_variables: Sequence[keras.Variable] | None = None
    ) -> None:
        """Updates this replica's part of the variables by its parts of the sums, and gathers all."""
        parts = self._by_place(
            list(sums),
            self._parts.full if trainable_variables is None else list(trainable_variables),
        )
        local = self.group.local
        places = [i for i, p in enumerate(parts) if p is not None]

        def update() -> None:
            before = {}
            # Averages are of all variables, also of those that got no gradient.
            for i in range(len(parts)) if self.inner_optimizer.use_ema else places:
                own = flat_shards.to_rows(
                    tf.convert_to_tensor(local_component(self._parts.full[i], local)),
                    self.group.size,
                )[self.group.rank]
                # A slice shares the memory of the whole, and would keep it.
                local_component(self._parts.shards[i], local).assign(tf.raw_ops.DeepCopy(x=own))
                if self.policy.comm_dtype:
                    before[i] = own
            inner, limit = self.inner_optimizer, self.policy.clip_norm
            with (
                as_shards(),
                clipping(inner, lambda grads: global_norm.clip(self.group, inner, grads, limit)),
            ):
                self.inner_optimizer.apply(
                    [parts[i] for i in places], [self._parts.shards[i] for i in places]
                )
            self._when_updated(lambda: self._gather(places, before, local), local)
            for v in (
                self._parts.full[i] for i in places if self._parts.full[i].constraint is not None
            ):
                copy = local_component(v, local)
                copy.assign(v.constraint(tf.convert_to_tensor(copy)))

        if (
            not self.policy.skip_nonfinite or self._scaled
        ):  # by an optimizer that must see them, and leaves them out itself
            update()
            return
        tf.cond(
            global_norm.finite_on_all(self.group, [parts[i] for i in places]), update, lambda: None
        )

    def _by_place(self, grads: list, variables: list[keras.Variable]) -> list:
        """A gradient or None for each variable it was built with.

        Args:
            grads: One or None a variable.
            variables: These.
        """
        places = self._places()
        unknown = [v.path for v in variables if id(v) not in places]
        if unknown:
            raise ValueError(
                f"zero: {', '.join(unknown[:4])}: not among the variables that the optimizer was built with; make another optimizer for them."
            )
        if len(grads) != len(variables):
            raise ValueError(
                f"zero: expected {len(variables)} gradients, one or None for each variable, received {len(grads)}."
            )
        given: list = [None] * len(places)
        for g, v in zip(grads, variables, strict=True):
            given[places[id(v)]] = g
        return given

    def _places(self) -> dict[int, int]:
        """The place of each variable, by its id."""
        return {id(v): i for i, v in enumerate(self._parts.full)}

    def _reduce(self, grads: list) -> list:
        """This replica's part of the sum of each gradient over the replicas."""
        # A sum of sparse and dense ones, as of tied weights, has lost its shape.
        dense = [
            None if g is None else tf.cast(tf.reshape(g, v.shape), v.dtype)
            for g, v in zip(grads, self._parts.full, strict=True)
        ]
        scale = global_norm.scale(self.policy, self.group.size)
        dense = (
            dense
            if scale == 1.0
            else [None if g is None else g * tf.cast(scale, g.dtype) for g in dense]
        )
        if self.stage == 1:
            sums = all_reduce(
                self.group, dense, "sums", self.policy.bucket_bytes, self.policy.comm_dtype
            )
            return [
                None if x is None else flat_shards.to_rows(x, self.group.size)[self.group.rank]
                for x in sums
            ]
        given = [None if g is None else flat_shards.to_rows(g, self.group.size) for g in dense]
        return reduce_scatter(self.group, given, self._parts.buckets, "sum", self.policy.comm_dtype)

    def _when_updated(self, gather: Callable[[], None], local: int) -> None:
        """Gathers, with accumulation only after a step that has updated something."""
        if self._gathers_always:
            gather()
            return
        counter = local_component(step_counter(self.inner_optimizer), local)
        tf.cond(
            tf.equal(counter % self.inner_optimizer.gradient_accumulation_steps, 0),
            gather,
            lambda: None,
        )

    @property
    def _gathers_always(self) -> bool:
        """Whether each step changes variables: without accumulation, or where averages may overwrite them between updates."""
        inner = self.inner_optimizer
        return not inner.gradient_accumulation_steps or bool(
            inner.use_ema and inner.ema_overwrite_frequency
        )

    def _gather(self, places: list[int], before: dict[int, tf.Tensor], local: int) -> None:
        own: list = [None] * len(self._parts.shards)
        for i in places:
            x = tf.convert_to_tensor(local_component(self._parts.shards[i], local))
            own[i] = tf.cast(x - before[i], self.policy.comm_dtype) if before else x
        for i, part in all_gather(self.group, own, self._parts.buckets, "whole"):
            copy = local_component(self._parts.full[i], local)
            value = tf.cast(flat_shards.from_rows(part, self._parts.full[i].shape), copy.dtype)
            if before:
                copy.assign_add(value)
            else:
                copy.assign(value)

    # --- What needs all parts -----------------------------------------------------------------------------------------
    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """Gives variables their moving averages at the end of a `fit`, if the optimizer keeps them; called by all processes."""
        if not self.inner_optimizer.use_ema:
            return
        averages = moving_averages(self.inner_optimizer)

        def publish() -> None:
            local = self.group.local
            for place, (v, average) in enumerate(zip(self._parts.full, averages, strict=True)):
                whole = self.group.all_gather(
                    tf.convert_to_tensor(local_component(average, local)),
                    f"{OUTSIDE}average {place}",
                )
                local_component(v, local).assign(flat_shards.from_rows(whole, v.shape))

        strategy = strategy_of(self)
        with self._store.bounded():
            tf.function(lambda: strategy.run(publish), autograph=False)()


def _policy(given: Any, optimizer: keras.optimizers.Optimizer) -> Gradients:
    policy = global_norm.checked_policy(
        given, "zero", ("mean", "sum"), "all replicas update one state"
    )
    global_norm.check_clipping(policy, optimizer, "zero")
    return policy
