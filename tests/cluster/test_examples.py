"""Test the examples and configs as their headers say: by hand and through the launcher."""

import json
import re

import pytest

from tests.processes import PYTHON, ROOT, group, tasks, workers
from tests.reports import RUN_FILES, files_of_run
from tfdist import ClusterSpec

TIMEOUT_S = 240  # for one job: about 20 on an idle machine of 2 cores
DIGITS = str(ROOT / "examples" / "digits.py")
LOOP = str(ROOT / "examples" / "custom_loop.py")
UNDER_SERVERS = ["tfdist", "train", f"--config={ROOT / 'configs' / 'digits_ps.py'}"]


@pytest.fixture
def members(tmp_path):
    with group(tmp_path) as members:
        yield members


@pytest.fixture
def environ(digits_dir):
    return {"TFDS_DATA_DIR": str(digits_dir), "PYTHONPATH": str(ROOT)}


def launch(members, environ, *command, tasks=("--workers", "2")):
    flags = [*tasks, "--log-dir", str(members.directory / "logs"), "--"]
    members.start("launch", [PYTHON, "-m", "tfdist", "launch", *flags, *command], **environ)
    members.succeed(TIMEOUT_S)
    return members.log("launch")


def losses(log):
    return re.findall(r"loss: ([\d.]+).*?val_loss: ([\d.]+)", log)


def test_a_script_by_hand_and_through_the_launcher_prints_the_same(members, environ, tmp_path):
    flags = ["--epochs", "2", "--global_batch", "128"]
    workers(
        members,
        2,
        [
            PYTHON,
            DIGITS,
            *flags,
            "--log_dir",
            str(tmp_path / "tb"),
            "--backup_dir",
            str(tmp_path / "backup"),
        ],
        **environ,
    )
    members.succeed(TIMEOUT_S)
    by_hand = losses(members.log("worker-0"))
    assert by_hand, members.logs()
    assert not losses(members.log("worker-1"))
    assert any((tmp_path / "tb" / "train").glob("events*"))
    assert losses(launch(members, environ, DIGITS, *flags))[-1] == by_hand[-1]


def test_custom_loop_equals_fit_on_two_workers(members, environ):
    log = launch(members, environ, LOOP, "--check", "--epochs", "1")
    assert len(re.findall(r"\[worker:\d\] fit agrees", log)) == 2, log
    epochs = set(re.findall(r"epoch 1: loss ([\d.]+)", log))
    assert len(epochs) == 1, log


def test_custom_loop_equals_fit_on_two_devices(members, environ):
    members.start(
        "loop", [PYTHON, LOOP, "--check", "--epochs", "1", "--devices", "cpu:0,cpu:1"], **environ
    )
    members.succeed(TIMEOUT_S)
    assert "fit agrees" in members.log("loop")


@pytest.mark.parametrize("name", ["supervised", "semi_supervised", "unsupervised"])
def test_training_in_functions_has_equal_results_alone_and_on_two_workers(members, environ, name):
    command = [str(ROOT / "examples" / f"{name}.py"), "--epochs", "1"]
    members.start("alone", [PYTHON, *command], **environ)
    log = launch(members, environ, *command)
    words = r"(?:epoch 1: accuracy|test accuracy|test error) .*"
    alone = re.findall(words, members.log("alone"))
    together = re.findall(words, log)
    assert len(alone) == len(together) == 1, members.logs()
    ours, theirs = (
        [float(number) for number in re.findall(r"\d\.\d+", line)] for line in (*alone, *together)
    )
    assert ours == pytest.approx(theirs, abs=1e-4), (alone, together)


def test_launcher_trains_digits_under_a_parameter_server(members, environ, tmp_path):
    run = tmp_path / "run"
    log = launch(
        members,
        environ,
        *UNDER_SERVERS,
        f"--config.output.dir={run}",
        tasks=("--chief", "--workers", "2", "--ps", "1"),
    )
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accuracy"] > 0.96
    assert "on 2 workers and 1 parameter server, " in log
    assert (run / "model.keras").is_file()
    assert any((run / "train").glob("*.speed*"))
    assert not (run / "backup").exists()  # training is complete


def test_all_tasks_of_a_parameter_server_job_by_hand_end_with_it(members, environ, tmp_path):
    spec = ClusterSpec.local(workers=2, ps=1, chief=True)
    flags = ["--config.train.epochs=1", f"--config.output.dir={tmp_path / 'run'}"]
    tasks(members, spec, [PYTHON, "-m", *UNDER_SERVERS, *flags], **environ)
    members.succeed(TIMEOUT_S)
    assert "strategy parameter_server" in members.log("worker-1")
    assert not losses(members.log("worker-1"))
    assert losses(members.log("chief-0"))
    assert files_of_run(tmp_path / "run") == RUN_FILES


@pytest.mark.parametrize("layout", [[], ["--folders"]], ids=["kaggle", "folders"])
def test_imagenet_recipes_train_and_export(members, environ, tmp_path, layout):
    tree = str(tmp_path / "imagenet")
    write = [str(ROOT / "examples" / "synthetic_imagenet.py"), tree, "--train=2", "--validation=1"]
    members.start("images", [PYTHON, *write, *layout], **environ)
    members.succeed(TIMEOUT_S)
    options = {
        "data.data_dir": tree,
        "data.classes": "0:8",
        "data.global_batch": "8",
        "data.image_size": "32",
        "model.name": "resnet",  # of fewer layers
        "model.options.filters": "(2,)",
        "train.epochs": "1",
        "output.dir": tmp_path / "run",
        "telemetry.images": "2",
    }
    if layout:
        recipe = "plain"
        options |= {"train.schedule": "constant", "train.schedule_options": "{}"}
    else:
        recipe = "modern"
        options |= {"train.warmup_epochs": "0.5", "strategy.devices": "cpu:0,cpu:1"}
    flags = [f"--config.{key}={value}" for key, value in options.items()]
    train = ["-m", "tfdist", "train", f"--config=imagenet_resnet34:{recipe}", *flags]
    members.start("train", [PYTHON, *train], **environ)
    members.succeed(TIMEOUT_S)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 <= summary["metrics"]["accuracy"] <= summary["metrics"]["top5"] <= 1
    assert files_of_run(tmp_path / "run") == sorted([*RUN_FILES, "saved_model"])


def test_recommender_has_equal_results_on_devices_and_workers(members, environ, tmp_path):
    write = [str(ROOT / "examples" / "synthetic_criteo.py"), str(tmp_path), "--train=2000"]
    members.start("lines", [PYTHON, *write, "--test=500"], **environ)
    members.succeed(TIMEOUT_S)
    files = [f"--{name}={tmp_path / name}.txt" for name in ("train", "test")]
    command = [str(ROOT / "examples" / "recommender.py"), *files, "--rows=50", "--epochs=1"]
    command.append(f"--records={tmp_path / 'records'}")
    members.start("devices", [PYTHON, *command, "--devices=cpu:0,cpu:1"], **environ)
    together = launch(members, environ, *command)
    on_devices = re.findall(r"(?:loss:|test AUC) ([\d.]+)", members.log("devices"))
    on_workers = re.findall(r"\[worker:0\] .*(?:loss:|test AUC) ([\d.]+)", together)
    assert len(on_devices) == 2, members.logs()
    assert [float(x) for x in on_workers] == pytest.approx([float(x) for x in on_devices], abs=1e-3)
    tasks = ("--chief", "--workers", "1", "--ps", "1")
    log = launch(members, environ, *command, "--strategy=parameter_server", tasks=tasks)
    assert re.search(r"\[chief:0\] test AUC 0\.\d+", log), log
