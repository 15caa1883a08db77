"""The examples run as their headers say: by hand in several processes, and through the launcher."""

import re

import pytest

from tests.processes import PYTHON, ROOT, group, workers

SECONDS = 240  # for one job: about 20 on an idle machine of 2 cores
DIGITS = str(ROOT / "examples" / "digits.py")
LOOP = str(ROOT / "examples" / "custom_loop.py")


@pytest.fixture
def members(tmp_path):
    with group(tmp_path) as members:
        yield members


@pytest.fixture
def environ(digits_dir):
    return {"TFDS_DATA_DIR": str(digits_dir), "PYTHONPATH": str(ROOT)}


def launch(members, environ, *command):
    flags = ["--workers", "2", "--log-dir", str(members.directory / "logs"), "--"]
    members.start("launch", [PYTHON, "-m", "tfdist", "launch", *flags, *command], **environ)
    members.succeed(SECONDS)
    return members.log("launch")


def losses(log):
    return re.findall(r"loss: ([\d.]+).*?val_loss: ([\d.]+)", log)


def test_a_script_by_hand_and_through_the_launcher_prints_the_same(members, environ, tmp_path):
    flags = ["--epochs", "2", "--global_batch", "128"]
    workers(members, 2, [PYTHON, DIGITS, *flags, "--log_dir", str(tmp_path / "tb"), "--backup_dir", str(tmp_path / "backup")], **environ)
    members.succeed(SECONDS)
    by_hand = losses(members.log("worker-0"))
    assert by_hand, members.logs()
    assert not losses(members.log("worker-1"))
    assert any((tmp_path / "tb" / "train").glob("events*"))
    assert losses(launch(members, environ, DIGITS, *flags))[-1] == by_hand[-1]


def test_a_loop_of_ones_own_equals_fit_on_two_workers(members, environ):
    log = launch(members, environ, LOOP, "--check", "--epochs", "1")
    assert len(re.findall(r"\[worker:\d\] fit agrees", log)) == 2, log
    epochs = set(re.findall(r"epoch 1: loss ([\d.]+)", log))
    assert len(epochs) == 1, log


def test_a_loop_of_ones_own_equals_fit_on_two_devices(members, environ):
    members.start("loop", [PYTHON, LOOP, "--check", "--epochs", "1", "--devices", "cpu:0,cpu:1"], **environ)
    members.succeed(SECONDS)
    assert "fit agrees" in members.log("loop")
