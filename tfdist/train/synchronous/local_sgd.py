"""Local SGD and DiLoCo: separate updates on each replica with periodic weight averaging."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import local_component, local_update, step_counter
from tfdist.keras_compat.sparse_gradients import merge_duplicates
from tfdist.parallel.collectives.bucketing import all_reduce
from tfdist.parallel.collectives.group import Group, metered
from tfdist.parallel.placement import Placement
from tfdist.parallel.replica_weight import gradient_factor, weighted
from tfdist.sync import LocalSGD
from tfdist.train.synchronous import gradient_sum
from tfdist.train.synchronous.gradient_aggregation import GradientCallback
from tfdist.train.synchronous.replica_step import local_replica
from tfdist.train.timing import graph_timestamps


@dataclasses.dataclass
class _LocalState:
    """State of local SGD for one optimizer.

    Attributes:
        variables: Variables of the optimizer, of which each replica has a copy.
        steps_since_sync: Steps since all copies were equal; the same on all replicas.
        anchors: Values of the variables when they were last equal; empty where the copies are only
            averaged.
        velocity: Velocity of the outer optimizer.
        counters: Steps that have run here, and bytes that a replica has sent in them and in
            synchronizations between them; int64, `[2]`.
        functions: Traced functions by name.
        diverged: Whether steps may have run since the variables and the optimizer's slots were
            synchronized; the same in all processes.
    """

    variables: list[keras.Variable]
    steps_since_sync: keras.Variable
    anchors: list[keras.Variable]
    velocity: list[keras.Variable]
    counters: keras.Variable
    functions: dict[str, Callable] = dataclasses.field(default_factory=dict)
    diverged: bool = True

    def count(self, local: int, steps: int = 0, sent: int = 0) -> None:
        """Add steps and sent bytes to a replica's tally."""
        local_component(self.counters, local).assign_add([steps, sent])


class LocalSteps:
    """Local SGD of an engine; has the methods of `GradientAggregation`.

    Args:
        policy: Local SGD policy.
        strategy: Synchronous strategy of tfdist.
        placement: Numbers of workers and replicas.
    """

    local = True

    def __init__(self, policy: LocalSGD, strategy: tf.distribute.Strategy, placement: Placement):
        self.policy = policy
        self._strategy = strategy
        self._placement = placement
        self._group: Group | None = None
        self._warmup_group: Group | None = None
        self._states: weakref.WeakKeyDictionary[Any, _LocalState] = weakref.WeakKeyDictionary()

    def group_of_factors(self) -> None:
        """Return None: most steps exchange no gradients."""

    def bytes_per_step(self, optimizer: Any) -> float:
        """Return the bytes that a replica has sent per step, on average; 0 before the first step.

        Synchronizations between steps, such as before a validation, are included.

        Args:
            optimizer: The outermost optimizer.
        """
        if optimizer not in self._states:
            return 0.0
        steps, sent = local_component(self._states[optimizer].counters, 0).numpy()
        return float(sent / max(steps, 1))

    def steps(self, optimizer: Any) -> int:
        """Return the number of steps that have run."""
        return int(step_counter(optimizer).numpy())

    def variables(self, optimizer: Any) -> list[keras.Variable]:
        """Return the state beside that of the model and the optimizer.

        It is valid between steps, after the copies have been synchronized.
        """
        return self._states[optimizer].velocity if optimizer in self._states else []

    def prepare(self, optimizer: Any, variables: list) -> None:
        """Create the state of local SGD before the first step.

        Args:
            optimizer: The outermost optimizer.
            variables: Variables that it updates.
        """
        if optimizer in self._states:
            return
        with tf.init_scope(), self._strategy.scope():
            needs_anchors = not self.policy.averages or self.policy.comm_dtype is not None
            anchored = [v for v in variables if needs_anchors]
            anchors = [_copy(v, "anchor", v.numpy()) for v in anchored]
            velocity = [
                _copy(v, "velocity", tf.zeros(v.shape, v.dtype))
                for v in anchored
                if self.policy.outer_momentum
            ]
            steps_since_sync = keras.Variable(0, dtype="int64", trainable=False, name="since")
            counters = keras.Variable([0, 0], dtype="int64", trainable=False, name="tally")
            self._states[optimizer] = _LocalState(
                list(variables), steps_since_sync, anchors, velocity, counters
            )

    def apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        keras_apply: Callable,
        grads: list,
        variables: list | None,
        watch: GradientCallback | None,
    ) -> Any:
        """Update this replica's copies, in replica context; see `GradientAggregation.apply`."""
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                "sync: LocalSGD and DiLoCo do not support a LossScaleOptimizer (policy "
                "mixed_float16), because each replica would choose a scale of its own. Use the "
                "policy mixed_bfloat16, or tfdist.sync.Gradients."
            )
        if variables is None:
            raise ValueError(
                "sync: expected optimizer.apply(gradients, variables), received no variables. "
                "LocalSGD and DiLoCo need the list of variables to average."
            )
        self.prepare(optimizer, variables)
        state = self._states[optimizer]
        local = local_replica(self._placement)
        graph_timestamps.before_sum(local, list(grads), self._placement.replicas > 1)
        if self._placement.replicas > 1:
            grads = self._local_gradients(optimizer, state, grads, variables, local)
        graph_timestamps.after_sum(local, grads)
        grads = [merge_duplicates(g) for g in grads]
        if watch is not None:
            watch(grads, variables)
        with local_update(optimizer, local), graph_timestamps.update(local):
            keras_apply(optimizer, grads, variables)
            if self._placement.replicas > 1:
                self._step(state, local_component(step_counter(optimizer), local), local)

    def sync_replicas(self, optimizer: Any) -> bool:
        """Synchronize the variables and the optimizer's slots.

        All workers call this method, between steps.

        Args:
            optimizer: The outermost optimizer. One of another policy, or None, has no copies here.

        Returns:
            Whether anything was synchronized: True if steps have run since the last time.
        """
        state = self._states.get(optimizer) if optimizer is not None else None
        if state is None or not state.diverged:
            return False
        self._run("sync_replicas", optimizer, state, self._sync_all)
        state.diverged = False
        return True

    def begin(self, optimizer: Any, restart: bool) -> None:
        """Prepare for steps, after which the copies differ.

        Args:
            optimizer: The outermost optimizer.
            restart: Whether the variables may have been set since the last step, equally on all
                replicas, or whether steps may have been interrupted half done.
        """
        state = self._states.get(optimizer) if optimizer is not None else None
        if state is None:
            return
        if restart or not state.diverged:  # a callback may have set weights after a synchronization
            self._run("begin", optimizer, state, self._begin)
        state.diverged = True

    # --- Within a step ----------------------------------------------------------------------------
    def _local_gradients(
        self, optimizer, state: _LocalState, grads: list, variables: list, local: int
    ) -> list:
        """Return the gradients of this replica's mean loss.

        During warmup, return those of the global batch's mean loss.
        """
        own_factor = gradient_factor("sum", self._placement.replicas)
        if not self.policy.warmup:
            return weighted(grads, own_factor)
        grads = gradient_sum.dense(grads, optimizer, variables)
        positions = [i for i, g in enumerate(grads) if g is not None]
        if self._warmup_group is None:
            self._warmup_group = Group.of(self._strategy, "warmup")
        group = self._warmup_group

        def sum_over_replicas() -> list:
            with metered() as sent:
                sums = all_reduce(
                    group,
                    weighted(grads, gradient_factor("mean", self._placement.replicas)),
                    "warmup",
                    self.policy.bucket_bytes,
                    self.policy.comm_dtype,
                )
            state.count(local, sent=sum(sent))
            return [g for g in sums if g is not None]

        steps = local_component(step_counter(optimizer), local)
        own = [g for g in weighted(grads, own_factor) if g is not None]
        chosen = tf.cond(steps < self.policy.warmup, sum_over_replicas, lambda: own)
        for i, g in zip(positions, chosen, strict=True):
            grads[i] = g
        return grads

    def _step(self, state: _LocalState, steps: tf.Variable, local: int) -> None:
        """Count a step after its update, and synchronize the copies when it is time."""
        state.count(local, steps=1)
        steps_since_sync = local_component(state.steps_since_sync, local)
        steps_after_warmup = tf.cast(steps, tf.int64) - self.policy.warmup

        def warmup_step():
            self._set_anchors(state, local)

        def local_step():
            steps_since_sync.assign_add(1)
            if isinstance(self.policy.every, int):
                tf.cond(
                    tf.equal(steps_after_warmup % self.policy.every, 0),
                    lambda: self._sync_replicas(state, local),
                    lambda: None,
                )

        if self.policy.warmup:
            tf.cond(steps_after_warmup <= 0, warmup_step, local_step)
        else:
            local_step()

    def _set_anchors(self, state: _LocalState, local: int) -> None:
        """Record that the copies are equal now."""
        for anchor, v in zip(state.anchors, state.variables, strict=bool(state.anchors)):
            local_component(anchor, local).assign(local_component(v, local))
        local_component(state.steps_since_sync, local).assign(0)

    def _sync_replicas(self, state: _LocalState, local: int) -> None:
        """Run the outer step.

        See Douillard et al. 2023, arXiv:2311.08105, algorithm 1, lines 9 to 14.
        """
        if self._group is None:
            self._group = Group.of(self._strategy, "weights")
        own = [local_component(v, local) for v in state.variables]
        anchors = [local_component(v, local) for v in state.anchors]
        velocity = [local_component(v, local) for v in state.velocity]
        values = (
            [a - v for a, v in zip(anchors, own, strict=True)]
            if anchors
            else [tf.convert_to_tensor(v) for v in own]
        )
        with metered() as sent:
            sums = all_reduce(
                self._group, values, "weights", self.policy.bucket_bytes, self.policy.comm_dtype
            )
        state.count(local, sent=sum(sent))
        for i, (v, total) in enumerate(zip(own, sums, strict=True)):
            step = total / self._placement.replicas
            if not anchors:
                v.assign(step)
                continue
            if velocity:
                new_velocity = velocity[i].assign(self.policy.outer_momentum * velocity[i] + step)
                step += self.policy.outer_momentum * new_velocity
            v.assign(anchors[i].assign(anchors[i] - self.policy.outer_learning_rate * step))
        local_component(state.steps_since_sync, local).assign(0)

    # --- Between steps ----------------------------------------------------------------------------
    def _run(
        self,
        name: str,
        optimizer: Any,
        state: _LocalState,
        body: Callable[[list, _LocalState, int], None],
    ) -> None:
        if self._placement.replicas == 1:
            return
        if name not in state.functions:
            slots = _slots(optimizer)

            # This function does not refer to the optimizer. Otherwise the optimizer, the key of
            # a weak dictionary, would live as long as its entry.
            def on_replica():
                body(slots, state, local_replica(self._placement))

            state.functions[name] = tf.function(
                lambda: self._strategy.run(on_replica), autograph=False
            ).get_concrete_function()
        state.functions[name]()

    def _sync_all(self, slots: list, state: _LocalState, local: int) -> None:
        sums = self._average(slots, state, local)
        # TensorFlow orders collectives by themselves, but not with those in a branch.
        with tf.control_dependencies(sums):
            tf.cond(
                local_component(state.steps_since_sync, local) > 0,
                lambda: self._sync_replicas(state, local),
                lambda: None,
            )

    def _begin(self, slots: list, state: _LocalState, local: int) -> None:
        def average() -> None:
            self._average(state.variables, state, local)

        tf.cond(local_component(state.steps_since_sync, local) > 0, average, lambda: None)
        self._set_anchors(state, local)

    def _average(self, variables: list, state: _LocalState, local: int) -> list[tf.Tensor]:
        """Set each variable to the mean of its copies; return their sums."""
        group = Group.of(self._strategy, "state")
        own = [local_component(v, local) for v in variables]
        with metered() as sent:
            sums = all_reduce(
                group, [tf.convert_to_tensor(v) for v in own], "state", self.policy.bucket_bytes
            )
        state.count(local, sent=sum(sent))
        for v, total in zip(own, sums, strict=True):
            v.assign(total / self._placement.replicas)
        return sums


def _copy(variable: keras.Variable, name: str, value) -> keras.Variable:
    return keras.Variable(
        value, dtype=variable.dtype, trainable=False, aggregation="mean", name=name
    )


def _slots(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return an optimizer's state except its counters and learning rate.

    Counters and learning rate are the same on all replicas.
    """
    rate = optimizer.learning_rate
    return [
        v for v in optimizer.variables if v is not rate and v.dtype.startswith(("float", "bfloat"))
    ]
