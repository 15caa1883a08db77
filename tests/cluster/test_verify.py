"""Test `tfdist verify` in real processes: each planted fault is found and named.

Models without one pass under each strategy.
"""

import concurrent.futures
import json
import subprocess

import pytest

from tests.processes import PYTHON, ROOT, group

TIMEOUT_S = 240  # for one comparison: 10 to 25 on an idle machine of 2 cores
SCRIPT = ROOT / "tests" / "cluster" / "scripts" / "verified.py"
DEVICES = ("--strategy=mirrored", "--devices=2", "--quick")
RUNS = {
    "mlp": ("--workers=2", "--json"),
    "sharded": ("--workers=2", "--quick", "--json"),
    "digits": DEVICES,  # of configs/: a CNN
    "transformer": ("--strategy=central_storage", "--quick"),
    "resnet": DEVICES,
    "summed": DEVICES,
    "overlap": DEVICES,
    "reported": (*DEVICES, "--json"),
    "seed": ("--workers=2", "--quick"),
    "overlapping": ("--workers=2", "--quick"),
}
pytestmark = pytest.mark.timeout(len(RUNS) * TIMEOUT_S)


@pytest.fixture(scope="module")
def done(tmp_path_factory, digits_dir):
    """Run all comparisons, two at a time; return exit code and output of each."""
    directory = tmp_path_factory.mktemp("verify")

    def verify(name):
        (directory / name).mkdir()
        with group(directory / name) as members:
            config = ROOT / "configs" / "digits.py" if name == "digits" else f"{SCRIPT}:{name}"
            command = [
                PYTHON,
                "-m",
                "tfdist",
                "verify",
                f"--config={config}",
                "--steps=3",
                *RUNS[name],
            ]
            environ = {"PYTHONPATH": str(ROOT), "TFDS_DATA_DIR": str(digits_dir)}
            members.start(name, command, stderr=subprocess.DEVNULL, **environ)
            return members.wait(TIMEOUT_S)[name], members.log(name)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(RUNS, pool.map(verify, RUNS), strict=True))


def test_workers_equal_one_replica_whichever_way_they_run(done):
    code, out = done["mlp"]
    assert code == 0, out
    verdict = json.loads(out)
    assert verdict["same"]
    assert list(verdict["ways"]) == [
        "AUTO, compiled",
        "AUTO, not compiled",
        "RING, compiled",
        "one replica, not compiled",
    ]
    for name, way in verdict["ways"].items():
        assert way["steps"] == 3
        assert way["replicas"] == (1 if name.startswith("one") else 2)
        assert {"loss and metrics", "gradients' norms", "weights", "optimizer"} <= set(
            way["largest"]
        )
        assert all(difference["value"] <= 1e-4 for difference in way["largest"].values()), way


def test_workers_that_share_weights_equal_one_replica_that_has_them_all(done):
    code, out = done["sharded"]
    assert code == 0, out
    (way,) = json.loads(out)["ways"].values()
    assert (way["steps"], way["replicas"]) == (3, 2)
    assert {"loss and metrics", "weights", "optimizer"} <= set(way["largest"])
    assert "gradients' norms" not in way["largest"]


@pytest.mark.parametrize("name", ["digits", "transformer"])
def test_devices_equal_one_replica(done, name):
    code, out = done[name]
    assert code == 0, out
    assert "The same: 2 devices compute what one replica computes" in out
    assert "the same\n" in out
    assert "Dropout and noise are off here" in out


def test_statistics_that_are_not_synchronized_are_named(done):
    code, out = done["resnet"]
    assert code == 1, out
    assert "Dropout and noise" not in out
    assert "step 1, layer batch_normalization" in out
    assert "(BatchNormalization): the moving statistics" in out
    assert "BatchNormalization(synchronized=True)" in out


def test_a_loss_that_is_a_sum_is_named(done):
    code, out = done["summed"]
    assert code == 1, out
    assert "all gradients are 2 times too small: the loss is a sum over rows" in " ".join(
        out.split()
    )


def test_a_loss_whose_rows_depend_on_each_other_is_named(done):
    code, out = done["overlap"]
    assert code == 1, out
    assert "gather those of all replicas there with tfdist.all_gather_rows(x)" in " ".join(
        out.split()
    )


def test_reported_values_that_do_not_add_up_are_named(done):
    """One of them differs only where the replicas' rows do, in the last step."""
    code, out = done["reported"]
    assert code == 1, out
    (way,) = json.loads(out)["ways"].values()
    assert "only what is reported differs: largest, averaged." in way["likely_cause"], way


def test_a_worker_with_another_seed_is_named(done):
    code, out = done["seed"]
    assert code == 1, out
    assert "worker:1 differs from worker:0 in global batches" in out
    assert "another seed" in out
    assert "Traceback" not in out


def test_shards_that_overlap_are_named(done):
    code, out = done["overlapping"]
    assert code == 1, out
    assert (
        "the workers took 16 rows, one replica 16; 8 taken by several workers, 8 taken by no worker"
        in out
    )
    assert "the workers' shards overlap: in step 1" in " ".join(out.split())
