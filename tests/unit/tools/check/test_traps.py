"""Test that `tfdist check` finds each trap at its line, and none in right scripts."""

import json
import re
import subprocess
import sys

import pytest

from tests.processes import ROOT, environment
from tfdist import cli
from tfdist.tools.check import traps

HEAD = """\
import keras
import numpy as np
import tensorflow as tf
import tfdist
strategy = tfdist.make_strategy()
"""
TRAINS = HEAD + "with strategy.scope():\n    model = keras.Sequential([])\n"


def step(code):
    lines = [f"        {line}" for line in code.splitlines()]
    return HEAD + "\n".join(
        ["class Mine(keras.Model):", "    def train_step(self, data):", *lines, ""]
    )


# Script, line that has the trap, kind.
WRONG = [
    ("import keras\nmodel = keras.Sequential([])\nmodel.fit(x, y)\n", 3, "no-strategy"),
    ("import keras\nmodel.fit(x, y)\nmodel.fit(x, y)\n", 2, "no-strategy"),
    ("import keras\nfor x, y in data:\n    m.train_on_batch(x, y)\n", 3, "no-strategy"),
    ("import tf_keras as keras\n", 1, "keras-2"),
    ("from tf_keras.layers import Dense\n", 1, "keras-2"),
    ("import keras\noptimizer.apply(grads, v)\n", 2, "own-loop"),
    ("import keras\nopt = keras.optimizers.Adam(0.1)\nopt.apply(grads, v)\n", 3, "own-loop"),
    (
        "from keras.optimizers import SGD as S\nopt: S = S(0.1)\nopt.apply_gradients(pairs)\n",
        3,
        "own-loop",
    ),
    (
        "import tensorflow as tf\nself.o = tf.keras.optimizers.get('sgd')\nself.o.apply(g, v)\n",
        3,
        "own-loop",
    ),
    ("from absl import app\noptimizer.apply(grads, v)\napp.run(main)\n", 2, "own-loop"),
    (TRAINS + "self.opt.apply_gradients(zip(grads, v))\n", 8, "own-loop"),
    ("import tensorflow as tf\ns = tf.distribute.MirroredStrategy()\n", 2, "other-strategy"),
    (
        "from tensorflow.distribute import MultiWorkerMirroredStrategy as S\ns = S()\n",
        2,
        "other-strategy",
    ),
    (
        "import tensorflow as tf, tfdist\nx = tf.data.Dataset.range(3)\n"
        "s = tfdist.make_strategy()\n",
        2,
        "before-strategy",
    ),
    (
        "from keras import distribution as d\nd.set_distribution(d.DataParallel())\nm.fit(x)\n",
        2,
        "keras-distribution",
    ),
    (
        "import keras, tfdist\nmodel = keras.Sequential([])\ntfdist.init()\n",
        2,
        "before-strategy",
    ),
    (HEAD + "model = keras.Sequential([])\n", 6, "model-outside-scope"),
    (HEAD + "from keras import layers, Model\nm = Model(1, 2)\n", 7, "model-outside-scope"),
    (HEAD + "m = tf.keras.applications.ResNet50()\n", 6, "model-outside-scope"),
    (
        HEAD + "def build():\n    return keras.Sequential([])\nmodel = build()\n",
        7,
        "model-outside-scope",
    ),
    (TRAINS + "model.compile(keras.optimizers.Adam(), 'mse')\n", 8, "optimizer-outside-scope"),
    (TRAINS + "data = data.shard(4, index)\n", 8, "shard"),
    (TRAINS + "data = data.shard(num_shards=2, index=0)\n", 8, "shard"),
    (TRAINS + "data.batch(GLOBAL_BATCH // strategy.num_replicas_in_sync)\n", 8, "replica-batch"),
    (TRAINS + "batch_size = 64 * strategy.num_replicas_in_sync\n", 8, "learning-rate"),
    (TRAINS + "random = np.random.default_rng()\n", 8, "unseeded"),
    (TRAINS + "random = np.random.default_rng(None)\n", 8, "unseeded"),
    (TRAINS + "random = np.random.RandomState()\n", 8, "unseeded"),
    (TRAINS + "random = np.random.RandomState(seed=None)\n", 8, "unseeded"),
    (
        "import keras, tfdist\nx = keras.Input([1])\ns = tfdist.make_strategy() if a else None\n",
        2,
        "before-strategy",
    ),
    (
        TRAINS + "data = data.shuffle(100)\nc = tfdist.BackupAndRestore('x')\n",
        8,
        "shuffle-seed",
    ),
    (step("loss = tf.reduce_sum(x)"), 8, "sum-in-step"),
    (step("loss = keras.ops.sum(x)"), 8, "sum-in-step"),
    (step("loss = tf.reduce_sum(x, axis=[0, 1])"), 8, "sum-in-step"),
    (step("loss = tf.reduce_sum(x, axes)"), 8, "sum-in-step"),
    (step("loss = tf.nn.compute_average_loss(x)"), 8, "mean-by-hand"),
    (step("loss = x / tf.distribute.get_strategy().num_replicas_in_sync"), 8, "mean-by-hand"),
    (step("g, _ = tf.clip_by_global_norm(g, 1.0)"), 8, "clip-in-step"),
    (step("self.w.assign_sub(0.1 * g)"), 8, "assign-in-step"),
    (TRAINS + "keras.layers.LSTM(3, stateful=True)\n", 8, "stateful"),
    (
        TRAINS + "class C(keras.callbacks.Callback):\n    def on_epoch_end(self, epoch, logs):\n"
        "        with open('x', 'w') as f:\n            f.write('')\n",
        10,
        "callback-writes",
    ),
    (
        TRAINS + "class C(keras.callbacks.Callback):\n    def on_epoch_end(self, epoch, logs):\n"
        "        np.save('x', [1])\n",
        10,
        "callback-writes",
    ),
    (TRAINS + "if rank == 0:\n    model.save('x.keras')\n", 9, "save-on-chief"),
    (
        TRAINS + "class C(keras.callbacks.Callback):\n    def on_train_batch_end(self, b, logs):\n"
        "        pass\n",
        9,
        "watches-batches",
    ),
]


@pytest.mark.parametrize(("source", "line", "kind"), WRONG)
def test_a_trap_is_found_at_its_line(source, line, kind):
    assert traps.find(source) == [traps.Finding(line, kind)]


def test_every_trap_has_a_test_and_a_section_of_the_docs():
    assert {kind for _, _, kind in WRONG} == traps.TRAPS.keys()
    for trap in traps.TRAPS.values():
        page, section = trap.page.split("#")
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
        assert section in slugs, trap.page
        assert trap.problem[-1] not in ".:"
        assert trap.remedy[-1] not in ".:"


@pytest.mark.parametrize(
    "source",
    [
        TRAINS + "model.compile('adam', 'mse')\nmodel.fit(x, y)\nmodel.save('x.keras')\n",
        HEAD + "def build():\n    return keras.Sequential([])\n"
        "def make():\n    return build()\nwith strategy.scope():\n    model = make()\n",
        HEAD + "def build():\n    return keras.Sequential([])\nprepare(build)\n",
        TRAINS + "n = strategy.num_replicas_in_sync\nbatch = 64 * strategy.num_replicas_in_sync\n"
        "learning_rate = 0.1 * strategy.num_replicas_in_sync\n",
        TRAINS + "batch = 64 * strategy.num_replicas_in_sync\n"
        "with strategy.scope():\n"
        "    model.compile(keras.optimizers.SGD(0.1 * strategy.num_replicas_in_sync), 'mse')\n",
        TRAINS + "data = data.shuffle(100, seed=3)\nc = tfdist.BackupAndRestore('x')\n",
        TRAINS + "class C(keras.callbacks.Callback):\n    def on_epoch_end(self, epoch, logs):\n"
        "        if self.is_chief:\n            open('x', 'w')\n"
        "        open('x').read()\n        self.model.save('x.keras')\n",
        step("loss = tf.reduce_mean(x)"),
        "import keras, tfdist\ntfdist.enable()\nkeras.distribution.initialize()\n"
        "keras.distribution.set_distribution(keras.distribution.DataParallel())\n"
        "model = keras.Sequential([])\nmodel.fit(x, y)\n",
        "import keras, tfdist\ntfdist.init(devices=2)\nmodel = keras.Sequential([])\n"
        "model.compile(keras.optimizers.Adam(), 'mse')\nmodel.fit(x, y)\n",
        "from tfdist import init\nimport keras\ndef main():\n    init()\n"
        "    keras.Sequential([]).fit(x, y)\n",
        TRAINS + "strategy.run(step)\ndef step():\n    optimizer.apply(grads, v)\n",
        step("self.optimizer.apply(grads, v)"),
        "import tfdist\nd = tfdist.make_strategy()\nd.run(step)\noptimizer.apply(grads, v)\n",
        "import keras\nopt = keras.optimizers.Adam(0.1)\nframe.apply(len)\n",
        "import keras, tfdist\ntfdist.init()\nmodel.train_on_batch(x, y)\n",
        TRAINS + "array.shard()\nr = np.random.RandomState(3)\ng = np.random.default_rng(seed=3)\n",
        "from tensorflow import keras\nimport tf_keras_vis\n",
        "import tfdist\nprint('no training')\n",
        "",
        step("loss = -tf.reduce_mean(tf.reduce_sum(p * z, axis=1)) + keras.ops.sum(x, (1, -1))[0]"),
    ],
)
def test_right_scripts_have_none(source):
    assert traps.find(source) == []


def test_examples_and_templates_have_none():
    templates = (ROOT / "tfdist" / "tools" / "templates").glob("*/train.py.template")
    for path in [*(ROOT / "examples").glob("*.py"), *templates]:
        found = traps.find(path.read_text(encoding="utf-8"))
        assert [f for f in found if f.kind != "watches-batches"] == [], path


def test_the_command_prints_line_remedy_and_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(HEAD + "model = keras.Sequential([])\n")
    assert cli.main(["check", "train.py"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("train.py:6: model-outside-scope: a model that is made outside of")
    assert "    Remedy: make it in `with strategy.scope():`" in printed
    assert "    See docs/training.md#models-outside-of-the-scope\n" in printed
    assert printed.endswith("train.py: 1 trap found\n")
    assert cli.main(["check", "train.py", "--json"]) == 1
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["line"], entry["kind"]) == (6, "model-outside-scope")
    (tmp_path / "train.py").write_text(TRAINS)
    assert cli.main(["check", "train.py"]) == 0
    assert capsys.readouterr().out == "train.py: no traps found\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "SCRIPT: expected a Python file, received train.py: No such file"),
        ("x = 1\ny = = 2\n", "SCRIPT: expected Python, received train.py:2: invalid syntax"),
        ("x\0", "SCRIPT: expected Python, received train.py: "),
    ],
)
def test_what_is_no_script_is_an_error(text, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "train.py").write_text(text)
    assert cli.main(["check", "train.py"]) == 2
    assert message in capsys.readouterr().err


def test_it_loads_no_tensorflow():
    code = (
        "import sys; from tfdist import cli; cli.main(['check', 'examples/digits.py']); "
        "assert not {'tensorflow', 'keras', 'numpy'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=ROOT,
        timeout=60,
        stdout=subprocess.DEVNULL,
        env=environment(),
    )
