"""Forward and backward passes of a stage, as operations on the stage's devices.

The module `microbatching` calls them in the order of a schedule.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.keras_compat import global_generator
from tfdist.keras_compat.parallel import mask_of, with_mask
from tfdist.parallel.pipeline_parallel.split import Stage
from tfdist.parallel.tensor_parallel import shard_of, sharded_over

# Loss of the last stage: (micro-batch, tensors by number) -> the micro-batch's part of the step's
# loss, a scalar, or None.
Loss = Callable[[int, dict[int, tf.Tensor]], tf.Tensor | None]


@dataclasses.dataclass
class _Pass:
    """Tensors and tape that a forward pass keeps for its backward pass."""

    inputs: list[tf.Tensor]
    state: list[tf.Tensor]
    tape: tf.GradientTape | None
    targets: list[tf.Tensor]  # the stage's outputs, for which gradients arrive
    losses: list[tf.Tensor]  # the pass's parts of the step's loss


class StageInGroup:
    """A stage on the devices of one group, for one step.

    Args:
        stage: Stage of the model.
        devices: Devices of this stage in this group. The first runs everything except the other
            shards of tensor parallelism.
        group: Index of the group.
        last: Whether it is the last stage, which computes the loss.
        recompute: Whether activations are dropped after the forward pass, and computed again
            before the backward pass.
        shares: Factor of each micro-batch's mean in the step's loss, float32 scalars.
        given: Numbers of the model's own inputs, for which no gradients are computed.

    Attributes:
        state: Values of the non-trainable variables after the passes so far.
        sums: Sums of the gradients of the trainable variables; None without a gradient.
        added: Parts of the step's loss, from layers' own losses and from the loss of the last
            stage.
    """

    def __init__(
        self,
        stage: Stage,
        devices: Sequence[str],
        group: int,
        last: bool,
        recompute: bool,
        shares: Sequence[tf.Tensor],
        model_inputs: Sequence[int],
    ):
        self.stage = stage
        self.devices = list(devices)
        self._last = last
        self._recompute = recompute
        self._shares = shares
        self._inputs_with_gradient = [i for i, n in enumerate(stage.needs) if n not in model_inputs]
        self._trainable = list(stage.model.trainable_variables)
        shared = global_generator.state_of(tf.distribute.get_strategy())
        self._fixed = [*stage.model.non_trainable_variables, *shared]
        self._values = [self._read(v) for v in self._trainable]
        self.state = [
            _shifted(v, self._read(v), group, stage.number if any(v is x for x in shared) else 0)
            for v in self._fixed
        ]
        self._before = self.state
        self.sums: list[tf.Tensor | None] = [None] * len(self._trainable)
        self._passes: dict[int, _Pass] = {}
        self.added: list[tf.Tensor] = []

    def forward(
        self, microbatch: int, tensors: dict[int, tf.Tensor], loss: Loss | None, training: bool
    ) -> list[tf.Tensor]:
        """Run the stage's forward pass on a micro-batch.

        Args:
            microbatch: Index of the micro-batch in the group.
            tensors: Inputs and outputs of earlier stages by number. This stage's outputs are
                added.
            loss: Loss of the last stage when training, otherwise None.
            training: Whether a backward pass follows.

        Returns:
            All tensors that the pass has computed, for control dependencies.
        """
        inputs = [tensors[n] for n in self.stage.needs]
        state = self.state
        if not training:
            outputs_by_number, losses, _ = self._run(microbatch, inputs, state, False)
            self.added += losses
            tensors.update(outputs_by_number)
            return [*outputs_by_number.values(), *losses]
        with contextlib.nullcontext() if self._recompute else tf.GradientTape() as tape:
            if tape is not None:
                tape.watch([*(inputs[i] for i in self._differentiable(inputs)), *self._values])
            outputs_by_number, losses, self.state = self._run(microbatch, inputs, state, True)
            losses = self._with_loss(losses, loss, microbatch, inputs, outputs_by_number)
        done = _Pass(inputs, state, tape, [], [] if tape is None else losses)
        self._passes[microbatch] = done
        done.targets = (
            [] if tape is None else [outputs_by_number[n] for n in self.stage.output_numbers]
        )
        self.added += [tf.stop_gradient(x) for x in losses]
        tensors.update(outputs_by_number)
        return [*outputs_by_number.values(), *losses]

    def backward(
        self, microbatch: int, gradients: dict[int, tf.Tensor], loss: Loss | None
    ) -> list[tf.Tensor]:
        """Run the stage's backward pass on a micro-batch.

        Args:
            microbatch: Index of the micro-batch in the group.
            gradients: Gradients of this stage's outputs by number. They are removed, and the
                gradients of this stage's inputs are added.
            loss: Loss as for `forward`; with `recompute` it is called again.

        Returns:
            All tensors that the pass has computed, for control dependencies.
        """
        done = self._passes.pop(microbatch)
        inputs = done.inputs
        tape = done.tape
        targets = done.targets
        losses = done.losses
        if tape is None:
            # Without the copies, TensorFlow would merge both forward passes into one.
            inputs = [with_mask(tf.identity(x), mask_of(x)) for x in inputs]
            with tf.GradientTape() as tape:
                tape.watch([*(inputs[i] for i in self._differentiable(inputs)), *self._values])
                outputs_by_number, losses, _ = self._run(microbatch, inputs, done.state, True)
                with keras.StatelessScope():  # metrics have counted the first pass
                    losses = self._with_loss(losses, loss, microbatch, inputs, outputs_by_number)
            targets = [outputs_by_number[n] for n in self.stage.output_numbers]
        indices = self._differentiable(inputs)
        sources = [inputs[i] for i in indices] + self._values
        pairs = [
            (x, gradients.pop(n, None))
            for n, x in zip(self.stage.output_numbers, targets, strict=True)
        ]
        targets_and_grads = [(x, g) for x, g in pairs if g is not None] + [
            (x, tf.ones_like(x)) for x in losses
        ]
        if not targets_and_grads:
            return []
        grads = tape.gradient(
            [x for x, _ in targets_and_grads], sources, [g for _, g in targets_and_grads]
        )
        for i, g in zip(indices, grads, strict=False):
            if g is not None:
                n = self.stage.needs[i]
                gradients[n] = gradients[n] + g if n in gradients else tf.convert_to_tensor(g)
        for i, g in enumerate(grads[len(indices) :]):
            if g is not None:
                with tf.device(self._device(self._trainable[i])):
                    so_far = self.sums[i]
                    self.sums[i] = tf.convert_to_tensor(g) if so_far is None else so_far + g
        return [
            x for x in (*self.sums, *(gradients.get(n) for n in self.stage.needs)) if x is not None
        ]

    def _run(
        self, microbatch: int, inputs: list, state: list, training: bool
    ) -> tuple[dict[int, tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """Run the stage's model without a change of its variables.

        Returns:
            Outputs by number, parts of the step's loss that layers add, and the values of the
            non-trainable variables after the pass.
        """
        mapping = [
            *zip(self._trainable, self._values, strict=True),
            *zip(self._fixed, state, strict=True),
        ]
        with (
            keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope,
            sharded_over(self.devices),
        ):
            outputs = self.stage.model(inputs[: len(self.stage.input_numbers)], training=training)
        outputs_by_number = dict(
            zip(self.stage.output_numbers, keras.tree.flatten(outputs), strict=True)
        )
        losses = [
            tf.cast(tf.reduce_sum(x), tf.float32) * self._shares[microbatch] for x in scope.losses
        ]
        return outputs_by_number, losses, [scope.get_current_value(v) for v in self._fixed]

    def _with_loss(
        self,
        losses: list,
        loss: Loss | None,
        microbatch: int,
        inputs: list,
        outputs_by_number: dict[int, tf.Tensor],
    ) -> list[tf.Tensor]:
        if not self._last or loss is None:
            return losses
        value = loss(
            microbatch, {**dict(zip(self.stage.needs, inputs, strict=True)), **outputs_by_number}
        )
        return losses if value is None else [*losses, value]

    def _differentiable(self, inputs: Sequence[tf.Tensor]) -> list[int]:
        """Return the indices of the inputs for which gradients are computed."""
        return [i for i in self._inputs_with_gradient if inputs[i].dtype.is_floating]

    def _device(self, variable: keras.Variable) -> str:
        return self.devices[shard_of(variable) % len(self.devices)]

    def _read(self, variable: keras.Variable) -> tf.Tensor:
        with tf.device(self._device(variable)):
            return tf.identity(variable.value)

    @property
    def results(self) -> list[tuple[keras.Variable, tf.Tensor | None]]:
        """Return the stage's trainable variables with the sums of their gradients."""
        return list(zip(self._trainable, self.sums, strict=True))

    @property
    def changes(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Return the non-trainable variables that the passes have changed, with new values."""
        each = zip(self._fixed, self._before, self.state, strict=True)
        return [(v, after) for v, before, after in each if after is not before]


def _shifted(variable: keras.Variable, value: tf.Tensor, group: int, stage: int) -> tf.Tensor:
    """Return a variable's value for a group, and for a stage if stages share the variable.

    Seeds differ between them, so that no two draw the same numbers.
    """
    if not (group or stage) or not is_seed(variable):
        return value
    shift = group * 0x9E3779B1 + stage * 0x85EBCA6B
    return value + tf.constant([shift & 0xFFFFFFFF, 0], value.dtype)


def is_seed(variable: keras.Variable) -> bool:
    """Return whether a variable is the state of a `keras.random.SeedGenerator`."""
    return variable.name == "seed_generator_state"
