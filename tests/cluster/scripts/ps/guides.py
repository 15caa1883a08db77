"""Train the models of Keras' guides on parameter servers, and compare them with one device.

Steps that XLA compiles are compared, too. With one worker the steps have the order of the data, so
that the numbers are those of one device.
"""

import functools
import os

import keras
import numpy as np

import tfdist
from tests.cluster.scripts.ps.xla import is_compiled
from tests.parity import guide_cases
from tests.parity.cases import CROSSENTROPY, data, dataset, fitted
from tests.parity.guide_cases import CASES

GUIDES = {}


@functools.cache
def one_device():
    """Return a strategy of this process alone, which sees no cluster."""
    del os.environ["TF_CONFIG"]
    return tfdist.make_strategy("one_device", devices="cpu")


def equal(case, strategy):
    same(CASES[case](one_device()), CASES[case](strategy))


def same(expected, found, relative=1e-4, absolute=1e-5):
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=relative, atol=absolute, err_msg=name)


for _case, _function in CASES.items():
    if _function.__module__ == guide_cases.__name__:
        GUIDES[_case] = functools.partial(equal, _case)


class LargestSoFar(keras.layers.Layer):
    """Divide by the largest value so far, which the call sets first."""

    def build(self, shape):
        self.largest = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x):
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(keras.ops.abs(x))))
        return x / keras.ops.cast(self.largest, x.dtype)


def numbers(strategy, optimizer, policy, **compiled):
    """Return the numbers of a model with statistics, a table, regularizers and weighted rows."""
    layers = keras.layers
    keras.utils.set_random_seed(1)
    x, labels = data(28)
    ids = np.arange(len(x)) % 5
    keras.config.set_dtype_policy(policy)
    try:
        with strategy.scope():
            inputs, words = keras.Input((6,)), keras.Input((), dtype="int32")
            dense = layers.Dense(8, "gelu", kernel_regularizer="l2")(inputs)
            both = layers.Concatenate()([dense, layers.Embedding(5, 4)(words)])
            normal = layers.BatchNormalization(momentum=0.5)(both)
            outputs = layers.Dense(3, dtype="float32")(LargestSoFar(dtype="float32")(normal))
            model = keras.Model([inputs, words], outputs)
            model.compile(
                optimizer(),
                CROSSENTROPY,
                metrics=["accuracy"],
                weighted_metrics=["accuracy"],
                **compiled,
            )
    finally:
        keras.config.set_dtype_policy("float32")
    train = dataset((x, ids), labels, 1.0 + ids, batch=8)
    result = fitted(model, train, epochs=2, validation_data=train, watch=False)
    result["predict"] = model.predict((x, ids), batch_size=8, verbose=0)
    if compiled["jit_compile"] and strategy is not one_device():
        functions = (model.train_function, model.test_function, model.predict_function)
        assert all(map(is_compiled, functions))
    return result


def compiled_by_xla(optimizer, policy, strategy):
    same(
        numbers(one_device(), optimizer, policy, jit_compile=False),
        numbers(strategy, optimizer, policy, jit_compile=True),
        # XLA rounds less often to the smaller types.
        *(() if policy == "float32" else (2e-2, 2e-2)),
    )


for _name, _optimizer, _policy in (
    ("adam", lambda: keras.optimizers.Adam(0.01, clipnorm=1.0), "float32"),
    ("accumulating", lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "float32"),
    ("mixed_float16", lambda: keras.optimizers.SGD(0.1, momentum=0.9), "mixed_float16"),
):
    GUIDES[f"xla_{_name}"] = functools.partial(compiled_by_xla, _optimizer, _policy)
