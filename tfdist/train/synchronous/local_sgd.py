"""Local SGD and DiLoCo: separate updates on each replica with periodic weight averaging."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import local_component, local_update, step_counter
from tfdist.parallel.collectives.bucketing import all_reduce
from tfdist.parallel.collectives.group import Group, metered
from tfdist.parallel.placement import Placement
from tfdist.sync import LocalSGD
from tfdist.train.synchronous import gradient_sum
from tfdist.train.synchronous.gradient_aggregation import GradientCallback
from tfdist.train.synchronous.replica_step import local_replica
from tfdist.train.timing import graph_timestamps


@dataclasses.dataclass
class _Copies:
    """State of local SGD for one optimizer.

    Attributes:
        variables: Variables of the optimizer, of which each replica has a copy.
        since: Steps since all copies were equal; the same on all replicas.
        anchors: Values of the variables when they were last equal; empty where the copies are only
            averaged.
        velocity: Velocity of the outer optimizer.
        tally: Steps that have run here, and bytes that a replica has sent in them and in
            synchronizations between them; int64, `[2]`.
        functions: Traced functions by name.
        apart: Whether steps may have run since the variables and the optimizer's slots were
            synchronized; the same in all processes.
    """

    variables: list[keras.Variable]
    since: keras.Variable
    anchors: list[keras.Variable]
    velocity: list[keras.Variable]
    tally: keras.Variable
    functions: dict[str, Callable] = dataclasses.field(default_factory=dict)
    apart: bool = True

    def count(self, local: int, steps: int = 0, sent: int = 0) -> None:
        """Add steps and sent bytes to a replica's tally."""
        local_component(self.tally, local).assign_add([steps, sent])


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
        self._warm: Group | None = None
        self._copies: weakref.WeakKeyDictionary[Any, _Copies] = weakref.WeakKeyDictionary()

    def bytes_per_step(self, optimizer: Any) -> float:
        """Return the bytes that a replica has sent per step, on average; 0 before the first step.

        Synchronizations between steps, such as before a validation, are included.

        Args:
            optimizer: The outermost optimizer.
        """
        if optimizer not in self._copies:
            return 0.0
        steps, sent = local_component(self._copies[optimizer].tally, 0).numpy()
        return float(sent / max(steps, 1))

    def steps(self, optimizer: Any) -> int:
        """Return the number of steps that have run."""
        return int(step_counter(optimizer).numpy())

    def variables(self, optimizer: Any) -> list[keras.Variable]:
        """Return the state beside that of the model and the optimizer.

        It is valid between steps, after the copies have been synchronized.
        """
        return self._copies[optimizer].velocity if optimizer in self._copies else []

    def prepare(self, optimizer: Any, variables: list) -> None:
        """Create the state of local SGD before the first step.

        Args:
            optimizer: The outermost optimizer.
            variables: Variables that it updates.
        """
        if optimizer in self._copies:
            return
        with tf.init_scope(), self._strategy.scope():
            far = not self.policy.averages or self.policy.comm_dtype is not None
            like = [v for v in variables if far]
            anchors = [_copy(v, "anchor", v.numpy()) for v in like]
            velocity = [
                _copy(v, "velocity", tf.zeros(v.shape, v.dtype))
                for v in like
                if self.policy.outer_momentum
            ]
            since = keras.Variable(0, dtype="int64", trainable=False, name="since")
            tally = keras.Variable([0, 0], dtype="int64", trainable=False, name="tally")
            self._copies[optimizer] = _Copies(list(variables), since, anchors, velocity, tally)

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
                "sync: a LossScaleOptimizer (policy mixed_float16) finds another scale on each "
                "replica that trains by itself. Use the policy mixed_bfloat16, or "
                "tfdist.sync.Gradients."
            )
        if variables is None:
            raise ValueError(
                "sync: expected optimizer.apply(gradients, variables); which variables become one "
                "is not known without them."
            )
        self.prepare(optimizer, variables)
        copies = self._copies[optimizer]
        local = local_replica(self._placement)
        graph_timestamps.before_sum(local, list(grads), self._placement.replicas > 1)
        if self._placement.replicas > 1:
            grads = self._own(optimizer, copies, grads, variables, local)
        graph_timestamps.after_sum(local, grads)
        grads = [gradient_sum.merge_duplicates(g) for g in grads]
        if watch is not None:
            watch(grads, variables)
        with local_update(optimizer, local), graph_timestamps.update(local):
            keras_apply(optimizer, grads, variables)
            if self._placement.replicas > 1:
                self._step(copies, local_component(step_counter(optimizer), local), local)

    def sync_replicas(self, optimizer: Any) -> bool:
        """Synchronize the variables and the optimizer's slots.

        All workers call this method, between steps.

        Args:
            optimizer: The outermost optimizer. One of another policy, or None, has no copies here.

        Returns:
            Whether anything was synchronized: True if steps have run since the last time.
        """
        copies = self._copies.get(optimizer) if optimizer is not None else None
        if copies is None or not copies.apart:
            return False
        self._run("sync_replicas", optimizer, copies, self._sync_all)
        copies.apart = False
        return True

    def begin(self, optimizer: Any, anew: bool) -> None:
        """Prepare for steps, after which the copies differ.

        Args:
            optimizer: The outermost optimizer.
            anew: Whether the variables may have been set since the last step, equally on all
                replicas, or whether steps may have been interrupted half done.
        """
        copies = self._copies.get(optimizer) if optimizer is not None else None
        if copies is None:
            return
        if anew or not copies.apart:  # a callback may have set weights after a synchronization
            self._run("begin", optimizer, copies, self._begin)
        copies.apart = True

    # --- Within a step ----------------------------------------------------------------------------
    def _own(self, optimizer, copies: _Copies, grads: list, variables: list, local: int) -> list:
        """Return the gradients of this replica's mean loss.

        During warmup, return those of the global batch's mean loss.
        """
        if not self.policy.warmup:
            return gradient_sum.of_own_means(grads, self._placement.replicas)
        grads = gradient_sum.dense(grads, optimizer, variables)
        places = [i for i, g in enumerate(grads) if g is not None]
        if self._warm is None:
            self._warm = Group.of(self._strategy, "warmup")
        warm = self._warm

        def shared() -> list:
            with metered() as sent:
                sums = all_reduce(
                    warm, grads, "warmup", self.policy.bucket_bytes, self.policy.comm_dtype
                )
            copies.count(local, sent=sum(sent))
            return [g for g in sums if g is not None]

        done = local_component(step_counter(optimizer), local)
        own = [
            g for g in gradient_sum.of_own_means(grads, self._placement.replicas) if g is not None
        ]
        found = tf.cond(done < self.policy.warmup, shared, lambda: own)
        for i, g in zip(places, found, strict=True):
            grads[i] = g
        return grads

    def _step(self, copies: _Copies, steps: tf.Variable, local: int) -> None:
        """Count a step after its update, and synchronize the copies when it is time."""
        copies.count(local, steps=1)
        since = local_component(copies.since, local)
        beyond = tf.cast(steps, tf.int64) - self.policy.warmup

        def warm():
            self._remember(copies, local)

        def cold():
            since.assign_add(1)
            if isinstance(self.policy.every, int):
                tf.cond(
                    tf.equal(beyond % self.policy.every, 0),
                    lambda: self._sync_replicas(copies, local),
                    lambda: None,
                )

        if self.policy.warmup:
            tf.cond(beyond <= 0, warm, cold)
        else:
            cold()

    def _remember(self, copies: _Copies, local: int) -> None:
        """Record that the copies are equal now."""
        for anchor, v in zip(copies.anchors, copies.variables, strict=bool(copies.anchors)):
            local_component(anchor, local).assign(local_component(v, local))
        local_component(copies.since, local).assign(0)

    def _sync_replicas(self, copies: _Copies, local: int) -> None:
        """Run the outer step.

        See Douillard et al. 2023, arXiv:2311.08105, algorithm 1, lines 9 to 14.
        """
        if self._group is None:
            self._group = Group.of(self._strategy, "weights")
        own = [local_component(v, local) for v in copies.variables]
        anchors = [local_component(v, local) for v in copies.anchors]
        velocity = [local_component(v, local) for v in copies.velocity]
        given = (
            [a - v for a, v in zip(anchors, own, strict=True)]
            if anchors
            else [tf.convert_to_tensor(v) for v in own]
        )
        with metered() as sent:
            sums = all_reduce(
                self._group, given, "weights", self.policy.bucket_bytes, self.policy.comm_dtype
            )
        copies.count(local, sent=sum(sent))
        for place, (v, total) in enumerate(zip(own, sums, strict=True)):
            step = total / self._placement.replicas
            if not anchors:
                v.assign(step)
                continue
            if velocity:
                kept = velocity[place].assign(self.policy.outer_momentum * velocity[place] + step)
                step += self.policy.outer_momentum * kept
            v.assign(anchors[place].assign(anchors[place] - self.policy.outer_learning_rate * step))
        local_component(copies.since, local).assign(0)

    # --- Between steps ----------------------------------------------------------------------------
    def _run(
        self, name: str, optimizer: Any, copies: _Copies, body: Callable[[list, _Copies, int], None]
    ) -> None:
        if self._placement.replicas == 1:
            return
        if name not in copies.functions:
            slots = _slots(optimizer)

            # This function does not refer to the optimizer. Otherwise the optimizer, the key of
            # a weak dictionary, would live as long as its entry.
            def on_replica():
                body(slots, copies, local_replica(self._placement))

            copies.functions[name] = tf.function(
                lambda: self._strategy.run(on_replica), autograph=False
            ).get_concrete_function()
        copies.functions[name]()

    def _sync_all(self, slots: list, copies: _Copies, local: int) -> None:
        self._average(slots, copies, local)
        tf.cond(
            local_component(copies.since, local) > 0,
            lambda: self._sync_replicas(copies, local),
            lambda: None,
        )

    def _begin(self, slots: list, copies: _Copies, local: int) -> None:
        tf.cond(
            local_component(copies.since, local) > 0,
            lambda: self._average(copies.variables, copies, local),
            lambda: None,
        )
        self._remember(copies, local)

    def _average(self, variables: list, copies: _Copies, local: int) -> None:
        """Set each variable to the mean of its copies."""
        group = Group.of(self._strategy, "state")
        own = [local_component(v, local) for v in variables]
        with metered() as sent:
            sums = all_reduce(
                group, [tf.convert_to_tensor(v) for v in own], "state", self.policy.bucket_bytes
            )
        copies.count(local, sent=sum(sent))
        for v, total in zip(own, sums, strict=True):
            v.assign(total / self._placement.replicas)


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
