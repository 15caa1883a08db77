"""Keras preprocessing layers for data pipelines: adapt to a Source, apply to batches.

For text (`TextVectorization`) and tables (`Normalization`, `StringLookup`, `IntegerLookup`,
`Discretization`, `Hashing`, ...). The weights of other layers are not changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist import config
from tfdist.data.sources.convert import as_source

__all__ = ["Preprocess", "adapt"]


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """Batch transform that applies Keras layers to x, for `pipeline(batch_transform=...)`.

    Keras expects features with a column axis, so scalar features are passed to the layers as
    columns, `[rows, 1]`.

    Attributes:
        layers: One layer for x itself; or, if x is a dict, a dict from feature name to layer. Other
            features stay unchanged.

    Example:
        >>> lookup = keras.layers.StringLookup(vocabulary=["a", "b"])
        >>> batch = {"city": tf.constant(["b", "a"])}
        >>> x, y = Preprocess({"city": lookup})(batch, tf.constant([0, 1]))
        >>> x["city"].numpy().tolist()
        [[2], [1]]
    """

    layers: keras.Layer | Mapping[str, keras.Layer]

    def __post_init__(self) -> None:
        layers = self.layers.values() if isinstance(self.layers, Mapping) else [self.layers]
        for layer in layers:
            if not isinstance(layer, keras.Layer):
                raise ValueError(
                    f"layers: expected a Keras layer, or a dict of them; received {layer!r}."
                )

    def __call__(self, x: Any, *rest: Any) -> Any:
        """Apply the layers to a batch.

        Args:
            x: Tensor `[rows, ...]`, or a dict of such tensors.
            *rest: Other parts of the batch, such as labels and sample weights.

        Returns:
            The new x; with `rest`, a tuple.
        """
        result = dict(x) if isinstance(x, Mapping) else x
        for name, layer in _layers_by_feature(self.layers):
            value = _apply_layer(layer, _feature(x, name), name)
            if name is None:
                result = value
            else:
                result[name] = value
        return (result, *rest) if rest else result


def adapt(
    layers: keras.Layer | Mapping[str, keras.Layer], source: Any, *, global_batch: int = 1024
) -> Preprocess:
    """Adapt layers to all examples of a source: vocabulary, mean and variance, quantiles.

    The examples come in the order of their numbers, so that the layers of every worker learn the
    same state. Each worker reads all examples.

    Args:
        layers: One layer for x itself; or, if x is a dict, a dict from feature name to layer. A
            layer that has nothing to learn is left unchanged.
        source: Data that `tfdist.data.as_source` accepts. Use the training split only.
        global_batch: Number of examples passed to a layer at a time; default: 1024.

    Returns:
        A function for `pipeline(batch_transform=...)` that applies the layers.

    Raises:
        ValueError: If an object is not a Keras layer, or if the source does not have a feature.

    Example:
        >>> text = keras.layers.TextVectorization(output_sequence_length=3)
        >>> prepare = adapt(text, (tf.constant(["a cat", "a dog"]), tf.constant([0, 1])))
        >>> prepare(tf.constant(["the cat"]), 7)[0].numpy().tolist()
        [[1, 4, 0]]
    """
    source = as_source(source)
    result = Preprocess(layers)
    for name, layer in _layers_by_feature(layers):
        if hasattr(layer, "adapt"):
            layer.adapt(
                source.dataset()
                .batch(global_batch)
                .map(_select(name), num_parallel_calls=tf.data.AUTOTUNE)
            )
    return result


def _select(name: str | None) -> Callable[..., Any]:
    return lambda x, *rest: _as_column(_feature(x, name))


def _layers_by_feature(layers: Any) -> list[tuple[str | None, keras.Layer]]:
    return list(layers.items()) if isinstance(layers, Mapping) else [(None, layers)]


def _feature(x: Any, name: str | None) -> Any:
    if name is None:
        if isinstance(x, Mapping):
            raise ValueError(
                f"layers: x has the features {', '.join(map(str, x))}: expected a dict from "
                "feature names to layers, received one layer."
            )
        return x
    if not isinstance(x, Mapping):
        raise ValueError(
            f"layers: x has no features: expected one layer, received one for the feature {name!r}."
        )
    if name not in x:
        raise ValueError(f"layers: x has no feature {name!r}. {config.nearest(name, x)}")
    return x[name]


def _as_column(value: Any) -> Any:
    return value[:, tf.newaxis] if value.shape.rank == 1 else value


def _apply_layer(layer: keras.Layer, value: Any, name: str | None) -> Any:
    if (
        isinstance(layer, keras.layers.Normalization)
        and not layer.built
        and layer.input_mean is None
    ):
        raise ValueError(
            f"layers: {layer.name} has not been adapted. Call adapt(layers, source), or pass mean "
            "and variance to the layer."
        )
    value = _as_column(value)
    result = layer(value)
    if (
        isinstance(result, tf.Tensor)
        and value.shape[1:].is_fully_defined()
        and not result.shape[1:].is_fully_defined()
    ):
        raise ValueError(
            f"layers: {layer.name}{'' if name is None else f', of the feature {name!r},'} pads "
            f"rows to the longest of their batch ({result.shape}), so a row would depend on the "
            "others. Set a length: TextVectorization(output_sequence_length=...)."
        )
    return result
