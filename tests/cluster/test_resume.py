"""A training that is killed in the middle of an epoch goes on with more workers, as if undisturbed."""

import pickle

import numpy as np
import pytest

from tests.cluster.scripts.resumed import BATCH, EPOCHS, EXAMPLES
from tests.processes import PYTHON, ROOT, group, workers

SCRIPT = str(ROOT / "tests" / "cluster" / "scripts" / "resumed.py")
SECONDS = 200  # for one attempt: some ten on an idle machine
pytestmark = pytest.mark.timeout(6 * SECONDS)


def attempt(root, backup, count, *where):
    """What each worker of an attempt ended with."""
    out = root / f"{backup}-{count}{'-'.join(where)}"
    out.mkdir()
    with group(out) as members:
        workers(members, count, [PYTHON, SCRIPT, str(root / backup), str(out / "{index}.pickle"), *where])
        if where:
            assert -9 in members.wait(SECONDS).values()
        else:
            members.succeed(SECONDS)
    return [pickle.loads(file.read_bytes()) for file in sorted(out.glob("*.pickle"))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return attempt(tmp_path_factory.mktemp("whole"), "backup", 1)[0]


@pytest.mark.parametrize(("before", "after", "where"), [(2, 3, (1, 4))])
def test_it_ends_as_if_undisturbed(tmp_path, undisturbed, before, after, where):
    assert attempt(tmp_path, "backup", before, *map(str, where)) == []
    assert any(name.name.startswith("snapshot-") for name in (tmp_path / "backup").iterdir())
    results = attempt(tmp_path, "backup", after)
    assert len(results) == after
    for found in results:
        assert found["iterations"] == undisturbed["iterations"] == EPOCHS * -(-EXAMPLES // BATCH)
        assert found["best"] == pytest.approx(undisturbed["best"], rel=1e-5)
        for name, values in undisturbed["history"].items():
            np.testing.assert_allclose(found["history"][name], values, rtol=1e-5, err_msg=name)
        for a, b in zip(found["weights"], undisturbed["weights"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert not (tmp_path / "backup").exists()
