"""Graph partitioning: splits a Keras model into stages, each a model over the same layers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdist.keras_compat.parallel import graph_calls, layer_weights


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
        takes: Numbers of its input tensors, indices into `Graph.tensors`.
        makes: Numbers of its output tensors.
    """

    operation: Any
    takes: tuple[int, ...]
    makes: tuple[int, ...]

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
        takes: Numbers of the stage model's inputs.
        makes: Numbers of the stage model's outputs.
        needs: Numbers of the tensors that the stage reads: `takes`, and for the last stage also
            the whole model's outputs that earlier stages computed.
        layers: Names of the stage's layers, in order.
    """

    number: int
    model: StageModel
    takes: tuple[int, ...]
    makes: tuple[int, ...]
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
            f"pipeline: model: expected a Sequential or Functional model, received {model!r}."
        )
    if isinstance(model, keras.Sequential):
        if not model.built:
            raise ValueError(
                f"pipeline: the Sequential model {model.name!r} has no shapes yet; "
                "begin it with keras.Input(shape)."
            )
        functional = keras.Model(model.inputs, model.outputs, name=model.name)
    else:
        functional = model
    found = graph_calls(functional)
    own = [name for name in ("call", "train_step", "compute_loss") if _overrides(model, name)]
    if found is None or own:
        what = (
            f"overrides {', '.join(own)}"
            if found is not None
            else "is a subclass of keras.Model with a call() of its own"
        )
        raise ValueError(
            "pipeline: expected a Sequential or Functional model, whose graph can be cut; "
            f"{type(model).__name__} {what}. Build it as "
            "keras.Model(inputs, outputs); its blocks may be layers of any kind, as long as no "
            "cut goes through one."
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
        Call(operation, tuple(map(number, takes)), tuple(map(number, makes)))
        for operation, takes, makes in found
    )
    return Graph(functional, calls, tuple(tensors), inputs, tuple(map(number, functional.outputs)))


def numbered(graph: Graph, x: Any) -> dict[int, Any]:
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
                f"pipeline: {model.name} needs the inputs {', '.join(names)}; "
                f"received {', '.join(map(str, x))}, without {', '.join(missing)}."
            )
        x = {name: x[name] for name in names} if named else [x[name] for name in names]
    flat = keras.tree.flatten(x)
    if len(flat) != len(model.inputs):
        raise ValueError(
            f"pipeline: {model.name} has {len(model.inputs)} inputs, received {len(flat)}."
        )
    return dict(zip(graph.inputs, flat, strict=True))


def cut_behind(graph: Graph, layers: Sequence[keras.layers.Layer | str]) -> list[int]:
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
                f"pipeline: cut_at: expected layers or their names, received {layer!r}."
            )
        name = layer if isinstance(layer, str) else layer.name
        places = [i for i, each in enumerate(names) if each == name]
        if not places:
            raise ValueError(f"pipeline: cut_at: {_absent(graph, name)}")
        if len(places) > 1:
            raise ValueError(
                f"pipeline: cut_at: layer {name!r} is used {len(places)} times, which leaves open "
                "where to cut; name a layer that is used once."
            )
        ends.append(places[0] + 1)
    if len(set(ends)) < len(ends):
        raise ValueError(
            "pipeline: cut_at: expected different layers, "
            f"received {[getattr(x, 'name', x) for x in layers]}."
        )
    if len(names) in ends:
        raise ValueError(
            f"pipeline: cut_at: {names[-1]!r} is the last layer, behind which nothing is left for "
            "another stage; leave it out."
        )
    return sorted(ends)


def balanced(graph: Graph, stages: int, costs: Sequence[float]) -> list[int]:
    """Return the cuts that minimize the cost of the most expensive stage.

    Args:
        graph: Graph of the model.
        stages: Number of stages.
        costs: Cost of each call, such as from `parameters` or `layer_timing.seconds`.

    Returns:
        Number of calls before each cut, ascending, as from `cut_behind`.

    Raises:
        ValueError: If the model cannot be cut into that many stages. The message says how many
            stages are possible.
    """
    count = len(graph.calls)
    torn = _torn(graph)
    sums = [0.0, *itertools.accumulate(costs)]
    weighty = [0, *itertools.accumulate(bool(call.weights) for call in graph.calls)]
    # best[k][j]: the cost of the first j calls in k stages, and where the last stage begins.
    best: list[list[tuple[float, int] | None]] = [[None] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, 0)
    for k in range(1, stages + 1):
        for j in (j for j in range(1, count + 1) if j not in torn):
            # Among equal costs, prefer a stage that begins with weights: operations without
            # weights then stay in the stage that computes their input.
            choices = [
                (max(before[0], sums[j] - sums[i]), not graph.calls[i].weights, i)
                for i, before in enumerate(best[k - 1][:j])
                if before is not None and weighty[i] < weighty[j]
            ]
            if choices:
                cost, _, i = min(choices)
                best[k][j] = (cost, i)
    possible = max((k for k in range(1, stages + 1) if best[k][count] is not None), default=0)
    if possible < stages:
        weighted = dict.fromkeys(call.name for call in graph.calls if call.weights)
        raise ValueError(
            f"pipeline: stages={stages}: the model {graph.model.name!r} can be cut into at most "
            f"{possible} stages with weights; its layers with weights are "
            f"{', '.join(weighted) or 'none'}. A nested model is one layer."
        )
    ends = [count]
    for k in range(stages, 1, -1):
        found = best[k][ends[0]]
        assert found is not None
        ends.insert(0, found[1])
    return ends[:-1]


def split(graph: Graph, ends: Sequence[int]) -> tuple[Stage, ...]:
    """Split a graph into stages.

    Args:
        graph: Graph of the model.
        ends: Number of calls before each cut, as from `cut_behind`.

    Raises:
        ValueError: If a stage has no weights, or if two stages would change the same state.
    """
    bounds = list(itertools.pairwise([0, *ends, len(graph.calls)]))
    _check(graph, bounds)
    stage_of = {
        n: s
        for s, (begin, end) in enumerate(bounds)
        for call in graph.calls[begin:end]
        for n in call.makes
    }
    users: dict[int, set[int]] = {}
    for s, (begin, end) in enumerate(bounds):
        for call in graph.calls[begin:end]:
            for n in call.takes:
                users.setdefault(n, set()).add(s)
    last = len(bounds) - 1
    found = []
    for s, (begin, end) in enumerate(bounds):
        own = graph.calls[begin:end]
        takes = tuple(dict.fromkeys(n for call in own for n in call.takes if stage_of.get(n) != s))
        made = [n for call in own for n in call.makes]
        makes = tuple(
            n
            for n in dict.fromkeys(made)
            if n in graph.outputs or any(user > s for user in users.get(n, ()))
        )
        needs = (
            *takes,
            *(
                n
                for n in dict.fromkeys(graph.outputs)
                if s == last and stage_of.get(n) != s and n not in takes
            ),
        )
        model = StageModel(
            [graph.tensors[n] for n in takes],
            [graph.tensors[n] for n in makes],
            f"{graph.model.name}_stage_{s}",
        )
        found.append(
            Stage(s, model, takes, makes, needs, tuple(dict.fromkeys(call.name for call in own)))
        )
    return tuple(found)


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


def _absent(graph: Graph, name: str) -> str:
    for call in graph.calls:
        inner: Callable | None = getattr(call.operation, "get_layer", None)
        if inner is not None and any(
            layer.name == name for layer in getattr(call.operation, "layers", ())
        ):
            return (
                f"layer {name!r} is inside the nested model {call.name!r}, through which no cut "
                f"goes; cut behind {call.name!r}, or build the model flat."
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


def _torn(graph: Graph) -> set[int]:
    """Return the cuts, as numbers of calls before them, that would let two stages share state."""
    first: dict[int, int] = {}
    places: set[int] = set()
    for place, call in enumerate(graph.calls):
        for v in _state(call):
            places.update(range(first.setdefault(id(v), place) + 1, place + 1))
    return places


def _check(graph: Graph, bounds: Sequence[tuple[int, int]]) -> None:
    torn = _torn(graph)
    for s, (begin, end) in enumerate(bounds):
        own = graph.calls[begin:end]
        if not any(call.weights for call in own):
            names = ", ".join(dict.fromkeys(call.name for call in own)) or "nothing"
            raise ValueError(
                f"pipeline: stage {s} ({names}) has no weights, so that it would only pass tensors "
                "on; move the cuts, or take fewer stages."
            )
        if end in torn:
            shared = {id(v): call.name for call in graph.calls[:end] for v in _state(call)}
            name = next(
                shared[id(v)] for call in graph.calls[end:] for v in _state(call) if id(v) in shared
            )
            raise ValueError(
                f"pipeline: the cut behind {graph.calls[end - 1].name!r} lies between two uses of "
                f"layer {name!r}, whose state (moving statistics, "
                "seeds) both stages would change; cut before its first use or behind its last one."
            )
