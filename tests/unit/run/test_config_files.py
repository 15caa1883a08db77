"""Test YAML config files: their keys, bases, overrides, and where mistakes are."""

import pytest

from tfdist.config import default
from tfdist.run.train_command import parse

SETTINGS = """\
base: digits
name: "2026"
data:
  shuffle: false
model:
  name: parts.py:build
  options: {widths: [8, 9], dropout: 1e-1}
train:
  learning_rate: 1
  schedule: steps
  schedule_options: {epochs: [1, 3]}
  metrics: [accuracy, parts.py:Hits]
  metric_options:
    Hits: {k: 2}
  class_weight: {0: 1.0, 3: 2}
telemetry:  # nothing yet
launch:
  on: slurm
  time: 12:30:00
"""


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    return tmp_path


def written(text, name="own.yaml"):
    with open(name, "w") as file:
        file.write(text)
    return f"--config={name}"


def test_a_yaml_file_has_the_keys_of_a_config():
    written("", "parts.py")
    run = parse([written(SETTINGS), "--config.train.epochs=5", "--config.train.learning_rate=0.5"])
    assert (run.name, run.data.shuffle, run.data.cache) == ("2026", False, True)  # cache: base
    # A mapping of options replaces that of the base.
    assert run.model.options == {"widths": (8, 9), "dropout": 0.1}
    assert (run.train.epochs, run.train.learning_rate) == (5, 0.5)
    assert run.train.schedule_options == {"epochs": (1, 3)}
    assert run.train.metric_names() == ("accuracy", "parts.py:Hits")
    assert run.train.metric_options == {"Hits": {"k": 2}}
    assert run.train.class_weights() == {0: 1.0, 3: 2.0}


def test_files_of_functions_are_found_beside_the_yaml_file():
    written("", "sub/parts.py")
    written("", "there.py")
    text = "model: {name: parts.py:build}\ntrain: {metrics: 'auc, parts.py:Hits, there.py:X'}\n"
    run = parse([written(text, "sub/own.yaml")])
    assert run.model.name == "sub/parts.py:build"
    assert run.train.metric_names() == ("auc", "sub/parts.py:Hits", "there.py:X")


def test_bases_may_be_yaml_python_or_packaged_and_have_bases():
    written("base: ../python.py:5\ndata: {cache: true}\ntrain: {seed: 3}\n", "sub/middle.yaml")
    written(
        "import tfdist\ndef get_config(text):\n    c = tfdist.config.default()\n"
        "    c.train.epochs = int(text)\n    c.train.seed = 2\n    return c\n",
        "python.py",
    )
    run = parse([written("base: sub/middle.yaml\nname: mine\n")])
    assert (run.name, run.train.epochs, run.train.seed, run.data.cache) == ("mine", 5, 3, True)


def test_a_file_with_the_defaults_changes_nothing():
    words = [written("name: run\ntrain: {epochs: 8}\noutput: {dir: null}\n")]
    assert parse(words).to_dict() == {k: v for k, v in default().to_dict().items() if k != "launch"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train:\n  epoch: 3\n",
            "own.yaml, line 2: train.epoch: no such key. Did you mean train.e",
        ),
        ("trian: {}\n", "own.yaml, line 1: trian: no such key. Did you mean train?"),
        ("train:\n  epochs: '3'\n", "own.yaml, line 2: train.epochs: expected a whole number, rec"),
        ("train:\n  epochs: 010\n", "own.yaml, line 2: train.epochs: expected a whole number, rec"),
        ("data:\n  cache: yes\n", "own.yaml, line 2: data.cache: expected true or false, received"),
        ("name: [a]\n", "own.yaml, line 1: name: expected text, received ['a']"),
        ("train: 3\n", "own.yaml, line 1: train: expected a section of keys, received 3."),
        ("train:\n  1: 2\n", "own.yaml, line 2: train.1: expected the name of a key, received 1."),
        (
            "train:\n  epochs: 3\n  epochs: 4\n",
            "own.yaml: the key 'epochs' appears twice; give each its own name in line 3",
        ),
        (
            "- a\n",
            "own.yaml: expected a mapping of keys, such as `train: {epochs: 3}`; received li",
        ),
        (
            "",
            "own.yaml: expected a mapping of keys, such as `train: {epochs: 3}`; received nothing",
        ),
        ("train: {epochs: 3\n", "own.yaml: while parsing a flow mapping in line 1"),
        (
            "base: digit\n",
            "own.yaml, line 1: base: expected a file beside this one or a packaged c",
        ),
        ("base: 3\n", "own.yaml, line 1: base: expected the name of a config"),
        ("base: own.yaml\n", "own.yaml: base: expected a config that does not depend on this file"),
        (
            "base: digits\ntrain:\n  schedule_options:\n    finl: 0\n",
            'own.yaml, line 4: train.schedule_options.finl: no option of "cosine". Did you mean fi',
        ),
        (
            "train:\n  metrics: auc\n  metric_options:\n    a.py:Hits: {k: 2}\n",
            "own.yaml, line 4: train.metric_options.a.py:Hits: expected a name without a dot",
        ),
        (
            "train:\n  callbacks:\n  - early_stoping\n",
            "own.yaml, line 2: train.callbacks: received 'early_stoping'. Did you mean early_stop",
        ),
    ],
)
def test_a_mistake_is_named_with_its_file_and_line(text, message):
    with pytest.raises(ValueError) as caught:
        parse([written(text)])
    assert str(caught.value).startswith(message)


def test_a_mistake_of_a_base_is_named_there():
    written("train:\n  epochs: 0\n", "sub/base.yaml")
    with pytest.raises(ValueError, match=r"^sub/base.yaml, line 2: train.epochs: expected at lea"):
        parse([written("base: sub/base.yaml\nname: x\n")])


def test_a_mistake_on_the_command_line_is_not_blamed_on_the_file():
    with pytest.raises(ValueError, match=r"^train.epochs: expected at least 1, received 0"):
        parse([written("train:\n  epochs: 3\n"), "--config.train.epochs=0"])
    with pytest.raises(ValueError, match=r"^--config=own.yaml:x: expected no text after the name"):
        parse([written("name: x\n") + ":x"])
    with pytest.raises(ValueError, match=r"^--config=none.yaml: no such file in "):
        parse(["--config=none.yaml"])
    with open("binary.yaml", "wb") as file:
        file.write(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"^binary.yaml: expected UTF-8 text"):
        parse(["--config=binary.yaml"])
