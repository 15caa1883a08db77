"""Test that a training killed in the middle of an epoch goes on with more workers.

It goes on as if undisturbed.
"""

import pickle
import shutil

import numpy as np
import pytest

from tests.cluster.scripts.resumed import BATCH, EPOCHS, EXAMPLES
from tests.processes import PYTHON, ROOT, group, workers
from tfdist.backup import result
from tfdist.backup.store import Store
from tfdist.runtime.launch_protocol import CHAOS, LOG_DIR

SCRIPT = str(ROOT / "tests" / "cluster" / "scripts" / "resumed.py")
TIMEOUT_S = 200  # for one attempt: some ten on an idle machine
pytestmark = pytest.mark.timeout(6 * TIMEOUT_S)


def attempt(root, backup, count, *where, how="whole", **environ):
    """Run an attempt, and return the result of each worker."""
    out = root / f"{backup}-{count}{'-'.join(where)}"
    out.mkdir()
    with group(out) as members:
        workers(
            members,
            count,
            [PYTHON, SCRIPT, str(root / backup), str(out / "{index}.pickle"), how, *where],
            **environ,
        )
        if where:
            assert -9 in members.wait(TIMEOUT_S).values()
        else:
            members.succeed(TIMEOUT_S)
    return [pickle.loads(file.read_bytes()) for file in sorted(out.glob("*.pickle"))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return attempt(tmp_path_factory.mktemp("whole"), "backup", 1)[0]


@pytest.mark.parametrize(("before", "after", "where"), [(2, 3, (1, 4))])
def test_results_equal_those_of_an_undisturbed_run(tmp_path, undisturbed, before, after, where):
    assert attempt(tmp_path, "backup", before, *map(str, where)) == []
    assert any(name.name.startswith("snapshot-") for name in (tmp_path / "backup").iterdir())
    equal(attempt(tmp_path, "backup", after), after, undisturbed)
    assert not (tmp_path / "backup").exists()


def test_sharded_weights_resume_with_any_number_of_workers(tmp_path, undisturbed):
    assert attempt(tmp_path, "two", 2, "1", "4", how="sharded") == []
    store = Store(tmp_path / "two")
    newest = store.newest()
    assert newest.snapshot.facts["epoch"] == 1
    assert not any(
        key.startswith("model/") and array.size > 1 for key, array in newest.snapshot.arrays.items()
    )
    names = newest.snapshot.facts["rows"]
    assert [name.split(".")[2] for name in names] == ["0-of-2", "1-of-2"]
    for rank, name in enumerate(names):
        rows = store.read(str(tmp_path / "two" / name))
        assert (rows.facts["first"], rows.arrays["model/0"].shape) == (
            rank,
            (1, 15),
        )  # of a kernel of 5 times 6
    shutil.copytree(tmp_path / "two", tmp_path / "three")
    for backup, count in (("two", 2), ("three", 3)):
        results = attempt(
            tmp_path, backup, count, how="sharded", **{CHAOS: "", LOG_DIR: str(tmp_path)}
        )
        equal(results, count, undisturbed)
        assert not (tmp_path / backup).exists()
        arrays = result.read(str(tmp_path)).arrays  # with which `tfdist launch --chaos` compares
        for index, weight in enumerate(results[0]["weights"]):
            np.testing.assert_array_equal(arrays[f"model/{index}"], weight)
        assert [array.shape for key, array in arrays.items() if key.startswith("optimizer/")][
            2:4
        ] == [(5, 6), (5, 6)]  # Adam's slots


def test_local_steps_resume(tmp_path):
    """The weights of two workers differ when the first of them is killed."""
    whole = attempt(tmp_path, "whole", 2, how="diloco")
    assert attempt(tmp_path, "backup", 2, "1", "4", how="diloco") == []
    resumed = attempt(tmp_path, "backup", 2, how="diloco")
    for of_worker in (whole[1], *resumed):
        for a, b in zip(of_worker["weights"], whole[0]["weights"], strict=True):
            np.testing.assert_array_equal(a, b)


def equal(results, workers, undisturbed):
    """Check that all workers have the results of an undisturbed one."""
    assert len(results) == workers
    for of_worker in results:
        assert (
            of_worker["iterations"] == undisturbed["iterations"] == EPOCHS * -(-EXAMPLES // BATCH)
        )
        assert of_worker["best"] == pytest.approx(undisturbed["best"], rel=1e-5)
        for name, values in undisturbed["history"].items():
            np.testing.assert_allclose(of_worker["history"][name], values, rtol=1e-5, err_msg=name)
        for a, b in zip(of_worker["weights"], undisturbed["weights"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
