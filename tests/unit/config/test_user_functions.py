"""Test models and data of the user's own: functions that a run's settings name."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from tfdist import config, models
from tfdist.config import user_functions
from tfdist.data import pipeline
from tfdist.run import input_pipeline
from tfdist.run.train_command import parse, run

CODE = """
import keras
import numpy as np
import beside
import tfdist
from tfdist.data.sources.source import Source

RUNS = beside.note()

def source(data, split):
    x = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
    return Source.of((x, (x.sum(1) > 0).astype("int32")))

def pipeline(data, split):
    return tfdist.data.pipeline(source(data, split), data.global_batch, seed=3)

def batches(data, split):
    return source(data, split).dataset().batch(data.global_batch)

def number(data, split):
    return 3

def build(input_shape, classes, width=2):
    inputs = keras.Input(input_shape)
    return keras.Model(inputs, keras.layers.Dense(classes or width, "softmax")(inputs))

class Counting(keras.Model):
    steps = 0
    def train_step(self, data):
        Counting.steps += 1
        return super().train_step(data)

def compiled(input_shape, classes):
    inputs = keras.Input(input_shape)
    model = Counting(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse", metrics=["mae"])
    return model

class Other(keras.Model):
    def test_step(self, data):
        return {"seconds": self(data[0])[0, 0] * 0 - 5, "name": 7.0}

def other(input_shape, classes):
    inputs = keras.Input(input_shape)
    model = Other(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    return model

def nothing(input_shape, classes):
    return None
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Write a user's file, with a module beside it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)
    (tmp_path / "beside.py").write_text(
        "count = 0\ndef note():\n    global count\n    count += 1\n    return count\n"
    )
    (tmp_path / "own_parts.py").write_text(CODE)
    return tmp_path / "own_parts.py"


def settings(tmp_path, data, model, **more):
    return config.Run.from_dict(
        {
            "strategy": {"name": "one_device", "devices": "cpu"},
            "data": {"name": str(data), "global_batch": 8},
            "model": {"name": str(model), **more},
            "train": {"epochs": 2},
            "output": {"dir": str(tmp_path / "run"), "save_model": False},
        }
    )


@pytest.mark.parametrize(("data", "rows"), [("source", 8), ("pipeline", 8), ("batches", None)])
def test_data_of_a_user_function_are_read(file, tmp_path, data, rows):
    batches = input_pipeline.pipeline(settings(tmp_path, f"{file}:{data}", "mlp"))
    assert input_pipeline.shapes(batches) == ((3,), None)
    assert sum(len(x) for x, _ in batches) == 24
    assert input_pipeline.is_pipeline(batches) == (rows is not None)
    assert (
        user_functions.load(f"{file}:batches", "data.name").__globals__["RUNS"] == 1
    )  # a file runs once


def test_a_run_of_own_data_and_a_compiled_model(file, tmp_path, capsys):
    summary = run(settings(tmp_path, f"{file}:batches", f"{file}:compiled"))
    assert set(summary) >= {"loss", "mae"}
    assert "accuracy" not in summary
    assert summary["examples_per_second"] > 0
    assert user_functions.load(f"{file}:Counting", "x").steps > 0
    assert "loss" in capsys.readouterr().out


def test_metrics_of_a_custom_test_step_are_reported(file, tmp_path, capsys):
    """Metrics may have the names of other entries of a summary."""
    summary = run(settings(tmp_path, f"{file}:batches", f"{file}:other"))
    assert summary["metrics"] == {"seconds": -5, "name": 7}
    assert (summary["seconds"] > 0, summary["name"]) == (True, "run")
    assert "name 7.0000, seconds -5.0000 on the evaluation split" in capsys.readouterr().out


def test_a_model_that_is_not_compiled_is_compiled_as_usual(file, tmp_path):
    assert "accuracy" in run(
        settings(tmp_path, f"{file}:source", f"{file}:build", options={"width": 2})
    )


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ("absent.py:batches", "mlp", "data.name=absent.py:batches: no such file as"),
        ("{file}:batchs", "mlp", "data.name=.*defines no function batchs. Did you mean batches"),
        (
            "{file}:number",
            "mlp",
            "data.name=.*expected the function to return a Source.*'train'; received int",
        ),
        (
            "{file}:source",
            "mlp",
            "data.name: an array .*|data.name: .*known number of classes.*model.options.classes",
        ),
        ("{file}:source", "absent.py:build", "model.name=absent.py:build: no such file"),
        ("{file}:source", "absent.parts:build", "model.name=absent.parts:build: no module absent"),
        (
            "{file}:source",
            "{file}:nothing",
            "model.name=.*expected the function to return a keras.Model, received NoneType",
        ),
        ("{file}:source", "{file}:compiled?", "model.name: expected FILE.py:FUNCTION"),
    ],
)
def test_errors_name_the_config_key(file, tmp_path, data, model, message):
    with pytest.raises(ValueError, match=message):
        run(settings(tmp_path, data.format(file=file), model.format(file=file)))


@pytest.mark.parametrize("key", user_functions.KEYS)
def test_a_file_that_does_not_exist_is_found_at_once(file, tmp_path, key):
    (tmp_path / "a,b.py").touch()
    wrong = "absent.py:f"
    if key == "train.metrics":
        wrong = f"accuracy, {file}:metric, {wrong}"
    words = [f"--config.{key}={wrong}", f"--config.data.name={tmp_path}/a,b.py:examples"]
    words = words[: 1 if key == "data.name" else 2]
    with pytest.raises(
        ValueError,
        match=rf"^{key}: expected FILE.py:FUNCTION of a file that exists, received 'absent.py:f'; "
        r"there is no file /.*/absent\.py\.",
    ):
        parse(["--config=digits", *words])


def test_place_of_a_file_that_does_not_exist_is_named(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: digits\ntrain:\n  loss: absent.py:f\n")
    with pytest.raises(ValueError, match=rf"^{path}, line 3: train\.loss: expected FILE.py:FUNC"):
        parse([f"--config={path}"])


def test_options_that_a_function_does_not_take_are_named(file, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"model.name=.*input_shape, classes, depth, which include model.options.*'depth'",
    ):
        run(settings(tmp_path, f"{file}:source", f"{file}:build", options={"depth": 2}))


def test_code_that_fails_is_named_with_its_line(tmp_path):
    (tmp_path / "broken_parts.py").write_text("x = 1\ny = x / 0\n")
    with pytest.raises(
        ValueError, match=r"model.name=.*ZeroDivisionError in line 2 of .*broken_parts.py"
    ):
        models.build(f"{tmp_path}/broken_parts.py:build", input_shape=(1,), classes=2)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\ny = = 2\n", r"SyntaxError in line 2 of .*broken_parts\.py: invalid syntax"),
        (
            "x = 1\nimport json\njson.loads('{')\n",
            r"JSONDecodeError in line 3 of .*broken_parts\.py",
        ),
    ],
)
def test_code_that_fails_elsewhere_is_named_with_the_line_of_the_file(
    tmp_path, monkeypatch, code, message
):
    (tmp_path / "broken_parts.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for name in (f"{tmp_path}/broken_parts.py", "broken_parts"):
        with pytest.raises(ValueError, match=message):
            user_functions.load(f"{name}:build", "model.name")


def test_a_pipeline_begins_where_the_run_does(file, tmp_path):
    batches = input_pipeline.pipeline(settings(tmp_path, f"{file}:pipeline", "mlp"))
    input_pipeline.begin_epoch(batches, 1)
    expected = pipeline(user_functions.load(f"{file}:source", "x")(None, "train"), 8, seed=3)
    expected.epochs.next = 1
    for (x, _), (y, _) in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(x, y)
    input_pipeline.begin_epoch(tf.data.Dataset.range(3), 1)  # has no order that could go on
