"""Test `tfdist bench` on real processes: tiny models, few steps; speed is not asserted."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.launches import ROOT
from tests.processes import environment
from tfdist.telemetry.step_records import PARTS
from tfdist.tools.bench.results import read

pytestmark = pytest.mark.timeout(240)

CONFIG = """\
import tfdist

def get_config():
    config = tfdist.config.default()
    config.name = "tiny"
    config.data.name = "{directory}/tiny.py:examples"
    config.data.global_batch = 8
    config.model.name = "{directory}/tiny.py:model"
    return config
"""
TINY = """\
import keras
import numpy as np
import tensorflow as tf
from tfdist.data import Source

def examples(data, split):
    return Source.of((np.ones([20, 3], "float32"), np.ones([20, 1], "float32")))  # batches of 8, 8 and 4 rows

def model(input_shape, classes=None):
    if "CentralStorage" in type(tf.distribute.get_strategy()).__name__:
        raise ValueError("tiny.py has no room for a central storage")
    model = keras.Sequential([keras.Input(input_shape), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
"""  # noqa: E501


def bench(directory: pathlib.Path, *words: str) -> tuple[int, str, str]:
    """Run `tfdist bench`; return exit code, output and errors."""
    (directory / "config.py").write_text(CONFIG.format(directory=directory))
    (directory / "tiny.py").write_text(TINY)
    done = subprocess.run(
        [sys.executable, "-m", "tfdist", "bench", *words],
        cwd=directory,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout, done.stderr


def test_scaling_of_workers_beside_a_setup_that_fails(tmp_path):
    code, out, err = bench(
        tmp_path,
        "--config=config.py",
        "--workers=2",
        "--strategies=one_device,central_storage,multi_worker_mirrored",
        "--rounds=2",
        "--steps=6",
    )
    assert code == 1, err
    results = read(tmp_path / "runs" / "bench-tiny")
    alone, *failed, strong, weak = results.setups
    assert [setup.global_batch for setup in results.setups] == [8, 8, 16, 8, 16]
    assert all("tiny.py has no room for a central storage" in setup.error for setup in failed)
    assert out.count("FAILED: central_storage with 2 replicas") == 1
    assert (
        "no room"
        in (tmp_path / "runs" / "bench-tiny" / "logs" / "central_storage-2-log.log").read_text()
    )
    for setup in (alone, strong, weak):
        assert setup.error is None
        assert len(setup.rates) == len(setup.seconds) == 2
        # 6 steps of an epoch of 20 examples, over and over: 8 + 8 + 4, or 16 + 4.
        rows = [rate * seconds for rate, seconds in zip(setup.rates, setup.seconds, strict=True)]
        assert rows == pytest.approx([{8: 20 / 3, 16: 10.0}[setup.global_batch]] * 2)
        assert setup.step_breakdown.keys() == set(range(setup.workers))
        for parts in setup.step_breakdown.values():
            assert parts.keys() == PARTS.keys()
            assert sum(parts.values()) > 0
        assert setup.reason
    assert (alone.bytes, strong.bytes) == (
        0,
        4 * (3 * 4 + 4 + 4 + 1),
    )  # float32 gradients of two layers
    assert strong.efficiency == pytest.approx(strong.rate / alone.rate / 2)
    page = (tmp_path / "runs" / "bench-tiny" / "bench.md").read_text()
    assert "| multi_worker_mirrored | 2 |" in page


def test_inference_over_batches_and_devices(tmp_path):
    code, out, err = bench(
        tmp_path,
        "--config=config.py",
        "--predict",
        "--batches=2,30",
        "--rounds=2",
        "--steps=2",
        "--out=here",
        "--json",
    )
    assert code == 0, err
    results = read(tmp_path / "here")
    assert json.loads(out) == json.loads((tmp_path / "here" / "bench.json").read_text())
    assert [(setup.replicas, setup.global_batch) for setup in results.setups] == [
        (1, 2),
        (1, 30),
        (2, 2),
        (2, 30),
    ]
    for setup in results.setups:
        assert setup.error is None
        assert [
            rate * seconds for rate, seconds in zip(setup.rates, setup.seconds, strict=True)
        ] == pytest.approx([setup.global_batch] * 2)
        assert setup.speedup is not None
    assert len(results.notes) == 1


def test_all_reduces_between_workers_and_between_devices(tmp_path):
    code, out, err = bench(
        tmp_path,
        "allreduce",
        "--workers=2",
        "--bytes=4,64k",
        "--rounds=2",
        "--steps=3",
        "--communication=ring",
    )
    assert code == 0, err
    results = read(tmp_path / "runs" / "bench-allreduce")
    assert [(setup.strategy, setup.workers, setup.bytes) for setup in results.setups] == [
        ("mirrored", 1, 4),
        ("mirrored", 1, 65536),
        ("multi_worker_mirrored", 2, 4),
        ("multi_worker_mirrored", 2, 65536),
    ]
    for setup in results.setups:
        assert setup.error is None
        assert (
            setup.algorithm_bandwidth == setup.bus_bandwidth == setup.bytes / setup.step
        )  # of two replicas
    assert "64 KiB" in out
