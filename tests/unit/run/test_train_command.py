"""Test one short run, from its settings to its summary, on one device."""

import contextlib
import dataclasses
import io
import json
import pathlib
import time

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.reports import RUN_FILES, files_of_run
from tfdist import config
from tfdist.run import build
from tfdist.run.train_command import describe, run
from tfdist.sync import DiLoCo, Gradients, LocalSGD
from tfdist.telemetry import sessions
from tfdist.telemetry.layout import read_json_lines


def short(directory, digits_dir):
    return config.Run.from_dict(
        {
            "name": "short",
            "strategy": {"name": "one_device", "devices": "cpu"},
            "data": {"data_dir": str(digits_dir), "train_split": "train[:20%]", "global_batch": 50},
            "model": {"name": "mlp", "options": {"widths": (16,)}},
            "train": {"epochs": 2, "schedule": "cosine"},
            "output": {"dir": str(directory / "run"), "export": True},
        }
    )


@pytest.fixture
def settings(tmp_path, digits_dir):
    return short(tmp_path, digits_dir)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, digits_dir):
    """Return the settings of a run on one device, its summary, its output and when it began."""
    settings = short(tmp_path_factory.mktemp("finished"), digits_dir)
    began = time.time()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        summary = run(settings)
    return settings, summary, printed.getvalue(), began


def test_run_writes_its_files_and_prints_their_paths(finished):
    settings, summary, printed, began = finished
    directory = pathlib.Path(settings.output.dir)
    assert json.loads((directory / "summary.json").read_text()) == summary
    assert (
        config.Run.from_dict(json.loads((directory / "config.json").read_text())).train
        == settings.train
    )
    history = read_json_lines(directory / "history.jsonl")
    assert [line["step"] for line in history] == [0, 1]
    assert {"loss", "accuracy", "val_loss", "val_accuracy", "seconds"} <= history[0].keys()
    assert history[0]["learning_rate"] > history[1]["learning_rate"] == 0  # the schedule's end
    assert began < history[0]["time"] < history[1]["time"] < time.time()
    assert (directory / "model.keras").is_file()
    assert files_of_run(directory) == sorted([*RUN_FILES, "saved_model"])
    exported = tf.saved_model.load(summary["export"])
    assert exported.serve(tf.zeros([2, 8, 8, 1])).shape == (2, 10)
    assert all(any((directory / part).glob("events*")) for part in ("train", "validation"))
    (session,) = (
        sessions.Session(**line) for line in read_json_lines(directory / "sessions.jsonl")
    )
    assert (
        session.epoch,
        session.step,
        session.resumed,
        session.workers,
        session.global_batch,
    ) == (0, 0, False, 1, 50)
    assert session.versions["tfdist"] == tfdist.__version__
    assert summary["examples_per_second"] > 0
    assert (
        printed.count(f"tensorboard --logdir {directory}") == 2
    )  # at the beginning, and at the end
    with pytest.raises(ValueError, match="holds a finished run"):
        run(settings)


@pytest.mark.parametrize(
    "parallel",
    [
        {"stages": 2, "microbatches": 5, "schedule": "gpipe", "recompute": True},
        {"zero": 3, "prefetch": 0, "reshard_after_forward": False},
        {"zero": 3, "gather_dtype": "bfloat16"},
    ],
    ids=["pipeline", "fsdp", "bfloat16"],
)
def test_divided_models_train_as_on_one_device(finished, settings, tmp_path, parallel):
    _, expected, _, _ = finished
    two = dataclasses.replace(
        settings,
        strategy=config.Strategy(devices="cpu:0,cpu:1"),
        parallel=config.Parallel(**parallel),
        output=config.Output(dir=str(tmp_path / "two"), export=True),
    )
    summary = run(two)
    tolerance = 1e-2 if "gather_dtype" in parallel else 1e-5
    assert summary["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=tolerance)
    assert summary["replicas"] == (1 if "stages" in parallel else 2)
    exported = tf.saved_model.load(summary["export"])
    assert exported.serve(tf.zeros([2, 8, 8, 1])).shape == (2, 10)


def test_stages_need_a_device_each(settings, tmp_path):
    staged = dataclasses.replace(settings, parallel=config.Parallel(stages=2))
    with pytest.raises(ValueError, match=r"stages: .* received 2 stages for 1 devices"):
        run(staged)
    with pytest.raises(ValueError, match=r"received 2; only `tfdist train` trains in stages"):
        build.make_model(staged, tf.distribute.get_strategy(), None)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("train", "optimizer", "adma", r"train\.optimizer: received 'adma'. Did you mean"),
        ("model", "name", "cnm", r"model\.name: received 'cnm'. Did you mean cnn"),
        ("data", "eval_split", "validation", "no such split"),
    ],
)
def test_settings_that_fit_nothing_are_named(settings, section, key, value, message):
    changed = settings.to_dict()
    changed[section][key] = value
    with pytest.raises(ValueError, match=message):
        run(config.Run.from_dict(changed))


def test_summary_without_training_or_model_is_described():
    summary = {
        "name": "x",
        "metrics": {"loss": 1.0, "f1": 0.25, "accuracy": 0.5},
        "epochs": 3,
        "examples_per_second": None,
        "seconds": 2.0,
        "replicas": 2,
        "backup": "b",
    }
    assert "nothing left to train on 2 replicas," in describe(summary)
    assert "x: accuracy 50.00%, loss 1.0000, f1 0.2500 on the evaluation split" in describe(summary)
    assert "x: no metrics on the evaluation split" in describe({**summary, "metrics": {}})
    assert " after 3 epochs\n" in describe(summary)
    assert " after 1 epoch\n" in describe({**summary, "epochs": 1})
    assert "not saved" in describe(summary)
    assert describe(summary).count("not kept") == 2
    assert "tensorboard --logdir l" in describe({**summary, "logs": "l"})
    under_servers = {**summary, "replicas": 1, "workers": 2, "parameter_servers": 1}
    assert "on 2 workers and 1 parameter server," in describe(under_servers)


@pytest.mark.parametrize(
    ("section", "policy"),
    [
        ({}, Gradients()),
        (
            {
                "combine": "sum",
                "comm_dtype": "float16",
                "clip_norm": 1.0,
                "accumulate": 3,
                "skip_nonfinite": True,
            },
            Gradients("sum", "float16", 4 << 20, 1.0, 3, True),
        ),
        ({"kind": "local_sgd", "warmup": 5, "bucket_bytes": 7}, LocalSGD(8, 5, bucket_bytes=7)),
        ({"kind": "local_sgd", "every": 0}, LocalSGD("epoch")),
        ({"kind": "diloco", "comm_dtype": "bfloat16"}, DiLoCo(comm_dtype="bfloat16")),
        (
            {"kind": "diloco", "every": 4, "outer_learning_rate": 0.5, "outer_momentum": 0.0},
            DiLoCo(4, 0, 0.5, 0.0),
        ),
    ],
)
def test_sync_section_selects_the_policy(section, policy):
    from tfdist.run import build

    assert build.policy(config.Run.from_dict({"sync": section}).sync) == policy


@pytest.mark.parametrize(
    ("sync", "updates", "rate"),
    [({}, 24, 0.2), ({"accumulate": 3}, 8, 0.6)],
    ids=["each step", "every third"],
)
def test_a_schedule_ends_with_the_last_update_and_fits_its_examples(
    settings, one_device, sync, updates, rate
):
    from tfdist.run import build

    train_settings = {"learning_rate": 0.1, "base_global_batch": 25}  # and 50 of each step
    given = config.Run.from_dict(
        {
            **dataclasses.asdict(settings),
            "train": {**dataclasses.asdict(settings.train), **train_settings},
            "model": {"name": "mlp", "options": {"widths": (4,), "classes": 10}},
            "sync": sync,
        }
    )
    train = tf.data.Dataset.from_tensor_slices(
        (np.zeros([48, 8, 8, 1], np.float32), np.arange(48) % 10)
    ).batch(4)
    optimizer = build.make_model(given, one_device, train).optimizer
    schedule = optimizer.get_config()["learning_rate"]["config"]
    assert schedule["decay_steps"] == updates
    assert schedule["initial_learning_rate"] == pytest.approx(rate)


def test_devices_of_a_config_are_named_by_their_key():
    with pytest.raises(ValueError, match=r"^strategy\.devices: received 'gpu:64', but TensorFlow"):
        build.make_strategy(config.Strategy(devices="gpu:64"))
