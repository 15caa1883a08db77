"""Model factory: Keras 3 models by name and options, and users' own models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import layers

from tfdist.config import nearest, user_functions

__all__ = [
    "MODELS",
    "Positions",
    "build",
    "cnn",
    "mlp",
    "resnet",
    "resnet34",
    "resnet50",
    "transformer",
]

PIXEL = 1 / 255


def build(name: str, **options: Any) -> keras.Model:
    """Build one of `MODELS`, or a user's own model; under a strategy call it in its scope.

    The scope is `strategy.scope()`.

    Args:
        name: Name of one of `MODELS`, such as "cnn"; or "FILE.py:FUNCTION" or
            "package.module:FUNCTION", a function that returns a `keras.Model`, compiled or not.
        **options: Arguments of the function of that name; `input_shape` and `classes` are required.

    Returns:
        A model from inputs `[batch, *input_shape]` to probabilities `[batch, classes]`, float32; or
        the model that the user's function returns.

    Raises:
        ValueError: If the name or an option is unknown; the message names the nearest known one.
            Also if a user's function does not exist, does not take the options, or returns
            something else.

    Example:
        >>> build("mlp", input_shape=(8, 8, 1), classes=10, widths=(32,)).output_shape
        (None, 10)
    """
    if is_own(name):
        return _from_function(name, options)
    if name not in MODELS:
        raise ValueError(
            f"model {name!r}: no such model. {nearest(name, MODELS)} Or name a function of yours, "
            "FILE.py:FUNCTION."
        )
    parameters = inspect.signature(MODELS[name]).parameters
    for option in options:
        if option not in parameters:
            raise ValueError(
                f"model {name!r} has no option {option!r}. {nearest(option, parameters)}"
            )
    for option in ("input_shape", "classes"):
        if option not in options:
            raise ValueError(
                f"model {name!r}: option {option!r} is missing. Pass build({name!r}, {option}=...)."
            )
    return MODELS[name](**options)


def is_own(name: str) -> bool:
    """Return whether a model's name refers to a user's function."""
    return ":" in name


def mlp(
    input_shape: Sequence[int],
    classes: int,
    widths: Sequence[int] = (128, 128),
    dropout: float = 0.0,
    scale: float = PIXEL,
) -> keras.Model:
    """Build a multilayer perceptron of Dense layers.

    Args:
        input_shape: Shape of one example.
        classes: Number of classes.
        widths: Units of each hidden layer, default (128, 128).
        dropout: Fraction of units dropped after each hidden layer, default 0.
        scale: Factor for the inputs; the default scales pixels from 0 to 255 to 0 to 1.

    Returns:
        The model, from `[batch, *input_shape]` to `[batch, classes]`.
    """
    inputs = keras.Input(input_shape)
    x = layers.Flatten()(layers.Rescaling(scale)(inputs))
    for width in widths:
        x = layers.Dense(width, activation="relu")(x)
        x = layers.Dropout(dropout)(x)
    return keras.Model(inputs, _classify(x, classes), name="mlp")


def cnn(
    input_shape: Sequence[int],
    classes: int,
    filters: Sequence[int] = (32, 64),
    units: int = 128,
    dropout: float = 0.0,
    scale: float = PIXEL,
) -> keras.Model:
    """Build a convolutional network.

    Each 3 x 3 convolution is followed by max pooling, which halves height and width. A dense layer
    follows at the end.

    Args:
        input_shape: `(height, width, channels)`.
        classes: Number of classes.
        filters: Filters of each convolution, default (32, 64).
        units: Units of the dense layer, default 128.
        dropout: Fraction of units dropped before and after the dense layer, default 0.
        scale: Factor for the inputs; the default scales pixels from 0 to 255 to 0 to 1.

    Returns:
        The model, from `[batch, height, width, channels]` to `[batch, classes]`.
    """
    inputs = keras.Input(input_shape)
    x = layers.Rescaling(scale)(inputs)
    for count in filters:
        x = layers.Conv2D(count, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D(padding="same")(x)
    x = layers.Dropout(dropout)(layers.Flatten()(x))
    x = layers.Dropout(dropout)(layers.Dense(units, activation="relu")(x))
    return keras.Model(inputs, _classify(x, classes), name="cnn")


def resnet(
    input_shape: Sequence[int],
    classes: int,
    filters: Sequence[int] = (16, 32, 64),
    blocks: int | Sequence[int] = 1,
    scale: float = PIXEL,
) -> keras.Model:
    """Build a residual network with batch normalization before each convolution.

    He et al. 2016, arXiv 1603.05027.

    Args:
        input_shape: `(height, width, channels)`.
        classes: Number of classes.
        filters: Filters of each stage, default (16, 32, 64); every stage but the first halves
            height and width.
        blocks: Number of residual blocks in each stage, one number for all or one for each,
            default 1.
        scale: Factor for the inputs; the default scales pixels from 0 to 255 to 0 to 1.

    Returns:
        The model, from `[batch, height, width, channels]` to `[batch, classes]`.

    Raises:
        ValueError: If `blocks` is neither a number above 0 nor one for each stage.
    """
    numbers = _blocks_of_stages(blocks, len(filters))
    inputs = keras.Input(input_shape)
    x = layers.Rescaling(scale)(inputs)
    x = _conv(x, filters[0])
    for stage, count in enumerate(filters):
        for block in range(numbers[stage]):
            strides = 2 if stage > 0 and block == 0 else 1
            y = _conv(_norm(x), count, strides)
            y = _conv(_norm(y), count)
            shortcut = (
                x if x.shape[-1] == count and strides == 1 else layers.Conv2D(count, 1, strides)(x)
            )
            x = layers.Add()([shortcut, y])
    x = layers.GlobalAveragePooling2D()(_norm(x))
    return keras.Model(inputs, _classify(x, classes), name="resnet")


def resnet34(
    input_shape: Sequence[int],
    classes: int,
    filters: int = 64,
    dropout: float = 0.0,
    scale: float = PIXEL,
) -> keras.Model:
    """Build ResNet-34 for images of ImageNet's size, 21.8 million weights for 1000 classes.

    He et al. 2015, arXiv 1512.03385, table 1. The last normalization of each block begins with the
    factor 0 (Goyal et al. 2017, arXiv 1706.02677, section 5.1).

    Args:
        input_shape: `(height, width, channels)`.
        classes: Number of classes.
        filters: Filters of the first stage, default 64; each later stage has twice as many.
        dropout: Fraction of features dropped before the last layer, default 0.
        scale: Factor for the inputs; the default scales pixels from 0 to 255 to 0 to 1.

    Returns:
        The model, from `[batch, height, width, channels]` to `[batch, classes]`.
    """
    return _residual("resnet34", _basic_block, input_shape, classes, filters, dropout, scale)


def resnet50(
    input_shape: Sequence[int],
    classes: int,
    filters: int = 64,
    dropout: float = 0.0,
    scale: float = PIXEL,
) -> keras.Model:
    """Build ResNet-50 for images of ImageNet's size, 25.6 million weights for 1000 classes.

    As `resnet34`, with blocks of three convolutions, of which the middle one has the strides, as in
    torchvision. The last convolution of a block has four times the filters of the others.

    Args:
        input_shape: `(height, width, channels)`.
        classes: Number of classes.
        filters: Filters of the first stage, default 64; each later stage has twice as many.
        dropout: Fraction of features dropped before the last layer, default 0.
        scale: Factor for the inputs; the default scales pixels from 0 to 255 to 0 to 1.

    Returns:
        The model, from `[batch, height, width, channels]` to `[batch, classes]`.
    """
    return _residual("resnet50", _bottleneck_block, input_shape, classes, filters, dropout, scale)


def transformer(
    input_shape: Sequence[int],
    classes: int,
    vocabulary: int | None = None,
    width: int = 64,
    heads: int = 4,
    depth: int = 2,
    dropout: float = 0.0,
    scale: float = PIXEL,
) -> keras.Model:
    """Build a transformer encoder that classifies a sequence.

    Vaswani et al. 2017, arXiv 1706.03762, with layer normalization before each part of a block.

    Args:
        input_shape: `(length,)` of tokens; or `(length, ...)` of vectors, such as the rows of an
            image.
        classes: Number of classes.
        vocabulary: Number of tokens; None (default): the inputs are vectors.
        width: Size of the vector of a position, default 64.
        heads: Number of attention heads, default 4; each has `width // heads` dimensions.
        depth: Number of encoder blocks, default 2.
        dropout: Fraction of units dropped after each part of a block, default 0.
        scale: Factor for vectors; the default scales pixels from 0 to 255 to 0 to 1.

    Returns:
        The model, from `[batch, *input_shape]` to `[batch, classes]`.

    Raises:
        ValueError: If `input_shape` and `vocabulary` do not fit together.
    """
    if (vocabulary is None) == (len(input_shape) == 1):
        raise ValueError(
            "model 'transformer': expected input_shape=(length,) with vocabulary=, or (length, "
            f"...) without; received {tuple(input_shape)} and vocabulary={vocabulary}."
        )
    if vocabulary is None:
        inputs = keras.Input(input_shape)
        x = layers.Reshape((input_shape[0], -1))(layers.Rescaling(scale)(inputs))
        x = layers.Dense(width)(x)
    else:
        inputs = keras.Input(input_shape, dtype="int32")
        x = layers.Embedding(vocabulary, width)(inputs)
    x = Positions()(x)
    for _ in range(depth):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(heads, width // heads)(y, y)
        x = layers.Add()([x, layers.Dropout(dropout)(y)])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, activation="gelu")(y)
        y = layers.Dense(width)(y)
        x = layers.Add()([x, layers.Dropout(dropout)(y)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, _classify(x, classes), name="transformer")


@keras.saving.register_keras_serializable("tfdist")
class Positions(layers.Layer):
    """Layer that adds a learnt vector per position to a sequence `[batch, length, width]`."""

    def build(self, input_shape):
        """See `keras.layers.Layer`."""
        self.table = self.add_weight(
            shape=tuple(input_shape[1:]), initializer="random_normal", name="table"
        )

    def call(self, inputs):
        """See `keras.layers.Layer`."""
        return inputs + self.table


MODELS: dict[str, Callable[..., keras.Model]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet": resnet,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "transformer": transformer,
}
"""Functions that build the models, by the names that `build` takes."""


def _from_function(name: str, options: dict[str, Any]) -> keras.Model:
    function = user_functions.load(name, "model.name")
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        names = ", ".join(options)
        raise ValueError(
            f"model.name={name}: expected a function that takes the arguments {names}, which "
            f"include model.options: {error}."
        ) from error
    model = function(**options)
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"model.name={name}: expected the function to return a keras.Model, received "
            f"{type(model).__name__}."
        )
    return model


def _classify(x: Any, classes: int) -> Any:
    # Probabilities need float32, also under a mixed precision policy.
    return layers.Dense(classes, activation="softmax", dtype="float32", name="probabilities")(x)


def _blocks_of_stages(blocks: Any, stages: int) -> Sequence[int]:
    """Return the number of residual blocks in each stage of `resnet`."""
    numbers = blocks if isinstance(blocks, list | tuple) else [blocks] * stages
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers)
    if not whole or len(numbers) != stages:
        raise ValueError(
            "model 'resnet', option 'blocks' (model.options.blocks): expected a whole number of at "
            f"least 1, or {stages} of them, one for each stage of option 'filters'; received "
            f"{blocks!r}."
        )
    return numbers


def _residual(
    name: str,
    add_block: Callable[..., Any],
    input_shape: Sequence[int],
    classes: int,
    filters: int,
    dropout: float,
    scale: float,
) -> keras.Model:
    inputs = keras.Input(input_shape)
    x = _norm(_conv(layers.Rescaling(scale)(inputs), filters, strides=2, size=7))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            x = add_block(x, filters * 2**stage, strides=2 if stage > 0 and block == 0 else 1)
    x = layers.Dropout(dropout)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, _classify(x, classes), name=name)


def _basic_block(x: Any, filters: int, strides: int) -> Any:
    y = _norm(_conv(x, filters, strides))
    return _join(x, _conv(y, filters), strides)


def _bottleneck_block(x: Any, filters: int, strides: int) -> Any:
    y = _norm(_conv(x, filters, size=1))
    y = _norm(_conv(y, filters, strides))
    return _join(x, _conv(y, 4 * filters, size=1), strides)


def _join(x: Any, y: Any, strides: int) -> Any:
    """Normalize a block's last convolution and add its input, in the shape of the sum."""
    y = layers.BatchNormalization(momentum=0.9, gamma_initializer="zeros")(y)
    if x.shape[-1] != y.shape[-1] or strides > 1:
        x = layers.BatchNormalization(momentum=0.9)(_conv(x, y.shape[-1], strides, size=1))
    return layers.Activation("relu")(layers.Add()([x, y]))


def _conv(x: Any, filters: int, strides: int = 1, size: int = 3) -> Any:
    return layers.Conv2D(
        filters, size, strides, padding="same", use_bias=False, kernel_initializer="he_normal"
    )(x)


def _norm(x: Any) -> Any:
    return layers.Activation("relu")(layers.BatchNormalization(momentum=0.9)(x))
