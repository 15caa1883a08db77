"""A Keras model becomes one whose layers are spread over devices as stages, through which batches go in pieces."""

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
    cut_behind,
    graph_of,
    numbered,
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
    """Spreads a model's layers over devices; call it before `compile`, outside of any strategy's scope.

    Args:
        model: Sequential or Functional. It keeps its weights, which move to the devices of their stages; its own `save`, `load_weights` and
            `predict` work as before.
        stages: How many; where to cut is found by `balance`.
        cut_at: The last layer of each stage but the last, by itself or by name, instead of `stages`.
        microbatches: Pieces that a group's part of a batch is cut into. `data * microbatches` must divide every batch given to `fit`.
        schedule: "1f1b": stage s of S holds the activations of at most S - s micro-batches; "gpipe": of all of them.
        recompute: Whether a stage drops its activations after the forward pass, and computes them again before the backward pass.
        devices: `data * stages * tensor` names, by group, then stage, then shard; one may be named several times. None: GPUs, or where there
            are none, CPUs. `tfdist.pipeline_devices()` gives those of a cluster's workers.
        data: Groups of devices that each take an equal part of a batch.
        tensor: Devices of a stage, over which its `ShardedMLP` layers are spread.
        balance: "parameters": the stage with most weights has as few as can be; "time": the same by what layers take for `sample`.
        sample: For `balance="time"`: inputs of the model, as `fit` takes them, of as many examples as a micro-batch has. None: 32 examples of zeros.

    Returns:
        A keras.Model that trains as `model` would.

    Raises:
        ValueError: An argument is wrong, the model cannot be cut so, or there are too few devices.
    """
    for name, value in (
        ("microbatches", microbatches),
        ("data", data),
        ("tensor", tensor),
        *([("stages", stages)] if stages is not None else []),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"pipeline: {name}: expected a whole number from 1, received {value!r}."
            )
    for name, given, known in (("schedule", schedule, SCHEDULES), ("balance", balance, BALANCES)):
        if given not in known:
            raise ValueError(
                f"pipeline: {name}: expected {' or '.join(map(repr, known))}, received {given!r}."
            )
    if (stages is None) == (cut_at is None):
        raise ValueError(
            f"pipeline: expected either stages or cut_at, received stages={stages!r} and cut_at={cut_at!r}."
        )
    if sample is not None and (balance != "time" or stages is None):
        raise ValueError(
            f'pipeline: sample: expected with stages=S and balance="time" alone, received it with stages={stages!r} and balance={balance!r}.'
        )
    if tf.distribute.has_strategy():
        raise ValueError(
            "pipeline: call it outside of strategy.scope(); for several groups of devices pass data=N."
        )
    graph = graph_of(model)
    if stages is None:
        assert cut_at is not None
        ends = cut_behind(graph, cut_at if isinstance(cut_at, (list, tuple)) else [cut_at])
    else:
        ends = balanced(
            graph, stages, parameters(graph) if balance == "parameters" else seconds(graph, sample)
        )
    found = split(graph, ends)
    mesh = mesh_of(devices, data, len(found), tensor)
    _check_shards(found, mesh)
    homes: dict[int, int] = {}
    for stage in found:
        for v in stage.model.variables:
            if homes.setdefault(id(v), stage.number) == stage.number:
                move(v, mesh.home(stage.number, shard_of(v)))
    return PipelineModel(model, Plan(graph, found, mesh, homes, microbatches, schedule, recompute))


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a model is spread.

    Args:
        graph: The model's.
        stages: Its stages, in order.
        mesh: Their devices.
        homes: Number of the stage where a variable lies, by the variable's id.
        microbatches: Of each group.
        schedule: One of `SCHEDULES`.
        recompute: Whether stages compute their activations twice.
    """

    graph: Graph
    stages: tuple[Stage, ...]
    mesh: Mesh
    homes: dict[int, int]
    microbatches: int
    schedule: str
    recompute: bool

    @property
    def pieces(self) -> int:
        """Of a batch."""
        return self.microbatches * self.mesh.groups

    def home(self, variable: keras.Variable) -> str:
        """The device on which a variable lies."""
        return self.mesh.home(self.homes[id(variable)], shard_of(variable))

    @property
    def end(self) -> str:
        """The device of the last stage."""
        return self.mesh.home(len(self.stages) - 1)

    def recomputes(self, stage: int) -> bool:
        """Whether a stage does; under 1F1B the last one's backward pass follows at once, so that nothing would be saved."""
        return self.recompute and not (self.schedule == "1f1b" and stage == len(self.stages) - 1)


class PipelineModel(keras.Model):
    """A model whose layers are stages on several devices; made by `pipeline`.

    Each micro-batch has its own BatchNormalization statistics, and moving ones are updated once for each; of several groups, each has its own
    during a step, whose mean is kept. Losses that layers add are averaged over the micro-batches; those of weights count once.
    """

    def __init__(self, inner: keras.Model, plan: Plan):
        super().__init__(name=f"{inner.name}_pipeline", dtype=inner.dtype_policy, autocast=False)
        self.inner, self.plan = inner, plan
        self.output_names = list(plan.graph.model.output_names)
        self.supports_jit = False
        self._counted = _Counted()
        self.built = True

    # --- What Keras asks -----------------------------------------------------------------------------------------------
    def build(self, input_shape=None):
        self.built = True

    def compile(self, *args, jit_compile="auto", **kwargs):
        """As Keras', but that XLA cannot compile a function over several devices.

        Raises:
            ValueError: `jit_compile=True`, or losses whose sum over micro-batches is not that of the batch.
        """
        if jit_compile is True:
            raise ValueError(
                "pipeline: jit_compile=True: XLA compiles for one device, and has no kernels for what stages send each other; leave it out."
            )
        super().compile(*args, jit_compile=False, **kwargs)
        _reduction(self.loss)

    def make_train_function(self, force=False):
        if self.train_function is None or force:
            super().make_train_function(force)
            function: Any = self.train_function
            self.train_function: Callable | None = _explained(function)

    def call(self, inputs, training=None):
        """Runs the stages of the first group one after the other."""
        tensors = self._numbered(inputs)
        for stage in self.plan.stages:
            with tf.device(self.plan.mesh.home(stage.number)):
                outputs = stage.model([tensors[n] for n in stage.takes], training=training)
            tensors.update(zip(stage.makes, keras.tree.flatten(outputs), strict=True))
        return self._packed(tensors)

    @property
    def losses(self):
        """Those of the model inside; within a step, what the step has counted."""
        return super().losses if self._counted.losses is None else self._counted.losses

    def save(self, filepath, *args, **kwargs):
        """Saves the model inside, with its weights."""
        return self.inner.save(filepath, *args, **kwargs)

    def save_weights(self, filepath, *args, **kwargs):
        """As the model inside does."""
        return self.inner.save_weights(filepath, *args, **kwargs)

    def load_weights(self, filepath, *args, **kwargs):
        """As the model inside does."""
        return self.inner.load_weights(filepath, *args, **kwargs)

    def export(self, filepath, *args, **kwargs):
        """Exports the model inside."""
        return self.inner.export(filepath, *args, **kwargs)

    # --- Steps ---------------------------------------------------------------------------------------------------------
    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        plan, reduction = self.plan, _reduction(self.loss, weights is not None)
        pieces = microbatching.equal_pieces(
            (self._numbered(x), y, weights), plan.pieces, self.inner.name
        )
        batches = _grouped(pieces, plan.microbatches)
        tensors = [[dict(inputs) for inputs, _, _ in group] for group in batches]
        scale = tf.convert_to_tensor(self.optimizer.scale_loss(tf.constant(1.0)))
        share = scale / plan.pieces
        groups = self._groups([[share] * plan.microbatches] * plan.mesh.groups)

        def loss_of(group: int) -> Loss:
            def loss(microbatch: int, made: dict[int, tf.Tensor]) -> tf.Tensor | None:
                _, y, weights = batches[group][microbatch]
                value = self._loss(y, self._packed(made), weights)
                return (
                    None
                    if value is None
                    else tf.cast(value, tf.float32) * (scale if reduction == "sum" else share)
                )

            return loss

        def measure(group: int, microbatch: int) -> None:
            _, y, weights = batches[group][microbatch]
            self.compute_metrics(
                None, y, self._packed(tensors[group][microbatch]), sample_weight=weights
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
        gradients = stage_updates.summed(groups, plan.home)
        penalties = stage_updates.penalties(self.trainable_variables, plan.home, gradients, scale)
        with tf.device(plan.end):
            found = [loss for group in groups for stage in group for loss in stage.added]
            if not found and not penalties:
                raise ValueError("pipeline: there is no loss; give compile() a `loss`.")
            total = tf.add_n([*(loss / scale for loss in found), *penalties])
        self._note(total, x)
        stage_updates.apply(self.optimizer, gradients, self.trainable_variables)
        stage_updates.keep_state(groups, plan.home)
        return self.get_metrics_result()

    def test_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        outputs, added = self._forward(x)
        with self._counted.as_losses(
            [*added, *stage_updates.penalties(self.trainable_variables, self.plan.home)]
        ):
            loss = self.compute_loss(
                x=x, y=y, y_pred=outputs, sample_weight=weights, training=False
            )
        self._note(loss, x)
        return self.compute_metrics(x, y, outputs, sample_weight=weights)

    def predict_step(self, data):
        return self._forward(keras.utils.unpack_x_y_sample_weight(data)[0])[0]

    def _forward(self, x: Any) -> tuple[Any, list[tf.Tensor]]:
        """Outputs for a batch of any size, and the losses that layers add."""
        plan = self.plan
        inputs = self._numbered(x)
        pieces, parts = microbatching.any_pieces(inputs, plan.pieces)
        tensors = [
            [dict(piece) for piece in group] for group in _grouped(pieces, plan.microbatches)
        ]
        groups = self._groups(_grouped(parts, plan.microbatches))
        microbatching.run(
            groups,
            tensors,
            tasks(len(plan.stages), plan.microbatches, "forward"),
            [None] * plan.mesh.groups,
        )
        with tf.device(plan.end):
            rows = _rows(inputs)
            made = {
                n: microbatching.whole([each[n] for group in tensors for each in group], rows)
                for n in plan.graph.outputs
            }
        return self._packed(made), [
            loss for group in groups for stage in group for loss in stage.added
        ]

    # --- Parts of a step -----------------------------------------------------------------------------------------------
    def _groups(self, shares: Sequence[Sequence[tf.Tensor]]) -> list[list[StageInGroup]]:
        """The stages of each group, for one step."""
        last = len(self.plan.stages) - 1
        return [
            [
                StageInGroup(
                    s,
                    devices[s.number],
                    d,
                    s.number == last,
                    self.plan.recomputes(s.number),
                    own,
                    self.plan.graph.inputs,
                )
                for s in self.plan.stages
            ]
            for d, (devices, own) in enumerate(zip(self.plan.mesh.devices, shares, strict=True))
        ]

    def _numbered(self, x: Any) -> dict[int, tf.Tensor]:
        """Inputs by their numbers in the graph."""
        return {
            n: tf.convert_to_tensor(tensor) for n, tensor in numbered(self.plan.graph, x).items()
        }

    def _packed(self, tensors: dict[int, tf.Tensor]) -> Any:
        """The model's outputs as it would return them."""
        flat = [tensors[n] for n in self.plan.graph.outputs]
        model = self.plan.graph.model
        single = isinstance(model.output, list) and len(flat) == 1
        return flat[0] if single else keras.tree.pack_sequence_as(model.output, flat)

    def _loss(self, y: Any, outputs: Any, weights: Any) -> tf.Tensor | None:
        """What `compile` was given, for a micro-batch."""
        if self.loss is None:
            return None
        masked = [
            name
            for name, x in zip(self.output_names, keras.tree.flatten(outputs), strict=True)
            if mask_of(x) is not None
        ]
        if masked:
            raise ValueError(
                f"pipeline: output {masked[0]!r} has a mask, by which Keras divides the loss: micro-batches have different numbers of unmasked places, "
                "so that their mean is not the batch's. Remove the mask behind the last layer that needs it, and pass sample weights that are 0 there."
            )
        with self._counted.as_losses([]):
            return self.compute_loss(
                x=None, y=y, y_pred=outputs, sample_weight=weights, training=True
            )

    def _note(self, loss: tf.Tensor, x: Any) -> None:
        next(metric for metric in self.metrics if metric.name == "loss").update_state(
            loss, sample_weight=_rows(x)
        )


class _Counted:
    """Losses besides that of `compile` while a step is traced; Keras would add all layers' to each micro-batch's."""

    losses: list | None = None

    @contextlib.contextmanager
    def as_losses(self, losses: list) -> Iterator[None]:
        self.losses = losses
        try:
            yield
        finally:
            self.losses = None


def _check_shards(stages: Sequence[Stage], mesh: Mesh) -> None:
    """Makes sure that each device has something to compute."""
    for stage in stages:
        shards = 1 + max(map(shard_of, stage.model.variables))
        for own in (group[stage.number] for group in mesh.devices):
            idle = sorted(set(own) - set(own[:shards]))
            if idle:
                raise ValueError(
                    f"pipeline: tensor={len(own)}: stage {stage.number} ({', '.join(stage.layers)}) has no ShardedMLP of {len(own)} shards, so that {', '.join(idle)} would "
                    "have nothing to do. Give it one, move the cuts, or name a device several times in devices=."
                )


def _rows(x: Any) -> tf.Tensor:
    return tf.shape(keras.tree.flatten(x)[0])[0]


def _grouped(pieces: Sequence, size: int) -> list[list]:
    return [list(pieces[i : i + size]) for i in range(0, len(pieces), size)]


def _reduction(losses: Any, weighted: bool = False) -> str:
    """Whether the losses of micro-batches make that of a batch as a "mean" or as a "sum"."""
    found = {
        getattr(loss, "reduction", "sum_over_batch_size")
        for loss in keras.tree.flatten(losses)
        if loss is not None
    }
    kinds = {"sum" if r == "sum" else "mean" for r in found}
    if (
        found & {None, "none"}
        or len(kinds) > 1
        or (weighted and "mean_with_sample_weight" in found)
    ):
        raise ValueError(
            f"pipeline: the losses' reductions are {', '.join(sorted(map(str, found)))}: those of micro-batches do not add up to the batch's. Use "
            '"sum_over_batch_size" for all of them, or "sum" for all.'
        )
    return kinds.pop() if kinds else "mean"


def _explained(function: Callable) -> Callable:
    """Makes the error of a batch that cannot be divided one that has no graph in it."""

    def explained(*args):
        try:
            return function(*args)
        except tf.errors.InvalidArgumentError as error:
            begin = error.message.find(microbatching.INDIVISIBLE)
            if begin < 0:
                raise
            words, remedy, _ = error.message[begin:].partition(microbatching.REMEDY)
            raise ValueError(
                " ".join(
                    f"{words}{remedy}".replace("[", " ").replace("]", " ").replace("'", " ").split()
                )
            ) from None

    return explained
