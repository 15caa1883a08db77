"""FSDP units: layers that gather their weights for forward and again for backward.

Zhao et al. 2023, arXiv:2304.11277, section 3. Backward recomputes the unit's forward pass from the
same inputs, random seeds and statistics. Only the first forward pass changes the layer's state. A
unit that leaves kernels in their parts (`fsdp_products`) is not computed again, and keeps the few
weights that it gathers.

Backward begins with the last units, so these keep their gathered weights. Their number is the
number of units that are whole at a time anyway, or the number whose weights take no more memory
than the summed gradients, whichever is larger. The summed gradients take up the memory that these
weights free.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_compat import global_generator
from tfdist.keras_compat import parallel as compat
from tfdist.keras_compat.parallel import Sharded
from tfdist.parallel.collectives import flat_shards
from tfdist.parallel.pipeline_parallel.schedule import layers_kept
from tfdist.parallel.sharding import few_rows, fsdp_products, layer_products, product_costs
from tfdist.parallel.sharding.all_gather import Gathering, own_parts


@dataclasses.dataclass
class Chain:
    """Record of the units that one replica of one graph has called.

    Its tensors serve as control dependencies that bound how many units are whole at once.

    Attributes:
        inputs: First input of each unit that was called, before padding (`_unpadded`).
        sizes: Size in bytes of the weights that each unit gathers.
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
        chains_of_graph = compat.objects_of(tf.compat.v1.get_default_graph())
        return chains_of_graph.setdefault((self, self._local()), Chain())


def _bytes_of(variables: Sequence[Sharded]) -> int:
    return sum(flat_shards.elements(v.tfdist_shape) * tf.as_dtype(v.dtype).size for v in variables)


def _unpadded(x: tf.Tensor) -> tf.Tensor:
    """Return `x` before padding.

    oneDNN fuses a padding and the convolution after it, and what waits for the padding then waits
    for the convolution. The convolution's own weights would wait for ever.
    """
    while not tf.executing_eagerly() and x.op.type in ("Identity", "Pad", "PadV2"):
        x = x.op.inputs[0]
    return x


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Return the layers with weights of a model and of the models inside it, without repeats.

    They become FSDP units, but for those that only look up rows. Layers inside a layer are not
    units of their own.

    Args:
        model: Built model.
    """
    found: dict[int, keras.layers.Layer] = {}
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            found |= {id(inside): inside for inside in layers_of(layer)}
        elif weights_of(layer):
            found[id(layer)] = layer
    return list(found.values())


def weights_of(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Return the weights of a layer or model that FSDP shards: all that may be trained.

    Frozen weights are among them, but for integers, of which there is no gradient.
    """
    weights = {id(v): v for v in compat.layer_weights(layer)}.values()
    return [v for v in weights if v.trainable or tf.as_dtype(v.dtype).is_floating]


class Unit:
    """Layer whose weights are whole at most while it is computed.

    Args:
        layer: Layer whose weights are already sharded.
        name: Name that distinguishes the unit's collectives from those of other units.
        gathering: Collectives for the weights and their gradients.
        chains: Chains of the model.
        prefetch: Number of units ahead whose weights are gathered.
        max_kept_bytes: Function that returns the bytes of gathered weights that may stay in memory
            from forward to backward. None: all of them stay, and backward recomputes nothing.
        check: Function that is called when a step is traced.
        in_replica: Function that returns whether the caller computes for one replica.
        batch_per_replica: Function that returns the number of examples that a replica has in a
            step; None if it is unknown.
        multiplies_few_rows: Whether gathered kernels are multiplied as in `few_rows`.
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        name: str,
        gathering: Gathering,
        chains: Chains,
        prefetch: int,
        max_kept_bytes: Callable[[], int] | None,
        check: Callable[[], None],
        in_replica: Callable[[], bool],
        batch_per_replica: Callable[[], int | None],
        multiplies_few_rows: bool,
    ):
        self._layer = layer
        self._name = name
        self._gathering = gathering
        self._chains = chains
        self._prefetch = prefetch
        self._max_kept_bytes = max_kept_bytes
        self._check = check
        self._in_replica = in_replica
        self._batch_per_replica = batch_per_replica
        self._multiplies_few_rows = multiplies_few_rows
        self._keras_call = layer.call
        # A SpectralNormalization assigns its kernel when it is called.
        self._assigns = any(
            isinstance(x, keras.layers.SpectralNormalization) for x in compat.sublayers(layer)
        )
        self.list_weights()
        layer.call = self._call

    def list_weights(self) -> None:
        """Note which variables of the layer are sharded, and which are not."""
        self._weights = [v for v in weights_of(self._layer) if isinstance(v, Sharded)]
        self._others = [v for v in self._layer.variables if not isinstance(v, Sharded)]

    def _call(self, *args, **kwargs):
        # Where a model is called for all replicas of a process at once, outside of a step, its
        # weights are read whole.
        if compat.have_values(self._weights) or not self._in_replica():
            return self._keras_call(*args, **kwargs)
        self._check()
        if unfrozen := [v.path for v in self._others if v.trainable]:
            raise ValueError(
                f"fsdp: {', '.join(unfrozen)}: not among the weights when fsdp(model) was called. "
                "Build the model, and enable LoRA, before that call."
            )
        chain = self._chains.current()
        flat = tf.nest.flatten((args, kwargs))
        tensors = [x for x in flat if isinstance(x, tf.Tensor)]
        index = len(chain.inputs)
        chain.inputs.extend([_unpadded(x) for x in tensors[:1]] or chain.inputs[-1:])
        kernels = self._kernels()
        gathered = [v for v in self._weights if id(v) not in kernels]
        chain.sizes[index:] = [_bytes_of(gathered)]
        gates = (
            chain.inputs[max(0, index - self._prefetch) :][:1] if not tf.executing_eagerly() else []
        )
        name = f"{self._name} {index}"
        # A list of gradients cannot hold sparse and ragged tensors; layers that take them are not
        # recomputed.
        recomputed = self._max_kept_bytes is not None and not kernels and not self._assigns
        if recomputed and len(tensors) == sum(map(tf.is_tensor, flat)):
            return self._call_recomputed(args, kwargs, name, gates, index)
        values: dict[int, Any] = {
            id(v): fsdp_products.ProductPart(
                self._gathering, v, kernels[id(v)], f"{name} product {number}"
            )
            for number, v in enumerate(self._weights)
            if id(v) in kernels
        }
        if gathered:
            whole = self._gathering.gather(gathered, name, gates, self._layer.compute_dtype)
            values |= self._whole_values(gathered, whole)
        with compat.replaced_shards(values):
            return self._keras_call(*args, **kwargs)

    def _whole_values(
        self, variables: Sequence[Sharded], whole: Sequence[tf.Tensor]
    ) -> dict[int, Any]:
        """Return the values of gathered variables by their id, for `replaced_shards`."""
        values: dict[int, Any] = {id(v): x for v, x in zip(variables, whole, strict=True)}
        if self._multiplies_few_rows and not tf.executing_eagerly():
            with compat.without_autocast():
                products = layer_products.products_of(self._layer, 1)
            batch = self._batch_per_replica()
            for key, whole_kernel in values.items():
                if key in products and few_rows.are_few(products[key], batch) is not False:
                    values[key] = few_rows.WholeKernel(whole_kernel)
        return values

    def _kernels(self) -> dict[int, int]:
        """Return the kernels that are not gathered, by their id.

        The result must be the same in all processes.

        Returns:
            Bytes that a replica sends for the product in a step.
        """
        batch = self._batch_per_replica()
        if batch is None or tf.executing_eagerly():
            return {}
        size = self._gathering.forward_group.size
        with compat.without_autocast():  # variables tell their own dtypes
            found = layer_products.products_of(self._layer, size)
            own = [(id(v), found[id(v)]) for v in self._weights if id(v) in found]
            chosen = product_costs.multiplied(
                [product for _, product in own], _bytes_of(self._weights), batch, size
            )
        return {
            own[i][0]: 2 * own[i][1].exchanged(batch, size) * (size - 1) // size for i in chosen
        }

    def _call_recomputed(
        self, args: tuple, kwargs: dict, name: str, gates: Sequence[tf.Tensor], index: int
    ):
        arguments = _Tensors((args, kwargs))
        parts = own_parts(self._weights)
        trained = [v.trainable for v in self._weights]
        others = self._read_or_changed()
        states = [compat.own_copy(v) for v in others]
        call_context = compat.context()
        results_of_forward = _ForwardResults()
        first = len(arguments.tensors)
        second = len(arguments.tensors) + len(parts)
        dtype = self._layer.compute_dtype

        @tf.custom_gradient
        def unit(*everything):
            inputs = list(everything[:first])
            own = everything[first:second]
            before = everything[second:]
            whole = self._gathering.gather(self._weights, f"{name} forward", gates, dtype, own)
            results_of_forward.whole = None if tf.executing_eagerly() else whole
            result = self._compute(arguments.packed(inputs), whole, before, call_context)
            results_of_forward.outputs, results_of_forward.updates, results_of_forward.losses = (
                result
            )
            outputs = _Tensors(results_of_forward.outputs).tensors
            results_of_forward.changed = [
                new is not old for new, old in zip(results_of_forward.updates, before, strict=True)
            ]

            def grad(*dys, variables=()):
                dys = dys[: len(outputs) + len(results_of_forward.losses)]
                again, ready = self._gates(index, dys)
                if results_of_forward.whole is not None and self._keeps(index):
                    again_whole = results_of_forward.whole
                else:
                    again_whole = self._gathering.gather(
                        self._weights, f"{name} backward", again, dtype, own
                    )
                with tf.control_dependencies(ready):
                    inputs_again = [tf.identity(x) for x in inputs]
                sources = [x for x in inputs_again if x.dtype.is_floating]
                weights = [x for x, train in zip(again_whole, trained, strict=True) if train]
                with tf.GradientTape() as tape:
                    tape.watch([*sources, *weights])
                    y, _, losses = self._compute(
                        arguments.packed(inputs_again), again_whole, before, call_context
                    )
                    targets = [*_Tensors(y).tensors, *losses]
                used = [
                    i
                    for i, (t, dy) in enumerate(zip(targets, dys, strict=True))
                    if t.dtype.is_floating and dy is not None
                ]
                grads = tape.gradient(
                    [targets[i] for i in used],
                    [*sources, *weights, *variables],
                    output_gradients=[dys[i] for i in used],
                )
                to_inputs = iter(grads[: len(sources)])
                of_inputs = [next(to_inputs) if x.dtype.is_floating else None for x in inputs_again]
                to_weights = iter(grads[len(sources) : len(sources) + len(weights)])
                of_weights = [next(to_weights) if train else None for train in trained]
                sums = self._gathering.scatter(self._weights, own, of_weights, f"{name} sum")
                result = [*of_inputs, *sums, *[None] * len(before)]
                return (result, grads[len(sources) + len(weights) :]) if variables else result

            return [
                *outputs,
                *results_of_forward.losses,
                *[
                    new
                    for new, changed in zip(
                        results_of_forward.updates, results_of_forward.changed, strict=True
                    )
                    if changed
                ],
            ], grad

        results = compat.freed_with_graph(list(unit(*arguments.tensors, *parts, *states)))
        outputs = _Tensors(results_of_forward.outputs)
        count = len(outputs.tensors)
        for loss in results[count : count + len(results_of_forward.losses)]:
            self._layer.add_loss(loss)
        changed = [
            v for v, changed in zip(others, results_of_forward.changed, strict=True) if changed
        ]
        for v, new in zip(changed, results[count + len(results_of_forward.losses) :], strict=True):
            v.assign(tf.stop_gradient(new))
        packed = outputs.packed(results[:count])
        return packed

    def _compute(
        self,
        call: tuple,
        whole: Sequence[tf.Tensor],
        states: Sequence[tf.Tensor],
        call_context: tuple,
    ) -> tuple:
        """Compute the layer; return its outputs, its new state and its losses.

        State that the layer does not change is returned as the given tensor itself.
        """
        args, kwargs = call
        others = self._read_or_changed()
        # With autocast, float32 state would be cast to the compute dtype and assigned in it.
        with compat.without_autocast():
            scope = keras.StatelessScope(
                zip(others, states, strict=True),
                collect_losses=True,
                initialize_variables=False,
            )
        before_call = [scope.get_current_value(v) for v in others]
        with (
            compat.in_context(call_context),
            compat.replaced_shards(self._whole_values(self._weights, whole)),
            scope,
        ):
            outputs = self._keras_call(*args, **kwargs)
            after_call = [scope.get_current_value(v) for v in others]
            for v in self._weights:
                if scope.get_current_value(v) is not None:
                    raise ValueError(
                        f"fsdp: {v.path} is assigned when its layer is called, which backward "
                        "would do again. Pass reshard_after_forward=False, or assign it in "
                        "train_step."
                    )
        updates = [
            before if value is old else value
            for value, old, before in zip(after_call, before_call, states, strict=True)
        ]
        return outputs, updates, list(scope.losses)

    def _read_or_changed(self) -> list[keras.Variable]:
        """Return the state, beside sharded weights, that a call of the layer reads or changes."""
        return [*self._others, *global_generator.state_of(tf.distribute.get_strategy())]

    def _keeps(self, index: int) -> bool:
        """Return whether the unit keeps its gathered weights from forward to backward.

        It is called when backward is traced, because all calls of units are known by then.
        """
        sizes = self._chains.current().sizes
        max_kept_bytes = self._max_kept_bytes() if self._max_kept_bytes else 0
        return len(sizes) - layers_kept(sizes, self._prefetch, max_kept_bytes) <= index < len(sizes)

    def _gates(self, index: int, dys: Sequence[Any]) -> tuple[list, list]:
        """Return the control dependencies of backward's gathering and of its recomputation."""
        if tf.executing_eagerly():
            return [], []
        chain = self._chains.current()
        gradient = next((dy for dy in dys if dy is not None), None)
        if gradient is None:
            return [], []
        chain.gradients[index] = gradient
        later = [p for p in chain.gradients if p >= index + self._prefetch]
        return [chain.gradients[min(later) if later else max(chain.gradients)]], [gradient]


@dataclasses.dataclass
class _ForwardResults:
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
        self._positions = [i for i, x in enumerate(self._flat) if isinstance(x, tf.Tensor)]
        masks = [compat.mask_of(self._flat[i]) for i in self._positions]
        self._masked = [i for i, mask in enumerate(masks) if mask is not None]
        self.tensors: list[tf.Tensor] = [
            *(self._flat[i] for i in self._positions),
            *(masks[i] for i in self._masked),
        ]

    def packed(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Return the structure with its tensors replaced by the given ones."""
        flat = list(self._flat)
        values = (
            [tf.identity(x) for x in tensors[: len(self._positions)]]
            if self._masked
            else tensors[: len(self._positions)]
        )
        for i, mask in zip(self._masked, tensors[len(self._positions) :], strict=True):
            compat.set_mask(values[i], mask)
        for i, value in zip(self._positions, values, strict=True):
            flat[i] = value
        return tf.nest.pack_sequence_as(self._structure, flat)
