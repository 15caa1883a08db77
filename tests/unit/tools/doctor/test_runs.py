"""Test doctor's checks of a run.

Doctor really tries configs with one fault each, and really measures memory.
"""

import dataclasses

import pytest

from tfdist.tools.doctor import file_systems, probe, runs, trial
from tfdist.tools.doctor.machine import Card, Machine

GB = 1 << 30
ROOMY = Machine(available=64 * GB, capacity=64 * GB)


@pytest.fixture
def words(tmp_path, digits_dir, monkeypatch):
    """Return the arguments of a config that fits; more arguments change it."""
    monkeypatch.chdir(tmp_path)
    lines = [
        "import tfdist",
        "def get_config():",
        "    config = tfdist.config.default()",
        "    config.model.name = 'mlp'",
        "    return config",
    ]
    (tmp_path / "run.py").write_text("\n".join(lines))
    return [
        "--config=run.py",
        f"--config.data.data_dir={digits_dir}",
        "--config.data.train_split=train[:20%]",
        "--config.strategy.devices=cpu",
    ]


def tried(words, workers=2):
    result = None
    for result in trial.steps(words, workers):
        assert result.stage in trial.STAGES
    return result


def bad(checks):
    assert all(check.remedy for check in checks if check.status != "pass")
    return [(check.name, check.status) for check in checks if check.status != "pass"]


def test_a_run_that_fits(words, tmp_path):
    result = tried(words)
    assert result.stage == "done"
    assert result.rows == 32
    assert result.weights == 4 * result.parameters == result.gradients
    assert result.optimizer > 2 * result.weights  # Adam's two moments, and its counters
    assert result.peak > result.grown
    assert not bad(runs.check_trial(result, ROOMY, workers=2, here=2))
    assert not (tmp_path / "runs").exists()


def test_memory_is_measured(words):
    """The process really grows by at least the parameters and the optimizer's copies."""
    large = tried([*words, "--config.model.options.widths=(4096, 2048)"])
    assert large.weights > 32 << 20
    assert large.grown > 2.5 * large.weights  # parameters, and Adam's moments, at the least


def test_data_and_a_model_of_the_users(words, tmp_path):
    lines = [
        "import keras, tensorflow as tf",
        "def data(settings, split):",
        (
            "    return tf.data.Dataset.from_tensors("
            "({'a': tf.ones([4, 3])}, tf.zeros([4]))).repeat(3)"
        ),
        "def model(input_shape, classes):",
        "    x = keras.Input(input_shape['a'], name='a')",
        "    model = keras.Model({'a': x}, keras.layers.Dense(1)(x))",
        "    model.compile('sgd', 'mse')",
        "    return model",
    ]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    result = tried(
        [
            *words,
            "--config.data.name=mine.py:data",
            "--config.model.name=mine.py:model",
            "--config.data.global_batch=4",
        ]
    )
    assert (result.error, result.stage, result.parameters, result.rows) == ("", "done", 4, 2)
    assert "inputs a [3]" in result.data


@pytest.mark.parametrize("kind", ["sparse", "ragged"])
def test_inputs_that_are_not_dense(words, tmp_path, kind):
    make = {
        "sparse": "tf.sparse.from_dense(tf.eye(4))",
        "ragged": "tf.RaggedTensor.from_tensor(tf.eye(4))",
    }[kind]
    lines = [
        "import keras, tensorflow as tf",
        "def data(settings, split):",
        f"    return tf.data.Dataset.from_tensors(({make}, tf.zeros([4]))).repeat(3)",
        "class Sums(keras.Model):",
        "    def build(self, shape):",
        "        self.w = self.add_weight(shape=(1,))",
        "    def call(self, x):",
        (
            "        dense = tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) "
            "else x.to_tensor()"
        ),
        "        return tf.reduce_sum(dense, 1, keepdims=True) * self.w",
        "def model(input_shape, classes):",
        "    model = Sums()",
        "    model.compile('sgd', 'mse')",
        "    return model",
    ]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    result = tried(
        [
            *words,
            "--config.data.name=mine.py:data",
            "--config.model.name=mine.py:model",
            "--config.data.global_batch=4",
        ]
    )
    assert (result.error, result.stage, result.rows) == ("", "done", 2)


@pytest.mark.parametrize(
    ("word", "stage", "text"),
    [
        (
            "--config.train.epohs=3",
            "config",
            "train.epohs: no such key. Did you mean train.epochs?",
        ),
        ("--config.train.epochs=0", "config", "train.epochs: expected at least 1, received 0"),
        ("--config.data.name=no_such_data", "data", "no such data set"),
        ("--config.data.eval_split=validation", "data", "no such split"),
        ("--config.data.augment=true", "config", "data.augment: expected data.image_size too"),
        ("--config.train.optimizer=adma", "config", "train.optimizer: received 'adma'"),
        ("--config.train.optimizer_options.bta_1=0.9", "model", "train.optimizer_options.bta_1"),
        ("--config.strategy.devices=gpu", "config", "TensorFlow sees no GPU"),
    ],
)
def test_a_fault_of_a_run(words, word, stage, text):
    result = tried([*words, word])
    assert result.stage == stage
    assert text in result.error
    (failure,) = [
        check for check in runs.check_trial(result, ROOMY, 2, 2) if check.status == "fail"
    ]
    assert failure.name == stage


def test_a_config_that_raises(words, tmp_path):
    (tmp_path / "run.py").write_text("def get_config():\n    return 1 / 0\n")
    assert "ZeroDivisionError in line 2 of run.py" in tried(words).error


def test_a_directory_with_a_finished_run(words, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "summary.json").write_text("{}")
    result = tried([*words, "--config.output.dir=old"])
    assert (result.stage, result.directory) == ("output", "old")
    assert bad(runs.check_trial(result, ROOMY, 2, 2)) == [("output", "fail")]


def test_a_data_set_that_would_be_downloaded(words, tmp_path):
    result = tried(
        [*words, "--config.data.name=mnist", f"--config.data.data_dir={tmp_path / 'empty'}"]
    )
    assert result.unprepared.startswith("mnist in ")
    assert bad(runs.check_trial(result, ROOMY, 2, 2)) == [("data", "warn")]
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize(
    ("batch", "workers", "expected"),
    [(64, 2, []), (64, 3, [("batch", "warn")]), (3, 4, [("batch", "warn")])],
)
def test_a_batch_that_does_not_divide(batch, workers, expected):
    result = trial.Trial(
        "done",
        name="x",
        directory="runs/x",
        global_batch=batch,
        data="x",
        parameters=1,
        rows=1,
        peak=GB,
    )
    assert bad(runs.check_trial(result, ROOMY, workers, 1)) == expected
    servers = dataclasses.replace(result, strategy="parameter_server")
    assert not bad(runs.check_trial(servers, ROOMY, workers, 1))


@pytest.mark.parametrize(
    ("machine", "gpu_peak", "status"),
    [
        (Machine(available=6 * GB), None, "pass"),
        (Machine(available=5 * GB), None, "warn"),
        (Machine(available=3 * GB), None, "fail"),
        (Machine(available=64 * GB, smi=(Card("H200", 140 * GB, 139 * GB),)), 20 * GB, "pass"),
        (Machine(available=64 * GB, smi=(Card("T4", 16 * GB, 15 * GB),)), 20 * GB, "fail"),
        (Machine(available=64 * GB, smi=(Card("T4", 16 * GB, 15 * GB),)), 14 * GB, "warn"),
        (Machine(available=64 * GB), 1 * GB, "warn"),  # unknown
        (Machine(available=3 * GB), 1 * GB, "fail"),
        (
            Machine(
                available=64 * GB,
                driven=2,
                visible="1",
                smi=(Card("T4", 16 * GB, 0), Card("H200", 140 * GB, 139 * GB)),
            ),
            20 * GB,
            "pass",
        ),
    ],
)
def test_memory_that_is_too_little(machine, gpu_peak, status):
    """Two processes need 2.2 GB each on this host."""
    result = trial.Trial(
        "done",
        name="x",
        directory="x",
        global_batch=2,
        data="x",
        parameters=1,
        rows=1,
        grown=GB,
        peak=int(2.2 * GB),
        gpu_peak=gpu_peak,
    )
    (memory,) = [
        check for check in runs.check_trial(result, machine, 2, 2) if check.name == "memory"
    ]
    assert memory.status == status


@pytest.mark.parametrize(("replicas", "status"), [(1, "pass"), (2, "warn"), (5, "fail")])
def test_replicas_share_the_memory_of_their_process(replicas, status):
    """Two processes need 2.2 GB each with one replica, and each replica takes 1 GB of it."""
    result = trial.Trial(
        "done",
        name="x",
        directory="x",
        global_batch=20,
        replicas=replicas,
        data="x",
        parameters=1,
        rows=1,
        grown=GB,
        peak=int(2.2 * GB),
    )
    (memory,) = [
        check
        for check in runs.check_trial(result, Machine(available=7 * GB), 2, 2)
        if check.name == "memory"
    ]
    assert memory.status == status
    assert (f"({replicas} replicas, of which one was measured)" in memory.found) == (replicas > 1)
    on_gpus = dataclasses.replace(result, gpu_peak=GB)
    assert not bad(
        runs.check_trial(
            on_gpus, Machine(available=7 * GB, smi=(Card("T4", 16 * GB, 15 * GB),)), 2, 2
        )
    )


def test_directories_that_only_tensorflow_can_write(tmp_path):
    (tmp_path / "file").write_text("mine")
    write_tests = [
        probe.try_directory(path)
        for path in (
            "ram://somewhere/runs",
            f"file://{tmp_path}/new",
            f"file://{tmp_path}/file/x",
            "none://x",
        )
    ]
    assert [file_systems.check_directory(write_test).status for write_test in write_tests] == [
        "pass",
        "pass",
        "fail",
        "fail",
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_files_that_another_host_writes_meanwhile_are_kept(tmp_path, monkeypatch):
    import tensorflow as tf

    rename = tf.io.gfile.rename

    def rename_and_write(old, new, overwrite=False):
        rename(old, new, overwrite)
        with tf.io.gfile.GFile(f"{new.rpartition('/')[0]}/snapshot", "w") as file:
            file.write("theirs")

    monkeypatch.setattr(tf.io.gfile, "rename", rename_and_write)
    for path in (f"file://{tmp_path}/new", "ram://another/new"):
        assert not probe.try_directory(path).error
        assert tf.io.gfile.listdir(path) == ["snapshot"]
