"""Train models and optimizers plain and sharded, on the same replicas."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.keras_compat import local_component
from tfdist.keras_compat.parallel import innermost
from tfdist.parallel import deferred, fsdp, zero
from tfdist.train.health.watchdog import Watchdog

ROWS = 24
BATCH = 8
EPOCHS = 2
ZEROS = (
    "key/bias",
    "key_bias",
)  # the gradient of these is zero but for rounding, and so is what comes of that
# Keras' name of means of squared gradients: a square has twice the relative error of what is
# squared.
SQUARES = "velocity"
# The kernels of fused updates take `1 - beta_2` from float32 numbers. See docs/performance.md.
OF_KERNELS = 2e-5
ALONE = " alone"  # ends a way in which processes train without a scope, each with its own rows
SHARDED = {  # way: what it does with the model, with the optimizer
    "zero1": (None, functools.partial(zero, stage=1)),
    "zero2": (None, functools.partial(zero, stage=2)),
    "fsdp": (
        functools.partial(fsdp, prefetch=0),
        None,
    ),  # or all of a small model's weights would stay until backward
    "fsdp keep": (functools.partial(fsdp, reshard_after_forward=False, prefetch=2), None),
    "fsdp products": (functools.partial(fsdp, batch_per_replica=4), None),
}


class Block(keras.layers.Layer):
    """Apply a transformer block, which is one unit.

    Its dropout layers know from the call's context whether it trains.
    """

    def __init__(self, width: int = 8):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, width // 2, dropout=0.2)
        self.first = keras.layers.LayerNormalization()
        self.second = keras.layers.LayerNormalization()
        self.wide = keras.layers.Dense(2 * width, "gelu")
        self.narrow = keras.layers.Dense(width)
        self.drop = keras.layers.Dropout(0.2)

    def build(self, shape):
        for layer in (self.first, self.second, self.wide):
            layer.build(shape)
        self.attention.build(shape, shape)
        self.narrow.build((*shape[:-1], 2 * shape[-1]))
        self.built = True

    def call(self, x):
        h = self.first(x)
        x = x + self.attention(h, h, use_causal_mask=True)
        return x + self.drop(self.narrow(self.wide(self.second(x))))


class Tied(keras.layers.Layer):
    """Compute scores of words by the embedding that read them."""

    def __init__(self, embedding):
        super().__init__(dtype="float32")
        self.embedding = embedding

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.embedding.embeddings))


class Subclassed(keras.Model):
    """Read a weight of a layer, and one of its own, outside of layers."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(11, 6)
        self.inner = keras.Sequential(
            [keras.Input([6]), keras.layers.Dense(6, "tanh"), keras.layers.Dropout(0.2)]
        )

    def build(self, shape):
        self.embedding.build(shape)
        self.scale = self.add_weight(shape=[6], initializer="ones", name="scale")
        self.built = True

    def call(self, x, training=None):
        h = self.inner(keras.ops.mean(self.embedding(x), 1), training=training) * self.scale
        return keras.ops.matmul(h, keras.ops.transpose(self.embedding.embeddings))


class Penalized(keras.layers.Dense):
    """Add a loss when it is called."""

    def call(self, x):
        y = super().call(x)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(y)))
        return y


class Derived(keras.Model):
    """Return values of an inner model, and derivatives with respect to the inputs.

    These are sums of first and of second derivatives. Networks that solve differential equations,
    and penalties of gradients, are trained through them.
    """

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def build(self, shape):
        self.built = True

    def call(self, x, training=None):
        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = self.inner(x, training=training)
            slope = tape.gradient(y, x)
        curvature = outer.gradient(slope, x)
        terms = [tf.reduce_sum(slope**2, 1, True), tf.reduce_sum(curvature, 1, True)]
        return tf.concat([y, *[0.01 * x for x in terms]], 1)


def mlp(dropout=0.3, first=keras.layers.Dense, **of_first):
    return keras.Sequential(
        [
            keras.Input([5]),
            first(7, "relu", **of_first),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(3),
        ]
    )


def wide():
    """Return a model with a kernel of which the rows of a batch are fewer bytes."""
    return keras.Sequential(
        [
            keras.Input([5]),
            keras.layers.Dense(516, "tanh"),
            keras.layers.Dense(516, "tanh"),
            keras.layers.Dense(3),
        ]
    )


def derived(width=7):
    model = Derived(
        keras.Sequential(
            [
                keras.Input([5]),
                keras.layers.Dense(width, "tanh"),
                keras.layers.Dense(width, "tanh"),
                keras.layers.LayerNormalization(),
                keras.layers.Dense(3),
            ]
        )
    )
    model.build((None, 5))
    return model


def frozen():
    """Return a model with weights and statistics that no optimizer knows, drawn from the seed."""
    normal = {f"{name}_initializer": "random_normal" for name in ("beta", "moving_mean")}
    fixed = [
        keras.layers.Dense(7, "tanh", trainable=False),
        keras.layers.BatchNormalization(trainable=False, **normal),
    ]
    return keras.Sequential(
        [keras.Input([5]), keras.layers.Dense(7, "relu"), *fixed, keras.layers.Dense(3)]
    )


def cnn():
    return keras.Sequential(
        [
            keras.Input([6, 6, 1]),
            keras.layers.Conv2D(4, 3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(3),
        ]
    )


def lstm():
    return keras.Sequential(
        [
            keras.Input([6], dtype="int32"),
            keras.layers.Embedding(11, 5, mask_zero=True),
            keras.layers.LSTM(6, dropout=0.2, recurrent_dropout=0.2),
            keras.layers.Dense(3),
        ]
    )


def transformer():
    words = keras.Input([6], dtype="int32")
    embedding = keras.layers.Embedding(11, 8, mask_zero=True)
    x = Block()(embedding(words))
    return keras.Model(words, Tied(embedding)(keras.layers.LayerNormalization()(x)))


def recommender():
    """Look up rows of two tables, of which neither has a multiple of two or three rows.

    Of a table of Keras, `fsdp` looks up rows only if it is large.
    """
    words = keras.Input([6], dtype="int32")
    first = tfdist.layers.ShardedEmbedding(11, 5, mask_zero=True)(words)
    second = keras.layers.Embedding(2**18 + 7, 4)(words[:, :2])
    x = keras.layers.Concatenate()(
        [keras.layers.GlobalAveragePooling1D()(first), keras.layers.Flatten()(second)]
    )
    return keras.Model(words, keras.layers.Dense(3)(x))


def subclassed():
    model = Subclassed()
    model.build((None, 6))
    return model


def nested():
    inside = keras.Sequential(
        [
            keras.Input([5]),
            keras.layers.Dense(6, "tanh", activity_regularizer="l2"),
            keras.layers.BatchNormalization(),
        ]
    )
    x = keras.Input([5])
    shared = keras.layers.Dense(5)
    return keras.Model(x, keras.layers.Dense(3)(inside(shared(shared(x)))))


@dataclasses.dataclass(frozen=True)
class Case:
    """Describe a model with its optimizer, and how it is trained.

    Attributes:
        build: Makes the model.
        optimizer: Makes the optimizer.
        ways: Keys of `SHARDED`, to be compared with plain training.
        inputs: "numbers", "outlier": one of them is huge, "images", "words", or "next": words whose
            next ones are learned.
        tolerance: Most that values differ, relative to the largest of their variable.
        policy: Policy of dtypes.
        deferred: Whether `fsdp` gets a model without values.
        saved: Whether it is also evaluated, saved and loaded.
    """

    build: Callable[[], keras.Model]
    optimizer: Callable[[], keras.optimizers.Optimizer]
    ways: tuple[str, ...] = ("fsdp",)
    inputs: str = "numbers"
    tolerance: float = 1e-6
    policy: str = "float32"
    deferred: bool = False
    saved: bool = False


def _scaled():
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=2.0**20, dynamic_growth_steps=4
    )


def _overflowing():
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=2.0**124, dynamic_growth_steps=4
    )


CASES = {
    "mlp sgd": Case(
        mlp,
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, global_clipnorm=0.3),
        ("zero1", "zero2", "fsdp"),
        saved=True,
    ),
    "cnn rmsprop": Case(
        cnn, lambda: keras.optimizers.RMSprop(0.01), ("zero2", "fsdp"), "images", deferred=True
    ),
    "lstm adam": Case(
        lstm,
        lambda: keras.optimizers.Adam(0.01, clipnorm=0.1),
        ("zero1", "fsdp", "fsdp keep"),
        "words",
    ),
    # The gradient of a key's bias is zero but for rounding, of which Adam would make whole steps:
    # hence epsilon.
    "transformer adamw": Case(
        transformer,
        lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3),
        ("zero2", "fsdp", "fsdp keep"),
        "next",
        tolerance=4e-6 if keras.__version__.startswith("3.10.") else 2e-6,
        deferred=True,
    ),
    "recommender adagrad": Case(
        recommender,
        lambda: keras.optimizers.Adagrad(0.1, global_clipnorm=0.5),
        ("zero2", "fsdp"),
        "words",
        saved=True,
    ),
    "recommender lazy adam": Case(
        recommender, lambda: tfdist.optimizers.LazyAdam(0.05), ("fsdp",), "words", saved=True
    ),
    "mlp lion": Case(mlp, lambda: keras.optimizers.Lion(0.003), ("zero1", "zero2", "fsdp")),
}
OF_PROCESSES = {
    # The gradients of the process that has the huge row overflow; all processes must leave that
    # update out.
    "outlier": Case(
        frozen, _overflowing, ("zero2", "zero2 alone", "fsdp alone"), "outlier", saved=True
    ),
    "wide sgd": Case(
        wide,
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        ("fsdp products", "fsdp products alone"),
        tolerance=2e-6,
        saved=True,
    ),
    "derivatives": Case(derived, lambda: keras.optimizers.SGD(0.1), ("zero2", "fsdp", "fsdp keep")),
    "wide derivatives": Case(
        lambda: derived(516),
        lambda: keras.optimizers.SGD(0.01),
        ("zero2", "fsdp", "fsdp products"),
        tolerance=2e-6,
    ),
    "lstm adam of four": Case(
        lstm, lambda: keras.optimizers.Adam(0.01, clipnorm=0.1), ("zero1", "fsdp"), "words"
    ),
}
FEATURES = {  # of one setup
    "average": Case(
        mlp,
        lambda: keras.optimizers.Adam(
            0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
        ),
        ("fsdp", "zero2"),
        saved=True,
    ),
    "average at the end": Case(
        mlp, lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    ),
    "accumulation": Case(
        mlp, lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3, clipvalue=0.05)
    ),
    "schedule": Case(
        mlp,
        lambda: keras.optimizers.Nadam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    ),
    "constraint": Case(
        lambda: mlp(kernel_constraint=keras.constraints.MaxNorm(0.5)),
        lambda: keras.optimizers.Adam(0.05),
        ("fsdp", "zero2"),
    ),
    "regularizer": Case(
        lambda: mlp(first=Penalized, kernel_regularizer="l1l2", activity_regularizer="l2"),
        lambda: keras.optimizers.Adam(0.01),
        ("fsdp", "fsdp keep"),
    ),
    "loss scale": Case(mlp, _scaled, ("fsdp", "zero2")),
    "subclassed": Case(
        subclassed,
        lambda: keras.optimizers.Adagrad(0.1),
        ("fsdp", "fsdp keep"),
        "words",
        deferred=True,
    ),
    # Adam makes whole steps of gradients that are small, and of their rounding: here 1.5e-6 of the
    # largest bias.
    "nested": Case(nested, lambda: keras.optimizers.Adam(0.01), tolerance=4e-6, deferred=True),
    # Gradients of tied and packed weights are rounded to 8 bits of precision in another order.
    "bfloat16": Case(
        transformer,
        lambda: keras.optimizers.SGD(0.1),
        ("fsdp", "fsdp keep"),
        "next",
        1e-3,
        "mixed_bfloat16",
    ),
}


def data(kind: str):
    """Return inputs and labels of some rows."""
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 3, ROWS)
    if kind in ("numbers", "outlier"):
        x = rng.normal(size=(ROWS, 5)).astype("float32")
        x[0] *= 1e5 if kind == "outlier" else 1
        return x, labels
    if kind == "images":
        return rng.normal(size=(ROWS, 6, 6, 1)).astype("float32"), labels
    words = rng.integers(0, 11, (ROWS, 6))
    words[:, 4:] *= rng.integers(0, 2, (ROWS, 1))  # some are shorter
    return (words, (3 * words + 1) % 11) if kind == "next" else (words, labels)


def train(
    case: Case, way: str, strategy: tf.distribute.Strategy, directory: str = ""
) -> dict[str, np.ndarray]:
    """Return the numbers of a training: losses, weights, the optimizer's state, and predictions.

    Also return how many numbers each replica holds of weights and state.

    Args:
        case: Model, optimizer and data.
        way: "plain", or one of `SHARDED`, perhaps with `ALONE`.
        strategy: Strategy to train under.
        directory: Directory that all processes reach; "" for a single process.
    """
    keras.backend.clear_session()
    alone = way.endswith(ALONE)
    keras.utils.set_random_seed(
        7 + alone * strategy.tfdist_engine.placement.rank
    )  # of processes without a scope, the chief's weights count
    keras.config.set_dtype_policy(case.policy)
    where = {"strategy": strategy} if alone else {}
    shard, wrap = (
        None if f is None else functools.partial(f, **where)
        for f in SHARDED.get(way.removesuffix(ALONE), (None, None))
    )
    try:
        with contextlib.nullcontext() if alone else strategy.scope():
            if shard and case.deferred:
                with deferred():
                    model = case.build()
            else:
                model = case.build()
            shards = shard(model) if shard else None
            optimizer = case.optimizer()
            if wrap and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                optimizer.inner_optimizer = wrap(optimizer.inner_optimizer)
            elif wrap:
                optimizer = wrap(optimizer)
            model.compile(
                optimizer,
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                jit_compile=False,
            )
        x, y = data(case.inputs)
        begun = [] if alone else model.get_weights()
        mine, batch = (
            own_rows(strategy.tfdist_engine.placement) if alone else (np.arange(ROWS), BATCH)
        )
        callbacks = []
        if case.saved and directory and not alone:  # saves whole weights, by all workers
            path = pathlib.Path(directory) / "backup of Keras"
            callbacks.append(keras.callbacks.BackupAndRestore(path))
        if case.saved and innermost(optimizer).use_ema:
            callbacks.append(keras.callbacks.SwapEMAWeights(swap_on_epoch=True))
        history = model.fit(
            x[mine],
            y[mine],
            batch_size=batch,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        ).history
        if way.startswith("fsdp products"):  # else it would only repeat another way
            assert any(" product " in name for name in shards._gathering.forward_group.bytes)
        figures = {f"first {i}": value for i, value in enumerate(begun)}
        figures |= {
            f"{v.path} {i}": np.array(v.numpy(), np.float64) for i, v in enumerate(model.weights)
        }
        figures |= {
            f"state {v.path} {i}": np.array(v.numpy(), np.float64)
            for i, v in enumerate(optimizer.variables)
        }
        if not alone:  # each process has that of its own rows
            figures |= {f"history {name}": np.array(values) for name, values in history.items()}
        for kind, variables in (
            ("weights", model.trainable_weights),
            ("state", optimizer.variables),
        ):
            figures[f"held {kind}"] = np.array(
                [int(np.prod(local_component(v, 0).shape)) for v in variables]
            )
        if way != "plain" and case.saved:
            with tempfile.TemporaryDirectory() as own:
                check_files(
                    model,
                    optimizer,
                    case,
                    shard,
                    contextlib.nullcontext() if alone else strategy.scope(),
                    pathlib.Path(directory or own),
                )
        if case.saved:
            figures["evaluated"] = np.array(model.evaluate(x, y, batch_size=BATCH, verbose=0))
        return {**figures, "predicted": model.predict(x, batch_size=BATCH, verbose=0)}
    finally:
        keras.config.set_dtype_policy("float32")


def own_rows(placement) -> tuple[np.ndarray, int]:
    """Return the rows that a process without a scope trains on, and the row count of each batch.

    The rows are those that it would get of each batch.
    """
    count = BATCH // placement.workers
    return np.arange(ROWS).reshape(-1, placement.workers, count)[:, placement.rank].ravel(), count


def compare(plain: dict, numbers: dict, tolerance: float, rounding: float, what: str) -> None:
    """Check that a sharded training came to the numbers of a plain one.

    What each replica holds differs, and names of layers count on.

    Args:
        plain: Result of `train`.
        numbers: Result of `train` in another way.
        tolerance: Most that values differ, relative to the largest of their variable.
        rounding: Most that values differ that are zero but for rounding.
        what: Name for messages.
    """
    # Processes without a scope have histories of their own, and their first weights are not known
    # before they train.
    names = [
        name
        for name in plain
        if not name.startswith("held")
        and (name in numbers or not name.startswith(("history", "first")))
    ]
    compared = {name: value for name, value in numbers.items() if not name.startswith("held")}
    assert len(compared) == len(names)
    for name, value in zip(names, compared.values(), strict=True):
        largest = np.abs(plain[name]).max(initial=0.0)
        limit = (
            rounding
            if any(zero in name for zero in ZEROS)
            else max(2 * tolerance, OF_KERNELS) * largest
            if SQUARES in name
            else tolerance * largest
        )
        np.testing.assert_allclose(
            value, plain[name], rtol=0, atol=limit, err_msg=f"{what}: {name}"
        )


def left_alone(strategy: tf.distribute.Strategy, directory: pathlib.Path) -> dict[str, str]:
    """Check an export and the errors of workers without a scope, and of the chief without others.

    Afterwards the chief can train no more.

    Args:
        strategy: On several workers, one replica each.
        directory: Directory that all processes reach.
    """
    placement = strategy.tfdist_engine.placement
    done = directory / "left-alone"
    keras.utils.set_random_seed(7 + placement.rank)
    x = np.ones([4, 5], "float32")
    messages = {}
    model = mlp()
    before = model.get_weights()
    shards = fsdp(model, gather_dtype="bfloat16", strategy=strategy)
    after = model.get_weights()
    assert shards.bytes_per_step == 0  # nobody has made a step
    assert not placement.is_chief or all(
        np.array_equal(a, b) for a, b in zip(before, after, strict=True)
    )
    model.compile("sgd", "mse", jit_compile=False)
    model.export(directory / "exported", verbose=False)
    backup = tfdist.BackupAndRestore(directory / "backup")
    try:
        model.fit(x, x[:, :3], verbose=0, callbacks=[backup])
    except ValueError as error:
        messages["of a backup"] = str(error)
    model = mlp()
    model.set_weights(after)
    if placement.is_chief:
        exported = tf.saved_model.load(str(directory / "exported"))
        np.testing.assert_allclose(exported.serve(x), model.predict(x, verbose=0), rtol=1e-6)
    model.compile(zero("sgd", strategy=strategy), "mse", jit_compile=True)
    try:
        model.fit(x, x[:, :3], verbose=0)
    except ValueError as error:
        messages["of XLA"] = str(error)
    model.compile(zero("sgd", strategy=strategy), "mse", jit_compile=False)
    model.fit(x, x[:, :3], verbose=0)
    if placement.is_chief:
        strategy.tfdist_engine.watchdog = Watchdog(3.0, placement)
        try:
            model.fit(x, x[:, :3], verbose=0)
        except TimeoutError as error:
            return {**messages, "of others": str(error)}
        finally:
            done.touch()
    end = time.monotonic() + 60
    while not done.exists() and time.monotonic() < end:
        time.sleep(0.1)
    return messages


def check_files(
    model,
    optimizer,
    case: Case,
    shard,
    scope: contextlib.AbstractContextManager,
    directory: pathlib.Path,
) -> None:
    """Check that a sharded model's file is a plain model's, and that sharded ones load it.

    Args:
        model: Trained model.
        optimizer: Optimizer of the model.
        case: Case that the model belongs to.
        shard: Function that shards a model.
        scope: Scope to make models in.
        directory: Directory that all processes reach.
    """
    file = directory / "model.keras"
    model.save(file)
    # Collectives: no worker goes on before the chief has written.
    weights = model.get_weights()
    state = [v.numpy() for v in optimizer.variables]
    plain = keras.models.load_model(file)
    for loaded, expected in zip(
        [*plain.get_weights(), *[v.numpy() for v in plain.optimizer.variables]],
        [*weights, *state],
        strict=True,
    ):
        np.testing.assert_array_equal(loaded, expected)
    expected = case.optimizer()
    assert [
        type(x) for x in (plain.optimizer, getattr(plain.optimizer, "inner_optimizer", None))
    ] == [type(x) for x in (expected, getattr(expected, "inner_optimizer", None))]
    if shard:
        with scope:
            keras.utils.set_random_seed(8)
            other = case.build()
            shard(other)
            other.compile(case.optimizer(), "mse", jit_compile=False)
            other.optimizer.build(other.trainable_weights)
            other.load_weights(file)
        for loaded, expected in zip(
            [*other.get_weights(), *[v.numpy() for v in other.optimizer.variables]],
            [*weights, *state],
            strict=True,
        ):
            np.testing.assert_array_equal(loaded, expected)


def main(name: str, devices: str, out: str, *names: str) -> None:
    """Train cases plain and in all ways, and write their numbers to a file."""
    strategy = tfdist.make_strategy(name, devices=None if devices == "-" else devices, timeout=60)
    results: dict = {}
    for case in names:
        if case == "left alone":
            results[case] = left_alone(strategy, pathlib.Path(out).parent)
            continue
        chosen = {**CASES, **FEATURES, **OF_PROCESSES}[case]
        for way in ("plain", *chosen.ways):
            try:
                begun = time.monotonic()
                results[case, way] = train(chosen, way, strategy, os.path.dirname(out))
                print(f"{case}, {way}: {time.monotonic() - begun:.1f} s", flush=True)
            except Exception:
                results[case, way] = traceback.format_exc()
                print(case, way, results[case, way], file=sys.stderr, flush=True)
                if name == "multi_worker_mirrored":
                    raise  # the other workers are elsewhere now, and wait
    pathlib.Path(out).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
