"""Fully sharded data parallel (FSDP, ZeRO stage 3) for Keras models.

Each replica holds a part of the weights, the gradients and the optimizer state.
Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import device_type, local_update
from tfdist.keras_compat.parallel import (
    Sharded,
    as_shards,
    clipping,
    has_value,
    initialize,
    initializer_of,
    innermost,
    known_variables,
    own_copy,
    replace_constraint,
    sublayers,
    without_values,
)
from tfdist.keras_compat.sparse_gradients import merge_duplicates, to_dense
from tfdist.layers import ShardedEmbedding, part_initializers
from tfdist.optimizers import LazyAdam, check_sparse
from tfdist.parallel.collectives import flat_shards
from tfdist.parallel.collectives.group import FLOATS, OUTSIDE, Group
from tfdist.parallel.sharding import fsdp_lookup, global_norm
from tfdist.parallel.sharding.all_gather import Gathering
from tfdist.parallel.sharding.fsdp_unit import Chains, Unit, layers_of, weights_of
from tfdist.parallel.sharding.sharded_variables import Store
from tfdist.sync import COMM_DTYPES, Gradients

_GATHER_DTYPES = tuple(name for name in FLOATS if name != "float64")
_numbers = itertools.count()
# Number of values of the smallest table of `keras.layers.Embedding` of which rows are looked up.
MIN_VALUES = 2**20


def deferred() -> contextlib.AbstractContextManager[None]:
    """Defer the memory and the first values of a model's weights until `fsdp` is called.

    You build the model inside this context. `fsdp` then initializes the weights one at a time.
    The same seeds give the same values as without this context, but for `ShardedEmbedding` tables
    of more than 2**26 values, of which each replica makes its own part. Weights that are loaded or
    assigned inside it stay in the host's memory, whole, until `fsdp` has taken the replica's part
    of each.

    Example:
        >>> import keras, tfdist
        >>> with tfdist.make_strategy("one_device", devices="cpu").scope():
        ...     with deferred():
        ...         model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
        ...     fsdp(model).resident_bytes
        40
    """
    return without_values()


def fsdp(
    model: keras.Model,
    prefetch: int = 1,
    gather_dtype: str | None = None,
    grad_dtype: str | None = None,
    reshard_after_forward: bool = True,
    *,
    sync: Gradients | str | None = None,
    strategy: tf.distribute.Strategy | None = None,
    elementwise: bool = False,
    batch_per_replica: int | None = None,
) -> FSDP:
    """Shard a model's weights over the replicas (FSDP, ZeRO stage 3).

    Call it on a built model, before `compile`.

    A layer gathers its weights when it is called and drops them afterwards. It gathers them again
    to compute its gradients, and a reduce-scatter gives each replica its part of the summed
    gradients. Backward begins with the last layers, so these keep their gathered weights: the last
    1 + `prefetch` layers, or more if their weights take no more than 1/N of all weights, for N
    replicas. The optimizer updates only the replica's own part, so its state is sharded too.

    Layers inside a layer, such as those of a transformer block, are gathered together with it.
    Models inside a model are not: each of their layers is gathered by itself.

    A large kernel of a Dense or EinsumDense layer is not gathered if it takes fewer bytes to send
    the rows of the layer's input to the replicas that hold it (tensor parallelism). This depends on
    the number of examples that a replica has in a step, which the data of `fit`, `evaluate` or
    `predict` tell in the strategy's scope: the batch size of arrays, of `tfdist.data.pipeline`, or
    of another data set that drops the remainder. If nothing tells it, kernels are gathered. Batches
    of other sizes are computed right, too.

    The results equal those of the unsharded model, up to the rounding of sums. Outside of training
    a weight looks whole: `get_weights`, `save` and `v.numpy()` gather it. If there are several
    processes, all of them must make these calls together.

    Args:
        model: Built model; its weights may be `deferred`. Frozen weights are sharded, too, but for
            those that were made with `trainable=False`, and integers.
        prefetch: Number of layers ahead whose weights are gathered while earlier layers are
            computed.
        gather_dtype: Dtype in which weights are sent and used, "bfloat16" or "float16". Layers
            that compute in another dtype use the weights rounded to `gather_dtype`. None: the
            dtype of the weights.
        grad_dtype: Dtype in which gradients of gathered weights are sent; they are summed in the
            dtype of the weights. None: `sync.comm_dtype`.
        reshard_after_forward: Flag that drops the gathered weights after forward. False keeps them
            until backward, which needs less communication and computation, and more memory.
        sync: Gradient policy as for `tfdist.parallel.zero`, with `combine="mean"` only. None: the
            policy of the strategy.
        strategy: Strategy as for `tfdist.parallel.zero`.
        elementwise: Flag as for `tfdist.parallel.zero`, for the optimizer that you compile the
            model with.
        batch_per_replica: Number of examples that a replica has in a step. It decides which layers
            send rows and gather nothing, see above. None: what the data of `fit` tell.

    Returns:
        The `FSDP` object that describes the shards. The model itself is changed in place.

    Raises:
        ValueError: If the model is not built, is already sharded, or an argument is wrong.

    Example:
        >>> import keras, tfdist
        >>> with tfdist.make_strategy("one_device", devices="cpu").scope():
        ...     model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
        ...     print(fsdp(model).group.size)
        1
    """
    return FSDP(
        model,
        prefetch,
        gather_dtype,
        grad_dtype,
        reshard_after_forward,
        sync,
        strategy,
        elementwise,
        batch_per_replica,
    )


class FSDP(Store):
    """Sharded weights of a model; see `fsdp`.

    Attributes:
        group: Group of all replicas.
        weights: Sharded variables.
    """

    def __init__(
        self,
        model: keras.Model,
        prefetch,
        gather_dtype,
        grad_dtype,
        reshard_after_forward,
        sync,
        strategy,
        elementwise,
        batch_per_replica,
    ):
        strategy = strategy or tf.distribute.get_strategy()
        engine = global_norm.synchronous_engine(strategy, "fsdp")
        self.policy = _policy(sync if sync is not None else engine.aggregation.policy)
        grad_dtype = grad_dtype or self.policy.comm_dtype
        _check(model, prefetch, gather_dtype, grad_dtype, reshard_after_forward, batch_per_replica)
        name = f"fsdp {next(_numbers)}"
        super().__init__(strategy, Group.of(strategy, name))
        self.slots = Store(strategy, self.group)
        # Called with this replica's part of the summed gradients.
        self.reduced: Callable[[list], None] | None = None
        self._elementwise = elementwise
        self._batch_per_replica = batch_per_replica
        self._batch_of_data: int | None = None
        self._chains = Chains(lambda: self.group.local)
        gradient_group = Group.of(strategy, f"{name} gradients")

        def gathering(dtype: str | None) -> Gathering:
            return Gathering(
                self.group,
                gradient_group,
                dtype,
                grad_dtype,
                lambda: global_norm.scale(self.policy, self.group.size),
                self.policy.bucket_bytes,
            )

        self._gathering = gathering(gather_dtype)
        self._exact = gathering(None)  # for reads outside of a step
        self._model = model
        self.weights: list[Sharded] = []
        self._names: dict[int, str] = {}
        self._tables: set[int] = set()  # weights of which rows are looked up, by id
        self._shard_weights()
        for v in (*model.non_trainable_variables, *model.weights, *model.metrics_variables):
            if not has_value(v):
                initialize(v)
        self.broadcast_values(model.weights)
        self._units = []
        for number, layer in enumerate(layers_of(model)):
            if self.scoped and (tables := tables_of(layer)):
                self._tables.update(id(v) for v in tables)
                continue
            unit = Unit(
                layer,
                f"unit {number}",
                self._gathering,
                self._chains,
                prefetch,
                self._gradient_bytes if reshard_after_forward else None,
                lambda: self.check_xla(self._model),
                lambda: self.placement.local_replicas == 1 or self.in_step(),
                lambda: self._batch_per_replica or self._batch_of_data,
                device_type(strategy) == "CPU",
            )
            self._units.append(unit)

    def shard_added_weights(self) -> None:
        """Shard weights that layers of the model got since, such as those of LoRA.

        Call it before the model is compiled again. All processes must call it, in the scope.
        """
        self._shard_weights()
        for unit in self._units:
            unit.list_weights()

    def _shard_weights(self) -> None:
        tables = {
            id(each.weights[0]): each.embeddings_initializer
            for layer in layers_of(self._model)
            for each in sublayers(layer)
            if _is_one_part(each)
        }
        for v in weights_of(self._model):
            if not isinstance(v, Sharded):
                initializers = None
                if id(v) in tables and initializer_of(v) is tables[id(v)]:
                    initializers = part_initializers(tables[id(v)], v.shape, self.group.size)
                self.shard_variable(v, initializers=initializers)
                self._names[id(v)] = f"weight {len(self.weights)}"
                self.weights.append(v)  # type: ignore[arg-type]

    def expect_batch(self, rows: int | None) -> int | None:
        """Note the number of examples in a global batch; None if it is unknown.

        Returns:
            Number of examples of a replica, on which graphs that are traced later depend. It must
            be equal in all processes.
        """
        self._batch_of_data = rows and -(-rows // self.group.size)
        return self._batch_per_replica or self._batch_of_data

    @property
    def bytes_per_step(self) -> int:
        """Return the bytes that a replica sends in a step; 0 before the first trace."""
        return sum(
            sum(group.bytes_in_steps.values())
            for group in (self._gathering.forward_group, self._gathering.backward_group)
        )

    @property
    def resident_bytes(self) -> int:
        """Return the size in bytes of each replica's part of the weights."""
        return self._bytes_of_parts(self.weights)

    def _gradient_bytes(self) -> int:
        """Return the size in bytes of each replica's part of the summed gradients."""
        return self._bytes_of_parts([v for v in self.weights if v.trainable])

    def _bytes_of_parts(self, weights: Sequence[Sharded]) -> int:
        return sum(
            flat_shards.length(flat_shards.elements(v.tfdist_shape), self.group.size)
            * tf.as_dtype(v.dtype).size
            for v in weights
        )

    def whole(self, variable: Sharded) -> tf.Tensor:
        """Return the whole value; within a step, gradients flow through it."""
        if not self.in_step():
            return super().whole(variable)
        name = self._names[id(variable)]
        with self.bounded():
            # Gradients of a custom training loop flow through this branch too.
            if not self.scoped and not self.in_train_function and tf.executing_eagerly():
                return self._exact.gather([variable], f"{OUTSIDE}{name}", [], variable.dtype)[0]
            return self._gathering.gather(
                [variable], self._read_name(variable, "read"), [], variable.dtype
            )[0]

    def _read_name(self, variable: Sharded, kind: str) -> str:
        """Return a name for a replica's collectives that read a variable outside of units."""
        name = self._names[id(variable)]
        reads = self._chains.current().reads
        reads[name] += 1
        return f"{name} {kind} {reads[name]}"

    def looks_up(self, variable: Sharded) -> bool:
        """Return whether rows of a table are looked up, as in the graph of a step."""
        return id(variable) in self._tables and not tf.executing_eagerly() and self.in_step()

    def look_up(self, variable: Sharded, ids: tf.Tensor) -> tf.Tensor:
        """Return rows of a table within a step; gradients flow through them."""
        self.check_xla(self._model)
        found = fsdp_lookup.rows(
            self._gathering,
            variable,
            tf.reshape(ids, [-1]),
            self._read_name(variable, "lookup"),
        )
        width = variable.tfdist_shape[1]
        rows = tf.reshape(found, tf.concat([tf.shape(ids), [width]], 0))
        return tf.ensure_shape(rows, [*ids.shape, width])

    def update(
        self,
        optimizer: keras.optimizers.Optimizer,
        keras_apply: Callable,
        grads: Sequence[Any],
        variables: Sequence[Any] | None,
    ) -> Any:
        """Update this replica's part of the weights.

        It is called in replica context, in place of `optimizer.apply`.

        Args:
            optimizer: Outermost optimizer.
            keras_apply: Keras' own `apply`.
            grads: This replica's parts of the summed gradients.
            variables: Weights to update. None: those that the optimizer was built with.

        Returns:
            The result of `keras_apply`; None if the policy skips updates that are not finite.

        Raises:
            ValueError: If the optimizer is not elementwise or clips too, or if a variable was not
                among the weights when `fsdp` was called.
        """
        inner = innermost(optimizer)
        if not self._elementwise:
            global_norm.check_elementwise(inner, "fsdp")
        global_norm.check_clipping(self.policy, inner, "fsdp")
        updated = variables if variables is not None else known_variables(inner)
        if unknown := [v.path for v in updated if getattr(v, "tfdist_store", None) is not self]:
            raise ValueError(
                f"fsdp: {', '.join(unknown[:4])}: not among the weights when fsdp(model) was "
                "called. Build the model, and enable LoRA, before that call."
            )
        if updates_rows(optimizer, self.policy):
            grads = [merge_duplicates(g) for g in grads]
        else:
            check_sparse(optimizer, grads, "what clips, checks or scales gradients under fsdp")
            grads = [
                to_dense(
                    g, flat_shards.length(flat_shards.elements(v.tfdist_shape), self.group.size)
                )
                for g, v in zip(grads, updated, strict=True)
            ]
        if self.reduced is not None:
            self.reduced([g for g in grads if g is not None])

        def apply() -> Any:
            with (
                as_shards(),
                self._constraints_on_whole(updated),
                global_norm.agree_on_finite(self.group, optimizer, inner),
            ):
                with (
                    self.bounded(),
                    local_update(optimizer, self.group.local),
                    clipping(
                        inner,
                        lambda parts: global_norm.clip(
                            self.group, inner, parts, self.policy.clip_norm
                        ),
                    ),
                ):
                    return keras_apply(optimizer, grads, variables)

        # A LossScaleOptimizer must see nonfinite gradients, and skips the update itself.
        if not self.policy.skip_nonfinite or isinstance(
            optimizer, keras.optimizers.LossScaleOptimizer
        ):
            return apply()

        def update() -> None:
            apply()

        return tf.cond(
            global_norm.finite_on_all(self.group, [g for g in grads if g is not None]),
            update,
            lambda: None,
        )

    @contextlib.contextmanager
    def _constraints_on_whole(self, variables: Sequence[Sharded]) -> Iterator[None]:
        """Apply constraints to whole weights in this context, and keep this replica's part."""
        own = {id(v): (v, v.constraint) for v in variables if v.constraint is not None}
        for v, constraint in own.values():
            replace_constraint(v, lambda v, constraint=constraint: self._constrain(v, constraint))
        try:
            yield
        finally:
            for v, constraint in own.values():
                replace_constraint(v, constraint)

    def _constrain(self, variable: Sharded, constraint: Callable) -> tf.Tensor:
        whole = flat_shards.from_rows(
            self.group.all_gather(own_copy(variable), f"constraint {self._names[id(variable)]}"),
            variable.tfdist_shape,
        )
        return flat_shards.to_rows(tf.convert_to_tensor(constraint(whole)), self.group.size)[
            self.group.rank
        ]


def tables_of(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Return the weights of a layer if `fsdp` looks up their rows and does not gather them.

    All weights must be embedding tables, and one of them must have at least `MIN_VALUES` values or
    belong to a `ShardedEmbedding`: a gather of small tables takes fewer collectives than lookups.

    Args:
        layer: Layer of the model; it becomes a unit if the result is empty.

    Returns:
        Tables; an empty list if the layer has other weights or only small tables.
    """
    if isinstance(layer, keras.layers.Wrapper | keras.layers.RNN):
        return []  # it may look rows up in a loop, where replicas cannot meet
    weights = weights_of(layer)
    inside = sublayers(layer)
    tables = {id(x.weights[0]) for x in inside if _is_one_part(x) or _is_plain_embedding(x)}
    large = any(math.prod(v.shape) >= MIN_VALUES for v in weights)
    looks_up = {id(v) for v in weights} == tables and (large or any(map(_is_one_part, inside)))
    return weights if looks_up else []


def _is_one_part(layer: keras.layers.Layer) -> bool:
    return isinstance(layer, ShardedEmbedding) and len(layer.weights) == 1


def _is_plain_embedding(layer: keras.layers.Layer) -> bool:
    """Return whether a layer is an embedding without LoRA, and without scores by its table."""
    return (
        isinstance(layer, keras.layers.Embedding)
        and len(layer.weights) == 1
        and not getattr(layer, "tie_weights", False)
    )


def updates_rows(optimizer: keras.optimizers.Optimizer, policy: Gradients) -> bool:
    """Return whether an update needs only the rows of a sparse gradient.

    Args:
        optimizer: Outermost optimizer.
        policy: Gradient policy.
    """
    return (
        type(optimizer) is keras.optimizers.Adagrad
        or getattr(type(optimizer), "update_step", None) is LazyAdam.update_step
        or (type(optimizer) is keras.optimizers.SGD and not optimizer.momentum)
    ) and not any(
        (
            optimizer.clipnorm,
            optimizer.global_clipnorm,
            optimizer.clipvalue,
            optimizer.gradient_accumulation_steps,
            optimizer.loss_scale_factor,
            policy.clip_norm,
            policy.skip_nonfinite,
        )
    )


def check_deferred(model: keras.Model) -> None:
    """Raise ValueError if a model's weights have no values.

    Args:
        model: Any model.

    Raises:
        ValueError: If the model was built in `deferred` and has not been sharded since.
    """
    if any(not has_value(v) for v in model.weights):
        raise ValueError(
            f"The model {model.name} was built in tfdist.parallel.deferred(), and its weights have "
            "no values. Call tfdist.parallel.fsdp(model)."
        )


def _policy(given: Any) -> Gradients:
    reason = (
        "gradients are summed during the backward pass, which does not know how many rows a "
        "replica has, and all replicas update one state"
    )
    return global_norm.check_policy(given, "fsdp", ("mean",), reason)


def _check(
    model: keras.Model,
    prefetch: Any,
    gather_dtype: Any,
    grad_dtype: Any,
    reshard_after_forward: Any,
    batch_per_replica: Any,
) -> None:
    if batch_per_replica is not None and (
        not isinstance(batch_per_replica, int)
        or isinstance(batch_per_replica, bool)
        or batch_per_replica < 1
    ):
        raise ValueError(
            "fsdp: batch_per_replica: expected None or a number of examples from 1 on, "
            f"received {batch_per_replica!r}."
        )
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise ValueError(
            f"fsdp: prefetch: expected a number of layers from 0 on, received {prefetch!r}."
        )
    if gather_dtype not in (None, *_GATHER_DTYPES):
        raise ValueError(
            f"fsdp: gather_dtype: expected None or one of {', '.join(_GATHER_DTYPES)}, which "
            f"TensorFlow gathers, received {gather_dtype!r}."
        )
    if grad_dtype not in (None, *COMM_DTYPES):
        raise ValueError(
            f"fsdp: grad_dtype: expected None or one of {', '.join(COMM_DTYPES)}, "
            f"received {grad_dtype!r}."
        )
    if not isinstance(reshard_after_forward, bool):
        raise ValueError(
            "fsdp: reshard_after_forward: expected True or False, "
            f"received {reshard_after_forward!r}."
        )
    if not isinstance(model, keras.Model):
        raise ValueError(f"fsdp: expected a keras.Model, received {type(model).__name__}.")
    if not model.built or not weights_of(model):
        raise ValueError(
            f"fsdp: the model {model.name} has no weights{'' if model.built else ' yet'}. Build it "
            "first: model.build(input_shape)."
        )
    if any(isinstance(v, Sharded) for v in model.weights):
        raise ValueError(f"fsdp: the model {model.name} is already sharded. Call fsdp(model) once.")
    if getattr(getattr(model, "optimizer", None), "built", False):
        raise ValueError(
            "fsdp: the model's optimizer already has state for whole weights. Call fsdp(model) "
            "before compile(), and load the model with compile=False."
        )
    global_norm.check_variables(model.trainable_weights, "fsdp")
