"""Test snapshots and claims in an object store, in memory; tests/engines has real servers."""

import numpy as np
import pytest

from tests.memory_store import memory_s3
from tfdist.backup import claim, shards
from tfdist.backup.claim import Superseded
from tfdist.backup.snapshot import Snapshot
from tfdist.backup.store import Store
from tfdist.storage import files

URL = "s3://bucket/run"
STATE = Snapshot({"x": np.arange(5.0)}, {"epoch": 1})


@pytest.fixture(autouse=True)
def store():
    with memory_s3():
        yield


def test_newest_snapshots_are_kept():
    store = Store(URL, keep=2)
    store.claim()
    for number in range(4):
        store.write(Snapshot(STATE.arrays, {"epoch": number}))
    assert store.numbers() == [2, 3]
    np.testing.assert_array_equal(store.newest().snapshot.arrays["x"], STATE.arrays["x"])
    files.write_whole(store.path(3), files.read(store.path(3))[:-1])
    assert store.newest().snapshot.facts == {"epoch": 2}
    store.clear()
    assert not files.exists(URL)


def test_rows_of_sharded_variables_are_read_in_slices():
    store = Store(URL)
    whole = np.arange(24.0).reshape(4, 6)
    paths = [store.rows_path(0, "a", rank, 2) for rank in range(2)]
    for rank, path in enumerate(paths):
        rows = whole[2 * rank : 2 * rank + 2]
        store.write_rows(path, Snapshot({"v": rows}, {"first": 2 * rank}))
    store.write(Snapshot({}, {"rows": [path.rpartition("/")[2] for path in paths]}))
    pieces = store.pieces(store.newest().snapshot)
    found = shards.rows(pieces("v"), whole.shape, np.float64, replicas=8, first=3, count=2)
    np.testing.assert_array_equal(found, whole.reshape(8, -1)[3:5])


def test_claims_are_numbered_and_the_highest_writes():
    first, second = Store(URL), Store(URL)
    first.claim()
    second.claim()
    with pytest.raises(Superseded, match="another one is: process"):
        first.write(STATE)
    second.write(STATE)
    for _ in range(3):
        Store(URL).claim()
    assert claim.names(URL)[1:] == ["writer-000004.json", "writer-000005.json"]


def test_a_claim_that_came_too_late_is_judged_again(monkeypatch):
    Store(URL).claim("a", 0)
    create = files.create

    def overtaken(path, content):
        monkeypatch.setattr(files, "create", create)
        Store(URL).claim("a", 2)
        create(path, content)

    monkeypatch.setattr(files, "create", overtaken)
    with pytest.raises(Superseded, match="because attempt 2 does"):
        Store(URL).claim("a", 1)


def test_a_number_that_was_used_before_is_not_the_highest(monkeypatch):
    """A process may sleep so long that the claim after its own was made and removed."""
    Store(URL).claim()
    create = files.create

    def overtaken(path, content):
        monkeypatch.setattr(files, "create", create)
        for _ in range(3):
            Store(URL).claim()
        create(path, content)

    monkeypatch.setattr(files, "create", overtaken)
    store = Store(URL)
    store.claim()
    store.write(STATE)
    assert claim.names(URL)[-1] == "writer-000005.json"


def test_a_damaged_claim_names_no_writer(caplog):
    store = Store(URL)
    store.claim()
    files.write_whole(f"{URL}/writer-000001.json", b"{")
    with pytest.raises(Superseded, match="removed or damaged"):
        store.write(STATE)
    assert "writer-000001.json: damaged" in caplog.text
    store.claim()
    store.write(STATE)
