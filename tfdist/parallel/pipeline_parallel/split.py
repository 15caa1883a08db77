"""A Keras model becomes stages, each a model of its own over the same layers; where they run is not known here."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdist.keras_compat.parallel import graph_calls, layer_weights


class StageModel(keras.Model):
    """A stage's part of the graph."""

    def __init__(self, inputs: list, outputs: list, name: str):
        super().__init__(inputs=inputs, outputs=outputs, name=name)
        self.supports_masking = True

    def compute_mask(self, inputs, previous_mask):
        """None, as its layers have left the right masks on its outputs; Keras' own would copy those of its inputs."""
        return None


@dataclasses.dataclass(frozen=True)
class Call:
    """A layer or operation at one place of a graph; tensors are numbers.

    Args:
        operation: The layer, or a Keras operation.
        takes: Its input tensors.
        makes: Its output tensors.
    """

    operation: Any
    takes: tuple[int, ...]
    makes: tuple[int, ...]

    @property
    def name(self) -> str:
        """As messages give it."""
        return self.operation.name

    @property
    def variables(self) -> list[keras.Variable]:
        """All that it holds; [] for an operation."""
        return list(getattr(self.operation, "variables", ()))

    @property
    def weights(self) -> list[keras.Variable]:
        """Its weights."""
        return list(getattr(self.operation, "weights", ()))


@dataclasses.dataclass(frozen=True)
class Graph:
    """A model as calls in an order in which they can run.

    Args:
        model: The Functional model.
        calls: Its calls.
        tensors: `keras.KerasTensor` of each number.
        inputs: Numbers of the model's inputs.
        outputs: Numbers of its outputs.
    """

    model: keras.Model
    calls: tuple[Call, ...]
    tensors: tuple[Any, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage.

    Args:
        number: From 0.
        model: Takes a list of tensors, gives one or a list.
        takes: Numbers of its model's inputs.
        makes: Numbers of its model's outputs.
        needs: What it takes, and in the last stage outputs of the whole model that earlier ones made.
        layers: Names of its layers, in order.
    """

    number: int
    model: StageModel
    takes: tuple[int, ...]
    makes: tuple[int, ...]
    needs: tuple[int, ...]
    layers: tuple[str, ...]


def graph_of(model: keras.Model) -> Graph:
    """Reads a model's graph.

    Args:
        model: Sequential, once its input shape is known, or Functional.

    Raises:
        ValueError: It has no graph, or one that is not all there is to its training.
    """
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"pipeline: model: expected a Sequential or Functional model, received {model!r}."
        )
    if isinstance(model, keras.Sequential):
        if not model.built:
            raise ValueError(
                f"pipeline: the Sequential model {model.name!r} has no shapes yet; begin it with keras.Input(shape)."
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
            f"pipeline: expected a Sequential or Functional model, whose graph can be cut; {type(model).__name__} {what}. Build it as "
            "keras.Model(inputs, outputs); its blocks may be layers of any kind, as long as no cut goes through one."
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
    """Inputs by their numbers.

    Args:
        graph: The model's.
        x: As `fit` takes them: one, a nest of them, or a dictionary by name.

    Raises:
        ValueError: There are too few or too many.
    """
    model = graph.model
    if isinstance(x, dict):
        named = isinstance(model.input, dict)
        names = list(model.input) if named else [t.name for t in model.inputs]
        missing = [name for name in names if name not in x]
        if missing:
            raise ValueError(
                f"pipeline: {model.name} needs the inputs {', '.join(names)}; received {', '.join(map(str, x))}, without {', '.join(missing)}."
            )
        x = {name: x[name] for name in names} if named else [x[name] for name in names]
    flat = keras.tree.flatten(x)
    if len(flat) != len(model.inputs):
        raise ValueError(
            f"pipeline: {model.name} has {len(model.inputs)} inputs, received {len(flat)}."
        )
    return dict(zip(graph.inputs, flat, strict=True))


def cut_behind(graph: Graph, layers: Sequence[keras.layers.Layer | str]) -> list[int]:
    """Where stages end that a user has named.

    Args:
        graph: The model's.
        layers: The last layer of each stage but the last, by itself or by name.

    Returns:
        How many calls come before each cut, ascending.

    Raises:
        ValueError: A layer is not there, or not once, or there is nothing between two cuts.
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
                f"pipeline: cut_at: layer {name!r} is used {len(places)} times, which leaves open where to cut; name a layer that is used once."
            )
        ends.append(places[0] + 1)
    if len(set(ends)) < len(ends):
        raise ValueError(
            f"pipeline: cut_at: expected different layers, received {[getattr(x, 'name', x) for x in layers]}."
        )
    if len(names) in ends:
        raise ValueError(
            f"pipeline: cut_at: {names[-1]!r} is the last layer, behind which nothing is left for another stage; leave it out."
        )
    return sorted(ends)


def balanced(graph: Graph, stages: int, costs: Sequence[float]) -> list[int]:
    """Where to cut so that the stage that costs most costs as little as can be.

    Args:
        graph: The model's.
        stages: How many.
        costs: Of each call.

    Returns:
        As `cut_behind`.

    Raises:
        ValueError: There are not so many places to cut at; says how many stages are possible.
    """
    count = len(graph.calls)
    torn = _torn(graph)
    sums = [0.0, *itertools.accumulate(costs)]
    weighty = [0, *itertools.accumulate(bool(call.weights) for call in graph.calls)]
    # best[k][j]: the cost of the first j calls in k stages, and where the last of these begins
    best: list[list[tuple[float, int] | None]] = [[None] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, 0)
    for k in range(1, stages + 1):
        for j in (j for j in range(1, count + 1) if j not in torn):
            # Of equals, the stage that begins with weights: activations then stay where they are computed from.
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
        raise ValueError(
            f"pipeline: stages={stages}: the model {graph.model.name!r} can be cut into at most {possible} stages with weights; its layers with "
            f"weights are {', '.join(dict.fromkeys(call.name for call in graph.calls if call.weights)) or 'none'}. A nested model is one layer."
        )
    ends = [count]
    for k in range(stages, 1, -1):
        found = best[k][ends[0]]
        assert found is not None
        ends.insert(0, found[1])
    return ends[:-1]


def split(graph: Graph, ends: Sequence[int]) -> tuple[Stage, ...]:
    """The stages between cuts.

    Args:
        graph: The model's.
        ends: As of `cut_behind`.

    Raises:
        ValueError: A stage has no weights, or two share state that both would change.
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
    last, found = len(bounds) - 1, []
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
    """Elements of the weights of each call; a layer that is used again costs nothing."""
    seen: set[int] = set()
    costs = []
    for call in graph.calls:
        new = {id(v): v for v in call.weights if id(v) not in seen}
        seen |= new.keys()
        costs.append(float(sum(math.prod(v.shape) for v in new.values())))
    return costs


def _overrides(model: keras.Model, name: str) -> bool:
    """Whether a user's class has a method of its own in place of Keras'."""
    return any(
        name in vars(cls) and not cls.__module__.startswith("keras.") for cls in type(model).__mro__
    )


def _absent(graph: Graph, name: str) -> str:
    for call in graph.calls:
        inner: Callable | None = getattr(call.operation, "get_layer", None)
        if inner is not None and any(
            layer.name == name for layer in getattr(call.operation, "layers", ())
        ):
            return f"layer {name!r} is inside the nested model {call.name!r}, through which no cut goes; cut behind {call.name!r}, or build the model flat."
    return f"the model {graph.model.name!r} has no layer {name!r}; its layers are {', '.join(dict.fromkeys(call.name for call in graph.calls))}."


def _state(call: Call) -> list[keras.Variable]:
    """What a call may change: all variables but weights, which may be frozen."""
    weights = (
        {id(v) for v in layer_weights(call.operation)}
        if isinstance(call.operation, keras.layers.Layer)
        else set()
    )
    return [v for v in call.variables if id(v) not in weights]


def _torn(graph: Graph) -> set[int]:
    """Places at which a cut would give two stages the same state."""
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
                f"pipeline: stage {s} ({names}) has no weights, so that it would only pass tensors on; move the cuts, or take fewer stages."
            )
        if end in torn:
            shared = {id(v): call.name for call in graph.calls[:end] for v in _state(call)}
            name = next(
                shared[id(v)] for call in graph.calls[end:] for v in _state(call) if id(v) in shared
            )
            raise ValueError(
                f"pipeline: the cut behind {graph.calls[end - 1].name!r} lies between two uses of layer {name!r}, whose state (moving statistics, "
                "seeds) both stages would change; cut before its first use or behind its last one."
            )
