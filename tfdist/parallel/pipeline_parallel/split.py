"""Graph partitioning: splits a Keras model into stages, each a model over the same layers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdist.keras_compat.parallel import graph_calls, kept_graph, layer_weights


class StageModel(keras.Model):
    """A Keras model over one stage's part of the graph."""

    def __init__(self, inputs: list, outputs: list, name: str):
        super().__init__(inputs=inputs, outputs=outputs, name=name)
        self.supports_masking = True

    def compute_mask(self, inputs, previous_mask):
        """Return None, as the layers have set the masks of the outputs.

        Keras' own method would copy the masks of the inputs. See `keras.layers.Layer`.
        """
        return None


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a layer or operation in a graph.

    Args:
        operation: Keras layer or operation.
        input_numbers: Numbers of its input tensors, indices into `Graph.tensors`.
        output_numbers: Numbers of its output tensors.
    """

    operation: Any
    input_numbers: tuple[int, ...]
    output_numbers: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the name of the layer or operation, as used in messages."""
        return self.operation.name

    @property
    def variables(self) -> list[keras.Variable]:
        """Return all variables of the layer; [] for an operation."""
        return list(getattr(self.operation, "variables", ()))

    @property
    def weights(self) -> list[keras.Variable]:
        """Return the weights of the layer; [] for an operation."""
        return list(getattr(self.operation, "weights", ()))


@dataclasses.dataclass(frozen=True)
class Graph:
    """A Functional model as a list of calls in execution order.

    Args:
        model: Functional model.
        calls: Calls of the model's layers and operations, in an order in which they can run.
        tensors: `keras.KerasTensor` of each number.
        inputs: Numbers of the model's inputs.
        outputs: Numbers of the model's outputs.
    """

    model: keras.Model
    calls: tuple[Call, ...]
    tensors: tuple[Any, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of pipeline parallelism.

    Args:
        number: Index of the stage, from 0.
        model: Model of the stage; it takes a list of tensors, and returns one tensor or a list.
        input_numbers: Numbers of the stage model's inputs.
        output_numbers: Numbers of the stage model's outputs.
        needs: Numbers of the tensors that the stage reads: `input_numbers`, and for the last stage
            also the whole model's outputs that earlier stages computed.
        layers: Names of the stage's layers, in order.
    """

    number: int
    model: StageModel
    input_numbers: tuple[int, ...]
    output_numbers: tuple[int, ...]
    needs: tuple[int, ...]
    layers: tuple[str, ...]


def graph_of(model: keras.Model) -> Graph:
    """Return the graph of a model.

    Args:
        model: Functional model, or Sequential model with a known input shape.

    Raises:
        ValueError: If the model has no graph, or if it overrides methods, so that the graph does
            not describe its training completely.
    """
    if not isinstance(model, keras.Model):
        raise ValueError(
            "parallel.pipeline: model: expected a Sequential or Functional model, received "
            f"{model!r}."
        )
    if isinstance(model, keras.Sequential):
        if not model.built:
            raise ValueError(
                f"parallel.pipeline: the Sequential model {model.name!r} is not built. Begin it "
                "with keras.Input(shape)."
            )
        functional = keras.Model(model.inputs, model.outputs, name=model.name)
    else:
        functional = model
    graph_nodes = graph_calls(functional)
    overridden = [
        name for name in ("call", "train_step", "compute_loss") if _overrides(model, name)
    ]
    if graph_nodes is None or overridden:
        problem = (
            f"overrides {', '.join(overridden)}"
            if graph_nodes is not None
            else "is a subclass of keras.Model with a call() of its own"
        )
        raise ValueError(
            "parallel.pipeline: expected a Sequential or Functional model, whose graph can be "
            f"split; {type(model).__name__} {problem}. Build it as keras.Model(inputs, outputs) "
            "from layers of any kind. Splits are possible between layers only."
        )
    numbers: dict[int, int] = {}
    tensors: list = []

    def number(x: Any) -> int:
        if id(x) not in numbers:
            numbers[id(x)] = len(tensors)
            tensors.append(x)
        return numbers[id(x)]

    inputs = tuple(map(number, functional.inputs))
    calls = tuple(
        Call(operation, tuple(map(number, input_numbers)), tuple(map(number, output_numbers)))
        for operation, input_numbers, output_numbers in graph_nodes
    )
    return Graph(functional, calls, tuple(tensors), inputs, tuple(map(number, functional.outputs)))


def inputs_by_number(graph: Graph, x: Any) -> dict[int, Any]:
    """Return a model's inputs by their numbers in the graph.

    Args:
        graph: Graph of the model.
        x: Inputs as `fit` takes them: a tensor, a nest of tensors, or a dictionary by name.

    Raises:
        ValueError: If there are too few or too many inputs.
    """
    model = graph.model
    if isinstance(x, dict):
        named = isinstance(model.input, dict)
        names = list(model.input) if named else [t.name for t in model.inputs]
        missing = [name for name in names if name not in x]
        if missing:
            raise ValueError(
                f"PipelineModel: {model.name}: expected the inputs {', '.join(names)}; received "
                f"{', '.join(map(str, x))}, without {', '.join(missing)}."
            )
        x = {name: x[name] for name in names} if named else [x[name] for name in names]
    flat = keras.tree.flatten(x)
    if len(flat) != len(model.inputs):
        raise ValueError(
            f"PipelineModel: {model.name}: expected {len(model.inputs)} inputs, received "
            f"{len(flat)}."
        )
    return dict(zip(graph.inputs, flat, strict=True))


def cuts_after(graph: Graph, layers: Sequence[keras.layers.Layer | str]) -> list[int]:
    """Return the cuts behind the layers that the user has named.

    Args:
        graph: Graph of the model.
        layers: Last layer of each stage except the last stage, as a layer or its name.

    Returns:
        Number of calls before each cut, ascending.

    Raises:
        ValueError: If a layer is not in the model, is used more than once, is named twice, or is
            the last layer.
    """
    ends = []
    names = [call.name for call in graph.calls]
    for layer in layers:
        if not isinstance(layer, (keras.layers.Layer, str)):
            raise ValueError(
                f"parallel.pipeline: cut_at: expected layers or their names, received {layer!r}."
            )
        name = layer if isinstance(layer, str) else layer.name
        positions = [i for i, call_name in enumerate(names) if call_name == name]
        if not positions:
            raise ValueError(f"parallel.pipeline: cut_at: {_no_such_layer(graph, name)}")
        if len(positions) > 1:
            raise ValueError(
                f"parallel.pipeline: cut_at: expected a layer that is used once; layer {name!r} is "
                f"used {len(positions)} times. Name another layer."
            )
        ends.append(positions[0] + 1)
    if len(set(ends)) < len(ends):
        raise ValueError(
            "parallel.pipeline: cut_at: expected different layers, "
            f"received {[getattr(x, 'name', x) for x in layers]}."
        )
    if len(names) in ends:
        raise ValueError(
            f"parallel.pipeline: cut_at: {names[-1]!r} is the last layer, so no layer is left for "
            "another stage. Remove it from cut_at."
        )
    return sorted(ends)


def balanced(graph: Graph, stages: int, costs: Sequence[float]) -> list[int]:
    """Return the cuts that minimize the cost of the most expensive stage.

    Args:
        graph: Graph of the model.
        stages: Number of stages.
        costs: Cost of each call, such as from `parameters` or `layer_timing.seconds`.

    Returns:
        Number of calls before each cut, ascending, as from `cuts_after`.

    Raises:
        ValueError: If the model cannot be cut into that many stages. The message says how many
            stages are possible.
    """
    count = len(graph.calls)
    invalid = _cuts_that_share_state(graph)
    sums = [0.0, *itertools.accumulate(costs)]
    calls_with_weights = [0, *itertools.accumulate(bool(call.weights) for call in graph.calls)]
    # best[k][j]: the cost of the first j calls in k stages, and where the last stage begins.
    best: list[list[tuple[float, int] | None]] = [[None] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, 0)
    for k in range(1, stages + 1):
        for j in (j for j in range(1, count + 1) if j not in invalid):
            # Among equal costs, prefer a stage that begins with weights: operations without
            # weights then stay in the stage that computes their input.
            choices = [
                (max(before[0], sums[j] - sums[i]), not graph.calls[i].weights, i)
                for i, before in enumerate(best[k - 1][:j])
                if before is not None and calls_with_weights[i] < calls_with_weights[j]
            ]
            if choices:
                cost, _, i = min(choices)
                best[k][j] = (cost, i)
    possible = max((k for k in range(1, stages + 1) if best[k][count] is not None), default=0)
    if possible < stages:
        weighted = dict.fromkeys(call.name for call in graph.calls if call.weights)
        raise ValueError(
            f"parallel.pipeline: stages={stages}: the model {graph.model.name!r} can be split into "
            f"at most {possible} stages with weights; its layers with weights are "
            f"{', '.join(weighted) or 'none'}. A nested model is one layer."
        )
    ends = [count]
    for k in range(stages, 1, -1):
        best_cut = best[k][ends[0]]
        assert best_cut is not None
        ends.insert(0, best_cut[1])
    return ends[:-1]


def split(graph: Graph, ends: Sequence[int]) -> tuple[Stage, ...]:
    """Split a graph into stages.

    Args:
        graph: Graph of the model.
        ends: Number of calls before each cut, as from `cuts_after`.

    Raises:
        ValueError: If a stage has no weights, or if two stages would change the same state.
    """
    bounds = list(itertools.pairwise([0, *ends, len(graph.calls)]))
    _check(graph, bounds)
    stage_of = {
        n: s
        for s, (begin, end) in enumerate(bounds)
        for call in graph.calls[begin:end]
        for n in call.output_numbers
    }
    users: dict[int, set[int]] = {}
    for s, (begin, end) in enumerate(bounds):
        for call in graph.calls[begin:end]:
            for n in call.input_numbers:
                users.setdefault(n, set()).add(s)
    last = len(bounds) - 1
    stages = []
    for s, (begin, end) in enumerate(bounds):
        stage_calls = graph.calls[begin:end]
        input_numbers = tuple(
            dict.fromkeys(
                n for call in stage_calls for n in call.input_numbers if stage_of.get(n) != s
            )
        )
        produced = [n for call in stage_calls for n in call.output_numbers]
        output_numbers = tuple(
            n
            for n in dict.fromkeys(produced)
            if n in graph.outputs or any(user > s for user in users.get(n, ()))
        )
        needs = (
            *input_numbers,
            *(
                n
                for n in dict.fromkeys(graph.outputs)
                if s == last and stage_of.get(n) != s and n not in input_numbers
            ),
        )
        with kept_graph(graph.tensors):
            model = StageModel(
                [graph.tensors[n] for n in input_numbers],
                [graph.tensors[n] for n in output_numbers],
                f"{graph.model.name}_stage_{s}",
            )
        stages.append(
            Stage(
                s,
                model,
                input_numbers,
                output_numbers,
                needs,
                tuple(dict.fromkeys(call.name for call in stage_calls)),
            )
        )
    return tuple(stages)


def parameters(graph: Graph) -> list[float]:
    """Return the number of weight elements of each call.

    A layer that is used again costs nothing, nor do weights that an earlier layer shares.
    """
    seen: set[int] = set()
    costs = []
    for call in graph.calls:
        new = {id(v): v for v in call.weights if id(v) not in seen}
        seen |= new.keys()
        costs.append(float(sum(math.prod(v.shape) for v in new.values())))
    return costs


def _overrides(model: keras.Model, name: str) -> bool:
    """Return whether a class of the user overrides a method of Keras."""
    return any(
        name in vars(cls) and not cls.__module__.startswith("keras.") for cls in type(model).__mro__
    )


def _no_such_layer(graph: Graph, name: str) -> str:
    for call in graph.calls:
        inner: Callable | None = getattr(call.operation, "get_layer", None)
        if inner is not None and any(
            layer.name == name for layer in getattr(call.operation, "layers", ())
        ):
            return (
                f"layer {name!r} is inside the nested model {call.name!r}, which cannot be split. "
                f"Cut after {call.name!r}, or build the model without nesting."
            )
    return (
        f"the model {graph.model.name!r} has no layer {name!r}; its layers are "
        f"{', '.join(dict.fromkeys(call.name for call in graph.calls))}."
    )


def _state(call: Call) -> list[keras.Variable]:
    """Return the state that a call may change: all variables except weights, frozen or not."""
    weights = (
        {id(v) for v in layer_weights(call.operation)}
        if isinstance(call.operation, keras.layers.Layer)
        else set()
    )
    return [v for v in call.variables if id(v) not in weights]


def _cuts_that_share_state(graph: Graph) -> set[int]:
    """Return the cuts, as numbers of calls before them, that would let two stages share state."""
    first: dict[int, int] = {}
    cuts: set[int] = set()
    for i, call in enumerate(graph.calls):
        for v in _state(call):
            cuts.update(range(first.setdefault(id(v), i) + 1, i + 1))
    return cuts


def _check(graph: Graph, bounds: Sequence[tuple[int, int]]) -> None:
    invalid = _cuts_that_share_state(graph)
    for s, (begin, end) in enumerate(bounds):
        stage_calls = graph.calls[begin:end]
        if not any(call.weights for call in stage_calls):
            names = ", ".join(dict.fromkeys(call.name for call in stage_calls)) or "nothing"
            raise ValueError(
                f"parallel.pipeline: stage {s} ({names}) has no weights. Move the cuts, or use "
                "fewer stages."
            )
        if end in invalid:
            shared = {id(v): call.name for call in graph.calls[:end] for v in _state(call)}
            name = next(
                shared[id(v)] for call in graph.calls[end:] for v in _state(call) if id(v) in shared
            )
            raise ValueError(
                f"parallel.pipeline: the cut after {graph.calls[end - 1].name!r} lies between two "
                f"uses of layer {name!r}, so both stages would change its state (moving "
                "statistics, seeds). Cut before its first use or after its last one."
            )
