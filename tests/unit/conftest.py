"""Provide fixtures that several unit tests share."""

import subprocess
import sys

import numpy as np
import pytest

from tests import processes
from tests.forkserver import OFF, Popen
from tests.processes import ROOT, environment


def environ_for(code):
    """Return the environment of a process; code that looks at `sys.modules` gets a fresh one.

    TensorFlow counts the memory of a CPU where it uses oneDNN.
    """
    counts = "get_memory_info" in code or "peak_bytes" in code
    return environment(
        **({OFF: "1"} if "sys.modules" in code else {}),
        **({"TF_ENABLE_ONEDNN_OPTS": "1"} if counts else {}),
    )


@pytest.fixture(scope="session")
def run_python():
    """Run Python code in a process of its own, with these command-line arguments."""

    def run(code, *words):
        return processes.run([sys.executable, "-c", code, *words], cwd=ROOT, env=environ_for(code))

    return run


@pytest.fixture(scope="session")
def run_python_twice():
    """Run Python code in two processes at the same time; return their output and errors."""

    def run(code, *words):
        both = [
            Popen(
                [sys.executable, "-c", code, *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=environ_for(code),
            )
            for _ in range(2)
        ]
        return [process.communicate(timeout=300) for process in both]

    return run


@pytest.fixture(scope="session", autouse=True)
def logical_devices():
    """Configure four CPU devices for all tests of this process.

    TensorFlow takes them only before its start: test files make no tensor while they are imported.
    """
    tf = sys.modules.get("tensorflow")  # where no test file imports it, nothing is waited for
    if tf is not None:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 4
        )
        # A sixth of the time of small models goes into graphs that run a few times only. The graphs
        # of other tests are optimized.
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


@pytest.fixture(scope="session")
def one_device():
    """Return the strategy of one CPU."""
    import tfdist

    return tfdist.make_strategy("one_device", devices="cpu")


@pytest.fixture(scope="session")
def mirrored():
    """Return a strategy of two replicas."""
    import tfdist

    return tfdist.make_strategy("mirrored", devices="cpu:0,cpu:1")


@pytest.fixture
def kept():
    """Return an array `[4, 8, 16]` of 0.3, which TensorFlow reads and slices without a copy.

    TensorFlow copies arrays that do not begin at a multiple of 64 bytes, and slices whose rows are
    not such a multiple.
    """
    memory = np.empty(4 * 8 * 16 + 16, "float32")
    begin = -memory.ctypes.data % 64 // 4
    array = memory[begin : begin + 4 * 8 * 16].reshape(4, 8, 16)
    array[:] = 0.3
    return array


@pytest.fixture
def recorded(monkeypatch):
    """Return an initializer that records its shapes in a list; 11 values make a table large."""
    import keras

    from tfdist import layers

    class Recorded(keras.initializers.RandomNormal):
        shapes: list = []

        def __call__(self, shape, dtype=None):
            self.shapes.append(tuple(shape))
            return super().__call__(shape, dtype)

    monkeypatch.setattr(layers, "MAX_WHOLE_VALUES", 10)
    monkeypatch.setattr(layers, "_BY_VALUE", (*layers._BY_VALUE, Recorded))
    return Recorded


@pytest.fixture(autouse=True)
def fresh_scopes(monkeypatch):
    """Forget the strategies that other tests have made, as in a process of its own.

    A model outside of their scopes does not train.
    """
    if scopes := sys.modules.get("tfdist.keras_compat.scopes"):
        monkeypatch.setattr(scopes, "_watched", [])
        monkeypatch.setattr(scopes, "_warned", [])
