"""Test that products with a sharded kernel equal those with a whole one, and send fewer bytes."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.parallel import fsdp
from tfdist.parallel.sharding import few_rows, layer_products
from tfdist.parallel.sharding.layer_products import products_of
from tfdist.parallel.sharding.product_costs import Product

ROWS = 25  # of which the last batch of 8 has one: a replica has none
MANY = 10**6  # rows that are more bytes than any kernel here


@pytest.fixture(autouse=True)
def small_kernels(monkeypatch):
    monkeypatch.setattr(layer_products, "MIN_VALUES", 1)


class Block(keras.layers.Layer):
    """Use kernels in every way: in products, in a branch, and read."""

    def __init__(self):
        super().__init__()
        self.wide = keras.layers.Dense(64, "relu")
        self.narrow = keras.layers.Dense(16)
        self.frozen = keras.layers.Dense(16, trainable=False)
        self.branch = keras.layers.Dense(16)

    def build(self, shape):
        for layer in (self.wide, self.frozen, self.branch):
            layer.build(shape)
        self.narrow.build((*shape[:-1], 64))
        self.built = True

    def call(self, x):
        inside = self.narrow(self.wide(x)) + self.frozen(x)
        # On a replica without rows, the sum is 0.
        branch = tf.cond(
            tf.reduce_sum(x) > 0, lambda: self.branch(x), lambda: 2 * self.branch(x + 1)
        )
        return x + inside + branch + keras.ops.mean(self.wide.kernel)


def block():
    return [Block()]


def attention():
    return [
        keras.layers.EinsumDense("abc,cde->abde", (4, 4, 8), bias_axes="de"),
        keras.layers.EinsumDense("abde,def->abf", (4, 16)),
    ]


def dense():
    return [keras.layers.Dense(16)]


def fitted(model, x, y):
    return model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["loss"]


def trained(
    strategy,
    layers,
    policy="float32",
    many=False,
    optimizer="adam",
    fit=fitted,
    predicts=False,
    **options,
):
    """Return numbers of a trained model, and the `FSDP` object if the model is sharded.

    Args:
        strategy: Strategy of the replicas.
        layers: Function that returns the first layers, which map `[4, 16]` to any shape.
        policy: Policy of dtypes.
        many: Whether kernels are gathered, as for many rows; None: the model is not sharded.
        optimizer: Name of the optimizer.
        fit: Function that trains the model with arrays, and returns losses.
        predicts: Whether the numbers include predictions, beside losses and weights.
        **options: Arguments of `fsdp`.
    """
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 4, 16)).astype("float32")
    y = random.normal(size=(ROWS, 3)).astype("float32")
    keras.utils.set_random_seed(3)
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy(policy)
    try:
        with strategy.scope():
            outputs = inputs = keras.Input([4, 16])
            for layer in [*layers(), keras.layers.Flatten(), keras.layers.Dense(64, "tanh")]:
                outputs = layer(outputs)
            model = keras.Model(inputs, keras.layers.Dense(3, dtype="float32")(outputs))
            shards = None
            if many is not None:
                shards = fsdp(model, batch_per_replica=MANY if many else 1, **options)
            model.compile(optimizer, "mse")
    finally:
        keras.mixed_precision.set_dtype_policy(before)
    numbers = [fit(model, x, y), *model.get_weights()]
    if predicts:
        numbers.append(model.predict(x[:9], batch_size=8, verbose=0))
    return numbers, shards


@functools.cache
def whole(strategy, layers, policy, predicts):
    """Return numbers of a trained model that is not sharded."""
    return trained(strategy, layers, policy, many=None, predicts=predicts)[0]


def sent_by_products(shards):
    return {name for name in shards._gathering.forward_group.bytes if " product " in name}


def assert_close(numbers, expected, tolerance=5e-6):
    for value, other in zip(numbers, expected, strict=True):
        np.testing.assert_allclose(value, other, atol=tolerance)


@pytest.mark.parametrize(
    ("layers", "kept", "whole_bytes"),
    [
        (attention, False, set()),
        # Half of the kernels of `branch` and of `wide`, which is read, too.
        (block, False, {4 * 16 * 16 // 2, 4 * 16 * 64 // 2}),
        (block, True, {4 * 16 * 16 // 2, 4 * 16 * 64 // 2}),
    ],
)
def test_training_equals_that_of_whole_kernels_and_few_are_gathered(
    mirrored, layers, kept, whole_bytes
):
    predicts = layers is attention
    expected = whole(mirrored, layers, "float32", predicts)
    numbers, shards = trained(mirrored, layers, reshard_after_forward=not kept, predicts=predicts)
    assert_close(numbers, expected)
    assert sent_by_products(shards)
    # Those whose layer is called in a branch, and those that are read.
    sent = shards._gathering.forward_group.bytes
    gathered = {c for name, c in sent.items() if "product" in name and name.endswith(" 0")}
    assert gathered == whole_bytes


@pytest.mark.parametrize(
    ("policy", "kept"), [("float32", False), ("float32", True), ("mixed_bfloat16", False)]
)
def test_gathered_kernels_are_multiplied_by_few_rows(mirrored, monkeypatch, policy, kept):
    expected = whole(mirrored, block, policy, False)
    monkeypatch.setattr(few_rows, "MAX_ROWS", 10 * MANY)
    shapes = set()
    product = few_rows.WholeKernel.product

    def noted(self, x, axes):
        shapes.add(tuple(self.whole().shape))
        return product(self, x, axes)

    monkeypatch.setattr(few_rows.WholeKernel, "product", noted)
    numbers, shards = trained(mirrored, block, policy, many=True, reshard_after_forward=not kept)
    # Also the frozen kernel, and that of the layer in a branch.
    assert shapes == {(16, 64), (64, 16), (16, 16), (64, 64), (64, 3)}
    assert_close(numbers, expected, 5e-6 if policy == "float32" else 0.05)
    assert not sent_by_products(shards)


class Masked(keras.layers.Layer):
    """Multiply only rows whose first value is larger than others; sometimes there are none."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(16)

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        chosen = x[..., 0] > tf.reduce_mean(x, axis=-1) + 0.6
        kept = self.dense(tf.boolean_mask(x, chosen))
        return x + tf.tensor_scatter_nd_add(tf.zeros_like(x), tf.where(chosen), kept)


def test_rows_that_are_chosen_by_their_values(one_device, mirrored):
    """Even batches give the replicas different numbers of rows then, and sometimes no rows."""

    def fit(model, x, y):
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(2, drop_remainder=True)
        return model.fit(data, epochs=2, verbose=0).history["loss"]

    expected, _ = trained(one_device, lambda: [Masked()], many=None, fit=fit)
    numbers, shards = trained(mirrored, lambda: [Masked()], fit=fit)
    assert sum("product" in name and "rows" in name for name in sent_by_products(shards)) == 3
    assert_close(numbers, expected)


def test_four_replicas(mirrored):
    four = tfdist.make_strategy("mirrored", devices=4)
    numbers, shards = trained(four, attention)
    assert sent_by_products(shards)
    assert_close(numbers, whole(mirrored, attention, "float32", True)[:-1])


@pytest.mark.parametrize(
    ("policy", "options", "tolerance"),
    [
        # The kernels are rounded alike, and the gradients not at all.
        ("float32", {"gather_dtype": "bfloat16"}, 1e-5),
        ("mixed_bfloat16", {}, 0.03),
        ("mixed_float16", {}, 0.005),
    ],
)
def test_gradients_are_those_of_gathered_kernels(mirrored, policy, options, tolerance):
    """The weights move by the gradients of one step, of a batch of 7 rows: 4 and 3."""

    def fit(model, x, y):
        before = model.get_weights()
        model.fit(x[:7], y[:7], batch_size=8, verbose=0)
        return [a - b for a, b in zip(model.get_weights(), before, strict=True)]

    (gathered, *_), of_gathered = trained(mirrored, dense, policy, True, "sgd", fit, **options)
    (found, *_), shards = trained(mirrored, dense, policy, False, "sgd", fit, **options)
    assert sent_by_products(shards)
    assert not sent_by_products(of_gathered)
    for value, other in zip(found, gathered, strict=True):
        np.testing.assert_allclose(value, other, rtol=0, atol=tolerance * np.abs(other).max())


def test_loops_of_the_users_own_get_the_same_gradients(one_device, mirrored):
    def fit(strategy, model, x, y):
        # The last batch has one row.
        data = strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        )

        @tf.function(input_signature=data.element_spec)
        def step(x, y):
            def on_replica(x, y):
                with tf.GradientTape() as tape:
                    squares = tf.reduce_sum((model(x, training=True) - y) ** 2, axis=1)
                    loss = tf.nn.compute_average_loss(squares, global_batch_size=8)
                gradients = tape.gradient(loss, model.trainable_variables)
                model.optimizer.apply_gradients(
                    zip(gradients, model.trainable_variables, strict=True)
                )
                return loss

            return strategy.reduce("SUM", strategy.run(on_replica, (x, y)), axis=None)

        return [float(step(*rows)) for rows in data]

    expected, _ = trained(one_device, dense, many=None, fit=functools.partial(fit, one_device))
    numbers, shards = trained(mirrored, dense, fit=functools.partial(fit, mirrored))
    assert sent_by_products(shards)
    assert_close(numbers, expected)


def arrays(x, y):
    return {"x": x, "y": y, "batch_size": 8}


def dropped(x, y):
    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)}


def pipeline(x, y):
    return {"x": tfdist.data.pipeline((x, y), global_batch=8)}


def unknown(x, y):
    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(8)}


def generator(x, y):
    return {"x": ((x[i : i + 8], y[i : i + 8]) for i in (0, 8))}


@pytest.mark.parametrize(
    ("data", "multiplies"),
    [(arrays, True), (dropped, True), (pipeline, True), (unknown, False), (generator, False)],
)
def test_the_data_of_fit_tell_the_rows(mirrored, data, multiplies):
    with mirrored.scope():
        model = keras.Sequential(
            [keras.Input([64]), keras.layers.Dense(64, "relu"), keras.layers.Dense(3)]
        )
        shards = fsdp(model)
        model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 64)).astype("float32"), rng.normal(size=(24, 3)).astype("float32")
    model.fit(**data(x, y), verbose=0)
    # Of 4 rows on each replica, those of the kernel `[64, 64]` are fewer bytes.
    sent = shards._gathering.forward_group.bytes
    counts = [sent[name] for name in sent_by_products(shards) if "scale" not in name]
    # Half of the inputs, and the results of both replicas, forward and backward.
    assert counts == ([2 * 4 * (64 // 2 + 64) * 4] if multiplies else [])


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: keras.layers.Dense(5), 1),
        (lambda: keras.layers.MultiHeadAttention(2, 4), 4),
        (lambda: keras.layers.EinsumDense("abc,dc->abd", (6, 16)), 0),
        (lambda: keras.layers.TimeDistributed(keras.layers.Dense(4)), 0),
        (lambda: keras.layers.LSTM(4, return_sequences=True), 0),
        (lambda: keras.layers.Dense(4, lora_rank=2), 0),
        (lambda: keras.layers.Dense(4, kernel_regularizer="l2"), 0),
        (lambda: keras.layers.Dense(4, kernel_constraint="non_neg"), 0),
        (lambda: type("Own", (keras.layers.Dense,), {})(4), 0),
        (lambda: keras.layers.Conv1D(4, 1), 0),
    ],
    ids=[
        "dense",
        "attention",
        "transposed",
        "wrapper",
        "rnn",
        "lora",
        "regularizer",
        "constraint",
        "subclass",
        "convolution",
    ],
)
def test_kernels_that_need_not_be_whole(mirrored, make, count):
    layer = make()
    with mirrored.scope():
        x = keras.Input([6, 16])
        attention = isinstance(layer, keras.layers.MultiHeadAttention)
        model = keras.Model(x, keras.layers.Dense(2)(layer(x, x) if attention else layer(x)))
        fsdp(model)
    assert len(products_of(layer, 2)) == count
    assert not products_of(layer, 3)  # 16 rows of a kernel cannot be divided


def test_small_kernels_are_gathered(mirrored, monkeypatch):
    layer = keras.layers.Dense(4)
    with mirrored.scope():
        layer.build([None, 6, 16])
    products = {id(layer.kernel): Product(16, 4, rows_per_example=6)}
    assert products_of(layer, 2) == products
    inner = Block()
    with mirrored.scope():
        inner.build([None, 6, 16])
    # It has 64 inputs, and as many rows as the outer layer.
    assert products_of(inner, 2)[id(inner.narrow.kernel)] == Product(64, 16, rows_per_example=6)
    monkeypatch.setattr(layer_products, "MIN_VALUES", 4 * 16 + 1)
    assert not products_of(layer, 2)


def test_the_length_of_a_sequence_is_that_for_which_the_layer_was_built(mirrored):
    """Processes with data of their own may have other lengths in a step."""
    with mirrored.scope():
        layer = keras.layers.Dense(4)
        layer.build([None, None, 16])
    assert not products_of(layer, 2)
    with mirrored.scope():
        joined = keras.layers.MultiHeadAttention(2, 4)
        joined.build([None, 6, 16], [None, None, 16])
    assert {product.rows_per_example for product in products_of(joined, 2).values()} == {6}


def test_predict_tells_the_rows_and_validation_may_have_more(mirrored):
    def products(method, rows, **arguments):
        with mirrored.scope():
            model = keras.Sequential([keras.Input([64]), keras.layers.Dense(64)])
            shards = fsdp(model)
            model.compile("sgd", "mse")
        getattr(model, method)(np.ones([rows, 64], "float32"), **arguments, verbose=0)
        return bool(sent_by_products(shards))

    # Of up to 21 rows on each replica, those of the kernel `[64, 64]` are fewer bytes.
    assert products("predict", 40, batch_size=40)
    assert not products("predict", 44, batch_size=44)
    y = np.ones([64, 64], "float32")
    assert products("fit", 64, y=y, batch_size=8, validation_data=(y, y), validation_batch_size=40)
    assert not products(
        "fit", 64, y=y, batch_size=8, validation_data=(y, y), validation_batch_size=44
    )


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "4"])
def test_a_wrong_number_of_examples_is_an_error(mirrored, value):
    with mirrored.scope():
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(2)])
        with pytest.raises(ValueError, match="fsdp: batch_per_replica: expected None or a number"):
            fsdp(model, batch_per_replica=value)
    assert not any(hasattr(v, "tfdist_shape") for v in model.weights)
