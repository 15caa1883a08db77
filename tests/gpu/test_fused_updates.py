"""Test that fused updates on a GPU equal those of Keras there, in a process of their own."""

from __future__ import annotations

import pytest

from tests.gpu.test_gpu import ENVIRONMENT, TIMEOUT_S, gpus
from tests.processes import PYTHON, group
from tests.unit.keras_compat.test_fused_updates import FUSED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(gpus < 1, reason="needs a GPU that TensorFlow sees"),
]

CODE = """
import keras, numpy as np, tensorflow as tf
import tfdist
from tests.unit.keras_compat.test_fused_updates import (
    FUSED, expected_kernels, kernels, made, of_keras
)

strategy = tfdist.make_strategy("one_device", devices="gpu:0")
for name, (cls, options, kernel) in FUSED.items():
    states = []
    for each in (cls, of_keras(cls)):
        with strategy.scope():
            weights = [keras.Variable(np.linspace(-1, 1, n), dtype="float32") for n in (5, 2**20)]
            optimizer = made(each, **options)
            optimizer.build(weights)
        assert all("GPU" in v.value.device for v in (*weights, *optimizer.variables[2:]))

        @tf.function(autograph=False)
        def step(number):
            grads = [tf.random.stateless_normal(v.shape, [number, 0]) for v in weights]
            strategy.run(lambda: optimizer.apply(grads, weights))

        for number in range(6):
            step(tf.constant(number))
        found = kernels(step.get_concrete_function(tf.constant(0)))
        assert found == (expected_kernels(options, kernel) if each is cls else set()), found
        states.append([v.numpy() for v in (*weights, *optimizer.variables)])
    for fused, unfused in zip(*states, strict=True):
        np.testing.assert_allclose(fused, unfused, rtol=1e-4, atol=1e-6, err_msg=name)
    print(name, "equal")
"""


def test_kernels_of_a_gpu_equal_keras(tmp_path):
    with group(tmp_path) as members:
        members.start(
            "process",
            [PYTHON, "-c", CODE],
            **ENVIRONMENT,
        )
        members.succeed(TIMEOUT_S)
        assert members.log("process").count("equal") == len(FUSED)
