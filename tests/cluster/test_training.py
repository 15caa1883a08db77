"""Test that two workers train as one.

Test who writes which file, who resumes where, and which of their mistakes are named.
"""

import csv
import json
import pickle
import re

import keras
import numpy as np
import pytest

from tests.cluster.scripts.files import CRASH_EPOCH, EPOCHS, LONG_STEPS, SLOW_STEPS
from tests.parity.cases import data
from tests.processes import PYTHON, ROOT, group, workers

TIMEOUT_S = 240  # for one cluster: about 25 on an idle machine of 2 cores
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


def script(name, *arguments):
    return [PYTHON, "-m", f"tests.cluster.scripts.{name}", *map(str, arguments)]


# --- Files, resuming, speed: one job that is killed, and started again ----------------------------
class Job:
    """Run a job of two workers whose first attempt is killed, and read its files."""

    def __init__(self, directory):
        self.directory = directory
        for stage in ("crash", "finish"):
            logs = directory / stage
            logs.mkdir()
            with group(logs) as members:
                workers(members, 2, script("files", directory, stage), PYTHONPATH=str(ROOT))
                if stage == "crash":
                    assert not any(c == 0 for c in members.wait(TIMEOUT_S).values()), members.logs()
                else:
                    members.succeed(TIMEOUT_S)
                self.logs = [members.log(f"worker-{i}") for i in range(2)]
        self.ends = [(directory / f"end-{i}").read_text() for i in range(2)]
        self.results = [
            pickle.loads((directory / f"result-{i}.pickle").read_bytes()) for i in range(2)
        ]

    def files(self, where):
        return sorted(
            str(p.relative_to(self.directory / where))
            for p in (self.directory / where).rglob("*")
            if p.is_file()
        )


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("job"))


def test_both_workers_resume_at_the_chiefs_epoch(job):
    for result in job.results:
        assert result["epochs"] == list(range(CRASH_EPOCH, EPOCHS))
    assert job.files("backup") == []  # deleted after success


def test_a_worker_stays_until_the_others_have_received_what_it_sent(job):
    assert job.ends == ["2", "2"]


def test_both_workers_may_load_what_was_saved(job):
    assert [result["saved and loaded"] for result in job.results] == [True, True]


def test_both_workers_report_the_same(job):
    chief, other = job.results
    assert set(chief["history"]) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert chief["history"] == other["history"]
    for key in ("weights", "slow weights"):
        for a, b in zip(chief[key], other[key], strict=True):
            np.testing.assert_array_equal(a, b)


def test_only_the_chief_writes(job):
    assert not (job.directory / "rank-1").exists() or job.files("rank-1") == []
    assert not (job.directory / "rank-1.csv").exists()


def test_a_worker_that_saves_to_another_path_than_the_chief_is_told_once(job):
    chief, other = job.logs
    assert other.count("worker:1 has not written") == 1, other
    assert re.search(
        r"worker:1 has not written '.*/rank-1/\S+': in model.save_weights\(\) only worker:0 "
        r"writes, and has written '.*/rank-0/\S+'\. To load the file .* pass the same path",
        other,
    ), other
    assert "has not written" not in chief


def test_files_of_the_chief_are_complete(job):
    chief = job.directory / "rank-0"
    with open(chief / "log.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(r["epoch"]) for r in rows] == list(range(EPOCHS))  # those before the crash too
    np.testing.assert_allclose(
        [float(r["val_loss"]) for r in rows], job.results[0]["history"]["val_loss"], rtol=1e-6
    )
    files = job.files("rank-0")
    assert [f for f in files if f.startswith("epoch-")] == [
        f"epoch-{i}.keras" for i in range(1, EPOCHS + 1)
    ]
    assert {"step-2.weights.h5", "step-4.weights.h5"} <= set(files)
    assert "exported/saved_model.pb" in files
    for name in ("model.keras", f"epoch-{EPOCHS}.keras", "model.weights.h5"):
        saved = keras.models.load_model(
            chief / (name if name.endswith(".keras") else "model.keras")
        )
        if name.endswith(".h5"):
            saved.load_weights(chief / name)
        for a, b in zip(saved.get_weights(), job.results[0]["weights"], strict=True):
            np.testing.assert_array_equal(a, b)


def test_models_are_saved_and_quantized_inside_the_scope(job):
    """Only the chief saves there, so that nothing that it makes may be a collective."""
    (weights, predictions, quantized, narrow, state, read), other = (
        result["scoped"] for result in job.results
    )
    for a, b in zip(
        weights + quantized + [predictions, narrow],
        [*other[0], *other[2], other[1], other[3]],
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    assert float(narrow[0]) == 200
    assert (state, read) == tuple(other[4:])
    assert [values[0] for values in read] == pytest.approx([0.001, 0.0005])
    assert read[0][1:2] + read[0][3:] == read[1][1:2] + read[1][3:]
    assert state[1]
    assert "int8" in {w.dtype.name for w in quantized}
    chief = job.directory / "rank-0"
    for name in ("scoped.keras", "scoped-1.keras", "scoped.h5"):
        for a, b in zip(keras.models.load_model(chief / name).get_weights(), weights, strict=True):
            np.testing.assert_array_equal(a, b)
    saved = keras.models.load_model(chief / "quantized.keras", compile=False)
    np.testing.assert_allclose(saved.predict(data()[0], verbose=0), predictions, atol=1e-6)
    saved = keras.models.load_model(chief / "scoped.keras")
    saved.load_weights(chief / "scoped.weights.h5")


@pytest.mark.parametrize(
    "where",
    [
        "rank-0/keras/train",
        "rank-0/keras/validation",
        "rank-0/chief/train",
        "each/train",
        "each/worker-0",
        "each/worker-1",
    ],
)
def test_tensorboard_logs_are_in_the_expected_directory(job, where):
    assert any("events.out" in f for f in job.files(where))


def test_log_directory_of_all_workers_has_no_other_files(job):
    assert {f.split("/")[0] for f in job.files("each")} == {
        "train",
        "validation",
        "worker-0",
        "worker-1",
    }


def test_one_progress_bar(job):
    chief, other = job.logs
    assert f"Epoch {EPOCHS}/{EPOCHS}" in chief
    assert "Epoch" not in other


def test_workers_of_unequal_speed_run_ahead_together(job):
    assert [r["slow steps"] for r in job.results] == [SLOW_STEPS] * 2


def test_long_call_is_watched_while_it_runs(job):
    """A thread of each worker watches: a collective there would collide with one of the step."""
    assert [r["long steps"] for r in job.results] == [LONG_STEPS] * 2


def test_steps_start_no_threads_of_their_own(job):
    """With TensorFlow's own timeout each collective would start a thread."""
    assert all(r["slow threads"] < SLOW_STEPS / 2 for r in job.results), [
        r["slow threads"] for r in job.results
    ]


# --- Mistakes -------------------------------------------------------------------------------------
BATCHES = (
    r"worker:1 differs from worker:0 in global batches: .*Pass a seed to shuffle\(\).*do not "
    r"shard\(\) by worker"
)
MISTAKES = {
    "data_of_its_own": BATCHES,
    "shuffled_by_itself": BATCHES,
    "shorter_data": "worker:1 differs from worker:0 in length of the training data: 4 against 5",
    "other_epochs": "worker:1 differs from worker:0 in epochs: 2 against 1",
    "other_weights": (
        r"worker:1 differs from worker:0 in weights after the first step"
        r".*strategy.scope\(\)"
    ),
    "other_weights_of_local_steps": (
        "worker:1 differs from worker:0 in weights after the first step"
    ),
    "other_steps_per_execution": (
        "worker:1 differs from worker:0 in steps_per_execution: 2 against 1"
    ),
    "outside_of_the_scope": (
        "each of 2 processes would train it alone, on all examples.*OneDeviceStrategy"
    ),
    "shards": "worker:1 differs from worker:0 in length of the training data: 2 against 3",
    "shards_without_length": BATCHES,
    "shorter_generator": "waited too long for worker:",
}


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory):
    """Return the error of each mistake on each worker; the last one ended the process."""
    directory = tmp_path_factory.mktemp("mistakes")
    with group(directory) as members:
        workers(
            members,
            2,
            script("mistakes", directory / "{index}.json", *MISTAKES),
            PYTHONPATH=str(ROOT),
        )
        codes = members.wait(TIMEOUT_S)
        errors = [json.loads((directory / f"{i}.json").read_text()) for i in range(2)]
        for i in range(2):
            assert codes[f"worker-{i}"] != 0, members.logs()
            errors[i][list(MISTAKES)[-1]] = members.log(f"worker-{i}")
    return errors


@pytest.mark.parametrize("mistake", MISTAKES)
def test_workers_that_differ_are_named_with_the_difference(mistakes, mistake):
    for errors in mistakes:
        assert errors.get(mistake), f"no error; all: {errors}"
        with pytest.raises(ValueError, match=MISTAKES[mistake]):
            raise ValueError(errors[mistake])


def test_another_model_on_one_worker_ends_both(tmp_path):
    with group(tmp_path) as members:
        workers(
            members,
            2,
            script("mistakes", tmp_path / "{index}.json", "other_model"),
            PYTHONPATH=str(ROOT),
        )
        assert 0 not in members.wait(TIMEOUT_S).values(), members.logs()
        logs = [members.log(worker) for worker in members.processes]
        explained = ["is out of step with worker:" in log for log in logs]
        assert any(explained), members.logs()
        assert all(
            said or "Collective ops is aborted by" in log  # it may see only that its peer is gone
            for said, log in zip(explained, logs, strict=True)
        ), members.logs()
        assert any("Collective instance" in log for log in logs), members.logs()


def test_worker_that_never_starts_is_named_in_time(tmp_path):
    from tfdist import ClusterSpec

    config = ClusterSpec.local(workers=2).for_task("worker", 0).to_tf_config()
    with group(tmp_path) as members:
        members.start(
            "worker-0",
            [PYTHON, "-c", "import tfdist; tfdist.make_strategy(start_timeout=3)"],
            TF_CONFIG=config,
        )
        assert members.wait(60)["worker-0"] != 0
        assert "TimeoutError" in members.log("worker-0") or "PeersAbsent" in members.log("worker-0")
        assert "worker:1 at 127.0.0.1" in members.log("worker-0")
