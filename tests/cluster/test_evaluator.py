"""Test an evaluator beside two workers.

It evaluates each of their epochs, writes none of their files, and ends when they have.
"""

import json
import pickle

import pytest
import tensorflow as tf

from tests.processes import PYTHON, ROOT, group

TIMEOUT_S = 180  # for one job: about 25 on an idle machine of 2 cores
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


def launch(directory, *command):
    """Run a job of two workers and an evaluator, and return its log."""
    with group(directory) as members:
        words = [
            "--workers",
            "2",
            "--evaluator",
            "--log-dir",
            str(directory / "launch"),
            "--",
            *command,
        ]
        members.start("launch", [PYTHON, "-m", "tfdist", "launch", *words], PYTHONPATH=str(ROOT))
        members.succeed(TIMEOUT_S)
        return members.log("launch")


def losses(directory):
    """Return the evaluator's scalars `epoch_loss`, by epoch."""
    events = tf.data.TFRecordDataset([str(path) for path in (directory / "evaluator").iterdir()])
    scalars = [
        (e.step, v)
        for e in map(tf.compat.v1.Event.FromString, events.as_numpy_iterator())
        for v in e.summary.value
    ]
    return [
        float(tf.make_ndarray(v.tensor))
        for _, v in sorted(scalars, key=lambda s: s[0])
        if v.tag == "epoch_loss"
    ]


def test_tfdist_train_has_its_epochs_evaluated(tmp_path, digits_dir):
    run = tmp_path / "run"
    words = [
        f"--config={ROOT / 'configs' / 'digits.py'}",
        "--config.train.epochs=2",
        f"--config.output.dir={run}",
    ]
    log = launch(tmp_path, "tfdist", "train", *words, f"--config.data.data_dir={digits_dir}")
    history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    truth = [line["val_loss"] for line in history if "val_loss" in line]
    assert losses(run) == pytest.approx(truth, rel=1e-4)
    assert log.count("evaluator: epoch ") == 2
    assert "the last epoch is evaluated" in log
    assert log.count("on the evaluation split") == 1  # the chief's summary


def test_a_script_that_stops_early_ends_its_evaluator(tmp_path):
    log = launch(tmp_path, PYTHON, "-m", "tests.cluster.scripts.evaluated", str(tmp_path))
    chief, evaluator = (
        pickle.loads((tmp_path / f"{name}.pickle").read_bytes())
        for name in ("worker:0", "evaluator:0")
    )
    assert chief[0] == evaluator[0] == [0, 1, 2]
    for name in ("val_loss", "val_accuracy"):
        assert evaluator[1][name] == pytest.approx(chief[1][name], rel=1e-5)
    assert losses(tmp_path / "logs") == pytest.approx(chief[1]["val_loss"], rel=1e-5)
    assert log.count("evaluator: epoch ") == 3
    assert not (tmp_path / "evaluator.keras").exists()
