"""Test steps that XLA compiles on two replicas, beside the same steps without XLA.

Of three batches, the last one has a single row, and leaves a replica without rows.
"""

import logging
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.parity.cases import CROSSENTROPY, dataset
from tfdist.keras_compat import copies
from tfdist.parallel import fsdp, zero
from tfdist.sync import DiLoCo, Gradients
from tfdist.train.synchronous import engine

layers = keras.layers
ROWS = 25
BATCH = 12


@pytest.fixture
def warnings(caplog):
    """Return the warnings of tfdist so far."""
    caplog.set_level(logging.WARNING, "tfdist")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "tfdist"]


def words():
    random = np.random.default_rng(0)
    return random.integers(0, 20, (ROWS, 4), np.int32), random.integers(0, 3, ROWS, np.int32)


def numbers():
    random = np.random.default_rng(0)
    return random.normal(size=(ROWS, 6)).astype("float32"), random.integers(0, 3, ROWS, np.int32)


def whole_batches():
    """Return numbers for one device, which needs no uneven batch."""
    return tuple(array[: 2 * BATCH] for array in numbers())


def mlp(*middle):
    return keras.Sequential(
        [keras.Input([6]), layers.Dense(8, "tanh"), *(layer() for layer in middle), layers.Dense(3)]
    )


def embedding():
    return keras.Sequential(
        [keras.Input([4], dtype="int32"), layers.Embedding(20, 6), layers.Flatten()]
        + [layers.Dense(3)]
    )


def results(
    strategy, xla, build, optimizer="adam", data=numbers, policy=None, whole=False, **kwargs
):
    """Train, and evaluate and predict if `whole`; return a dictionary of numbers."""
    keras.utils.set_random_seed(1)
    strategy.tfdist_engine.use(policy or Gradients())
    try:
        with strategy.scope():
            model = build()
            made = optimizer() if callable(optimizer) else optimizer
            model.compile(made, CROSSENTROPY, metrics=["accuracy"], jit_compile=xla, **kwargs)
        x, y = data()
        found = dict(model.fit(dataset(x, y, batch=BATCH), epochs=2, verbose=0).history)
        if whole:
            found["evaluate"] = model.evaluate(x, y, batch_size=BATCH, verbose=0)
            found["predict"] = model.predict(x, batch_size=BATCH, verbose=0)
        return found | {f"weight {i}": w for i, w in enumerate(model.get_weights())}
    finally:
        strategy.tfdist_engine.use(Gradients())


def assert_equal(one, other, tolerance=1e-5):
    assert set(one) == set(other)
    for name, expected in one.items():
        np.testing.assert_allclose(
            other[name], expected, rtol=tolerance, atol=tolerance, err_msg=name
        )


@pytest.mark.parametrize(
    "case",
    [
        {
            "build": lambda: mlp(layers.BatchNormalization),
            "optimizer": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
            "steps_per_execution": 2,
            "whole": True,
        },
        {
            "build": embedding,
            "data": words,
            "optimizer": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
        },
        {"build": embedding, "data": words, "optimizer": lambda: zero("adam")},
        {"build": mlp, "policy": Gradients(accumulate=2, comm_dtype="bfloat16")},
        {"build": mlp, "policy": DiLoCo(every=2)},
    ],
    ids=["norms", "sparse", "zero", "accumulated", "diloco"],
)
def test_xla_gives_the_numbers_of_steps_without_it(mirrored, warnings, case):
    plain, xla = (results(mirrored, xla, **case) for xla in (False, True))
    assert_equal(plain, xla)
    assert not warnings()


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=8.0)


def test_mixed_precision_scales_the_loss_as_without_xla(mirrored, warnings):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        plain, xla = (results(mirrored, xla, mlp, scaled) for xla in (False, True))
    finally:
        keras.config.set_dtype_policy("float32")
    assert_equal(plain, xla, tolerance=2e-3)
    assert not warnings()


class Masks(keras.Model):
    """Train on rows that are all alike, and add up each replica's dropout masks in a metric."""

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.5, seed=3)
        self.dense = layers.Dense(1)
        self.drawn = keras.metrics.Sum(name="drawn")

    def call(self, x, training=False):
        return self.dense(self.dropout(x, training=training))

    def train_step(self, data):
        x, _ = data
        masks = self.dropout(tf.ones_like(x), training=True)
        powers = 2.0 ** tf.range(masks.shape[1], dtype=tf.float32)
        self.drawn.update_state(tf.linalg.matvec(masks, powers))
        return super().train_step(data)


class AsText(layers.Layer):
    """Compute what XLA has no kernel for."""

    def call(self, x):
        return x + 0.0 * tf.strings.to_number(tf.strings.as_string(x))


class OwnStep(keras.Model):
    """Update weights, then do what `after` says."""

    def __init__(self, after):
        super().__init__()
        self.after = after
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        for _ in range(2 if self.after == "update again" else 1):
            with tf.GradientTape() as tape:
                prediction = self(x)
                loss = self.compute_loss(x, y, prediction)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
        if self.after == "clip":
            self.dense.kernel.assign(tf.clip_by_value(self.dense.kernel.value, -0.1, 0.1))
        return {**self.compute_metrics(x, y, prediction), "own": loss}


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (
            lambda: mlp(lambda: layers.BatchNormalization(synchronized=True, name="together")),
            "it has a collective, all_reduce in .*together",
        ),
        (lambda: mlp(AsText), "XLA has no kernel for AsString .*as_text"),
        (lambda: OwnStep("clip"), "it uses .*kernel' after the optimizer.apply that sets it"),
        (lambda: OwnStep("update again"), "it uses .* after the optimizer.apply that sets it"),
    ],
    ids=["synchronized", "kernel", "clip", "updates"],
)
def test_a_step_that_xla_cannot_compile_runs_without_it(mirrored, warnings, build, reason):
    plain, xla = (results(mirrored, xla, build) for xla in (False, True))
    assert_equal(plain, xla, tolerance=0.0)
    (said,) = warnings()
    assert re.search(f"cannot compile train_step, which runs without it: {reason}", said), said


def test_a_step_of_its_own_is_compiled(mirrored, warnings):
    assert_equal(*(results(mirrored, xla, lambda: OwnStep("")) for xla in (False, True)))
    assert not warnings()


def test_many_shapes_of_batches_are_said_once(one_device, warnings):
    with one_device.scope():
        inputs = keras.Input([None, 1])
        model = keras.Model(inputs, layers.Dense(1)(inputs))
        model.compile("sgd", "mse", jit_compile=True)

    def batches(lengths):
        for length in lengths:
            yield np.ones([4, length, 1], "float32"), np.ones([4, length, 1], "float32")

    spec = tf.TensorSpec([None, None, 1], tf.float32)

    def fit(lengths):
        data = tf.data.Dataset.from_generator(
            lambda: batches(lengths), output_signature=(spec,) * 2
        )
        model.fit(data, verbose=0)

    fit(range(1, 5))
    fit(range(1, 5))
    assert not warnings()
    fit(range(5, 11))
    fit([11])
    (said,) = warnings()
    assert re.search(
        r"batches have had (9|10) shapes so far \(\[4 \d+ 1\] \[4 \d+ 1\], .*Pad", said
    )


def test_central_storage_refuses_xla():
    strategy = tfdist.make_strategy("central_storage", devices="cpu:0,cpu:1")
    with pytest.raises(ValueError, match=r"central_storage: compile\(jit_compile=True\).*=False"):
        results(strategy, True, mlp)


@pytest.fixture
def on_gpus(monkeypatch):
    """Let engines take their CPUs for GPUs, where `jit_compile="auto"` asks for XLA."""
    monkeypatch.setattr(engine, "device_type", lambda strategy: "GPU")


@pytest.mark.parametrize("name", ["one_device", "mirrored"])
def test_xla_is_the_default_on_gpus_and_replicas_draw_masks_of_their_own_by_it(
    name, request, on_gpus, warnings
):
    """XLA draws other numbers than TensorFlow, which shows that it has compiled the step."""
    strategy = request.getfixturevalue(name)
    drawn = {}
    for xla in (False, True, "auto"):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = Masks()
            model.compile("sgd", "mse", jit_compile=xla)
        model.fit(np.ones([8, 6]), np.ones([8, 1]), batch_size=8, verbose=0)
        drawn[xla] = [float(copy) for copy in copies(model.drawn.variables[0])]
        assert len(set(drawn[xla])) == strategy.num_replicas_in_sync
        state = model.dropout.seed_generator.state
        assert len({tuple(copy.numpy()) for copy in copies(state)}) == 1
    assert drawn["auto"] == drawn[True] != drawn[False]
    assert not warnings()


def test_the_choice_of_a_model_for_xla(one_device, on_gpus):
    asks = one_device.tfdist_engine.asks_for_xla
    with one_device.scope():
        model = mlp()
        assert asks(model)  # for predict, before compile
        model.compile("sgd", "mse")
        assert asks(model)
        copy = keras.models.clone_model(model)
        copy.compile_from_config(model.get_compile_config())
        assert asks(copy)
        model.compile("sgd", "mse", jit_compile=False)
        assert not asks(model)
        model.compile("sgd", "mse", run_eagerly=True)
        assert not asks(model)


@pytest.mark.parametrize(
    "build",
    [
        lambda: OwnStep("update again"),
        lambda: mlp(lambda: layers.BatchNormalization(synchronized=True)),
    ],
    ids=["updates", "synchronized"],
)
def test_xla_compiles_on_one_gpu_what_it_cannot_on_several(one_device, on_gpus, warnings, build):
    assert_equal(*(results(one_device, xla, build, data=whole_batches) for xla in (False, "auto")))
    assert not warnings()


def test_a_step_that_xla_cannot_compile_runs_by_default_without_it(one_device, on_gpus, warnings):
    options = {"build": lambda: mlp(AsText), "data": whole_batches, "whole": True}
    assert_equal(*(results(one_device, xla, **options) for xla in ("auto", False)))
    assert {re.match(r"jit_compile: XLA cannot compile (\w+),", w)[1] for w in warnings()} == {
        "train_step",
        "test_step",
        "predict_step",
    }


def test_a_model_whose_weights_are_sharded_runs_by_default_without_xla(mirrored, on_gpus, warnings):
    def sharded():
        model = mlp()
        fsdp(model)
        return model

    assert_equal(results(mirrored, "auto", sharded), results(mirrored, False, sharded))
    assert not warnings()


def test_central_storage_on_a_gpu_refuses_xla(on_gpus):
    central = tfdist.make_strategy("central_storage", devices="cpu")
    with pytest.raises(ValueError, match="strategy central_storage: compile"):
        results(central, True, mlp)
    with central.scope():
        model = mlp()
        model.compile("sgd", "mse")
    assert not central.tfdist_engine.asks_for_xla(model)
