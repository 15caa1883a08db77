"""Test that trainings on real GPUs give the CPU's numbers; each setup has its own process."""

from __future__ import annotations

import os
import pathlib
import pickle

import numpy as np
import pytest
import tensorflow as tf

from tests.parity.sharded_cases import compare
from tests.processes import PYTHON, group

RUNNER = str(pathlib.Path(__file__).parents[1] / "parity" / "runner.py")
CASES = (
    "sequential",
    "convolution_with_regularization",
    "embedding_with_repeated_ids",
    "uneven_last_batch",
    "evaluate_and_predict",
    "mixed_float16",
)
SETUPS = {  # name: strategy, devices
    "one": ("one_device", "gpu:0"),
    "mirrored": ("mirrored", "gpu"),
    "central": ("central_storage", "gpu"),
    "workers": ("multi_worker_mirrored", "gpu"),
}
REFUSED = {("central", "mixed_float16")}  # Keras applies a LossScaleOptimizer in a replica only
# A GPU sums in another order, and convolves and multiplies in TensorFloat-32, whose rounding is
# 2^-11.
TOLERANCE = {"mixed_float16": 2e-2}
TIMEOUT_S = 400

# `processes.environment` hides GPUs from tests that need none; show again all that this process
# sees.
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(i) for i in range(16))
gpus = len(tf.config.list_physical_devices("GPU"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(gpus < 1, reason="needs a GPU that TensorFlow sees"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the numbers of all cases under a strategy on some devices; each runs once."""
    done = {}

    def run(strategy, devices):
        if (strategy, devices) not in done:
            directory = tmp_path_factory.mktemp(strategy)
            with group(directory) as members:
                command = [PYTHON, RUNNER, strategy, devices, str(directory / "out"), *CASES]
                members.start(
                    "process",
                    command,
                    CUDA_VISIBLE_DEVICES=VISIBLE,
                    TF_FORCE_GPU_ALLOW_GROWTH="true",
                )
                members.succeed(TIMEOUT_S)
            done[strategy, devices] = pickle.loads((directory / "out").read_bytes())
        return done[strategy, devices]

    return run


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_cpu(run, setup, case):
    expected = run("one_device", "cpu")[case]
    numbers = run(*SETUPS[setup])[case]
    if (setup, case) in REFUSED:
        assert "central_storage: a LossScaleOptimizer" in numbers
        return
    assert not isinstance(numbers, str), numbers
    assert set(numbers) == set(expected)
    tolerance = TOLERANCE.get(case, 5e-3)
    for name, value in expected.items():
        np.testing.assert_allclose(
            numbers[name], value, rtol=tolerance, atol=tolerance, err_msg=f"{case}: {name}"
        )


def test_batches_are_copied_ahead_of_time(tmp_path):
    code = (
        "import numpy as np; from tfdist import data; print(*(b.device for b in "
        "data.pipeline(np.arange(8), 4, device='/gpu:0')))"
    )
    with group(tmp_path) as members:
        members.start(
            "process",
            [PYTHON, "-c", code],
            CUDA_VISIBLE_DEVICES=VISIBLE,
            TF_FORCE_GPU_ALLOW_GROWTH="true",
        )
        members.succeed(TIMEOUT_S)
        assert members.log("process").count("device:GPU:0") == 2


@pytest.mark.skipif(gpus < 2, reason="needs two GPUs that TensorFlow sees")
def test_sharded_training_equals_plain_training(tmp_path):
    """Compare ZeRO stages 1 to 3 with plain data parallel training on the same GPUs."""
    runner = pathlib.Path(RUNNER).with_name("sharded_cases.py")
    cases = ("mlp sgd", "cnn rmsprop", "transformer adamw")
    with group(tmp_path) as members:
        command = [PYTHON, str(runner), "mirrored", "gpu:0,gpu:1", str(tmp_path / "out"), *cases]
        members.start(
            "process", command, CUDA_VISIBLE_DEVICES=VISIBLE, TF_FORCE_GPU_ALLOW_GROWTH="true"
        )
        members.succeed(TIMEOUT_S)
    results = pickle.loads((tmp_path / "out").read_bytes())
    for (case, way), numbers in results.items():
        assert not isinstance(numbers, str), numbers
        compare(results[case, "plain"], numbers, 2e-3, 2e-3, f"{case}, {way}")
