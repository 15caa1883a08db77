"""Pipeline-parallel Keras models: `pipeline` and `PipelineModel`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat.parallel import mask_of, move
from tfdist.parallel.pipeline_parallel import microbatching, stage_updates
from tfdist.parallel.pipeline_parallel.layer_timing import seconds
from tfdist.parallel.pipeline_parallel.mesh import Mesh, mesh_of
from tfdist.parallel.pipeline_parallel.schedule import SCHEDULES, tasks
from tfdist.parallel.pipeline_parallel.split import (
    Graph,
    Stage,
    balanced,
    cuts_after,
    graph_of,
    inputs_by_number,
    parameters,
    split,
)
from tfdist.parallel.pipeline_parallel.stage_passes import Loss, StageInGroup
from tfdist.parallel.tensor_parallel import shard_of

BALANCES = ("parameters", "time")


def pipeline(
    model: keras.Model,
    stages: int | None = None,
    *,
    cut_at: Sequence[keras.layers.Layer | str] | None = None,
    microbatches: int,
    schedule: str = "1f1b",
    recompute: bool = False,
    devices: Sequence[str] | None = None,
    data: int = 1,
    tensor: int = 1,
    balance: str = "parameters",
    sample: Any = None,
) -> PipelineModel:
    """Split a model's layers into stages on several devices (pipeline parallelism).

    Call it before `compile`, outside of any strategy's scope.

    Args:
        model: Sequential or Functional model. It keeps its weights, which move to the devices of
            their stages. Its own `save`, `load_weights` and `predict` work as before.
        stages: Number of stages. The cuts between them are chosen by `balance`.
        cut_at: Last layer of each stage except the last stage, as a layer or its name. Use it
            instead of `stages`.
        microbatches: Number of micro-batches into which a group's part of a batch is split.
            `data * microbatches` must divide every batch given to `fit`.
        schedule: Order of forward and backward passes. "1f1b": stage s of S holds the activations
            of at most S - s micro-batches. "gpipe": each stage holds the activations of all
            micro-batches.
        recompute: Whether a stage drops its activations after the forward pass, and computes them
            again before the backward pass.
        devices: Device names, `data * stages * tensor` of them, by group, then stage, then shard.
            A device may be named several times. None: GPUs, or CPUs where there are no GPUs.
            `tfdist.pipeline_devices()` returns the devices of a cluster's workers.
        data: Number of device groups that each take an equal part of a batch (data parallelism).
        tensor: Number of devices of a stage, over which its `ShardedMLP` layers are sharded
            (tensor parallelism).
        balance: Cost by which `stages` are balanced. "parameters": the largest number of weights
            of a stage is minimized. "time": the longest time of a stage for `sample` is minimized.
        sample: Inputs of the model for `balance="time"`, as `fit` takes them, with as many
            examples as a micro-batch has. None: 32 examples of zeros.

    Returns:
        Keras model that trains as `model` would.

    Raises:
        ValueError: If an argument is invalid, if the model cannot be cut as requested, or if
            there are too few devices.
    """
    for name, value in (
        ("microbatches", microbatches),
        ("data", data),
        ("tensor", tensor),
        *([("stages", stages)] if stages is not None else []),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"parallel.pipeline: {name}: expected a positive integer, received {value!r}."
            )
    for name, option, choices in (
        ("schedule", schedule, SCHEDULES),
        ("balance", balance, BALANCES),
    ):
        if option not in choices:
            raise ValueError(
                f"parallel.pipeline: {name}: expected {' or '.join(map(repr, choices))}, received "
                f"{option!r}."
            )
    if (stages is None) == (cut_at is None):
        raise ValueError(
            "parallel.pipeline: expected either stages or cut_at, "
            f"received stages={stages!r} and cut_at={cut_at!r}."
        )
    if sample is not None and (balance != "time" or stages is None):
        raise ValueError(
            'parallel.pipeline: sample: expected only with stages=S and balance="time", '
            f"received it with stages={stages!r} and balance={balance!r}."
        )
    if tf.distribute.has_strategy():
        raise ValueError(
            "parallel.pipeline: expected a call outside of strategy.scope(). For data parallelism, "
            "pass data=N."
        )
    graph = graph_of(model)
    if stages is None:
        assert cut_at is not None
        ends = cuts_after(graph, cut_at if isinstance(cut_at, (list, tuple)) else [cut_at])
    else:
        ends = balanced(
            graph, stages, parameters(graph) if balance == "parameters" else seconds(graph, sample)
        )
    parts = split(graph, ends)
    mesh = mesh_of(devices, data, len(parts), tensor)
    _check_shards(parts, mesh)
    stage_of_variable: dict[int, int] = {}
    for stage in parts:
        for v in stage.model.variables:
            if stage_of_variable.setdefault(id(v), stage.number) == stage.number:
                move(v, mesh.device_of(stage.number, shard_of(v)))
    return PipelineModel(
        model, Plan(graph, parts, mesh, stage_of_variable, microbatches, schedule, recompute)
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Stages, devices and schedule of a pipeline-parallel model.

    Args:
        graph: Graph of the model.
        stages: Stages of the model, in order.
        mesh: Devices of the stages.
        stage_of_variable: Index of the stage that holds a variable, by the id of the variable.
        microbatches: Number of micro-batches of each group.
        schedule: Order of passes, one of `SCHEDULES`.
        recompute: Whether stages compute their activations again before the backward pass.
    """

    graph: Graph
    stages: tuple[Stage, ...]
    mesh: Mesh
    stage_of_variable: dict[int, int]
    microbatches: int
    schedule: str
    recompute: bool

    @property
    def total_microbatches(self) -> int:
        """Return the number of micro-batches of a batch, over all groups."""
        return self.microbatches * self.mesh.groups

    def device_of(self, variable: keras.Variable) -> str:
        """Return the device that holds a variable."""
        return self.mesh.device_of(self.stage_of_variable.get(id(variable), 0), shard_of(variable))

    @property
    def last_device(self) -> str:
        """Return the device of the last stage in the first group."""
        return self.mesh.device_of(len(self.stages) - 1)

    def recomputes(self, stage: int) -> bool:
        """Return whether a stage computes its activations again before the backward pass.

        The last stage does not under 1F1B: its backward pass follows the forward pass at once, so
        that recomputation would save no memory.
        """
        return self.recompute and not (self.schedule == "1f1b" and stage == len(self.stages) - 1)


class PipelineModel(keras.Model):
    """A Keras model that runs its layers as stages on several devices; `pipeline` makes it.

    Each micro-batch has its own BatchNormalization statistics. The moving statistics are updated
    once for each micro-batch. Each of several groups has its own moving statistics during a step,
    and their mean is kept. Losses that layers add are averaged over the micro-batches.
    Regularization losses of weights count once.
    """

    tfdist_distributed = True  # outside of a strategy's scope, too (`keras_compat.scopes`)

    def __init__(self, inner: keras.Model, plan: Plan):
        super().__init__(name=f"{inner.name}_pipeline", dtype=inner.dtype_policy, autocast=False)
        self.inner = inner
        self.plan = plan
        self.output_names = list(plan.graph.model.output_names)
        self.supports_jit = False
        self._step_losses = _StepLosses()
        self.built = True

    # --- Methods of keras.Model ---------------------------------------------------------------
    def build(self, input_shape=None):
        """See `keras.layers.Layer`."""
        self.built = True

    def compile(self, *args, jit_compile="auto", **kwargs):
        """See `keras.Model`; XLA is off, as it cannot compile a function over several devices.

        Raises:
            ValueError: If `jit_compile=True`, or if the losses of micro-batches do not add up to
                the loss of the batch.
        """
        if jit_compile is True:
            raise ValueError(
                "PipelineModel.compile: expected jit_compile=False, received True. XLA cannot "
                "compile a step over several devices."
            )
        super().compile(*args, jit_compile=False, **kwargs)
        _reduction(self.loss)

    def make_train_function(self, force=False):
        """See `keras.Model`; an indivisible batch raises ValueError without graph details."""
        if self.train_function is None or force:
            super().make_train_function(force)
            function: Any = self.train_function
            self.train_function: Callable | None = _with_plain_errors(function)

    def call(self, inputs, training=None):
        """Run the stages of the first group one after the other."""
        tensors = self._inputs_by_number(inputs)
        for stage in self.plan.stages:
            with tf.device(self.plan.mesh.device_of(stage.number)):
                outputs = stage.model([tensors[n] for n in stage.input_numbers], training=training)
            tensors.update(zip(stage.output_numbers, keras.tree.flatten(outputs), strict=True))
        return self._pack_outputs(tensors)

    @property
    def losses(self):
        """Return the losses of the inner model; within a step, the losses of the step."""
        return super().losses if self._step_losses.losses is None else self._step_losses.losses

    def save(self, filepath, *args, **kwargs):
        """Save the inner model with its weights. See `keras.Model`."""
        return self.inner.save(filepath, *args, **kwargs)

    def save_weights(self, filepath, *args, **kwargs):
        """Save the weights of the inner model. See `keras.Model`."""
        return self.inner.save_weights(filepath, *args, **kwargs)

    def load_weights(self, filepath, *args, **kwargs):
        """Load weights into the inner model. See `keras.Model`."""
        return self.inner.load_weights(filepath, *args, **kwargs)

    def export(self, filepath, *args, **kwargs):
        """Export the inner model. See `keras.Model`."""
        return self.inner.export(filepath, *args, **kwargs)

    # --- Steps --------------------------------------------------------------------------------
    def train_step(self, data):
        """See `keras.Model`."""
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        plan = self.plan
        reduction = _reduction(self.loss, weights is not None)
        microbatch_data = microbatching.split_evenly(
            (self._inputs_by_number(x), y, weights), plan.total_microbatches, self.inner.name
        )
        batches = _split_into_groups(microbatch_data, plan.microbatches)
        tensors = [[dict(inputs) for inputs, _, _ in group] for group in batches]
        scale = tf.convert_to_tensor(self.optimizer.scale_loss(tf.constant(1.0)))
        share = scale / plan.total_microbatches
        groups = self._groups([[share] * plan.microbatches] * plan.mesh.groups)

        def loss_of(group: int) -> Loss:
            def loss(
                microbatch: int, tensors_of_microbatch: dict[int, tf.Tensor]
            ) -> tf.Tensor | None:
                _, y, weights = batches[group][microbatch]
                value = self._loss(y, self._pack_outputs(tensors_of_microbatch), weights)
                return (
                    None
                    if value is None
                    else tf.cast(value, tf.float32) * (scale if reduction == "sum" else share)
                )

            return loss

        def measure(group: int, microbatch: int) -> None:
            _, y, weights = batches[group][microbatch]
            self.compute_metrics(
                None, y, self._pack_outputs(tensors[group][microbatch]), sample_weight=weights
            )

        losses = [loss_of(d) for d in range(plan.mesh.groups)]
        microbatching.run(
            groups,
            tensors,
            tasks(len(plan.stages), plan.microbatches, plan.schedule),
            losses,
            measure,
            training=True,
        )
        gradients = stage_updates.sum_gradients(groups, plan.device_of)
        penalties = stage_updates.penalties(
            self.trainable_variables, plan.device_of, gradients, scale
        )
        with tf.device(plan.last_device):
            losses_of_stages = [loss for group in groups for stage in group for loss in stage.added]
            if not losses_of_stages and not penalties:
                raise ValueError(
                    "PipelineModel: expected a loss, received none. Pass compile(loss=...)."
                )
            total = tf.add_n([*(loss / scale for loss in losses_of_stages), *penalties])
        self._note(total, x)
        stage_updates.apply(self.optimizer, gradients, self.trainable_variables)
        stage_updates.keep_state(groups, plan.device_of)
        return self.get_metrics_result()

    def test_step(self, data):
        """See `keras.Model`."""
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        outputs, added = self._forward(x)
        with self._step_losses.as_losses(
            [*added, *stage_updates.penalties(self.trainable_variables, self.plan.device_of)]
        ):
            loss = self.compute_loss(
                x=x, y=y, y_pred=outputs, sample_weight=weights, training=False
            )
        self._note(loss, x)
        return self.compute_metrics(x, y, outputs, sample_weight=weights)

    def predict_step(self, data):
        """See `keras.Model`."""
        return self._forward(keras.utils.unpack_x_y_sample_weight(data)[0])[0]

    def _forward(self, x: Any) -> tuple[Any, list[tf.Tensor]]:
        """Return the outputs for a batch of any size, and the losses that layers add."""
        plan = self.plan
        inputs = self._inputs_by_number(x)
        microbatch_data, parts = microbatching.split_any_size(inputs, plan.total_microbatches)
        tensors = [
            [dict(piece) for piece in group]
            for group in _split_into_groups(microbatch_data, plan.microbatches)
        ]
        groups = self._groups(_split_into_groups(parts, plan.microbatches))
        microbatching.run(
            groups,
            tensors,
            tasks(len(plan.stages), plan.microbatches, "forward"),
            [None] * plan.mesh.groups,
        )
        with tf.device(plan.last_device):
            rows = _rows(inputs)
            whole_outputs = {
                n: microbatching.concatenate(
                    [microbatch[n] for group in tensors for microbatch in group], rows
                )
                for n in plan.graph.outputs
            }
        return self._pack_outputs(whole_outputs), [
            loss for group in groups for stage in group for loss in stage.added
        ]

    # --- Parts of a step ----------------------------------------------------------------------
    def _groups(self, shares: Sequence[Sequence[tf.Tensor]]) -> list[list[StageInGroup]]:
        """Return the stages of each group for one step.

        Args:
            shares: Factor of each micro-batch's mean in the step's loss, `[groups][microbatches]`.
        """
        last = len(self.plan.stages) - 1
        return [
            [
                StageInGroup(
                    s,
                    devices[s.number],
                    d,
                    s.number == last,
                    self.plan.recomputes(s.number),
                    own_shares,
                    self.plan.graph.inputs,
                )
                for s in self.plan.stages
            ]
            for d, (devices, own_shares) in enumerate(
                zip(self.plan.mesh.devices, shares, strict=True)
            )
        ]

    def _inputs_by_number(self, x: Any) -> dict[int, tf.Tensor]:
        """Return the inputs by their numbers in the graph."""
        return {
            n: tf.convert_to_tensor(tensor)
            for n, tensor in inputs_by_number(self.plan.graph, x).items()
        }

    def _pack_outputs(self, tensors: dict[int, tf.Tensor]) -> Any:
        """Return the outputs in the structure that the model would return."""
        flat = [tensors[n] for n in self.plan.graph.outputs]
        model = self.plan.graph.model
        single = isinstance(model.output, list) and len(flat) == 1
        return flat[0] if single else keras.tree.pack_sequence_as(model.output, flat)

    def _loss(self, y: Any, outputs: Any, weights: Any) -> tf.Tensor | None:
        """Return the compiled loss of a micro-batch; None if `compile` was given no loss."""
        if self.loss is None:
            return None
        masked = [
            name
            for name, x in zip(self.output_names, keras.tree.flatten(outputs), strict=True)
            if mask_of(x) is not None
        ]
        if masked:
            raise ValueError(
                f"PipelineModel: output {masked[0]!r} has a mask, and Keras divides the loss by "
                "its size. Micro-batches have different numbers of unmasked positions, so the mean "
                "of their losses is not the loss of the batch. Remove the mask after the last "
                "layer that needs it, and pass sample weights that are 0 at masked positions."
            )
        with self._step_losses.as_losses([]):
            return self.compute_loss(
                x=None, y=y, y_pred=outputs, sample_weight=weights, training=True
            )

    def _note(self, loss: tf.Tensor, x: Any) -> None:
        next(metric for metric in self.metrics if metric.name == "loss").update_state(
            loss, sample_weight=_rows(x)
        )


class _StepLosses:
    """Replacement for `PipelineModel.losses` while a step is traced.

    Without it, Keras would add the losses of all layers to the loss of each micro-batch.
    """

    losses: list | None = None

    @contextlib.contextmanager
    def as_losses(self, losses: list) -> Iterator[None]:
        self.losses = losses
        try:
            yield
        finally:
            self.losses = None


def _check_shards(stages: Sequence[Stage], mesh: Mesh) -> None:
    """Raise ValueError if a device of a stage would have nothing to compute."""
    for stage in stages:
        shards = 1 + max(map(shard_of, stage.model.variables))
        for own in (group[stage.number] for group in mesh.devices):
            idle = sorted(set(own) - set(own[:shards]))
            if idle:
                raise ValueError(
                    f"parallel.pipeline: tensor={len(own)}: stage {stage.number} "
                    f"({', '.join(stage.layers)}) has no ShardedMLP of {len(own)} shards, "
                    f"so that {', '.join(idle)} would "
                    "have nothing to do. Give it one, move the cuts, or name a device several "
                    "times in devices=."
                )


def _rows(x: Any) -> tf.Tensor:
    return tf.shape(keras.tree.flatten(x)[0])[0]


def _split_into_groups(pieces: Sequence, size: int) -> list[list]:
    return [list(pieces[i : i + size]) for i in range(0, len(pieces), size)]


def _reduction(losses: Any, weighted: bool = False) -> str:
    """Return "mean" or "sum", by which micro-batch losses combine into the loss of a batch.

    Args:
        losses: Nest of losses as `compile` takes them.
        weighted: Whether the batch has sample weights.

    Raises:
        ValueError: If the losses of micro-batches do not add up to the loss of the batch.
    """
    reductions = {
        getattr(loss, "reduction", "sum_over_batch_size")
        for loss in keras.tree.flatten(losses)
        if loss is not None
    }
    kinds = {"sum" if r == "sum" else "mean" for r in reductions}
    if (
        reductions & {None, "none"}
        or len(kinds) > 1
        or (weighted and "mean_with_sample_weight" in reductions)
    ):
        raise ValueError(
            "PipelineModel: expected losses that all have the reduction "
            '"sum_over_batch_size", or all "sum"; received '
            f"{', '.join(sorted(map(str, reductions)))}. With other reductions, the losses of "
            "micro-batches do not add up to the loss of the batch."
        )
    return kinds.pop() if kinds else "mean"


def _with_plain_errors(function: Callable) -> Callable:
    """Wrap a train function to raise ValueError for an indivisible batch.

    TensorFlow's own error contains graph details, which hide the message.
    """

    def wrapper(*args):
        try:
            return function(*args)
        except tf.errors.InvalidArgumentError as error:
            begin = error.message.find(microbatching.INDIVISIBLE)
            if begin < 0:
                raise
            text, remedy, _ = error.message[begin:].partition(microbatching.REMEDY)
            raise ValueError(
                " ".join(
                    f"{text}{remedy}".replace("[", " ").replace("]", " ").replace("'", " ").split()
                )
            ) from None

    return wrapper
