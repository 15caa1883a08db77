"""FSDP units: layers that gather their weights for forward and again for backward.

Zhao et al. 2023, arXiv:2304.11277, section 3. Backward recomputes the unit's forward pass from the
same inputs, random seeds and statistics. Only the first forward pass changes the layer's state.

Backward begins with the last units, so these keep their gathered weights. Their number is the
number of units that are whole at a time anyway, or the number whose weights take no more memory
than the summed gradients, whichever is larger. The summed gradients take up the memory that these
weights free.
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
    """Record of the units that one replica of one graph has called.

    Its tensors serve as control dependencies that bound how many units are whole at once.

    Attributes:
        inputs: First input of each unit that was called.
        sizes: Size in bytes of the weights of each unit.
        gradients: One gradient of the output of each unit, by the unit's index in `inputs`.
        reads: Number of reads of each variable outside of units.
    """

    inputs: list[tf.Tensor] = dataclasses.field(default_factory=list)
    sizes: list[int] = dataclasses.field(default_factory=list)
    gradients: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    reads: collections.Counter = dataclasses.field(default_factory=collections.Counter)


class Chains:
    """Chains of all graphs, one for each replica of a graph.

    Each graph stores its own chains, because the tensors of a chain keep the graph alive.

    Args:
        local: Function that returns the index of the current replica in this process.
    """

    def __init__(self, local: Callable[[], int]):
        self._local = local

    def current(self) -> Chain:
        """Return the chain of the graph that is being traced; an empty one if executing eagerly."""
        if tf.executing_eagerly():
            return Chain()
        known = compat.kept_by(tf.compat.v1.get_default_graph())
        return known.setdefault((self, self._local()), Chain())


def layers_of(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """Yield the layers that become FSDP units.

    These are the layers with trainable weights of the model and of the models inside it. Layers
    inside a layer are not units of their own.

    Args:
        model: Built model.
    """
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from layers_of(layer)
        elif layer.trainable_weights:
            yield layer


class Unit:
    """Layer whose weights are whole only while it is computed.

    Args:
        layer: Layer whose weights are already sharded.
        name: Name that distinguishes the unit's collectives from those of other units.
        gathering: Collectives for the weights and their gradients.
        chains: Chains of the model.
        prefetch: Number of units ahead whose weights are gathered.
        room: Bytes of gathered weights that may stay in memory from forward to backward. None: all
            of them stay, and backward recomputes nothing.
        check: Function that is called when a step is traced.
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        name: str,
        gathering: Gathering,
        chains: Chains,
        prefetch: int,
        room: int | None,
        check: Callable[[], None],
    ):
        self._layer = layer
        self._name = name
        self._gathering = gathering
        self._chains = chains
        self._prefetch = prefetch
        self._room = room
        self._check = check
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
                f"fsdp: {', '.join(late)}: not trainable when fsdp(model) was called, but now. "
                "Set `trainable` before."
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
        # A list of gradients cannot hold sparse and ragged tensors; layers that take them are not
        # recomputed.
        if self._room is not None and len(tensors) == sum(map(tf.is_tensor, flat)):
            return self._recomputed(args, kwargs, name, gates, place)
        whole = self._gathering.gathered(self._weights, name, gates, self._layer.compute_dtype)
        with compat.giving({id(v): x for v, x in zip(self._weights, whole, strict=True)}):
            return self._keras_call(*args, **kwargs)

    def _recomputed(
        self, args: tuple, kwargs: dict, name: str, gates: Sequence[tf.Tensor], place: int
    ):
        given = _Tensors((args, kwargs))
        parts = [compat.own_copy(v) for v in self._weights]
        states = [compat.own_copy(v) for v in self._others]
        here = compat.context()
        found = _Found()
        first = len(given.tensors)
        second = len(given.tensors) + len(parts)
        dtype = self._layer.compute_dtype

        @tf.custom_gradient
        def unit(*everything):
            inputs = list(everything[:first])
            own = everything[first:second]
            before = everything[second:]
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
        """Compute the layer; return its outputs, its new state and its losses.

        State that the layer does not change is returned as the given tensor itself.
        """
        args, kwargs = call
        # With autocast, float32 state would be cast to the compute dtype and assigned in it.
        with compat.without_autocast():
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
        """Return whether the unit keeps its gathered weights from forward to backward.

        It is called when backward is traced, because all calls of units are known by then.
        """
        sizes = self._chains.current().sizes
        return len(sizes) - kept(sizes, self._prefetch, self._room or 0) <= place < len(sizes)

    def _gates(self, place: int, dys: Sequence[Any]) -> tuple[list, list]:
        """Return the control dependencies of backward's gathering and of its recomputation."""
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
    """Results of the forward pass: their structure, and tensors valid only inside the unit."""

    outputs: Any = None
    whole: list | None = None
    updates: list = dataclasses.field(default_factory=list)
    losses: list = dataclasses.field(default_factory=list)
    changed: list[bool] = dataclasses.field(default_factory=list)


class _Tensors:
    """Flat list of the tensors in a structure and of their Keras masks.

    Args:
        structure: Nested lists, tuples and dicts.
    """

    def __init__(self, structure: Any):
        self._structure = structure
        self._flat = tf.nest.flatten(structure)
        self._places = [i for i, x in enumerate(self._flat) if isinstance(x, tf.Tensor)]
        masks = [compat.mask_of(self._flat[i]) for i in self._places]
        self._masked = [i for i, mask in enumerate(masks) if mask is not None]
        self.tensors: list[tf.Tensor] = [
            *(self._flat[i] for i in self._places),
            *(masks[i] for i in self._masked),
        ]

    def packed(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Return the structure with its tensors replaced by the given ones."""
        flat = list(self._flat)
        values = (
            [tf.identity(x) for x in tensors[: len(self._places)]]
            if self._masked
            else tensors[: len(self._places)]
        )
        for i, mask in zip(self._masked, tensors[len(self._places) :], strict=True):
            compat.set_mask(values[i], mask)
        for i, value in zip(self._places, values, strict=True):
            flat[i] = value
        return tf.nest.pack_sequence_as(self._structure, flat)
