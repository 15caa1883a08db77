"""Test that trainings on a GPU give the CPU's numbers; each setup has its own processes."""

from __future__ import annotations

import os
import pathlib
import pickle

import numpy as np
import pytest
import tensorflow as tf

from tests.parity.guide_cases import CASES
from tests.parity.sharded_cases import CASES as SHARDED
from tests.parity.sharded_cases import FEATURES, compare
from tests.parity.test_parity import REFUSED
from tests.processes import PYTHON, group, workers

TESTS = pathlib.Path(__file__).parents[1]
SPLIT = str(TESTS / "gpu" / "split_gpu.py")
RUNNER = str(TESTS / "parity" / "runner.py")
SETUPS = {  # name: strategy, devices, logical GPUs of a process, processes
    "one": ("one_device", "gpu:0", 1, 1),
    "mirrored-2": ("mirrored", "gpu", 2, 1),
    "central-2": ("central_storage", "gpu", 2, 1),
    "workers-2": ("multi_worker_mirrored", "gpu", 1, 2),
}
OF_WORKERS = (
    "sequential",
    "embedding_with_repeated_ids",
    "recurrent_with_masking",
    "synchronized_batch_normalization",
    "convolution_with_regularization",
    "steps_per_execution",
    "uneven_last_batch",
    "clip_by_global_norm",
    "mixed_float16",
    "evaluate_and_predict",
    "compiled_by_xla",
)
# A GPU sums in another order, and computes convolutions by other algorithms.
TOLERANCE = 2e-4
OF_16_BITS = 2e-2
TIMEOUT_S = 500

# `processes.environment` hides GPUs from tests that need none; show again all that this process
# sees.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")
    or ",".join(str(i) for i in range(16)),
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}
gpus = len(tf.config.list_physical_devices("GPU"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(gpus < 1, reason="needs a GPU that TensorFlow sees"),
]


def cases():
    """Return (setup, case) for all that is compared with the CPU."""
    return [
        (setup, case)
        for setup in SETUPS
        for case in (OF_WORKERS if setup.startswith("workers") else CASES)
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the numbers of a setup's processes, {case: numbers} each; all run at once."""
    directory = tmp_path_factory.mktemp("results")
    with group(tmp_path_factory.mktemp("logs")) as members:
        members.start("cpu", [PYTHON, RUNNER, "one_device", "cpu", str(directory / "cpu-0")])
        for name, (strategy, devices, parts, processes) in SETUPS.items():
            out = str(directory / f"{name}-{{index}}")
            command = [PYTHON, SPLIT, str(parts), RUNNER, strategy, devices, out]
            if processes > 1:
                workers(members, processes, [*command, *OF_WORKERS], **ENVIRONMENT)
            else:
                members.start(name, [c.format(index=0) for c in command], **ENVIRONMENT)
        members.succeed(TIMEOUT_S)
    return {
        name: [pickle.loads(file.read_bytes()) for file in sorted(directory.glob(f"{name}-*"))]
        for name in ("cpu", *SETUPS)
    }


@pytest.mark.parametrize(("setup", "case"), cases())
def test_equals_the_cpu(results, setup, case):
    expected = results["cpu"][0][case]
    tolerance = OF_16_BITS if case.startswith("mixed") else TOLERANCE
    assert len(results[setup]) == SETUPS[setup][3]
    for numbers in (process[case] for process in results[setup]):
        if (setup, case) in REFUSED:
            assert REFUSED[setup, case] in numbers
            continue
        assert not isinstance(numbers, str), numbers
        assert set(numbers) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(
                numbers[name], value, rtol=tolerance, atol=tolerance, err_msg=f"{case}: {name}"
            )


ONE = """
import keras, numpy as np
import tfdist

strategy = tfdist.make_strategy("one_device")
with strategy.scope():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
    model.compile("adam", "mse")
print("XLA compiles:", strategy.tfdist_engine.asks_for_xla(model))
model.fit(np.ones([8, 4]), np.ones([8, 2]), verbose=0)
print(*(b.device for b in tfdist.data.pipeline(np.arange(8), 4, device="/gpu:0")))
"""


def test_one_gpu_uses_xla_and_gets_batches_ahead_of_time(tmp_path):
    with group(tmp_path) as members:
        members.start("process", [PYTHON, "-c", ONE], **ENVIRONMENT)
        members.succeed(TIMEOUT_S)
        log = members.log("process")
        assert "XLA compiles: True" in log
        assert "XLA cannot compile" not in log
        assert log.count("device:GPU:0") == 2


NO_ROWS = """
import numpy as np
import tfdist
from tests.unit.keras_compat.test_empty_batches import CASES, results

strategy = tfdist.make_strategy("mirrored", devices="gpu")
for name, case in CASES.items():
    expected = results(strategy, *case, 3)
    y, of_x, of_kernel = results(strategy, *case, 0)
    assert y.shape == (0, *expected[0].shape[1:]), name
    assert of_x.shape == (0, *expected[1].shape[1:]), name
    np.testing.assert_array_equal(of_kernel, np.zeros_like(expected[2]), err_msg=name)
print("all right")
"""


def test_batches_without_rows(tmp_path):
    script = tmp_path / "no_rows.py"
    script.write_text(NO_ROWS)
    with group(tmp_path) as members:
        members.start("process", [PYTHON, SPLIT, "2", str(script)], **ENVIRONMENT)
        members.succeed(TIMEOUT_S)
        assert "all right" in members.log("process")


def test_sharded_training_equals_plain_training(tmp_path):
    """Compare ZeRO stages 1 to 3 with plain data parallel training on the same logical GPUs."""
    runner = str(TESTS / "parity" / "sharded_cases.py")
    names = (*SHARDED, *FEATURES)
    with group(tmp_path) as members:
        command = [PYTHON, SPLIT, "2", runner, "mirrored", "gpu", str(tmp_path / "out"), *names]
        members.start("process", command, **ENVIRONMENT)
        members.succeed(TIMEOUT_S)
    results = pickle.loads((tmp_path / "out").read_bytes())
    for (case, way), numbers in results.items():
        assert not isinstance(numbers, str), f"{case}, {way}: {numbers}"
        facts = {**SHARDED, **FEATURES}[case]
        rounding = 1e-5 if case == "bfloat16" else 1e-8
        compare(results[case, "plain"], numbers, facts.tolerance, rounding, f"{case}, {way}")


STAGES = """
import keras, numpy as np, tensorflow as tf
from tfdist.parallel import pipeline

x = np.random.default_rng(0).normal(size=(24, 8)).astype("float32")
y = x[:, :2] * 2
found = []
for stages in (0, 2):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "tanh") for _ in range(4)]
    model = keras.Sequential([keras.Input([8]), *layers, keras.layers.Dense(2)])
    if stages:
        model = pipeline(model, stages, microbatches=3, devices=["gpu:0", "gpu:1"])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    losses = model.fit(x, y, batch_size=12, epochs=3, shuffle=False, verbose=0).history["loss"]
    found.append(losses)
    print(losses, sorted({w.value.device for w in model.trainable_variables}))
np.testing.assert_allclose(*found, rtol=1e-4)
print("equal")
"""


def test_a_pipeline_on_gpus_trains_as_the_model(tmp_path):
    script = tmp_path / "stages.py"
    script.write_text(STAGES)
    with group(tmp_path) as members:
        members.start("process", [PYTHON, SPLIT, "2", str(script)], **ENVIRONMENT)
        members.succeed(TIMEOUT_S)
        log = members.log("process")
        assert "equal" in log
        assert "GPU:0" in log
        assert "GPU:1" in log


KEPT = """
import pathlib, sys
import keras, numpy as np
import tfdist

strategy = tfdist.make_strategy("mirrored", devices="gpu")
directory, stop = pathlib.Path(sys.argv[1]), int(sys.argv[2])
keras.utils.set_random_seed(0)

class End(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if stop and int(self.model.optimizer.iterations) == stop:
            import os; os._exit(9)

x = np.random.default_rng(0).normal(size=(48, 8)).astype("float32")
with strategy.scope():
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.3), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input([8]), *layers])
    model.compile(keras.optimizers.Adam(0.01), "mse")
callbacks = [tfdist.BackupAndRestore(directory, save_freq=2), End()]
model.fit(x, x[:, :2], batch_size=12, epochs=3, verbose=0, callbacks=callbacks)
np.savez(directory.with_suffix(".npz"), *model.get_weights())
"""


def test_an_interrupted_training_on_gpus_ends_with_the_same_weights(tmp_path):
    """Compare to rounding: a GPU's sums differ from run to run."""
    script = tmp_path / "kept.py"
    script.write_text(KEPT)
    command = [PYTHON, SPLIT, "2", str(script)]
    with group(tmp_path) as members:
        members.start("whole", [*command, str(tmp_path / "whole"), "0"], **ENVIRONMENT)
        broken = members.start("broken", [*command, str(tmp_path / "cut"), "7"], **ENVIRONMENT)
        assert broken.wait(TIMEOUT_S) == 9, members.log("broken")
        members.start("broken", [*command, str(tmp_path / "cut"), "0"], **ENVIRONMENT)
        members.succeed(TIMEOUT_S)
    whole, cut = (np.load(tmp_path / f"{name}.npz") for name in ("whole", "cut"))
    for name in whole:
        np.testing.assert_allclose(cut[name], whole[name], rtol=1e-5, atol=1e-7)
