"""Test that a snapshot comes back as it was, or not at all.

Whatever a killed writer leaves behind, the store finds the newest whole snapshot.
"""

import base64
import os
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import processes
from tests.forkserver import Popen
from tests.processes import ROOT, environment
from tfdist.backup import claim, shards
from tfdist.backup.claim import Superseded
from tfdist.backup.snapshot import MAGIC, Damaged, Snapshot, pack, unpack
from tfdist.backup.store import Store

STATE = Snapshot(
    {
        "a": np.arange(6.0).reshape(2, 3),
        "b": np.array(7, np.int64),
        "empty": np.zeros([0, 4], np.float32),
    },
    {"epoch": 3, "history": {"loss": [0.5, 0.25]}},
)


def packed(snapshot=STATE):
    return b"".join(pack(snapshot))


def same(actual, expected):
    assert actual.facts == expected.facts
    assert list(actual.arrays) == list(expected.arrays)
    for name, array in expected.arrays.items():
        assert actual.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(actual.arrays[name], array)


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "bfloat16", "int8", "uint64", "bool", "complex64"]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_arrays_of_all_kinds_come_back(dtype, shape):
    array = np.ones(shape).astype(tf.as_dtype(dtype).as_numpy_dtype)
    same(
        unpack(packed(Snapshot({"x": array, "turned": array.T}, {})), "f"),
        Snapshot({"x": array, "turned": array.T}, {}),
    )


# --- Damage ---------------------------------------------------------------------------------------
def test_every_flipped_bit_is_detected():
    content = packed()
    for offset in range(len(content)):
        for bit in (0, 7):
            flipped = bytearray(content)
            flipped[offset] ^= 1 << bit
            with pytest.raises(Damaged, match=r"^here: "):
                unpack(bytes(flipped), "here")


def test_every_truncation_is_detected():
    content = packed()
    for length in range(len(content)):
        with pytest.raises(Damaged):
            unpack(content[:length], "here")
    with pytest.raises(Damaged):
        unpack(content + b"\0", "here")


@given(st.integers(0, 400), st.integers(1, 400))
@settings(max_examples=50, deadline=None)
def test_mixture_of_two_snapshots_is_detected(begin, length):
    one = packed()
    other = packed(
        Snapshot({k: v + 1 for k, v in STATE.arrays.items()}, {**STATE.facts, "epoch": 4})
    )
    mixed = one[:begin] + other[begin : begin + length] + one[begin + length :]
    if mixed in (one, other):
        return
    with pytest.raises(Damaged):
        unpack(mixed, "here")


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_random_bytes_are_detected(content):
    for begin in (b"", MAGIC):
        with pytest.raises(Damaged):
            unpack(begin + content, "here")


# A file that tfdist 0.1.0 wrote; docs/versions.md promises that later versions read it.
OF_0_1_0 = base64.b64decode(
    "dGZkaXN0IHNuYXBzaG90Cp8AAAAAAAAAeyJ2ZXJzaW9uIjogMSwgImFycmF5cyI6IFtbImEiLCAiZmxvYXQ2NCIsIF"
    "syLCAzXV0sIFsiYiIsICJpbnQ2NCIsIFtdXSwgWyJlbXB0eSIsICJmbG9hdDMyIiwgWzAsIDRdXV0sICJmYWN0cyI6"
    "IHsiZXBvY2giOiAzLCAiaGlzdG9yeSI6IHsibG9zcyI6IFswLjUsIDAuMjVdfX19AAAAAAAAAAAAAAAAAADwPwAAAA"
    "AAAABAAAAAAAAACEAAAAAAAAAQQAAAAAAAABRABwAAAAAAAAD4B1SD"
)


def test_files_of_earlier_versions_can_be_read():
    same(unpack(OF_0_1_0, "f"), STATE)


def test_another_format_version_is_not_called_damage(monkeypatch):
    monkeypatch.setattr("tfdist.backup.snapshot.VERSION", 2)
    content = packed()
    monkeypatch.undo()
    with pytest.raises(
        ValueError, match=r"here: expected a snapshot of version 1, received one of version 2"
    ) as caught:
        unpack(content, "here")
    assert not isinstance(caught.value, Damaged)


# --- A directory ----------------------------------------------------------------------------------
def epoch(number):
    return Snapshot(STATE.arrays, {"epoch": number})


@pytest.mark.parametrize("location", ["{}/a/b", "ram://{}"])
def test_newest_snapshots_are_kept(tmp_path, location):
    store = Store(location.format(tmp_path), keep=3)
    assert store.newest() is None
    for number in range(5):
        store.write(epoch(number))
        same(store.newest().snapshot, epoch(number))
    assert store.numbers() == [2, 3, 4]
    same(Store(store.directory).newest().snapshot, epoch(4))
    store.clear()
    assert store.numbers() == []
    assert not tf.io.gfile.exists(store.directory)


@pytest.mark.parametrize(
    "harm", [lambda c: c[:-40], lambda c: b"", lambda c: c[:90] + b"x" + c[91:]]
)
def test_damaged_snapshot_is_named_and_skipped(tmp_path, harm, caplog):
    store = Store(tmp_path)
    for number in range(2):
        store.write(epoch(number))
    path = tmp_path / "snapshot-1.tfdist"
    path.write_bytes(harm(path.read_bytes()))
    same(store.newest().snapshot, epoch(0))
    assert str(path) in caplog.text
    store.write(epoch(2))
    same(store.newest().snapshot, epoch(2))
    for number in (1, 2):
        (tmp_path / f"snapshot-{number}.tfdist").write_bytes(b"")
    with pytest.raises(Damaged, match=r"none of its 2 snapshots can be read.*remove the directory"):
        store.newest()


@pytest.mark.parametrize("location", ["{}", "ram://{}"])
def test_only_requested_rows_are_read(tmp_path, location):
    store = Store(location.format(tmp_path))
    whole = np.arange(2**21, dtype=np.float32).reshape(4, -1)  # 8 MiB
    paths = [store.rows_path(0, "a", rank, 2) for rank in range(2)]
    for rank, path in enumerate(paths):
        store.write_rows(
            path,
            Snapshot({"v": whole[2 * rank : 2 * rank + 2], "more": whole[:1]}, {"first": 2 * rank}),
        )
    store.write(Snapshot({}, {"rows": [os.path.basename(path) for path in paths]}))
    tracemalloc.start()
    try:
        pieces = store.pieces(store.newest().snapshot)
        rows = shards.rows(pieces("v"), whole.shape, np.float32, replicas=16, first=7, count=2)
        assert (
            tracemalloc.get_traced_memory()[1] < 5 * 2**20
        )  # 1 MiB of numbers, and pieces of 1 MiB
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(rows, whole.reshape(16, -1)[7:9])  # of both files


def test_files_of_others_stay(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "snapshot-7.tfdist.part").write_bytes(b"half")
    store = Store(tmp_path)
    assert store.newest() is None
    store.sweep()
    store.write(epoch(0))
    store.clear()
    assert os.listdir(tmp_path) == ["mine.txt"]


def test_unwritable_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OSError, match=r"file/snapshot-0.tfdist: cannot be written: .*Expected a writable directory"
    ):
        Store(tmp_path / "file").write(epoch(0))


def test_full_disk_keeps_earlier_snapshots(tmp_path):
    code = (
        "import resource, signal, sys, numpy as np\n"
        "from tfdist.backup.snapshot import Snapshot\n"
        "from tfdist.backup.store import Store\n"
        "store = Store(sys.argv[1])\n"
        "store.write(Snapshot({}, {'epoch': 0}))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "store.write(Snapshot({'x': np.zeros(100_000)}, {'epoch': 1}))\n"
    )
    ended = processes.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=environment())
    assert "OSError" in ended.stderr
    assert "cannot be written" in ended.stderr
    assert os.listdir(tmp_path) == ["snapshot-0.tfdist"]
    assert Store(tmp_path).newest().snapshot.facts == {"epoch": 0}


def test_writer_killed_at_any_moment_leaves_whole_snapshots(tmp_path):
    code = (
        "import sys, numpy as np\n"
        "from tfdist.backup.snapshot import Snapshot\n"
        "from tfdist.backup.store import Store\n"
        "store = Store(sys.argv[1])\n"
        "store.sweep()\n"
        "found = store.newest()\n"
        "n = found.snapshot.facts['n'] if found else 0\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    n += 1\n"
        "    store.write(Snapshot({'x': np.full(200_000, n)}, {'n': n}))\n"
    )
    before = 0
    for wait in (0.02, 0.11):
        with Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        ) as writer:
            assert writer.stdout.readline() == "ready\n"
            time.sleep(wait)
            writer.send_signal(signal.SIGKILL)
        newest = Store(tmp_path).newest()
        if newest is not None:
            snapshot = newest.snapshot
            assert snapshot.facts["n"] >= before
            assert (snapshot.arrays["x"] == snapshot.facts["n"]).all()
            before = snapshot.facts["n"]
    assert len([name for name in os.listdir(tmp_path) if name.endswith(".part")]) <= 1


# --- The writer -----------------------------------------------------------------------------------
@pytest.mark.parametrize("location", ["{}", "ram://{}"])
def test_the_last_to_claim_a_directory_is_the_only_writer(tmp_path, location):
    first, second = (Store(location.format(tmp_path)) for _ in range(2))
    first.claim()
    first.write(epoch(0))
    second.claim()
    with pytest.raises(
        Superseded,
        match=rf"another one is: process {os.getpid()} on .*, since \d+-.*end this process",
    ):
        first.write(epoch(1))
    with pytest.raises(Superseded):
        first.clear()
    assert sorted(tf.io.gfile.listdir(second.directory)) == ["snapshot-0.tfdist", "writer.json"]
    assert second.write(epoch(2)) == 1
    assert Store(second.directory).write(epoch(3)) == 2  # one that never claimed it
    second.clear()
    assert not tf.io.gfile.exists(second.directory)


def test_an_attempt_that_was_given_up_cannot_take_over(tmp_path):
    for launch, attempt in (("a", 1), ("a", 1), ("a", 2), ("", 0), ("b", 0), ("a", 0), ("a", 1)):
        Store(tmp_path).claim(launch, attempt)
    with pytest.raises(
        Superseded,
        match="attempt 0 of the launch a may no longer write there, because attempt 1 does",
    ):
        Store(tmp_path).claim("a", 0)


def test_writer_without_its_claim_stops(tmp_path):
    store = Store(tmp_path)
    store.claim()
    (tmp_path / "writer.json").write_text("{")
    with pytest.raises(Superseded, match="no longer its writer"):
        store.write(epoch(0))
    assert os.listdir(tmp_path) == ["writer.json"]


def test_a_damaged_claim_names_no_writer(tmp_path, caplog):
    """A changed number would let an attempt that was given up write again."""
    Store(tmp_path).claim("a", 3)
    path = tmp_path / "writer.json"
    for damaged in (
        path.read_bytes().replace(b'"attempt": 3', b'"attempt": 1'),
        path.read_bytes().replace(b'"attempt": 3', b'"attempt": "three"'),
        b"\xff{}",
        b"null",
        b"[" * 10_000,
    ):
        path.write_bytes(damaged)
        assert claim.holder(str(tmp_path)) is None
        assert f"{path}: damaged" in caplog.messages.pop()


def test_directory_that_cannot_be_claimed_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OSError, match=r"file/writer.json: cannot be written: .*Expected a writable directory"
    ):
        Store(tmp_path / "file").claim()
