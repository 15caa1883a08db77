"""Test which batch `data.global_batch=auto` becomes, and when it is refused."""

import dataclasses
import json

import pytest
import tensorflow as tf

import tfdist
from tests.unit.run.plan import test_options
from tests.unit.run.plan.test_options import MEGA
from tfdist import config
from tfdist.keras_compat import engine_of
from tfdist.run.plan import largest_batch, options, step_memory
from tfdist.train.parameter_server.coordinator import Coordinator

NEEDS = dataclasses.replace(test_options.NEEDS, not_cut="one layer")


def settings(gigabytes=0.17, **sections):
    return config.Run.from_dict(
        {
            "data": {"global_batch": "auto"},
            "strategy": {"device_memory_gb": gigabytes},
            **sections,
        }
    )


@pytest.fixture
def measured(monkeypatch):
    """Return the settings of all measurements, which find four equal layers."""
    asked = []

    def measure(run, devices, timeout):
        asked.append(run)
        return dataclasses.replace(NEEDS, rows=run.data.global_batch_size)

    monkeypatch.setattr(step_memory, "measure", measure)
    return asked


@pytest.fixture(scope="module")
def one():
    return tfdist.make_strategy("one_device", devices="cpu")


@pytest.mark.parametrize("comm_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_batch_is_that_of_the_plan_for_these_settings(measured, zero, comm_dtype):
    run = settings(0.3, parallel={"zero": zero}, sync={"comm_dtype": comm_dtype})
    batches = {o.name: b for o, b in options.largest_batches(NEEDS, 4, 300 * MEGA)}
    way = {0: "data parallel", 1: "ZeRO-1", 2: "ZeRO-2", 3: "FSDP (ZeRO-3)"}[zero]
    assert largest_batch.find(run, 4) == batches[way] > 0
    assert largest_batch.find(run, 1) == batches["one device"] > 0


@pytest.mark.parametrize(
    ("adaptive", "rate"), [(True, 0.1 * (240 / 64) ** 0.5), (False, 0.1 * 240 / 64)]
)
def test_the_log_says_which_rate_the_plan_recommends(monkeypatch, caplog, adaptive, rate):
    needs = dataclasses.replace(NEEDS, rows=64, adaptive=adaptive)
    monkeypatch.setattr(step_memory, "measure", lambda run, devices, timeout: needs)
    with caplog.at_level("INFO", "tfdist"):
        batch = largest_batch.find(settings(0.28), 4)
    assert options.rate_for(needs, batch) == pytest.approx(rate)
    assert (
        f"data.global_batch: {batch}, the largest that fits 280 MB on each of 4 devices; "
        "train.learning_rate stays 0.1. If it is meant for batches of 64, as by default, `tfdist "
        f"plan --find-batch` recommends {rate:.3g}." in caplog.text
    )


def test_the_log_says_nothing_of_a_rate_that_follows_the_batch(monkeypatch, caplog):
    needs = dataclasses.replace(NEEDS, rows=64, learning_rate=None)
    monkeypatch.setattr(step_memory, "measure", lambda run, devices, timeout: needs)
    with caplog.at_level("INFO", "tfdist"):
        largest_batch.find(settings(0.3), 1)
    assert caplog.messages[-1].endswith("the largest that fits 300 MB on the one device")


def test_what_does_not_fit_is_named(measured):
    with pytest.raises(
        ValueError,
        match=r"'auto' found none that fits 170 MB on each device .* data parallel needs 221 MB "
        "for one example on each of 4",
    ):
        largest_batch.find(settings(), 4)


def test_data_that_make_their_own_batches_are_refused(monkeypatch):
    monkeypatch.setattr(
        step_memory, "measure", lambda run, devices, timeout: dataclasses.replace(NEEDS, rows=7)
    )
    with pytest.raises(ValueError, match="makes batches of 7"):
        largest_batch.find(settings(), 1)


def test_too_few_examples_are_named(monkeypatch):
    needs = dataclasses.replace(NEEDS, rows=3, examples=3)
    monkeypatch.setattr(step_memory, "measure", lambda run, devices, timeout: needs)
    with pytest.raises(ValueError, match="an example for each of 4 devices, received 3 from"):
        largest_batch.find(settings(), 4)


def test_optimizer_that_cannot_be_sharded_is_named(monkeypatch):
    needs = dataclasses.replace(NEEDS, rows=64, not_sharded="the optimizer Muon cannot be sharded")
    monkeypatch.setattr(step_memory, "measure", lambda run, devices, timeout: needs)
    with pytest.raises(ValueError, match="zero: the optimizer Muon cannot be sharded"):
        largest_batch.find(settings(parallel={"zero": 2}), 2)


def test_an_interrupted_run_keeps_its_batch(measured, one, tmp_path):
    path = tmp_path / "config.json"
    run = settings(0.3, train={"class_weight": {0: 1.0}})
    first = largest_batch.resolve(run, one, path)
    assert first.data.global_batch_size == largest_batch.find(run, 1)
    changed = dataclasses.replace(first, data=dataclasses.replace(first.data, global_batch=5))
    path.write_text(json.dumps(changed.to_dict()))
    assert largest_batch.resolve(run, one, path).data.global_batch_size == 5
    other = dataclasses.replace(run, strategy=config.Strategy(device_memory_gb=0.25))
    found = largest_batch.resolve(other, one, path).data.global_batch_size
    assert 5 < found < first.data.global_batch_size
    path.write_text("{")
    assert largest_batch.resolve(run, one, path) == first


def test_a_number_stays(measured, one, tmp_path):
    run = config.Run(data=config.Data(global_batch=8))
    assert largest_batch.resolve(run, one, tmp_path) is run
    assert not measured


def test_other_tasks_fail_with_the_chief(measured, one, tmp_path, monkeypatch):
    """Without the chief's answer they would wait for it."""
    sent = []
    monkeypatch.setattr(engine_of(one), "broadcast_from_chief", sent.append)
    with pytest.raises(ValueError, match="found none that fits"):
        largest_batch.resolve(settings(0.01), one, tmp_path)
    assert sent == [[0.0]]
    monkeypatch.setattr(engine_of(one), "broadcast_from_chief", lambda numbers: [0.0])
    with pytest.raises(ValueError, match="the chief found none; its log says why"):
        largest_batch.resolve(settings(0.3), one, tmp_path)


def test_parameter_servers_are_refused(tmp_path):
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")  # in place of one that needs a cluster
    Coordinator(strategy, None, "/cpu:0")
    with pytest.raises(ValueError, match="needs a synchronous strategy, received OneDeviceStrat"):
        largest_batch.resolve(settings(), strategy, tmp_path)
