"""Layer timing: measures each layer's forward and backward pass on this machine."""

from __future__ import annotations

import time
from typing import Any

import keras
import tensorflow as tf

from tfdist.parallel.pipeline_parallel.split import Graph, inputs_by_number

_EXAMPLES = 32
_ROUNDS = 3


def seconds(graph: Graph, sample: Any = None) -> list[float]:
    """Measure the forward and backward pass of each call, and keep the quickest of three.

    Args:
        graph: Graph of the model.
        sample: Inputs as `fit` takes them, `[batch, ...]`. None: 32 examples of zeros.

    Returns:
        Seconds for each call of the graph.

    Raises:
        ValueError: If a shape is not known without a sample, or if the sample has other inputs
            than the model.
    """
    tensors = _inputs(graph, sample)
    times = []
    for call in graph.calls:
        model = keras.Model(
            [graph.tensors[n] for n in dict.fromkeys(call.input_numbers)],
            [graph.tensors[n] for n in call.output_numbers],
        )
        inputs = [tensors[n] for n in dict.fromkeys(call.input_numbers)]
        step = tf.function(_step(model), autograph=False)
        outputs = step(inputs)[0]
        times.append(min(_measure(step, inputs) for _ in range(_ROUNDS)))
        tensors.update(zip(call.output_numbers, outputs, strict=True))
    return times


def _step(model: keras.Model):
    def step(inputs: list[tf.Tensor]):
        watched = [x for x in inputs if x.dtype.is_floating]
        with keras.StatelessScope(), tf.GradientTape() as tape:
            tape.watch(watched)
            outputs = keras.tree.flatten(model(inputs, training=False))
        ends = [x for x in outputs if x.dtype.is_floating]
        return outputs, tape.gradient(
            ends, watched + [v.value for v in model.trainable_variables]
        ) if ends else []

    return step


def _measure(step: Any, inputs: list[tf.Tensor]) -> float:
    begin = time.perf_counter()
    for x in keras.tree.flatten(step(inputs)):
        if x is not None:
            tf.convert_to_tensor(x).numpy()
    return time.perf_counter() - begin


def _inputs(graph: Graph, sample: Any) -> dict[int, tf.Tensor]:
    inputs = graph.model.inputs
    if sample is None:
        unknown = [t.name for t in inputs if None in t.shape[1:]]
        if unknown:
            raise ValueError(
                f'parallel.pipeline: balance="time": the shape of input {unknown[0]!r} is unknown. '
                "Pass example inputs as sample=."
            )
        sample = [tf.zeros((_EXAMPLES, *t.shape[1:]), t.dtype) for t in inputs]
    return {
        n: tf.cast(tf.convert_to_tensor(x), graph.tensors[n].dtype)
        for n, x in inputs_by_number(graph, sample).items()
    }
