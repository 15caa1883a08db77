"""A layer becomes a unit: it gathers its weights when it is called, drops them, and gathers them again to compute its gradients.

Zhao et al. 2023, arXiv:2304.11277, section 3. The unit's forward pass is computed a second time in backward, from the same inputs, random seeds
and statistics; what it changed was changed by the first. The units that backward begins with keep their weights: as many as are whole at a
time anyway, or as take no more memory than the sums of gradients, which come as they go.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import parallel as compat
from tfdist.keras_compat.parallel import Sharded
from tfdist.parallel.collectives import flat_shards
from tfdist.parallel.pipeline_parallel.schedule import kept
from tfdist.parallel.sharding.all_gather import Gathering


@dataclasses.dataclass
class Chain:
    """What one replica of one graph has called: gates that bound how many units are whole at once.

    Attributes:
        inputs: The first input of each unit that was called.
        sizes: Bytes of the weights of each.
        gradients: A gradient of the output of each, by its place in `inputs`.
        reads: How often each variable was read outside of units.
    """

    inputs: list[tf.Tensor] = dataclasses.field(default_factory=list)
    sizes: list[int] = dataclasses.field(default_factory=list)
    gradients: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    reads: collections.Counter = dataclasses.field(default_factory=collections.Counter)


class Chains:
    """The chains of all graphs; each graph keeps its own, whose tensors keep the graph.

    Args:
        local: Gives the index of the replica in whose context this is.
    """

    def __init__(self, local: Callable[[], int]):
        self._local = local

    def current(self) -> Chain:
        """That of the graph which is being made; an empty one when none is."""
        if tf.executing_eagerly():
            return Chain()
        known = compat.kept_by(tf.compat.v1.get_default_graph())
        return known.setdefault((self, self._local()), Chain())


def layers_of(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """The layers that become units: those of a model, and of the models in it, but not the layers in a layer.

    Args:
        model: Built.
    """
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from layers_of(layer)
        elif layer.trainable_weights:
            yield layer


class Unit:
    """A layer whose weights are whole only while it is computed.

    Args:
        layer: Its weights are sharded already.
        name: Tells its collectives from those of other units.
        gathering: Gathers weights.
        chains: Of the model.
        prefetch: How many units ahead weights are gathered.
        room: Bytes of weights that may stay from forward to backward. None: all do, and nothing is computed twice.
        check: Called when a step is traced.
    """

    def __init__(
        self, layer: keras.layers.Layer, name: str, gathering: Gathering, chains: Chains, prefetch: int, room: int | None, check: Callable[[], None]
    ):  # fmt: skip
        self._layer, self._name, self._gathering, self._chains = layer, name, gathering, chains
        self._prefetch, self._room, self._check = prefetch, room, check
        self._keras_call = layer.call
        self._weights: list[Sharded] = [
            v for v in layer.trainable_weights if isinstance(v, Sharded)
        ]
        self._others = [v for v in layer.variables if not isinstance(v, Sharded)]
        layer.call = self._call

    def _call(self, *args, **kwargs):
        if compat.gives(self._weights):
            return self._keras_call(*args, **kwargs)
        self._check()
        if late := [v.path for v in self._others if v.trainable]:
            raise ValueError(
                f"fsdp: {', '.join(late)}: not trainable when fsdp(model) was called, but now. Set `trainable` before."
            )
        chain = self._chains.current()
        flat = tf.nest.flatten((args, kwargs))
        tensors = [x for x in flat if isinstance(x, tf.Tensor)]
        place = len(chain.inputs)
        chain.inputs.extend(tensors[:1] or chain.inputs[-1:])
        chain.sizes[place:] = [
            sum(
                flat_shards.elements(v.tfdist_shape) * tf.as_dtype(v.dtype).size
                for v in self._weights
            )
        ]
        gates = (
            chain.inputs[max(0, place - self._prefetch) :][:1] if not tf.executing_eagerly() else []
        )
        name = f"{self._name} {place}"
        if self._room is not None and len(tensors) == sum(
            map(tf.is_tensor, flat)
        ):  # sparse and ragged ones have no place in a list of gradients
            return self._recomputed(args, kwargs, name, gates, place)
        whole = self._gathering.gathered(self._weights, name, gates, self._layer.compute_dtype)
        with compat.giving({id(v): x for v, x in zip(self._weights, whole, strict=True)}):
            return self._keras_call(*args, **kwargs)

    def _recomputed(
        self, args: tuple, kwargs: dict, name: str, gates: Sequence[tf.Tensor], place: int
    ):
        given = _Tensors((args, kwargs))
        parts, states = (
            [compat.own_copy(v) for v in self._weights],
            [compat.own_copy(v) for v in self._others],
        )
        here, found = compat.context(), _Found()
        first, second = len(given.tensors), len(given.tensors) + len(parts)
        dtype = self._layer.compute_dtype

        @tf.custom_gradient
        def unit(*everything):
            inputs, own, before = (
                list(everything[:first]),
                everything[first:second],
                everything[second:],
            )
            whole = self._gathering.gather(self._weights, own, f"{name} forward", gates, dtype)
            found.whole = None if tf.executing_eagerly() else whole
            result = self._computed(given.packed(inputs), whole, before, here)
            found.outputs, found.updates, found.losses = result
            outputs = _Tensors(found.outputs).tensors
            found.changed = [new is not old for new, old in zip(found.updates, before, strict=True)]

            def grad(*dys, variables=()):
                dys = dys[: len(outputs) + len(found.losses)]
                again, ready = self._gates(place, dys)
                if found.whole is not None and self._keeps(place):
                    again_whole = found.whole
                else:
                    again_whole = self._gathering.gather(
                        self._weights, own, f"{name} backward", again, dtype
                    )
                with tf.control_dependencies(ready):
                    inputs_again = [tf.identity(x) for x in inputs]
                sources = [x for x in inputs_again if x.dtype.is_floating]
                with tf.GradientTape() as tape:
                    tape.watch([*sources, *again_whole])
                    y, _, losses = self._computed(
                        given.packed(inputs_again), again_whole, before, here
                    )
                    targets = [*_Tensors(y).tensors, *losses]
                used = [
                    i
                    for i, (t, dy) in enumerate(zip(targets, dys, strict=True))
                    if t.dtype.is_floating and dy is not None
                ]
                grads = tape.gradient(
                    [targets[i] for i in used],
                    [*sources, *again_whole, *variables],
                    output_gradients=[dys[i] for i in used],
                )
                to_inputs = iter(grads[: len(sources)])
                of_inputs = [next(to_inputs) if x.dtype.is_floating else None for x in inputs_again]
                of_weights = grads[len(sources) : len(sources) + len(again_whole)]
                sums = self._gathering.scatter(self._weights, own, of_weights, f"{name} sum")
                result = [*of_inputs, *sums, *[None] * len(before)]
                return (result, grads[len(sources) + len(again_whole) :]) if variables else result

            return [
                *outputs,
                *found.losses,
                *[
                    new
                    for new, changed in zip(found.updates, found.changed, strict=True)
                    if changed
                ],
            ], grad

        results = compat.freed_with_graph(list(unit(*given.tensors, *parts, *states)))
        outputs = _Tensors(found.outputs)
        count = len(outputs.tensors)
        for loss in results[count : count + len(found.losses)]:
            self._layer.add_loss(loss)
        changed = [v for v, changed in zip(self._others, found.changed, strict=True) if changed]
        for v, new in zip(changed, results[count + len(found.losses) :], strict=True):
            v.assign(tf.stop_gradient(new))
        packed = outputs.packed(results[:count])
        return packed

    def _computed(
        self, call: tuple, whole: Sequence[tf.Tensor], states: Sequence[tf.Tensor], here: tuple
    ) -> tuple:
        """The layer's outputs, what its state becomes, the given tensors where it stays, and its losses."""
        args, kwargs = call
        with (
            compat.without_autocast()
        ):  # or state in float32 would become what the layer computes in, and then be assigned so
            scope = keras.StatelessScope(
                zip(self._others, states, strict=True),
                collect_losses=True,
                initialize_variables=False,
            )
        held = [scope.get_current_value(v) for v in self._others]
        with (
            compat.in_context(here),
            compat.giving({id(v): x for v, x in zip(self._weights, whole, strict=True)}),
            scope,
        ):
            outputs = self._keras_call(*args, **kwargs)
            found = [scope.get_current_value(v) for v in self._others]
        updates = [
            before if value is was else value
            for value, was, before in zip(found, held, states, strict=True)
        ]
        return outputs, updates, list(scope.losses)

    def _keeps(self, place: int) -> bool:
        """Whether the weights of forward are still there; when backward is traced it is known what was called."""
        sizes = self._chains.current().sizes
        return len(sizes) - kept(sizes, self._prefetch, self._room or 0) <= place < len(sizes)

    def _gates(self, place: int, dys: Sequence[Any]) -> tuple[list, list]:
        """What the second gathering waits for, and what the second computation waits for."""
        if tf.executing_eagerly():
            return [], []
        chain = self._chains.current()
        known = next((dy for dy in dys if dy is not None), None)
        if known is None:
            return [], []
        chain.gradients[place] = known
        ahead = [p for p in chain.gradients if p >= place + self._prefetch]
        return [chain.gradients[min(ahead) if ahead else max(chain.gradients)]], [known]


@dataclasses.dataclass
class _Found:
    """What the first computation gave: its structure, and tensors that only it may use."""

    outputs: Any = None
    whole: list | None = None
    updates: list = dataclasses.field(default_factory=list)
    losses: list = dataclasses.field(default_factory=list)
    changed: list[bool] = dataclasses.field(default_factory=list)


class _Tensors:
    """The tensors in a structure, and the masks that they carry, as a list.

    Args:
        structure: Nested lists, tuples and dicts.
    """

    def __init__(self, structure: Any):
        self._structure, self._flat = structure, tf.nest.flatten(structure)
        self._places = [i for i, x in enumerate(self._flat) if isinstance(x, tf.Tensor)]
        masks = [compat.mask_of(self._flat[i]) for i in self._places]
        self._masked = [i for i, mask in enumerate(masks) if mask is not None]
        self.tensors: list[tf.Tensor] = [
            *(self._flat[i] for i in self._places),
            *(masks[i] for i in self._masked),
        ]

    def packed(self, tensors: Sequence[tf.Tensor]) -> Any:
        """The structure with other tensors in place of these."""
        flat, values = (
            list(self._flat),
            [tf.identity(x) for x in tensors[: len(self._places)]]
            if self._masked
            else tensors[: len(self._places)],
        )
        for i, mask in zip(self._masked, tensors[len(self._places) :], strict=True):
            compat.set_mask(values[i], mask)
        for i, value in zip(self._places, values, strict=True):
            flat[i] = value
        return tf.nest.pack_sequence_as(self._structure, flat)
