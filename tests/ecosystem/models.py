"""Build small models of other packages, with data to train them on.

A strategy must give their numbers whichever way they are spread, so nothing in them is random but
the first weights: no dropout, and moving statistics that stay as they are, as in fine-tuning.
Nothing is downloaded: the architectures are the packages' own, the weights are random.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

ROWS = 24
CLASSES = 3
WORDS = 50
LENGTH = 12
IMAGE = (32, 32, 3)
TRANSFORMER = {
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 16,
    "intermediate_dim": 32,
    "dropout": 0.0,
}
MODELS: dict[str, Model] = {}
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def accuracy():
    return "accuracy"


def crossentropy():
    return keras.metrics.SparseCategoricalCrossentropy(from_logits=True)


@dataclasses.dataclass(frozen=True)
class Model:
    """Model of a package and what it is trained on.

    Attributes:
        build: Returns the model, not compiled.
        package: Distribution on PyPI.
        data: Returns what `fit` takes, as arrays: inputs, labels and maybe weights of rows.
        loss: Loss of the labels.
        optimizer: Returns the optimizer.
        metric: Returns a metric. The logits of a deep model with random weights are so nearly equal
            that rounding decides which is the largest, and so its accuracy.
        backbone: Name of a class of KerasHub that makes a layout map. None: there is none.
    """

    build: Callable[[], keras.Model]
    package: str
    data: Callable[[], tuple]
    loss: Any
    optimizer: Callable[[], keras.optimizers.Optimizer]
    metric: Callable[[], Any] = accuracy
    backbone: str | None = None


def missing(package: str) -> bool:
    """Return whether a package is not installed."""
    return importlib.util.find_spec(package.replace("-", "_")) is None


def model(name: str, *facts, **more):
    """Register what builds a model, with the facts about it in the order of `Model`."""

    def register(build):
        MODELS[name] = Model(build, *facts, **more)
        return build

    return register


def adam():
    return keras.optimizers.Adam(1e-4)


def sgd():
    """Return the optimizer of models to which Adam gives other numbers.

    With an embedding table, Keras' Adam squares the gradient of each repetition of a row by itself,
    tfdist their sum (docs/training.md). And it divides by gradients, which are little more than
    rounding in a deep model with random weights.
    """
    return keras.optimizers.SGD(0.05, momentum=0.9)


# --- Data -----------------------------------------------------------------------------------------
def tokens():
    return np.random.default_rng(0).integers(1, WORDS, size=(ROWS, LENGTH)).astype("int32")


def padding():
    lengths = np.random.default_rng(1).integers(4, LENGTH + 1, size=ROWS)
    return np.arange(LENGTH) < lengths[:, None]


def texts():
    """Return tokens, the next token of each, and weights without the padding."""
    ids, mask = tokens(), padding()
    following = np.roll(ids, -1, axis=1)
    return {"token_ids": ids, "padding_mask": mask}, following, mask.astype("float32")


def labelled_texts():
    ids, mask = tokens(), padding()
    inputs = {"token_ids": ids, "padding_mask": mask, "segment_ids": np.zeros_like(ids)}
    return inputs, ids[:, 0] % CLASSES


def images():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, size=ROWS).astype("int32")
    x = rng.uniform(0, 100, size=(ROWS, *IMAGE)) + 60 * labels[:, None, None, None]
    return x.astype("float32"), labels


def sentences():
    return (np.array(["a quick fox", "a fox", "a quick quick fox", "a a fox!"] * (ROWS // 4)),)


# --- KerasHub -------------------------------------------------------------------------------------
@model("GPT-2", "keras-hub", texts, LOGITS, adam)
def gpt2():
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        **TRANSFORMER, vocabulary_size=WORDS, max_sequence_length=LENGTH
    )
    return keras_hub.models.GPT2CausalLM(backbone)


@model("GPT-2, raw text", "keras-hub", sentences, LOGITS, adam)
def gpt2_with_tokenizer():
    import keras_hub

    merges = ["Ġ q", "u i", "c k", "ui ck", "Ġq uick", "Ġ f", "o x", "Ġf ox"]
    words = [
        "!",
        "a",
        *(part for pair in merges for part in (*pair.split(), pair.replace(" ", ""))),
    ]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*words, "<|endoftext|>"]))}
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=merges)
    return keras_hub.models.GPT2CausalLM(
        gpt2().backbone, keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, LENGTH)
    )


@model("Gemma, LoRA", "keras-hub", texts, LOGITS, adam, backbone="GemmaBackbone")
def gemma():
    import keras_hub

    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=WORDS,
        num_layers=2,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=16,
        intermediate_dim=32,
        head_dim=8,
        dropout=0.0,
    )
    backbone.enable_lora(rank=4)
    return keras_hub.models.GemmaCausalLM(backbone)


@model("Llama", "keras-hub", texts, LOGITS, sgd, backbone="LlamaBackbone")
def llama():
    import keras_hub

    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=WORDS,
        num_layers=2,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=16,
        intermediate_dim=32,
    )
    return keras_hub.models.LlamaCausalLM(backbone)


@model("BERT classifier", "keras-hub", labelled_texts, LOGITS, sgd)
def bert():
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        **TRANSFORMER, vocabulary_size=WORDS, max_sequence_length=LENGTH
    )
    return keras_hub.models.BertTextClassifier(backbone, num_classes=CLASSES, dropout=0.0)


@model("ViT", "keras-hub", images, LOGITS, adam)
def vit():
    import keras_hub

    backbone = keras_hub.models.ViTBackbone(
        image_shape=IMAGE,
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
        dropout_rate=0.0,
        attention_dropout=0.0,
    )
    return keras_hub.models.ViTImageClassifier(backbone, num_classes=CLASSES, dropout=0.0)


# --- Keras ----------------------------------------------------------------------------------------
def fine_tuned(application, **options):
    """Return an application under a head of its own, with the statistics that it came with."""
    base = application(include_top=False, weights=None, input_shape=IMAGE, **options)
    for layer in base.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False  # with `training=False`, Keras 3 trains it in a nested model
    inputs = keras.Input(IMAGE)
    x = keras.layers.GlobalAveragePooling2D()(base(inputs))
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(x))


@model("ResNet50", "keras", images, LOGITS, adam, crossentropy)
def resnet50():
    return fine_tuned(keras.applications.ResNet50)


@model("EfficientNetV2-B0", "keras", images, LOGITS, sgd, crossentropy)
def efficientnet():
    return fine_tuned(keras.applications.EfficientNetV2B0)


@model("MobileNetV3-Small", "keras", images, LOGITS, adam, crossentropy)
def mobilenet():
    return fine_tuned(keras.applications.MobileNetV3Small)


# --- Keras Recommenders ---------------------------------------------------------------------------
def clicks():
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(ROWS, 4)).astype("float32")
    item = rng.integers(0, WORDS, size=(ROWS, 3)).astype("int32")
    label = (numbers.sum(1) + item[:, 0] / WORDS > 0.5).astype("float32")[:, None]
    return {"numbers": numbers, "items": item}, label


@model("DCN", "keras-rs", clicks, "binary_crossentropy", sgd)
def dcn():
    import keras_rs

    numbers, items = (
        keras.Input((4,), name="numbers"),
        keras.Input((3,), name="items", dtype="int32"),
    )
    table = keras_rs.layers.EmbedReduce(WORDS, 8, combiner="sum")
    x0 = keras.layers.Concatenate()([numbers, table(items)])
    x = keras_rs.layers.FeatureCross()(x0, x0)
    x = keras_rs.layers.FeatureCross(projection_dim=4)(x0, x)
    return keras.Model({"numbers": numbers, "items": items}, keras.layers.Dense(1, "sigmoid")(x))


@model("DLRM", "keras-rs", clicks, "binary_crossentropy", sgd)
def dlrm():
    import keras_rs

    numbers, items = (
        keras.Input((4,), name="numbers"),
        keras.Input((3,), name="items", dtype="int32"),
    )
    embeddings = keras_rs.layers.DistributedEmbedding(
        keras_rs.layers.FeatureConfig(
            "items",
            # As large as tables of which `fsdp` looks up rows.
            keras_rs.layers.TableConfig("items", 2**17, 8, combiner="sum"),
            input_shape=(None, 3),
            output_shape=(None, 8),
        )
    )
    bottom = keras.layers.Dense(8, "relu")(numbers)
    x = keras_rs.layers.DotInteraction()([bottom, embeddings(items)])
    x = keras.layers.Concatenate()([bottom, x])
    return keras.Model({"numbers": numbers, "items": items}, keras.layers.Dense(1, "sigmoid")(x))
