"""Test which GPUs names stand for, on a machine of three GPUs that a fake TensorFlow shows."""

from __future__ import annotations

import dataclasses

import pytest
import tensorflow as tf

from tfdist.strategies import devices


@dataclasses.dataclass(frozen=True)
class Gpu:
    name: str


A, B, C = (Gpu(f"/physical_device:GPU:{i}") for i in range(3))


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that sets the visible GPUs, and the parts of those that are split."""
    state = {"visible": [A, B, C], "parts": {}}

    def visible(shown, kind):
        assert kind == "GPU"
        state["visible"] = shown

    fakes = {
        "list_physical_devices": lambda kind: [A, B, C],
        "get_visible_devices": lambda kind: state["visible"],
        "get_logical_device_configuration": lambda gpu: [None] * state["parts"].get(gpu, 0),
        "set_visible_devices": visible,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(tf.config, name, fake)
    return state


def test_gpus_are_numbered_as_tensorflow_does(gpus):
    assert devices.logical_devices("GPU") == [A, B, C]
    gpus["visible"] = [C, A]
    assert devices.logical_devices("GPU") == [A, C]
    gpus["parts"] = {A: 2}
    assert devices.logical_devices("GPU") == [A, A, C]
    assert devices.configure(None, None) == ["/gpu:0", "/gpu:1", "/gpu:2"]


def test_gpus_that_are_not_named_are_hidden(gpus):
    gpus["visible"] = [C, A]
    devices.restrict(["/gpu:1"])
    assert gpus["visible"] == [C]
    devices.restrict(["/cpu:0"])
    assert gpus["visible"] == []


def test_a_part_of_a_gpu_cannot_be_hidden(gpus):
    gpus["parts"] = {A: 2}
    devices.restrict(["/gpu:0", "/gpu:1"])
    assert gpus["visible"] == [A]
    with pytest.raises(
        ValueError, match=r"all or none of the 2 logical devices of .*received gpu:1"
    ):
        devices.restrict(["/gpu:1"])


@pytest.mark.parametrize(("index", "expected"), [(0, [A]), (1, [C]), (2, [A])])
def test_workers_take_a_gpu_each(gpus, index, expected):
    gpus["parts"] = {A: 2}
    devices.restrict_to_one(["/gpu:0", "/gpu:1", "/gpu:3"], index)
    assert gpus["visible"] == expected


def test_a_worker_on_the_cpu_takes_no_gpu(gpus):
    devices.restrict_to_one(["/cpu:0"], 0)
    assert gpus["visible"] == []


@pytest.mark.parametrize(
    ("variable", "devices", "threads", "expected"),
    [("2", 2, None, 3), ("2", 2, 1, 3), ("", 2, 8, 8), ("1", "cpu", None, 0), ("", "cpu", 1, 1)],
)
def test_an_operation_has_a_thread_beside_the_devices(
    variable, devices, threads, expected, run_python
):
    code = f"""
import os
os.environ["TF_NUM_INTEROP_THREADS"] = {variable!r}
import tfdist
for _ in range(2):  # the second time, TensorFlow has started
    tfdist.make_strategy("auto", devices={devices!r}, threads={threads})
    import tensorflow as tf
    tf.constant(1)
print(tf.config.threading.get_inter_op_parallelism_threads())
"""
    done = run_python(code)
    assert done.stdout.split() == [str(expected)], done.stderr
