"""Test a sweep of two runs, of which one fails, and is then interrupted."""

import json
import re
import signal
import time

import pytest

from tests.processes import PYTHON, ROOT, group

TIMEOUT_S = 240  # for one command; some 15 on an idle machine
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)
CONFIG = """\
base: digits
name: tiny
data: {train_split: "train[:10%]", cache: false}
strategy: {devices: cpu}
model: {name: mlp, options: {widths: [4]}}
train: {epochs: 1000, schedule: constant, callbacks: [ends.py:Ends]}
telemetry: {backends: jsonl}
output: {save_model: false}
"""
CODE = """\
import os, keras

class Ends(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if float(self.model.optimizer.learning_rate) < 0.05:
            self.model.stop_training = True
        elif not os.path.exists("fixed"):
            raise RuntimeError("boom")
"""


def test_a_sweep_goes_on_after_failures_and_signals(tmp_path, digits_dir):
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    (tmp_path / "ends.py").write_text(CODE)
    words = [
        "--config=tiny.yaml",
        f"--config.data.data_dir={digits_dir}",
        "--sweep=train.learning_rate=0.01,0.1",
    ]
    command = f"cd '{tmp_path}' && exec '{PYTHON}' -m tfdist train \"$@\""
    with group(tmp_path) as members:
        start = ["bash", "-c", command, "bash", *words]
        members.start("first", start, PYTHONPATH=str(ROOT))
        assert members.wait(TIMEOUT_S) == {"first": 1}, members.logs()
        log = members.log("first")
        assert re.search(r"^0\.01 .* done +runs/tiny-sweep/learning_rate=0\.01$", log, re.MULTILINE)
        assert re.search(r"^0\.1 .* failed, code 1 +runs/tiny-sweep/learn", log, re.MULTILINE), log
        assert "1 run of 2 failed: learning_rate=0.1. The same command runs them again." in log

    runs = tmp_path / "runs" / "tiny-sweep"
    assert json.loads((runs / "learning_rate=0.01" / "summary.json").read_text())["epochs"] == 1
    (tmp_path / "fixed").touch()
    with group(tmp_path) as members:
        process = members.start("second", start, PYTHONPATH=str(ROOT))
        history = runs / "learning_rate=0.1" / "history.jsonl"
        lines = len(history.read_text().splitlines()) if history.exists() else 0
        deadline = time.monotonic() + TIMEOUT_S
        while not history.exists() or len(history.read_text().splitlines()) < lines + 2:
            assert process.poll() is None, members.log("second")
            assert time.monotonic() < deadline, members.log("second")
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert members.wait(TIMEOUT_S) == {"second": 130}, members.logs()
        log = members.log("second")
        assert "run 1 of 2: learning_rate=0.01 in runs/tiny-sweep/learning_rate=0.01 is alr" in log
        assert re.search(r"^0\.1 .* interrupted +runs", log, re.MULTILINE), log
        assert "interrupted; the same command goes on" in log
    assert list((runs / "learning_rate=0.1" / "backup").glob("snapshot-*"))
