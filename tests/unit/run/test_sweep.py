"""Test sweeps: which runs they have, where, which are done, and what is wrong with a request."""

import dataclasses
import json

import pytest

from tfdist.run import sweep, train_command
from tfdist.run.train_command import parse

CONFIG = "--config=configs/digits.py"


def planned(*words):
    return sweep.plan(sweep.split([CONFIG, *words]), parse)


@pytest.fixture
def runs(tmp_path):
    """Return the runs of a sweep of two values of each of two keys."""
    return planned(
        f"--config.output.dir={tmp_path}",
        "--sweep",
        "train.learning_rate=0.01,0.1",
        "--sweep=model.options.units=8, 16",
    )


def finish(run, **results):
    """Write the files of a finished run."""
    run.directory.mkdir(parents=True)
    (run.directory / "config.json").write_text(json.dumps(run.settings.to_dict()))
    (run.directory / "summary.json").write_text(json.dumps({"metrics": results}))


def test_a_sweep_has_the_product_of_its_values(runs, tmp_path):
    assert [
        (run.settings.train.learning_rate, run.settings.model.options["units"]) for run in runs
    ] == [(0.01, 8), (0.01, 16), (0.1, 8), (0.1, 16)]
    assert [run.directory for run in runs][:2] == [
        tmp_path / "learning_rate=0.01,units=8",
        tmp_path / "learning_rate=0.01,units=16",
    ]
    # The words are those of the same settings, with the directory of the run.
    assert parse(runs[3].words) == runs[3].settings


def test_values_may_have_commas_in_brackets_and_quotes():
    runs = planned(
        "--sweep=train.class_weight={0: 1, 1: 2},{}", "--sweep=train.metrics='accuracy,auc',\"mse\""
    )
    trained = [(run.settings.train.class_weights(), run.settings.train.metrics) for run in runs]
    assert trained == [
        ({0: 1.0, 1: 2.0}, "accuracy,auc"),
        ({0: 1.0, 1: 2.0}, "mse"),
        ({}, "accuracy,auc"),
        ({}, "mse"),
    ]


def test_the_directory_is_below_runs_by_default():
    (run,) = planned("--sweep", "train.seed=3")
    assert str(run.directory) == "runs/digits-sweep/seed=3"
    long = sweep.directory_name({"model.name": "x/" * 200})
    assert len(long) < 200
    assert "/" not in long


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sweep", "train.lr=1"], r"train\.lr: no such key"),
        (["--sweep", "train.seed"], "--sweep: expected a key and its values, such as .*'train.see"),
        (["--sweep"], "--sweep: expected a key and its values"),
        (["--sweep=train.seed=1,,2"], "--sweep train.seed=1,,2: expected values .* an empty one"),
        (["--sweep=train.seed="], "--sweep train.seed=: expected values"),
        (["--sweep=train.seed=1", "--sweep=train.seed=2"], "expected each key once, .* train.seed"),
        (["--sweep=train.seed=1,x"], "--sweep train.seed=x: .*config.train.seed=x"),
        (["--sweep=train.epochs=1,0"], "--sweep train.epochs=0: train.epochs: expected at least 1"),
        (["--sweep=train.seed=1,1"], "received seed=1 and seed=1, which have the same settings"),
        (
            ["--sweep=model.name=a/b:c,a-b:c"],
            "received name=a/b:c and name=a-b:c, which have the same directory",
        ),
        (["--sweep=name=a,b"], "--sweep name: expected another key"),
        (["--sweep=train.seed=1", "--config.train.seed=2"], "--config.train.seed=2: --sweep sets"),
        (["--sweep=data.cache=true", "--noconfig.data.cache"], "--noconfig.data.cache: --sweep se"),
        (["--sweep=launch.workers=1"], r"launch\.workers: expected in the config file"),
        (["--sweep-index=1"], "--sweep-index=1: expected together with --sweep, received alone"),
        (
            ["--sweep=train.seed=1,2", "--sweep-index", "2"],
            "expected a number from 0 to 1, because",
        ),
        (["--sweep=train.seed=1", "--sweep-index", "-1"], "--sweep-index: expected a whole number"),
        (["--sweep=train.seed=1", "--sweep-index=NO_ID"], "received 'NO_ID', which is not set"),
    ],
)
def test_a_wrong_request_is_named(words, message):
    with pytest.raises(ValueError, match=message):
        planned(*words)


def test_the_index_may_be_that_of_a_scheduler(monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    words = ["--sweep=train.seed=1", "--sweep-index=SLURM_ARRAY_TASK_ID"]
    assert sweep.split(words).index == 7


def test_finished_runs_are_those_with_the_same_settings(runs):
    assert runs[0].summary() is None
    finish(runs[0], loss=1.0)
    assert runs[0].summary() == {"metrics": {"loss": 1.0}}
    changed = dataclasses.replace(
        runs[0].settings, train=dataclasses.replace(runs[0].settings.train, epochs=3)
    )
    other = dataclasses.replace(runs[0], settings=changed)
    with pytest.raises(ValueError, match=r"is finished, with train\.epochs=10; expected 3"):
        other.summary()
    (other.directory / "summary.json").unlink()
    assert other.summary() is None  # it failed before it saved anything
    (other.directory / "backup").mkdir()
    with pytest.raises(ValueError, match=r"is interrupted, with train\.epochs=10; expected 3"):
        other.summary()
    assert runs[0].summary() is None
    average = dataclasses.replace(runs[0].settings.train, ema=0.9)
    other = dataclasses.replace(
        runs[0], settings=dataclasses.replace(runs[0].settings, train=average)
    )
    with pytest.raises(ValueError, match=r"with train\.ema=None; expected 0\.9"):
        other.summary()
    (runs[0].directory / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json: expected JSON of a run"):
        runs[0].summary()


def test_a_finished_combination_is_not_trained_again(tmp_path, capsys):
    words = [CONFIG, f"--config.output.dir={tmp_path}", "--sweep=train.seed=1,2", "--sweep-index=1"]
    finish(sweep.plan(sweep.split(words), parse)[1])
    assert train_command.main(words) == 0
    assert "seed=2" in capsys.readouterr().out


def test_the_table_has_values_metrics_and_states(runs):
    finish(runs[0], loss=1.25, accuracy=0.5)
    lines = sweep.table(runs, {1: "failed, code 1"})
    assert [line.split()[:5] for line in lines[:2]] == [
        ["learning_rate", "units", "accuracy", "loss", "state"],
        ["0.01", "8", "0.5000", "1.2500", "done"],
    ]
    assert "failed, code 1" in lines[2]
    assert lines[3].split()[2:6] == ["-", "-", "not", "run"]
    assert lines[1].endswith(str(runs[0].directory))


@pytest.mark.parametrize(
    "variables",
    [
        {"TFDIST_TASK": "worker:1"},
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'},
    ],
)
def test_a_task_of_a_cluster_does_not_sweep(runs, monkeypatch, variables):
    sweep.check_alone(runs)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"trains alone, .*worker:.*with --sweep-index 0 to 3"):
        sweep.check_alone(runs)
