"""Gradient aggregation over replicas: sum, gradient clipping, accumulation and update.

The policy is a `tfdist.sync.Gradients`.
Keras clips, accumulates and checks each replica's gradients before they are summed. Here the sum
comes first, so that clipping, accumulation and checks see what a single replica would see.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_compat import local_component, local_update, step_counter
from tfdist.keras_compat.parallel import known_variables
from tfdist.keras_compat.sparse_gradients import merge_duplicates
from tfdist.parallel.collectives.bucketing import all_reduce
from tfdist.parallel.collectives.group import Group, metered, native_transport
from tfdist.parallel.placement import Placement
from tfdist.parallel.replica_weight import Weight, gradient_factor, weighted
from tfdist.parallel.sharding.step_products import take_rows
from tfdist.sync import Gradients, Policy
from tfdist.train.synchronous import gradient_sum
from tfdist.train.synchronous.replica_step import local_replica
from tfdist.train.timing import graph_timestamps

GradientCallback = Callable[[list, Sequence[Any] | None], None]


class GradientAggregation:
    """Gradient aggregation of an engine: sum over the replicas, then one update.

    Args:
        policy: Gradient policy.
        strategy: Synchronous strategy of tfdist.
        placement: Numbers of workers and replicas.
        central: Whether the replicas share the variables (central storage) instead of each having a
            copy.
    """

    local = False  # whether the replicas' variables differ between synchronizations

    def __init__(
        self,
        policy: Gradients,
        strategy: tf.distribute.Strategy,
        placement: Placement,
        central: bool = False,
    ):
        self.policy = policy
        self._strategy = strategy
        self._placement = placement
        self._central = central
        self._group: Group | None = None
        self._factors: Group | None = None  # of the last step that was traced with it
        # By optimizer: the accumulated gradients, then the number of their steps.
        self._sums: weakref.WeakKeyDictionary[Any, list] = weakref.WeakKeyDictionary()
        # By optimizer: bytes sent per update, from the last trace.
        self._bytes: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    def group_of_factors(self) -> Group | None:
        """Return the group in which a step may exchange rows instead of gradients; None if none.

        Policies that do more than to sum gradients do so with each replica's own. A sum in memory
        that all workers share takes no longer than to gather its parts.
        """
        transport = native_transport(self._strategy)
        if transport is None or transport.shares_memory or not self.policy.plain:
            return None
        self._factors = Group.of(self._strategy, "factors")
        return self._factors

    def bytes_per_step(self, optimizer: Any) -> float:
        """Return the bytes of gradients that a replica sends per step, on average.

        Args:
            optimizer: The outermost optimizer.

        Returns:
            The number of bytes; 0 before a step was traced; NaN where it is unknown.
        """
        return self._bytes.get(optimizer, 0.0) / self.policy.accumulate

    def variables(self, optimizer: Any) -> list[keras.Variable]:
        """Return the accumulation state, beside the state of the model and the optimizer.

        Each replica holds its part of a sum.
        """
        return self._sums.get(optimizer, [])

    def steps(self, optimizer: Any) -> int:
        """Return the number of steps behind an optimizer's updates.

        Steps whose gradients are accumulated but not yet applied count too. Steps of skipped
        updates do not count.
        """
        updates = int(step_counter(optimizer).numpy())
        state = self.variables(optimizer)
        return updates * self.policy.accumulate + int(state[-1].numpy()) if state else updates

    def prepare(self, optimizer: Any, variables: list) -> None:
        """Create the accumulation state before the first step.

        Args:
            optimizer: The outermost optimizer.
            variables: Variables that it updates.
        """
        if self.policy.accumulate > 1 and optimizer not in self._sums:
            with tf.init_scope(), self._strategy.scope():
                # The count is the same on all replicas. A replica with a different count would
                # wait for the others in an all-reduce that they do not run.
                count = keras.Variable(0, dtype="int64", trainable=False, name="added")
                self._sums[optimizer] = [
                    *(_sum_variable(v.shape, v.dtype) for v in variables),
                    count,
                ]

    def sync_replicas(self, optimizer: Any) -> bool:
        """Return False: replicas are always equal, so there is nothing to synchronize."""
        return False

    def begin(self, optimizer: Any, restart: bool) -> None:
        """Do nothing: no state depends on when steps begin."""

    def apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        keras_apply: Callable,
        grads: list,
        variables: list | None,
        watch: GradientCallback | None,
    ) -> Any:
        """Aggregate gradients and update the variables; called in replica context.

        Args:
            optimizer: The outermost optimizer.
            keras_apply: Keras' own `apply`.
            grads: One gradient or None per variable.
            variables: The variables, or None where the optimizer is built.
            watch: Function that is called with the summed gradients and the variables.
        """
        local = local_replica(self._placement)
        update = _Update(optimizer, keras_apply, variables, local, self._central)
        factor = gradient_factor(self.policy.combine, self._placement.replicas)
        if self.policy.plain:
            return self._apply_plain(update, grads, factor, watch)
        grads = weighted(grads, factor)
        grads = gradient_sum.dense(grads, optimizer, variables)
        if self.policy.accumulate == 1:
            return self._apply(update, grads, watch)
        self.prepare(optimizer, variables or known_variables(optimizer))
        *added, steps = [local_component(s, local) for s in self._sums[optimizer]]
        for total, g in zip(added, grads, strict=True):
            if g is not None:
                total.assign_add(g)
        # A step that fails must not count.
        with tf.control_dependencies([g for g in grads if g is not None]):
            steps.assign_add(1)

        def apply_mean():
            self._apply(
                update,
                [
                    None if g is None else total / self.policy.accumulate
                    for g, total in zip(grads, added, strict=True)
                ],
                None,
            )
            for total in (*added, steps):
                total.assign(tf.zeros_like(total))

        return tf.cond(steps >= self.policy.accumulate, apply_mean, lambda: None)

    def _apply_plain(
        self, update: _Update, grads: list, factor: Weight, watch: GradientCallback | None
    ) -> Any:
        context = tf.distribute.get_replica_context()
        replicated = self._placement.replicas > 1
        variables = update.variables or known_variables(update.optimizer)
        rows = take_rows(variables)
        peers = self._placement.replicas - 1
        sent = 2 * peers / (peers + 1) * sum(_bytes(g) for g in grads if g is not None)
        graph_timestamps.before_sum(update.local, [*grads, *rows.values()], replicated)
        summed = gradient_sum.sum_over_replicas(context, list(grads), factor)
        if rows:
            group = self._factors
            assert group is not None  # the rows were computed with it
            for i, own in rows.items():
                whole = tf.reshape(group.all_gather(own, f"gradient {i}"), variables[i].shape)
                summed[i] = whole if summed[i] is None else summed[i] + whole
            sent += sum(group.bytes_in_steps.values())
        self._bytes[update.optimizer] = sent if peers else 0.0
        if replicated:
            graph_timestamps.after_sum(update.local, summed)
        grads = [merge_duplicates(g) for g in summed]
        if watch is not None:
            watch(grads, update.variables)
        return update(grads)

    def _apply(self, update: _Update, grads: list, watch: GradientCallback | None) -> Any:
        """Combine dense gradients over the replicas, clip and check them, and update."""
        graph_timestamps.before_sum(update.local, list(grads), self._placement.replicas > 1)
        grads = self._combine(update.optimizer, grads)
        graph_timestamps.after_sum(update.local, grads)
        if self.policy.clip_norm is not None:
            grads, _ = tf.clip_by_global_norm(grads, self.policy.clip_norm, update.norm(grads))
        if watch is not None:
            watch(grads, update.variables)
        if not self.policy.skip_nonfinite or update.scales:
            return update(grads)
        # The result is equal on all replicas, because the sums are.
        finite = [tf.reduce_all(tf.math.is_finite(g)) for g in grads if g is not None]

        def apply_update():
            update(grads)

        return tf.cond(tf.reduce_all(finite), apply_update, lambda: None)

    def _combine(self, optimizer: Any, grads: list) -> list:
        replicated = self._placement.replicas > 1
        if callable(self.policy.combine):
            with metered() as sent:
                result = _check_gradients(self.policy.combine(list(grads)), grads)
            # A user's function may use collectives of TensorFlow, which are not metered, or none.
            self._bytes[optimizer] = sum(sent) if sent or not replicated else math.nan
            return result
        if not replicated:
            return grads
        if self._group is None:
            self._group = Group.of(self._strategy, "gradients")
        with metered() as sent:
            result = all_reduce(
                self._group, grads, "gradients", self.policy.bucket_bytes, self.policy.comm_dtype
            )
        self._bytes[optimizer] = sum(sent)
        return result


def check_totals(policy: Policy, variables: list[keras.Variable], totals: list) -> None:
    """Raise ValueError if `totals` are the state of another synchronization policy.

    Args:
        policy: Current synchronization policy.
        variables: Its variables.
        totals: Saved arrays, one per variable.
    """
    if [tuple(v.shape) for v in variables] != [np.shape(total) for total in totals]:
        raise ValueError(
            f"sync: the snapshot holds {len(totals)} arrays of another policy, expected the "
            f"{len(variables)} of {policy}. Use the policy that the snapshot was written with."
        )
    if isinstance(policy, Gradients) and variables and totals[-1] >= policy.accumulate:
        raise ValueError(
            f"sync.accumulate: the snapshot holds accumulated gradients of {int(totals[-1])} "
            f"steps, expected fewer than {policy.accumulate}. Use the value of accumulate that "
            "the snapshot was written with."
        )


class _Update:
    """Update of the variables by aggregated gradients."""

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        keras_apply: Callable,
        variables: list | None,
        local: int,
        central: bool,
    ):
        self.optimizer = optimizer
        self.keras_apply = keras_apply
        self.variables = variables
        self.local = local
        self.central = central

    @property
    def scales(self) -> bool:
        """Return whether the optimizer scales the loss dynamically.

        Such an optimizer finds the scale from updates that are not finite. It must see these
        updates, and skips them itself.
        """
        return isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)

    def norm(self, grads: list) -> tf.Tensor:
        """Return the global norm of the gradients without the loss scale that they contain."""
        factor = self.optimizer.loss_scale_factor
        if self.scales:
            factor = (
                local_component(self.optimizer.dynamic_scale, self.local)
                if self.optimizer.built
                else self.optimizer.initial_scale
            )
        if factor is not None:
            grads = [None if g is None else g / tf.cast(factor, g.dtype) for g in grads]
        return tf.linalg.global_norm(grads)

    def __call__(self, grads: list) -> Any:
        if self.central:
            return gradient_sum.apply_centrally(
                self.optimizer, self.keras_apply, grads, self.variables
            )
        with local_update(self.optimizer, self.local), graph_timestamps.update(self.local):
            return self.keras_apply(self.optimizer, grads, self.variables)


def _sum_variable(shape, dtype: str) -> keras.Variable:
    return keras.Variable(
        tf.zeros(shape, dtype),
        dtype=dtype,
        trainable=False,
        aggregation="sum",
        synchronization="on_read",
        name="sum",
    )


def _bytes(x) -> float:
    """Return the bytes of a gradient; NaN for sparse rows if their number varies by batch."""
    parts = [x.values, x.indices] if isinstance(x, tf.IndexedSlices) else [x]
    if any(part.shape.num_elements() is None for part in parts):
        return math.nan
    return sum(part.shape.num_elements() * part.dtype.size for part in parts)


def _check_gradients(result: Any, grads: list) -> list:
    """Raise ValueError unless a user's function returned gradients of the expected shapes."""
    shapes = [None if g is None else g.shape for g in grads]
    if (
        not isinstance(result, list | tuple)
        or [None if g is None else tf.convert_to_tensor(g).shape for g in result] != shapes
    ):
        received = (
            [None if g is None else tuple(g.shape) for g in result]
            if isinstance(result, list | tuple)
            else type(result).__name__
        )
        raise ValueError(
            "sync: expected the combine function to return a list of gradients of shapes "
            f"{[None if s is None else tuple(s) for s in shapes]}, received {received}."
        )
    return list(result)
