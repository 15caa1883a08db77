"""A name and options become a Keras 3 model, one of the small ones here or a user's own; no strategy is known here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import layers

from tfdist.config import nearest, user_functions

PIXEL = 1 / 255


def build(name: str, **options: Any) -> keras.Model:
    """Builds one of `MODELS`, or a user's own; under a strategy call it inside `strategy.scope()`.

    Args:
        name: "mlp", "cnn", "resnet" or "transformer"; or "FILE.py:FUNCTION" or "package.module:FUNCTION", a function that
            returns a `keras.Model`, compiled or not.
        **options: Arguments of the function of that name; `input_shape` and `classes` always.

    Returns:
        A model from inputs `[batch, *input_shape]` to probabilities `[batch, classes]`, float32; or what the user's function
        returns.

    Raises:
        ValueError: For an unknown name or option, naming the nearest known one; for a user's function that is not there, does
            not take the options, or returns something else.

    Example:
        >>> build("mlp", input_shape=(8, 8, 1), classes=10, widths=(32,)).output_shape
        (None, 10)
    """
    if is_own(name):
        return _own(name, options)
    if name not in MODELS:
        raise ValueError(
            f"model {name!r}: no such model. {nearest(name, MODELS)} Or name a function of yours, FILE.py:FUNCTION."
        )
    known = inspect.signature(MODELS[name]).parameters
    for option in options:
        if option not in known:
            raise ValueError(f"model {name!r} has no option {option!r}. {nearest(option, known)}")
    for option in ("input_shape", "classes"):
        if option not in options:
            raise ValueError(
                f"model {name!r}: option {option!r} is missing. Pass build({name!r}, {option}=...)."
            )
    return MODELS[name](**options)


def is_own(name: str) -> bool:
    """Whether a model's name is that of a user's function."""
    return ":" in name


def mlp(
    input_shape: Sequence[int],
    classes: int,
    widths: Sequence[int] = (128, 128),
    dropout: float = 0.0,
    scale: float = PIXEL,
) -> keras.Model:
    """Dense layers.

    Args:
        input_shape: Shape of one example.
        classes: Number of classes.
        widths: Units of each hidden layer.
        dropout: Share of units dropped after each hidden layer.
        scale: Factor for the inputs; default: pixels from 0 to 255 become 0 to 1.

    Returns:
        The model.
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
    """Convolutions of 3 x 3, each followed by a halving of height and width, then a dense layer.

    Args:
        input_shape: `(height, width, channels)`.
        classes: Number of classes.
        filters: Filters of each convolution.
        units: Units of the dense layer.
        dropout: Share of units dropped before and after the dense layer.
        scale: Factor for the inputs; default: pixels from 0 to 255 become 0 to 1.

    Returns:
        The model.
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
    blocks: int = 1,
    scale: float = PIXEL,
) -> keras.Model:
    """Residual blocks with batch normalization before each convolution (He et al. 2016, arXiv 1603.05027).

    Args:
        input_shape: `(height, width, channels)`.
        classes: Number of classes.
        filters: Filters of each stage; every stage but the first halves height and width.
        blocks: Residual blocks in each stage.
        scale: Factor for the inputs; default: pixels from 0 to 255 become 0 to 1.

    Returns:
        The model.
    """
    inputs = keras.Input(input_shape)
    x = layers.Rescaling(scale)(inputs)
    x = _conv(x, filters[0])
    for stage, count in enumerate(filters):
        for block in range(blocks):
            strides = 2 if stage > 0 and block == 0 else 1
            y = _conv(_norm(x), count, strides)
            y = _conv(_norm(y), count)
            shortcut = (
                x if x.shape[-1] == count and strides == 1 else layers.Conv2D(count, 1, strides)(x)
            )
            x = layers.Add()([shortcut, y])
    x = layers.GlobalAveragePooling2D()(_norm(x))
    return keras.Model(inputs, _classify(x, classes), name="resnet")


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
    """An encoder that classifies a sequence (Vaswani et al. 2017, arXiv 1706.03762, normalized before each part).

    Args:
        input_shape: `(length,)` of tokens; or `(length, ...)` of vectors, as which the rows of an image will
            do.
        classes: Number of classes.
        vocabulary: Number of tokens; None: the inputs are vectors.
        width: Size of a position's vector.
        heads: Attention heads; each has `width // heads` dimensions.
        depth: Encoder blocks.
        dropout: Share of units dropped after each part of a block.
        scale: Factor for vectors; default: pixels from 0 to 255 become 0 to 1.

    Returns:
        The model.
    """
    if (vocabulary is None) == (len(input_shape) == 1):
        raise ValueError(
            f"model 'transformer': expected input_shape=(length,) with vocabulary=, or (length, ...) without; received "
            f"{tuple(input_shape)} and vocabulary={vocabulary}."
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
    """Adds a learnt vector for each position to a sequence, `[batch, length, width]`."""

    def build(self, input_shape):
        self.table = self.add_weight(
            shape=tuple(input_shape[1:]), initializer="random_normal", name="table"
        )

    def call(self, inputs):
        return inputs + self.table


MODELS: dict[str, Callable[..., keras.Model]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet": resnet,
    "transformer": transformer,
}


def _own(name: str, options: dict[str, Any]) -> keras.Model:
    function = user_functions.load(name, "model.name")
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        given = ", ".join(options)
        raise ValueError(
            f"model.name={name}: expected a function that can be called with {given} (model.options are among them): {error}."
        ) from error
    model = function(**options)
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"model.name={name}: expected the function to return a keras.Model, received {type(model).__name__}."
        )
    return model


def _classify(x: Any, classes: int) -> Any:
    # Probabilities need float32, also under a mixed precision policy.
    return layers.Dense(classes, activation="softmax", dtype="float32", name="probabilities")(x)


def _conv(x: Any, filters: int, strides: int = 1) -> Any:
    return layers.Conv2D(
        filters, 3, strides, padding="same", use_bias=False, kernel_initializer="he_normal"
    )(x)


def _norm(x: Any) -> Any:
    return layers.Activation("relu")(layers.BatchNormalization(momentum=0.9)(x))
