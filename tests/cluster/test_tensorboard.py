"""Test a run of two workers in a real TensorBoard: its server's answers, and a browser's view."""

import csv
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from tests.processes import PYTHON, ROOT, group
from tests.tensorboards import BROWSER, serving
from tests.unit.train.callbacks.test_tensorboard import traced

TIMEOUT_S = 240  # for the run; 20 on an idle machine of 2 cores
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)
RUNS = {"tiny", "tiny/train", "tiny/validation", "tiny/worker-0", "tiny/worker-1"}


def run(directory, words):
    """Train with two workers in a directory; return exit code and output."""
    with group(directory) as members:
        command = (
            f"cd '{directory}' && exec '{PYTHON}' -m tfdist launch --workers 2 --log-dir launch "
            '-- tfdist train "$@"'
        )
        members.start("run", ["bash", "-c", command, "bash", *words], PYTHONPATH=str(ROOT))
        return members.wait(TIMEOUT_S)["run"], members.log("run")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, digits_dir):
    """Return the directory `runs` after two epochs of digits, of 8 steps each."""
    directory = tmp_path_factory.mktemp("board")
    keys = {
        "name": "tiny",
        "data.data_dir": digits_dir,
        "data.train_split": "train[:500]",
        "data.eval_split": "test[:100]",
        "train.epochs": 2,
        "train.callbacks": "csv_logger, model_checkpoint",
        "train.callback_options.csv_logger.filename": "log.csv",
        "train.callback_options.model_checkpoint.filepath": "saved/{epoch}.keras",
        "telemetry.histograms": 1,
        "telemetry.images": 8,
        "telemetry.profile_workers": "all",
    }
    words = [
        f"--config={ROOT / 'configs' / 'digits.py'}",
        "--profile",
        "steps=10..12",
        *(f"--config.{name}={value}" for name, value in keys.items()),
    ]
    code, log = run(directory, words)
    if re.search(
        r"Fatal Python error: .*Current thread \S+ \(most recent call first\):\n\s+File "
        r"\S+profiler_v2.py\S+ line \d+ in stop\n",
        log,
        re.DOTALL,
    ):
        # Seen in one of 28 such runs: TensorFlow frees a name twice in TraceMeRecorder::Consume, by
        # a native stack (as in tensorboard #3149).
        directory = tmp_path_factory.mktemp("again")
        code, log = run(directory, words)
    assert code == 0, log
    assert log.count("tensorboard --logdir runs\n") == 2, log  # at the beginning, and at the end
    assert "profile of steps 10 to 12: in runs/tiny/worker-1/plugins/profile" in log
    return directory / "runs"


@pytest.fixture(scope="module")
def server(runs, tmp_path_factory):
    with serving(runs, tmp_path_factory.mktemp("server"), len(RUNS)) as server:
        yield server


def test_each_run_has_its_curves(server, runs):
    assert set(server.json("runs")) == RUNS
    tags = {run: set(of_run) for run, of_run in server.json("plugin/scalars/tags").items()}
    assert {
        "epoch_loss",
        "epoch_accuracy",
        "epoch_learning_rate",
        "speed/examples_per_second",
    } <= tags["tiny/train"]
    assert {"epoch_loss", "epoch_accuracy"} <= tags["tiny/validation"]
    history = [
        json.loads(line) for line in (runs / "tiny" / "history.jsonl").read_text().splitlines()
    ]
    for run, name in (("tiny/train", "loss"), ("tiny/validation", "val_loss")):
        points = server.json("plugin/scalars/scalars", run=run, tag="epoch_loss")
        assert [step for _, step, _ in points] == [0, 1]
        assert [value for *_, value in points] == pytest.approx(
            [line[name] for line in history], rel=1e-5
        )
    for rank in (0, 1):
        points = server.json(
            "plugin/scalars/scalars", run=f"tiny/worker-{rank}", tag="speed/step_milliseconds"
        )
        assert [step for _, step, _ in points] == [0, 1]
        assert all(value > 0 for *_, value in points)


def test_files_of_callbacks_are_written_once(runs):
    with (runs / "tiny" / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    history = [
        json.loads(line) for line in (runs / "tiny" / "history.jsonl").read_text().splitlines()
    ]
    assert [float(row["val_loss"]) for row in rows] == [line["val_loss"] for line in history]
    saved = sorted(path.name for path in (runs / "tiny" / "saved").iterdir())
    assert saved == ["1.keras", "2.keras"]


def test_the_graph_is_there_as_layers_and_as_operations(server):
    graphs = server.json("plugin/graphs/info")["tiny/train"]
    assert graphs["run_graph"]
    assert graphs["tags"]["keras"]["conceptual_graph"]
    layers = server.get(
        "plugin/graphs/graph", run="tiny/train", tag="keras", conceptual="true"
    ).decode()
    operations = server.get("plugin/graphs/graph", run="tiny/train", conceptual="false").decode()
    assert 'name: "cnn/conv2d"' in layers
    assert 'op: "Conv2D"' in operations
    assert 'op: "Softmax"' in operations


def test_weights_have_histograms(server):
    tags = server.json("plugin/histograms/tags")["tiny/train"]
    assert {"conv2d/kernel/histogram", "dense/bias/histogram"} <= set(tags)
    assert [
        step
        for _, step, _ in server.json(
            "plugin/histograms/histograms", run="tiny/train", tag="conv2d/kernel/histogram"
        )
    ] == [0, 1]


def test_images_show_predictions(server):
    assert set(server.json("plugin/images/tags")) == {"tiny/validation"}
    images = server.json(
        "plugin/images/images", run="tiny/validation", tag="predictions", sample="0"
    )
    assert [image["step"] for image in images] == [0, 1]
    picture = Image.open(
        io.BytesIO(
            server.get(
                "plugin/images/individualImage", blob_key=images[1]["query"].partition("=")[2]
            )
        )
    )
    assert picture.size == (424, 272)  # two rows of four
    assert len(np.unique(np.asarray(picture))) > 8  # grey values of digits


def test_hyperparameters_stand_beside_results(server):
    experiment = server.post("plugin/hparams/experiment", {"experimentName": "0"})
    names = {info["name"]: info for info in experiment["hparamInfos"]}
    assert {
        "optimizer",
        "learning_rate",
        "global_batch",
        "model.name",
        "epochs",
        "seed",
        "strategy",
        "replicas",
    } <= names.keys()
    request = {
        "experimentName": "0",
        "startIndex": 0,
        "sliceSize": 9,
        "allowedStatuses": ["STATUS_SUCCESS"],
        "colParams": [{"metric": {"group": "validation", "tag": "epoch_accuracy"}}],
    }
    (trial,) = server.post("plugin/hparams/session_groups", request)["sessionGroups"]
    assert (trial["name"], trial["hparams"]["replicas"], trial["hparams"]["optimizer"]) == (
        "tiny",
        2.0,
        "adam",
    )
    values = {
        (value["name"].get("group"), value["name"]["tag"]): value["value"]
        for value in trial["metricValues"]
    }
    assert 0 < values["validation", "epoch_accuracy"] <= 1


def test_every_worker_has_traced_its_steps(runs):
    for rank in (0, 1):
        assert traced(runs / "tiny" / f"worker-{rank}") == [10, 11, 12]
    assert not (runs / "tiny" / "train" / "plugins").exists()


@pytest.mark.parametrize("tab", ["timeseries", "graphs"])
def test_a_browser_shows_it(server, tmp_path, tab):
    if BROWSER is None:
        pytest.skip("chromium is not installed")
    picture = Image.open(io.BytesIO(server.picture(tab, tmp_path / f"{tab}.png"))).convert("RGB")
    assert picture.size == (1400, 900)
    pixels = np.asarray(picture)[70:]  # below the bar
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50  # an empty page has some ten
